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
// If IS_PAIRED, a column of the right matrix is what two neighbouring pixels need. Rows g and g + 8
// of the left one are channel g of either pixel, with zeros where only the other has a weight. So
// words are loaded for twice the pixels, begin at even elements, and need no shift and no mask. A
// zero times what is not finite is NaN: if a tile has a NaN, its pixels are computed again, the
// first ones of all pairs and the second ones, from masked pairs.
//
// A row of the output begins anywhere, so the block's outputs go to shared memory first, each row
// as far behind a multiple of 16 bytes as it is in the output. From there whole vectors are stored,
// then what lies before the first and behind the last one of each row.
//
// Banks: lane (g, t) reads word g * STRIDE_W / 2 + t of a row, different words or the same ones for
// strides up to 8, but for two of them. It writes word (STAGE_PITCH * g + shift) / 2 + t, and rows
// are 4 banks apart; with different shifts two may meet.

constexpr int THREADS = 32 * WARPS_C * WARPS_Q;
constexpr int SIDE = 1 + IS_PAIRED;     // pixels of a column
constexpr int TILE_C = 16 / SIDE;       // channels of a product
constexpr int EIGHTS = SIDE * N_TILES;  // eights of pixels that a warp takes at a time
constexpr int BLOCK_CHANNELS = TILE_C * M_TILES * WARPS_C;
constexpr int GROUPS_Q = TILE_Q / (8 * EIGHTS);
constexpr int GROUPS = TILE_P * GROUPS_Q;
// Some windows begin at odd elements of half types.
constexpr bool IS_ODD = PAIR == 2 && !IS_PAIRED && (STRIDE_W % 2 == 1 || LEFT % 2 == 1);
// Elements of a pair's window before that of its first pixel.
constexpr int LEAD = IS_PAIRED ? LEFT % 2 : 0;
constexpr int VECTOR = 16 / sizeof(ELEMENT);
constexpr int STAGE_PITCH = (TILE_Q + 63) / 64 * 64 + 8;
constexpr int STAGE_ROWS = TILE_P * STAGE_CHANNELS;  // of the channels that there are
constexpr int ROW_LANES = TILE_Q < 256 ? 16 : 32;    // lanes that store a row together

static_assert(CHANNELS == 1 && TILE_Q % (8 * EIGHTS) == 0 && PITCH % 8 == 0, "");
static_assert(LEADS == (IS_PAIRED ? LEAD + STRIDE_W : 0) && (PAIR == 2 || !IS_PAIRED), "");
static_assert(PITCH >= LEFT + STRIDE_W * (TILE_Q - 1) + PAIR * (ROW_PAIRS + IS_ODD), "");
static_assert(SHARED_BYTES == 2 * TILE_BYTES + STAGE_ROWS * STAGE_PITCH * 4 / PAIR,
              "tiles and outputs");

// What is written of a tile.
struct Outputs {
  unsigned begin;  // the place in the output, of less than 2^31 elements, of its first pixel
  int rows, columns;
};
__device__ __forceinline__ Outputs outputs_of(const Tile& tile, int first_channel,
                                              const Shape& shape) {
  unsigned plane = tile.sample(shape) * shape.channels + first_channel;
  if (IS_3D) plane = plane * shape.z + tile.depth(shape);
  return {(plane * shape.p + tile.p) * shape.q + tile.q, min(TILE_P, shape.p - tile.p),
          min(TILE_Q, shape.q - tile.q)};
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

// One of the two.
template <typename T>
__device__ __forceinline__ void put_one(T* place, const Two<T>& two, int which) {
  place[which] = T{static_cast<unsigned short>(two.bits >> 16 * which)};
}
__device__ __forceinline__ void put_one(float* place, const Two<float>& two, int which) {
  place[which] = which ? two.both.y : two.both.x;
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
// A pair of them, zeros where there are none. The row begins behind `lead` others.
__device__ __forceinline__ unsigned weights_at(const ELEMENT* __restrict__ w, int channel, int pair,
                                               int lead, int channels) {
  const int row = pair / ROW_PAIRS, element = pair % ROW_PAIRS * PAIR - lead;
  unsigned both = 0u;
  if (channel >= channels || pair >= PAIRS) return both;
#pragma unroll
  for (int i = 0; i < PAIR; ++i) {
    if (element + i < 0 || element + i >= KERNEL_W) continue;
    both |= weight_at(w, channel, row, element + i, channels) << 16 * i;
  }
  return both;
}

// Stores the rows of outputs that are staged, of all channels that there are from the block's first
// one on. Places of a channel are `apart` from those of the next one.
__device__ __forceinline__ void store(ELEMENT* __restrict__ y, const ELEMENT* stage,
                                      const Outputs& outputs, int channels, unsigned apart, int q) {
  constexpr int step = THREADS / ROW_LANES;
  const int lane = threadIdx.x % ROW_LANES, count = outputs.columns;
#pragma unroll 2
  for (int i = threadIdx.x / ROW_LANES; i < outputs.rows * STAGE_CHANNELS; i += step) {
    const int row = i / STAGE_CHANNELS, channel = i - row * STAGE_CHANNELS;
    if (channel >= channels) continue;
    const ELEMENT* const from = stage + i * STAGE_PITCH;
    const unsigned begin = outputs.begin + channel * apart + row * q;
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
  const int stage_channel = warp_c * M_TILES * TILE_C + g;
  const unsigned apart = static_cast<unsigned>(IS_3D ? z : 1) * p * q;

  Tile tile = tile_at(blockIdx.x, shape);
  begin_copy<TILE_H, THREADS>(reinterpret_cast<ELEMENT*>(shared), x, tile, shape);
  commit_copies();
  Outputs next = outputs_of(tile, first_channel, shape);

  // Those of channels g and g + 8 of each sixteen, or of channel g for both pixels of a pair.
  unsigned left[REGISTERS][M_TILES][2];
  float biases[M_TILES][4] = {};
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int channel = first_channel + stage_channel + TILE_C * m + (IS_PAIRED ? 0 : 8 * h);
      const int lead = IS_PAIRED ? LEAD + STRIDE_W * h : 0;
#pragma unroll
      for (int i = 0; i < REGISTERS; ++i)
        left[i][m][h] = weights_at(w, channel, 4 * i + t, lead, channels);
#if HAS_BIAS
      if (channel < channels) biases[m][2 * h] = biases[m][2 * h + 1] = to_float(bias[channel]);
#endif
    }
  }
  const int odd = IS_ODD ? (LEFT + g * STRIDE_W) % 2 : 0;  // of the windows of this lane's pixels
  // The place of this lane's column among a group's pixels. A lane has the sums of columns 2t and
  // 2t + 1: if pairs, these are pairs t and t + 4, so that it has two pixels of either eight.
  const int own = IS_PAIRED ? g / 2 * 2 + g % 2 * 8 : g;

  int buffer = 0;
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    copies_arrived<0>();
    __syncthreads();  // all have them, and are done with the other buffer and the stage
    const Outputs outputs = next;
    if (index + gridDim.x < tiles) {
      tile = tile_at(index + gridDim.x, shape);
      begin_copy<TILE_H, THREADS>(reinterpret_cast<ELEMENT*>(shared + (buffer ^ 1) * TILE_BYTES), x,
                                  tile, shape);
      commit_copies();
      next = outputs_of(tile, first_channel, shape);
    }
    const auto* image = reinterpret_cast<const ELEMENT*>(shared + buffer * TILE_BYTES);
    const unsigned lane_begin = outputs.begin + stage_channel * apart;
    // NaN if a zero has met what is not finite: then either pixel of a pair has NaN in all
    // channels.
    float total = 0.0f;
    // Stages the sums: those of all pixels, or of the pixels `side` of pairs.
    const auto compute = [&](bool is_again, int side) {
#pragma unroll 1
      for (int group = warp_q; group < GROUPS; group += WARPS_Q) {
        const int row = TILE_P == 1 ? 0 : group / GROUPS_Q;
        const int column = (group - row * GROUPS_Q) * 8 * EIGHTS;
        const ELEMENT* const window =
            image + row * STRIDE_H * PITCH + LEFT - LEAD + (column + own) * STRIDE_W - odd;
        float sums[M_TILES][N_TILES][4];
#pragma unroll
        for (int i = 0; i < REGISTERS; i += 2) {
#pragma unroll
          for (int n = 0; n < N_TILES; ++n) {
            unsigned right[2];
#pragma unroll
            for (int k = 0; k < 2 && i + k < REGISTERS; ++k) {
              right[k] = pair_at(window + 8 * SIDE * n * STRIDE_W + lane_offset(i + k, t), odd);
              if (!IS_PAIRED || is_again) right[k] &= lane_mask(i + k, t, LEAD + STRIDE_W * side);
            }
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
              const float (&addends)[4] = i == 0 ? biases[m] : sums[m][n];
              if (i + 1 < REGISTERS) {
                multiply<ELEMENT>(sums[m][n], left[i][m], left[i + 1][m], right, addends);
              } else {
                multiply<ELEMENT>(sums[m][n], left[i][m], right[0], addends);
              }
            }
          }
        }
#pragma unroll
        for (int n = 0; IS_PAIRED && n < N_TILES; ++n) {
          total += (sums[0][n][0] + sums[0][n][1]) + (sums[0][n][2] + sums[0][n][3]);
        }
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
          for (int h = 0; h < 2 / SIDE; ++h) {
            const int channel = stage_channel + TILE_C * m + 8 * h;
            if (STAGE_CHANNELS < BLOCK_CHANNELS && channel >= STAGE_CHANNELS) continue;
            const unsigned begin = lane_begin + (TILE_C * m + 8 * h) * apart + row * q;
            ELEMENT* const place = stage + (row * STAGE_CHANNELS + channel) * STAGE_PITCH +
                                   begin % VECTOR + column + 2 * t;
#if HAS_RESIDUAL
            const bool is_there = first_channel + channel < channels && row < outputs.rows;
            const int count = is_there ? outputs.columns : 0;
#endif
#pragma unroll
            for (int eight = 0; eight < EIGHTS; ++eight) {
              const float (&four)[4] = sums[m][eight / SIDE];
              float first = four[IS_PAIRED ? eight % 2 : 2 * h];
              float second = four[IS_PAIRED ? eight % 2 + 2 : 2 * h + 1];
#if HAS_RESIDUAL
              const int element = column + 8 * eight + 2 * t;
              const ELEMENT* const more = residual + begin + element;
              if (element < count) first += to_float(more[0]);
              if (element + 1 < count) second += to_float(more[1]);
#endif
              const auto two =
                  Two<ELEMENT>::of(activate<ACTIVATION>(first), activate<ACTIVATION>(second));
              if (is_again) {
                put_one(place + 8 * eight, two, side);
              } else if (HAS_ODD_ROWS) {
                put(place + 8 * eight, two);
              } else {
                *reinterpret_cast<Two<ELEMENT>*>(place + 8 * eight) = two;
              }
            }
          }
        }
      }
    };
    compute(false, 0);
    if constexpr (IS_PAIRED) {
      if (__syncthreads_or(total != total)) {
#pragma unroll 1
        for (int side = 0; side < 2; ++side) compute(true, side);
        __syncthreads();
      }
    } else {
      __syncthreads();
    }
    store(y, stage, outputs, channels - first_channel, apart, q);
    buffer ^= 1;
  }
}
