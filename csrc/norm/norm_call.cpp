#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/MemoryFormat.h>

#include <algorithm>
#include <cstdint>

#include "call/conv_layout.h"
#include "norm/norm_ops.h"

namespace cudnn_autotune {
namespace {

c10::DeviceType served_device = c10::kCUDA;

bool has_tangent(const at::Tensor& tensor) { return tensor._fw_grad(/*level=*/0).defined(); }

// Beside running statistics, which are float32, PyTorch's functions on a GPU take parameters of
// float32 only.
bool suits_as_parameter(const OptionalTensor& values, const NormCall& call) {
  if (!is_given(values)) return true;
  const auto dtype = values->scalar_type();
  return is_channel_vector(values, call.input) && !has_tangent(*values) &&
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
  const bool in_rows = tensor.suggest_memory_format() != at::MemoryFormat::Contiguous;
  return tensor.strides() == at::IntArrayRef(dense_strides(tensor.sizes(), in_rows));
}

bool suits_operator(const NormCall& call) {
  const at::Tensor& input = call.input;
  if (input.device().type() != served_device || input.dim() < 2 || input.dim() > 5 ||
      input.numel() <= input.size(1) || input.numel() >= kMostNormElements || !(call.eps > 0) ||
      has_tangent(input) || !has_norm_dtype(input) || !has_plain_strides(input) ||
      has_saved_tensor_hooks()) {
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

bool is_in_rows(const at::Tensor& input) {
  return input.dim() >= 3 && input.dim() <= 5 && input.numel() > 0 && is_dense(input, true) &&
         !is_dense(input, false);
}

bool suits_group_operators(const NormCall& call, int64_t groups) {
  const at::Tensor& input = call.input;
  return input.device().type() == served_device && input.numel() < kMostNormElements &&
         is_in_rows(input) && call.eps > 0 && !has_tangent(input) && has_norm_dtype(input) &&
         !has_saved_tensor_hooks() && groups > 0 && input.size(1) % groups == 0 &&
         is_given(call.weight) == is_given(call.bias) &&
         (!is_given(call.weight) || call.weight->scalar_type() == call.bias->scalar_type()) &&
         suits_as_parameter(call.weight, call) && suits_as_parameter(call.bias, call);
}

const OptionalTensor& no_tensor() {
  static const auto* const none = new OptionalTensor();
  return *none;
}

std::optional<size_t> place_of_activation(std::string_view activation) {
  const auto* const found = std::find(kNormActivations.begin(), kNormActivations.end(), activation);
  if (found == kNormActivations.end()) return std::nullopt;
  return found - kNormActivations.begin();
}

NormCallSignature::NormCallSignature(const NormCall& call, const NormKind& kind, int64_t serial,
                                     int16_t sampling) {
  const auto dtype = [](const OptionalTensor& values) {
    return is_given(values) ? static_cast<int64_t>(values->scalar_type()) : 0xff;
  };
  const at::Tensor& input = call.input;
  // What needs gradients: nothing is 0, and the rest begins with 8.
  int64_t needs = 0;
  if ((kind.groups == 0 || !input.is_contiguous()) && at::GradMode::is_enabled()) {
    const auto needs_gradient = [](const OptionalTensor& tensor) {
      return static_cast<int64_t>(is_given(tensor) && tensor->requires_grad());
    };
    needs = 8 + 4 * static_cast<int64_t>(input.requires_grad()) + 2 * needs_gradient(call.weight) +
            needs_gradient(call.bias);
  }
  // The address counts as far as whole vectors can be read there.
  const auto address = reinterpret_cast<uintptr_t>(input.const_data_ptr()) | 16U;
  int64_t facts = input.dim();
  const auto add = [&facts](int64_t value, int bits) { facts = (facts << bits) | value; };
  add(static_cast<int64_t>(input.scalar_type()), 8);
  add(input.get_device() + 1, 8);
  add(dtype(call.weight), 8);
  add(dtype(call.bias), 8);
  add(static_cast<int64_t>(address & -address), 5);
  add(needs, 4);
  add(static_cast<int64_t>(kind.activation), 4);
  add(static_cast<int64_t>(is_given(call.running_mean)), 1);
  add(static_cast<int64_t>(kind.by_cudnn), 1);
  add(sampling + 1, 10);
  words_[0] = facts;
  words_[1] = serial;
  words_[2] = kind.groups;
  const auto sizes = input.sizes(), strides = input.strides();
  auto* const end = std::copy(sizes.begin(), sizes.end(), words_.begin() + 3);
  size_ = static_cast<uint32_t>(std::copy(strides.begin(), strides.end(), end) - words_.begin());
  for (uint32_t i = 0; i < size_; ++i) {
    hash_ = (hash_ ^ static_cast<size_t>(words_[i])) * 0x9e3779b97f4a7c15U;
    hash_ ^= hash_ >> 32U;
  }
}

}  // namespace cudnn_autotune
