#pragma once

namespace cudnn_autotune {

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
