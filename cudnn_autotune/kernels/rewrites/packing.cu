// Copies tensors between a plain form and a packed one, in which a pixel's channels hold those of
// several plain pixels, and zeros. It moves bits and computes nothing.
//
// A plain tensor is (images, height, width, channels), a packed one (images, packed height, packed
// width, phases_h, run), both dense, with the last index fastest. With f < phases_h and
// g < phases_w, the place (f, g * channels + c) of the packed pixel (y, x) is channel c of the
// plain pixel (y * stride_h + f - offset_h, x * stride_w + g - offset_w). It is zero where that
// pixel is not within limit_h x limit_w, where the image is not among those of the plain tensor,
// and behind the last g.
//
// Bit n of FLAT says that the images of tensor n are single pixels, at which nothing has to be
// found.
//
// PACK: the target is the packed tensor. Otherwise it is the plain one, which is zero at pixels
// that are not packed or not within the limits.
//
// A thread writes ITEMS vectors of VECTOR elements, each within one run or one plain pixel, of
// loads of LOAD elements. The source of a vector is contiguous in both directions, and what exists
// of it is one interval, so an element costs a comparison and a load. Neighbouring threads write
// neighbouring vectors. DRAM bounds it: with 3 channels of 2 bytes packed to 16, a vector costs
// some 130 instructions, and an H100 can issue some 180 in the time of the vector's bytes.

template <int bytes>
struct WordOf;
template <>
struct WordOf<2> {
  using Type = unsigned short;
};
template <>
struct WordOf<4> {
  using Type = unsigned;
};
template <>
struct WordOf<8> {
  using Type = uint2;
};
template <>
struct WordOf<16> {
  using Type = uint4;
};
using Element = WordOf<ELEMENT_BYTES>::Type;
using Store = WordOf<ELEMENT_BYTES * VECTOR>::Type;
using Load = WordOf<ELEMENT_BYTES * LOAD>::Type;

constexpr int kLoads = VECTOR / LOAD;
constexpr unsigned kBlockVectors = THREADS * ITEMS;

struct Tensor {
  Element* target;
  const Element* source;
  unsigned vectors;  // vectors of the target
  Divisor run_vectors, target_phases, target_width, target_height;
  int images;  // images of the plain tensor
  int limit_h, limit_w, offset_h, offset_w;
  Divisor stride_h, stride_w;
  int phases_h, phases_w, channels, run;
  int pixel_pitch;  // elements between the source's pixels, rows and images
  long long row_pitch, image_pitch;
};

// The elements [begin, end) of a target's run, or of its pixel, are source[begin], ...; the others
// are zero.
struct Interval {
  const Element* source;
  int begin, end;
};

__device__ __forceinline__ Interval locate(const Tensor& t, unsigned image, int y, int x, int f) {
  const long long begin_of_image = t.image_pitch * image;
#if PACK
  const int row = y * t.stride_h.value + f - t.offset_h;
  const int column = x * t.stride_w.value - t.offset_w;
  const bool exists = static_cast<int>(image) < t.images && row >= 0 && row < t.limit_h;
  const int begin = min(max(0, -column), t.phases_w) * t.channels;
  const int end = exists ? min(t.phases_w, t.limit_w - column) * t.channels : 0;
  const long long place =
      begin_of_image + row * t.row_pitch + static_cast<long long>(column) * t.pixel_pitch;
  return {t.source + place, begin, end};
#else
  unsigned phase_h = y + t.offset_h, phase_w = x + t.offset_w;
  const unsigned row = t.stride_h.split(phase_h), column = t.stride_w.split(phase_w);
  const bool exists = y < t.limit_h && x < t.limit_w && static_cast<int>(phase_h) < t.phases_h &&
                      static_cast<int>(phase_w) < t.phases_w;
  const long long place = begin_of_image + row * t.row_pitch +
                          static_cast<long long>(column) * t.pixel_pitch + phase_h * t.run +
                          phase_w * t.channels;
  return {t.source + place, 0, exists ? t.channels : 0};
#endif
}

template <bool is_flat>
__device__ __forceinline__ Interval interval_of(const Tensor& t, unsigned run) {
  if constexpr (is_flat) {
    const bool exists = static_cast<int>(run) < t.images;
    return {t.source + t.image_pitch * run, 0, exists ? t.channels : 0};
  } else {
    unsigned f = run;  // a run of a packed target
    unsigned x = PACK ? t.target_phases.split(f) : run;
    unsigned y = t.target_width.split(x);
    const unsigned image = t.target_height.split(y);
    return locate(t, image, static_cast<int>(y), static_cast<int>(x), static_cast<int>(f));
  }
}

template <bool is_flat>
__device__ __forceinline__ Store load_vector(const Tensor& t, unsigned vector) {
  unsigned within = vector;
  const unsigned run = t.run_vectors.split(within);
  const int begin = static_cast<int>(within) * VECTOR;
  const Interval interval = interval_of<is_flat>(t, run);
  union {
    Load loads[kLoads];
    Store whole;
  } result;
  const Load zero{};
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int at = begin + i * LOAD;
    const bool exists = at >= interval.begin && at < interval.end;
    result.loads[i] = exists ? *reinterpret_cast<const Load*>(interval.source + at) : zero;
  }
  return result.whole;
}

template <bool is_flat>
__device__ __forceinline__ void copy_tensor(const Tensor& t, unsigned block) {
  const unsigned first = block * kBlockVectors + threadIdx.x;
  Store values[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const unsigned vector = first + i * THREADS;
    if (vector < t.vectors) values[i] = load_vector<is_flat>(t, vector);
  }
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const unsigned vector = first + i * THREADS;
    if (vector < t.vectors) reinterpret_cast<Store*>(t.target)[vector] = values[i];
  }
}

// clang-format off
#define PARAMETERS(n)                                                                              \
  Element* __restrict__ target##n, const Element* __restrict__ source##n, int vectors##n,          \
  DivisorArgument run_vectors##n, DivisorArgument target_phases##n,                                \
  DivisorArgument target_width##n, DivisorArgument target_height##n, int images##n,                \
  int limit_h##n, int limit_w##n, int offset_h##n, int offset_w##n, DivisorArgument stride_h##n,   \
  DivisorArgument stride_w##n, int phases_h##n, int phases_w##n, int channels##n, int run##n,      \
  int pixel_pitch##n, long long row_pitch##n, long long image_pitch##n
#define TENSOR(n)                                                                                  \
  Tensor {                                                                                         \
    target##n, source##n, static_cast<unsigned>(vectors##n), Divisor(run_vectors##n),              \
    Divisor(target_phases##n), Divisor(target_width##n), Divisor(target_height##n), images##n,     \
    limit_h##n, limit_w##n, offset_h##n, offset_w##n, Divisor(stride_h##n), Divisor(stride_w##n),  \
    phases_h##n, phases_w##n, channels##n, run##n, pixel_pitch##n, row_pitch##n, image_pitch##n    \
  }
// clang-format on

// The tensors one after the other, each beginning with a block of its own.
extern "C" __global__ void __launch_bounds__(THREADS) copy_tensors(PARAMETERS(0) SECOND THIRD) {
  unsigned block = blockIdx.x;
#if TENSORS > 1
  const unsigned blocks_of_0 = (vectors0 + kBlockVectors - 1) / kBlockVectors;
  if (block >= blocks_of_0) {
    block -= blocks_of_0;
#if TENSORS > 2
    const unsigned blocks_of_1 = (vectors1 + kBlockVectors - 1) / kBlockVectors;
    if (block >= blocks_of_1) return copy_tensor<(FLAT & 4) != 0>(TENSOR(2), block - blocks_of_1);
#endif
    return copy_tensor<(FLAT & 2) != 0>(TENSOR(1), block);
  }
#endif
  copy_tensor<(FLAT & 1) != 0>(TENSOR(0), block);
}
