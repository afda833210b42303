#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <tuple>

#include "norm/norm_ops.h"

namespace cudnn_autotune {

// The kernels of ATen's operators in which training batch norms, instance norms (a batch norm of
// one image that has the channels of all) and group norms end, those of converted modules too. A
// call that has an asker (norm_choices.h) is computed by the kernels of this package where they
// were chosen for such calls, all others by PyTorch's. The backward of a batch norm is computed by
// whichever computed the forward: the statistics that it has saved, or the reserve space, say so.
// That of a group norm is PyTorch's. Norms of channels_last models are computed before they get
// here (group_norm_in_rows of norm_ops.h).

using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using FourTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// The output, and the mean and the inverse standard deviation of each group of each image.
ThreeTensors native_group_norm(c10::DispatchKeySet keys, const at::Tensor& input,
                               const OptionalTensor& weight, const OptionalTensor& bias,
                               int64_t images, int64_t channels, int64_t spatial, int64_t groups,
                               double eps);

// The output, and the mean and the inverse standard deviation of each channel; cuDNN's also
// returns its reserve space, in bytes. A reserve space of floats, which has none, tells its
// backward that the forward was not cuDNN's.
ThreeTensors native_batch_norm(c10::DispatchKeySet keys, const at::Tensor& input,
                               const OptionalTensor& weight, const OptionalTensor& bias,
                               const OptionalTensor& running_mean,
                               const OptionalTensor& running_var, bool training, double momentum,
                               double eps);
FourTensors cudnn_batch_norm(c10::DispatchKeySet keys, const at::Tensor& input,
                             const at::Tensor& weight, const OptionalTensor& bias,
                             const OptionalTensor& running_mean, const OptionalTensor& running_var,
                             bool training, double momentum, double eps);

// The gradients of the input, the weight and the bias.
ThreeTensors native_batch_norm_backward(c10::DispatchKeySet keys, const at::Tensor& grad_output,
                                        const at::Tensor& input, const OptionalTensor& weight,
                                        const OptionalTensor& running_mean,
                                        const OptionalTensor& running_var,
                                        const OptionalTensor& mean, const OptionalTensor& inv_std,
                                        bool training, double eps, std::array<bool, 3> output_mask);
ThreeTensors cudnn_batch_norm_backward(c10::DispatchKeySet keys, const at::Tensor& input,
                                       const at::Tensor& grad_output, const at::Tensor& weight,
                                       const OptionalTensor& running_mean,
                                       const OptionalTensor& running_var,
                                       const OptionalTensor& mean, const OptionalTensor& inv_std,
                                       double eps, const at::Tensor& reserve);

// Whether the kernels have computed a call with this mean, or a tensor that shares its memory.
bool is_of_kernels(const OptionalTensor& mean);

}  // namespace cudnn_autotune
