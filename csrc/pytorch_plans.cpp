#include "pytorch_plans.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <vector>

#include "aten_conv.h"
#include "conv_layout.h"
#include "core/check.h"

namespace cudnn_autotune {
namespace {

using SymInts = std::vector<c10::SymInt>;

template <typename Array>
SymInts leading(const Array& values, size_t count) {
  return {values.begin(), values.begin() + static_cast<std::ptrdiff_t>(count)};
}

std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::make_optional(tensor) : std::nullopt;
}

// Views a channels-last tensor of shape (N, C, spatial...) as a matrix of shape (N * pixels, C).
at::Tensor as_rows(const at::Tensor& tensor) {
  const int64_t channels = tensor.size(1);
  return tensor.as_strided({tensor.numel() / channels, channels}, {channels, 1});
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
    case ConvOp::fprop:
      return aten_fused(x, w, optional(bias), optional(residual), stride, padding, dilation, groups,
                        problem.activation())
          .contiguous(conv_memory_format(x, w));
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
  return problem.groups == 1 && (!problem.has_epilogue() || problem.has_only_bias()) &&
         problem.layout == Layout::channels_last && !problem.deterministic &&
         (problem.dtype == DataType::float16 || problem.dtype == DataType::bfloat16);
}

MatmulPlan::MatmulPlan(const ConvProblem& problem) : Plan(problem, kMatmul) {
  if (!is_matmul(problem)) throw PlanError("no matrix product computes " + problem.text());
}

at::Tensor MatmulPlan::launch(const Operands& operands, void* /*workspace*/) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  at::Tensor inputs = as_rows(operands.x);
  at::Tensor weights = as_rows(operands.w);
  at::Tensor outputs = as_rows(operands.y);
  switch (problem().op) {
    case ConvOp::fprop:
      if (operands.bias.defined()) {
        at::addmm_out(outputs, operands.bias, inputs, weights.t());
      } else {
        at::mm_out(outputs, inputs, weights.t());
      }
      break;
    case ConvOp::dgrad:
      at::mm_out(inputs, outputs, weights);
      break;
    case ConvOp::wgrad:
      at::mm_out(weights, outputs.t(), inputs);
      break;
  }
  return {};
}

}  // namespace cudnn_autotune
