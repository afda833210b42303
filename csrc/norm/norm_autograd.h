#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <optional>

#include "norm/norm_ops.h"

namespace cudnn_autotune {

inline OptionalTensor if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// Whether autograd has to record a call of these tensors: a recorded call costs the host more.
template <typename... Optional>
bool is_recorded(const at::Tensor& input, const Optional&... others) {
  const auto is_differentiated = [](const OptionalTensor& tensor) {
    return is_given(tensor) && ((tensor->requires_grad() && at::GradMode::is_enabled()) ||
                                tensor->_fw_grad(/*level=*/0).defined());
  };
  return is_differentiated(input) || (is_differentiated(others) || ...);
}

}  // namespace cudnn_autotune
