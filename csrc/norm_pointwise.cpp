#include "norm_pointwise.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <limits>
#include <map>
#include <mutex>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "conv_layout.h"
#include "core/check.h"
#include "fallback_counts.h"
#include "torch_bridge.h"

namespace cudnn_autotune {
namespace {

constexpr int kPointwiseVectors = 5;
constexpr int kPointwiseBytes = 16;  // that the kernel loads at a time

// Never destroyed, because calls may come while the process exits.
struct PointwiseLaunches {
  std::mutex mutex;
  PointwiseLoader loader;
  // Null where PyTorch computes the problem. They stay: a CUDA graph may have captured a launch.
  std::map<PointwiseKey, std::shared_ptr<const PointwiseLaunch>> loaded;

  static PointwiseLaunches& instance() {
    static auto* found = new PointwiseLaunches();
    return *found;
  }

  std::shared_ptr<const PointwiseLaunch> find(const PointwiseKey& key) {
    PointwiseLoader load;
    {
      const std::lock_guard lock(mutex);
      const auto known = loaded.find(key);
      if (known != loaded.end()) return known->second;
      load = loader;
    }
    std::shared_ptr<const PointwiseLaunch> launch;
    if (load) {
      // Without the lock: Python takes the GIL, which another thread may hold that waits for it.
      try {
        const OnDevice guard(key.device);
        launch = load(key);
      } catch (const PlanError& error) {
        count_fallback((std::string("norm_pointwise: ") + error.what()).c_str());
      }
    }
    const std::lock_guard lock(mutex);
    return loaded.try_emplace(key, std::move(launch)).first->second;
  }
};

using PointwiseSignature = at::Tensor(const at::Tensor& input, const at::Tensor& weight,
                                      const std::optional<at::Tensor>& bias,
                                      const std::optional<at::Tensor>& residual,
                                      at::TensorList vectors, int64_t given, double eps,
                                      std::string_view activation, int64_t plan,
                                      std::string_view sampling, int64_t workspace_limit);

bool is_pointwise_aligned(const at::Tensor& tensor) { return alignment(tensor) >= kPointwiseBytes; }

// Whether the kernel reads these tensors as they are. That their sizes fit together, and that it
// computes these sizes, is not asked.
bool suits_pointwise(const at::Tensor& input, const at::Tensor& weight, const at::Tensor* bias,
                     const at::Tensor* residual, at::TensorList vectors, int64_t given) {
  const auto is_like = [&](const at::Tensor& other) {
    return other.device() == input.device() && other.scalar_type() == input.scalar_type();
  };
  if (input.dim() != 4 || weight.dim() != 4 || weight.size(1) != input.size(1) ||
      weight.size(2) != 1 || weight.size(3) != 1 || !is_like(weight) ||
      (input.scalar_type() != at::kHalf && input.scalar_type() != at::kBFloat16) ||
      !weight.is_contiguous() || !is_pointwise_aligned(weight) || !is_pointwise_aligned(input)) {
    return false;
  }
  const int64_t step = pixel_stride(input);
  if (step == 0 || step * input.element_size() % kPointwiseBytes != 0 ||
      step > std::numeric_limits<int32_t>::max()) {
    return false;
  }
  if (bias != nullptr && (!is_like(*bias) || bias->dim() != 1 || bias->size(0) != weight.size(0) ||
                          !bias->is_contiguous() || !is_pointwise_aligned(*bias))) {
    return false;
  }
  if (residual != nullptr) {
    const std::array<int64_t, 4> size{input.size(0), weight.size(0), input.size(2), input.size(3)};
    if (!is_like(*residual) || residual->sizes() != at::IntArrayRef(size) ||
        !residual->is_contiguous(at::MemoryFormat::ChannelsLast) ||
        !is_pointwise_aligned(*residual)) {
      return false;
    }
  }
  size_t expected = 0;
  for (int bit = 0; bit < kPointwiseVectors; ++bit) expected += given >> bit & 1;
  if (vectors.empty() || vectors.size() != expected || given >> kPointwiseVectors != 0)
    return false;
  for (const at::Tensor& vector : vectors) {
    if (vector.dim() != 1 || vector.size(0) != input.size(1) || !vector.is_contiguous() ||
        vector.device() != input.device() || vector.scalar_type() != vectors[0].scalar_type()) {
      return false;
    }
  }
  return true;
}

at::Tensor norm_pointwise(const at::Tensor& input, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias,
                          const std::optional<at::Tensor>& residual, at::TensorList vectors,
                          int64_t given, double eps, std::string_view activation, int64_t plan,
                          std::string_view sampling, int64_t workspace_limit) {
  const auto by_pytorch = [&] {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("cudnn_autotune::norm_pointwise", "")
                               .typed<PointwiseSignature>();
    // Another key than this one's: what Python registered for all.
    return op.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), input, weight, bias, residual,
                         vectors, given, eps, activation, plan, sampling, workspace_limit);
  };
  const at::Tensor* const added = bias && bias->defined() ? &*bias : nullptr;
  const at::Tensor* const more = residual && residual->defined() ? &*residual : nullptr;
  if (!suits_pointwise(input, weight, added, more, vectors, given)) {
    count_fallback("norm_pointwise: its tensors are not laid out as its kernel reads them");
    return by_pytorch();
  }
  const c10::cuda::CUDAGuard device(input.device());
  const int64_t channels = input.size(1), out_channels = weight.size(0);
  const int64_t pixels = input.size(0) * input.size(2) * input.size(3);
  const auto launch = PointwiseLaunches::instance().find(
      {input.device().index(), plan, input.scalar_type(), vectors[0].scalar_type(), pixels,
       channels, out_channels, added != nullptr, more != nullptr, std::string(activation)});
  if (launch == nullptr) return by_pytorch();
  const auto options = input.options().memory_format(at::MemoryFormat::ChannelsLast);
  const std::array<int64_t, 4> size{input.size(0), out_channels, input.size(2), input.size(3)};
  at::Tensor output(at::detail::empty_cuda(size, options));

  // As pointwise.cu takes them.
  std::array<const void*, 5 + kPointwiseVectors> pointers{
      input.const_data_ptr(), weight.const_data_ptr(), output.mutable_data_ptr(),
      added != nullptr ? added->const_data_ptr() : nullptr,
      more != nullptr ? more->const_data_ptr() : nullptr};
  size_t place = 0;
  for (int bit = 0; bit < kPointwiseVectors; ++bit) {
    if ((given >> bit & 1) != 0) pointers[5 + bit] = vectors[place++].const_data_ptr();
  }
  auto added_to_variance = static_cast<float>(eps);
  std::array<int32_t, 5> sizes{
      static_cast<int32_t>(channels), static_cast<int32_t>(pixel_stride(input)),
      static_cast<int32_t>(out_channels), static_cast<int32_t>(pixels), launch->tiles};
  std::array<void*, 16> arguments{};
  size_t count = 0;
  for (const void*& pointer : pointers) arguments[count++] = &pointer;
  arguments[count++] = &added_to_variance;
  for (int32_t& number : sizes) arguments[count++] = &number;
  const CUresult status = cuda_driver().launch(
      launch->kernel.function, launch->grid[0], launch->grid[1], 1, launch->threads, 1, 1,
      launch->shared_bytes, c10::cuda::getCurrentCUDAStream().stream(), arguments.data(), nullptr);
  if (status != CUDA_SUCCESS) check_driver(status, "launching norm_pointwise");
  return output;
}

}  // namespace

bool PointwiseKey::operator<(const PointwiseKey& other) const {
  const auto all = [](const PointwiseKey& key) {
    return std::tie(key.device, key.plan, key.dtype, key.vectors, key.pixels, key.channels,
                    key.out_channels, key.bias, key.residual, key.activation);
  };
  return all(*this) < all(other);
}

void set_pointwise_loader(PointwiseLoader loader) {
  PointwiseLaunches& launches = PointwiseLaunches::instance();
  const std::lock_guard lock(launches.mutex);
  launches.loader = std::move(loader);
}

LoadedKernel load_pointwise(const std::string& cubin, int shared_bytes) {
  std::vector<size_t> sizes(5 + kPointwiseVectors, sizeof(void*));
  sizes.push_back(sizeof(float));
  sizes.resize(sizes.size() + 5, sizeof(int32_t));
  return load_kernel(cubin, "norm_pointwise", shared_bytes, sizes);
}

}  // namespace cudnn_autotune

TORCH_LIBRARY_IMPL(cudnn_autotune, CUDA, m) {
  m.impl("norm_pointwise", cudnn_autotune::norm_pointwise);
}
