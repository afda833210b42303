#pragma once

#include <cstdint>
#include <string>

#include "core/cudnn/engine_config.h"
#include "core/problem/conv_problem.h"

namespace cudnn_autotune {

// Whether an engine is known to compute a wrong result for a problem, to write behind it, or to
// leave the GPU in an error; or, where the problem asks for determinism, to differ from run to run.
// Most were found by tests/gpu/test_every_candidate.py (docs/findings/wrong-engines.md) with one
// version of cuDNN each. It is assumed that they are wrong from that version on, until one in which
// they were tried and found mended, and on every GPU unless they were seen on some only.
// (`cudnn_version` is 90203 for 9.2.3; the patch number is ignored. `compute_capability` is 86 for
// 8.6; 0 if it is not known.) A number may stand for another engine in a later version: then that
// is left out for these few problems too. The output of a choice is checked in any case.
bool is_known_wrong(const EngineConfig& config, const ConvProblem& problem, int64_t cudnn_version,
                    int64_t compute_capability);

// Whether it is known that cuDNN ends the process by an access to memory that is not there when it
// is asked for engines in a heuristic mode; `cudnn_version` is as above.
bool ends_the_process(const std::string& heuristic_mode, const ConvProblem& problem,
                      int64_t cudnn_version);

}  // namespace cudnn_autotune
