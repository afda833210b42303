// The weight gradient of a depthwise convolution of stride 1, on tensor cores.
//
// dw[kh][kw] is the sum of x[h + kh][w + kw] dy[h][w]. For one kh, an mma multiplies 16 columns of
// x by 8 columns of dy, and adds over 16 rows h:
//   D[i][j] += x[h + kh][8 b + i] dy[h][8 b + j].
// The diagonal i - j = kw of D is what is wanted, and all column blocks b, rows and images add to
// the same D. At the end the diagonals are added. Elements that are on no wanted diagonal are
// thrown away: 7/16 of them are wanted for 7 wide filters, and 31/48 for 31 wide ones, where three
// D side by side have i from 0 to 47. This is more than enough: FMAs have a 15th of the rate.
//
// Both fragments come from planes in shared memory, one a channel, by transposing ldmatrix: a
// matrix is 8 rows of 8 adjacent columns, a piece of 16 bytes each. kh moves the rows, so all
// pieces are aligned. Column block b + 1 needs only one new matrix of x a row block and kh, since
// the others are in registers. With filters of many rows a warp has those at a distance of 8
// (SHIFTS), which share matrices as well.
//
// A block computes CHANNELS channels of a range of items. An item is TILES tiles, each 8 ROW_BLOCKS
// rows by 8 COLUMN_BLOCKS columns of dy of one image. Its threads read the tiles, arrange them as
// planes, meet, multiply, and meet again. The loads of one block of a multiprocessor overlap with
// the products of others. A warp has WARP_CHANNELS channels and WARP_ROWS rows kh of the filter
// (and those 8, 16... below), with all their sums in registers.
//
// A signal of one row is cut into rows of 8 columns. Row r of x begins at 8r and reaches over the
// following ones, so pieces of adjacent rows lie side by side, and nothing is stored twice.
//
// In channels_last a thread reads two channels of 8 pixels and transposes them in registers.
//
// Bank conflicts: an odd number of pieces between rows makes ldmatrix free of them. Planes are such
// a number of pieces apart that 8 lanes that write pieces of adjacent channels use all banks.
//
// What bounds it: for 7x7, memory; an mma needs 2.3 accesses of 128 bytes to shared memory, which
// are slower than the tensor cores. For 31x31 0.6, so tensor cores are the bound.
//
// Macros: ELEMENT, KERNEL_H, KERNEL_W, CHANNELS_LAST, SIGNAL, CHANNELS, WARP_CHANNELS, WARP_ROWS,
// SHIFTS, ROW_BLOCKS, COLUMN_BLOCKS, TILES, MIN_BLOCKS; of contiguous tensors PAIRS (whether rows
// can be read by two columns) and ODD (whether the padding is odd).

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int kPiece = 16;                          // bytes
constexpr int kBlocks = ceil_div(KERNEL_W + 7, 8);  // of x columns that a block of dy meets
constexpr int kProducts = ceil_div(kBlocks, 2);     // D side by side
constexpr int kHeld = 2 * kProducts;
constexpr int kWarpGroups = ceil_div(SHIFTS == 1 ? KERNEL_H : 8, WARP_ROWS);  // of one channel
constexpr int kWarps = CHANNELS / WARP_CHANNELS * kWarpGroups;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 8 * ROW_BLOCKS;
static_assert(TILES * ROW_BLOCKS % 2 == 0, "an mma takes two blocks of rows");
static_assert(SHIFTS == 1 || ROW_BLOCKS % 2 == 0, "these two blocks are neighbours");
static_assert(!SIGNAL || (KERNEL_H == 1 && COLUMN_BLOCKS == 1), "a signal has one row");

// Matrices, one below the other, that are loaded for a row of the filter: three need room for four.
constexpr int kMatrices = SHIFTS + 1;
constexpr int kMatrixRows = 8 * (kMatrices % 4 == 3 ? kMatrices + 1 : kMatrices);

// What is loaded of x, and what there is room for.
constexpr int kLoadedRows = kRows + (SIGNAL ? kBlocks : KERNEL_H) - 1;
constexpr int kLoadedPieces = SIGNAL ? 1 : COLUMN_BLOCKS + kBlocks - 1;
constexpr int kStoredRows = kRows - 16 + kMatrixRows + kWarpGroups * WARP_ROWS - 1;
constexpr int kPitchX = SIGNAL ? 1 : (COLUMN_BLOCKS + kHeld - 1) | 1;
constexpr int kPitchY = SIGNAL ? 1 : COLUMN_BLOCKS | 1;
constexpr int kTileX = kStoredRows * kPitchX + (SIGNAL ? kHeld - 1 : 0);
constexpr int kTileY = kRows * kPitchY;
constexpr int kPairs = CHANNELS / 2;
__device__ constexpr int plane_pieces() {
  const int apart = kPairs >= 8 ? 1 : 8 / kPairs, pieces = TILES * (kTileX + kTileY);
  return pieces + (apart + 8 - pieces % 8) % 8;
}
constexpr int kPlane = plane_pieces();
constexpr int kTilesAt = CHANNELS * kPlane * kPiece;
constexpr int kPitchD = 9;  // floats between rows of D, so that diagonals are free of conflicts

struct Sizes {
  int images, channels;
  int in_h, in_w, out_h, out_w;
  int pad_h, pad_w;
  int tiles_down, tiles_across;  // of an image
};

struct Tile {
  int image, row, column;  // of dy; no image is negative
  int unused;
};

__device__ __forceinline__ void find_tile(Tile& tile, const Sizes& s, int index) {
  const int in_image = s.tiles_down * s.tiles_across;
  tile.image = index / in_image < s.images ? index / in_image : -1;
  tile.row = SIGNAL ? 0 : index % in_image / s.tiles_across * kRows;
  tile.column = index % s.tiles_across * (SIGNAL ? 8 * kRows : 8 * COLUMN_BLOCKS);
}

// Even channels come first, so that channels of adjacent lanes are neighbours.
__device__ __forceinline__ int plane_of(int channel) {
  return (CHANNELS_LAST ? channel / 2 + channel % 2 * kPairs : channel) * kPlane;
}

// Reads `rows` rows of `pieces` pieces of each tile, beginning `up` rows above and `left` columns
// to the left of it, into planes at `target`. What is outside of the image is zero.
template <int rows, int pieces, int tile_pieces, int pitch, bool odd>
__device__ __forceinline__ void arrange(uint4* target, const ELEMENT* tensor, const Tile* tiles,
                                        const Sizes& s, int first_channel, int up, int left,
                                        int height, int width) {
  constexpr int kUnits = CHANNELS_LAST ? kPairs : CHANNELS;
  constexpr int kCount = TILES * rows * pieces * kUnits;
#pragma unroll 2
  for (int i = threadIdx.x; i < kCount; i += kThreads) {
    // Lanes are adjacent in memory: first channels or first columns.
    const int unit = CHANNELS_LAST ? i % kUnits : i / (pieces * rows * TILES);
    const int j = CHANNELS_LAST ? i / kUnits : i % (pieces * rows * TILES);
    const int piece = j % pieces, row = j / pieces % rows, index = j / (pieces * rows);
    const Tile tile = tiles[index];
    const int channel = first_channel + (CHANNELS_LAST ? 2 * unit : unit);
    const int from_row = SIGNAL ? 0 : tile.row - up + row;
    const int column = tile.column - left + 8 * (SIGNAL ? row : piece);
    const bool is_row =
        tile.image >= 0 && from_row >= 0 && from_row < height && channel < s.channels;
    uint4* const to = target + index * tile_pieces + row * pitch + piece;
    const long long image = tile.image;
    if (CHANNELS_LAST) {
      const ELEMENT* from =
          tensor + ((image * height + from_row) * width + column) * s.channels + channel;
      unsigned pixels[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const bool is_inside =
            is_row && static_cast<unsigned>(column + k) < static_cast<unsigned>(width);
        pixels[k] = is_inside ? *reinterpret_cast<const unsigned*>(from) : 0;
        from += s.channels;
      }
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        unsigned words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          words[k] = __byte_perm(pixels[2 * k], pixels[2 * k + 1], which ? 0x7632 : 0x5410);
        }
        to[plane_of(2 * unit + which)] = make_uint4(words[0], words[1], words[2], words[3]);
      }
    } else {
      const ELEMENT* from =
          tensor + ((image * s.channels + channel) * height + from_row) * width + column;
      unsigned words[4];
      if (PAIRS) {
        unsigned pairs[5];
#pragma unroll
        for (int k = 0; k < 4 + odd; ++k) {
          const bool is_inside =
              is_row && static_cast<unsigned>(column - odd + 2 * k) < static_cast<unsigned>(width);
          pairs[k] = is_inside ? *reinterpret_cast<const unsigned*>(from - odd + 2 * k) : 0;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          words[k] = odd ? __byte_perm(pairs[k], pairs[k + odd], 0x5432) : pairs[k];
        }
      } else {
        unsigned columns[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          const bool is_inside =
              is_row && static_cast<unsigned>(column + k) < static_cast<unsigned>(width);
          columns[k] = is_inside ? from[k].bits : 0;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) words[k] = columns[2 * k] | columns[2 * k + 1] << 16;
      }
      to[plane_of(unit)] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// Loads the matrices of a row of the filter, which lie below each other. `from` is of the lane.
__device__ __forceinline__ void load_column(unsigned (&matrices)[kMatrices], const uint4* from) {
#pragma unroll
  for (int i = 0; i < kMatrices; i += 4) {
    const uint4* const place = from + i * 8 * kPitchX;
    if (kMatrices - i >= 3) {
      unsigned four[4];
      load_transposed(four, place);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (i + k < kMatrices) matrices[i + k] = four[k];
      }
    } else if (kMatrices - i == 2) {
      unsigned two[2];
      load_transposed(two, place);
      matrices[i] = two[0], matrices[i + 1 < kMatrices ? i + 1 : 0] = two[1];
    } else {
      unsigned one[1];
      load_transposed(one, place);
      matrices[i] = one[0];
    }
  }
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
  const int first_row = warp % kWarpGroups * WARP_ROWS;  // of the filter
  const int warp_channel = warp / kWarpGroups * WARP_CHANNELS;
  const int channel_groups = ceil_div(channels, CHANNELS);
  const int first_channel = blockIdx.x % channel_groups * CHANNELS;
  const int split = blockIdx.x / channel_groups;
  const int end = min(items, (split + 1) * items_a_split);

  // What ldmatrix needs of this lane: a row of a matrix.
  const int matrix = lane / 8, matrix_row = lane % 8;
  const int below = SHIFTS == 1 ? matrix % 2 : matrix;

  float sums[WARP_CHANNELS][WARP_ROWS][SHIFTS][kProducts][4];
#pragma unroll
  for (int c = 0; c < WARP_CHANNELS; ++c) {
#pragma unroll
    for (int r = 0; r < WARP_ROWS; ++r) {
#pragma unroll
      for (int m = 0; m < SHIFTS; ++m) {
#pragma unroll
        for (int p = 0; p < kProducts; ++p) {
#pragma unroll
          for (int k = 0; k < 4; ++k) sums[c][r][m][p][k] = 0.0f;
        }
      }
    }
  }

  int item = split * items_a_split;
  for (int i = threadIdx.x; i < TILES; i += kThreads) find_tile(tiles[i], s, item * TILES + i);
#pragma unroll 1
  for (; item < end; ++item) {
    __syncthreads();
    arrange<kLoadedRows, kLoadedPieces, kTileX, kPitchX, ODD>(planes, x, tiles, s, first_channel,
                                                              pad_h, pad_w, in_h, in_w);
    arrange<kRows, COLUMN_BLOCKS, kTileY, kPitchY, false>(planes + TILES * kTileX, dy, tiles, s,
                                                          first_channel, 0, 0, out_h, out_w);
    __syncthreads();
    for (int i = threadIdx.x; i < TILES; i += kThreads) {
      find_tile(tiles[i], s, (item + 1) * TILES + i);
    }
#pragma unroll 1
    for (int two = 0; two < TILES * ROW_BLOCKS; two += 2) {
      const int block = two + (below > 0);
      const int x_row = block % ROW_BLOCKS * 8 + (below > 1 ? below - 1 : 0) * 8 + matrix_row;
      const uint4* const x_lane =
          planes + block / ROW_BLOCKS * kTileX + (x_row + first_row) * kPitchX;
      const uint4* const y_lane =
          planes + TILES * kTileX + ((two + matrix % 2) * 8 + matrix_row) * kPitchY;
#pragma unroll
      for (int c = 0; c < WARP_CHANNELS; ++c) {
        const int plane = plane_of(warp_channel + c);
        // The matrices of column block b are in held[...][b % kHeld].
        unsigned held[WARP_ROWS][kHeld][kMatrices];
#pragma unroll
        for (int b = 0; b < COLUMN_BLOCKS + kHeld - 1; ++b) {
#pragma unroll
          for (int r = 0; r < WARP_ROWS; ++r) {
            load_column(held[r][b % kHeld], x_lane + plane + r * kPitchX + b);
          }
          const int y_block = b - (kHeld - 1);
          if (y_block < 0) continue;
          unsigned right[2];
          load_transposed(right, y_lane + plane + y_block);
#pragma unroll
          for (int r = 0; r < WARP_ROWS; ++r) {
#pragma unroll
            for (int m = 0; m < SHIFTS; ++m) {
#pragma unroll
              for (int p = 0; p < kProducts; ++p) {
                const int at = (y_block + 2 * p) % kHeld, next = (y_block + 2 * p + 1) % kHeld;
                const unsigned left[4] = {held[r][at][m], held[r][next][m], held[r][at][m + 1],
                                          held[r][next][m + 1]};
                mma_16x8x16<ELEMENT>(sums[c][r][m][p], left, right);
              }
            }
          }
        }
      }
    }
  }

  // Adds the diagonals, in shared memory of the warp.
  __syncthreads();
  const int g = lane / 4, t = lane % 4;
  float* const d = reinterpret_cast<float*>(shared) + warp * 16 * kProducts * kPitchD;
#pragma unroll
  for (int c = 0; c < WARP_CHANNELS; ++c) {
#pragma unroll
    for (int r = 0; r < WARP_ROWS; ++r) {
#pragma unroll
      for (int m = 0; m < SHIFTS; ++m) {
#pragma unroll
        for (int p = 0; p < kProducts; ++p) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            d[(16 * p + g + k / 2 * 8) * kPitchD + 2 * t + k % 2] = sums[c][r][m][p][k];
          }
        }
        __syncwarp();
        const int kh = first_row + r + 8 * m, channel = first_channel + warp_channel + c;
        if (kh < KERNEL_H && channel < channels) {
          float* const to =
              partial +
              ((static_cast<long long>(split) * channels + channel) * KERNEL_H + kh) * KERNEL_W;
          for (int kw = lane; kw < KERNEL_W; kw += 32) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; ++j) sum += d[(kw + j) * kPitchD + j];
            to[kw] = sum;
          }
        }
        __syncwarp();
      }
    }
  }
}
