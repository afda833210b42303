#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/MemoryFormat.h>
#include <c10/util/strides.h>

#include <cstdint>
#include <functional>

#include "norm_ops.h"

namespace cudnn_autotune {
namespace {

c10::DeviceType served_device = c10::kCUDA;

bool has_tangent(const OptionalTensor& tensor) {
  return is_given(tensor) && tensor->_fw_grad(/*level=*/0).defined();
}

// Beside running statistics, which are float32, PyTorch's functions on a GPU take parameters of
// float32 only.
bool suits_as_parameter(const OptionalTensor& values, const NormCall& call) {
  if (!is_given(values)) return true;
  const auto dtype = values->scalar_type();
  return is_channel_vector(values, call.input) && !has_tangent(values) &&
         (dtype == at::kFloat ||
          (dtype == call.input.scalar_type() && !is_given(call.running_mean)));
}

// Whether hooks see what is saved for a backward. A checkpoint computes again what its hooks leave
// out, and compares what is saved. By then other modes and hooks may be in force, and another
// choice, so each way saves what PyTorch's functions do: these run.
bool has_saved_tensor_hooks() {
  return !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
}

}  // namespace

void set_norm_device(c10::DeviceType type) { served_device = type; }

bool has_norm_dtype(const at::Tensor& input) {
  const auto dtype = input.scalar_type();
  return dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat;
}

bool is_channel_vector(const OptionalTensor& values, const at::Tensor& input) {
  return !is_given(values) ||
         (values->device() == input.device() && values->layout() == at::kStrided &&
          values->dim() == 1 && values->size(0) == input.size(1) && values->is_contiguous());
}

bool suits_as_statistic(const OptionalTensor& values, const at::Tensor& input) {
  return !is_given(values) || (is_channel_vector(values, input) &&
                               values->scalar_type() == at::kFloat && !values->requires_grad());
}

bool has_plain_strides(const at::Tensor& tensor) {
  const auto sizes = tensor.sizes();
  switch (tensor.suggest_memory_format()) {
    case at::MemoryFormat::ChannelsLast:
      return tensor.strides() == at::IntArrayRef(c10::get_channels_last_strides_2d(sizes));
    case at::MemoryFormat::ChannelsLast3d:
      return tensor.strides() == at::IntArrayRef(c10::get_channels_last_strides_3d(sizes));
    default:
      return tensor.strides() == at::IntArrayRef(c10::contiguous_strides(sizes));
  }
}

bool suits_operator(const NormCall& call) {
  const at::Tensor& input = call.input;
  if (!call.by_batch || input.device().type() != served_device || input.dim() < 2 ||
      input.dim() > 5 || input.numel() <= input.size(1) || input.numel() >= kMostNormElements ||
      !(call.eps > 0) || has_tangent(input) || !has_norm_dtype(input) ||
      !has_plain_strides(input) || has_saved_tensor_hooks()) {
    return false;
  }
  const bool same_dtype = !is_given(call.weight) || !is_given(call.bias) ||
                          call.weight->scalar_type() == call.bias->scalar_type();
  return same_dtype && suits_as_parameter(call.weight, call) &&
         suits_as_parameter(call.bias, call) &&
         is_given(call.running_mean) == is_given(call.running_var) &&
         suits_as_statistic(call.running_mean, input) &&
         suits_as_statistic(call.running_var, input);
}

NormCallSignature::NormCallSignature(const NormCall& call, std::string_view activation,
                                     bool by_gradients)
    : activation(activation) {
  const auto dtype = [](const OptionalTensor& values) {
    return is_given(values) ? static_cast<int64_t>(values->scalar_type()) : -1;
  };
  const auto needs_gradient = [](const OptionalTensor& tensor) {
    return static_cast<int64_t>(is_given(tensor) && tensor->requires_grad());
  };
  const bool is_recorded = by_gradients && at::GradMode::is_enabled();
  // The address counts as far as whole vectors can be read there.
  const auto address = reinterpret_cast<uintptr_t>(call.input.const_data_ptr()) | 16U;
  numbers = {static_cast<int64_t>(call.input.scalar_type()),
             call.input.get_device(),
             dtype(call.weight),
             dtype(call.bias),
             static_cast<int64_t>(is_given(call.running_mean)),
             static_cast<int64_t>(address & -address),
             is_recorded ? 4 * needs_gradient(call.input) + 2 * needs_gradient(call.weight) +
                               needs_gradient(call.bias)
                         : -1};
  for (const int64_t size : call.input.sizes()) numbers.push_back(size);
  for (const int64_t stride : call.input.strides()) numbers.push_back(stride);
}

size_t NormCallSignature::Hash::operator()(const NormCallSignature& signature) const {
  size_t hash = std::hash<std::string_view>()(signature.activation);
  for (const int64_t number : signature.numbers) {
    hash = (hash ^ static_cast<size_t>(number)) * 0x9e3779b97f4a7c15U;
    hash ^= hash >> 32U;
  }
  return hash;
}

}  // namespace cudnn_autotune
