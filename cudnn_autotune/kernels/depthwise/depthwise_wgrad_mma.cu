// The weight gradient of a depthwise convolution of stride 1, on tensor cores.
//
// dw[kh][kw] is the sum of x[h + kh][w + kw] dy[h][w]. Columns are divided into blocks of eight. An
// mma multiplies a block b of x, in two rows kh of the filter, by a block of dy, and adds over 16
// rows h:
//   D[kh][i][j] += x[h + kh][8 b + i] dy[h][8 (b - m) + j].
// The diagonals kw = 8 m + i - j are wanted. All blocks, rows and images add to the same D of a
// pair of rows kh and a distance m. At the end the diagonals are added. Elements that are on no
// wanted diagonal are thrown away: 7/16 of them are wanted for 7 wide filters and 31/40 for 31 wide
// ones. This is more than enough: FMAs have a 15th of the rate.
//
// Both fragments come from planes in shared memory, one a channel, by transposing ldmatrix: a
// matrix is 8 rows of 8 adjacent columns, a vector of 16 bytes each. kh moves the rows, so all
// vectors are aligned. One ldmatrix loads what is multiplied by all blocks of dy that it meets,
// which stay in registers.
//
// A block computes CHANNELS channels of a range of items. An item is TILES tiles, each 8 ROW_BLOCKS
// rows by 8 COLUMN_BLOCKS columns of dy of one image. Its threads read the tiles, arrange them as
// planes, meet, multiply, and meet again. The loads of one block of a multiprocessor overlap with
// the products of others. A warp has WARP_CHANNELS channels and WARP_PAIRS pairs of rows of the
// filter, with all their sums in registers.
//
// A signal of one row is cut into rows of 8 columns. Row r of x begins at 8r and reaches over the
// following ones, so vectors of adjacent rows lie side by side, and nothing is stored twice. The
// second row of a pair is then the next block of x, so that every other block suffices.
//
// In channels_last a thread reads LOAD_CHANNELS channels of 8 pixels and transposes them in
// registers.
//
// Bank conflicts: an odd number of vectors between rows makes ldmatrix free of them. Planes are
// such a number of vectors apart that 8 lanes that write vectors of adjacent channels use all
// banks.
//
// A tile may reach beyond the image: zeros of dy. Where they meet an x that is infinite or NaN, a
// sum that does not depend on it becomes NaN. So what a thread arranges of x that meets them is
// tested in registers. If some of it is not finite, that is replaced by zeros, and after the
// products the block adds those with dy inside of the image one by one, unless all sums are NaN by
// then. They are infinite or NaN, so their order does not matter. x outside of its image counts as
// zero, which a dy that is not finite makes NaN.
//
// What bounds it: for 7x7, memory; an mma needs 2.5 accesses of 128 bytes to shared memory, which
// take a little longer than the tensor cores. For 31x31 it needs 0.8, and tensor cores are the
// bound.
//
// Macros: ELEMENT, KERNEL_H, KERNEL_W, CHANNELS_LAST, SIGNAL, CHANNELS, WARP_CHANNELS, WARP_PAIRS,
// ROW_BLOCKS, COLUMN_BLOCKS, TILES, MIN_BLOCKS; LOAD_CHANNELS, 1 of contiguous tensors, and of
// these PAIRS (whether rows can be read by two columns) and ODD (whether the padding is odd); and
// the layout of shared memory, which depthwise_wgrad_mma.py computes, in vectors: PITCH_X and
// PITCH_Y (from a row to the next), TILE_X, TILE_Y, PLANE (of a channel); SHARED_BYTES.

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int kVectorBytes = 16;                    // bytes
constexpr int kBlocks = ceil_div(KERNEL_W + 7, 8);  // blocks of dy that a block of x meets
constexpr int kStep = SIGNAL ? 2 : 1;               // from a block of x that is loaded to the next
constexpr int kSumBlocks = ceil_div(kBlocks, kStep) * kStep;              // per row of the filter
constexpr int kWarpGroups = ceil_div(ceil_div(KERNEL_H, 2), WARP_PAIRS);  // warps per channel
constexpr int kWarps = CHANNELS / WARP_CHANNELS * kWarpGroups;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 8 * ROW_BLOCKS;
static_assert(TILES * ROW_BLOCKS % 2 == 0, "an mma takes two blocks of rows");
static_assert(!SIGNAL || (KERNEL_H == 1 && COLUMN_BLOCKS == 1), "a signal has one row");

// The rows of x that are loaded, and those that there is room for.
constexpr int kLoadedRows = kRows + (SIGNAL ? kBlocks : KERNEL_H) - 1;
constexpr int kLoadedVectors = SIGNAL ? 1 : COLUMN_BLOCKS + kBlocks - 1;
constexpr int kStoredRows = kRows + 2 * kWarpGroups * WARP_PAIRS - 1;
constexpr int kUnits = CHANNELS / LOAD_CHANNELS;
constexpr int kTilesAt = CHANNELS * PLANE * kVectorBytes;
static_assert(SIGNAL || (PITCH_X >= kLoadedVectors && PITCH_X % 2 && PITCH_Y >= COLUMN_BLOCKS &&
                         PITCH_Y % 2),
              "rows fit, and begin in other banks");
static_assert(TILE_X >= kStoredRows * PITCH_X + (SIGNAL ? kBlocks - 1 : 0) &&
                  TILE_Y >= kRows * PITCH_Y && PLANE >= TILES * (TILE_X + TILE_Y),
              "tiles fit");
static_assert(PLANE % 8 == (kUnits >= 8 ? 1 : 8 / kUnits % 8), "planes begin in other banks");
constexpr int kPitchD = 9;  // floats between rows of D, so that diagonals are free of conflicts
static_assert(SHARED_BYTES >= kWarps * 8 * kSumBlocks * kPitchD * sizeof(float), "sums fit");

struct Sizes {
  int images, channels;
  int in_h, in_w, out_h, out_w;
  int pad_h, pad_w;
  int tiles_down, tiles_across;  // per image
};

// Rows and columns of dy in a tile.
constexpr int kTileRows = SIGNAL ? 1 : kRows, kTileColumns = SIGNAL ? 8 * kRows : 8 * COLUMN_BLOCKS;
// The bits of an exponent.
__device__ constexpr unsigned exponent_of(half) { return 0x7c00; }
__device__ constexpr unsigned exponent_of(bfloat16) { return 0x7f80; }
constexpr unsigned kExponent = exponent_of(ELEMENT{});

struct Tile {
  int image, row, column;  // a place in dy; no image is negative
  int unused;
};
static_assert(SHARED_BYTES >= kTilesAt + TILES * sizeof(Tile), "planes and tiles fit");

__device__ __forceinline__ void find_tile(Tile& tile, const Sizes& s, int index) {
  const int in_image = s.tiles_down * s.tiles_across;
  tile.image = index / in_image < s.images ? index / in_image : -1;
  tile.row = SIGNAL ? 0 : index % in_image / s.tiles_across * kRows;
  tile.column = index % s.tiles_across * (SIGNAL ? 8 * kRows : 8 * COLUMN_BLOCKS);
}

// The first channels of all vectors come first, so that those of adjacent lanes are neighbours.
__device__ __forceinline__ int plane_of(int channel) {
  return (channel / LOAD_CHANNELS + channel % LOAD_CHANNELS * kUnits) * PLANE;
}

__device__ __forceinline__ bool is_inside(int column, int width) {
  return static_cast<unsigned>(column) < static_cast<unsigned>(width);
}

// The tile's rows and columns of dy that are inside of the image; more if all are.
struct Inside {
  int rows, columns;

  __device__ __forceinline__ Inside(const Tile& tile, const Sizes& s)
      : rows(SIGNAL ? 1 : s.out_h - tile.row), columns(s.out_w - tile.column) {}

  // Whether an x meets a dy of the tile that is beyond the image. Both are in the rows and columns
  // that are loaded.
  __device__ __forceinline__ bool meets_outside(int row, int column) const {
    return (kTileRows > rows && row >= rows) || (kTileColumns > columns && column >= columns);
  }
};

__device__ __forceinline__ bool is_not_finite(unsigned bits) { return (~bits & kExponent) == 0; }

// Whether one of eight numbers is not finite. Adding one to the exponent carries into the sign.
__device__ __forceinline__ bool has_not_finite(const unsigned (&words)[4]) {
  constexpr unsigned kExponents = kExponent * 0x10001u,
                     kLowest = (kExponent & -kExponent) * 0x10001u;
  unsigned found = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) found |= (words[k] & kExponents) + kLowest;
  return (found & 0x80008000u) != 0;
}

// Reads `rows` rows of `vectors` vectors of each tile, beginning `up` rows above and `left` columns
// to the left of it, into planes at `target`. What is outside of the image is zero. Returns whether
// one of the numbers that are `tested`, those that meet dy beyond the image, is not finite.
template <int rows, int vectors, int tile_vectors, int pitch, bool odd, bool tested>
__device__ __forceinline__ bool arrange(uint4* target, const ELEMENT* tensor, const Tile* tiles,
                                        const Sizes& s, int first_channel, int up, int left,
                                        int height, int width) {
  bool found = false;
  constexpr unsigned kCount = TILES * rows * vectors * kUnits;
  constexpr int kUnroll = LOAD_CHANNELS == 4 ? 1 : 2;  // for about as many loads on their way
#pragma unroll kUnroll
  for (unsigned i = threadIdx.x; i < kCount; i += kThreads) {
    // Lanes are adjacent in memory: first channels or first columns.
    const unsigned unit = CHANNELS_LAST ? i % kUnits : i / (vectors * rows * TILES);
    const unsigned j = CHANNELS_LAST ? i / kUnits : i % (vectors * rows * TILES);
    const unsigned vector = j % vectors, row = j / vectors % rows, index = j / (vectors * rows);
    const Tile tile = tiles[index];
    const int channel = first_channel + LOAD_CHANNELS * unit;
    const int from_row = SIGNAL ? 0 : tile.row - up + row;
    const int column = tile.column - left + 8 * (SIGNAL ? row : vector);
    const bool is_row =
        tile.image >= 0 && from_row >= 0 && from_row < height && channel < s.channels;
    const bool is_tested =
        tested && Inside(tile, s).meets_outside(SIGNAL ? 0 : row, 8 * (SIGNAL ? row : vector) + 7);
    uint4* const to = target + index * tile_vectors + row * pitch + vector;
    // No tensor has 2^31 elements, so what is read has an index of 32 bits.
    const unsigned image = tile.image;
    if (CHANNELS_LAST) {
      unsigned from = ((image * height + from_row) * width + column) * s.channels + channel;
      unsigned pixels[8][(LOAD_CHANNELS + 1) / 2];
#pragma unroll
      for (int k = 0; k < 8; ++k, from += s.channels) {
        const bool is_read = is_row && is_inside(column + k, width);
        if (LOAD_CHANNELS == 4) {
          uint2 four = make_uint2(0, 0);
          if (is_read) four = *reinterpret_cast<const uint2*>(tensor + from);
          pixels[k][0] = four.x, pixels[k][LOAD_CHANNELS / 4] = four.y;
        } else {
          pixels[k][0] = is_read ? *reinterpret_cast<const unsigned*>(tensor + from) : 0;
        }
      }
#pragma unroll
      for (int c = 0; c < LOAD_CHANNELS; ++c) {
        unsigned words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          words[k] =
              __byte_perm(pixels[2 * k][c / 2], pixels[2 * k + 1][c / 2], c % 2 ? 0x7632 : 0x5410);
        }
        if (is_tested) found |= has_not_finite(words);
        to[(unit + c * kUnits) * PLANE] = make_uint4(words[0], words[1], words[2], words[3]);
      }
    } else {
      const unsigned from = ((image * s.channels + channel) * height + from_row) * width + column;
      unsigned words[4];
      if (PAIRS) {
        unsigned pairs[5];
#pragma unroll
        for (int k = 0; k < 4 + odd; ++k) {
          const bool is_read = is_row && is_inside(column - odd + 2 * k, width);
          const unsigned at = from - odd + 2 * k;
          pairs[k] = is_read ? *reinterpret_cast<const unsigned*>(tensor + at) : 0;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          words[k] = odd ? __byte_perm(pairs[k], pairs[k + odd], 0x5432) : pairs[k];
        }
      } else {
        unsigned columns[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          columns[k] = is_row && is_inside(column + k, width) ? tensor[from + k].bits : 0;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) words[k] = columns[2 * k] | columns[2 * k + 1] << 16;
      }
      if (is_tested) found |= has_not_finite(words);
      to[plane_of(unit)] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
  return found;
}

// Calls `use` with the vectors of x that meet dy beyond the image, in the planes of an item: with
// the vector, its tile, the tile's index, the channel, and the row and first column in the tile.
template <typename Use>
__device__ __forceinline__ void for_each_cut(uint4* planes, const Sizes& s, int item,
                                             const Use& use) {
#pragma unroll 1
  for (int i = threadIdx.x; i < CHANNELS * TILES * kLoadedRows * kLoadedVectors; i += kThreads) {
    const int vector = i % kLoadedVectors, line = i / kLoadedVectors % kLoadedRows;
    const int index = i / (kLoadedVectors * kLoadedRows) % TILES;
    const int channel = i / (kLoadedVectors * kLoadedRows * TILES);
    const int row = SIGNAL ? 0 : line, column = 8 * (SIGNAL ? line : vector);
    Tile tile;
    find_tile(tile, s, item * TILES + index);
    if (tile.image < 0 || !Inside(tile, s).meets_outside(row, column + 7)) continue;
    use(planes[plane_of(channel) + index * TILE_X + line * PITCH_X + vector], tile, index, channel,
        row, column);
  }
}

// Replaces what is not finite and meets dy beyond the image by zeros.
__device__ __forceinline__ void clean(uint4* planes, const Sizes& s, int item) {
  for_each_cut(planes, s, item, [&](uint4& eight, const Tile& tile, int, int, int row, int column) {
    const unsigned words[4] = {eight.x, eight.y, eight.z, eight.w};
    if (!has_not_finite(words)) return;
    ELEMENT* const numbers = reinterpret_cast<ELEMENT*>(&eight);
    const Inside inside(tile, s);
#pragma unroll 1
    for (int k = 0; k < 8; ++k) {
      if (inside.meets_outside(row, column + k) && is_not_finite(numbers[k].bits)) {
        numbers[k].bits = 0;
      }
    }
  });
}

// Adds the products of what was cleaned with dy inside of the image to `partial`, of a split.
__device__ __forceinline__ void add_cleaned(uint4* planes, const ELEMENT* x, float* partial,
                                            const Sizes& s, int item, int first_channel) {
  for_each_cut(
      planes, s, item, [&](uint4&, const Tile& tile, int index, int of, int row, int column) {
        const int channel = first_channel + of, x_row = SIGNAL ? 0 : tile.row - s.pad_h + row;
        const int x_column = tile.column - s.pad_w + column;
        if (channel >= s.channels || x_row < 0 || x_row >= s.in_h) return;
        const unsigned step = CHANNELS_LAST ? s.channels : 1;
        const unsigned line = CHANNELS_LAST ? tile.image * s.in_h + x_row
                                            : (tile.image * s.channels + channel) * s.in_h + x_row;
        const ELEMENT* const from = x + (CHANNELS_LAST ? channel : 0);
        ELEMENT numbers[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          numbers[k].bits = 0;
          if (is_inside(x_column + k, s.in_w))
            numbers[k] = from[(line * s.in_w + x_column + k) * step];
        }
        const Inside inside(tile, s);
        const int rows = min(inside.rows, kTileRows), columns = min(inside.columns, kTileColumns);
        const ELEMENT* const dy = reinterpret_cast<const ELEMENT*>(planes + TILES * TILE_X +
                                                                   plane_of(of) + index * TILE_Y);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          if (!is_not_finite(numbers[k].bits) || !inside.meets_outside(row, column + k)) continue;
#pragma unroll 1
          for (int kh = max(0, row - rows + 1); kh < min(KERNEL_H, row + 1); ++kh) {
#pragma unroll 1
            for (int kw = max(0, column + k - columns + 1); kw < min(KERNEL_W, column + k + 1);
                 ++kw) {
              const int y_row = SIGNAL ? (column + k - kw) / 8 : row - kh;
              const int y_column = SIGNAL ? (column + k - kw) % 8 : column + k - kw;
              atomicAdd(partial + (channel * KERNEL_H + kh) * KERNEL_W + kw,
                        to_float(numbers[k]) * to_float(dy[y_row * PITCH_Y * 8 + y_column]));
            }
          }
        }
      });
}

// Whether one of `outputs` positions of dy, from `-pad` on, meets one of `size` of x by a tap.
__device__ __forceinline__ bool is_met(int tap, int pad, int size, int outputs) {
  return tap - pad < size && tap - pad + outputs > 0;
}

// Whether all sums of the warp are NaN whose weights meet x inside of the image.
__device__ __forceinline__ bool are_nan(const float (&sums)[WARP_CHANNELS][WARP_PAIRS][kBlocks][4],
                                        const Sizes& s, int first_row, int first_channel) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  bool result = true;
#pragma unroll
  for (int c = 0; c < WARP_CHANNELS; ++c) {
#pragma unroll
    for (int row = 0; row < (SIGNAL ? 1 : 2 * WARP_PAIRS); ++row) {
      const int kh = first_row + row;
      const bool is_row = first_channel + c < s.channels && kh < KERNEL_H &&
                          (SIGNAL || is_met(kh, s.pad_h, s.in_h, s.out_h));
      unsigned before = 0;
#pragma unroll
      for (int m = kSumBlocks - 1; m >= 0; --m) {
        const int second = SIGNAL ? m % 2 : row % 2;
        unsigned found = 0;  // bit 8 + i is column 8 m + i of the filter
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const float sum = sums[c][row / 2][m / kStep * kStep][2 * second + k];
          if (sum != sum) found |= 1u << (8 + g - 2 * t - k);
        }
        for (int bits = 16; bits > 0; bits /= 2) {
          found |= __shfl_xor_sync(0xffffffffu, found, bits);
        }
        const unsigned columns = found >> 8 | before;
        before = found & 0xffu;
        for (int i = 0; i < 8; ++i) {
          const int kw = 8 * m + i;
          if (is_row && kw < KERNEL_W && is_met(kw, s.pad_w, s.in_w, s.out_w)) {
            result &= columns >> i & 1;
          }
        }
      }
    }
  }
  return result;
}

// partial is (splits, channels, KERNEL_H, KERNEL_W).
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    depthwise_wgrad_mma(const ELEMENT* __restrict__ x, const ELEMENT* __restrict__ dy,
                        float* __restrict__ partial, int images, int channels, int in_h, int in_w,
                        int out_h, int out_w, int pad_h, int pad_w, int tiles_down,
                        int tiles_across, int items, int items_a_split) {
  DYNAMIC_SHARED(shared);
  uint4* const planes = reinterpret_cast<uint4*>(shared);
  Tile* const tiles = reinterpret_cast<Tile*>(shared + kTilesAt);
  const Sizes s{images, channels, in_h, in_w, out_h, out_w, pad_h, pad_w, tiles_down, tiles_across};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = warp % kWarpGroups * WARP_PAIRS * 2;  // a row of the filter
  const int warp_channel = warp / kWarpGroups * WARP_CHANNELS;
  const int channel_groups = ceil_div(channels, CHANNELS);
  const int first_channel = blockIdx.x % channel_groups * CHANNELS;
  const int split = blockIdx.x / channel_groups;
  const int end = min(items, (split + 1) * items_a_split);

  float sums[WARP_CHANNELS][WARP_PAIRS][kBlocks][4];
#pragma unroll
  for (int c = 0; c < WARP_CHANNELS; ++c) {
#pragma unroll
    for (int p = 0; p < WARP_PAIRS; ++p) {
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
        for (int k = 0; k < 4; ++k) sums[c][p][m][k] = 0.0f;
      }
    }
  }

  float* const split_sums =
      partial + static_cast<long long>(split) * channels * KERNEL_H * KERNEL_W;
  bool is_begun = false;  // whether products that were added one by one are in the partial sums
  int item = split * items_a_split;
  for (int i = threadIdx.x; i < TILES; i += kThreads) find_tile(tiles[i], s, item * TILES + i);
#pragma unroll 1
  for (; item < end; ++item) {
    __syncthreads();
    const bool is_found = arrange<kLoadedRows, kLoadedVectors, TILE_X, PITCH_X, ODD, true>(
        planes, x, tiles, s, first_channel, pad_h, pad_w, in_h, in_w);
    arrange<kRows, COLUMN_BLOCKS, TILE_Y, PITCH_Y, false, false>(
        planes + TILES * TILE_X, dy, tiles, s, first_channel, 0, 0, out_h, out_w);
    const bool is_cleaned = __syncthreads_or(is_found);
    if (is_cleaned) {
      clean(planes, s, item);
      __syncthreads();
    }
    for (int i = threadIdx.x; i < TILES; i += kThreads) {
      find_tile(tiles[i], s, (item + 1) * TILES + i);
    }
#pragma unroll 1
    for (int two = 0; two < TILES * ROW_BLOCKS; two += 2) {
      // This lane gives ldmatrix a row of a matrix: of x, matrices are the first row of a pair, the
      // second one, and both again for the next 8 rows of the tile; of dy, the first and the next.
      const int matrix = lane / 8, x_block = two + matrix / 2;
      const int x_row = x_block % ROW_BLOCKS * 8 + lane % 8 + first_row + matrix % 2;
      const int y_row = (two + matrix % 2) * 8 + lane % 8;
      const uint4* const x_lane = planes + x_block / ROW_BLOCKS * TILE_X + x_row * PITCH_X;
      const uint4* const y_lane = planes + TILES * TILE_X + y_row * PITCH_Y;
#pragma unroll
      for (int c = 0; c < WARP_CHANNELS; ++c) {
        const int plane = plane_of(warp_channel + c);
        unsigned right[kBlocks][2];  // block y of dy is in right[y % kBlocks]
#pragma unroll
        for (int b = 0; b < COLUMN_BLOCKS + kBlocks - 1; b += kStep) {
          if (b < COLUMN_BLOCKS) load_transposed(right[b % kBlocks], y_lane + plane + b);
#pragma unroll
          for (int p = 0; p < WARP_PAIRS; ++p) {
            unsigned left[4];
            load_transposed(left, x_lane + plane + 2 * p * PITCH_X + b);
#pragma unroll
            for (int m = 0; m < kBlocks; ++m) {
              const int y = b - m;
              if (y < 0 || y >= COLUMN_BLOCKS) continue;
              mma_16x8x16<ELEMENT>(sums[c][p][m], left, right[y % kBlocks]);
            }
          }
        }
      }
    }
    if (is_cleaned &&
        __syncthreads_or(!are_nan(sums, s, first_row, first_channel + warp_channel))) {
      if (!is_begun) {
        const int count = min(CHANNELS, channels - first_channel) * KERNEL_H * KERNEL_W;
        for (int i = threadIdx.x; i < count; i += kThreads) {
          split_sums[first_channel * KERNEL_H * KERNEL_W + i] = 0.0f;
        }
        is_begun = true;
        __syncthreads();
      }
      add_cleaned(planes, x, split_sums, s, item, first_channel);
    }
  }

  // Adds the diagonals, in shared memory of the warp.
  __syncthreads();
  const int g = lane / 4, t = lane % 4;
  float* const d = reinterpret_cast<float*>(shared) + warp * 8 * kSumBlocks * kPitchD;
#pragma unroll
  for (int c = 0; c < WARP_CHANNELS; ++c) {
#pragma unroll
    for (int row = 0; row < (SIGNAL ? 1 : 2 * WARP_PAIRS); ++row) {
#pragma unroll
      for (int m = 0; m < kSumBlocks; ++m) {
        const int second = SIGNAL ? m % 2 : row % 2;  // the second of the pair
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          d[(8 * m + g) * kPitchD + 2 * t + k] =
              sums[c][row / 2][m / kStep * kStep][2 * second + k];
        }
      }
      __syncwarp();
      const int kh = first_row + row, channel = first_channel + warp_channel + c;
      if (kh < KERNEL_H && channel < channels) {
        float* const to = split_sums + (channel * KERNEL_H + kh) * KERNEL_W;
        for (int kw = lane; kw < KERNEL_W; kw += 32) {
          float sum = 0.0f;
#pragma unroll
          for (int j = 0; j < 8; ++j) sum += d[(kw + j) * kPitchD + j];
          if (is_begun) {
            atomicAdd(to + kw, sum);
          } else {
            to[kw] = sum;
          }
        }
      }
      __syncwarp();
    }
  }
}
