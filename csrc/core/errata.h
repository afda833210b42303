#pragma once

#include <cstdint>
#include <string>

#include "core/conv_problem.h"
#include "core/engine_config.h"

namespace cudnn_autotune {

// Whether an engine is known to compute a wrong result for a problem, to write behind it, or to
// leave the GPU in an error. The known ones were found by tests/gpu/test_every_candidate.py
// (docs/findings/wrong-engines.md), each with one version of cuDNN (`cudnn_version` is 90203 for
// 9.2.3; the patch number is ignored). For other versions nothing is assumed, because a number may
// stand for another engine there, or for one that was repaired. The output of a choice is checked
// in any case.
bool is_known_wrong(const EngineConfig& config, const ConvProblem& problem, int64_t cudnn_version);

// Whether it is known that cuDNN ends the process by an access to memory that is not there when it
// is asked for engines in a heuristic mode; `cudnn_version` is as above.
bool ends_the_process(const std::string& heuristic_mode, const ConvProblem& problem,
                      int64_t cudnn_version);

}  // namespace cudnn_autotune
