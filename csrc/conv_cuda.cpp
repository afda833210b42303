#include <ATen/Context.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>

#include "aten_conv.h"
#include "conv_geometry.h"
#include "conv_layout.h"
#include "conv_ops.h"
#include "engine_dispatch.h"
#include "fallback_counts.h"
#include "settings.h"
#include "torch_bridge.h"

namespace cudnn_autotune {
namespace {

// Why cuDNN is not asked at all; null where it is.
const char* why_not_cudnn(const at::Tensor& a, const at::Tensor& b, const ConvGeometry& geometry) {
  if (!at::globalContext().userEnabledCuDNN()) return "torch.backends.cudnn.enabled is False";
  if (!data_type(a.scalar_type())) return "a dtype that cuDNN has no convolution for";
  // First: the output's extent would overflow with them.
  if (!geometry.fits_int32()) return "a stride, padding, dilation or group count of 2**31 or more";
  if (a.scalar_type() != b.scalar_type() || a.device() != b.device() || !geometry.is_valid()) {
    return "arguments that PyTorch refuses, or takes in a way of its own";
  }
  const auto is_empty = [](at::IntArrayRef size) {
    return std::find(size.begin(), size.end(), 0) != size.end();
  };
  if (is_empty(geometry.input_size) || is_empty(geometry.weight_size)) {
    return "a tensor without elements";
  }
  if (!geometry.products_fit_int32()) {
    return "2**31 or more of a tensor's elements, of a padded dimension, or of stride times "
           "dilation";
  }
  return nullptr;
}

bool bias_fits(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  return bias.dim() == 1 && bias.size(0) == weight.size(0) &&
         bias.scalar_type() == input.scalar_type() && bias.device() == input.device();
}

// One of the forward's three tensors: an operand, or the result, which is allocated when an engine
// is to write it.
struct Part {
  const at::Tensor* given = nullptr;  // null: the result
  at::IntArrayRef size = {};

  // Memory that the caching allocator gives anew is aligned to more than is looked at.
  uint8_t alignment_in(at::MemoryFormat format) const {
    return given != nullptr && given->is_contiguous(format) ? alignment(*given) : kMostAligned;
  }
  // at::empty would fill the result under deterministic algorithms, for which no engine needs it.
  at::Tensor in(at::MemoryFormat format, const at::Tensor& like) const {
    if (given != nullptr) return given->contiguous(format);
    return at::Tensor(at::detail::empty_cuda(size, like.options().memory_format(format)));
  }
};

// The result by the chosen engine; undefined where ATen is the choice.
at::Tensor run(ConvOp op, const Part& x, const Part& w, const Part& y, at::MemoryFormat format,
               const ConvGeometry& geometry, std::string_view sampling, int64_t workspace_limit) {
  const at::Tensor& like = *(op == ConvOp::fprop ? x : y).given;
  TuneRequest request;
  ConvProblem& problem = request.key.problem;
  const size_t n = geometry.spatial_dims();
  for (size_t d = 0; d < n + 2; ++d) {
    problem.x[d] = geometry.input_size[d];
    problem.w[d] = geometry.weight_size[d];
  }
  for (size_t d = 0; d < n; ++d) {
    problem.pre_padding[d] = static_cast<int32_t>(geometry.pre_padding(d));
    problem.post_padding[d] = static_cast<int32_t>(geometry.post_padding(d));
    problem.stride[d] = static_cast<int32_t>(geometry.stride[d]);
    problem.dilation[d] = static_cast<int32_t>(geometry.dilation_of(d));
  }
  problem.groups = static_cast<int32_t>(geometry.groups);
  problem.spatial_dims = static_cast<uint8_t>(n);
  problem.op = op;
  problem.dtype = *data_type(like.scalar_type());
  problem.layout =
      format == at::MemoryFormat::Contiguous ? Layout::channels_first : Layout::channels_last;
  const GlobalFlags flags = global_flags(problem.dtype);
  problem.deterministic = flags.deterministic;
  problem.allow_tf32 = flags.allow_tf32;
  problem.allow_reduced_precision = flags.allow_reduced_precision;
  problem.x_alignment = x.alignment_in(format);
  problem.w_alignment = w.alignment_in(format);
  problem.y_alignment = y.alignment_in(format);

  const CallPolicy call = resolve(sampling, workspace_limit);
  Policy& policy = request.key.policy;
  policy.sampling = call.sampling;
  policy.workspace_limit = call.workspace_limit;
  policy.benchmark_limit = benchmark_limit_of_call();
  policy.device = like.device().index();
  if (!is_atens(request.key)) {
    request.x = x.in(format, like);
    request.w = w.in(format, like);
    request.y = y.in(format, like);
    if (run_chosen(request)) {
      return op == ConvOp::fprop ? request.y : op == ConvOp::dgrad ? request.x : request.w;
    }
  }
  count_fallback("PyTorch's own path was chosen (see choices())");
  return {};
}

// Where ATen serves a call, its result is brought into the layout that the fake kernels promise,
// which it mostly has already.

at::Tensor conv_fprop_cuda(const at::Tensor& input, const at::Tensor& weight,
                           const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                           at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
                           std::string_view sampling, int64_t workspace_limit) {
  const ConvGeometry geometry{input.sizes(), weight.sizes(), stride, padding, dilation, groups};
  const auto aten = [&] {
    resolve(sampling, workspace_limit);
    return aten_fprop(input, weight, bias, c10::fromIntArrayRefSlow(stride),
                      c10::fromIntArrayRefSlow(padding), c10::fromIntArrayRefSlow(dilation), groups)
        .contiguous(conv_memory_format(input, weight));
  };
  const bool has_bias = bias && bias->defined();
  const char* reason = why_not_cudnn(input, weight, geometry);
  if (reason == nullptr && has_bias && !bias_fits(input, weight, *bias)) {
    reason = "arguments that PyTorch refuses, or takes in a way of its own";
  }
  if (reason != nullptr) {
    count_fallback(reason);
    return aten();
  }
  const c10::cuda::CUDAGuard device(input.device());
  const auto format = conv_memory_format(input, weight);
  const auto output_size = geometry.output_size();
  const auto y = run(ConvOp::fprop, {&input}, {&weight}, {nullptr, output_size}, format, geometry,
                     sampling, workspace_limit);
  if (!y.defined()) return aten();
  if (has_bias) {
    std::vector<int64_t> over_channels(input.dim(), 1);
    over_channels[1] = weight.size(0);
    y.add_(bias->view(over_channels));
  }
  return y;
}

at::Tensor conv_dgrad_cuda(const at::Tensor& grad_output, const at::Tensor& weight,
                           at::IntArrayRef input_size, at::IntArrayRef stride,
                           at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
                           std::string_view sampling, int64_t workspace_limit) {
  const ConvGeometry geometry{input_size, weight.sizes(), stride, padding, dilation, groups};
  check_gradient("conv_dgrad", grad_output, geometry);
  const auto aten = [&] {
    resolve(sampling, workspace_limit);
    return aten_dgrad(grad_output, weight, c10::fromIntArrayRefSlow(input_size),
                      c10::fromIntArrayRefSlow(stride), c10::fromIntArrayRefSlow(padding),
                      c10::fromIntArrayRefSlow(dilation), groups)
        .contiguous(conv_memory_format(grad_output, weight));
  };
  if (const char* reason = why_not_cudnn(grad_output, weight, geometry)) {
    count_fallback(reason);
    return aten();
  }
  const c10::cuda::CUDAGuard device(grad_output.device());
  const auto format = conv_memory_format(grad_output, weight);
  const auto x = run(ConvOp::dgrad, {nullptr, input_size}, {&weight}, {&grad_output}, format,
                     geometry, sampling, workspace_limit);
  return x.defined() ? x : aten();
}

at::Tensor conv_wgrad_cuda(const at::Tensor& grad_output, const at::Tensor& input,
                           at::IntArrayRef weight_size, at::IntArrayRef stride,
                           at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
                           std::string_view sampling, int64_t workspace_limit) {
  const ConvGeometry geometry{input.sizes(), weight_size, stride, padding, dilation, groups};
  check_gradient("conv_wgrad", grad_output, geometry);
  const auto aten = [&] {
    resolve(sampling, workspace_limit);
    return aten_wgrad(grad_output, input, c10::fromIntArrayRefSlow(weight_size),
                      c10::fromIntArrayRefSlow(stride), c10::fromIntArrayRefSlow(padding),
                      c10::fromIntArrayRefSlow(dilation), groups)
        .contiguous(conv_memory_format(grad_output, input));
  };
  if (const char* reason = why_not_cudnn(grad_output, input, geometry)) {
    count_fallback(reason);
    return aten();
  }
  const c10::cuda::CUDAGuard device(grad_output.device());
  const auto format = conv_memory_format(grad_output, input);
  const auto w = run(ConvOp::wgrad, {&input}, {nullptr, weight_size}, {&grad_output}, format,
                     geometry, sampling, workspace_limit);
  return w.defined() ? w : aten();
}

}  // namespace
}  // namespace cudnn_autotune

TORCH_LIBRARY_IMPL(cudnn_autotune, CUDA, m) {
  m.impl("conv_fprop", cudnn_autotune::conv_fprop_cuda);
  m.impl("conv_dgrad", cudnn_autotune::conv_dgrad_cuda);
  m.impl("conv_wgrad", cudnn_autotune::conv_wgrad_cuda);
}
