#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <string>

namespace cudnn_autotune {

// Compiles and launches this library's few small kernels with the CUDA driver. They are written in
// PTX, so that no CUDA compiler is needed to build. The driver is looked up at run time, because a
// library linked to it could not be loaded on a machine without a GPU. Safe to call from several
// threads.

// Compiles kernels, given as PTX without its header, for the current device. Null if there is no
// driver, or if it does not take them. The module is never unloaded.
CUmodule load_ptx(const std::string& kernels);
// Null if the module is null or has no such kernel.
CUfunction kernel_of(CUmodule module, const char* name);
// Enqueues `blocks` blocks of one thread each. `arguments` holds the addresses of the arguments.
CUresult launch(CUfunction kernel, unsigned blocks, cudaStream_t stream, void** arguments);

}  // namespace cudnn_autotune
