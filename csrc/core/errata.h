#pragma once

#include "core/conv_problem.h"
#include "core/engine_config.h"

namespace cudnn_autotune {

// Engines that were seen to compute something else than what was asked, by cuDNN and GPU; found by
// tests/gpu/test_every_candidate.py. A choice is checked all the same.
bool is_known_wrong(const EngineConfig& config, const ConvProblem& problem);

}  // namespace cudnn_autotune
