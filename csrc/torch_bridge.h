#pragma once

#include <ATen/core/Tensor.h>
#include <cudnn.h>

#include <optional>

#include "core/conv_plan.h"
#include "core/conv_problem.h"

namespace cudnn_autotune {

// Torch's words for the core's, and torch's resources: handle, stream, memory.

std::optional<DataType> data_type(at::ScalarType dtype);

constexpr uint8_t kMostAligned = 32;  // bytes: more is not looked at
// The largest power of two, up to kMostAligned, that the tensor's address is a multiple of.
uint8_t alignment(const at::Tensor& tensor);

// What torch's global switches say: cudnn.deterministic or use_deterministic_algorithms, TF32
// for convolutions, reduced-precision reductions of half types.
struct GlobalFlags {
  bool deterministic;
  bool allow_tf32;
  bool allow_reduced_precision;
};
GlobalFlags global_flags(DataType dtype);

// The handle that torch pools for this thread and the current device, on the current stream.
cudnnHandle_t current_handle();

bool is_capturing();

ConvPointers pointers(const at::Tensor& x, const at::Tensor& w, const at::Tensor& y);

// For the time of one launch on the current stream, which captures or not: a small one lies where
// it is fastest (workspace_pages.h), any other is from torch's caching allocator. Throws
// c10::OutOfMemoryError.
c10::DataPtr workspace_of(const ConvPlan& plan, bool captures);

// With a workspace of its own. Throws c10::OutOfMemoryError, CudnnError.
void execute(ConvPlan& plan, const ConvPointers& pointers, bool captures);

// Lets go of the GIL, where this thread holds it, while in scope.
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
