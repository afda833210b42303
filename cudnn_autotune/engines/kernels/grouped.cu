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

template <int kernel, int stride, int pad, int tile>
struct Axis {
  // Output elements are `u * kOutStep + phase`, with u from the tile's first; tap j of a phase
  // reads element `u * kInStep + kFirst + offset(phase, j)` of the input.
  static constexpr int kPhases = DGRAD ? stride : 1;
  static constexpr int kOutStep = DGRAD ? stride : 1;
  static constexpr int kInStep = DGRAD ? 1 : stride;

  __device__ static constexpr int filter_tap(int phase, int j) {
    return DGRAD ? (phase + pad) % stride + stride * j : j;
  }
  __device__ static constexpr int taps(int phase) {
    return (kernel - filter_tap(phase, 0) + kOutStep - 1) / kOutStep;
  }
  __device__ static constexpr int distance(int phase, int j) {
    return DGRAD ? (phase + pad) / stride - j : j - pad;
  }
  __device__ static constexpr int extreme(int sign) {
    int most = -(1 << 30);
    for (int phase = 0; phase < kPhases; ++phase) {
      for (int j = 0; j < taps(phase); ++j) {
        if (sign * distance(phase, j) > most) most = sign * distance(phase, j);
      }
    }
    return sign * most;
  }
  static constexpr int kFirst = extreme(-1);
  static constexpr int kExtent = (tile - 1) * kInStep + extreme(1) - kFirst + 1;
  __device__ static constexpr int offset(int phase, int j) { return distance(phase, j) - kFirst; }
};
using Y = Axis<KERNEL_Y, STRIDE_Y, PAD_Y, TILE_Y>;
using X = Axis<KERNEL_X, STRIDE_X, PAD_X, TILE_X>;

constexpr int kThreads = 32 * WARPS;
constexpr int kInWidth = MERGE * GROUP_IN, kOutWidth = MERGE * GROUP_OUT;
constexpr int kInChunks = kInWidth / 8;
constexpr int kTaps = KERNEL_Y * KERNEL_X;

// The filters as memory has them: a row for each output channel of the forward convolution.
constexpr int kGroupRows = DGRAD ? GROUP_IN : GROUP_OUT;
constexpr int kGroupColumns = DGRAD ? GROUP_OUT : GROUP_IN;
constexpr int kRows = MERGE * kGroupRows, kColumns = MERGE * kGroupColumns;
constexpr int kFilterPitch = (kTaps * kColumns / 8 | 1) * 16;
constexpr int kFilterBytes = SLAB * kRows * kFilterPitch;

// The tile of the input: images, rows, columns by their residue, channels.
constexpr int kSlabChunks = SLAB * kInChunks;
constexpr int kPixelPitch = (kSlabChunks | 1) * 16;
constexpr int kPlane = (X::kExtent + X::kInStep - 1) / X::kInStep;
constexpr int kRowPixels = X::kInStep * kPlane;
constexpr int kImagePixels = Y::kExtent * kRowPixels;
constexpr int kTileBytes = TILE_IMAGES * kImagePixels * kPixelPitch;
__device__ constexpr int column_place(int x) { return x % X::kInStep * kPlane + x / X::kInStep; }

// The work of a block, and what a warp needs to store 16 pixels.
constexpr int kPixels = TILE_IMAGES * TILE_Y * TILE_X;
constexpr int kPixelBlocks = (kPixels + 16 * M_TILES - 1) / (16 * M_TILES);
constexpr int kParts = kOutWidth / (8 * N_TILES);
constexpr int kItems = kPixelBlocks * SLAB * kParts;
constexpr int kScratchPitch = (N_TILES | 1) * 16;

struct Shapes {
  int images, in_y, in_x, in_channels, out_y, out_x, out_channels;
};

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
    return (row * kRowPixels + column_place(column)) * kPixelPitch + chunk * 16;
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
  return (image * kImagePixels + y * Y::kInStep * kRowPixels + x) * kPixelPitch;
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

// A tile's first output pixels, in units of kOutStep.
struct Place {
  int image, y, x;
};

template <int phase_y, int phase_x>
__device__ __forceinline__ void compute(const unsigned char* tile, const unsigned char* filters,
                                        unsigned char* scratch, ELEMENT* out, const ELEMENT* bias,
                                        const ELEMENT* residual, const Shapes& shapes,
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
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            float& sum = sums[m][n][r];
            if (sum != sum) {
              sum = exact_sum<P>(tile, filters, first_pixel + m * 16 + g + r / 2 * 8,
                                 first_channel + n * 8 + 2 * t + r % 2);
            }
          }
        }
      }
    }

    const int slab_channel = blockIdx.x * SLAB * kOutWidth + first_channel;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      // Each lane stores 8 channels of a pixel, where it holds 2 of each n tile.
      constexpr int kStores = 16 * N_TILES;
      long long places[(kStores + 31) / 32];
#pragma unroll
      for (int i = 0; i < (kStores + 31) / 32; ++i) {
        const int store = i * 32 + lane;
        const int pixel = first_pixel + m * 16 + store / N_TILES;
        const int image = place.image + pixel / (TILE_X * TILE_Y);
        const int y = (place.y + pixel / TILE_X % TILE_Y) * Y::kOutStep + phase_y;
        const int x = (place.x + pixel % TILE_X) * X::kOutStep + phase_x;
        const bool exists = store < kStores && pixel < kPixels && image < shapes.images &&
                            y < shapes.out_y && x < shapes.out_x;
        const long long index =
            (static_cast<long long>(image) * shapes.out_y + y) * shapes.out_x + x;
        places[i] = exists ? index * shapes.out_channels + slab_channel + store % N_TILES * 8 : -1;
        if (HAS_RESIDUAL && exists) {
          *reinterpret_cast<uint4*>(scratch + store / N_TILES * kScratchPitch +
                                    store % N_TILES * 16) =
              *reinterpret_cast<const uint4*>(residual + places[i]);
        }
      }
      if (HAS_RESIDUAL) __syncwarp();
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          auto* const two =
              reinterpret_cast<unsigned*>(scratch + (g + 8 * h) * kScratchPitch + n * 16 + t * 4);
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
      __syncwarp();
#pragma unroll
      for (int i = 0; i < (kStores + 31) / 32; ++i) {
        const int store = i * 32 + lane;
        if (places[i] >= 0) {
          *reinterpret_cast<uint4*>(out + places[i]) = *reinterpret_cast<const uint4*>(
              scratch + store / N_TILES * kScratchPitch + store % N_TILES * 16);
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
                                               const ELEMENT* residual, const Shapes& shapes,
                                               const Place& place) {
  if constexpr (phase < Y::kPhases * X::kPhases) {
    compute<phase / X::kPhases, phase % X::kPhases>(tile, filters, scratch, out, bias, residual,
                                                    shapes, place);
    compute_phases<phase + 1>(tile, filters, scratch, out, bias, residual, shapes, place);
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

__device__ __forceinline__ void stage_tile(unsigned char* tile, const ELEMENT* in,
                                           const Shapes& shapes, const Place& place) {
  const int first_y = place.y * Y::kInStep + Y::kFirst;
  const int first_x = place.x * X::kInStep + X::kFirst;
  const int image_elements = shapes.in_y * shapes.in_x * shapes.in_channels;
  in += static_cast<long long>(place.image) * image_elements + blockIdx.x * (SLAB * kInWidth);
  constexpr int kCopies = TILE_IMAGES * Y::kExtent * X::kExtent * kSlabChunks;
  for (int i = threadIdx.x; i < kCopies; i += kThreads) {
    const int chunk = i % kSlabChunks, pixel = i / kSlabChunks;
    const int column = pixel % X::kExtent, row = pixel / X::kExtent % Y::kExtent;
    const int image = pixel / (X::kExtent * Y::kExtent);
    const int y = first_y + row, x = first_x + column;
    const bool exists = y >= 0 && y < shapes.in_y && x >= 0 && x < shapes.in_x &&
                        place.image + image < shapes.images;
    const ELEMENT* const from = in + static_cast<long long>(image) * image_elements +
                                ((y * shapes.in_x + x) * shapes.in_channels + chunk * 8);
    const int to = image * kImagePixels + row * kRowPixels + column_place(column);
    copy_async<16>(tile + to * kPixelPitch + chunk * 16, exists ? from : in, exists);
  }
}

// Block (s, b) computes slab s of tiles b, b + gridDim.y, ... of images x tiles_y x tiles_x.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    grouped(const ELEMENT* in, const ELEMENT* w, ELEMENT* out, const ELEMENT* bias,
            const ELEMENT* residual, int images, int in_y, int in_x, int in_channels, int out_y,
            int out_x, int out_channels, int tiles, int tiles_y, int tiles_x) {
  DYNAMIC_SHARED(shared);
  unsigned char* const stages = shared + kFilterBytes;
  unsigned char* const scratch =
      stages + STAGES * kTileBytes + threadIdx.x / 32 * (16 * kScratchPitch);
  const Shapes shapes{images, in_y, in_x, in_channels, out_y, out_x, out_channels};
  const auto place_of = [&](int tile) {
    return Place{tile / (tiles_y * tiles_x) * TILE_IMAGES, tile / tiles_x % tiles_y * TILE_Y,
                 tile % tiles_x * TILE_X};
  };

  stage_filters(shared, w);
  int tile = blockIdx.y, stage = 0;
  if (STAGES == 2) stage_tile(stages, in, shapes, place_of(tile));
  commit_copies();
  for (; tile < tiles; tile += gridDim.y) {
    const int copied = STAGES == 2 ? tile + gridDim.y : tile;
    if (STAGES == 2) stage ^= 1;
    if (copied < tiles) stage_tile(stages + stage * kTileBytes, in, shapes, place_of(copied));
    commit_copies();
    copies_arrived<STAGES - 1>();
    __syncthreads();
    compute_phases<0>(stages + (STAGES == 2 ? stage ^ 1 : 0) * kTileBytes, shared, scratch, out,
                      bias, residual, shapes, place_of(tile));
    __syncthreads();
  }
}
