#pragma once

#include <string>
#include <utility>
#include <vector>

namespace cudnn_autotune {

// NVRTC, CUDA's compiler at run time. It is looked up when it is first needed: as torch has loaded
// it, else beside torch, else where the system has it. Safe to call from several threads.

// Its version, such as (13, 0). Throws PlanError if it is not found.
std::pair<int, int> nvrtc_version();

// Compiles CUDA C++ to a cubin. The source declares `function` as extern "C" __global__, and one of
// the options is the architecture of a GPU (`--gpu-architecture=sm_90`). Throws PlanError, with the
// compiler's log, if it does not compile.
std::string compile_kernel(const std::string& source, const std::string& function,
                           const std::vector<std::string>& options);

}  // namespace cudnn_autotune
