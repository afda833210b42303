// The second launch of a depthwise convolution's weight gradient: adds the partial sums of the
// first one in a fixed order, and rounds.
//
// Lanes are adjacent weights, and the block's warps share the splits between them. It is bound by
// the latency of the L2 cache, which has the partial sums.
//
// The first launch multiplies zeros: dy beyond its image, times x that may lie inside. If x is
// infinite or NaN there, a sum that does not depend on it becomes NaN. So a sum that is NaN is
// computed again, from the products that the definition has. Only x outside of its image counts as
// zero, which a dy that is not finite makes NaN.
//
// That ends at the first NaN, or where both infinities are found. First each warp looks at some
// products of weights of its own, so that a NaN or infinity in all of dy or x costs next to
// nothing. What is left, the block computes one after the other.
//
// Macros: ELEMENT, CHANNELS_LAST, WARPS.

constexpr int kLanes = 32;

struct Sizes {
  int images, channels;
  int in_d, in_h, in_w, out_d, out_h, out_w;
  int kernel_d, kernel_h, kernel_w;
  int stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, dilation_d, dilation_h, dilation_w;
};

// The offset of the pixel `place` of an image that has `pixels`.
__device__ __forceinline__ long long offset(const Sizes& s, long long image, int channel,
                                            long long place, long long pixels) {
  return CHANNELS_LAST ? (image * pixels + place) * s.channels + channel
                       : (image * s.channels + channel) * pixels + place;
}

// The products of a weight, by the position of dy. Those of all images are fewer than 2^31.
struct Products {
  const Sizes& s;
  const ELEMENT *x, *dy;
  unsigned x_pixels, y_pixels, count;
  int channel, first_depth, first_row, first_column;  // x that the first position meets

  __device__ __forceinline__ Products(const Sizes& s, const ELEMENT* x, const ELEMENT* dy,
                                      int weight)
      : s(s),
        x(x),
        dy(dy),
        x_pixels(s.in_d * s.in_h * s.in_w),
        y_pixels(s.out_d * s.out_h * s.out_w),
        count(s.images * y_pixels),
        channel(weight / (s.kernel_d * s.kernel_h * s.kernel_w)),
        first_depth(weight / s.kernel_w / s.kernel_h % s.kernel_d * s.dilation_d - s.pad_d),
        first_row(weight / s.kernel_w % s.kernel_h * s.dilation_h - s.pad_h),
        first_column(weight % s.kernel_w * s.dilation_w - s.pad_w) {}

  __device__ __forceinline__ float at(unsigned position) const {
    if (position >= count) return 0.0f;
    const unsigned image = position / y_pixels, place = position % y_pixels;
    const unsigned line = place / s.out_w;
    const int depth = static_cast<int>(line / s.out_h) * s.stride_d + first_depth;
    const int row = static_cast<int>(line % s.out_h) * s.stride_h + first_row;
    const int column = static_cast<int>(place % s.out_w) * s.stride_w + first_column;
    float value = 0.0f;
    if (depth >= 0 && depth < s.in_d && row >= 0 && row < s.in_h && column >= 0 &&
        column < s.in_w) {
      const unsigned from = (static_cast<unsigned>(depth) * s.in_h + row) * s.in_w + column;
      value = to_float(x[offset(s, image, channel, from, x_pixels)]);
    }
    return value * to_float(dy[offset(s, image, channel, place, y_pixels)]);
  }
};

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kProbes = 8, kTogether = 8;  // products that a thread looks at between two votes

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }
__device__ __forceinline__ float sum_of_warp(float value) {
  for (int bits = kLanes / 2; bits > 0; bits /= 2) value += __shfl_xor_sync(kAllLanes, value, bits);
  return value;
}

// partial is (splits, weights). The block has shared memory for 32 * WARPS + 32 floats.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    depthwise_wgrad_sum(const float* __restrict__ partial, const ELEMENT* __restrict__ x,
                        const ELEMENT* __restrict__ dy, ELEMENT* __restrict__ dw, int weights,
                        int splits, int images, int channels, int in_d, int in_h, int in_w,
                        int out_d, int out_h, int out_w, int kernel_d, int kernel_h, int kernel_w,
                        int stride_d, int stride_h, int stride_w, int pad_d, int pad_h, int pad_w,
                        int dilation_d, int dilation_h, int dilation_w) {
  DYNAMIC_SHARED(shared);
  float* const sums = reinterpret_cast<float*>(shared);  // those of threads, then those of warps
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  float* const totals = sums + kLanes * WARPS;
  const int first = blockIdx.x * kLanes;

  float sum = 0.0f;
  if (first + lane < weights) {
    const float* from = partial + static_cast<long long>(warp) * weights + first + lane;
    const long long step = WARPS * static_cast<long long>(weights);
#pragma unroll 8
    for (int split = warp; split < splits; split += WARPS, from += step) sum += *from;
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (warp == 0) {
#pragma unroll
    for (int i = 1; i < WARPS; ++i) sum += sums[i * kLanes + lane];
    totals[lane] = sum;
    if (first + lane < weights) dw[first + lane] = from_float<ELEMENT>(sum);
  }
  __syncthreads();

  unsigned not_numbers = totals[lane] == totals[lane] ? 0 : 1u << lane;
  for (int bits = kLanes / 2; bits > 0; bits /= 2) {
    not_numbers |= __shfl_xor_sync(kAllLanes, not_numbers, bits);
  }
  if (not_numbers == 0) return;

  const Sizes s{images, channels, in_d,     in_h,       in_w,       out_d,     out_h,
                out_w,  kernel_d, kernel_h, kernel_w,   stride_d,   stride_h,  stride_w,
                pad_d,  pad_h,    pad_w,    dilation_d, dilation_h, dilation_w};
  // A weight's total becomes zero if its sum is not known to be NaN.
#pragma unroll 1
  for (int i = warp; i < kLanes; i += WARPS) {
    if ((not_numbers >> i & 1) == 0) continue;
    const Products products(s, x, dy, first + i);
    float probe = 0.0f;
    bool is_nan = false;
#pragma unroll 1
    for (int k = 0; k < kProbes && !is_nan; ++k) {
      probe += products.at(lane + k * kLanes);
      is_nan =
          __any_sync(kAllLanes, probe != probe) || (__any_sync(kAllLanes, probe == infinity()) &&
                                                    __any_sync(kAllLanes, probe == -infinity()));
    }
    if (lane == 0 && !is_nan) totals[i] = 0.0f;
  }
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < kLanes; ++i) {
    if ((not_numbers >> i & 1) == 0 || totals[i] != totals[i]) continue;
    const Products products(s, x, dy, first + i);
    float exact = 0.0f;
    bool is_nan = false;
#pragma unroll 1
    for (unsigned p = 0; p < products.count && !is_nan; p += kTogether * kLanes * WARPS) {
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        exact += products.at(p + k * kLanes * WARPS + threadIdx.x);
      }
      is_nan = __syncthreads_or(exact != exact) ||
               (__syncthreads_or(exact == infinity()) && __syncthreads_or(exact == -infinity()));
    }
    exact = sum_of_warp(exact);
    if (lane == 0) sums[warp] = exact;
    __syncthreads();
    if (threadIdx.x == 0 && !is_nan) {
      for (int other = 1; other < WARPS; ++other) exact += sums[other];
      dw[first + i] = from_float<ELEMENT>(exact);
    }
    __syncthreads();
  }
}
