#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <optional>
#include <string_view>
#include <tuple>

namespace cudnn_autotune {

// The operators of cudnn_autotune/engines/norms/operators.py, which has their schemas. Tensors that
// are not asked for are undefined.

using OptionalTensor = std::optional<at::Tensor>;
using FourTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

using NormForward = std::function<FourTensors(
    const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
    const OptionalTensor& residual, std::string_view activation, double eps)>;
using NormBackward = std::function<FourTensors(
    const at::Tensor& grad_output, const OptionalTensor& grad_output_2, const at::Tensor& input,
    const OptionalTensor& output, const OptionalTensor& weight, const OptionalTensor& bias,
    const OptionalTensor& residual, const at::Tensor& mean, const at::Tensor& inv_std,
    std::string_view activation, const std::array<bool, 4>& output_mask)>;

// What computes calls that the kernels do not take, and refuses bad ones.
void set_norm_fallback(NormForward forward, NormBackward backward);

}  // namespace cudnn_autotune
