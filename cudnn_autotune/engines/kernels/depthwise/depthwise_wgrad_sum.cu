// The second launch of a depthwise convolution's weight gradient: adds the partial sums of the
// first one in a fixed order, and rounds.
//
// Lanes are adjacent weights, and the block's warps share the splits between them. It is bound by
// the latency of the L2 cache, which has the partial sums.
//
// The first launch multiplies zeros: dy beyond its image, times x that may lie inside. If x is
// infinite or NaN there, a sum that does not depend on it becomes NaN. So the block computes each
// weight whose sum is NaN again, from the products that the definition has. Only x outside of its
// image counts as zero.
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

// One thread's share of a weight's products; it stops at a NaN.
__device__ float exact_products(const Sizes& s, const ELEMENT* x, const ELEMENT* dy, int weight,
                                int thread, int threads) {
  const int channel = weight / (s.kernel_d * s.kernel_h * s.kernel_w);
  const int kd = weight / s.kernel_w / s.kernel_h % s.kernel_d;
  const int kh = weight / s.kernel_w % s.kernel_h, kw = weight % s.kernel_w;
  const long long x_pixels = static_cast<long long>(s.in_d) * s.in_h * s.in_w;
  const long long y_pixels = static_cast<long long>(s.out_d) * s.out_h * s.out_w;
  float sum = 0.0f;
#pragma unroll 1
  for (long long p = thread; p < s.images * y_pixels && sum == sum; p += threads) {
    const long long image = p / y_pixels, place = p % y_pixels;
    const int depth =
        static_cast<int>(place / s.out_w / s.out_h) * s.stride_d - s.pad_d + kd * s.dilation_d;
    const int row =
        static_cast<int>(place / s.out_w % s.out_h) * s.stride_h - s.pad_h + kh * s.dilation_h;
    const int column = static_cast<int>(place % s.out_w) * s.stride_w - s.pad_w + kw * s.dilation_w;
    float value = 0.0f;
    if (depth >= 0 && depth < s.in_d && row >= 0 && row < s.in_h && column >= 0 &&
        column < s.in_w) {
      const long long from = (static_cast<long long>(depth) * s.in_h + row) * s.in_w + column;
      value = to_float(x[offset(s, image, channel, from, x_pixels)]);
    }
    sum += value * to_float(dy[offset(s, image, channel, place, y_pixels)]);
  }
  return sum;
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
    not_numbers |= __shfl_xor_sync(~0u, not_numbers, bits);
  }
  if (not_numbers == 0) return;

  const Sizes s{images, channels, in_d,     in_h,       in_w,       out_d,     out_h,
                out_w,  kernel_d, kernel_h, kernel_w,   stride_d,   stride_h,  stride_w,
                pad_d,  pad_h,    pad_w,    dilation_d, dilation_h, dilation_w};
#pragma unroll 1
  for (int i = 0; i < kLanes; ++i) {
    if ((not_numbers >> i & 1) == 0) continue;
    float exact = exact_products(s, x, dy, first + i, threadIdx.x, kLanes * WARPS);
    for (int bits = kLanes / 2; bits > 0; bits /= 2) exact += __shfl_xor_sync(~0u, exact, bits);
    if (lane == 0) sums[warp] = exact;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int other = 1; other < WARPS; ++other) exact += sums[other];
      dw[first + i] = from_float<ELEMENT>(exact);
    }
    __syncthreads();
  }
}
