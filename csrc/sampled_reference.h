#pragma once

#include <ATen/core/Tensor.h>

#include "core/conv_problem.h"
#include "operands.h"

namespace cudnn_autotune {

// The convolution's definition at a sample of its output's places: the sum over taps, gathered from
// the operands and multiplied in a wider type, at the output's corners, where padding matters, and
// at places drawn at random. It shares no code with any engine. The operands lie on any device, in
// any layout, and the host does not wait for the device.
//
// It is C++ because a program whose sizes keep changing waits for it at each size of each layer.
// There the host, and not the GPU, is what takes the time.
struct Sample {
  at::Tensor output;     // what the output has there, in the problem's dtype
  at::Tensor reference;  // what it must have there, of the same shape, in float32 or float64
};

// Throws c10::OutOfMemoryError.
Sample sampled(const ConvProblem& problem, const Operands& operands);

// Compares the whole output with the reference: numbers in float64, on the operands' device. They
// are the norm of the sampled reference; the norm of its difference from the output; and the
// largest magnitude in the output and in each operand that is read, NaN where there is one. Throws
// c10::OutOfMemoryError.
at::Tensor compare_output(const ConvProblem& problem, const Operands& operands);

}  // namespace cudnn_autotune
