#pragma once

#include <cstdint>

#include "core/conv_problem.h"
#include "core/engine_config.h"

namespace cudnn_autotune {

// Engines that were seen to compute something else than what was asked, by the cuDNN that they were
// seen with (90203 for 9.2.3; its patches count as one): found by
// tests/gpu/test_every_candidate.py. Of another version nothing is assumed: a number may stand for
// another engine there, or for one that was mended. A choice is checked all the same.
bool is_known_wrong(const EngineConfig& config, const ConvProblem& problem, int64_t cudnn_version);

}  // namespace cudnn_autotune
