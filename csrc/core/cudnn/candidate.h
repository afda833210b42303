#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/cudnn/engine_config.h"
#include "core/problem/conv_problem.h"

namespace cudnn_autotune {

// An engine config that cuDNN offers for a problem, and what cuDNN says of it.
struct Candidate {
  EngineConfig config;
  int64_t workspace_bytes = 0;
  std::vector<std::string> numerical_notes;  // without the prefix of cuDNN's enum: TENSOR_CORE
  std::vector<std::string> behavior_notes;
  std::string heuristic_mode;      // the first mode that lists it: "A", "B" or "FALLBACK"; or ""
  int64_t compute_capability = 0;  // of the GPU that it is offered on: 86 for 8.6
};

// Whether a config may be used. PyTorch's rules: deterministic if that is asked for, inputs not
// converted to a narrower type, no tensor cores for float32 without TF32, no sums in reduced
// precision where they are switched off. Besides, no erratum may say otherwise (errata.h), nor may
// it need more workspace than the limit (bytes; -1: no limit).
bool is_allowed(const Candidate& candidate, const ConvProblem& problem, int64_t workspace_limit);

}  // namespace cudnn_autotune
