#include "core/cudnn/errata.h"

#include <algorithm>
#include <array>
#include <limits>

namespace cudnn_autotune {
namespace {

// Versions of cuDNN are without their patch number: 919 is 9.19.
constexpr int64_t kNotKnown = std::numeric_limits<int64_t>::max();

enum class Fault { wrong, not_deterministic };

// The GPUs on which an erratum holds: 86 is compute capability 8.6.
struct Capabilities {
  int64_t first = 0;
  int64_t last = std::numeric_limits<int64_t>::max();
};

struct Erratum {
  int64_t seen_in;  // the earliest version in which it was seen
  int64_t engine;
  ConvOp op;
  bool (*is_of)(const ConvProblem&);  // whether it holds for a problem
  int64_t mended_in = kNotKnown;      // the earliest version in which it was tried and found mended
  Capabilities gpus = {};
  Fault fault = Fault::wrong;

  bool holds(int64_t version, int64_t capability) const {
    const bool is_version = seen_in <= version && version < mended_in;
    return is_version && gpus.first <= capability && capability <= gpus.last;
  }
  bool forbids(const ConvProblem& problem) const {
    return (fault == Fault::wrong || problem.deterministic) && op == problem.op && is_of(problem);
  }
};

bool is_any(const ConvProblem&) { return true; }

bool is_pointwise(const ConvProblem& problem) {
  return std::all_of(problem.w.begin() + 2, problem.w.begin() + problem.dims(),
                     [](int64_t width) { return width == 1; });
}

// The engine uses the padding before also as the padding after (relative error 1.3 on an H200).
// Engine 50 writes behind its result then.
bool is_asymmetric(const ConvProblem& problem) {
  return problem.pre_padding != problem.post_padding;
}

// As above, where the padding before is half of the kernel (on an H100); engines 5 and 6 write
// behind their result.
bool is_asymmetric_in_one_dimension(const ConvProblem& problem) {
  return problem.spatial_dims == 1 && is_asymmetric(problem);
}

// The engine rounds float32 operands, and has no note that says so (relative error 5e-4 on an
// H200).
bool is_exact(const ConvProblem& problem) { return !problem.allow_tf32(); }

// With a bias, the engine's output is not finite if it has one place an image (on an H200).
bool is_one_place_with_epilogue(const ConvProblem& problem) {
  if (!problem.has_epilogue()) return false;
  for (int i = 0; i < problem.spatial_dims; ++i) {
    if (problem.output_size(i) != 1) return false;
  }
  return true;
}

// The engine's output is not finite for bfloat16 and in TF32 (on an H200).
bool has_tanh(const ConvProblem& problem) {
  return problem.activation_kind == ActivationKind::tanh;
}

// The engine ended in "misaligned address" for many problems of which one tensor was aligned to
// less than this (on an H100).
bool is_hardly_aligned(const ConvProblem& problem) {
  constexpr int kVectorBytes = 16;
  return std::min({problem.x_alignment, problem.w_alignment, problem.y_alignment}) < kVectorBytes;
}

bool is_hardly_aligned_float32(const ConvProblem& problem) {
  return problem.dtype == DataType::float32 && is_hardly_aligned(problem);
}

// The engine computes two groups of four channels at once, and writes a group too many behind its
// result if their number is odd: where the result is in the order of channels_last, it has no room
// for it (on an H100).
bool has_odd_groups_of_four(const ConvProblem& problem) {
  return problem.groups % 2 == 1 && problem.groups > 1 && problem.w[1] == 4 &&
         problem.w[0] == int64_t{4} * problem.groups &&
         (problem.layout == Layout::channels_last || is_pointwise(problem));
}

// The engine copies contiguous tensors into its workspace, one behind the other, and reads one that
// begins at no multiple of 128 bytes from another place (relative error 1.4 on an H100).
bool is_copied_astray(const ConvProblem& problem) {
  constexpr int64_t kCopyBytes = 128;
  return problem.layout == Layout::channels_first &&
         problem.bytes_of(problem.output_shape()) % kCopyBytes != 0;
}

// The engine takes slices of channels for dense tensors (relative error 0.06 and more, or not
// finite, on an H200).
bool has_slices(const ConvProblem& problem) { return problem.has_slices(); }

// The engine is wrong with a stride of 9 or more (relative error 0.6 and more on an H200).
bool has_wide_stride(const ConvProblem& problem) {
  constexpr int32_t kMostStride = 8;
  const auto end = problem.stride.begin() + problem.spatial_dims;
  return std::any_of(problem.stride.begin(), end, [](int32_t s) { return s > kMostStride; });
}

constexpr std::array<Erratum, 25> kErrata{{
    {919, 0, ConvOp::fprop, has_tanh},
    {919, 1, ConvOp::wgrad, is_asymmetric},
    {919, 18, ConvOp::wgrad, is_asymmetric},
    {919, 20, ConvOp::wgrad, is_asymmetric},
    {919, 50, ConvOp::dgrad, is_asymmetric},
    {919, 5, ConvOp::fprop, is_asymmetric_in_one_dimension},
    {919, 6, ConvOp::dgrad, is_asymmetric_in_one_dimension},
    {919, 16, ConvOp::wgrad, is_asymmetric_in_one_dimension},
    {919, 17, ConvOp::wgrad, is_exact},
    {919, 52, ConvOp::fprop, is_one_place_with_epilogue},
    {919, 8, ConvOp::fprop, has_slices},
    {919, 4, ConvOp::fprop, has_wide_stride},
    {919, 53, ConvOp::fprop, has_wide_stride},
    {919, 70, ConvOp::wgrad, has_wide_stride},
    {919, 57, ConvOp::fprop, is_hardly_aligned},
    {919, 61, ConvOp::wgrad, is_hardly_aligned},
    {919, 62, ConvOp::dgrad, is_hardly_aligned},
    {919, 67, ConvOp::wgrad, is_hardly_aligned_float32},
    {919, 70, ConvOp::wgrad, is_copied_astray},
    {919, 78, ConvOp::dgrad, is_copied_astray},
    {919, 9, ConvOp::wgrad, has_odd_groups_of_four},
    {919, 10, ConvOp::wgrad, has_odd_groups_of_four},
    {919, 23, ConvOp::wgrad, has_odd_groups_of_four},
    {919, 30, ConvOp::wgrad, has_odd_groups_of_four},
    // Seen with 9.23.1; PyTorch leaves it out too (pull request 189207).
    {923, 5, ConvOp::fprop, is_any, 924, {86, 86}, Fault::not_deterministic},
}};

}  // namespace

bool is_known_wrong(const EngineConfig& config, const ConvProblem& problem, int64_t cudnn_version,
                    int64_t compute_capability) {
  ConvProblem computed = problem;  // by the engine
  if (config.is_unfused) {
    computed.addends = 0;
    computed.set_activation({});
  }
  return std::any_of(kErrata.begin(), kErrata.end(), [&](const Erratum& erratum) {
    return erratum.holds(cudnn_version / 100, compute_capability) &&
           erratum.engine == config.engine && erratum.forbids(computed);
  });
}

bool ends_the_process(const std::string& heuristic_mode, const ConvProblem& problem,
                      int64_t cudnn_version) {
  // Mode B of 9.24 answered for such problems with the properties of three GPUs.
  constexpr int64_t kSeenIn = 919;
  constexpr int64_t kMendedIn = 924;
  const int64_t version = cudnn_version / 100;
  const bool holds = kSeenIn <= version && version < kMendedIn;
  if (!holds || heuristic_mode != "B" || problem.op != ConvOp::wgrad) return false;
  // The output would have no place if the padding after were as that before.
  for (int i = 0; i < problem.spatial_dims; ++i) {
    const int64_t kernel = (problem.w[2 + i] - 1) * problem.dilation[i] + 1;
    if (problem.x[2 + i] + int64_t{2} * problem.pre_padding[i] < kernel) return true;
  }
  return false;
}

}  // namespace cudnn_autotune
