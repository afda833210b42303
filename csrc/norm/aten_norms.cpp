#include "norm/aten_norms.h"

#include <ATen/ops/cudnn_batch_norm_backward_cuda_dispatch.h>
#include <ATen/ops/cudnn_batch_norm_cuda_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/native_batch_norm_backward_cpu_dispatch.h>
#include <ATen/ops/native_batch_norm_backward_cuda_dispatch.h>
#include <ATen/ops/native_batch_norm_cpu_dispatch.h>
#include <ATen/ops/native_batch_norm_cuda_dispatch.h>
#include <ATen/ops/native_group_norm_cpu_dispatch.h>
#include <ATen/ops/native_group_norm_cuda_dispatch.h>
#include <ATen/record_function.h>
#include <c10/core/MemoryFormat.h>

#include <tuple>
#include <utility>

#include "core/problem/check.h"
#include "norm/norm_choices.h"

namespace cudnn_autotune {
namespace {

// Whether the kernels may take a group norm: it is right, and nothing about it is odd. Autograd and
// autocast have had their turn.
bool suits_group_norm(const at::Tensor& input, const OptionalTensor& weight,
                      const OptionalTensor& bias, int64_t images, int64_t channels, int64_t spatial,
                      int64_t groups) {
  const auto suits_as_parameter = [&](const OptionalTensor& values) {
    return is_channel_vector(values, input) &&
           (!is_given(values) || values->scalar_type() == input.scalar_type());
  };
  return has_norm_dtype(input) && input.layout() == at::kStrided && input.is_contiguous() &&
         input.numel() > 0 && input.dim() >= 2 && input.size(0) == images &&
         input.size(1) == channels && input.numel() == images * channels * spatial && groups > 0 &&
         channels % groups == 0 && suits_as_parameter(weight) && suits_as_parameter(bias);
}

// The output, the mean and the inverse standard deviation by the kernels, if they were chosen for
// calls like this one.
std::optional<NormOutputs> batch_norm_by_kernels(const NormCall& call, bool by_cudnn) {
  const auto suits = [&] {
    return is_given(call.weight) == is_given(call.bias) && suits_operator(call);
  };
  return if_served(call, {0, 0, by_cudnn}, suits, [&] {
    RECORD_FUNCTION("cudnn_autotune::batch_norm_act", c10::ArrayRef<const c10::IValue>{});
    return compute_norm(call, "identity");
  });
}

// The gradients by the kernels, of a norm that they computed, if they can.
std::optional<ThreeTensors> gradients_by_kernels(
    c10::DispatchKeySet keys, const at::Tensor& grad_output, const at::Tensor& input,
    const OptionalTensor& weight, const OptionalTensor& mean, const OptionalTensor& inv_std,
    std::array<bool, 3> output_mask) {
  if (!is_given(mean) || !is_given(inv_std) || grad_output.sizes() != input.sizes() ||
      grad_output.scalar_type() != input.scalar_type() || grad_output.device() != input.device() ||
      !has_plain_strides(input) || (!is_given(weight) && (output_mask[1] || output_mask[2]))) {
    return std::nullopt;
  }
  try {
    const auto [of_input, of_weight, of_bias, of_residual] = norm_backward_op().redispatch(
        keys, grad_output, std::nullopt, input, std::nullopt, weight, std::nullopt, std::nullopt,
        *mean, *inv_std, "identity", {output_mask[0], output_mask[1], output_mask[2], false});
    return ThreeTensors{of_input, of_weight, of_bias};
  } catch (const PlanError&) {
    return std::nullopt;
  }
}

// cuDNN's kernels read whole vectors. Where an address is no multiple of one's size, they end the
// process: they are given a copy. PyTorch's own kernels read such tensors as they are.
bool is_aligned(const at::Tensor& tensor) {
  constexpr uintptr_t kVectorBytes = 16;
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kVectorBytes == 0;
}
at::Tensor aligned(const at::Tensor& tensor) {
  return is_aligned(tensor) ? tensor : tensor.clone(at::MemoryFormat::Preserve);
}

auto* pytorchs_gradients(const at::Tensor& input) {
  return input.is_cuda() ? at::cuda::native_batch_norm_backward
                         : at::cpu::native_batch_norm_backward;
}

// The mark of a mean that the kernels computed. The backward of a mean without it is PyTorch's.
struct OfKernels : c10::BackendMeta {};

}  // namespace

bool is_of_kernels(const OptionalTensor& mean) {
  return is_given(mean) &&
         dynamic_cast<const OfKernels*>(mean->unsafeGetTensorImpl()->get_backend_meta()) != nullptr;
}

ThreeTensors native_group_norm(c10::DispatchKeySet keys, const at::Tensor& input,
                               const OptionalTensor& weight, const OptionalTensor& bias,
                               int64_t images, int64_t channels, int64_t spatial, int64_t groups,
                               double eps) {
  const NormCall call{input, weight, bias, no_tensor(), no_tensor(), /*momentum=*/0, eps};
  const auto suits = [&] {
    return suits_group_norm(input, weight, bias, images, channels, spatial, groups);
  };
  auto found = if_served(call, {0, groups}, suits, [&] {
    auto [output, statistics] = group_norm_op().redispatch(keys, input, weight, bias, groups, eps);
    statistics = statistics.to(input.scalar_type());
    return ThreeTensors{output, statistics.select(0, 0), statistics.select(0, 1)};
  });
  if (found) return *std::move(found);
  const auto kernel = input.is_cuda() ? at::cuda::native_group_norm : at::cpu::native_group_norm;
  return kernel(input, weight, bias, images, channels, spatial, groups, eps);
}

ThreeTensors native_batch_norm(c10::DispatchKeySet, const at::Tensor& input,
                               const OptionalTensor& weight, const OptionalTensor& bias,
                               const OptionalTensor& running_mean,
                               const OptionalTensor& running_var, bool training, double momentum,
                               double eps) {
  if (training) {
    const NormCall call{input, weight, bias, running_mean, running_var, momentum, eps};
    if (auto found = batch_norm_by_kernels(call, /*by_cudnn=*/false)) {
      // Never destroyed, because calls may come while the process exits.
      static const auto* const mark =
          new c10::intrusive_ptr<c10::BackendMeta>(c10::make_intrusive<OfKernels>());
      found->mean.unsafeGetTensorImpl()->set_backend_meta(*mark);
      return {std::move(found->output), std::move(found->mean), std::move(found->inv_std)};
    }
  }
  const auto kernel = input.is_cuda() ? at::cuda::native_batch_norm : at::cpu::native_batch_norm;
  return kernel(input, weight, bias, running_mean, running_var, training, momentum, eps);
}

FourTensors cudnn_batch_norm(c10::DispatchKeySet, const at::Tensor& input, const at::Tensor& weight,
                             const OptionalTensor& bias, const OptionalTensor& running_mean,
                             const OptionalTensor& running_var, bool training, double momentum,
                             double eps) {
  if (training) {
    const OptionalTensor scale(weight);
    const NormCall call{input, scale, bias, running_mean, running_var, momentum, eps};
    if (auto found = batch_norm_by_kernels(call, /*by_cudnn=*/true)) {
      at::Tensor no_reserve = at::empty({0}, found->mean.options());
      return {std::move(found->output), std::move(found->mean), std::move(found->inv_std),
              std::move(no_reserve)};
    }
  }
  return at::cuda::cudnn_batch_norm(aligned(input), weight, bias, running_mean, running_var,
                                    training, momentum, eps);
}

ThreeTensors native_batch_norm_backward(c10::DispatchKeySet keys, const at::Tensor& grad_output,
                                        const at::Tensor& input, const OptionalTensor& weight,
                                        const OptionalTensor& running_mean,
                                        const OptionalTensor& running_var,
                                        const OptionalTensor& mean, const OptionalTensor& inv_std,
                                        bool training, double eps,
                                        std::array<bool, 3> output_mask) {
  if (training && is_of_kernels(mean)) {
    auto found = gradients_by_kernels(keys, grad_output, input, weight, mean, inv_std, output_mask);
    if (found) return *std::move(found);
  }
  return pytorchs_gradients(input)(grad_output, input, weight, running_mean, running_var, mean,
                                   inv_std, training, eps, output_mask);
}

ThreeTensors cudnn_batch_norm_backward(c10::DispatchKeySet keys, const at::Tensor& input,
                                       const at::Tensor& grad_output, const at::Tensor& weight,
                                       const OptionalTensor& running_mean,
                                       const OptionalTensor& running_var,
                                       const OptionalTensor& mean, const OptionalTensor& inv_std,
                                       double eps, const at::Tensor& reserve) {
  if (reserve.scalar_type() == at::kByte) {
    return at::cuda::cudnn_batch_norm_backward(aligned(input), aligned(grad_output), weight,
                                               running_mean, running_var, mean, inv_std, eps,
                                               reserve);
  }
  constexpr std::array<bool, 3> kAll{true, true, true};
  auto found = gradients_by_kernels(keys, grad_output, input, weight, mean, inv_std, kAll);
  if (found) return *std::move(found);
  // That of PyTorch which needs no reserve space.
  return pytorchs_gradients(input)(grad_output, input, weight, running_mean, running_var, mean,
                                   inv_std, /*train=*/true, eps, kAll);
}

}  // namespace cudnn_autotune
