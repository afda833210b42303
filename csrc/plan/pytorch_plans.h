#pragma once

#include <ATen/core/Tensor.h>

#include "core/problem/conv_problem.h"
#include "plan/plan.h"

namespace cudnn_autotune {

// The plans that ATen runs. They throw c10::Error where ATen or cuBLAS refuse.

// The texts of PyTorch's own path, and of matrix products by cuBLAS.
constexpr const char* kOwnPath = "aten";
constexpr const char* kMatmul = "matmul";

// PyTorch's own path, which allocates its result. Where the problem has slices, it is copied into
// that of the output.
class OwnPathPlan final : public Plan {
 public:
  explicit OwnPathPlan(const ConvProblem& problem) : Plan(problem, kOwnPath) {}

  bool allocates_result() const override { return !problem().has_slices(); }
  at::Tensor launch(const Operands& operands, void* workspace) override;
};

// Whether a problem can be computed as a matrix product of tensors as they lie. Its kernel is as
// large as the input, without groups; or it is 1x1, without stride, and its layout is channels last
// or it has one image. It has no padding, no epilogue other than a bias, and no slices, and its
// dtype is a half type (in float32 cuBLAS obeys another TF32 switch than cuDNN).
bool is_matmul(const ConvProblem& problem);

class MatmulPlan final : public Plan {
 public:
  // Throws PlanError unless is_matmul(problem).
  explicit MatmulPlan(const ConvProblem& problem);

  at::Tensor launch(const Operands& operands, void* workspace) override;
};

}  // namespace cudnn_autotune
