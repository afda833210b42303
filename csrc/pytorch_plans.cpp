#include "pytorch_plans.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <vector>

#include "aten_conv.h"
#include "conv_layout.h"
#include "core/check.h"

namespace cudnn_autotune {
namespace {

// Channels of a group below which a batch of matrix products is not worth a try.
constexpr int64_t kLeastOfGroup = 8;

using SymInts = std::vector<c10::SymInt>;

template <typename Array>
SymInts leading(const Array& values, size_t count) {
  return {values.begin(), values.begin() + static_cast<std::ptrdiff_t>(count)};
}

std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::make_optional(tensor) : std::nullopt;
}

// Views a tensor of shape (N, C, spatial...) as a matrix of places and channels for each group, of
// shape (groups, N * pixels, C / groups).
at::Tensor as_matrices(const at::Tensor& tensor, int64_t groups, Layout layout) {
  const int64_t channels = tensor.size(1), rows = tensor.numel() / channels,
                own = channels / groups;
  return layout == Layout::channels_last
             ? tensor.as_strided({groups, rows, own}, {own, channels, 1})
             : tensor.as_strided({groups, rows, own}, {own * rows, 1, rows});
}

}  // namespace

at::Tensor AtenPlan::launch(const Operands& operands, void* /*workspace*/) {
  const auto& [x, w, y, bias, residual] = operands;
  const ConvProblem& problem = this->problem();
  // In a backward, autocast may be active. It must not cast: the tensors have the problem's dtype.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const size_t n = problem.spatial_dims;
  const SymInts stride = leading(problem.stride, n);
  const SymInts dilation = leading(problem.dilation, n);
  SymInts padding = leading(problem.pre_padding, n);
  if (problem.pre_padding != problem.post_padding) {
    const SymInts after = leading(problem.post_padding, n);
    padding.insert(padding.end(), after.begin(), after.end());
  }
  const c10::SymInt groups = problem.groups;
  switch (problem.op) {
    case ConvOp::fprop: {
      const auto result = aten_fused(x, w, optional(bias), optional(residual), stride, padding,
                                     dilation, groups, problem.activation());
      if (!problem.has_slices()) return result.contiguous(conv_memory_format(x, w));
      y.copy_(result);
      return {};
    }
    case ConvOp::dgrad:
      return aten_dgrad(y, w, x.sym_sizes(), stride, padding, dilation, groups)
          .contiguous(conv_memory_format(y, w));
    case ConvOp::wgrad:
      break;
  }
  return aten_wgrad(y, x, w.sym_sizes(), stride, padding, dilation, groups)
      .contiguous(conv_memory_format(y, x));
}

bool is_matmul(const ConvProblem& problem) {
  for (int d = 0; d < problem.spatial_dims; ++d) {
    if (problem.w[2 + d] != 1 || problem.stride[d] != 1 || problem.pre_padding[d] != 0 ||
        problem.post_padding[d] != 0) {
      return false;
    }
  }
  // A deterministic problem is left out, because cuBLAS is deterministic only under conditions of
  // its own.
  return (problem.groups == 1 || problem.w[1] >= kLeastOfGroup) &&
         (!problem.has_epilogue() || problem.has_only_bias()) && !problem.has_slices() &&
         (problem.layout == Layout::channels_last || problem.x[0] == 1) && !problem.deterministic &&
         (problem.dtype == DataType::float16 || problem.dtype == DataType::bfloat16);
}

MatmulPlan::MatmulPlan(const ConvProblem& problem) : Plan(problem, kMatmul) {
  if (!is_matmul(problem)) throw PlanError("no matrix product computes " + problem.text());
}

at::Tensor MatmulPlan::launch(const Operands& operands, void* /*workspace*/) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const ConvProblem& problem = this->problem();
  const int64_t groups = problem.groups, filters = operands.w.size(0) / groups;
  at::Tensor inputs = as_matrices(operands.x, groups, problem.layout);
  at::Tensor outputs = as_matrices(operands.y, groups, problem.layout);
  const int64_t channels = operands.w.size(1);
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
