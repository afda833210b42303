#pragma once

#include <c10/core/DispatchKey.h>
#include <torch/library.h>

#include <memory>

namespace cudnn_autotune {

// The kernels of aten::convolution and aten::convolution_backward, in which all convolutions of
// PyTorch and their derivatives end, and of its norms' operators (aten_norms.h). What stands above
// them (autocast, torch.func, tracing, tensor subclasses) is PyTorch's. They serve a call by its
// policy (call_policy.h), with this package's operators, and leave a call without one to PyTorch's
// own kernels.

// They are registered for this backend as long as the object lives. Beginning and end write what
// PyTorch's dispatcher reads: no other thread may run one of its convolutions on this backend then.
class AtenKernels {
 public:
  explicit AtenKernels(c10::DispatchKey backend);
  ~AtenKernels();

 private:
  std::unique_ptr<torch::Library> kernels_, above_;
};

// Which gradients the backward of a forward convolution is expected to ask for.
struct ExpectedGradients {
  bool of_input = false;
  bool of_weight = false;

  // Those of the forward that this thread computes; none outside of one that records a gradient.
  static ExpectedGradients& of_this_thread() {
    static thread_local ExpectedGradients expected;
    return expected;
  }
};

// Tells what is expected while a forward is computed, as long as it lives.
class ExpectedGradientsGuard {
 public:
  explicit ExpectedGradientsGuard(ExpectedGradients expected)
      : before_(ExpectedGradients::of_this_thread()) {
    ExpectedGradients::of_this_thread() = expected;
  }
  ~ExpectedGradientsGuard() { ExpectedGradients::of_this_thread() = before_; }
  ExpectedGradientsGuard(const ExpectedGradientsGuard&) = delete;
  ExpectedGradientsGuard& operator=(const ExpectedGradientsGuard&) = delete;

 private:
  ExpectedGradients before_;
};

}  // namespace cudnn_autotune
