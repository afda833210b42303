#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cudnn.h>

#include <optional>

#include "core/cuda/cuda_driver.h"
#include "core/problem/conv_problem.h"

namespace cudnn_autotune {

// Translates torch's types and switches into the core's, and takes torch's resources (the cuDNN
// handle, the current stream, memory) for it.

// nullopt if cuDNN has no convolution for it.
std::optional<DataType> data_type(at::ScalarType dtype);

constexpr uint8_t kMostAligned = 32;  // bytes; a larger alignment counts as this one
// The largest power of two, up to kMostAligned, that the tensor's address is a multiple of.
uint8_t alignment(const at::Tensor& tensor);

// The state of torch's global switches, for a convolution of this dtype: cudnn.deterministic or
// use_deterministic_algorithms, and in float32 TF32 for convolutions, in half types
// reduced-precision reductions.
struct GlobalFlags {
  bool deterministic;
  bool allow_lower_precision;
};
GlobalFlags global_flags(DataType dtype);

// torch.backends.cudnn.depthwise_kernel; automatic in a torch that has no such setting.
DepthwiseKernel depthwise_kernel();

// The handle that torch keeps for this thread and the current device, set to the current stream.
cudnnHandle_t current_handle();

// As long as it lives, a CUDA device is current, and this thread may allocate, load kernels and
// wait while another one captures a graph. In CUDA's default mode such calls would break that
// capture. Does nothing for nullopt, and where there is no GPU: what needs one says so.
class OnDevice {
 public:
  explicit OnDevice(std::optional<c10::DeviceIndex> device) {
    if (device && c10::cuda::device_count() > 0) {
      device_.reset_device(c10::Device(c10::kCUDA, *device));
    }
  }

 private:
  c10::OptionalDeviceGuard device_;
  RelaxedCapture relaxed_;
};

// Whether the current stream is being captured into a CUDA graph.
bool is_capturing();

// Memory for a workspace of this size in one launch on the current stream. `captures` says whether
// that stream is being captured. A workspace of at most one page is taken from the pages where it
// is fastest (workspace_pages.h), a larger one from torch's caching allocator. All launches of
// plans begin here, so this is where the plans of destroyed graphs are released. Throws
// c10::OutOfMemoryError.
c10::DataPtr workspace_of(int64_t bytes, bool captures);

// Whether Python has ended or is about to: its GIL must not be taken any more.
bool is_interpreter_gone();

// Releases the GIL while it lives, if this thread holds it.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* state_ = nullptr;
};

}  // namespace cudnn_autotune
