#pragma once

#include <ATen/core/Tensor.h>
#include <cudnn.h>

#include "core/conv_plan.h"
#include "operands.h"

namespace cudnn_autotune {

// Adds the bias, of shape (K), to `y`, of shape (N, K, spatial...), on the current stream.
void add_bias(const at::Tensor& y, const at::Tensor& bias);

// Enqueues a plan on the handle's stream, which must be the current one, and the addition of the
// bias where the plan is unfused. `workspace` is as in ConvPlan::execute. Throws CudnnError.
void launch(ConvPlan& plan, cudnnHandle_t handle, const Operands& operands, void* workspace);

// As launch(), on the current stream, with a workspace from workspace_of(). `captures` says whether
// that stream is being captured. Throws c10::OutOfMemoryError, CudnnError.
void execute(ConvPlan& plan, const Operands& operands, bool captures);

}  // namespace cudnn_autotune
