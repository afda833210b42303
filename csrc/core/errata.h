#pragma once

#include <cstdint>

#include "core/conv_problem.h"
#include "core/engine_config.h"

namespace cudnn_autotune {

// Whether an engine is known to compute a wrong result for a problem. The known ones were found by
// tests/gpu/test_every_candidate.py, each with one version of cuDNN (`cudnn_version` is 90203
// for 9.2.3; the patch number is ignored). For other versions nothing is assumed, because a number
// may stand for another engine there, or for one that was repaired. The output of a choice is
// checked in any case.
bool is_known_wrong(const EngineConfig& config, const ConvProblem& problem, int64_t cudnn_version);

}  // namespace cudnn_autotune
