#include "core/cuda_driver.h"

#include <dlfcn.h>

namespace cudnn_autotune {
namespace {

// sm_75 is the oldest architecture that CUDA 13 knows. The driver compiles for the one of this GPU.
constexpr const char* kHeader = ".version 7.0\n.target sm_75\n.address_size 64\n";

struct Driver {
  decltype(&cuModuleLoadData) load = nullptr;
  decltype(&cuModuleGetFunction) function = nullptr;
  decltype(&cuLaunchKernel) launch = nullptr;

  static const Driver& instance() {
    static const Driver driver;
    return driver;
  }

 private:
  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return;
    load = reinterpret_cast<decltype(load)>(dlsym(library, "cuModuleLoadData"));
    function = reinterpret_cast<decltype(function)>(dlsym(library, "cuModuleGetFunction"));
    launch = reinterpret_cast<decltype(launch)>(dlsym(library, "cuLaunchKernel"));
  }
};

}  // namespace

CUmodule load_ptx(const std::string& kernels) {
  const Driver& driver = Driver::instance();
  if (driver.load == nullptr || driver.function == nullptr || driver.launch == nullptr) {
    return nullptr;
  }
  if (cudaFree(nullptr) != cudaSuccess) return nullptr;  // creates the context if there is none
  CUmodule module = nullptr;
  return driver.load(&module, (kHeader + kernels).c_str()) == CUDA_SUCCESS ? module : nullptr;
}

CUfunction kernel_of(CUmodule module, const char* name) {
  CUfunction function = nullptr;
  if (module == nullptr) return nullptr;
  return Driver::instance().function(&function, module, name) == CUDA_SUCCESS ? function : nullptr;
}

CUresult launch(CUfunction kernel, unsigned blocks, cudaStream_t stream, void** arguments) {
  return Driver::instance().launch(kernel, blocks, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr);
}

}  // namespace cudnn_autotune
