#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace cudnn_autotune {

// Points `function` at the function of this name in a library that is open, or at nothing if the
// library has none. Returns whether it has one.
template <typename Function>
bool bind_symbol(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

// Loads kernels with the CUDA driver, and launches them. The driver is looked up at run time,
// because a library linked to it could not be loaded on a machine without a GPU. Safe to call from
// several threads.

struct CudaDriver {
  // Null where there is no driver, or where it lacks the function.
  decltype(&cuModuleLoadData) load_module = nullptr;
  decltype(&cuModuleGetFunction) function_of_module = nullptr;
  decltype(&cuLibraryLoadData) load_library = nullptr;
  decltype(&cuLibraryUnload) unload_library = nullptr;
  decltype(&cuLibraryGetKernel) kernel_of_library = nullptr;
  decltype(&cuKernelGetFunction) function_of_kernel = nullptr;
  decltype(&cuFuncGetAttribute) get_attribute = nullptr;
  decltype(&cuFuncSetAttribute) set_attribute = nullptr;
  CUresult (*parameter_info)(CUfunction, size_t, size_t*,
                             size_t*) = nullptr;  // CUDA 12.4 and later
  decltype(&cuLaunchKernel) launch = nullptr;
  decltype(&cuLaunchKernelEx) launch_ex = nullptr;
  decltype(&cuTensorMapEncodeTiled) encode_tensor_map = nullptr;
  decltype(&cuThreadExchangeStreamCaptureMode) exchange_capture_mode = nullptr;
  decltype(&cuGetErrorName) error_name = nullptr;
  decltype(&cuGetErrorString) error_string = nullptr;
};
const CudaDriver& cuda_driver();

// As long as it lives, this thread may allocate memory, load and unload kernels, query and wait
// while any thread captures a graph. In CUDA's default mode such calls would break the capture.
// Does nothing where there is no GPU.
class RelaxedCapture {
 public:
  RelaxedCapture() : is_set_(exchange()) {}
  ~RelaxedCapture() {
    if (is_set_) exchange();
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  bool exchange();

  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;  // of this thread, before and after
  bool is_set_;  // false where CUDA was not in use: it may be by the end
};

// Whether a call of the CUDA runtime succeeded. Clears the error of one that failed, so that a
// later call does not report it.
inline bool went_well(cudaError_t status) {
  if (status == cudaSuccess) return true;
  static_cast<void>(cudaGetLastError());
  return false;
}

// Throws PlanError, with `what` and the driver's message, unless the status is CUDA_SUCCESS.
void check_driver(CUresult status, const std::string& what);

// Compiles this library's own small kernels, given as PTX without its header, for the current
// device: so no CUDA compiler is needed to build. Null if there is no driver, or if it does not
// take them.
CUmodule load_ptx(const std::string& kernels);
// Null if the module is null or has no such kernel.
CUfunction kernel_of(CUmodule module, const char* name);
// Enqueues `blocks` blocks of one thread each. `arguments` holds the addresses of the arguments.
CUresult launch(CUfunction kernel, unsigned blocks, cudaStream_t stream, void** arguments);

// A kernel that is loaded, and stays so as long as a copy of this lives.
struct LoadedKernel {
  CUfunction function = nullptr;
  std::shared_ptr<const void> library;
};

// Loads a kernel of a cubin for the current device, and lets its blocks have so much dynamic shared
// memory. A cubin that is loaded already is not loaded again. Throws PlanError where the driver
// refuses, and if the kernel takes arguments of other sizes, as drivers of CUDA 12.4 and later can
// tell.
LoadedKernel load_kernel(const std::string& cubin, const std::string& name, int shared_bytes,
                         const std::vector<size_t>& argument_sizes);

// How many cubins are loaded now. Up to kMostUnusedCubins are kept that nothing uses any more,
// those that were used last: a search drops the plans that lose, and a call may ask for one of them
// again.
constexpr size_t kMostUnusedCubins = 256;
size_t loaded_cubins();

}  // namespace cudnn_autotune
