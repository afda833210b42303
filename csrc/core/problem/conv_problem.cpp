#include "core/problem/conv_problem.h"

#include <cstring>
#include <functional>
#include <numeric>

namespace cudnn_autotune {
namespace {

template <typename Values>
std::string join(const Values& values, int count, char separator) {
  std::string joined;
  for (int i = 0; i < count; ++i) {
    if (i > 0) joined += separator;
    joined += std::to_string(values[i]);
  }
  return joined;
}

}  // namespace

int64_t ConvProblem::output_size(int d) const {
  const int64_t padded = x[2 + d] + pre_padding[d] + post_padding[d];
  return (padded - dilation[d] * (w[2 + d] - 1) - 1) / stride[d] + 1;
}

std::vector<int64_t> ConvProblem::output_shape() const {
  std::vector<int64_t> shape{x[0], w[0]};
  for (int d = 0; d < spatial_dims; ++d) shape.push_back(output_size(d));
  return shape;
}

int64_t ConvProblem::bytes_of(const std::vector<int64_t>& shape) const {
  const int64_t element = dtype == DataType::float64 ? 8 : dtype == DataType::float32 ? 4 : 2;
  return std::accumulate(shape.begin(), shape.end(), element, std::multiplies<>());
}

std::string ConvProblem::text() const {
  std::string t = name(op);
  t += " x=" + join(x, dims(), 'x') + " w=" + join(w, dims(), 'x');
  t += " padding=" + join(pre_padding, spatial_dims, ',');
  if (pre_padding != post_padding) t += ":" + join(post_padding, spatial_dims, ',');
  t += " stride=" + join(stride, spatial_dims, ',');
  t += " dilation=" + join(dilation, spatial_dims, ',');
  t += " groups=" + std::to_string(groups);
  t += std::string(" ") + name(dtype) + " " + name(layout);
  if (deterministic) t += " deterministic";
  if (!allow_tf32()) t += " no_tf32";
  if (!allow_reduced_precision()) t += " no_reduced_precision";
  if (depthwise_kernel != DepthwiseKernel::automatic) {
    t += std::string(" depthwise_kernel=") + name(depthwise_kernel);
  }
  const std::array<uint8_t, 3> alignment{x_alignment, w_alignment, y_alignment};
  if (alignment != std::array<uint8_t, 3>{32, 32, 32}) {
    t += " alignment=" + join(alignment, 3, ',');
  }
  if (has_slices()) {
    t += " pixel_strides=" + join(std::array<int32_t, 2>{x_pixel_stride, y_pixel_stride}, 2, ',');
  }
  if (has_bias()) t += " bias";
  if (has_residual()) t += " residual";
  if (has_activation()) t += " " + activation().name();
  return t;
}

Activation ConvProblem::activation() const {
  Activation activation{activation_kind};
  static_assert(sizeof(activation.parameter) == sizeof(activation_parameter));
  std::memcpy(&activation.parameter, &activation_parameter, sizeof(activation_parameter));
  return activation;
}

void ConvProblem::set_activation(const Activation& activation) {
  activation_kind = activation.kind;
  std::memcpy(&activation_parameter, &activation.parameter, sizeof(activation_parameter));
}

bool ConvProblem::operator==(const ConvProblem& other) const {
  return std::memcmp(this, &other, sizeof(ConvProblem)) == 0;
}

bool ChoiceKey::operator==(const ChoiceKey& other) const {
  return std::memcmp(this, &other, sizeof(ChoiceKey)) == 0;
}

size_t ChoiceKeyHash::operator()(const ChoiceKey& key) const {
  // Multiplies and folds word by word, as wyhash's mixing step does. That takes some 20
  // multiplications, where FNV-1a, which goes byte by byte, takes 160.
  static_assert(sizeof(ChoiceKey) % sizeof(uint64_t) == 0);
  std::array<uint64_t, sizeof(ChoiceKey) / sizeof(uint64_t)> words;
  std::memcpy(words.data(), &key, sizeof(ChoiceKey));
  uint64_t hash = 0x9e3779b97f4a7c15ull;
  for (const uint64_t word : words) {
    const auto product = static_cast<unsigned __int128>(hash ^ word) * 0xd6e8feb86659fd93ull;
    hash = static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64) ^ (hash << 1);
  }
  return static_cast<size_t>(hash);
}

}  // namespace cudnn_autotune
