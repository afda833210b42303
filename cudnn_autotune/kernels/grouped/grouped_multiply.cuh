// The product of matrices that a warp of grouped.cu computes, which explains it.

using Y = Axis<DGRAD, KERNEL_Y, STRIDE_Y, PAD_Y, TILE_Y>;
using X = Axis<DGRAD, KERNEL_X, STRIDE_X, PAD_X, TILE_X>;
using Input = Tile<Y, X, TILE_IMAGES, BLOCK_GROUPS * kInChunks>;
constexpr int kTaps = KERNEL_Y * KERNEL_X;

// The filters as memory has them: a row for each output channel of the forward convolution.
constexpr int kGroupRows = DGRAD ? GROUP_IN : GROUP_OUT;
constexpr int kGroupColumns = DGRAD ? GROUP_OUT : GROUP_IN;
constexpr int kRows = MERGE * kGroupRows, kColumns = MERGE * kGroupColumns;
// A filter of a 16-bit type takes an odd multiple of 16 bytes. In TF32 lanes load two numbers each
// of 4 filters, which takes an odd multiple of 32 bytes, or one each of every other of 8.
constexpr int kFilterStep = kIsTf32 && !DGRAD ? 32 : 16;
constexpr int kFilterPitch = (kTaps * kColumns * kElementBytes / kFilterStep | 1) * kFilterStep;
constexpr int kFilterBytes = BLOCK_GROUPS * kRows * kFilterPitch;

// The work of a block. An item of a warp is ROWS rows of two segments of 8 pixels, in GROUPS
// groups.
constexpr int kSegmentsAcross = TILE_X / 8;
constexpr int kSegmentsDown = TILE_Y / ROWS;
constexpr int kSegments = TILE_IMAGES * kSegmentsDown * kSegmentsAcross;
constexpr int kParts = kOutWidth / (8 * N_TILES);
constexpr int kItems = (kSegments + 1) / 2 * (BLOCK_GROUPS / GROUPS) * kParts;
static_assert(TILE_X % 8 == 0 && TILE_Y % ROWS == 0 && BLOCK_GROUPS % GROUPS == 0,
              "items fill a tile");
static_assert(GROUPS == 1 || kParts == 1, "what a warp stores of a pixel lies together");
// The stores of a warp at a time, through its part of shared memory: vectors of 16 bytes for 32
// lanes.
constexpr int kStoredTiles = GROUPS * N_TILES;
constexpr int kVectors = kStoredTiles * (kChunkBytes / 16);  // per pixel
constexpr int kStoredRows = kVectors % 2 == 1 && ROWS > 1 ? 2 : 1;
constexpr int kStores = (16 * kStoredRows * kVectors + 31) / 32;
constexpr int kScratchPitch = (kStoredTiles | 1) * kChunkBytes;
constexpr int kScratchBytes = 16 * kStoredRows * kScratchPitch;  // of a warp
static_assert(SHARED_BYTES == kFilterBytes + STAGES * Input::kBytes + WARPS * kScratchBytes,
              "filters, tiles and stores");

// The first output of a segment in the tile.
__device__ __forceinline__ Place segment_place(int segment) {
  return Place{segment / (kSegmentsDown * kSegmentsAcross),
               segment / kSegmentsAcross % kSegmentsDown * ROWS, segment % kSegmentsAcross * 8};
}
__device__ __forceinline__ int pixel_place(int segment, int pixel) {
  const Place place =
      segment_place(min(segment, kSegments - 1));  // any will do where there is none
  return Input::place(place.image, place.y, place.x + pixel);
}

// The outputs of one residue modulo the stride, and what they read.
template <int phase_y, int phase_x>
struct Phase {
  static constexpr int kRowTaps = Y::taps(phase_y), kColumnTaps = X::taps(phase_x);
  static constexpr int kAllTaps = kRowTaps * kColumnTaps;
  // Rows that an item reads: output row y reads rows y * kInStep + i, for i below kRowTaps.
  static constexpr int kRows = (ROWS - 1) * Y::kInStep + kRowTaps;

  // The row tap that reads the i-th of these rows.
  __device__ static constexpr int row_tap(int i) { return DGRAD ? kRowTaps - 1 - i : i; }
  // Bytes from a pixel of the tile, or from the group's filters.
  __device__ static constexpr int pixel_offset(int row, int column_tap) {
    const int first_row = Y::offset(phase_y, row_tap(0));
    return Input::offset(first_row + row, X::offset(phase_x, column_tap));
  }
  __device__ static constexpr int filter_offset(int i, int column_tap) {
    const int row = Y::filter_tap(phase_y, row_tap(i));
    return (row * KERNEL_X + X::filter_tap(phase_x, column_tap)) * kColumns * kElementBytes;
  }
  static constexpr int kNextTap = filter_offset(1, 0) - filter_offset(0, 0);
};

// From one n tile's filters to the next's, and from one chunk's.
constexpr int kNextFilters = DGRAD ? kChunkBytes : 8 * kFilterPitch;
constexpr int kFilterChunk = DGRAD ? 8 * kFilterPitch : kChunkBytes;

template <int matrices>
__device__ __forceinline__ void load_filters(unsigned (&b)[matrices], const unsigned char* row) {
  if constexpr (DGRAD) {
    load_transposed(b, row);
  } else {
    load_matrices(b, row);
  }
}

// Loads two matrices of each n tile. `row` is that of the lane, for n tiles in twos.
__device__ __forceinline__ void load_n_tiles(unsigned (&b)[N_TILES][2], const unsigned char* row) {
#pragma unroll
  for (int n = 0; n < N_TILES; n += 2) {
    if (n + 1 < N_TILES) {
      unsigned two[4];
      load_filters(two, row + n * kNextFilters);
      b[n][0] = two[0], b[n][1] = two[1], b[n + 1][0] = two[2], b[n + 1][1] = two[3];
    } else {
      load_filters(b[n], row + n * kNextFilters);
    }
  }
}

// d += a * b, with the matrices that an mma of the type takes, or half of them.
__device__ __forceinline__ void product(float (&d)[4], const unsigned (&a)[4],
                                        const unsigned (&b)[2]) {
  if constexpr (kIsTf32) {
    mma_16x8x8_tf32(d, a, b);
  } else {
    mma_16x8x16<ELEMENT>(d, a, b);
  }
}
__device__ __forceinline__ void product(float (&d)[4], const unsigned (&a)[2], unsigned b) {
  if constexpr (!kIsTf32) mma_16x8x8<ELEMENT>(d, a, b);
}

// Adds the product of an mma: of all inputs.
struct All {
  template <int values, typename Weights>
  __device__ __forceinline__ void add(float (&sums)[ROWS][N_TILES][4], int y, int n,
                                      const unsigned (&a)[values], const Weights& b, int chunk,
                                      int next_chunk) const {
    product(sums[y][n], a, b);
  }
};

// Adds the products of an mma of two merged groups: each group's inputs for its own outputs, with
// zeros in place of the other group's inputs.
struct Apart {
  float (&second)[ROWS][N_TILES][4];  // the second group's sums in n tiles that have both groups
  int first_tile;                     // the first n tile

  __device__ __forceinline__ bool is_shared(int n_tile) const {
    return kParts > 1 || (n_tile * 8 < GROUP_OUT && n_tile * 8 + 8 > GROUP_OUT);
  }
  __device__ __forceinline__ static bool overlaps(int chunk, int group, int width) {
    return chunk * 8 < (group + 1) * width && chunk * 8 + 8 > group * width;
  }
  // Register r of a has channels of `chunk` from its 2 (lane % 4)-th on, or of the next one.
  template <int values, typename Weights>
  __device__ __forceinline__ void add(float (&sums)[ROWS][N_TILES][4], int y, int n,
                                      const unsigned (&a)[values], const Weights& b, int chunk,
                                      int next_chunk) const {
#pragma unroll
    for (int group = 0; group < MERGE; ++group) {
      if (!overlaps(first_tile + n, group, GROUP_OUT)) continue;
      if (!overlaps(chunk, group, GROUP_IN) && !overlaps(next_chunk, group, GROUP_IN)) continue;
      unsigned own[values];
#pragma unroll
      for (int r = 0; r < values; ++r) {
        const int channel = (r < 2 ? chunk : next_chunk) * 8 + threadIdx.x % 4 * 2;
        own[r] = channel / GROUP_IN == group ? a[r] : 0;
      }
      product(group == 1 && is_shared(n) ? second[y][n] : sums[y][n], own, b);
    }
  }
  // Puts the sums of both groups together.
  __device__ __forceinline__ void join(float (&sums)[ROWS][N_TILES][4]) const {
    const int channel = first_tile * 8 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < ROWS * N_TILES * 4; ++i) {
      const int y = i / 4 / N_TILES, n = i / 4 % N_TILES;
      if (is_shared(n) && channel + n * 8 >= GROUP_OUT) sums[y][n][i % 4] = second[y][n][i % 4];
    }
  }
};

// Adds what chunks 2 c and 2 c + 1 give. Each row of pixels is loaded once for all row taps.
template <typename P, typename Inputs>
__device__ __forceinline__ void multiply_pair(float (&sums)[ROWS][N_TILES][4],
                                              const unsigned char* pixels,
                                              const unsigned char* filters, int column_tap,
                                              int chunk, const Inputs& inputs) {
  unsigned b[P::kRowTaps][N_TILES][2];
#pragma unroll
  for (int i = 0; i < P::kRowTaps; ++i) {
    load_n_tiles(b[i], filters + P::filter_offset(i, column_tap));
  }
#pragma unroll
  for (int row = 0; row < P::kRows; ++row) {
    if (row % Y::kInStep >= P::kRowTaps) continue;  // no output reads it
    unsigned a[4];
    load_matrices(a, pixels + P::pixel_offset(row, column_tap));
#pragma unroll
    for (int i = 0; i < P::kRowTaps; ++i) {
      const int y = (row - i) / Y::kInStep;
      if (row < i || (row - i) % Y::kInStep != 0 || y >= ROWS) continue;
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) {
        inputs.add(sums, y, n, a, b[i][n], chunk, chunk + 1);
      }
    }
  }
}

// Adds what a chunk gives that has none beside it: an mma takes two rows of pixels, for two row
// taps. Where an output reads only one of them, an mma of half the depth takes that.
template <typename P, typename Inputs>
__device__ __forceinline__ void multiply_single(float (&sums)[ROWS][N_TILES][4],
                                                const unsigned char* pixels,
                                                const unsigned char* filters, int column_tap,
                                                const Inputs& inputs) {
  constexpr int kLast = P::kRowTaps - 1, kChunk = kInChunks - 1;
  unsigned b[kLast > 0 ? kLast : 1][N_TILES][2];  // operands of row taps i and i + 1
#pragma unroll
  for (int i = 0; i < kLast || i == 0; ++i) {
    if (N_TILES == 1 && i + 1 < kLast) {
      unsigned two[4];
      load_filters(two, filters + P::filter_offset(i, column_tap));
      b[i][0][0] = two[0], b[i][0][1] = two[1], b[i + 1][0][0] = two[2], b[i + 1][0][1] = two[3];
      ++i;
    } else {
      load_n_tiles(b[i], filters + P::filter_offset(i, column_tap));
    }
  }
#pragma unroll
  for (int row = 0; row < P::kRows; row += 2) {
    unsigned a[2][2];
    if (row + 1 < P::kRows) {
      unsigned four[4];
      load_matrices(four, pixels + P::pixel_offset(row, column_tap));
      a[0][0] = four[0], a[0][1] = four[1], a[1][0] = four[2], a[1][1] = four[3];
    } else {
      load_matrices(a[0], pixels + P::pixel_offset(row, column_tap));
    }
#pragma unroll
    for (int y = 0; y < ROWS; ++y) {
      const int i = row - y * Y::kInStep;
      if (i < -1 || i > kLast) continue;
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) {
        if (i == -1) {
          if (row + 1 < P::kRows) inputs.add(sums, y, n, a[1], b[0][n][0], kChunk, kChunk);
        } else if (i == kLast) {
          const unsigned last = kLast > 0 ? b[kLast - 1][n][1] : b[0][n][0];
          inputs.add(sums, y, n, a[0], last, kChunk, kChunk);
        } else {
          const unsigned four[4] = {a[0][0], a[0][1], a[1][0], a[1][1]};
          inputs.add(sums, y, n, four, b[i][n], kChunk, kChunk);
        }
      }
    }
  }
}

// Adds what a chunk gives in TF32, with filters that are rounded. Columns k and k + 4 of an mma are
// channels 2 k and 2 k + 1, which a lane loads together: `pixels` are those of its pixel in both
// segments, `filters` those of its filter or, of a gradient, of its first channel in two filters.
template <typename P, typename Inputs>
__device__ __forceinline__ void multiply_tf32(float (&sums)[ROWS][N_TILES][4],
                                              const unsigned char* const (&pixels)[2],
                                              const unsigned char* filters, int column_tap,
                                              int chunk, const Inputs& inputs) {
  unsigned b[P::kRowTaps][N_TILES][2];
#pragma unroll
  for (int i = 0; i < P::kRowTaps; ++i) {
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
      const unsigned char* const at = filters + P::filter_offset(i, column_tap) + n * kNextFilters;
      const float2 two = DGRAD ? make_float2(load_number(at), load_number(at + kFilterPitch))
                               : load_two_numbers(at);
      b[i][n][0] = __float_as_uint(two.x), b[i][n][1] = __float_as_uint(two.y);
    }
  }
#pragma unroll
  for (int row = 0; row < P::kRows; ++row) {
    if (row % Y::kInStep >= P::kRowTaps) continue;  // no output reads it
    unsigned a[4];
#pragma unroll
    for (int segment = 0; segment < 2; ++segment) {
      const float2 two = load_two_numbers(pixels[segment] + P::pixel_offset(row, column_tap));
      a[segment] = to_tf32(two.x);
      a[segment + 2] = to_tf32(two.y);
    }
#pragma unroll
    for (int i = 0; i < P::kRowTaps; ++i) {
      const int y = (row - i) / Y::kInStep;
      if (row < i || (row - i) % Y::kInStep != 0 || y >= ROWS) continue;
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) {
        inputs.add(sums, y, n, a, b[i][n], chunk, chunk);
      }
    }
  }
}

constexpr int kMostUnrolled = 256;  // mma, so that instructions are at hand

// Adds what a group gives to two segments. `tile` and `filters` are the group's.
template <typename P, typename Inputs>
__device__ __forceinline__ void multiply(float (&sums)[ROWS][N_TILES][4], const unsigned char* tile,
                                         const unsigned char* filters, int first_segment, int lane,
                                         const Inputs& inputs) {
  if constexpr (P::kAllTaps == 0) {
    return;
  } else if constexpr (kIsTf32) {
    const unsigned char* const pixels[2] = {
        tile + pixel_place(first_segment, lane / 4) + lane % 4 * 8,
        tile + pixel_place(first_segment + 1, lane / 4) + lane % 4 * 8};
    filters +=
        DGRAD ? lane % 4 * 2 * kFilterPitch + lane / 4 * 4 : lane / 4 * kFilterPitch + lane % 4 * 8;
    constexpr int kProducts = kTaps * kInChunks * GROUPS * ROWS * N_TILES;  // in all phases
    constexpr int kUnrolled = kProducts <= kMostUnrolled ? kInChunks : 1;
#pragma unroll
    for (int tap = 0; tap < P::kColumnTaps; ++tap) {
#pragma unroll kUnrolled
      for (int chunk = 0; chunk < kInChunks; ++chunk) {
        const unsigned char* const chunks[2] = {pixels[0] + chunk * kChunkBytes,
                                                pixels[1] + chunk * kChunkBytes};
        multiply_tf32<P>(sums, chunks, filters + chunk * kFilterChunk, tap, chunk, inputs);
      }
    }
  } else {
    const unsigned char* const pixels = tile + pixel_place(first_segment + lane / 8 % 2, lane % 8);
    const int second = lane / 8 % 2, fourth = lane / 16;
    filters += lane % 8 * kFilterPitch;
#pragma unroll
    for (int tap = 0; tap < P::kColumnTaps; ++tap) {
#pragma unroll
      for (int chunk = 0; chunk + 1 < kInChunks; chunk += 2) {
        multiply_pair<P>(
            sums, pixels + fourth * 16 + chunk * 16,
            filters + second * kFilterChunk + fourth * kNextFilters + chunk * kFilterChunk, tap,
            chunk, inputs);
      }
      if constexpr (kInChunks % 2 == 1) {
        constexpr int kNextTap = P::kRowTaps > 1 ? P::kNextTap : 0;
        constexpr int kSecondPair = N_TILES > 1 ? kNextFilters : P::kRowTaps > 2 ? kNextTap : 0;
        multiply_single<P>(
            sums, pixels + fourth * Input::offset(1, 0) + (kInChunks - 1) * 16,
            filters + second * kNextTap + fourth * kSecondPair + (kInChunks - 1) * kFilterChunk,
            tap, inputs);
      }
    }
  }
}
