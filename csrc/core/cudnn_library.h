#pragma once

#include <cudnn.h>

#include <cstdint>
#include <string>

namespace cudnn_autotune {

// The backend calls of the hot path, taken from the libcudnn that torch loaded.
struct CudnnBackend {
  decltype(&cudnnBackendCreateDescriptor) create = nullptr;
  decltype(&cudnnBackendDestroyDescriptor) destroy = nullptr;
  decltype(&cudnnBackendSetAttribute) set_attribute = nullptr;
  decltype(&cudnnBackendFinalize) finalize = nullptr;
  decltype(&cudnnBackendExecute) execute = nullptr;
  decltype(&cudnnGetErrorString) error_string = nullptr;
};

// Binds the frontend and this extension to the libcudnn and libcudart that torch has loaded.
// Called once, when the extension is imported. Throws std::runtime_error where torch brought
// no libcudnn.
void bind_cudnn_library();

const CudnnBackend& cudnn_backend();

// 91900 for 9.19.0.
int64_t cudnn_runtime_version();
std::string cudnn_frontend_version();

}  // namespace cudnn_autotune
