#pragma once

#include <ATen/core/Tensor.h>

#include "core/conv_problem.h"

namespace cudnn_autotune {

// Ways of computing a problem that are no engine of cuDNN. Tensors are the forward's three, dense
// in the problem's layout.

// The text of a choice that is a matrix product (core/choice_table.h has kAten).
constexpr const char* kMatmul = "matmul";

// What PyTorch itself runs, with the layout of the result brought in order as the operators do it.
// Returns the result: ATen allocates it.
at::Tensor run_aten(const ConvProblem& problem, const at::Tensor& x, const at::Tensor& w,
                    const at::Tensor& y);

// Whether a problem is one matrix product over all pixels: a 1x1 kernel without stride, padding or
// groups, channels last, in a half type (in float32 cuBLAS follows another TF32 switch).
bool is_matmul(const ConvProblem& problem);

// Writes the operation's result (y, x or w) by cuBLAS, through ATen.
void run_matmul(const ConvProblem& problem, const at::Tensor& x, const at::Tensor& w,
                const at::Tensor& y);

}  // namespace cudnn_autotune
