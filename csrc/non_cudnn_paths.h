#pragma once

#include <ATen/core/Tensor.h>

#include "core/conv_problem.h"
#include "operands.h"

namespace cudnn_autotune {

// The implementations of a problem that are no engines of cuDNN. Everything runs on the current
// stream, and throws c10::Error where ATen or cuBLAS refuse.

// The text of the choice to compute a convolution as a matrix product. (kAten, the text of
// PyTorch's own path, is in core/choice_table.h.)
constexpr const char* kMatmul = "matmul";

// Computes the problem by PyTorch's own path, and returns the result, which ATen allocates, in the
// layout that the operators promise.
at::Tensor run_aten(const ConvProblem& problem, const Operands& operands);

// Whether a problem can be computed as one matrix product over all pixels: its kernel is 1x1,
// without stride, padding, groups or an epilogue other than a bias, its layout is channels last,
// and its dtype is a half type (in float32 cuBLAS obeys another TF32 switch than cuDNN).
bool is_matmul(const ConvProblem& problem);

// Writes the operation's result (y, x or w) by cuBLAS, through ATen. is_matmul(problem) must hold.
void run_matmul(const ConvProblem& problem, const Operands& operands);

}  // namespace cudnn_autotune
