#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "core/problem/activation.h"

namespace cudnn_autotune {

constexpr int kMaxSpatialDims = 3;

enum class ConvOp : uint8_t { fprop, dgrad, wgrad };
enum class DataType : uint8_t { float16, bfloat16, float32, float64 };
enum class Layout : uint8_t { channels_first, channels_last };
// The values of torch.backends.cudnn.depthwise_kernel.
enum class DepthwiseKernel : uint8_t { automatic, cudnn, native };

// The names, in the order of the enumerators.
constexpr std::array kOpNames{"fprop", "dgrad", "wgrad"};
constexpr std::array kDataTypeNames{"float16", "bfloat16", "float32", "float64"};
constexpr std::array kLayoutNames{"contiguous", "channels_last"};
constexpr std::array kDepthwiseKernelNames{"auto", "cudnn", "native"};

inline const char* name(ConvOp op) { return kOpNames.at(static_cast<size_t>(op)); }
inline const char* name(DataType dtype) { return kDataTypeNames.at(static_cast<size_t>(dtype)); }
inline const char* name(Layout layout) { return kLayoutNames.at(static_cast<size_t>(layout)); }
inline const char* name(DepthwiseKernel kernel) {
  return kDepthwiseKernelNames.at(static_cast<size_t>(kernel));
}

// A convolution problem: everything that decides which engines are valid and which is fastest, and
// nothing else. The shapes are those of the forward convolution, also for dgrad and wgrad:
//   x: (N, C, spatial...)   w: (K, C / groups, kernel...)   output: (N, K, spatial...)
// A forward convolution may have an epilogue: activation(x * w + bias + residual), where `bias` has
// the shape (1, K, 1...) and `residual` that of the output. prelu has slopes of the bias's shape.
// The tensors are dense in `layout`, but for slices of channels. Equality and hash read the bytes
// of the struct, so it has no padding, and unused trailing dimensions are zero.
struct ConvProblem {
  std::array<int64_t, 2 + kMaxSpatialDims> x{};
  std::array<int64_t, 2 + kMaxSpatialDims> w{};
  std::array<int32_t, kMaxSpatialDims> pre_padding{};
  std::array<int32_t, kMaxSpatialDims> post_padding{};
  std::array<int32_t, kMaxSpatialDims> stride{};
  std::array<int32_t, kMaxSpatialDims> dilation{};
  // Elements from a pixel to the next one where the input and the output of a forward in
  // channels_last are slices of the channels of larger tensors; both zero where neither is.
  int32_t x_pixel_stride = 0;
  int32_t y_pixel_stride = 0;
  int32_t groups = 1;
  uint8_t spatial_dims = 2;
  ConvOp op = ConvOp::fprop;
  DataType dtype = DataType::float32;
  Layout layout = Layout::channels_first;
  uint8_t deterministic = 0;  // only engines whose results do not differ between runs
  // In float32 tensor cores may round inputs to TF32; in half types partial sums may be in that
  // type. It is 1 in float64.
  uint8_t allow_lower_precision = 1;
  // The kernel of PyTorch's own path; automatic if !follows_depthwise_kernel().
  DepthwiseKernel depthwise_kernel = DepthwiseKernel::automatic;
  // Bytes, powers of two up to 32. A problem with an epilogue or with slices has 32 for all of its
  // tensors.
  uint8_t x_alignment = 32;
  uint8_t w_alignment = 32;
  uint8_t y_alignment = 32;
  uint8_t addends = 0;  // kBias, kResidual, or both
  ActivationKind activation_kind = ActivationKind::none;
  int64_t activation_parameter = 0;  // the bits of a double

  static constexpr uint8_t kBias = 1;
  static constexpr uint8_t kResidual = 2;
  bool is_half() const { return dtype == DataType::float16 || dtype == DataType::bfloat16; }
  bool allow_tf32() const { return dtype != DataType::float32 || allow_lower_precision != 0; }
  bool allow_reduced_precision() const { return !is_half() || allow_lower_precision != 0; }
  // Whether PyTorch's setting decides which kernel it runs: of a depthwise convolution, unless it
  // is in channels_last, where PyTorch always calls cuDNN.
  bool follows_depthwise_kernel() const {
    return groups > 1 && groups == x[1] && layout == Layout::channels_first;
  }
  bool has_bias() const { return (addends & kBias) != 0; }
  bool has_residual() const { return (addends & kResidual) != 0; }
  bool has_slope() const { return activation_kind == ActivationKind::prelu; }
  bool has_activation() const { return activation_kind != ActivationKind::none; }
  bool has_epilogue() const { return addends != 0 || has_activation(); }
  bool has_slices() const { return x_pixel_stride != 0; }
  bool has_only_bias() const { return addends == kBias && !has_activation(); }
  Activation activation() const;
  void set_activation(const Activation& activation);

  int dims() const { return 2 + spatial_dims; }
  int64_t output_size(int spatial_dim) const;
  std::vector<int64_t> input_shape() const { return {x.begin(), x.begin() + dims()}; }
  std::vector<int64_t> weight_shape() const { return {w.begin(), w.begin() + dims()}; }
  std::vector<int64_t> output_shape() const;
  // Of a dense tensor of this shape, in the problem's dtype.
  int64_t bytes_of(const std::vector<int64_t>& shape) const;
  // One line of text. Two problems have the same text if and only if they are equal.
  std::string text() const;

  bool operator==(const ConvProblem& other) const;
};

static_assert(std::has_unique_object_representations_v<ConvProblem>,
              "equality and hash read the bytes of a ConvProblem");

// How a problem is tuned. Together with the problem it is the key of a choice.
struct Policy {
  int64_t workspace_limit = -1;  // bytes; -1: no limit
  int32_t benchmark_limit = 0;   // candidates to time; 0: all
  int16_t sampling = 0;          // number of a sampling mode (settings.h)
  int16_t device = 0;            // CUDA device index
};

static_assert(std::has_unique_object_representations_v<Policy>);

struct ChoiceKey {
  ConvProblem problem;
  Policy policy;

  bool operator==(const ChoiceKey& other) const;
};

static_assert(std::has_unique_object_representations_v<ChoiceKey>);

struct ChoiceKeyHash {
  size_t operator()(const ChoiceKey& key) const;
};

}  // namespace cudnn_autotune
