#pragma once

#include <cudnn_frontend.h>

#include <string>
#include <vector>

#include "core/cudnn/candidate.h"
#include "core/cudnn/engine_config.h"
#include "core/problem/conv_problem.h"

// What cuDNN says of an engine config, which it gives as a descriptor. All throw CudnnError, which
// names the problem.

namespace cudnn_autotune {

// The engine and its knobs. Whether it is unfused is not in the descriptor.
EngineConfig engine_config(const cudnn_frontend::ManagedOpaqueDescriptor& descriptor,
                           const ConvProblem& problem, bool is_unfused);

std::vector<std::string> behavior_notes(const cudnn_frontend::ManagedOpaqueDescriptor& descriptor,
                                        const ConvProblem& problem);

// `heuristic_mode` is the one that lists it, or "". Of which GPU it is the descriptor does not say.
Candidate described(const cudnn_frontend::ManagedOpaqueDescriptor& descriptor, EngineConfig config,
                    const ConvProblem& problem, const std::string& heuristic_mode);

}  // namespace cudnn_autotune
