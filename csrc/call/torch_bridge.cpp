#include <Python.h>

#include "call/torch_bridge.h"

#include <ATen/Context.h>
#include <ATen/cudnn/Handle.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <type_traits>

#include "call/workspace_pages.h"
#include "core/cuda/graph_lifetime.h"

namespace cudnn_autotune {
namespace {

template <typename Context>
auto read_depthwise_kernel(const Context& context, int)
    -> decltype(context.cudnnDepthwiseKernel(), DepthwiseKernel()) {
  const auto kernel = context.cudnnDepthwiseKernel();
  using Kernel = std::decay_t<decltype(kernel)>;
  if (kernel == Kernel::CUDNN) return DepthwiseKernel::cudnn;
  return kernel == Kernel::NATIVE ? DepthwiseKernel::native : DepthwiseKernel::automatic;
}

// For a torch that has no such setting.
template <typename Context>
DepthwiseKernel read_depthwise_kernel(const Context&, long) {
  return DepthwiseKernel::automatic;
}

}  // namespace

std::optional<DataType> data_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return DataType::float16;
    case at::kBFloat16:
      return DataType::bfloat16;
    case at::kFloat:
      return DataType::float32;
    case at::kDouble:
      return DataType::float64;
    default:
      return std::nullopt;
  }
}

uint8_t alignment(const at::Tensor& tensor) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) | kMostAligned;
  return static_cast<uint8_t>(address & (~address + 1));
}

GlobalFlags global_flags(DataType dtype) {
  constexpr auto kAllowed = at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
  auto& context = at::globalContext();
  GlobalFlags flags{context.deterministicCuDNN() || context.deterministicAlgorithms(), true};
  switch (dtype) {
    case DataType::float32:
      flags.allow_lower_precision = context.allowTF32CuDNN(at::Float32Op::CONV);
      break;
    case DataType::float16:
      flags.allow_lower_precision = context.allowFP16ReductionCuBLAS() == kAllowed;
      break;
    case DataType::bfloat16:
      flags.allow_lower_precision = context.allowBF16ReductionCuBLAS() == kAllowed;
      break;
    case DataType::float64:
      break;
  }
  return flags;
}

DepthwiseKernel depthwise_kernel() { return read_depthwise_kernel(at::globalContext(), 0); }

cudnnHandle_t current_handle() { return at::native::getCudnnHandle(); }

bool is_capturing() {
  // The legacy default stream cannot be captured. So the common case needs no call of CUDA.
  if (c10::cuda::getCurrentCUDAStream().stream() == nullptr) return false;
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

c10::DataPtr workspace_of(int64_t bytes, bool captures) {
  release_of_destroyed_graphs();
  if (bytes == 0) return {};
  if (bytes <= static_cast<int64_t>(WorkspacePages::kPageBytes)) {
    c10::DataPtr page = WorkspacePages::of_current_device().take(captures);
    if (page) return page;
  }
  return c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
}

bool is_interpreter_gone() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() == 0 || Py_IsFinalizing() != 0;
#else
  return Py_IsInitialized() == 0 || _Py_IsFinalizing() != 0;
#endif
}

WithoutGil::WithoutGil() {
  if (PyGILState_Check()) state_ = PyEval_SaveThread();
}

WithoutGil::~WithoutGil() {
  if (state_ != nullptr) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

}  // namespace cudnn_autotune
