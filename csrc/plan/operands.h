#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "call/torch_bridge.h"
#include "core/cudnn/conv_plan.h"
#include "core/problem/conv_problem.h"

namespace cudnn_autotune {

// The tensors of a problem, dense in its layout: the forward convolution's three, and those that
// its epilogue reads, which are undefined where it has none. fprop writes y, dgrad writes x and
// wgrad writes w.
struct Operands {
  at::Tensor x, w, y;
  at::Tensor bias;      // (K)
  at::Tensor residual;  // of the output's shape
  at::Tensor slope;     // (K), of prelu

  at::Tensor& result(ConvOp op) { return op == ConvOp::fprop ? y : op == ConvOp::dgrad ? x : w; }
  const at::Tensor& result(ConvOp op) const { return const_cast<Operands*>(this)->result(op); }

  // Replaces tensors at addresses of less than kMostAligned bytes by copies.
  void align() {
    for (at::Tensor* tensor : {&x, &w, &y, &bias, &residual, &slope}) {
      if (tensor->defined() && alignment(*tensor) < kMostAligned) *tensor = tensor->clone();
    }
  }

  ConvPointers pointers() const {
    const auto address = [](const at::Tensor& t) { return t.defined() ? t.data_ptr() : nullptr; };
    return {x.data_ptr(),  w.data_ptr(),      y.data_ptr(),
            address(bias), address(residual), address(slope)};
  }

  // The same as a list, in which what is undefined is left out. Python has them in this form.
  std::vector<at::Tensor> list() const {
    std::vector<at::Tensor> tensors{x, w, y};
    for (const at::Tensor* tensor : {&bias, &residual, &slope}) {
      if (tensor->defined()) tensors.push_back(*tensor);
    }
    return tensors;
  }
  // The inverse of list(). Throws c10::ValueError where the problem has more tensors, or fewer.
  static Operands from_list(const ConvProblem& problem, const std::vector<at::Tensor>& tensors) {
    Operands operands;
    std::vector<at::Tensor*> places{&operands.x, &operands.w, &operands.y};
    if (problem.has_bias()) places.push_back(&operands.bias);
    if (problem.has_residual()) places.push_back(&operands.residual);
    if (problem.has_slope()) places.push_back(&operands.slope);
    TORCH_CHECK_VALUE(tensors.size() == places.size(), "operands: the problem has ", places.size(),
                      ", got ", tensors.size());
    for (size_t i = 0; i < places.size(); ++i) *places[i] = tensors[i];
    return operands;
  }
};

}  // namespace cudnn_autotune
