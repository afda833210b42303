#include "plan/pytorch_plans.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/DimVector.h>

#include <optional>

#include "call/aten_conv.h"
#include "call/conv_layout.h"
#include "core/problem/check.h"

namespace cudnn_autotune {
namespace {

// Channels of a group below which a batch of matrix products is not worth a try.
constexpr int64_t kLeastOfGroup = 8;

std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::make_optional(tensor) : std::nullopt;
}

// Whether the kernel is as large as the input. Then tensors of either layout are matrices with a
// row for each image or filter.
bool covers_input(const ConvProblem& problem) {
  for (int d = 0; d < problem.spatial_dims; ++d) {
    if (problem.w[2 + d] != problem.x[2 + d]) return false;
  }
  return problem.groups == 1;
}

// Whether the kernel is 1x1 and meets every pixel, whose channels are rows of matrices.
bool is_pointwise(const ConvProblem& problem) {
  for (int d = 0; d < problem.spatial_dims; ++d) {
    if (problem.w[2 + d] != 1 || problem.stride[d] != 1) return false;
  }
  return (problem.groups == 1 || problem.w[1] >= kLeastOfGroup) &&
         (problem.layout == Layout::channels_last || problem.x[0] == 1);
}

// Views a dense tensor as a matrix for each group, of shape (groups, rows, columns). `by_rows` says
// whether rows of all groups lie one after the other in memory, or columns do.
at::Tensor as_matrices(const at::Tensor& tensor, int64_t groups, int64_t rows, bool by_rows) {
  const int64_t columns = tensor.numel() / rows, own = columns / groups;
  return by_rows ? tensor.as_strided({groups, rows, own}, {own, columns, 1})
                 : tensor.as_strided({groups, rows, own}, {own * rows, 1, rows});
}

}  // namespace

at::Tensor OwnPathPlan::launch(const Operands& operands, void* /*workspace*/) {
  const auto& [x, w, y, bias, residual, slope] = operands;
  const ConvProblem& problem = this->problem();
  // In a backward, autocast may be active. It must not cast: the tensors have the problem's dtype.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto list = [n = problem.spatial_dims](const auto& values) {
    return c10::DimVector(values.begin(), values.begin() + n);
  };
  const auto stride = list(problem.stride), dilation = list(problem.dilation);
  auto padding = list(problem.pre_padding);
  padding.append(problem.post_padding.begin(), problem.post_padding.begin() + padding.size());
  const ConvGeometry geometry{x.sizes(), w.sizes(), stride, padding, dilation, problem.groups};
  switch (problem.op) {
    case ConvOp::fprop: {
      const auto result = aten_fused(x, w, optional(bias), optional(residual), geometry,
                                     problem.activation(), optional(slope));
      if (!problem.has_slices()) return result.contiguous(conv_memory_format(x, w));
      y.copy_(result);
      return {};
    }
    case ConvOp::dgrad:
      return aten_dgrad(y, w, geometry).contiguous(conv_memory_format(y, w));
    case ConvOp::wgrad:
      break;
  }
  return aten_wgrad(y, x, geometry).contiguous(conv_memory_format(y, x));
}

bool is_matmul(const ConvProblem& problem) {
  for (int d = 0; d < problem.spatial_dims; ++d) {
    if (problem.pre_padding[d] != 0 || problem.post_padding[d] != 0) return false;
  }
  // A deterministic problem is left out, because cuBLAS is deterministic only under conditions of
  // its own.
  return (covers_input(problem) || is_pointwise(problem)) &&
         (!problem.has_epilogue() || problem.has_only_bias()) && !problem.has_slices() &&
         !problem.deterministic && problem.is_half();
}

MatmulPlan::MatmulPlan(const ConvProblem& problem) : Plan(problem, kMatmul) {
  if (!is_matmul(problem)) throw PlanError("no matrix product computes " + problem.text());
}

at::Tensor MatmulPlan::launch(const Operands& operands, void* /*workspace*/) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const ConvProblem& problem = this->problem();
  const int64_t groups = problem.groups, filters = operands.w.size(0) / groups;
  const bool is_covered = covers_input(problem);
  const bool by_rows = is_covered || problem.layout == Layout::channels_last;
  const int64_t rows = is_covered ? operands.x.size(0) : operands.x.numel() / operands.x.size(1);
  at::Tensor inputs = as_matrices(operands.x, groups, rows, by_rows);
  at::Tensor outputs = as_matrices(operands.y, groups, rows, by_rows);
  const int64_t channels = operands.w.numel() / operands.w.size(0);
  at::Tensor weights =
      operands.w.as_strided({groups, filters, channels}, {filters * channels, channels, 1});
  const bool is_one = groups == 1;  // cuBLAS adds a bias in the epilogue of one product
  const auto multiply = [is_one](at::Tensor& product, const at::Tensor& a, const at::Tensor& b) {
    if (is_one) {
      at::Tensor matrix = product[0];
      at::mm_out(matrix, a[0], b[0]);
    } else {
      at::bmm_out(product, a, b);
    }
  };
  switch (problem.op) {
    case ConvOp::fprop:
      if (!operands.bias.defined()) {
        multiply(outputs, inputs, weights.mT());
      } else if (is_one) {
        at::Tensor matrix = outputs[0];
        at::addmm_out(matrix, operands.bias, inputs[0], weights[0].t());
      } else {
        at::baddbmm_out(outputs, operands.bias.view({groups, 1, filters}), inputs, weights.mT());
      }
      break;
    case ConvOp::dgrad:
      multiply(inputs, outputs, weights);
      break;
    case ConvOp::wgrad:
      multiply(weights, outputs.mT(), inputs);
      break;
  }
  return {};
}

}  // namespace cudnn_autotune
