// A grouped 2-d convolution on tensor cores, channels_last, 16-bit types: the forward (DGRAD 0) and
// the gradient of its input (DGRAD 1), which is a convolution of dy with the filters transposed and
// turned round. "in" is what is read (x, or dy), "out" what is written (y, or dx).
//
// A block computes a tile of output pixels (of one image, or of several small ones) for a slab of
// groups. It copies the tile's input, halo and all, and the slab's filters into shared memory; then
// a warp computes M_TILES x 16 pixels of N_TILES x 8 output channels of one group. With p a pixel,
// o an output channel and i a pair of a filter tap and 8 input channels (a chunk), that is the
// matrix product
//   out[p][o] = sum over i of in[p + tap(i)][channels(i)] * filter[o][tap(i)][channels(i)]
// whose rows of 16 bytes ldmatrix takes from where they lie: no im2col is written. An mma takes any
// two chunks, so only a last odd chunk is multiplied by an mma of half the depth: 3x3 filters of 24
// channels (27 chunks) take 13.5 mma, not 18. Blocks stay and go over tiles with the same filters;
// with two STAGES the next tile is copied meanwhile.
//
// Banks. The 8 rows of a matrix are 8 neighbouring pixels of one image row, since TILE_X is a
// multiple of 8. A pixel takes an odd multiple of 16 bytes, so they lie in different banks. A
// forward with a stride keeps the columns of each residue modulo the stride together, so that these
// pixels are neighbours as well. A filter also takes an odd multiple of 16 bytes.
//
// A gradient with a stride: dx pixels of one residue (a phase) see the same taps, every stride'th,
// with a stride of 1. A block computes all phases from one tile of dy.
//
// Groups whose width is no multiple of 8 are computed MERGE at a time, with zeros in the filter. A
// zero times an infinity or NaN of a neighbouring group would be NaN, so a sum that is NaN is
// computed again from its own group alone.
//
// What bounds it, a pixel of a 24-wide group: 96 bytes of DRAM; 13.5 mma a 16 x 8 tile; and with
// M_TILES 4, 22 matrices of 128 bytes from shared memory for 12 mma, or 22 clocks for 24. Groups of
// 8 read 2 matrices a chunk for half an mma, and shared memory bounds them, below DRAM's time.

using Y = Axis<DGRAD, KERNEL_Y, STRIDE_Y, PAD_Y, TILE_Y>;
using X = Axis<DGRAD, KERNEL_X, STRIDE_X, PAD_X, TILE_X>;
using Input = Tile<Y, X, TILE_IMAGES, SLAB * kInChunks>;
constexpr int kTaps = KERNEL_Y * KERNEL_X;

// The filters as memory has them: a row for each output channel of the forward convolution.
constexpr int kGroupRows = DGRAD ? GROUP_IN : GROUP_OUT;
constexpr int kGroupColumns = DGRAD ? GROUP_OUT : GROUP_IN;
constexpr int kRows = MERGE * kGroupRows, kColumns = MERGE * kGroupColumns;
constexpr int kFilterPitch = (kTaps * kColumns / 8 | 1) * 16;
constexpr int kFilterBytes = SLAB * kRows * kFilterPitch;

// The work of a block.
constexpr int kPixels = TILE_IMAGES * TILE_Y * TILE_X;
constexpr int kPixelBlocks = (kPixels + 16 * M_TILES - 1) / (16 * M_TILES);
constexpr int kParts = kOutWidth / (8 * N_TILES);
constexpr int kItems = kPixelBlocks * SLAB * kParts;
// What a warp stores at a time, through its part of shared memory: pieces of 16 bytes for 32 lanes.
constexpr int kStoredTiles = N_TILES % 2 == 1 && M_TILES > 1 ? 2 : 1;
constexpr int kStores = (16 * kStoredTiles * N_TILES + 31) / 32;
constexpr int kScratchPitch = (N_TILES | 1) * 16;

template <int phase_y, int phase_x>
struct Phase {
  static constexpr int kColumnTaps = X::taps(phase_x);
  static constexpr int kPhaseTaps = Y::taps(phase_y) * kColumnTaps;
  static constexpr int kPairs = kPhaseTaps * (kInChunks / 2);  // of chunks of one tap
  static constexpr int kOdd = kInChunks % 2 * kPhaseTaps;      // chunks that are left of each tap
  static constexpr int kSteps = kPairs + (kOdd + 1) / 2;

  __device__ static constexpr bool is_single(int step) {
    return kOdd % 2 == 1 && step == kSteps - 1;
  }
  // The tap and the chunk of channels of either half of a step.
  __device__ static constexpr int tap(int step, int half) {
    if (step < kPairs) return step / (kInChunks / 2);
    return is_single(step) ? kPhaseTaps - 1 : 2 * (step - kPairs) + half;
  }
  __device__ static constexpr int chunk(int step, int half) {
    return step < kPairs ? 2 * (step % (kInChunks / 2)) + half : kInChunks - 1;
  }
  // Bytes from a pixel of the tile, or from the group's filters.
  __device__ static constexpr int pixel_offset(int tap, int chunk) {
    const int row = Y::offset(phase_y, tap / kColumnTaps);
    const int column = X::offset(phase_x, tap % kColumnTaps);
    return Input::offset(row, column) + chunk * 16;
  }
  __device__ static constexpr int filter_tap(int tap) {
    return Y::filter_tap(phase_y, tap / kColumnTaps) * KERNEL_X +
           X::filter_tap(phase_x, tap % kColumnTaps);
  }
  __device__ static constexpr int filter_offset(int tap, int chunk) {
    const int column = filter_tap(tap) * kColumns * 2;
    return DGRAD ? chunk * 8 * kFilterPitch + column : chunk * 16 + column;
  }
};

// From one n tile's filters to the next's.
constexpr int kNextFilters = DGRAD ? 16 : 8 * kFilterPitch;

template <int matrices>
__device__ __forceinline__ void load_filters(unsigned (&b)[matrices], const unsigned char* row) {
  if constexpr (DGRAD) {
    load_transposed(b, row);
  } else {
    load_matrices(b, row);
  }
}

// Byte offset in the tile of the input that pixel m of the tile begins at.
__device__ __forceinline__ int pixel_place(int m) {
  if (m >= kPixels) m = kPixels - 8 + m % 8;  // any pixel will do, but not one bank for all lanes
  const int x = m % TILE_X, y = m / TILE_X % TILE_Y, image = m / (TILE_X * TILE_Y);
  return Input::place(image, y, x);
}

// From the first to the second chunk of a step where both are of one tap. Lanes whose rows are of
// the second one have it in their pointers, so the loop's addresses differ by constants.
constexpr int kNextPixelChunk = 16;
constexpr int kNextFilterChunk = DGRAD ? 8 * kFilterPitch : 16;

// `pixels` is where this lane's row of each m tile begins, `filters` its row of the first n tile.
template <typename P>
__device__ __forceinline__ void multiply(float (&sums)[M_TILES][N_TILES][4],
                                         const unsigned char* const (&pixels)[M_TILES],
                                         const unsigned char* filters, int lane) {
  const int pixel_half = lane / 16, filter_half = lane / 8 % 2;
#pragma unroll
  for (int step = 0; step < P::kSteps; ++step) {
    const bool is_pair = step < P::kPairs;  // of chunks of one tap
    const int filter = P::filter_offset(P::tap(step, 0), P::chunk(step, 0));
    const int next_filter = P::filter_offset(P::tap(step, 1), P::chunk(step, 1)) - filter;
    const unsigned char* from = filters + filter;
    if (!is_pair) from += filter_half * (next_filter - kNextFilterChunk);
    unsigned b[N_TILES][2];
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
      if (n + 1 < N_TILES) {
        unsigned two[4];
        load_filters(two, from + n * kNextFilters);
        b[n][0] = two[0], b[n][1] = two[1], b[n + 1][0] = two[2], b[n + 1][1] = two[3];
      } else {
        load_filters(b[n], from + n * kNextFilters);
      }
    }
    const int pixel = P::pixel_offset(P::tap(step, 0), P::chunk(step, 0));
    const int next_pixel = P::pixel_offset(P::tap(step, 1), P::chunk(step, 1)) - pixel;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      const unsigned char* row = pixels[m] + pixel;
      if (!is_pair) row += pixel_half * (next_pixel - kNextPixelChunk);
      if (P::is_single(step)) {
        unsigned a[2];
        load_matrices(a, row);
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) mma_16x8x8<ELEMENT>(sums[m][n], a, b[n][0]);
      } else {
        unsigned a[4];
        load_matrices(a, row);
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) mma_16x8x16<ELEMENT>(sums[m][n], a, b[n]);
      }
    }
  }
}

// One sum without the zeros between merged groups: of pixel m and output channel o of the slab.
template <typename P>
__device__ __noinline__ float exact_sum(const unsigned char* tile, const unsigned char* filters,
                                        int m, int o) {
  const int group = o / GROUP_OUT;
  const unsigned char* const pixel = tile + pixel_place(m);
  float sum = 0.0f;
  for (int tap = 0; tap < P::kPhaseTaps; ++tap) {
    for (int i = 0; i < GROUP_IN; ++i) {
      const int row = DGRAD ? group * GROUP_IN + i : o;
      const int column = DGRAD ? o % kOutWidth : group % MERGE * GROUP_IN + i;
      const auto* const a = reinterpret_cast<const ELEMENT*>(pixel + P::pixel_offset(tap, 0));
      const auto* const b = reinterpret_cast<const ELEMENT*>(filters + row * kFilterPitch);
      sum +=
          to_float(a[group * GROUP_IN + i]) * to_float(b[P::filter_tap(tap) * kColumns + column]);
    }
  }
  return sum;
}

template <int phase_y, int phase_x>
__device__ __forceinline__ void compute(const unsigned char* tile, const unsigned char* filters,
                                        unsigned char* scratch, ELEMENT* out, const ELEMENT* bias,
                                        const ELEMENT* residual, const Extents& to,
                                        const Place& place) {
  using P = Phase<phase_y, phase_x>;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int item = threadIdx.x / 32; item < kItems; item += WARPS) {
    const int part = item % kParts, group = item / kParts % SLAB;
    const int first_pixel = item / (kParts * SLAB) * M_TILES * 16;
    const int first_channel = group * kOutWidth + part * N_TILES * 8;  // in the slab

    float sums[M_TILES][N_TILES][4] = {};
    const unsigned char* pixels[M_TILES];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      pixels[m] = tile + pixel_place(first_pixel + m * 16 + lane % 16) + group * kInChunks * 16 +
                  lane / 16 * kNextPixelChunk;
    }
    const int row =
        lane % 8 * kFilterPitch + lane / 16 * kNextFilters + lane / 8 % 2 * kNextFilterChunk;
    multiply<P>(sums, pixels,
                filters + group * kRows * kFilterPitch + part * N_TILES * kNextFilters + row, lane);
    if constexpr (MERGE > 1) {
      float total = 0.0f;  // NaN if any sum is
#pragma unroll
      for (int i = 0; i < M_TILES * N_TILES * 4; ++i) {
        total += sums[i / (N_TILES * 4)][i / 4 % N_TILES][i % 4];
      }
      if (total != total) {
#pragma unroll
        for (int i = 0; i < M_TILES * N_TILES * 4; ++i) {
          const int m = i / (N_TILES * 4), n = i / 4 % N_TILES, r = i % 4;
          if (sums[m][n][r] == sums[m][n][r]) continue;
          sums[m][n][r] = exact_sum<P>(tile, filters, first_pixel + m * 16 + g + r / 2 * 8,
                                       first_channel + n * 8 + 2 * t + r % 2);
        }
      }
    }

    const int slab_channel = blockIdx.x * SLAB * kOutWidth + first_channel;
#pragma unroll
    for (int first = 0; first < M_TILES; first += kStoredTiles) {
      // Each lane stores 8 channels of a pixel, where it holds 2 of each n tile.
      long long places[kStores];
      unsigned char* pieces[kStores];
#pragma unroll
      for (int i = 0; i < kStores; ++i) {
        const int piece = i * 32 + lane, in_tiles = piece / N_TILES, n = piece % N_TILES;
        const int pixel = first_pixel + first * 16 + in_tiles;
        const int image = place.image + pixel / (TILE_X * TILE_Y);
        const int y = (place.y + pixel / TILE_X % TILE_Y) * Y::kOutStep + phase_y;
        const int x = (place.x + pixel % TILE_X) * X::kOutStep + phase_x;
        const bool exists = in_tiles < 16 * kStoredTiles && first * 16 + in_tiles < 16 * M_TILES &&
                            pixel < kPixels && image < to.images && y < to.y && x < to.x;
        const int index = (image * to.y + y) * to.x + x;
        places[i] =
            exists ? static_cast<long long>(index) * to.channels + slab_channel + n * 8 : -1;
        pieces[i] = scratch + in_tiles * kScratchPitch + n * 16;
        if (HAS_RESIDUAL && exists) {
          *reinterpret_cast<uint4*>(pieces[i]) =
              *reinterpret_cast<const uint4*>(residual + places[i]);
        }
      }
      if (HAS_RESIDUAL) __syncwarp();
#pragma unroll
      for (int m = first; m < first + kStoredTiles && m < M_TILES; ++m) {
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int row = (m - first) * 16 + h * 8 + g;
            auto* const two =
                reinterpret_cast<unsigned*>(scratch + row * kScratchPitch + n * 16 + t * 4);
            float low = sums[m][n][2 * h], high = sums[m][n][2 * h + 1];
            if (HAS_BIAS) {
              const float2 more = unpack<ELEMENT>(
                  *reinterpret_cast<const unsigned*>(bias + slab_channel + n * 8 + 2 * t));
              low += more.x;
              high += more.y;
            }
            if (HAS_RESIDUAL) {
              const float2 more = unpack<ELEMENT>(*two);
              low += more.x;
              high += more.y;
            }
            *two = pack<ELEMENT>(activate<ACTIVATION>(low), activate<ACTIVATION>(high));
          }
        }
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kStores; ++i) {
        if (places[i] >= 0) {
          *reinterpret_cast<uint4*>(out + places[i]) = *reinterpret_cast<const uint4*>(pieces[i]);
        }
      }
      __syncwarp();
    }
  }
}

template <int phase>
__device__ __forceinline__ void compute_phases(const unsigned char* tile,
                                               const unsigned char* filters, unsigned char* scratch,
                                               ELEMENT* out, const ELEMENT* bias,
                                               const ELEMENT* residual, const Extents& to,
                                               const Place& place) {
  if constexpr (phase < Y::kPhases * X::kPhases) {
    compute<phase / X::kPhases, phase % X::kPhases>(tile, filters, scratch, out, bias, residual, to,
                                                    place);
    compute_phases<phase + 1>(tile, filters, scratch, out, bias, residual, to, place);
  }
}

// Copies the slab's filters, with zeros between merged groups.
__device__ __forceinline__ void stage_filters(unsigned char* filters, const ELEMENT* w) {
  constexpr int kRowElements = kTaps * kGroupColumns;
  w += static_cast<long long>(blockIdx.x) * (SLAB * kRows) * kRowElements;
  if constexpr (MERGE == 1) {
    constexpr int kChunks = kRowElements / 8;
    for (int i = threadIdx.x; i < SLAB * kRows * kChunks; i += kThreads) {
      copy_async<16>(filters + i / kChunks * kFilterPitch + i % kChunks * 16, w + i * 8);
    }
  } else {
    for (int i = threadIdx.x; i < SLAB * kRows * kTaps * kColumns; i += kThreads) {
      const int row = i / (kTaps * kColumns), column = i % kColumns;
      const int tap = i / kColumns % kTaps;
      ELEMENT value{0};
      if (row / kGroupRows % MERGE == column / kGroupColumns) {
        value = w[row * kRowElements + tap * kGroupColumns + column % kGroupColumns];
      }
      reinterpret_cast<ELEMENT*>(filters + row * kFilterPitch)[tap * kColumns + column] = value;
    }
  }
}

// Block (s, b) computes slab s of tiles b, b + gridDim.y, ... of images x tiles_y x tiles_x.
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    grouped(const ELEMENT* in, const ELEMENT* w, ELEMENT* out, const ELEMENT* bias,
            const ELEMENT* residual, int images, int in_y, int in_x, int in_channels, int out_y,
            int out_x, int out_channels, int tiles, int tiles_y, int tiles_x) {
  DYNAMIC_SHARED(shared);
  unsigned char* const stages = shared + kFilterBytes;
  unsigned char* const scratch =
      stages + STAGES * Input::kBytes + threadIdx.x / 32 * (16 * kStoredTiles * kScratchPitch);
  const Extents from{images, in_y, in_x, in_channels}, to{images, out_y, out_x, out_channels};
  const auto stage_tile = [&](int tile, int stage) {
    Input::stage(stages + stage * Input::kBytes, in + blockIdx.x * (SLAB * kInWidth), from,
                 place_of(tile, tiles_y, tiles_x));
  };

  stage_filters(shared, w);
  int tile = blockIdx.y, stage = 0;
  if (STAGES == 2) stage_tile(tile, 0);
  commit_copies();
  for (; tile < tiles; tile += gridDim.y) {
    if (STAGES == 1) {
      stage_tile(tile, 0);
    } else if (tile + gridDim.y < tiles) {
      stage_tile(tile + gridDim.y, stage ^ 1);
    }
    commit_copies();
    copies_arrived<STAGES - 1>();
    __syncthreads();
    compute_phases<0>(stages + stage * Input::kBytes, shared, scratch, out, bias, residual, to,
                      place_of(tile, tiles_y, tiles_x));
    __syncthreads();
    if (STAGES == 2) stage ^= 1;
  }
}
