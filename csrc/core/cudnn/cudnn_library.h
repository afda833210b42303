#pragma once

#include <cudnn.h>

#include <cstdint>
#include <string>

namespace cudnn_autotune {

// The functions of cuDNN's backend that a launch calls, from the libcudnn that torch has loaded.
struct CudnnBackend {
  decltype(&cudnnBackendCreateDescriptor) create = nullptr;
  decltype(&cudnnBackendDestroyDescriptor) destroy = nullptr;
  decltype(&cudnnBackendSetAttribute) set_attribute = nullptr;
  decltype(&cudnnBackendFinalize) finalize = nullptr;
  decltype(&cudnnBackendExecute) execute = nullptr;
  decltype(&cudnnGetErrorString) error_string = nullptr;
};

// Binds the frontend and this extension to the libcudnn and libcudart that torch has loaded. It is
// called once, when the extension is imported. Throws std::runtime_error if torch has loaded no
// libcudnn of the major version that this extension was built with.
void bind_cudnn_library();

const CudnnBackend& cudnn_backend();

// The version of the loaded libcudnn: 91900 for 9.19.0.
int64_t cudnn_runtime_version();
// The version of the frontend's headers at build time, such as "1.28.0".
std::string cudnn_frontend_version();

}  // namespace cudnn_autotune
