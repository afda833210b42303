#include "core/cuda/cuda_driver.h"

#include <dlfcn.h>

#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "core/problem/check.h"

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
  bind_symbol(library, "cuLibraryUnload", driver.unload_library);
  bind_symbol(library, "cuLibraryGetKernel", driver.kernel_of_library);
  bind_symbol(library, "cuKernelGetFunction", driver.function_of_kernel);
  bind_symbol(library, "cuFuncGetAttribute", driver.get_attribute);
  bind_symbol(library, "cuFuncSetAttribute", driver.set_attribute);
  bind_symbol(library, "cuFuncGetParamInfo", driver.parameter_info);
  bind_symbol(library, "cuLaunchKernel", driver.launch);
  bind_symbol(library, "cuLaunchKernelEx", driver.launch_ex);
  bind_symbol(library, "cuTensorMapEncodeTiled", driver.encode_tensor_map);
  bind_symbol(library, "cuThreadExchangeStreamCaptureMode", driver.exchange_capture_mode);
  bind_symbol(library, "cuGetErrorName", driver.error_name);
  bind_symbol(library, "cuGetErrorString", driver.error_string);
  return driver;
}

// The cubins that are loaded. A library belongs to no context, so each is loaded once for all
// devices.
class Libraries {
 public:
  struct Library {
    CUlibrary handle = nullptr;
    const std::string* cubin = nullptr;  // its key
    size_t users = 0;
    std::list<Library*>::iterator unused;  // its place in unused_, if it has no user
  };

  // It is never destroyed, because plans may be freed while the process exits.
  static Libraries& instance() {
    static auto* libraries = new Libraries();
    return *libraries;
  }

  // The caller of use() holds the lock. What use() returns must be destroyed without it.
  std::mutex& mutex() { return mutex_; }
  std::shared_ptr<const Library> use(const std::string& cubin, const std::string& name) {
    const auto [place, is_new] = libraries_.try_emplace(cubin);
    Library& library = place->second;
    if (is_new) {
      const CUresult status = cuda_driver().load_library(&library.handle, cubin.data(), nullptr,
                                                         nullptr, 0, nullptr, nullptr, 0);
      if (status != CUDA_SUCCESS) libraries_.erase(place);
      check_driver(status, "loading the cubin of " + name);
      library.cubin = &place->first;
    } else if (library.users == 0) {
      unused_.erase(library.unused);
    }
    ++library.users;
    return {&library, [this](Library* used) { give_back(*used); }};
  }

  size_t size() {
    const std::lock_guard lock(mutex_);
    return libraries_.size();
  }

 private:
  void give_back(Library& library) {
    const std::lock_guard lock(mutex_);
    if (--library.users > 0) return;
    library.unused = unused_.insert(unused_.end(), &library);
    if (unused_.size() <= kMostUnusedCubins) return;
    // The driver waits for kernels that still run, so half of all are unloaded at a time.
    const RelaxedCapture unloading;
    while (unused_.size() > kMostUnusedCubins / 2) {
      Library* oldest = unused_.front();
      unused_.pop_front();
      const auto unload = cuda_driver().unload_library;
      // As the process exits, the driver may have unloaded it already.
      if (unload != nullptr) static_cast<void>(unload(oldest->handle));
      libraries_.erase(libraries_.find(*oldest->cubin));
    }
  }

  std::mutex mutex_;
  // By cubin. References to elements stay valid.
  std::unordered_map<std::string, Library> libraries_;
  std::list<Library*> unused_;  // the oldest first
};

// The kernel in the current device's context.
CUfunction function_of(CUlibrary library, const std::string& name) {
  const CudaDriver& driver = cuda_driver();
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

LoadedKernel load_kernel(const std::string& cubin, const std::string& name, int shared_bytes,
                         const std::vector<size_t>& argument_sizes) {
  const CudaDriver& driver = cuda_driver();
  if (driver.function_of_kernel == nullptr) {
    throw PlanError("loading " + name + ": there is no driver of CUDA 12 or later");
  }
  if (cudaFree(nullptr) != cudaSuccess) {  // creates the context if there is none
    throw PlanError("loading " + name + ": there is no context on the current device");
  }
  Libraries& libraries = Libraries::instance();
  std::shared_ptr<const Libraries::Library> library;  // given back after the lock is free
  const std::lock_guard lock(libraries.mutex());
  library = libraries.use(cubin, name);
  CUfunction function = function_of(library->handle, name);
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
  return {function, std::move(library)};
}

size_t loaded_cubins() { return Libraries::instance().size(); }

}  // namespace cudnn_autotune
