#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "core/problem/conv_problem.h"
#include "plan/operands.h"

namespace cudnn_autotune {

// The convolution's definition at a sample of its output's places: the sum over taps, gathered from
// the operands and multiplied in a wider type, at the output's corners, where padding matters, and
// at places that a seed draws. It shares no code with any engine. The operands lie on any device,
// in any layout, and the host does not wait for the device.
//
// fprop and dgrad: 256 places with all their channels, or all places if there are no more. Each
// image and each index of a spatial dimension is as frequent as any other, so each is among them if
// there are no more than 256. wgrad, which sums over all images: 16 kernels, or one of each of up
// to 32 groups; up to 16 channels, and 9 taps. Every one can be drawn.
//
// It is C++ because a program whose sizes keep changing waits for it at each size of each layer.
// There the host, and not the GPU, is what takes the time.
struct Sample {
  at::Tensor output;  // what the output has there, in the problem's dtype: (places, channels), or
                      // (kernels, taps and channels) of a weight's gradient
  at::Tensor reference;  // what it must have there, of the same shape, in float32 or float64
  at::Tensor shape;      // rows, columns, and of how many of them a number depends on the operands
};

// Throws c10::OutOfMemoryError.
Sample sampled(const ConvProblem& problem, const Operands& operands, uint64_t seed);

// Compares the whole output with the reference: numbers in float64, on the operands' device. They
// are the sample's shape (four numbers); the norms of the rows of the reference, then of those of
// its difference from the output; the same of the columns; and the largest magnitude in the output
// and in each operand that is read, NaN where there is one. Throws c10::OutOfMemoryError.
at::Tensor compare_output(const ConvProblem& problem, const Operands& operands, uint64_t seed);

// What those numbers say.
struct Comparison {
  double norm = 0;   // of the reference
  double error = 0;  // the norm of its difference from the output
  // The largest ratio of the difference to the reference in one row or column. Where the reference
  // nearly cancels there, it is replaced by half of what as many numbers have on average, and by
  // that of one number more.
  double local = 0;
  double filled = 1;  // of the rows that depend on the operands, or of such columns, the share of
                      // those whose reference is not zero: the smaller one
  std::vector<double> largest;  // in the output and in each operand
};

// `numbers` are on the host. Throws c10::ValueError for others.
Comparison read_comparison(const at::Tensor& numbers);

}  // namespace cudnn_autotune
