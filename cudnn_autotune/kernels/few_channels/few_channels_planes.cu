// A forward convolution of contiguous images or volumes with few channels, on tensor cores: a
// matrix of output channels times window elements, times one of window elements times output
// pixels. Or the gradient of an input, for stride 1, as a forward convolution of the output's
// gradient.
//
// The block copies the rows that a tile of TILE_P x TILE_Q pixels needs, from every plane of the
// image, to shared memory; while it computes one tile, the next one is copied. A window is
// PLANES * KERNEL_H rows of KERNEL_W elements. A register of the right fragment is a pair of
// neighbouring elements (few_channels_pairs.cuh). If some windows begin at odd elements, it is
// shifted out of two words. A warp keeps the weights of M_TILES * 16 channels in registers, and
// multiplies them with N_TILES * 8 neighbouring pixels at a time.
//
// A row of the output begins anywhere, so the block's outputs go to shared memory first, each row
// as far behind a multiple of 16 bytes as it is in the output. From there whole vectors are stored,
// then what lies before the first and behind the last one of each row.
//
// Banks: lane (g, t) reads word g * STRIDE_W / 2 + t of a row, different words or the same ones for
// strides up to 8, but for two of them. It writes word (STAGE_PITCH * g + shift) / 2 + t, and rows
// are 4 banks apart; with different shifts two may meet.

constexpr int THREADS = 32 * WARPS_C * WARPS_Q;
constexpr int BLOCK_CHANNELS = 16 * M_TILES * WARPS_C;
constexpr int GROUPS_Q = TILE_Q / (8 * N_TILES);  // groups of pixels that a warp takes at a time
constexpr int GROUPS = TILE_P * GROUPS_Q;
// Some windows begin at odd elements of half types.
constexpr bool IS_ODD = PAIR == 2 && (STRIDE_W % 2 == 1 || LEFT % 2 == 1);
constexpr int VECTOR = 16 / sizeof(ELEMENT);
constexpr int STAGE_PITCH = (TILE_Q + 63) / 64 * 64 + 8;
constexpr int STAGE_ROWS = TILE_P * STAGE_CHANNELS;  // of the channels that there are
constexpr int ROW_LANES = TILE_Q < 256 ? 16 : 32;    // lanes that store a row together

static_assert(CHANNELS == 1 && LEADS == 0 && TILE_Q % (8 * N_TILES) == 0 && PITCH % 8 == 0, "");
static_assert(PITCH >= LEFT + STRIDE_W * (TILE_Q - 1) + PAIR * (ROW_PAIRS + IS_ODD), "");
static_assert(SHARED_BYTES == 2 * TILE_BYTES + STAGE_ROWS * STAGE_PITCH * 4 / PAIR,
              "tiles and outputs");

// The place in the output, of less than 2^31 elements, of a tile's first pixel in a channel.
__device__ __forceinline__ unsigned output_begin(int channel, const Tile& tile,
                                                 const Shape& shape) {
  unsigned plane = tile.sample(shape) * shape.channels + channel;
  if (IS_3D) plane = plane * shape.z + tile.depth(shape);
  return (plane * shape.p + tile.p) * shape.q + tile.q;
}

// A pair of a window's elements.
template <typename T>
__device__ __forceinline__ unsigned pair_at(const T* word, int odd) {
  const auto* const words = reinterpret_cast<const unsigned*>(word);
  return IS_ODD ? __funnelshift_r(words[0], words[1], 16 * odd) : words[0];
}
__device__ __forceinline__ unsigned pair_at(const float* number, int) { return to_tf32(*number); }

template <typename T>
__device__ __forceinline__ unsigned bits_of(T number) {
  return number.bits;
}
__device__ __forceinline__ unsigned bits_of(float number) { return to_tf32(number); }

// Writes two numbers to any place.
template <typename T>
__device__ __forceinline__ void put(T* place, const Two<T>& two) {
  place[0] = T{static_cast<unsigned short>(two.bits)};
  place[1] = T{static_cast<unsigned short>(two.bits >> 16)};
}
__device__ __forceinline__ void put(float* place, const Two<float>& two) {
  place[0] = two.both.x, place[1] = two.both.y;
}

// sums += left * right, of one register of window elements or of two.
template <typename T>
__device__ __forceinline__ void multiply(float (&sums)[4], const unsigned (&left)[2],
                                         const unsigned (&more)[2], const unsigned (&right)[2]) {
  if constexpr (PAIR == 2) {
    mma_16x8x16<T>(sums, {left[0], left[1], more[0], more[1]}, right);
  } else {
    mma_16x8x8_tf32(sums, {left[0], left[1], more[0], more[1]}, right);
  }
}
template <typename T>
__device__ __forceinline__ void multiply(float (&sums)[4], const unsigned (&left)[2],
                                         unsigned right) {
  if constexpr (PAIR == 2) {
    mma_16x8x8<T>(sums, left, right);
  } else {
    mma_16x8x8_tf32(sums, {left[0], left[1], 0u, 0u}, {right, 0u});
  }
}

// A weight of an output channel: that of a row of a window and an element of the row. The gradient
// of an input is a convolution with filters that are turned round (IS_TURNED).
__device__ __forceinline__ unsigned weight_at(const ELEMENT* __restrict__ w, int channel, int row,
                                              int element, int channels) {
#if IS_TURNED
  constexpr int rows = KERNEL_D * KERNEL_H;
  const int filter = row / rows, behind = filter * rows + rows - 1 - row;
  return bits_of(
      w[((filter * channels + channel) * rows + behind) * KERNEL_W + KERNEL_W - 1 - element]);
#else
  return bits_of(w[(channel * PLANES * KERNEL_H + row) * KERNEL_W + element]);
#endif
}
// A pair of them, zeros where there are none.
__device__ __forceinline__ unsigned weights_at(const ELEMENT* __restrict__ w, int channel, int pair,
                                               int channels) {
  const int row = pair / ROW_PAIRS, element = pair % ROW_PAIRS * PAIR;
  if (channel >= channels || pair >= PAIRS) return 0u;
  const unsigned low = weight_at(w, channel, row, element, channels);
  if (PAIR == 1 || element + 1 >= KERNEL_W) return low;
  return low | weight_at(w, channel, row, element + 1, channels) << 16;
}

// Stores the rows of outputs that are staged.
__device__ __forceinline__ void store(ELEMENT* __restrict__ y, const ELEMENT* stage,
                                      int first_channel, const Tile& tile, const Shape& shape) {
  constexpr int step = THREADS / ROW_LANES;
  const int lane = threadIdx.x % ROW_LANES, first = threadIdx.x / ROW_LANES;
  const int channels = min(BLOCK_CHANNELS, shape.channels - first_channel);
  const int rows = min(TILE_P, shape.p - tile.p), count = min(TILE_Q, shape.q - tile.q);
#pragma unroll 1
  for (int row = 0; row < rows; ++row) {
    const ELEMENT* from = stage + (row * STAGE_CHANNELS + first) * STAGE_PITCH;
    unsigned begin = output_begin(first_channel + first, tile, shape) + row * shape.q;
#pragma unroll 2
    for (int channel = first; channel < channels; channel += step) {
      const int shift = begin % VECTOR;
      const int before = -begin % VECTOR;  // elements before the vectors
#pragma unroll
      for (int slot = 0; slot < TILE_Q / VECTOR; slot += ROW_LANES) {
        const int element = before + VECTOR * (slot + lane);
        if (element + VECTOR <= count) {
          *reinterpret_cast<uint4*>(y + begin + element) =
              *reinterpret_cast<const uint4*>(from + shift + element);
        }
      }
#if !HAS_WHOLE_ROWS
      // Eight lanes take what is before the vectors, and eight what is behind them.
      const int behind = before + max(count - before, 0) / VECTOR * VECTOR;
      const int element = lane < 8 ? lane : behind + lane - 8;
      if (element < (lane < 8 ? min(before, count) : lane < 16 ? count : 0)) {
        y[begin + element] = from[shift + element];
      }
#endif
      from += step * STAGE_PITCH;
      begin += static_cast<unsigned>(step) * (IS_3D ? shape.z : 1) * shape.p * shape.q;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    few_channels_planes(const ELEMENT* __restrict__ x, const ELEMENT* __restrict__ w,
                        const ELEMENT* __restrict__ bias, const ELEMENT* __restrict__ residual,
                        ELEMENT* __restrict__ y, int depth, int height, int width, int channels,
                        int z, int p, int q, int pad_d, int pad_h, int pad_w, int tiles_p,
                        int tiles_q, int tiles) {
  const Shape shape{depth, height, width, channels, z, p, q, pad_d, pad_h, pad_w, tiles_p, tiles_q};
  DYNAMIC_SHARED(shared);
  auto* const stage = reinterpret_cast<ELEMENT*>(shared + 2 * TILE_BYTES);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int warp_c = warp % WARPS_C, warp_q = warp / WARPS_C;
  const int first_channel = blockIdx.y * BLOCK_CHANNELS;
  const int stage_channel = warp_c * M_TILES * 16 + g;

  begin_copy<TILE_H, THREADS>(reinterpret_cast<ELEMENT*>(shared), x, tile_at(blockIdx.x, shape),
                              shape);
  commit_copies();

  // Those of channels g and g + 8 of each sixteen.
  unsigned left[REGISTERS][M_TILES][2];
  float biases[M_TILES][2] = {};
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int channel = first_channel + stage_channel + 16 * m + 8 * h;
#pragma unroll
      for (int i = 0; i < REGISTERS; ++i)
        left[i][m][h] = weights_at(w, channel, 4 * i + t, channels);
#if HAS_BIAS
      if (channel < channels) biases[m][h] = to_float(bias[channel]);
#endif
    }
  }
  const int odd = IS_ODD ? (LEFT + g * STRIDE_W) % 2 : 0;  // of the windows of this lane's pixels

  int buffer = 0;
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    copies_arrived<0>();
    __syncthreads();  // all have them, and are done with the other buffer and the stage
    if (index + gridDim.x < tiles) {
      begin_copy<TILE_H, THREADS>(reinterpret_cast<ELEMENT*>(shared + (buffer ^ 1) * TILE_BYTES), x,
                                  tile_at(index + gridDim.x, shape), shape);
      commit_copies();
    }
    const auto* image = reinterpret_cast<const ELEMENT*>(shared + buffer * TILE_BYTES);
    const Tile tile = tile_at(index, shape);
    unsigned begins[M_TILES][2];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        begins[m][h] = output_begin(first_channel + stage_channel + 16 * m + 8 * h, tile, shape);
      }
    }
#pragma unroll 1
    for (int group = warp_q; group < GROUPS; group += WARPS_Q) {
      const int row = TILE_P == 1 ? 0 : group / GROUPS_Q;
      const int column = (group - row * GROUPS_Q) * 8 * N_TILES;
      const ELEMENT* const window =
          image + row * STRIDE_H * PITCH + LEFT + (column + g) * STRIDE_W - odd;
      float sums[M_TILES][N_TILES][4];
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
#pragma unroll
          for (int k = 0; k < 4; ++k) sums[m][n][k] = biases[m][k / 2];
        }
      }
#pragma unroll
      for (int i = 0; i < REGISTERS; i += 2) {
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
          unsigned right[2];
#pragma unroll
          for (int k = 0; k < 2 && i + k < REGISTERS; ++k) {
            right[k] = pair_at(window + 8 * n * STRIDE_W + lane_offset(i + k, t), odd) &
                       lane_mask(i + k, t, 0);
          }
#pragma unroll
          for (int m = 0; m < M_TILES; ++m) {
            if (i + 1 < REGISTERS) {
              multiply<ELEMENT>(sums[m][n], left[i][m], left[i + 1][m], right);
            } else {
              multiply<ELEMENT>(sums[m][n], left[i][m], right[0]);
            }
          }
        }
      }
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int channel = stage_channel + 16 * m + 8 * h;
          if (STAGE_CHANNELS < BLOCK_CHANNELS && channel >= STAGE_CHANNELS) continue;
          const unsigned begin = begins[m][h] + row * q;
          ELEMENT* const place =
              stage + (row * STAGE_CHANNELS + channel) * STAGE_PITCH + begin % VECTOR;
#if HAS_RESIDUAL
          const int count = first_channel + channel < channels && tile.p + row < p ? q - tile.q : 0;
#endif
#pragma unroll
          for (int n = 0; n < N_TILES; ++n) {
            const int element = column + 8 * n + 2 * t;
            float first = sums[m][n][2 * h], second = sums[m][n][2 * h + 1];
#if HAS_RESIDUAL
            const ELEMENT* const more = residual + begin + element;
            if (element < count) first += to_float(more[0]);
            if (element + 1 < count) second += to_float(more[1]);
#endif
            const auto two =
                Two<ELEMENT>::of(activate<ACTIVATION>(first), activate<ACTIVATION>(second));
#if HAS_ODD_ROWS
            put(place + element, two);
#else
            *reinterpret_cast<Two<ELEMENT>*>(place + element) = two;
#endif
          }
        }
      }
    }
    __syncthreads();
    store(y, stage, first_channel, tile, shape);
    buffer ^= 1;
  }
}
