// A forward convolution of channels_last images or volumes with few channels, on tensor cores: a
// matrix of output pixels times window elements, times one of window elements times output
// channels. Or the gradient of an input, for stride 1, as a forward convolution of the output's
// gradient.
//
// The block copies the rows of the image that a tile of TILE_P x TILE_Q pixels needs to shared
// memory. A window is PLANES * KERNEL_H rows of ROW elements that lie together. A register of the
// left fragment is a pair of neighbouring elements (few_channels_pairs.cuh). A row begins at an odd
// element if LEFT is odd: its pairs then begin one element earlier (`lead`).
//
// If neighbouring pixels of half types are an odd number of elements apart, a warp computes every
// other pixel (PHASES is 2), and the weights are prepared for both leads.
//
// A warp keeps the weights of N_TILES * 8 channels in registers. It multiplies them with M_TILES *
// 16 pixels of a row at a time. Which channel is which column of a fragment is chosen so that a
// lane ends with neighbouring channels of a pixel (8, if N_TILES is a multiple of 4), next to those
// of the next lane, and stores them at once. Behind the last channel weights are zeros, and nothing
// is stored (IS_RAGGED).
//
// Banks: lane (g, t) reads word g * PIXELS_APART / 2 + t of a row. These are 32 different words
// in a row, or the same ones, if pixels are up to 4 words apart; only where the four pairs belong
// to two rows may words meet. A block goes from tile to tile; while it computes one, the next one
// is copied.

constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int PHASES = 1 + PIXEL_STEP % PAIR;                  // pixels between those of a warp
constexpr int PIXELS_APART = PHASES * PIXEL_STEP;              // elements between those
constexpr int WEIGHT_PITCH = (4 * REGISTERS + 3) / 8 * 8 + 4;  // words: rows 4 banks apart
constexpr int BLOCK_CHANNELS = WARPS_N * N_TILES * 8;
constexpr int GROUPS_Q = TILE_Q / (16 * PHASES);  // groups of 16 pixels
constexpr int GROUPS = TILE_P * GROUPS_Q;         // groups per phase
constexpr int WARPS_OF_PHASE = WARPS_M / PHASES;

static_assert(LEADS == (PHASES == 2 ? 1 : LEFT % PAIR) && PLANES == KERNEL_D, "");
static_assert(PITCH % 8 == 0 && TILE_Q % (16 * PHASES) == 0 && WARPS_M % PHASES == 0, "");
static_assert(PITCH >= LEFT + PIXEL_STEP * (TILE_Q - 1) + PAIR * ROW_PAIRS,
              "a row of the tile fits");
static_assert(SHARED_BYTES ==
                  2 * TILE_BYTES + 4 * BLOCK_CHANNELS * (PHASES * WEIGHT_PITCH + HAS_BIAS),
              "two tiles, weights and biases");

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
using Word = WordOf<STORE * sizeof(ELEMENT)>::Type;  // what is stored at once
constexpr int VECTOR = (STORE + 1) / 2;              // tiles with channels in it
static_assert(N_TILES % VECTOR == 0, "");

// The first of two neighbouring channels of the warp's that are columns 2 t and 2 t + 1 of a tile.
__device__ __forceinline__ constexpr int tile_channel(int tile, int t) {
  return (tile / VECTOR * 4 + t) * 2 * VECTOR + tile % VECTOR * 2;
}

// A weight of an output channel: that of a row of a window and an element of the row. The gradient
// of an input is a convolution with filters that are turned round (IS_TURNED).
__device__ __forceinline__ ELEMENT weight_at(const ELEMENT* __restrict__ w, int channel, int row,
                                             int element, int channels) {
#if IS_TURNED
  const int tap = KERNEL_W - 1 - element / CHANNELS, filter = element % CHANNELS;
  const int behind = PLANES * KERNEL_H - 1 - row;
  return w[((filter * PLANES * KERNEL_H + behind) * KERNEL_W + tap) * channels + channel];
#else
  return w[(channel * PLANES * KERNEL_H + row) * ROW + element];
#endif
}

// Writes the block's weights to shared memory, a row per column of the fragments, in the order of
// the pairs.
__device__ __forceinline__ void prepare_weights(ELEMENT* target, const ELEMENT* __restrict__ w,
                                                int lead, int channels) {
  constexpr int elements = 4 * PAIR * REGISTERS;
  for (int i = threadIdx.x; i < BLOCK_CHANNELS * elements; i += THREADS) {
    const int row = i / elements, place = i - row * elements;
    const int tile = row / 8, column = row % 8;
    const int channel = blockIdx.y * BLOCK_CHANNELS + tile / N_TILES * N_TILES * 8 +
                        tile_channel(tile % N_TILES, column / 2) + column % 2;
    const int kernel_row = place / (PAIR * ROW_PAIRS);
    const int element = place - kernel_row * PAIR * ROW_PAIRS - lead;
    const bool valid = kernel_row < PLANES * KERNEL_H && element >= 0 && element < ROW &&
                       (!IS_RAGGED || channel < channels);
    target[row * PAIR * WEIGHT_PITCH + place] =
        valid ? weight_at(w, channel, kernel_row, element, channels) : ELEMENT{0};
  }
}

// A register of a fragment.
template <typename T>
__device__ __forceinline__ unsigned register_at(const T* pair) {
  return *reinterpret_cast<const unsigned*>(pair);
}
__device__ __forceinline__ unsigned register_at(const float* number) { return to_tf32(*number); }

// Adds the residual, applies the activation, and stores 2 * N_TILES channels of a pixel, of those
// that there are. `high` is 0 for the fragments' row g, and 1 for row g + 8.
__device__ __forceinline__ void store(ELEMENT* y, const ELEMENT* residual,
                                      const float (&sums)[N_TILES][4], int high, int channels) {
  constexpr int count = 2 * VECTOR / STORE;
#pragma unroll
  for (int v = 0; v < N_TILES; v += VECTOR) {
    union {
      Word words[count];
      Two<ELEMENT> pairs[VECTOR];
    } out;
    const auto is_there = [&](int i) {
      return !IS_RAGGED || tile_channel(v, 0) + i * STORE < channels;
    };
#if HAS_RESIDUAL
#pragma unroll
    for (int i = 0; i < count; ++i) {
      out.words[i] = Word{};
      if (is_there(i)) {
        out.words[i] = *reinterpret_cast<const Word*>(residual + tile_channel(v, 0) + i * STORE);
      }
    }
#endif
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      float first = sums[v + j][2 * high], second = sums[v + j][2 * high + 1];
#if HAS_RESIDUAL
      const float2 more = out.pairs[j].values();
      first += more.x;
      second += more.y;
#endif
      out.pairs[j] = Two<ELEMENT>::of(activate<ACTIVATION>(first), activate<ACTIVATION>(second));
    }
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if (is_there(i)) {
        *reinterpret_cast<Word*>(y + tile_channel(v, 0) + i * STORE) = out.words[i];
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    few_channels(const ELEMENT* __restrict__ x, const ELEMENT* __restrict__ w,
                 const ELEMENT* __restrict__ bias, const ELEMENT* __restrict__ residual,
                 ELEMENT* __restrict__ y, int depth, int height, int width, int channels, int z,
                 int p, int q, int pad_d, int pad_h, int pad_w, int tiles_p, int tiles_q,
                 int tiles) {
  const Shape shape{depth, height, width, channels, z, p, q, pad_d, pad_h, pad_w, tiles_p, tiles_q};
  DYNAMIC_SHARED(shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int warp_n = warp % WARPS_N, warp_m = warp / WARPS_N;
  const int phase = warp_m % PHASES;
  const int lead = PHASES == 2 ? (LEFT + phase) % 2 : LEFT % PAIR;

  begin_copy<TILE_H, THREADS>(reinterpret_cast<ELEMENT*>(shared), x, tile_at(blockIdx.x, shape),
                              shape);
  commit_copies();

  // The weights of this warp, by way of shared memory.
  auto* const weights = reinterpret_cast<ELEMENT*>(shared + 2 * TILE_BYTES);
  constexpr int weight_elements = BLOCK_CHANNELS * WEIGHT_PITCH * PAIR;
#pragma unroll
  for (int k = 0; k < PHASES; ++k) {
    prepare_weights(weights + k * weight_elements, w, PHASES == 2 ? k : lead, channels);
  }
#if HAS_BIAS
  auto* const biases = reinterpret_cast<float*>(weights + PHASES * weight_elements);
  for (int i = threadIdx.x; i < BLOCK_CHANNELS; i += THREADS) {
    const int channel = blockIdx.y * BLOCK_CHANNELS + i;
    biases[i] = !IS_RAGGED || channel < channels ? to_float(bias[channel]) : 0.0f;
  }
#endif
  __syncthreads();
  unsigned right[REGISTERS][N_TILES];
  {
    const ELEMENT* const own = weights + (PHASES - 1) * lead * weight_elements;
#pragma unroll
    for (int i = 0; i < REGISTERS; ++i) {
#pragma unroll
      for (int j = 0; j < N_TILES; ++j) {
        const int place = ((warp_n * N_TILES + j) * 8 + g) * WEIGHT_PITCH + 4 * i + t;
        right[i][j] = register_at(own + PAIR * place);
      }
    }
  }
  const int channel = (blockIdx.y * WARPS_N + warp_n) * N_TILES * 8 + tile_channel(0, t);

  int buffer = 0;
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    copies_arrived<0>();
    __syncthreads();  // all have them, and are done with the other buffer
    if (index + gridDim.x < tiles) {
      begin_copy<TILE_H, THREADS>(reinterpret_cast<ELEMENT*>(shared + (buffer ^ 1) * TILE_BYTES), x,
                                  tile_at(index + gridDim.x, shape), shape);
      commit_copies();
    }
    const auto* image = reinterpret_cast<const ELEMENT*>(shared + buffer * TILE_BYTES);
    const Tile tile = tile_at(index, shape);
    for (int first = warp_m / PHASES * M_TILES; first < GROUPS; first += WARPS_OF_PHASE * M_TILES) {
      const ELEMENT* windows[M_TILES];  // the begin of those of row g
      int rows[M_TILES], columns[M_TILES];
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
        const int group = min(first + m, GROUPS - 1);
        rows[m] = group / GROUPS_Q;
        columns[m] = (group - rows[m] * GROUPS_Q) * 16 * PHASES + g * PHASES + phase;
        windows[m] = image + rows[m] * STRIDE_H * PITCH + columns[m] * PIXEL_STEP + LEFT - lead;
      }
      float sums[M_TILES][N_TILES][4];
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
        for (int j = 0; j < N_TILES; ++j) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
#if HAS_BIAS
            sums[m][j][k] = biases[warp_n * N_TILES * 8 + tile_channel(j, t) + k % 2];
#else
            sums[m][j][k] = 0.0f;
#endif
          }
        }
      }
#pragma unroll
      for (int i = 0; i < REGISTERS; i += 2) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
          unsigned left[2][2];
#pragma unroll
          for (int k = 0; k < 2 && i + k < REGISTERS; ++k) {
            const ELEMENT* pair = windows[m] + lane_offset(i + k, t);
            const unsigned mask = lane_mask(i + k, t, lead);
            left[k][0] = register_at(pair) & mask;
            left[k][1] = register_at(pair + 8 * PIXELS_APART) & mask;
          }
#pragma unroll
          for (int j = 0; j < N_TILES; ++j) {
            if (i + 1 < REGISTERS) {
              multiply<ELEMENT>(sums[m][j], left[0], left[1], {right[i][j], right[i + 1][j]},
                                sums[m][j]);
            } else {
              multiply<ELEMENT>(sums[m][j], left[0], right[i][j], sums[m][j]);
            }
          }
        }
      }
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
        const int row = tile.p + rows[m];
        if (first + m >= GROUPS || row >= p) continue;
        const int line = (tile.image * p + row) * q;  // a tensor has less than 2^31 elements
#pragma unroll
        for (int high = 0; high < 2; ++high) {
          const int column = tile.q + columns[m] + 8 * high * PHASES;
          if (column < q) {
            const int at = (line + column) * channels + channel;
            store(y + at, residual + at, sums[m], high, channels - channel);
          }
        }
      }
    }
    buffer ^= 1;
  }
}
