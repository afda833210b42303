#include <ATen/Context.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/cat.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "call/aten_conv.h"
#include "call/conv_geometry.h"
#include "call/conv_layout.h"
#include "call/fallback_counts.h"
#include "call/settings.h"
#include "call/torch_bridge.h"
#include "conv/detail/conv_checks.h"
#include "conv/detail/conv_cuda.h"
#include "conv/detail/side_by_side.h"
#include "conv/engine_dispatch.h"

namespace cudnn_autotune {
namespace {

// One of the forward convolution's three tensors: a tensor of the caller's, or the result, which is
// allocated only once it is known that an engine writes it.
struct Part {
  const at::Tensor* given = nullptr;  // null: the result
  at::IntArrayRef size = {};          // of the result

  // The caching allocator aligns new memory to more than kMostAligned.
  uint8_t alignment_in(at::MemoryFormat format) const {
    return given != nullptr && given->is_contiguous(format) ? alignment(*given) : kMostAligned;
  }
  // The tensor in this layout: the caller's own, a copy of it, or the new result. The result is not
  // made by at::empty, which fills it under deterministic algorithms: every engine writes all of
  // it.
  //   is_slice: whether the caller's own may be a slice of channels
  at::Tensor in(at::MemoryFormat format, const at::Tensor& like, bool is_slice) const {
    if (given != nullptr && is_slice) return *given;
    if (given != nullptr) return given->contiguous(format);
    return at::Tensor(at::detail::empty_cuda(size, like.options().memory_format(format)));
  }
};

// One call of an operator: the operation, and the forward's three tensors in the layout in which it
// runs.
struct Call {
  ConvOp op;
  Part x, w, y;
  at::MemoryFormat format;
  // Of a forward with an epilogue; null and none without.
  const at::Tensor* bias = nullptr;
  const at::Tensor* residual = nullptr;
  const at::Tensor* slope = nullptr;
  Activation activation;
  // Elements from a pixel to the next one, as ConvProblem has them; zero without slices.
  int32_t x_pixel_stride = 0, y_pixel_stride = 0;

  const at::Tensor& first_operand() const { return *(op == ConvOp::fprop ? x : y).given; }
  // Whether no tensor has to be copied for a problem with an epilogue, which asks for kMostAligned.
  bool is_aligned() const {
    return x.alignment_in(format) == kMostAligned && w.alignment_in(format) == kMostAligned &&
           (bias == nullptr ||
            Part{bias}.alignment_in(at::MemoryFormat::Contiguous) == kMostAligned);
  }
};

// Whether an engine may compute a call; else the reason is counted, unless the call is on a CPU.
bool may_use_cudnn(const at::Tensor& a, const char* reason) {
  if (!a.is_cuda()) return false;
  if (reason != nullptr) count_fallback(reason);
  return reason == nullptr;
}

// The key of the call's choice.
ChoiceKey key_of(const Call& call, const ConvGeometry& geometry, const CallPolicy& policy) {
  ChoiceKey key;
  ConvProblem& problem = key.problem;
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
  problem.op = call.op;
  problem.dtype = *data_type(call.first_operand().scalar_type());
  problem.layout =
      call.format == at::MemoryFormat::Contiguous ? Layout::channels_first : Layout::channels_last;
  const GlobalFlags flags = global_flags(problem.dtype);
  problem.deterministic = flags.deterministic;
  problem.allow_lower_precision = flags.allow_lower_precision;
  if (problem.follows_depthwise_kernel()) problem.depthwise_kernel = depthwise_kernel();
  if (call.bias != nullptr) problem.addends |= ConvProblem::kBias;
  if (call.residual != nullptr) problem.addends |= ConvProblem::kResidual;
  problem.set_activation(call.activation);
  problem.x_pixel_stride = call.x_pixel_stride;
  problem.y_pixel_stride = call.y_pixel_stride;
  if (!problem.has_epilogue() && !problem.has_slices()) {
    problem.x_alignment = call.x.alignment_in(call.format);
    problem.w_alignment = call.w.alignment_in(call.format);
    problem.y_alignment = call.y.alignment_in(call.format);
  }
  key.policy.sampling = policy.sampling;
  key.policy.workspace_limit = policy.workspace_limit;
  key.policy.benchmark_limit = benchmark_limit_of_call();
  key.policy.device = call.first_operand().device().index();
  return key;
}

// The result, computed by the engine chosen for this call; undefined if PyTorch's own path is the
// choice. Then no memory is allocated, neither for the result nor for copies in another layout,
// unless the choice has to be made first.
at::Tensor compute(const Call& call, const ConvGeometry& geometry, const CallPolicy& policy) {
  const ChoiceKey key = key_of(call, geometry, policy);
  Operands operands;
  const auto allocated = [&]() -> const Operands& {
    if (!operands.x.defined()) {
      const at::Tensor& like = call.first_operand();
      const bool has_slices = key.problem.has_slices();
      operands.x = call.x.in(call.format, like, has_slices);
      operands.w = call.w.in(call.format, like, /*is_slice=*/false);
      operands.y = call.y.in(call.format, like, has_slices);
      if (call.bias != nullptr) operands.bias = call.bias->contiguous();
      if (call.residual != nullptr) operands.residual = call.residual->contiguous(call.format);
      if (call.slope != nullptr) operands.slope = call.slope->contiguous();
      // cuDNN 9.19 runs fused engines on addresses that they are not made for ("misaligned
      // address" on an H200), whatever alignment the graph says.
      if (key.problem.has_epilogue() || has_slices) operands.align();
    }
    return operands;
  };
  const ChosenPath path = lookup(key, allocated);
  if (!allocates_result(path) && run(path, key, allocated())) {
    return std::move(operands.result(call.op));
  }
  count_fallback("PyTorch's own path was chosen (see choices())");
  return {};
}

// Whether a 1-d forward is computed as one of images of height 1, which PyTorch does in
// channels_last. Lists of a wrong length are ATen's to refuse.
bool takes_height(const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
                  at::IntArrayRef padding, at::IntArrayRef dilation) {
  return weight.dim() == 3 && stride.size() == 1 && dilation.size() == 1 && padding.size() >= 1 &&
         padding.size() <= 2 && is_image_of_height_1(input, weight, /*pads=*/padding.size() == 2);
}

// The size of a 1-d tensor as images of height 1.
std::vector<int64_t> with_height_1(at::IntArrayRef size) { return {size[0], size[1], 1, size[2]}; }

// Lets a forward read and write slices of channels where its tensors are such and are aligned.
//   output: what it is to write, of the result's size, dtype and device; null where that is new
void take_slices(Call& call, const at::Tensor& input, const at::Tensor* output, int64_t kernels) {
  const auto strides_of = [](const at::Tensor& tensor) {
    const int64_t pixels = pixel_stride(tensor);
    const bool fits = pixels * tensor.element_size() % kMostAligned == 0 &&
                      alignment(tensor) == kMostAligned &&
                      pixels <= std::numeric_limits<int32_t>::max();
    return fits ? static_cast<int32_t>(pixels) : 0;
  };
  if (call.format == at::MemoryFormat::Contiguous) return;
  const int32_t x = strides_of(input);
  const int32_t y = output != nullptr ? strides_of(*output) : static_cast<int32_t>(kernels);
  if (x == 0 || y == 0) return;
  if (output != nullptr) call.y.given = output;
  if (x == input.size(1) && y == kernels) return;
  call.x_pixel_stride = x;
  call.y_pixel_stride = y;
}

// Throws c10::Error unless the arguments make a convolution and `grad_output` has the shape of its
// output. ATen's backward does not check that, and would read out of bounds.
void check_gradient(const char* op, const at::Tensor& grad_output, const ConvGeometry& geometry) {
  TORCH_CHECK(geometry.is_valid(), op, ": input of size ", geometry.input_size, ", weight of size ",
              geometry.weight_size, ", stride ", geometry.stride, ", padding ", geometry.padding,
              ", dilation ", geometry.dilation, " and groups ", geometry.groups,
              " do not make a convolution");
  const auto expected = geometry.output_size();
  TORCH_CHECK(grad_output.sizes() == at::IntArrayRef(expected), op,
              ": expected grad_output of size ", at::IntArrayRef(expected), ", got ",
              grad_output.sizes());
}

// The number of filters of each image, for conv_each_image.
int64_t kernels_of_an_image(const at::Tensor& input, const at::Tensor& weight,
                            at::IntArrayRef stride, at::IntArrayRef padding,
                            at::IntArrayRef dilation) {
  const bool fits = (input.dim() == 4 || input.dim() == 5) && weight.dim() == input.dim() &&
                    input.size(0) > 0 && weight.size(0) % input.size(0) == 0;
  TORCH_CHECK(
      fits,
      "conv_each_image: expected an input of (N, C, *spatial) with 2 or 3 spatial dimensions "
      "and a weight of (N * K, C, *kernel), got ",
      input.sizes(), " and ", weight.sizes());
  // ATen would take a list of one number for all dimensions.
  for (const at::IntArrayRef sizes : {stride, padding, dilation}) {
    TORCH_CHECK(sizes.size() + 2 == input.sizes().size(),
                "conv_each_image: expected a stride, padding and dilation of ", input.dim() - 2,
                " numbers each, got ", stride, ", ", padding, " and ", dilation);
  }
  return weight.size(0) / input.size(0);
}

// The kernels. They serve tensors on a CPU too, by ATen, in the layout of those for CUDA: so what
// calls the operators can be tested on a machine without a GPU. Each reads the call's mode and
// limits once. Where ATen computes a call, the result is brought into the layout that the fake
// kernels promise, which it mostly has already.

// activation(x * w + bias + residual).
//   slope: the slopes of prelu
//   takes_slices: whether the input may be a slice of channels that is not copied
//   output: a tensor for the result, which may be such a slice; null where it is new. The result is
//     this tensor, or it is another one, where an engine cannot write it.
at::Tensor forward(const at::Tensor& input, const at::Tensor& weight,
                   const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& residual,
                   at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                   int64_t groups, const Activation& activation,
                   const std::optional<at::Tensor>& slope, std::string_view sampling,
                   int64_t workspace_limit, bool takes_slices, const at::Tensor* output = nullptr) {
  const bool has_bias = bias && bias->defined();
  const bool has_residual = residual && residual->defined();
  if (takes_height(input, weight, stride, padding, dilation)) {
    const OfHeight1<int64_t> images(stride, padding, dilation);
    const bool adds = has_residual && residual->dim() == 3;
    return forward(as_images(input), weight.unsqueeze(2), bias,
                   adds ? std::optional(residual->unsqueeze(2)) : residual, images.stride,
                   images.padding, images.dilation, groups, activation, slope, sampling,
                   workspace_limit, /*takes_slices=*/false)
        .squeeze(2);
  }
  const CallPolicy policy = resolve(sampling, workspace_limit);
  const ConvGeometry geometry{input.sizes(), weight.sizes(), stride, padding, dilation, groups};
  const auto aten = [&] {
    return with_strides_of(conv_memory_format(input, weight),
                           aten_fused(input, weight, bias, residual, geometry, activation, slope));
  };
  const char* reason = why_not_cudnn(input, weight, geometry);
  std::vector<int64_t> output_size;
  if (reason == nullptr) {
    output_size = geometry.output_size();
    const bool fits = !has_residual || (residual->sizes() == at::IntArrayRef(output_size) &&
                                        residual->scalar_type() == input.scalar_type() &&
                                        residual->device() == input.device());
    const bool wants_slope = activation.kind == ActivationKind::prelu;
    const bool has_slope = slope && slope->defined();
    if (!fits || (has_bias && !bias_fits(*bias, input, weight.size(0))) ||
        wants_slope != has_slope || (has_slope && !bias_fits(*slope, input, weight.size(0)))) {
      reason = kNotTaken;
    }
  }
  if (!may_use_cudnn(input, reason)) return aten();
  const c10::cuda::CUDAGuard device(input.device());
  Call call{ConvOp::fprop,
            {&input},
            {&weight},
            {nullptr, output_size},
            conv_memory_format(input, weight),
            has_bias ? &*bias : nullptr,
            has_residual ? &*residual : nullptr,
            activation.kind == ActivationKind::prelu ? &*slope : nullptr,
            activation};
  const bool is_result = output == nullptr || (output->sizes() == at::IntArrayRef(output_size) &&
                                               output->scalar_type() == input.scalar_type() &&
                                               output->device() == input.device());
  if (takes_slices && is_result) take_slices(call, input, output, weight.size(0));
  // Engines that add a bias want aligned addresses (compute()). To copy the tensors in each call
  // would mostly take longer than a kernel that adds the bias.
  const bool has_only_bias = has_bias && !has_residual && activation.kind == ActivationKind::none;
  const bool adds_bias = has_only_bias && !call.is_aligned();
  if (adds_bias) call.bias = nullptr;
  const auto y = compute(call, geometry, policy);
  if (!y.defined()) return aten();
  if (adds_bias) add_bias(y, *bias);
  return y;
}

}  // namespace

at::Tensor conv_fprop(const at::Tensor& input, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                      at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
                      std::string_view sampling, int64_t workspace_limit) {
  return forward(input, weight, bias, std::nullopt, stride, padding, dilation, groups, Activation(),
                 std::nullopt, sampling, workspace_limit, /*takes_slices=*/false);
}

namespace {

at::Tensor conv_fused(const at::Tensor& input, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias,
                      const std::optional<at::Tensor>& residual, at::IntArrayRef stride,
                      at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
                      std::string_view activation, std::string_view sampling,
                      int64_t workspace_limit, const std::optional<at::Tensor>& slope) {
  return forward(input, weight, bias, residual, stride, padding, dilation, groups,
                 activation_of_call(activation), slope, sampling, workspace_limit,
                 /*takes_slices=*/true);
}

void conv_fused_into(const at::Tensor& output, const at::Tensor& input, const at::Tensor& weight,
                     const std::optional<at::Tensor>& bias,
                     const std::optional<at::Tensor>& residual, at::IntArrayRef stride,
                     at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
                     std::string_view activation, std::string_view sampling,
                     int64_t workspace_limit, const std::optional<at::Tensor>& slope) {
  const auto y = forward(input, weight, bias, residual, stride, padding, dilation, groups,
                         activation_of_call(activation), slope, sampling, workspace_limit,
                         /*takes_slices=*/true, &output);
  if (!y.is_same(output)) copy_result(output, y);
}

at::Tensor conv_each_image(const at::Tensor& input, const at::Tensor& weight,
                           at::IntArrayRef stride, at::IntArrayRef padding,
                           at::IntArrayRef dilation, std::string_view sampling,
                           int64_t workspace_limit) {
  const int64_t kernels = kernels_of_an_image(input, weight, stride, padding, dilation);
  const c10::DeviceGuard device(input.device());
  const auto format = conv_memory_format(input, weight);
  const auto x = input.contiguous(format), w = weight.contiguous(format);
  const auto convolve = [&](int64_t n, const at::Tensor* output) {
    return forward(x.narrow(0, n, 1), w.narrow(0, n * kernels, kernels), std::nullopt, std::nullopt,
                   stride, padding, dilation, /*groups=*/1, Activation(), std::nullopt, sampling,
                   workspace_limit, /*takes_slices=*/true, output);
  };
  auto filters = w.sizes().vec();
  filters[0] = kernels;
  const ConvGeometry geometry{x.sizes(), filters, stride, padding, dilation, /*groups=*/1};
  if (!geometry.is_valid()) return convolve(0, nullptr);  // PyTorch raises the error
  if (!x.is_cuda()) {
    std::vector<at::Tensor> outputs;
    for (int64_t n = 0; n < x.size(0); ++n) outputs.push_back(convolve(n, nullptr));
    return with_strides_of(format, at::cat(outputs));
  }
  const at::Tensor y(
      at::detail::empty_cuda(geometry.output_size(), x.options().memory_format(format)));
  // Convolutions of one image are too small for a GPU.
  SideBySide().run(x.size(0), [&](int64_t n) {
    const auto output = y.narrow(0, n, 1);
    const auto found = convolve(n, &output);
    if (!found.is_same(output)) copy_result(output, found);
  });
  return y;
}

// The gradient that is the undefined one of `x` and `w`. `other` is the forward's operand.
at::Tensor gradient(ConvOp op, const at::Tensor& grad_output, const at::Tensor& other, Part x,
                    Part w, const ConvGeometry& geometry, const CallPolicy& policy) {
  const auto format = conv_memory_format(grad_output, other);
  if (may_use_cudnn(grad_output, why_not_cudnn(grad_output, other, geometry))) {
    const c10::cuda::CUDAGuard device(grad_output.device());
    const auto found = compute({op, x, w, {&grad_output}, format}, geometry, policy);
    if (found.defined()) return found;
  }
  const auto aten = op == ConvOp::dgrad ? aten_dgrad : aten_wgrad;
  return with_strides_of(format, aten(grad_output, other, geometry));
}

}  // namespace

at::Tensor conv_dgrad(const at::Tensor& grad_output, const at::Tensor& weight,
                      at::IntArrayRef input_size, at::IntArrayRef stride, at::IntArrayRef padding,
                      at::IntArrayRef dilation, int64_t groups, std::string_view sampling,
                      int64_t workspace_limit) {
  if (is_dgrad_of_height_1(grad_output, weight) && input_size.size() == 3 && stride.size() == 1 &&
      padding.size() >= 1 && padding.size() <= 2 && dilation.size() == 1) {
    const OfHeight1<int64_t> images(stride, padding, dilation);
    return conv_dgrad(as_images(grad_output), weight.unsqueeze(2), with_height_1(input_size),
                      images.stride, images.padding, images.dilation, groups, sampling,
                      workspace_limit)
        .squeeze(2);
  }
  const CallPolicy policy = resolve(sampling, workspace_limit);
  const ConvGeometry geometry{input_size, weight.sizes(), stride, padding, dilation, groups};
  check_gradient("conv_dgrad", grad_output, geometry);
  return gradient(ConvOp::dgrad, grad_output, weight, {nullptr, input_size}, {&weight}, geometry,
                  policy);
}

at::Tensor conv_wgrad(const at::Tensor& grad_output, const at::Tensor& input,
                      at::IntArrayRef weight_size, at::IntArrayRef stride, at::IntArrayRef padding,
                      at::IntArrayRef dilation, int64_t groups, std::string_view sampling,
                      int64_t workspace_limit) {
  if (is_wgrad_of_height_1(grad_output, input) && weight_size.size() == 3 && stride.size() == 1 &&
      padding.size() >= 1 && padding.size() <= 2 && dilation.size() == 1) {
    const OfHeight1<int64_t> images(stride, padding, dilation);
    return conv_wgrad(as_images(grad_output), as_images(input), with_height_1(weight_size),
                      images.stride, images.padding, images.dilation, groups, sampling,
                      workspace_limit)
        .squeeze(2);
  }
  const CallPolicy policy = resolve(sampling, workspace_limit);
  const ConvGeometry geometry{input.sizes(), weight_size, stride, padding, dilation, groups};
  check_gradient("conv_wgrad", grad_output, geometry);
  return gradient(ConvOp::wgrad, grad_output, input, {&input}, {nullptr, weight_size}, geometry,
                  policy);
}

namespace {

at::Tensor conv_transpose(const at::Tensor& input, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                          at::IntArrayRef padding, at::IntArrayRef output_padding,
                          at::IntArrayRef dilation, int64_t groups, std::string_view sampling,
                          int64_t workspace_limit) {
  if (output_padding.size() == 1 && takes_height(input, weight, stride, padding, dilation)) {
    const OfHeight1<int64_t> images(stride, padding, dilation, output_padding);
    return conv_transpose(as_images(input), weight.unsqueeze(2), bias, images.stride,
                          images.padding, images.output_padding, images.dilation, groups, sampling,
                          workspace_limit)
        .squeeze(2);
  }
  const bool has_bias = bias && bias->defined();
  const auto size =
      transposed_output_size(input, weight, stride, padding, output_padding, dilation, groups);
  const bool fits = size && input.scalar_type() == weight.scalar_type() &&
                    input.device() == weight.device() &&
                    (!has_bias || bias_fits(*bias, input, size->at(1)));
  if (!may_use_cudnn(input, fits ? nullptr : kNotTaken)) {
    resolve(sampling, workspace_limit);  // checks them
    return with_strides_of(
        conv_memory_format(input, weight),
        aten_transpose(input, weight, bias, stride, padding, output_padding, dilation, groups));
  }
  const auto y = conv_dgrad(input, weight, *size, stride, padding, dilation, groups, sampling,
                            workspace_limit);
  if (has_bias) add_bias(y, *bias);
  return y;
}

void implement(torch::Library& m) {
  m.impl("conv_fprop", conv_fprop);
  m.impl("conv_transpose", conv_transpose);
  m.impl("conv_dgrad", conv_dgrad);
  m.impl("conv_wgrad", conv_wgrad);
  m.impl("conv_fused", conv_fused);
  m.impl("conv_fused_into_", conv_fused_into);
  m.impl("conv_each_image", conv_each_image);
}

}  // namespace
}  // namespace cudnn_autotune

TORCH_LIBRARY_IMPL(cudnn_autotune, CUDA, m) { cudnn_autotune::implement(m); }
TORCH_LIBRARY_IMPL(cudnn_autotune, CPU, m) { cudnn_autotune::implement(m); }
