// A 2-d or 3-d convolution of stride 1 with few output channels on the tensor cores of compute
// capability 9.0, channels_last: the forward (DGRAD 0), or the gradient of the input (DGRAD 1).
// "in" is what is read (x, or dy), "out" what is written (y, or dx). Images have a depth of 1 in
// 2-d.
//
// The columns of a filter stand side by side in a matrix. With position p + r as many depths and
// rows away from p as row r of the filter, and p + s a column to the right of p, a block computes
//   sums[p][s][o] = sum over r and c of in[p + r][c] * filter[r][s][c][o]
//   out[p][o]     = sum over s of sums[p + s][s][o]
// The first line is a matrix product with FILTER_COLUMNS * OUT columns for each r, where OUT is the
// number of output channels, or the next multiple of 8. The second one adds rows of the sums, which
// follow each other in a warpgroup's registers. With STREAMED each column is a product of its own,
//   out[p][o] = sum over r, s and c of in[p + r + s][c] * filter[r][s][c][o]
// for filters that are too many for one matrix or for shared memory.
//
// A block computes the outputs of tile_rows x tile_columns pixels of one depth of an image. The
// window of the input that they depend on passes through a ring of stages, one depth of the filters
// and PLANES * 8 channels at a time, in planes of 8 channels, where a position is a row of 16
// bytes. The window's rows follow each other. They have 8, 16, 32 or 64 positions, so that a
// warpgroup's matrix of 64 positions has whole ones, and the outputs in it need none of the next
// matrix. A warpgroup has MATRICES of them. A block goes over tiles that follow each other. It has
// all filters in shared memory, or with STREAMED those of a stage beside the stage's window.
//
// What bounds it. A product of 64 x 16 by 16 x N takes N / 2 clocks, and 16 + N / 4 for its
// operands to come from shared memory: with N = OUT = 32, a product for each tap would take 1.5
// times the clocks of its multiplications. From N = 64 on, multiplications bound it.

constexpr int kThreads = 128 * WARPGROUPS;
constexpr int kBeside = STREAMED ? 1 : FILTER_COLUMNS;  // columns of a filter in a matrix
constexpr int kApart = FILTER_COLUMNS / kBeside;        // matrices of a row of the filter
constexpr int kColumns = kBeside * OUT;
constexpr int kLacking = kBeside - 1;  // columns that the sums of the last one of a row lack
constexpr int kOutPlanes = OUT / 8;
// An output pixel is stored in pieces of 16 bytes, or in single numbers.
constexpr bool kIsWhole = OUT_CHANNELS == OUT;
constexpr int kPieces = kIsWhole ? kOutPlanes : OUT_CHANNELS;
// The filters of a stage are matrices, kApart for each row of the filter. In fprop a row of 16
// bytes has 8 channels of the input, in dgrad 8 of the output. Planes of these and of the window
// take an odd number of rows, so that they begin in different banks.
constexpr int kInner = DGRAD ? kColumns / 8 : PLANES;
constexpr int kWidth = DGRAD ? 8 * PLANES : kColumns;
constexpr int kFilterPitch = kWidth + 1;
constexpr int kFilterRows = kInner * kFilterPitch;
constexpr int kAlongSum = DGRAD ? 8 : kFilterPitch, kAcross = DGRAD ? kFilterPitch : 8;
constexpr int kScratchPitch = 2 * OUT + 16;
constexpr int kTileStages = CHUNKS * FILTER_DEPTHS;
// Rows whose products come before the copies of a stage. A warp that issues many products waits for
// most of them.
constexpr int kRowsBefore = STREAMED ? 1 : FILTER_ROWS;
constexpr int kFilterBytes = 16 * FILTER_ROWS * kApart * kFilterRows;  // of a stage

struct Sizes {
  int in_depth, in_height, in_width, in_stride;  // strides are elements from a pixel to the next
  int out_depth, out_height, out_width, out_stride;
  int first_depth, first_row, first_column;  // of the input, for the first output
  int depth_dilation, row_dilation;
  int tile_rows, tile_columns;
};

// Where a tile begins in the output.
struct Place {
  int image, depth, row, column;

  __device__ __forceinline__ static Place of(int tile, const Sizes& s) {
    const int across = (s.out_width + s.tile_columns - 1) / s.tile_columns;
    const int down = (s.out_height + s.tile_rows - 1) / s.tile_rows;
    const int rows = tile / across, depths = rows / down;
    return {depths / s.out_depth, depths % s.out_depth, rows % down * s.tile_rows,
            tile % across * s.tile_columns};
  }
  __device__ __forceinline__ void to_next(const Sizes& s) {
    column += s.tile_columns;
    if (column < s.out_width) return;
    column = 0;
    row += s.tile_rows;
    if (row < s.out_height) return;
    row = 0;
    if (++depth < s.out_depth) return;
    depth = 0;
    ++image;
  }
};

// Copies what a depth of the filters sees of a tile's window, of some channels, with pixels beyond
// the image as zeros. Neighbouring threads copy the planes of a pixel.
__device__ __forceinline__ void copy_window(unsigned char* to, int pitch, const ELEMENT* in,
                                            int positions, int filter_depth, int channel,
                                            const Place& place, const Sizes& s) {
  constexpr int kTogether = kThreads / PLANES;  // positions
  constexpr int kDown = kTogether / WINDOW_COLUMNS, kRight = kTogether % WINDOW_COLUMNS;
  const int plane = threadIdx.x % PLANES, first = threadIdx.x / PLANES;
  if (first >= kTogether) return;
  const int depth = place.depth + s.first_depth + filter_depth * s.depth_dilation;
  const bool has_depth = static_cast<unsigned>(depth) < static_cast<unsigned>(s.in_depth);
  int row = place.row + s.first_row + first / WINDOW_COLUMNS;
  int right = first % WINDOW_COLUMNS;
  const int column = place.column + s.first_column;
  const auto pixels = [&](long long rows, int columns) {
    return (rows * s.in_width + columns) * s.in_stride;
  };
  const int of_depth = place.image * s.in_depth + (has_depth ? depth : 0);
  in += pixels(static_cast<long long>(of_depth) * s.in_height + row, column + right) + channel +
        8 * plane;
  const long long step = pixels(kDown, kRight), wrapped = pixels(1, -WINDOW_COLUMNS);
  to += (plane * pitch + first) * 16;
#pragma unroll 4
  for (int i = first; i < positions; i += kTogether) {
    const bool exists = has_depth &&
                        static_cast<unsigned>(row) < static_cast<unsigned>(s.in_height) &&
                        static_cast<unsigned>(column + right) < static_cast<unsigned>(s.in_width);
    copy_async_cached(to, in, exists);
    to += 16 * kTogether;
    row += kDown;
    in += step;
    if (kRight > 0) {
      right += kRight;
      if (right >= WINDOW_COLUMNS) {
        right -= WINDOW_COLUMNS;
        ++row;
        in += wrapped;
      }
    }
  }
}

// Copies a depth of the filters, of some channels of the input. In dgrad it turns them round.
__device__ __forceinline__ void copy_filters(unsigned char* to, const ELEMENT* w, int depth,
                                             int channel) {
  constexpr int kRow = kInner * kWidth;
  constexpr int kTaps = FILTER_DEPTHS * FILTER_ROWS * FILTER_COLUMNS;
  for (int i = threadIdx.x; i < FILTER_ROWS * kApart * kRow; i += kThreads) {
    const int plane = i % kInner, inner = i / kInner % kWidth, matrix = i / kRow;
    const int r = matrix / kApart, first = matrix % kApart;  // a row, and the first column
    long long from;
    bool exists = true;
    if (DGRAD) {
      const int s = first + plane / kOutPlanes;
      const int tap =
          ((FILTER_DEPTHS - 1 - depth) * FILTER_ROWS + FILTER_ROWS - 1 - r) * FILTER_COLUMNS +
          FILTER_COLUMNS - 1 - s;
      from = (static_cast<long long>(channel + inner) * kTaps + tap) * OUT + plane % kOutPlanes * 8;
    } else {
      const int s = first + inner / OUT, o = inner % OUT;
      exists = o < OUT_CHANNELS;
      const int tap = (depth * FILTER_ROWS + r) * FILTER_COLUMNS + s;
      from =
          (static_cast<long long>(o) * kTaps + tap) * (CHUNKS * 8 * PLANES) + channel + 8 * plane;
    }
    unsigned char* const there = to + (matrix * kFilterRows + plane * kFilterPitch + inner) * 16;
    copy_async_cached(there, w + from, exists);
  }
}

// The matrices of the filters of a stage, of their rows from kBegin to kEnd, times those of a
// window whose first row is `rows`.
template <int kBegin, int kEnd>
__device__ __forceinline__ void multiply(float (&sums)[MATRICES][kColumns / 2], unsigned rows,
                                         int pitch, unsigned filters, const Sizes& s) {
  begin_products();
#pragma unroll
  for (int r = kBegin; r < kEnd; ++r) {
    const Matrix row = Matrix::at(rows + 16 * r * s.row_dilation * WINDOW_COLUMNS, pitch, 8);
#pragma unroll
    for (int apart = 0; apart < kApart; ++apart) {
      const Matrix right =
          Matrix::at(filters + 16 * (r * kApart + apart) * kFilterRows, kAlongSum, kAcross);
#pragma unroll
      for (int pair = 0; pair < PLANES / 2; ++pair) {
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) {
          MULTIPLY<ELEMENT, 0, DGRAD>(sums[m], row + (2 * pair * pitch + apart + 64 * m),
                                      right + 2 * pair * kAlongSum);
        }
      }
    }
  }
  commit_products();
}

// Adds what belongs to an output: in the first OUT columns, row p becomes the sum over s of row
// p + s of the columns of s. A warp holds 16 rows. Where the window's rows are longer, it gets what
// it needs of the next ones through `exchange`, which has kLacking * OUT numbers of each warp.
// Behind its last row come zeros.
__device__ __forceinline__ void add_columns(float (&sums)[kColumns / 2], float* exchange) {
  const int lane = threadIdx.x % 32, group = lane / 4, column = lane % 4 * 2;
  const int warp = threadIdx.x % 128 / 32, next = (lane + 4) % 32;
#pragma unroll
  for (int j = 0; j < kOutPlanes; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float low = sums[4 * (kLacking * kOutPlanes + j) + i];
      float high = sums[4 * (kLacking * kOutPlanes + j) + 2 + i];
#pragma unroll
      for (int s = kLacking - 1; s >= 0; --s) {
        if (WINDOW_COLUMNS > 16 && group == 0) exchange[s * OUT + 8 * j + column + i] = low;
        const float below_low = __shfl_sync(0xffffffffu, low, next);
        const float below_high = __shfl_sync(0xffffffffu, high, next);
        low = sums[4 * (s * kOutPlanes + j) + i] + (group < 7 ? below_low : below_high);
        high = sums[4 * (s * kOutPlanes + j) + 2 + i] + (group < 7 ? below_high : 0.0f);
      }
      sums[4 * j + i] = low;
      sums[4 * j + 2 + i] = high;
    }
  }
  if (WINDOW_COLUMNS <= 16) return;
  sync_warpgroup();
  // Row 15 - s lacks what begins s + 1 columns to the right.
  if (warp == 3 || 7 - group >= kLacking) return;
  exchange += kLacking * OUT + (7 - group) * OUT;
#pragma unroll
  for (int j = 0; j < kOutPlanes; ++j) {
    sums[4 * j + 2] += exchange[8 * j + column];
    sums[4 * j + 3] += exchange[8 * j + column + 1];
  }
}

// Adds the bias and the residual to the sums of 16 positions from `first` on, which a warp holds,
// and stores them.
__device__ __forceinline__ void store(const float (&sums)[kColumns / 2], unsigned char* scratch,
                                      ELEMENT* out, const ELEMENT* bias, const ELEMENT* residual,
                                      const ELEMENT* slope, int first, const Place& place,
                                      const Sizes& s) {
  const int lane = threadIdx.x % 32, group = lane / 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int position = first + 8 * h + group;
    const int row = position / WINDOW_COLUMNS, right = position % WINDOW_COLUMNS;
    const bool exists = row < s.tile_rows && right < s.tile_columns &&
                        place.row + row < s.out_height && place.column + right < s.out_width;
    const int pixel =
        exists ? ((place.image * s.out_depth + place.depth) * s.out_height + place.row + row) *
                         s.out_width +
                     place.column + right
               : -1;
    const bool adds = residual != nullptr && exists;
    finish_row<ACTIVATION, kOutPlanes, OUT_CHANNELS>(
        sums, h, bias, adds ? residual + static_cast<long long>(pixel) * OUT : nullptr, slope,
        scratch + group * kScratchPitch);
    __syncwarp();
#pragma unroll
    for (int begin = 0; begin < 8 * kPieces; begin += 32) {
      const int i = begin + lane, of = min(i / kPieces, 7), piece = i % kPieces;
      const int to = __shfl_sync(0xffffffffu, pixel, 4 * of);
      if (i >= 8 * kPieces || to < 0) continue;
      ELEMENT* const there = out + static_cast<long long>(to) * s.out_stride;
      const unsigned char* const here = scratch + of * kScratchPitch;
      if (kIsWhole) {
        reinterpret_cast<uint4*>(there)[piece] = reinterpret_cast<const uint4*>(here)[piece];
      } else {
        there[piece] = reinterpret_cast<const ELEMENT*>(here)[piece];
      }
    }
    __syncwarp();
  }
}

// A block computes `tiles` tiles, or those that are left. `positions` are those of the window, and
// of the rows behind it that the last matrix has.
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    few_filters(const ELEMENT* in, const ELEMENT* w, ELEMENT* out, const ELEMENT* bias,
                const ELEMENT* residual, const ELEMENT* slope, int in_depth, int in_height,
                int in_width, int in_stride, int out_depth, int out_height, int out_width,
                int out_stride, int first_depth, int first_row, int first_column,
                int depth_dilation, int row_dilation, int tile_rows, int tile_columns,
                int all_tiles, int tiles, int positions) {
  DYNAMIC_SHARED(shared);
  const Sizes s{in_depth,     in_height,      in_width,     in_stride,   out_depth,
                out_height,   out_width,      out_stride,   first_depth, first_row,
                first_column, depth_dilation, row_dilation, tile_rows,   tile_columns};
  const int pitch = positions + 1;
  const int window_bytes = 16 * PLANES * pitch;
  const int stage_bytes = window_bytes + (STREAMED ? kFilterBytes : 0);
  unsigned char* const filters = shared + (STREAMED ? window_bytes : STAGES * stage_bytes);
  const auto filters_of = [&](int stage) {
    return filters + (STREAMED ? stage % STAGES * stage_bytes : stage % kTileStages * kFilterBytes);
  };
  unsigned char* const scratch =
      shared + STAGES * stage_bytes + (STREAMED ? 0 : kTileStages * kFilterBytes);
  float* const exchange = reinterpret_cast<float*>(scratch + kThreads / 32 * (8 * kScratchPitch));
  const int first_tile = blockIdx.x * tiles;
  const int stages = min(tiles, all_tiles - first_tile) * kTileStages;
  Place place = Place::of(first_tile, s), next = place;
  int next_stage = 0;
  const auto copy_next_stage = [&]() {
    if (next_stage < stages) {
      const int of_tile = next_stage % kTileStages, filter_depth = of_tile / CHUNKS;
      const int channel = of_tile % CHUNKS * (8 * PLANES);
      if (STREAMED || next_stage < kTileStages) {
        copy_filters(filters_of(next_stage), w, filter_depth, channel);
      }
      copy_window(shared + next_stage % STAGES * stage_bytes, pitch, in, positions, filter_depth,
                  channel, next, s);
      if (of_tile == kTileStages - 1) next.to_next(s);
      ++next_stage;
    }
    commit_copies();
  };
  // The same in all lanes, as the compiler sees by this.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = threadIdx.x / 32;
  const unsigned window = shared_address(shared) + 16 * 64 * MATRICES * warpgroup;

#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) copy_next_stage();
  float sums[MATRICES][kColumns / 2];
  const auto clear = [&]() {
#pragma unroll
    for (int m = 0; m < MATRICES; ++m) {
#pragma unroll
      for (int j = 0; j < kColumns / 2; ++j) sums[m][j] = 0.0f;
    }
  };
  clear();
  for (int i = 0; i < stages; ++i) {
    copies_arrived<STAGES - 2>();
    publish_writes();
    // All have the stage i, and are done with the one before.
    __syncthreads();
    const unsigned rows = window + i % STAGES * stage_bytes;
    const unsigned matrices = shared_address(filters_of(i));
    multiply<0, kRowsBefore>(sums, rows, pitch, matrices, s);
    copy_next_stage();
    if (kRowsBefore < FILTER_ROWS) {
      multiply<kRowsBefore, FILTER_ROWS>(sums, rows, pitch, matrices, s);
    }
    products_done<0>();
    if (i % kTileStages == kTileStages - 1) {
#pragma unroll
      for (int m = 0; m < MATRICES; ++m) {
        if (kLacking > 0) add_columns(sums[m], exchange + warp * (kLacking * OUT));
        store(sums[m], scratch + warp * (8 * kScratchPitch), out, bias, residual, slope,
              (warp / 4 * MATRICES + m) * 64 + warp % 4 * 16, place, s);
      }
      place.to_next(s);
      clear();
    }
  }
  copies_arrived<0>();
}
