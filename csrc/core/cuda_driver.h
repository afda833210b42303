#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <string>

namespace cudnn_autotune {

// The driver, which torch has loaded: linking it would bind this library to a machine with a GPU.
// It compiles the tiny kernels of our own from PTX, so that no CUDA compiler is needed to build.

// Loads kernels, PTX without its header, in the current device's context; null where the driver
// does not take them, or is not here. Modules live as long as their context does: never freed.
CUmodule load_ptx(const std::string& kernels);
// Null where the module has no such kernel.
CUfunction kernel_of(CUmodule module, const char* name);
// Enqueues `blocks` blocks of one thread.
CUresult launch(CUfunction kernel, unsigned blocks, cudaStream_t stream, void** arguments);

}  // namespace cudnn_autotune
