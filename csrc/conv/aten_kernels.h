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

}  // namespace cudnn_autotune
