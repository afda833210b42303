#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <tuple>

#include "norm_ops.h"

namespace cudnn_autotune {

// Group norms by kernels of this package, in the place of aten::native_group_norm's. Its backward
// stays PyTorch's.

// The output, and the mean and the inverse standard deviation of each group of each image.
using GroupNormResults = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
// The operator cudnn_autotune::group_norm: the output, and both statistics as one tensor of
// float32, (2, images, groups).
using GroupNormSignature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor& input,
                                                              const OptionalTensor& weight,
                                                              const OptionalTensor& bias,
                                                              int64_t groups, double eps);

// The kernel of aten::native_group_norm: a call that has a policy (call_policy.h) is computed by
// the kernels where they were chosen for such calls, all others by PyTorch.
GroupNormResults native_group_norm(c10::DispatchKeySet keys, const at::Tensor& input,
                                   const OptionalTensor& weight, const OptionalTensor& bias,
                                   int64_t images, int64_t channels, int64_t spatial,
                                   int64_t groups, double eps);

// Chooses what computes calls like one whose key is not known: true for the kernels, nothing if
// that cannot be said now. It may call aten::native_group_norm, which is PyTorch's then.
using GroupNormChooser = std::function<std::optional<bool>(
    const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
    int64_t groups, double eps, std::string_view sampling)>;
void set_group_norm_chooser(GroupNormChooser chooser);
// Clears all choices.
void forget_group_norms();

}  // namespace cudnn_autotune
