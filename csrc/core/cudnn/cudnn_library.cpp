#include "core/cudnn/cudnn_library.h"

#include <cuda_runtime_api.h>
#include <cudnn_frontend.h>
#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>

#include "core/cuda/cuda_driver.h"

namespace cudnn_frontend {
// The frontend looks every symbol up in this handle (dynamic loading mode).
void* cudnn_dlhandle = nullptr;
}  // namespace cudnn_frontend

namespace cudnn_autotune {
namespace {

CudnnBackend backend;

template <typename Function>
void bind(Function& function, const char* name) {
  if (!bind_symbol(cudnn_frontend::cudnn_dlhandle, name, function)) {
    throw std::runtime_error(std::string("cudnn_autotune: torch's libcudnn has no symbol ") + name);
  }
}

// Makes the frontend use torch's CUDA runtime. By itself it tries libcudart.so.12 before .13 and
// keeps the first one that it finds, which on a machine with both may not be torch's. An
// environment variable names the one to use. The frontend reads it once, at its first CUDA call, so
// it is set for that call only, unless the user has set it.
void bind_cuda_runtime() {
  constexpr const char* variable = "CUDNN_FRONTEND_CUDART_LIB_NAME";
  const bool users_own = std::getenv(variable) != nullptr;
  if (!users_own) {
    const std::string name = "libcudart.so." + std::to_string(CUDART_VERSION / 1000);
    setenv(variable, name.c_str(), 0);
  }
  try {
    cudnn_frontend::detail::get_cuda_symbol(cudnn_frontend::detail::CudaLibrary::CUDART,
                                            "cudaEventCreate");
  } catch (...) {
    if (!users_own) unsetenv(variable);
    throw;
  }
  if (!users_own) unsetenv(variable);
}

}  // namespace

void bind_cudnn_library() {
  const std::string name = "libcudnn.so." + std::to_string(CUDNN_MAJOR);
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (handle == nullptr) {
    throw std::runtime_error("cudnn_autotune: torch has not loaded " + name +
                             ": this build needs a torch with cuDNN " +
                             std::to_string(CUDNN_MAJOR));
  }
  cudnn_frontend::cudnn_dlhandle = handle;
  bind(backend.create, "cudnnBackendCreateDescriptor");
  bind(backend.destroy, "cudnnBackendDestroyDescriptor");
  bind(backend.set_attribute, "cudnnBackendSetAttribute");
  bind(backend.finalize, "cudnnBackendFinalize");
  bind(backend.execute, "cudnnBackendExecute");
  bind(backend.error_string, "cudnnGetErrorString");
  bind_cuda_runtime();
}

const CudnnBackend& cudnn_backend() { return backend; }

int64_t cudnn_runtime_version() {
  return static_cast<int64_t>(cudnn_frontend::detail::get_backend_version());
}

std::string cudnn_frontend_version() {
  return std::to_string(CUDNN_FRONTEND_MAJOR_VERSION) + "." +
         std::to_string(CUDNN_FRONTEND_MINOR_VERSION) + "." +
         std::to_string(CUDNN_FRONTEND_PATCH_VERSION);
}

}  // namespace cudnn_autotune
