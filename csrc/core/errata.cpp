#include "core/errata.h"

namespace cudnn_autotune {

bool is_known_wrong(const EngineConfig& config, const ConvProblem& problem) {
  if (problem.op != ConvOp::wgrad) return false;
  const bool asymmetric = problem.pre_padding != problem.post_padding;
  // cuDNN 9.19, H200: they pad after as they do before (relative error 1.3).
  if (asymmetric && (config.engine == 1 || config.engine == 20)) return true;
  // cuDNN 9.19, H200: without a note, it rounds float32 operands (relative error 5e-4, where TF32
  // was not allowed).
  return config.engine == 17 && problem.dtype == DataType::float32 && !problem.allow_tf32;
}

}  // namespace cudnn_autotune
