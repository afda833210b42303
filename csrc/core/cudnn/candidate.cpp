#include "core/cudnn/candidate.h"

#include <algorithm>

#include "core/cudnn/cudnn_library.h"
#include "core/cudnn/errata.h"

namespace cudnn_autotune {

bool is_allowed(const Candidate& candidate, const ConvProblem& problem, int64_t workspace_limit) {
  const auto has = [&](const char* note) {
    const auto& notes = candidate.numerical_notes;
    return std::find(notes.begin(), notes.end(), note) != notes.end();
  };
  if (workspace_limit >= 0 && candidate.workspace_bytes > workspace_limit) return false;
  if (problem.deterministic && has("NONDETERMINISTIC")) return false;
  if (has("DOWN_CONVERT_INPUTS")) return false;
  if (is_known_wrong(candidate.config, problem, cudnn_runtime_version(),
                     candidate.compute_capability)) {
    return false;
  }
  if (!problem.allow_tf32() && has("TENSOR_CORE")) return false;
  return problem.allow_reduced_precision() || !has("REDUCED_PRECISION_REDUCTION");
}

}  // namespace cudnn_autotune
