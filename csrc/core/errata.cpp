#include "core/errata.h"

#include <algorithm>
#include <array>

namespace cudnn_autotune {
namespace {

struct Erratum {
  int64_t cudnn_version;  // without its patch number: 919 for 9.19
  int64_t engine;
  ConvOp op;
  bool (*is_wrong)(const ConvProblem&);
};

// The engine uses the padding before also as the padding after (relative error 1.3 on an H200).
bool is_asymmetric(const ConvProblem& problem) {
  return problem.pre_padding != problem.post_padding;
}

// The engine rounds float32 operands, and has no note that says so (relative error 5e-4 on an
// H200).
bool is_exact(const ConvProblem& problem) {
  return problem.dtype == DataType::float32 && !problem.allow_tf32;
}

// With a bias, the engine's output is not finite if it has one place an image (on an H200).
bool is_one_place_with_epilogue(const ConvProblem& problem) {
  if (!problem.has_epilogue()) return false;
  for (int i = 0; i < problem.spatial_dims; ++i) {
    if (problem.output_size(i) != 1) return false;
  }
  return true;
}

// The engine ended in "misaligned address" on operands that are aligned to less than 16 bytes, in
// one of two runs on an H200.
bool is_hardly_aligned_float32(const ConvProblem& problem) {
  constexpr int kVectorBytes = 16;
  return problem.dtype == DataType::float32 &&
         std::min(problem.x_alignment, problem.y_alignment) < kVectorBytes;
}

constexpr std::array<Erratum, 5> kErrata{{
    {919, 1, ConvOp::wgrad, is_asymmetric},
    {919, 20, ConvOp::wgrad, is_asymmetric},
    {919, 17, ConvOp::wgrad, is_exact},
    {919, 67, ConvOp::wgrad, is_hardly_aligned_float32},
    {919, 52, ConvOp::fprop, is_one_place_with_epilogue},
}};

}  // namespace

bool is_known_wrong(const EngineConfig& config, const ConvProblem& problem, int64_t cudnn_version) {
  ConvProblem computed = problem;  // by the engine
  if (config.is_unfused) {
    computed.addends = 0;
    computed.activation = Activation::none;
  }
  return std::any_of(kErrata.begin(), kErrata.end(), [&](const Erratum& erratum) {
    return erratum.cudnn_version == cudnn_version / 100 && erratum.engine == config.engine &&
           erratum.op == problem.op && erratum.is_wrong(computed);
  });
}

}  // namespace cudnn_autotune
