#include "sampled_reference.h"

#include <ATen/Context.h>
#include <ATen/Dispatch.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softshrink.h>
#include <ATen/ops/stack.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "aten_conv.h"

namespace cudnn_autotune {
namespace {

// How many places of the output of fprop and dgrad are compared, in every channel. Fewer than
// kMostPlaces are, if the inputs that they depend on are more than kMostGathered numbers.
constexpr int64_t kMostPlaces = 256;
constexpr int64_t kLeastPlaces = 32;
constexpr int64_t kMostGathered = 1 << 24;
// How many taps of the weight's gradient are compared, in how many kernels (of as many groups), and
// in how many channels of each; the channels of all these groups are no more than kMostColumns.
constexpr int64_t kTaps = 9;
constexpr int64_t kKernels = 16;
constexpr int64_t kChannels = 16;
constexpr int64_t kMostColumns = 64;

using Indices = std::vector<int64_t>;
// The index in each spatial dimension; unused ones are zero.
using Spatial = std::array<int64_t, kMaxSpatialDims>;

struct Place {
  int64_t batch = 0;
  Spatial index{};
};

// A type with exact enough matrix products; those of float32 may be rounded to TF32.
at::ScalarType wide_type(const ConvProblem& problem) {
  const bool is_half = problem.dtype == DataType::float16 || problem.dtype == DataType::bfloat16;
  const bool may_use_tf32 = problem.dtype == DataType::float32 && problem.allow_tf32 != 0;
  return is_half || may_use_tf32 ? at::kFloat : at::kDouble;
}

// The index of every tap of the kernel.
std::vector<Spatial> taps_of(const ConvProblem& problem) {
  std::vector<Spatial> taps{Spatial{}};
  for (int d = 0; d < problem.spatial_dims; ++d) {
    std::vector<Spatial> longer;
    longer.reserve(taps.size() * static_cast<size_t>(problem.w[2 + d]));
    for (const Spatial& tap : taps) {
      for (int64_t i = 0; i < problem.w[2 + d]; ++i) {
        longer.push_back(tap);
        longer.back()[d] = i;
      }
    }
    taps = std::move(longer);
  }
  return taps;
}

// Where the places lie that are drawn, in each dimension of any tensor, as a share of its size.
const std::array<std::array<double, 1 + kMaxSpatialDims>, kMostPlaces>& shares() {
  static const auto drawn = [] {
    std::array<std::array<double, 1 + kMaxSpatialDims>, kMostPlaces> values{};
    std::mt19937_64 random;  // the same numbers on every machine, unlike those of a distribution
    for (auto& place : values) {
      for (double& share : place) share = std::ldexp(static_cast<double>(random() >> 11), -53);
    }
    return values;
  }();
  return drawn;
}

// Places of a tensor: its corners, and some that are drawn. Each depends on `taps` places of
// another tensor with `channels` channels.
std::vector<Place> places_of(const at::Tensor& tensor, size_t taps, int64_t channels) {
  const int64_t n = tensor.dim() - 2;
  std::vector<Place> places{Place{}};
  for (int64_t d = -1; d < n; ++d) {
    const int64_t last = tensor.size(d < 0 ? 0 : 2 + d) - 1;
    const size_t count = last > 0 ? places.size() : 0;
    for (size_t i = 0; i < count; ++i) {
      places.push_back(places[i]);
      (d < 0 ? places.back().batch : places.back().index[d]) = last;
    }
  }
  const int64_t affordable = kMostGathered / (static_cast<int64_t>(taps) * channels);
  const auto most = static_cast<size_t>(std::clamp(affordable, kLeastPlaces, kMostPlaces));
  for (size_t i = 0; i < most; ++i) {
    const auto& share = shares()[i];
    const auto drawn = [&](size_t d, int64_t size) {
      return static_cast<int64_t>(share[d] * static_cast<double>(size));
    };
    Place place{drawn(0, tensor.size(0)), {}};
    for (int64_t d = 0; d < n; ++d) place.index[d] = drawn(1 + d, tensor.size(2 + d));
    places.push_back(place);
  }
  return places;
}

// Copies numbers of the host together, without waiting for the device.
at::Tensor on_device(const Indices& numbers, c10::Device device) {
  const auto options = at::TensorOptions().dtype(at::kLong).device(at::kCPU);
  const auto host =
      at::empty({static_cast<int64_t>(numbers.size())}, options.pinned_memory(device.is_cuda()));
  std::copy(numbers.begin(), numbers.end(), host.data_ptr<int64_t>());
  return host.to(device, /*non_blocking=*/true);
}

// How many numbers of memory there are from a tensor's first to its last.
int64_t reach_of(const at::Tensor& tensor) {
  int64_t reach = 1;
  for (int64_t d = 0; d < tensor.dim(); ++d) reach += (tensor.size(d) - 1) * tensor.stride(d);
  return reach;
}

// Reads all channels of a tensor's places, whatever the layout.
class Channels {
 public:
  explicit Channels(const at::Tensor& tensor)
      : strides_(tensor.strides().vec()),
        rows_(tensor.as_strided({reach_of(tensor.select(1, 0)), tensor.size(1)},
                                {1, tensor.stride(1)})) {}

  // The offset in memory of a place's first channel.
  int64_t offset(const Place& place) const {
    int64_t offset = place.batch * strides_[0];
    for (size_t d = 0; d + 2 < strides_.size(); ++d) offset += place.index[d] * strides_[2 + d];
    return offset;
  }
  // All channels at each of `offsets`, of shape (offsets, channels).
  at::Tensor rows_at(const at::Tensor& offsets) const { return rows_.index_select(0, offsets); }

 private:
  Indices strides_;
  at::Tensor rows_;
};

// a @ b, without cuBLAS where deterministic algorithms are demanded, since torch may then refuse
// it.
at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  if (!at::globalContext().deterministicAlgorithms()) return at::matmul(a, b);
  std::vector<at::Tensor> rows;
  for (const at::Tensor& row : a.unbind(-2)) rows.push_back((row.unsqueeze(-1) * b).sum(-2));
  return at::stack(rows, -2);
}

// Multiplies (places, taps, groups * in) by (groups, taps * in, out), for each group; returns
// (places, groups * out).
at::Tensor grouped_product(const at::Tensor& gathered, const at::Tensor& weight) {
  const int64_t places = gathered.size(0), groups = weight.size(0);
  const auto rows = gathered.reshape({places, gathered.size(1), groups, -1}).permute({2, 0, 1, 3});
  const auto sums = product(rows.reshape({groups, places, -1}), weight);
  return sums.permute({1, 0, 2}).reshape({places, -1});
}

// Where a tap of a place reads: whether there is such a place, and which one it is.
using Source = std::function<bool(const Spatial& place, const Spatial& tap, Spatial& source)>;

// fprop and dgrad: each place of the output is a sum over taps. `weight` are their factors, of
// shape (groups, taps, in, out).
Sample sums_at(const ConvProblem& problem, const Operands& operands, const at::Tensor& operand,
               const at::Tensor& output, const Source& source_of, const at::Tensor& weight) {
  const Channels read(operand), written(output);
  const auto taps = taps_of(problem);
  const auto places = places_of(output, taps.size(), operand.size(1));
  const auto count = static_cast<int64_t>(places.size());
  const int64_t gathered_count = count * static_cast<int64_t>(taps.size());
  const bool has_residual = problem.has_residual();
  const Channels residual(has_residual ? operands.residual : output);

  // The offsets that are read, then whether each is inside, then those that are written, and those
  // of the residual.
  Indices numbers(2 * gathered_count, 0);
  numbers.reserve(numbers.size() + 2 * places.size());
  size_t next = 0;
  bool is_padded = false;
  for (const Place& place : places) {
    for (const Spatial& tap : taps) {
      Place source{place.batch, {}};
      const bool is_inside = source_of(place.index, tap, source.index);
      if (is_inside) numbers[next] = read.offset(source);
      numbers[next++ + gathered_count] = is_inside ? 1 : 0;
      is_padded |= !is_inside;
    }
  }
  for (const Place& place : places) numbers.push_back(written.offset(place));
  if (has_residual) {
    for (const Place& place : places) numbers.push_back(residual.offset(place));
  }
  const auto packed = on_device(numbers, output.device());

  const auto wide = weight.scalar_type();
  auto gathered = read.rows_at(packed.narrow(0, 0, gathered_count)).to(wide);
  if (is_padded) gathered.mul_(packed.narrow(0, gathered_count, gathered_count).unsqueeze(1));
  gathered = gathered.view({count, static_cast<int64_t>(taps.size()), -1});
  auto sums = grouped_product(gathered, weight.flatten(1, 2));
  if (problem.has_bias()) sums = sums + operands.bias.to(wide);
  std::optional<at::Tensor> added;
  if (has_residual) {
    added = residual.rows_at(packed.narrow(0, 2 * gathered_count + count, count)).to(wide);
  }
  sums = aten_epilogue(sums, added, problem.activation);
  return {written.rows_at(packed.narrow(0, 2 * gathered_count, count)), sums};
}

// The weight in the wider type, of shape (groups, taps, K / groups, C / groups).
at::Tensor by_tap(const ConvProblem& problem, const at::Tensor& w) {
  const int64_t groups = problem.groups;
  return w.to(wide_type(problem))
      .reshape({groups, w.size(0) / groups, w.size(1), -1})
      .permute({0, 3, 1, 2});
}

Sample fprop(const ConvProblem& problem, const Operands& operands) {
  const auto source_of = [&](const Spatial& place, const Spatial& tap, Spatial& source) {
    bool is_inside = true;
    for (int d = 0; d < problem.spatial_dims; ++d) {
      source[d] =
          place[d] * problem.stride[d] - problem.pre_padding[d] + tap[d] * problem.dilation[d];
      is_inside &= 0 <= source[d] && source[d] < problem.x[2 + d];
    }
    return is_inside;
  };
  return sums_at(problem, operands, operands.x, operands.y, source_of,
                 by_tap(problem, operands.w).transpose(-1, -2));
}

Sample dgrad(const ConvProblem& problem, const Operands& operands) {
  const auto source_of = [&](const Spatial& place, const Spatial& tap, Spatial& source) {
    bool is_inside = true;
    for (int d = 0; d < problem.spatial_dims; ++d) {
      const int64_t reached = place[d] + problem.pre_padding[d] - tap[d] * problem.dilation[d];
      source[d] = reached / problem.stride[d];
      is_inside &=
          reached >= 0 && reached % problem.stride[d] == 0 && source[d] < operands.y.size(2 + d);
    }
    return is_inside;
  };
  return sums_at(problem, operands, operands.y, operands.x, source_of, by_tap(problem, operands.w));
}

// Up to `most` indices below `size`, evenly spread, the first and the last among them.
Indices spread(int64_t size, int64_t most) {
  const int64_t count = std::min(size, most);
  Indices indices(static_cast<size_t>(count));
  for (int64_t i = 1; i < count; ++i) {
    const double share = static_cast<double>(i) / static_cast<double>(count - 1);
    indices[static_cast<size_t>(i)] = std::llround(share * static_cast<double>(size - 1));
  }
  return indices;
}

// A tensor of x's shape between as many zeros as the convolution pads it with.
at::Tensor padded(const ConvProblem& problem, const at::Tensor& tensor) {
  Indices widths;  // of the last dimension first
  for (int d = problem.spatial_dims - 1; d >= 0; --d) {
    widths.push_back(problem.pre_padding[d]);
    widths.push_back(problem.post_padding[d]);
  }
  return at::constant_pad_nd(tensor, widths);
}

// The places of padded inputs that a tap reads, as many as there are places in `outputs`.
at::Tensor read_by(const ConvProblem& problem, const Spatial& tap, at::Tensor inputs,
                   const at::Tensor& outputs) {
  for (int d = 0; d < problem.spatial_dims; ++d) {
    const int64_t stride = problem.stride[d];
    const int64_t begin = tap[d] * problem.dilation[d];
    const int64_t end = begin + (outputs.size(2 + d) - 1) * stride + 1;
    inputs = inputs.slice(2 + d, begin, end, stride);
  }
  return inputs;
}

// (batch, groups * channels, spatial...) as (groups, channels, batch * places).
at::Tensor by_group(const at::Tensor& tensor, int64_t groups) {
  const int64_t all = tensor.size(1);
  return tensor.movedim(1, 0).reshape({groups, all / groups, tensor.numel() / all});
}

Sample wgrad(const ConvProblem& problem, const Operands& operands) {
  const auto& [x, w, y] = std::tie(operands.x, operands.w, operands.y);
  const int64_t kernels_of_group = w.size(0) / problem.groups;
  const auto taps = taps_of(problem);
  const Indices groups = spread(problem.groups, kKernels);
  const auto group_count = static_cast<int64_t>(groups.size());
  const Indices kernels = spread(kernels_of_group, kKernels / group_count);
  const Indices channels = spread(w.size(1), std::min(kChannels, kMostColumns / group_count));
  std::vector<Spatial> compared;
  for (const int64_t tap : spread(static_cast<int64_t>(taps.size()), kTaps)) {
    compared.push_back(taps[static_cast<size_t>(tap)]);
  }

  // The sampled channels of y, then those of x, then the offsets in w.
  Indices numbers;
  for (const int64_t group : groups) {
    for (const int64_t kernel : kernels) numbers.push_back(group * kernels_of_group + kernel);
  }
  const auto rows = static_cast<int64_t>(numbers.size());
  for (const int64_t group : groups) {
    for (const int64_t channel : channels) numbers.push_back(group * w.size(1) + channel);
  }
  const auto columns = static_cast<int64_t>(numbers.size()) - rows;
  for (const Spatial& tap : compared) {
    int64_t offset = 0;
    for (int d = 0; d < problem.spatial_dims; ++d) offset += tap[d] * w.stride(2 + d);
    for (int64_t row = 0; row < rows; ++row) {
      for (const int64_t channel : channels) {
        numbers.push_back(offset + numbers[static_cast<size_t>(row)] * w.stride(0) +
                          channel * w.stride(1));
      }
    }
  }
  const auto packed = on_device(numbers, w.device());
  const auto wide = wide_type(problem);
  const auto grads = y.index_select(1, packed.narrow(0, 0, rows)).to(wide);
  const auto inputs = x.index_select(1, packed.narrow(0, rows, columns)).to(wide);
  const auto outer = by_group(grads, group_count);
  const auto whole = padded(problem, inputs);
  std::vector<at::Tensor> wanted;
  for (const Spatial& tap : compared) {
    const auto inner = by_group(read_by(problem, tap, whole, grads), group_count);
    // Sum over the batch and all places.
    wanted.push_back(product(outer, inner.transpose(-1, -2)).flatten());
  }
  const auto offsets = packed.narrow(0, rows + columns, packed.numel() - rows - columns);
  return {w.as_strided({reach_of(w)}, {1}).index_select(0, offsets), at::cat(wanted)};
}

// The least positive number of a type. Numbers near it lie so far apart, and right outputs are off
// by as much: gradients in float16 without a loss scale are so small.
double least_number(at::ScalarType dtype) {
  return AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "least_number", [] {
    return static_cast<double>(std::numeric_limits<scalar_t>::denorm_min());
  });
}

}  // namespace

Sample sampled(const ConvProblem& problem, const Operands& operands) {
  switch (problem.op) {
    case ConvOp::fprop:
      return fprop(problem, operands);
    case ConvOp::dgrad:
      return dgrad(problem, operands);
    case ConvOp::wgrad:
      return wgrad(problem, operands);
  }
  TORCH_INTERNAL_ASSERT(false, "unknown operation");
}

at::Tensor compare_output(const ConvProblem& problem, const Operands& operands) {
  const at::NoGradGuard no_grad;
  const c10::OptionalDeviceGuard guard(operands.x.device());
  const at::Tensor& output = operands.result(problem.op);
  const auto [found, reference] = sampled(problem, operands);
  const auto difference = at::softshrink(found - reference, least_number(output.scalar_type()));
  // In float32 the squares of small numbers would be zero, and of large ones infinite.
  const auto norm = [](const at::Tensor& values) {
    return at::linalg_vector_norm(values, 2, std::nullopt, /*keepdim=*/false, at::kDouble);
  };
  // It is not finite if one of the numbers is not. In the tensor's own type it needs no copy.
  const auto largest = [](const at::Tensor& tensor) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    return at::linalg_vector_norm(tensor, kInfinity).to(at::kDouble);
  };
  std::vector<at::Tensor> numbers{norm(reference), norm(difference), largest(output)};
  for (const at::Tensor& operand : operands.list()) {
    if (!operand.is_same(output)) numbers.push_back(largest(operand));
  }
  return at::stack(numbers);
}

}  // namespace cudnn_autotune
