#include "core/cuda_driver.h"

#include <dlfcn.h>

#include <mutex>
#include <unordered_map>

#include "core/check.h"
#include "core/symbols.h"

namespace cudnn_autotune {
namespace {

// sm_75 is the oldest architecture that CUDA 13 knows. The driver compiles for the one of this GPU.
constexpr const char* kHeader = ".version 7.0\n.target sm_75\n.address_size 64\n";

CudaDriver look_up() {
  CudaDriver driver;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return driver;
  bind_symbol(library, "cuModuleLoadData", driver.load_module);
  bind_symbol(library, "cuModuleGetFunction", driver.function_of_module);
  bind_symbol(library, "cuLibraryLoadData", driver.load_library);
  bind_symbol(library, "cuLibraryGetKernel", driver.kernel_of_library);
  bind_symbol(library, "cuKernelGetFunction", driver.function_of_kernel);
  bind_symbol(library, "cuFuncGetAttribute", driver.get_attribute);
  bind_symbol(library, "cuFuncSetAttribute", driver.set_attribute);
  bind_symbol(library, "cuFuncGetParamInfo", driver.parameter_info);
  bind_symbol(library, "cuLaunchKernel", driver.launch);
  bind_symbol(library, "cuThreadExchangeStreamCaptureMode", driver.exchange_capture_mode);
  bind_symbol(library, "cuGetErrorName", driver.error_name);
  bind_symbol(library, "cuGetErrorString", driver.error_string);
  return driver;
}

// The kernel in the current device's context. A library belongs to no context, so each cubin is
// loaded once. The caller holds a lock.
CUfunction function_of(const std::string& cubin, const std::string& name) {
  const CudaDriver& driver = cuda_driver();
  static auto* libraries = new std::unordered_map<std::string, CUlibrary>();
  CUlibrary& library = (*libraries)[cubin];
  if (library == nullptr) {
    check_driver(
        driver.load_library(&library, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
        "loading the cubin of " + name);
  }
  CUkernel kernel = nullptr;
  check_driver(driver.kernel_of_library(&kernel, library, name.c_str()), "finding " + name);
  CUfunction function = nullptr;
  check_driver(driver.function_of_kernel(&function, kernel), "loading " + name);
  return function;
}

void check_arguments(CUfunction function, const std::string& name,
                     const std::vector<size_t>& sizes) {
  const CudaDriver& driver = cuda_driver();
  if (driver.parameter_info == nullptr) return;
  std::vector<size_t> taken;
  size_t offset = 0;
  size_t size = 0;
  while (driver.parameter_info(function, taken.size(), &offset, &size) == CUDA_SUCCESS) {
    taken.push_back(size);
  }
  if (taken == sizes) return;
  const auto listed = [](const std::vector<size_t>& all) {
    std::string text = std::to_string(all.size()) + " arguments";
    for (size_t i = 0; i < all.size(); ++i) text += (i ? ", " : " of ") + std::to_string(all[i]);
    return text + (all.empty() ? "" : " bytes");
  };
  throw PlanError(name + " takes " + listed(taken) + ", got " + listed(sizes));
}

}  // namespace

const CudaDriver& cuda_driver() {
  static const CudaDriver driver = look_up();
  return driver;
}

bool RelaxedCapture::exchange() {
  const CudaDriver& driver = cuda_driver();
  return driver.exchange_capture_mode != nullptr &&
         driver.exchange_capture_mode(&mode_) == CUDA_SUCCESS;
}

void check_driver(CUresult status, const std::string& what) {
  if (status == CUDA_SUCCESS) return;
  const char* name = nullptr;
  const char* meaning = nullptr;
  cuda_driver().error_name(status, &name);
  cuda_driver().error_string(status, &meaning);
  throw PlanError(what + ": " + (name ? name : std::to_string(status)) + " (" +
                  (meaning ? meaning : "unknown to this driver") + ")");
}

CUmodule load_ptx(const std::string& kernels) {
  const CudaDriver& driver = cuda_driver();
  if (driver.load_module == nullptr || driver.function_of_module == nullptr ||
      driver.launch == nullptr) {
    return nullptr;
  }
  if (cudaFree(nullptr) != cudaSuccess) return nullptr;  // creates the context if there is none
  CUmodule module = nullptr;
  return driver.load_module(&module, (kHeader + kernels).c_str()) == CUDA_SUCCESS ? module
                                                                                  : nullptr;
}

CUfunction kernel_of(CUmodule module, const char* name) {
  CUfunction function = nullptr;
  if (module == nullptr) return nullptr;
  const CUresult status = cuda_driver().function_of_module(&function, module, name);
  return status == CUDA_SUCCESS ? function : nullptr;
}

CUresult launch(CUfunction kernel, unsigned blocks, cudaStream_t stream, void** arguments) {
  return cuda_driver().launch(kernel, blocks, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr);
}

CUfunction load_kernel(const std::string& cubin, const std::string& name, int shared_bytes,
                       const std::vector<size_t>& argument_sizes) {
  const CudaDriver& driver = cuda_driver();
  if (driver.function_of_kernel == nullptr) {
    throw PlanError("loading " + name + ": there is no driver of CUDA 12 or later");
  }
  if (cudaFree(nullptr) != cudaSuccess) {  // creates the context if there is none
    throw PlanError("loading " + name + ": there is no context on the current device");
  }
  static auto* mutex = new std::mutex();
  const std::lock_guard lock(*mutex);
  CUfunction function = function_of(cubin, name);
  check_arguments(function, name, argument_sizes);
  // Another plan may have asked for more. To ask for an attribute also loads the kernel, which a
  // driver would else do at the first launch, where it may wait for the GPU.
  constexpr auto kMostShared = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
  int most = 0;
  check_driver(driver.get_attribute(&most, kMostShared, function), "loading " + name);
  if (shared_bytes > most) {
    check_driver(
        driver.set_attribute(function, kMostShared, shared_bytes),
        "giving " + name + " " + std::to_string(shared_bytes) + " bytes of dynamic shared memory");
  }
  return function;
}

}  // namespace cudnn_autotune
