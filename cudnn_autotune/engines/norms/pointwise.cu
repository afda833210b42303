// A 1x1 convolution of stride 1 of what a norm and a ReLU make of its input, on the tensor cores of
// compute capability 9.0, channels_last:
//
//   out[p][n] = activation(sum over c of z[p][c] * w[n][c] + bias[n] + residual[p][n])
//   z[p][c] = relu((in[p][c] + offset[c] - mean[c]) * s[c] + shift[c]),
//   s[c] = scale[c] / sqrt(variance[c] + eps)
//
// z is computed in float32 as in * s + ((offset - mean) * s + shift), and rounded once. A vector
// that is not given (null) has no part in it. Pixels of the input are `in_stride` apart, so that it
// may be a slice of channels.
//
// A block goes over tiles of kRows pixels, for N_TILE channels of the output. The input passes
// through a ring of STAGES stages of kChunk channels, in planes of 8 channels, where a pixel is a
// row of 16 bytes. Each thread makes z of what it has copied itself, in place. A product sums over
// two planes. With KEEPS_FILTERS all filters stay in shared memory, else they pass through the ring
// with the input.
//
// The memory bounds it, or the L2 cache: the copies of STAGES - 1 stages are under way, also those
// of the next tile while one is stored.

constexpr int kThreads = 128 * WARPGROUPS;
constexpr int kRows = 64 * M_TILES * WARPGROUPS;
constexpr int kPlanes = 8, kChunk = 8 * kPlanes;
constexpr int kTogether = kThreads / kPlanes;  // rows that are copied at a time
// Planes take an odd number of rows, so that they begin in different banks.
constexpr int kPitch = kRows + 1, kFilterPitch = N_TILE + 1;
constexpr int kInputBytes = 16 * kPlanes * kPitch, kFilterBytes = 16 * kPlanes * kFilterPitch;
constexpr int kFactorBytes = 8 * kChunk;  // the factors and addends of a chunk
constexpr int kTiles = N_TILE / 8;

struct Norm {
  const VECTOR *scale, *variance, *mean, *offset, *shift;
  float eps;
};

// The greater one of a number and 0, of two numbers in a register; NaN stays NaN.
template <typename T>
__device__ __forceinline__ unsigned positive_part(unsigned two) {
#ifdef __CUDACC_RTC__
  unsigned result;
  if constexpr (kIsHalf<T>) {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(two), "r"(0));
  } else {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(two), "r"(0));
  }
  return result;
#else
  const float2 values = unpack<T>(two);
  return pack<T>(values.x < 0.0f ? 0.0f : values.x, values.y < 0.0f ? 0.0f : values.y);
#endif
}

// Computes the factor and the addend of each channel; zeros behind the last one. For a chunk there
// are 4 quadruples for each plane: two of factors, two of addends.
__device__ __forceinline__ void compute_factors(float4* factors, const Norm& norm, int channels,
                                                int chunks) {
  float* const numbers = reinterpret_cast<float*>(factors);
  for (int c = threadIdx.x; c < chunks * kChunk; c += kThreads) {
    float factor = 0.0f, addend = 0.0f;
    if (c < channels) {
      factor = norm.scale == nullptr ? 1.0f : to_float(norm.scale[c]);
      if (norm.variance != nullptr) factor /= sqrtf(to_float(norm.variance[c]) + norm.eps);
      if (norm.offset != nullptr) addend = to_float(norm.offset[c]);
      if (norm.mean != nullptr) addend -= to_float(norm.mean[c]);
      if (norm.offset != nullptr || norm.mean != nullptr) addend *= factor;
      if (norm.shift != nullptr) addend += to_float(norm.shift[c]);
    }
    const int plane = c % kChunk / 8;
    float* const place =
        numbers + c / kChunk * (2 * kChunk) + 4 * ((c % 8 / 4) * kPlanes + plane) + c % 4;
    place[0] = factor;
    place[2 * 4 * kPlanes] = addend;
  }
}

// Copies a chunk of the channels of a tile; zeros from beyond the input. Neighbouring threads copy
// the planes of a pixel.
__device__ __forceinline__ void copy_input(unsigned char* stage, const ELEMENT* in, int in_stride,
                                           int channels, int pixels, int tile, int chunk) {
  const int plane = threadIdx.x % kPlanes, first = threadIdx.x / kPlanes;
  const int channel = chunk * kChunk + 8 * plane, pixel = tile * kRows + first;
  const ELEMENT* from = in + static_cast<long long>(pixel) * in_stride + channel;
  unsigned char* to = stage + (plane * kPitch + first) * 16;
  const long long step = static_cast<long long>(kTogether) * in_stride;
#pragma unroll
  for (int i = 0; i < kRows / kTogether; ++i) {
    const bool exists = channel < channels && pixel + i * kTogether < pixels;
    copy_async<16>(to + 16 * i * kTogether, exists ? from + i * step : in, exists);
  }
}

// Copies a chunk of the filters of a block's channels; zeros behind the last channel of the input.
__device__ __forceinline__ void copy_filters(unsigned char* stage, const ELEMENT* w, int channels,
                                             int chunk) {
  const int plane = threadIdx.x % kPlanes, first = threadIdx.x / kPlanes;
  const int channel = chunk * kChunk + 8 * plane;
  const bool exists = channel < channels;
  const ELEMENT* from = exists ? w + static_cast<long long>(first) * channels + channel : w;
  unsigned char* to = stage + (plane * kFilterPitch + first) * 16;
  const long long step = exists ? static_cast<long long>(kTogether) * channels : 0;
#pragma unroll
  for (int i = 0; i < (N_TILE + kTogether - 1) / kTogether; ++i) {
    if (N_TILE % kTogether != 0 && first + i * kTogether >= N_TILE) break;
    copy_shared_by_blocks(to + 16 * i * kTogether, from + i * step, exists);
  }
}

// Replaces what this thread has copied of the input by its norm and ReLU.
__device__ __forceinline__ void normalise(unsigned char* stage, const float4* factors) {
  const int plane = threadIdx.x % kPlanes, first = threadIdx.x / kPlanes;
  uint4* const place = reinterpret_cast<uint4*>(stage) + plane * kPitch + first;
  const float4 a = factors[plane], b = factors[kPlanes + plane];
  const float4 c = factors[2 * kPlanes + plane], d = factors[3 * kPlanes + plane];
  const auto both = [](unsigned two, float factor, float other, float addend, float last) {
    const float2 x = unpack<ELEMENT>(two);
    return positive_part<ELEMENT>(pack<ELEMENT>(x.x * factor + addend, x.y * other + last));
  };
#pragma unroll
  for (int i = 0; i < kRows / kTogether; ++i) {
    const uint4 x = place[i * kTogether];
    place[i * kTogether] = make_uint4(both(x.x, a.x, a.y, c.x, c.y), both(x.y, a.z, a.w, c.z, c.w),
                                      both(x.z, b.x, b.y, d.x, d.y), both(x.w, b.z, b.w, d.z, d.w));
  }
}

// Adds the bias and the residual to the sums of 16 pixels, which a warp holds, and stores them.
__device__ __forceinline__ void store(const float (&sums)[N_TILE / 2], ELEMENT* out,
                                      const ELEMENT* bias, const ELEMENT* residual,
                                      int out_channels, int pixels, int first) {
  using Pair = Two<ELEMENT>;
  const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int pixel = first + lane / 4 + 8 * h;
    const bool exists = pixel < pixels;
    const long long place = static_cast<long long>(exists ? pixel : 0) * out_channels;
    const auto pair = [&](int j) {
      float low = sums[4 * j + 2 * h], high = sums[4 * j + 2 * h + 1];
      if (HAS_BIAS) {
        const float2 more = reinterpret_cast<const Pair*>(bias + 8 * j + 2 * t)->values();
        low += more.x;
        high += more.y;
      }
      if (HAS_RESIDUAL) {
        const float2 more =
            reinterpret_cast<const Pair*>(residual + place + 8 * j + 2 * t)->values();
        low += more.x;
        high += more.y;
      }
      return pack<ELEMENT>(activate<ACTIVATION>(low), activate<ACTIVATION>(high));
    };
#pragma unroll
    for (int j = 0; j + 4 <= kTiles; j += 4) {
      // Lane t has 2 channels of each of 4 tiles, and gets 8 channels of tile t from its
      // neighbours.
      unsigned words[4] = {pair(j), pair(j + 1), pair(j + 2), pair(j + 3)};
#pragma unroll
      for (int bit = 1; bit < 4; bit *= 2) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          if ((q & bit) != 0) continue;
          const unsigned given = (t & bit) != 0 ? words[q] : words[q | bit];
          const unsigned taken = __shfl_xor_sync(0xffffffffu, given, bit);
          if ((t & bit) != 0) {
            words[q] = taken;
          } else {
            words[q | bit] = taken;
          }
        }
      }
      if (exists) {
        *reinterpret_cast<uint4*>(out + place + 8 * (j + t)) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
#pragma unroll
    for (int j = kTiles / 4 * 4; j < kTiles; ++j) {
      const unsigned word = pair(j);
      if (exists) *reinterpret_cast<unsigned*>(out + place + 8 * j + 2 * t) = word;
    }
  }
}

// gridDim.x is at most `tiles`; gridDim.y is out_channels / N_TILE. The layout of shared memory:
// the stages of the input, the filters, the factors.
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    norm_pointwise(const ELEMENT* in, const ELEMENT* w, ELEMENT* out, const ELEMENT* bias,
                   const ELEMENT* residual, const VECTOR* scale, const VECTOR* variance,
                   const VECTOR* mean, const VECTOR* offset, const VECTOR* shift, float eps,
                   int channels, int in_stride, int out_channels, int pixels, int tiles) {
  DYNAMIC_SHARED(shared);
  const int chunks = (channels + kChunk - 1) / kChunk, first_channel = blockIdx.y * N_TILE;
  w += static_cast<long long>(first_channel) * channels;
  out += first_channel;
  if (HAS_BIAS) bias += first_channel;
  if (HAS_RESIDUAL) residual += first_channel;
  unsigned char* const filters = shared + STAGES * kInputBytes;
  float4* const factors =
      reinterpret_cast<float4*>(filters + (KEEPS_FILTERS ? chunks : STAGES) * kFilterBytes);

  // What is copied next.
  int next_tile = blockIdx.x, next_chunk = 0, next_slot = 0;
  const auto copy_next = [&] {
    if (next_tile < tiles) {
      copy_input(shared + next_slot * kInputBytes, in, in_stride, channels, pixels, next_tile,
                 next_chunk);
      if (!KEEPS_FILTERS || next_tile == blockIdx.x) {
        copy_filters(filters + (KEEPS_FILTERS ? next_chunk : next_slot) * kFilterBytes, w, channels,
                     next_chunk);
      }
    }
    commit_copies();
    next_slot = next_slot + 1 == STAGES ? 0 : next_slot + 1;
    if (++next_chunk == chunks) {
      next_chunk = 0;
      next_tile += gridDim.x;
    }
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) copy_next();
  compute_factors(factors, Norm{scale, variance, mean, offset, shift, eps}, channels, chunks);
  __syncthreads();

  // The same in all lanes, as the compiler sees by this.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int first_row = warpgroup * (64 * M_TILES);
  int slot = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float sums[M_TILES][N_TILE / 2];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
      for (int i = 0; i < N_TILE / 2; ++i) sums[m][i] = 0.0f;
    }
    for (int chunk = 0; chunk < chunks; ++chunk) {
      unsigned char* const stage = shared + slot * kInputBytes;
      copies_arrived<STAGES - 2>();
      normalise(stage, factors + chunk * (kFactorBytes / 16));
      publish_writes();
      products_done<0>();
      // All have this stage, and are done with the one before, which is copied to now.
      __syncthreads();
      copy_next();
      const Matrix left = Matrix::at(shared_address(stage) + 16 * first_row, kPitch, 8);
      const Matrix right = Matrix::at(
          shared_address(filters + (KEEPS_FILTERS ? chunk : slot) * kFilterBytes), kFilterPitch, 8);
      begin_products();
#pragma unroll
      for (int pair = 0; pair < kPlanes / 2; ++pair) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
          MULTIPLY<ELEMENT, 0, 0>(sums[m], left + (2 * pair * kPitch + 64 * m),
                                  right + 2 * pair * kFilterPitch);
        }
      }
      commit_products();
      slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
    products_done<0>();
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      store(sums[m], out, bias, residual, out_channels, pixels,
            tile * kRows + first_row + 64 * m + threadIdx.x % 128 / 32 * 16);
    }
  }
}
