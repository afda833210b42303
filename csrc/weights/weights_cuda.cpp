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
#include "weights/fold_table.h"
#include "weights/weight_ops.h"

namespace cudnn_autotune {
namespace {

constexpr int kHasVectors = 31;
constexpr int kHasBias = 4 | 8 | 16;  // a mean, a bias or a shift

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
        kernel = load_kernel(compile(device, weight, folded), "fold_weights", kFoldSharedBytes,
                             {sizeof(FoldTable)});
      } catch (const PlanError& error) {
        count_fallback((std::string("folded weights: ") + error.what()).c_str());
      }
    }
    const std::lock_guard lock(mutex);
    return loaded.try_emplace(key, std::move(kernel)).first->second.function;
  }
};

// The number of a dtype in Folded::kinds; -1 if the kernel has none.
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

FoldItem item_of(const at::Tensor& weight, const at::Tensor& folded_weight, bool channels_last,
                 bool is_folded) {
  FoldItem item{};
  item.weight = weight.const_data_ptr();
  item.folded_weight = folded_weight.mutable_data_ptr();
  item.rows = static_cast<int>(weight.size(0));
  item.channels = static_cast<int>(weight.size(1));
  item.window = static_cast<int>(weight.numel() / weight.size(0) / weight.size(1));
  if (!is_dense(weight, channels_last)) {
    item.order = channels_last ? FoldOrder::to_channels_last : FoldOrder::to_contiguous;
  } else {
    keep_order(item, is_folded);
  }
  return item;
}

// The launches for weights of one dtype.
struct Launches {
  CUfunction function = nullptr;
  std::vector<FoldLaunch> all;

  void add(const FoldItem& item, const Folded* folded) {
    if (all.empty() || !all.back().add(item, folded)) all.emplace_back().add(item, folded);
  }
  void launch(cudaStream_t stream) {
    for (FoldLaunch& one : all) {
      one.finish();
      void* arguments[] = {&one.table};
      const CUresult status = cuda_driver().launch(function, one.blocks, 1, 1, kFoldThreads, 1, 1,
                                                   kFoldSharedBytes, stream, arguments, nullptr);
      if (status != CUDA_SUCCESS) check_driver(status, "launching fold_weights");
    }
  }
};

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
  std::map<at::ScalarType, Launches> by_dtype;
  for (const at::Tensor& weight : weights) {
    CUfunction& function = by_dtype[weight.scalar_type()].function;
    if (function != nullptr) continue;
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
    Folded what{};
    what.eps = static_cast<float>(eps[i]);
    for (int bit = 0; bit < kVectors; ++bit) {
      if ((given[i] >> bit & 1) == 0) continue;
      const at::Tensor& vector = vectors[place++];
      what.vectors[bit] = vector.const_data_ptr();
      what.kinds |= kind_of(vector.scalar_type()) << (2 * bit);
    }
    if ((given[i] & kHasBias) != 0) {
      biases.push_back(at::detail::empty_cuda({weight.size(0)}, options));
      what.bias = biases.back().mutable_data_ptr();
    }
    const bool is_folded = (given[i] & kHasVectors) != 0;
    by_dtype[weight.scalar_type()].add(item_of(weight, folded.back(), channels_last, is_folded),
                                       is_folded ? &what : nullptr);
  }
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  for (auto& [weight_dtype, launches] : by_dtype) launches.launch(stream);
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
