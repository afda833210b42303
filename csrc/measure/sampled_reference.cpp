#include "measure/sampled_reference.h"

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
#include <numeric>
#include <optional>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "call/aten_conv.h"

namespace cudnn_autotune {
namespace {

// How many places of the output of fprop and dgrad are drawn, in every channel. Where the inputs
// that they depend on are more than kMostGathered numbers, fewer are, but one of each image, and
// they are summed in portions. Of places that no input reaches, kUnreached more are drawn.
constexpr int64_t kMostPlaces = 256;
constexpr int64_t kLeastPlaces = 32;
constexpr int64_t kUnreached = 32;
constexpr int64_t kMostGathered = 1 << 24;
// How many groups of the weight's gradient are compared, how many kernels, which are spread over
// them, and how many channels of each kernel; the channels of all groups are no more than
// kMostColumns. How many taps are, and how many more of those that only padding reaches.
constexpr int64_t kMostGroups = 32;
constexpr int64_t kKernels = 16;
constexpr int64_t kChannels = 16;
constexpr int64_t kMostColumns = 64;
constexpr int64_t kTaps = 9;
constexpr int64_t kUnreachedTaps = 2;

using Indices = std::vector<int64_t>;
// The index in each spatial dimension; unused ones are zero.
using Spatial = std::array<int64_t, kMaxSpatialDims>;

struct Place {
  int64_t batch = 0;
  Spatial index{};
};

// A type with exact enough matrix products; those of float32 may be rounded to TF32.
at::ScalarType wide_type(const ConvProblem& problem) {
  const bool may_use_tf32 = problem.dtype == DataType::float32 && problem.allow_tf32();
  return problem.is_half() || may_use_tf32 ? at::kFloat : at::kDouble;
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

Indices all_below(int64_t size) {
  Indices indices(static_cast<size_t>(size));
  std::iota(indices.begin(), indices.end(), 0);
  return indices;
}

// Draws indices, the same for a seed on every machine, unlike the distributions of the standard
// library.
class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed) {}

  // `count` indices below `size`, in random order: each as often as any other, if there are no more
  // of them; else one of each of `count` parts.
  Indices balanced(int64_t count, int64_t size) {
    Indices indices = order(count);
    for (int64_t& index : indices) {
      index = size <= count ? index % size : of_part(index, count, size);
    }
    return indices;
  }

  // For each of `groups` up to `most` different indices below `size`, in ascending order: the first
  // and the last, if there are three or more, and one of each part of the others. The groups share
  // each part out among them, so that together they have as many different ones as can be.
  std::vector<Indices> spread(int64_t groups, int64_t size, int64_t most) {
    std::vector<Indices> found(static_cast<size_t>(groups));
    if (size <= most) {
      for (Indices& indices : found) indices = all_below(size);
      return found;
    }
    const int64_t ends = most >= 3 ? 1 : 0;
    if (ends > 0) add(found, 0);
    const int64_t parts = most - 2 * ends;
    for (int64_t part = 0; part < parts; ++part) {
      const Indices shares = order(groups);
      for (size_t i = 0; i < found.size(); ++i) {
        const int64_t within = of_part(part * groups + shares[i], parts * groups, size - 2 * ends);
        found[i].push_back(ends + within);
      }
    }
    if (ends > 0) add(found, size - 1);
    return found;
  }

 private:
  // At random from [0, 1).
  double share() { return std::ldexp(static_cast<double>(random_() >> 11), -53); }

  static void add(std::vector<Indices>& lists, int64_t index) {
    for (Indices& list : lists) list.push_back(index);
  }

  // The numbers below `count` in random order.
  Indices order(int64_t count) {
    Indices numbers = all_below(count);
    for (size_t left = numbers.size(); left > 1; --left) {
      const auto other = static_cast<size_t>(share() * static_cast<double>(left));
      std::swap(numbers[left - 1], numbers[other]);
    }
    return numbers;
  }

  // An index below `size` in the part with number `part` of `parts` equal ones.
  int64_t of_part(int64_t part, int64_t parts, int64_t size) {
    const double at = (static_cast<double>(part) + share()) / static_cast<double>(parts);
    return std::min(static_cast<int64_t>(at * static_cast<double>(size)), size - 1);
  }

  std::mt19937_64 random_;
};

// Whether a place of a dimension of the output and a tap read a place of the other tensor, and
// which one that is.
using Source = std::function<bool(int d, int64_t place, int64_t tap, int64_t& source)>;

// The places of each spatial dimension of the output that depend on the other tensor at all.
std::vector<Indices> reached_places(const ConvProblem& problem, const at::Tensor& output,
                                    const Source& source_of) {
  std::vector<Indices> reached(static_cast<size_t>(problem.spatial_dims));
  for (int d = 0; d < problem.spatial_dims; ++d) {
    for (int64_t place = 0; place < output.size(2 + d); ++place) {
      int64_t tap = 0, source = 0;
      while (tap < problem.w[2 + d] && !source_of(d, place, tap, source)) ++tap;
      if (tap < problem.w[2 + d]) reached[static_cast<size_t>(d)].push_back(place);
    }
  }
  return reached;
}

// All places of a tensor.
std::vector<Place> all_places(const at::Tensor& tensor) {
  std::vector<Place> places{Place{}};
  for (int64_t d = -1; d < tensor.dim() - 2; ++d) {
    std::vector<Place> more;
    for (const Place& place : places) {
      for (int64_t i = 0; i < tensor.size(d < 0 ? 0 : 2 + d); ++i) {
        more.push_back(place);
        (d < 0 ? more.back().batch : more.back().index[d]) = i;
      }
    }
    places = std::move(more);
  }
  return places;
}

// Adds `count` drawn places, whose index in each spatial dimension is one of `among`. Each image,
// and each index of a dimension, is as frequent as any other.
void draw_places(std::vector<Place>& places, int64_t count, int64_t images,
                 const std::vector<Indices>& among, Draw& draw) {
  std::vector<Place> drawn(static_cast<size_t>(count));
  const Indices batch = draw.balanced(count, images);
  for (size_t i = 0; i < drawn.size(); ++i) drawn[i].batch = batch[i];
  for (size_t d = 0; d < among.size(); ++d) {
    const Indices chosen = draw.balanced(count, static_cast<int64_t>(among[d].size()));
    for (size_t i = 0; i < drawn.size(); ++i) {
      drawn[i].index[d] = among[d][static_cast<size_t>(chosen[i])];
    }
  }
  places.insert(places.end(), drawn.begin(), drawn.end());
}

// How many places are summed at once, of which each depends on `numbers` numbers.
int64_t places_at_once(int64_t numbers) { return std::max(kMostGathered / numbers, kLeastPlaces); }

// Places of the output: all, if they are few; else its corners, and some that are drawn. Each
// depends on `numbers` numbers of the other tensor.
std::vector<Place> places_of(const ConvProblem& problem, const at::Tensor& output, int64_t numbers,
                             const Source& source_of, Draw& draw) {
  const int64_t images = output.size(0);
  const int64_t least = std::min(std::max(images, kLeastPlaces), kMostPlaces);
  const int64_t most = std::clamp(places_at_once(numbers), least, kMostPlaces);
  if (output.numel() / output.size(1) <= most) return all_places(output);
  std::vector<Place> places{Place{}};
  std::vector<Indices> all;
  for (int64_t d = -1; d < problem.spatial_dims; ++d) {
    const int64_t size = output.size(d < 0 ? 0 : 2 + d);
    const size_t count = size > 1 ? places.size() : 0;
    for (size_t i = 0; i < count; ++i) {
      places.push_back(places[i]);
      (d < 0 ? places.back().batch : places.back().index[d]) = size - 1;
    }
    if (d >= 0) all.push_back(all_below(size));
  }
  const auto reached = reached_places(problem, output, source_of);
  const bool any = std::none_of(reached.begin(), reached.end(),
                                [](const Indices& indices) { return indices.empty(); });
  if (any) draw_places(places, most, images, reached, draw);
  if (!any || reached != all) draw_places(places, kUnreached, images, all, draw);
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

// The sample's shape, and what of it can be other than zero, among the numbers that are copied to
// the device: its rows, its columns, the rows that the operands reach, and such columns.
constexpr int64_t kShapeNumbers = 4;

// fprop and dgrad: each place of the output is a sum over taps. `weight` are their factors, of
// shape (groups, taps, in, out).
Sample sums_at(const ConvProblem& problem, const Operands& operands, const at::Tensor& operand,
               const at::Tensor& output, const Source& source_of, const at::Tensor& weight,
               Draw& draw) {
  const Channels read(operand), written(output);
  const auto taps = taps_of(problem);
  const auto tap_count = static_cast<int64_t>(taps.size());
  const int64_t gathered_of_place = tap_count * operand.size(1);
  const auto places = places_of(problem, output, gathered_of_place, source_of, draw);
  const auto count = static_cast<int64_t>(places.size());
  const int64_t gathered_count = count * tap_count;
  const bool has_residual = problem.has_residual();
  const Channels residual(has_residual ? operands.residual : output);

  // The offsets that are read, then whether each is inside, then those that are written, those of
  // the residual, and the sample's shape.
  Indices numbers(2 * gathered_count, 0);
  numbers.reserve(numbers.size() + 2 * places.size() + kShapeNumbers);
  size_t next = 0;
  bool is_padded = false;
  int64_t reached = 0;
  for (const Place& place : places) {
    bool is_reached = false;
    for (const Spatial& tap : taps) {
      Place source{place.batch, {}};
      bool is_inside = true;
      for (int d = 0; is_inside && d < problem.spatial_dims; ++d) {
        is_inside = source_of(d, place.index[d], tap[d], source.index[d]);
      }
      if (is_inside) numbers[next] = read.offset(source);
      numbers[next++ + gathered_count] = is_inside ? 1 : 0;
      is_padded |= !is_inside;
      is_reached |= is_inside;
    }
    reached += is_reached ? 1 : 0;
  }
  for (const Place& place : places) numbers.push_back(written.offset(place));
  if (has_residual) {
    for (const Place& place : places) numbers.push_back(residual.offset(place));
  }
  const int64_t columns = output.size(1);
  for (const int64_t number : {count, columns, reached, reached > 0 ? columns : 0}) {
    numbers.push_back(number);
  }
  const auto packed = on_device(numbers, output.device());

  const auto wide = weight.scalar_type();
  const auto factors = weight.flatten(1, 2);
  std::vector<at::Tensor> portions;
  const int64_t at_once = places_at_once(gathered_of_place);
  for (int64_t begin = 0; begin < count; begin += at_once) {
    const int64_t end = std::min(begin + at_once, count);
    const auto of_taps = [&](int64_t first) {
      return packed.narrow(0, first + begin * tap_count, (end - begin) * tap_count);
    };
    auto gathered = read.rows_at(of_taps(0)).to(wide);
    if (is_padded) gathered.mul_(of_taps(gathered_count).unsqueeze(1));
    portions.push_back(grouped_product(gathered.view({end - begin, tap_count, -1}), factors));
  }
  auto sums = portions.size() == 1 ? portions[0] : at::cat(portions);
  if (problem.has_bias()) sums = sums + operands.bias.to(wide);
  std::optional<at::Tensor> added;
  if (has_residual) {
    added = residual.rows_at(packed.narrow(0, 2 * gathered_count + count, count)).to(wide);
  }
  std::optional<at::Tensor> slope;
  if (problem.has_slope()) slope = operands.slope.to(wide);
  sums = aten_epilogue(sums, added, problem.activation(), slope);
  return {written.rows_at(packed.narrow(0, 2 * gathered_count, count)), sums,
          packed.narrow(0, packed.numel() - kShapeNumbers, kShapeNumbers)};
}

// The weight in the wider type, of shape (groups, taps, K / groups, C / groups).
at::Tensor by_tap(const ConvProblem& problem, const at::Tensor& w) {
  const int64_t groups = problem.groups;
  return w.to(wide_type(problem))
      .reshape({groups, w.size(0) / groups, w.size(1), -1})
      .permute({0, 3, 1, 2});
}

// Where a place of y and a tap read x in a dimension.
bool reads_x(const ConvProblem& problem, int d, int64_t place, int64_t tap, int64_t& source) {
  source = place * problem.stride[d] - problem.pre_padding[d] + tap * problem.dilation[d];
  return 0 <= source && source < problem.x[2 + d];
}

Sample fprop(const ConvProblem& problem, const Operands& operands, Draw& draw) {
  const auto source_of = [&](int d, int64_t place, int64_t tap, int64_t& source) {
    return reads_x(problem, d, place, tap, source);
  };
  return sums_at(problem, operands, operands.x, operands.y, source_of,
                 by_tap(problem, operands.w).transpose(-1, -2), draw);
}

Sample dgrad(const ConvProblem& problem, const Operands& operands, Draw& draw) {
  const auto source_of = [&](int d, int64_t place, int64_t tap, int64_t& source) {
    const int64_t reached = place + problem.pre_padding[d] - tap * problem.dilation[d];
    source = reached / problem.stride[d];
    return reached >= 0 && reached % problem.stride[d] == 0 && source < operands.y.size(2 + d);
  };
  return sums_at(problem, operands, operands.y, operands.x, source_of, by_tap(problem, operands.w),
                 draw);
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

// The taps that are compared: those that read x, as far as there are such, come first.
struct Taps {
  std::vector<Spatial> compared;
  int64_t reached = 0;
};

Taps drawn_taps(const ConvProblem& problem, const at::Tensor& y, Draw& draw) {
  std::array<std::vector<bool>, kMaxSpatialDims> reads;
  for (int d = 0; d < problem.spatial_dims; ++d) {
    for (int64_t tap = 0; tap < problem.w[2 + d]; ++tap) {
      int64_t place = 0, source = 0;
      while (place < y.size(2 + d) && !reads_x(problem, d, place, tap, source)) ++place;
      reads[d].push_back(place < y.size(2 + d));
    }
  }
  std::vector<Spatial> reached, others;
  for (const Spatial& tap : taps_of(problem)) {
    bool is_reached = true;
    for (int d = 0; d < problem.spatial_dims; ++d) {
      is_reached &= reads[d][static_cast<size_t>(tap[d])];
    }
    (is_reached ? reached : others).push_back(tap);
  }
  Taps taps;
  const auto add = [&](const std::vector<Spatial>& some, int64_t most) {
    const Indices drawn = draw.spread(1, static_cast<int64_t>(some.size()), most)[0];
    for (const int64_t i : drawn) taps.compared.push_back(some[static_cast<size_t>(i)]);
    return std::min(static_cast<int64_t>(some.size()), most);
  };
  taps.reached = add(reached, kTaps);
  add(others, kUnreachedTaps);
  return taps;
}

Sample wgrad(const ConvProblem& problem, const Operands& operands, Draw& draw) {
  const auto& [x, w, y] = std::tie(operands.x, operands.w, operands.y);
  const int64_t kernels_of_group = w.size(0) / problem.groups;
  const Indices groups = draw.spread(1, problem.groups, kMostGroups)[0];
  const auto group_count = static_cast<int64_t>(groups.size());
  const auto kernels =
      draw.spread(group_count, kernels_of_group, std::max(kKernels / group_count, int64_t{1}));
  const auto channels =
      draw.spread(group_count, w.size(1), std::min(kChannels, kMostColumns / group_count));
  const Taps taps = drawn_taps(problem, y, draw);

  // The sampled channels of y, then those of x, then the offsets in w, then the sample's shape.
  Indices numbers;
  for (size_t i = 0; i < groups.size(); ++i) {
    for (const int64_t kernel : kernels[i]) {
      numbers.push_back(groups[i] * kernels_of_group + kernel);
    }
  }
  const auto rows = static_cast<int64_t>(numbers.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    for (const int64_t channel : channels[i]) numbers.push_back(groups[i] * w.size(1) + channel);
  }
  const auto read = static_cast<int64_t>(numbers.size());
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t kernel = numbers[static_cast<size_t>(row)] * w.stride(0);
    for (const Spatial& tap : taps.compared) {
      int64_t offset = kernel;
      for (int d = 0; d < problem.spatial_dims; ++d) offset += tap[d] * w.stride(2 + d);
      for (const int64_t channel : channels[static_cast<size_t>(row * group_count / rows)]) {
        numbers.push_back(offset + channel * w.stride(1));
      }
    }
  }
  const auto compared = static_cast<int64_t>(numbers.size()) - read;
  const auto channels_of_kernel = static_cast<int64_t>(channels[0].size());
  const int64_t reached = taps.reached * channels_of_kernel;
  for (const int64_t number : {rows, compared / rows, reached > 0 ? rows : 0, reached}) {
    numbers.push_back(number);
  }
  const auto packed = on_device(numbers, w.device());
  const auto wide = wide_type(problem);
  const auto grads = y.index_select(1, packed.narrow(0, 0, rows)).to(wide);
  const auto inputs = x.index_select(1, packed.narrow(0, rows, read - rows)).to(wide);
  const auto outer = by_group(grads, group_count);
  const auto whole = padded(problem, inputs);
  std::vector<at::Tensor> wanted;
  for (const Spatial& tap : taps.compared) {
    const auto inner = by_group(read_by(problem, tap, whole, grads), group_count);
    // Sum over the batch and all places.
    wanted.push_back(product(outer, inner.transpose(-1, -2)));
  }
  const auto found =
      w.as_strided({reach_of(w)}, {1}).index_select(0, packed.narrow(0, read, compared));
  return {found.view({rows, -1}), at::cat(wanted, -1).view({rows, -1}),
          packed.narrow(0, read + compared, kShapeNumbers)};
}

// The positive numbers of a type. Those near the least lie so far apart, and right outputs are off
// by as much: gradients in float16 without a loss scale are so small.
struct Numbers {
  double least, largest;
};
Numbers numbers_of(at::ScalarType dtype) {
  return AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "numbers_of", [] {
    using Limits = std::numeric_limits<scalar_t>;
    return Numbers{static_cast<double>(Limits::denorm_min()), static_cast<double>(Limits::max())};
  });
}

// Of `count` rows or columns, each of `size` numbers: the norms of the reference, and behind them
// those of the difference.
void read_norms(const double* norms, int64_t count, int64_t size, int64_t reached,
                double mean_square, Comparison& found) {
  const double least = std::sqrt(mean_square * (static_cast<double>(size) / 4 + 1));
  int64_t filled = 0;
  for (int64_t i = 0; i < count; ++i) {
    filled += norms[i] > 0 ? 1 : 0;
    found.local = std::max(found.local, norms[count + i] / std::max(norms[i], least));
  }
  if (reached > 0) {
    found.filled =
        std::min(found.filled, static_cast<double>(filled) / static_cast<double>(reached));
  }
}

double norm_of(const double* numbers, int64_t count) {
  return std::sqrt(std::inner_product(numbers, numbers + count, numbers, 0.0));
}

}  // namespace

Sample sampled(const ConvProblem& problem, const Operands& operands, uint64_t seed) {
  Draw draw(seed);
  switch (problem.op) {
    case ConvOp::fprop:
      return fprop(problem, operands, draw);
    case ConvOp::dgrad:
      return dgrad(problem, operands, draw);
    case ConvOp::wgrad:
      return wgrad(problem, operands, draw);
  }
  TORCH_INTERNAL_ASSERT(false, "unknown operation");
}

at::Tensor compare_output(const ConvProblem& problem, const Operands& operands, uint64_t seed) {
  const at::NoGradGuard no_grad;
  const c10::OptionalDeviceGuard guard(operands.x.device());
  const at::Tensor& output = operands.result(problem.op);
  const auto [found, reference, shape] = sampled(problem, operands, seed);
  // Where the reference overflows the output's type, infinity of its sign is right.
  const auto [least, most] = numbers_of(output.scalar_type());
  reference.clamp_(-most, most);
  const auto difference = at::softshrink(found.clamp_(-most, most) - reference, least);
  // In float32 the squares of small numbers would be zero, and of large ones infinite.
  const auto both = at::stack({reference, difference}).to(at::kDouble);
  const auto norms = [&](int64_t dim) { return at::linalg_vector_norm(both, 2, dim).flatten(); };
  // It is not finite if one of the numbers is not. In the tensor's own type it needs no copy.
  const auto largest = [](const at::Tensor& tensor) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    return at::linalg_vector_norm(tensor, kInfinity).to(at::kDouble).view(1);
  };
  std::vector<at::Tensor> numbers{shape.to(at::kDouble), norms(2), norms(1), largest(output)};
  for (const at::Tensor& operand : operands.list()) {
    if (!operand.is_same(output)) numbers.push_back(largest(operand));
  }
  return at::cat(numbers);
}

Comparison read_comparison(const at::Tensor& numbers) {
  TORCH_CHECK_VALUE(numbers.is_cpu() && numbers.is_contiguous() &&
                        numbers.scalar_type() == at::kDouble && numbers.numel() > kShapeNumbers,
                    "numbers must be those of compare_output(), on the CPU");
  const double* first = numbers.const_data_ptr<double>();
  std::array<int64_t, kShapeNumbers> shape{};
  std::transform(first, first + kShapeNumbers, shape.begin(),
                 [](double n) { return std::llround(n); });
  const auto [rows, columns, reached_rows, reached_columns] = shape;
  const double* by_row = first + kShapeNumbers;
  const double* by_column = by_row + 2 * rows;
  const double* largest = by_column + 2 * columns;
  TORCH_CHECK_VALUE(rows > 0 && columns > 0 && largest < first + numbers.numel(),
                    "numbers must be those of compare_output(), as many as there are");
  Comparison found;
  found.norm = norm_of(by_row, rows);
  found.error = norm_of(by_row + rows, rows);
  found.largest.assign(largest, first + numbers.numel());
  if (found.norm > 0) {
    const double mean_square = found.norm * found.norm / static_cast<double>(rows * columns);
    read_norms(by_row, rows, columns, reached_rows, mean_square, found);
    read_norms(by_column, columns, rows, reached_columns, mean_square, found);
  } else {
    found.filled = reached_rows > 0 ? 0 : 1;
  }
  return found;
}

}  // namespace cudnn_autotune
