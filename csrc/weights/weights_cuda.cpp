#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <array>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "call/conv_layout.h"
#include "call/fallback_counts.h"
#include "call/torch_bridge.h"
#include "core/cuda/cuda_driver.h"
#include "core/problem/check.h"
#include "weights/weight_ops.h"

namespace cudnn_autotune {
namespace {

// cudnn_autotune/compile/weights/fold.cu has the same numbers and structures.
constexpr int kMostFolded = 40;
constexpr int kVectors = 5;
constexpr unsigned kThreads = 256;
constexpr int64_t kNumbersOfBlock = 4096;
constexpr int kHasBias = 4 | 8 | 16;  // a mean, a bias or a shift

struct FoldItem {
  const void* weight;
  void* folded_weight;
  const void* vectors[kVectors];
  void* folded_bias;
  float eps;
  int kinds;
  int rows;
  int columns, turns;
  int is_turned;
  int first_block;
  int rows_per_block;
};
struct FoldItems {
  FoldItem all[kMostFolded];
  int count;
};
static_assert(sizeof(FoldItems) <= 4096, "all GPUs take arguments of this size");

// Never destroyed, because calls may come while the process exits.
struct LoadedKernels {
  std::mutex mutex;
  WeightKernels kernels;
  // A kernel that cannot be had has no function.
  std::map<std::tuple<c10::DeviceIndex, at::ScalarType, at::ScalarType>, LoadedKernel> loaded;

  static LoadedKernels& instance() {
    static auto* found = new LoadedKernels();
    return *found;
  }

  // Null if it does not compile or load. The device is current.
  CUfunction find(c10::DeviceIndex device, at::ScalarType weight, at::ScalarType folded) {
    const std::tuple key(device, weight, folded);
    WeightKernels compile;
    {
      const std::lock_guard lock(mutex);
      const auto known = loaded.find(key);
      if (known != loaded.end()) return known->second.function;
      compile = kernels;
    }
    LoadedKernel kernel;
    if (compile) {
      // Without the lock: Python takes the GIL, which another thread may hold that waits for it.
      try {
        const OnDevice guard(device);
        kernel =
            load_kernel(compile(device, weight, folded), "fold_weights", 0, {sizeof(FoldItems)});
      } catch (const PlanError& error) {
        count_fallback((std::string("folded weights: ") + error.what()).c_str());
      }
    }
    const std::lock_guard lock(mutex);
    return loaded.try_emplace(key, std::move(kernel)).first->second.function;
  }
};

// The number of a dtype in FoldItem::kinds; -1 if the kernel has none.
int kind_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return 0;
    case at::kHalf:
      return 1;
    case at::kBFloat16:
      return 2;
    default:
      return -1;
  }
}

using FoldSignature = std::vector<at::Tensor>(at::TensorList weights, at::TensorList vectors,
                                              at::IntArrayRef given, at::ArrayRef<double> eps,
                                              at::ScalarType dtype, bool channels_last);

// Whether the kernel computes these arguments, which all results of the operator agree with.
bool suits_kernel(at::TensorList weights, at::TensorList vectors, at::IntArrayRef given,
                  at::ScalarType dtype) {
  if (weights.empty() || kind_of(dtype) < 0) return false;
  const c10::Device device = weights[0].device();
  size_t place = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const at::Tensor& weight = weights[i];
    if (kind_of(weight.scalar_type()) < 0 || weight.device() != device || weight.dim() < 3 ||
        weight.numel() == 0 || weight.numel() >= (int64_t{1} << 31)) {
      return false;
    }
    if (!is_dense(weight, false) && !is_dense(weight, true)) return false;
    for (int bit = 0; bit < kVectors; ++bit) {
      if ((given[i] >> bit & 1) == 0) continue;
      if (place == vectors.size()) return false;
      const at::Tensor& vector = vectors[place++];
      if (kind_of(vector.scalar_type()) < 0 || vector.device() != device || vector.dim() != 1 ||
          vector.size(0) != weight.size(0) || !vector.is_contiguous()) {
        return false;
      }
    }
  }
  return place == vectors.size();
}

// Launches for weights of one dtype.
void launch_folding(c10::ArrayRef<FoldItem> items, CUfunction function, cudaStream_t stream) {
  for (size_t first = 0; first < items.size(); first += kMostFolded) {
    FoldItems some{};
    some.count = static_cast<int>(std::min<size_t>(kMostFolded, items.size() - first));
    int blocks = 0;
    for (int i = 0; i < some.count; ++i) {
      FoldItem& item = some.all[i] = items[first + i];
      item.first_block = blocks;
      blocks += (item.rows + item.rows_per_block - 1) / item.rows_per_block;
    }
    void* arguments[] = {&some};
    const CUresult status =
        cuda_driver().launch(function, blocks, 1, 1, kThreads, 1, 1, 0, stream, arguments, nullptr);
    if (status != CUDA_SUCCESS) check_driver(status, "launching fold_weights");
  }
}

std::vector<at::Tensor> fold_weights(at::TensorList weights, at::TensorList vectors,
                                     at::IntArrayRef given, at::ArrayRef<double> eps,
                                     at::ScalarType dtype, bool channels_last) {
  TORCH_CHECK_VALUE(given.size() == weights.size() && eps.size() == weights.size(),
                    "given and eps: expected one number for each of ", weights.size(), " weights");
  const auto by_own_path = [&] {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("cudnn_autotune::fold_weights", "")
                               .typed<FoldSignature>();
    // Another key than this one's: what Python registered for all.
    return op.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), weights, vectors, given, eps,
                         dtype, channels_last);
  };
  if (!suits_kernel(weights, vectors, given, dtype)) return by_own_path();
  const c10::cuda::CUDAGuard device(weights[0].device());
  const c10::DeviceIndex index = weights[0].device().index();
  std::map<at::ScalarType, std::pair<CUfunction, std::vector<FoldItem>>> by_dtype;
  for (const at::Tensor& weight : weights) {
    auto& [function, items] = by_dtype[weight.scalar_type()];
    if (!items.empty() || function != nullptr) continue;
    function = LoadedKernels::instance().find(index, weight.scalar_type(), dtype);
    if (function == nullptr) return by_own_path();
  }
  std::vector<at::Tensor> folded, biases;
  size_t place = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const at::Tensor& weight = weights[i];
    const auto options = weight.options().dtype(dtype).memory_format(std::nullopt);
    folded.push_back(at::detail::empty_strided_cuda(
        weight.sizes(), dense_strides(weight.sizes(), channels_last), options));
    FoldItem item{};
    item.weight = weight.const_data_ptr();
    item.folded_weight = folded.back().mutable_data_ptr();
    item.eps = static_cast<float>(eps[i]);
    for (int bit = 0; bit < kVectors; ++bit) {
      if ((given[i] >> bit & 1) == 0) continue;
      const at::Tensor& vector = vectors[place++];
      item.vectors[bit] = vector.const_data_ptr();
      item.kinds |= kind_of(vector.scalar_type()) << (2 * bit);
    }
    if ((given[i] & kHasBias) != 0) {
      biases.push_back(at::detail::empty_cuda({weight.size(0)}, options));
      item.folded_bias = biases.back().mutable_data_ptr();
    }
    const int64_t length = weight.numel() / weight.size(0);
    item.rows = static_cast<int>(weight.size(0));
    item.is_turned = !is_dense(weight, channels_last);
    item.columns = static_cast<int>(weight.size(1));
    item.turns = static_cast<int>(length / weight.size(1));
    if (!channels_last) std::swap(item.columns, item.turns);
    item.rows_per_block = static_cast<int>(std::max<int64_t>(1, kNumbersOfBlock / length));
    by_dtype[weight.scalar_type()].second.push_back(item);
  }
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  for (const auto& [weight_dtype, found] : by_dtype)
    launch_folding(found.second, found.first, stream);
  folded.insert(folded.end(), biases.begin(), biases.end());
  return folded;
}

}  // namespace

void set_weight_kernels(WeightKernels kernels) {
  LoadedKernels& found = LoadedKernels::instance();
  const std::lock_guard lock(found.mutex);
  found.kernels = std::move(kernels);
}

}  // namespace cudnn_autotune

TORCH_LIBRARY_IMPL(cudnn_autotune, CUDA, m) {
  m.impl("fold_weights", cudnn_autotune::fold_weights);
}
