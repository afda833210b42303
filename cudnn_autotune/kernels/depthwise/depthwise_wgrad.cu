// The weight gradient of a depthwise convolution in channels_last, on CUDA cores.
//
// A thread has CHANNELS adjacent channels (one load of a pixel) and keeps their sums, one a tap, in
// registers. It walks down tiles: a few columns and many rows of dy, and the x pixels that they
// meet. Each pixel is loaded and converted once a tile; columns of x where tiles overlap mostly
// come from the L1 cache. The lanes of a warp are adjacent channels: accesses are coalesced.
//
// With stride S, dilation D and padding P, the dy pixels r + D c of a residue r < D meet the x
// pixels S r - P + D j only: tap k pairs index c with j = S c + k. A step reads the S rows S i + p
// of x and row i of dy. Phase p pairs them with the rows i - m of dy, which are kept, by tap
// p + S m. So with any stride each product is needed, but for those of zeros at a tile's ends.
//
// In three dimensions a tile lies in one depth of dy, and a step reads those rows of x in each of
// the depths that it meets by the DEPTHS depths of taps that the block has: one, or all.
//
// What follows is loaded one step ahead. What bounds stride 2 is DRAM: 3x3 takes some 150
// instructions to read 80 bytes a thread. 5x5 of stride 1 is bound by the products.
//
// At the end the block adds the sums of its tiles in a fixed order and writes partial sums, which
// sum_parts.cu adds.
//
// A tile may have columns beyond the image: zeros of dy. Where they meet an x that is infinite or
// NaN, a sum that does not depend on it becomes NaN. So a thread keeps its sums from before such a
// tile, and if one of them becomes NaN, adds the tile again without these products. x outside of
// its image counts as zero, which a dy that is not finite makes NaN.
//
// Macros: ELEMENT, CHANNELS, COLUMNS, DEPTHS, KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W, THREADS,
// MIN_BLOCKS.

constexpr int kTaps = DEPTHS * KERNEL_H * KERNEL_W;
constexpr int kSlots = (KERNEL_H + STRIDE_H - 1) / STRIDE_H;  // rows of dy that a row of x meets
constexpr int kPhases = STRIDE_H < KERNEL_H ? STRIDE_H : KERNEL_H;
constexpr int kWindow = (COLUMNS - 1) * STRIDE_W + KERNEL_W;
constexpr int kBytes = CHANNELS * sizeof(ELEMENT);
constexpr int kWords = (kBytes + 3) / 4;
static_assert(kWindow <= 32, "columns are bits of a mask");

// The channels of a pixel, as they lie in memory.
struct Pixel {
  unsigned words[kWords];
};

__device__ __forceinline__ Pixel load_pixel(const char* from, bool is_valid) {
  Pixel pixel{};
  if (is_valid) {
    if constexpr (kBytes == 2) {
      pixel.words[0] = *reinterpret_cast<const unsigned short*>(from);
    } else if constexpr (kBytes == 4) {
      pixel.words[0] = *reinterpret_cast<const unsigned*>(from);
    } else if constexpr (kBytes == 8) {
      const uint2 two = *reinterpret_cast<const uint2*>(from);
      pixel.words[0] = two.x, pixel.words[kWords > 1] = two.y;
    } else {
      static_assert(kBytes == 8 || kBytes < 8, "what a load reads");
    }
  }
  return pixel;
}

template <typename E = ELEMENT>
__device__ __forceinline__ void to_floats(const Pixel& pixel, float (&values)[CHANNELS]) {
#pragma unroll
  for (int v = 0; v < CHANNELS; ++v) {
    if constexpr (sizeof(E) == 4) {
      values[v] = __uint_as_float(pixel.words[v]);
    } else {
      const float2 two = unpack<E>(pixel.words[v / 2]);
      values[v] = v % 2 ? two.y : two.x;
    }
  }
}

// Keeps the compiler from computing a pixel's address by multiplications, or ahead of its use.
__device__ __forceinline__ const char* kept(const char* pointer) {
#ifdef __CUDACC_RTC__
  asm("" : "+l"(pointer));
  __builtin_assume(__isGlobal(pointer));
#endif
  return pointer;
}

// Returns bit j if column first + j * pitch is one of `width`, and one that a tap needs.
template <int count, int period, int needed>
__device__ __forceinline__ unsigned columns_inside(int first, int pitch, int width) {
  unsigned mask = 0;
#pragma unroll
  for (int j = 0; j < count; ++j) {
    const int column = first + j * pitch;
    if (j % period < needed && column >= 0 && column < width) mask |= 1u << j;
  }
  return mask;
}

// Adds the products of a row of x, of a phase, with the rows of dy that it meets in step `step`;
// if `exact`, of the columns of dy whose bit is in `y_columns`.
template <bool exact>
__device__ __forceinline__ void add_products(float (&sums)[KERNEL_H][KERNEL_W][CHANNELS],
                                             const float (&window)[kWindow][CHANNELS],
                                             const float (&y_rows)[kSlots][COLUMNS][CHANNELS],
                                             int phase, int step, int row_count,
                                             unsigned y_columns) {
#pragma unroll
  for (int m = 0; m < kSlots; ++m) {
    const int kh = phase + STRIDE_H * m;
    if (kh >= KERNEL_H) continue;
    // A row that is none of the tile is left out: x may be infinite, and the row's zeros make NaN.
    if (step < m || step - m >= row_count) continue;
#pragma unroll
    for (int kw = 0; kw < KERNEL_W; ++kw) {
#pragma unroll
      for (int t = 0; t < COLUMNS; ++t) {
        if (exact && (y_columns >> t & 1) == 0) continue;
#pragma unroll
        for (int v = 0; v < CHANNELS; ++v) {
          sums[kh < KERNEL_H ? kh : 0][kw][v] += window[t * STRIDE_W + kw][v] * y_rows[m][t][v];
        }
      }
    }
  }
}

struct Sizes {
  int channels;
  int in_d, in_h, in_w, out_d, out_h, out_w;
  int stride_d, pad_d, pad_h, pad_w, dilation_d, dilation_h, dilation_w;
  int tiles_down, tiles_across, rows;  // rows of a tile
};

constexpr int kSums = kTaps * CHANNELS;
struct Sums {
  float of[DEPTHS][KERNEL_H][KERNEL_W][CHANNELS];
};

// Whether one of the sums is NaN.
__device__ __forceinline__ bool has_nan(const Sums& sums) {
  const float* const first = &sums.of[0][0][0][0];
  bool found = false;
#pragma unroll
  for (int i = 0; i < kSums; ++i) found |= first[i] != first[i];
  return found;
}

// The tile's first column of dy.
__device__ __forceinline__ int column_of(const Sizes& s, int tile) {
  const int across = tile % s.tiles_across;
  return across % s.dilation_w + across / s.dilation_w * COLUMNS * s.dilation_w;
}

// Adds the products of a tile. If `exact`, none with dy beyond the image, and it ends when all sums
// are NaN that are in `wrong`.
template <bool exact>
__device__ __forceinline__ void add_tile(Sums& sums, const Sums& wrong, const ELEMENT* x,
                                         const ELEMENT* dy, const Sizes& s, int tile, int channel,
                                         int first_depth) {
  const long long bytes = sizeof(ELEMENT) * static_cast<long long>(s.channels);  // per pixel
  const unsigned pixel_bytes = sizeof(ELEMENT) * s.channels * s.dilation_w;  // to the tile's next
  const long long x_line_bytes = s.dilation_h * (s.in_w * bytes),
                  y_line_bytes = s.dilation_h * (s.out_w * bytes);
  const long long x_depth_bytes = s.dilation_d * (s.in_h * (s.in_w * bytes));
  const int down = tile / s.tiles_across % s.tiles_down;
  const int plane = tile / s.tiles_across / s.tiles_down;  // a plane of dy
  const int image = plane / s.out_d;
  const int x_depth = plane % s.out_d * s.stride_d - s.pad_d + first_depth * s.dilation_d;
  const int y_column = column_of(s, tile);
  const int x_column = y_column * STRIDE_W - s.pad_w;
  int y_row = down % s.dilation_h + down / s.dilation_h * s.rows * s.dilation_h;
  int x_row = y_row * STRIDE_H - s.pad_h;
  const unsigned y_columns = columns_inside<COLUMNS, 1, 1>(y_column, s.dilation_w, s.out_w);
  unsigned x_columns[DEPTHS];
#pragma unroll
  for (int kd = 0; kd < DEPTHS; ++kd) {
    const int depth = x_depth + kd * s.dilation_d;
    x_columns[kd] = columns_inside<kWindow, STRIDE_W, KERNEL_W>(x_column, s.dilation_w, s.in_w);
    if (depth < 0 || depth >= s.in_d) x_columns[kd] = 0;
  }
  const char* x_line =
      reinterpret_cast<const char*>(x + channel) +
      (((static_cast<long long>(image) * s.in_d + x_depth) * s.in_h + x_row) * s.in_w + x_column) *
          bytes;
  const char* y_line =
      reinterpret_cast<const char*>(dy + channel) +
      ((static_cast<long long>(plane) * s.out_h + y_row) * s.out_w + y_column) * bytes;
  const int row_count = min(s.rows, (s.out_h - 1 - y_row + s.dilation_h) / s.dilation_h);

  // Loads the next row of x in each depth, in turns, or of dy, and goes on to the following one.
  Pixel x_next[kPhases][DEPTHS][kWindow], y_next[COLUMNS];
  const auto load_x = [&](int phase, int kd) {
    const unsigned mask = x_row >= 0 && x_row < s.in_h ? x_columns[kd] : 0;
    const char* pixel = x_line + kd * x_depth_bytes;
#pragma unroll
    for (int j = 0; j < kWindow; ++j, pixel = kept(pixel + pixel_bytes)) {
      x_next[phase][kd][j] = load_pixel(pixel, mask >> j & 1);
    }
    if (kd + 1 < DEPTHS) return;
    const int on = phase + 1 < kPhases ? 1 : STRIDE_H - kPhases + 1;
    x_row += on * s.dilation_h;
    x_line = kept(x_line + on * x_line_bytes);
  };
  const auto load_y = [&](int index) {
    const unsigned mask = index < row_count ? y_columns : 0;
    const char* pixel = y_line;
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j, pixel = kept(pixel + pixel_bytes)) {
      y_next[j] = load_pixel(pixel, mask >> j & 1);
    }
    y_line = kept(y_line + y_line_bytes);
  };
  load_y(0);
#pragma unroll
  for (int phase = 0; phase < kPhases; ++phase) {
#pragma unroll
    for (int kd = 0; kd < DEPTHS; ++kd) load_x(phase, kd);
  }

  float y_rows[kSlots][COLUMNS][CHANNELS] = {};  // row i - m is in slot m
#pragma unroll 1
  for (int i = 0; i < row_count + kSlots - 1; ++i) {
#pragma unroll
    for (int m = kSlots - 1; m >= 0; --m) {
#pragma unroll
      for (int t = 0; t < COLUMNS; ++t) {
        if (m == 0) {
          to_floats(y_next[t], y_rows[m][t]);
        } else {
#pragma unroll
          for (int v = 0; v < CHANNELS; ++v) {
            y_rows[m][t][v] = y_rows[m > 0 ? m - 1 : 0][t][v];
          }
        }
      }
    }
    load_y(i + 1);
#pragma unroll
    for (int phase = 0; phase < kPhases; ++phase) {
#pragma unroll
      for (int kd = 0; kd < DEPTHS; ++kd) {
        float window[kWindow][CHANNELS];
#pragma unroll
        for (int j = 0; j < kWindow; ++j) to_floats(x_next[phase][kd][j], window[j]);
        load_x(phase, kd);
        add_products<exact>(sums.of[kd], window, y_rows, phase, i, row_count, y_columns);
      }
    }
    if constexpr (exact) {
      const float* const now = &sums.of[0][0][0][0];
      const float* const then = &wrong.of[0][0][0][0];
      bool is_known = true;
#pragma unroll
      for (int k = 0; k < kSums; ++k) is_known &= now[k] != now[k] || then[k] == then[k];
      if (is_known) break;
    }
  }
}

// Corrects sums that a tile has made NaN, from those before it.
__device__ __noinline__ void correct(Sums& sums, const Sums& before, const ELEMENT* x,
                                     const ELEMENT* dy, Sizes s, int tile, int channel,
                                     int first_depth) {
  Sums exact = before;
  add_tile<true>(exact, sums, x, dy, s, tile, channel, first_depth);
  float* const to = &sums.of[0][0][0][0];
  const float* const from = &exact.of[0][0][0][0];
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    if (to[i] != to[i]) to[i] = from[i];
  }
}

// partial is (splits, channels, taps). The grid is (splits, groups of channels, groups of depths of
// taps), the block (channels / CHANNELS, tiles at a time). A tile has `rows` rows of dy.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    depthwise_wgrad(const ELEMENT* __restrict__ x, const ELEMENT* __restrict__ dy,
                    float* __restrict__ partial, int channels, int in_d, int in_h, int in_w,
                    int out_d, int out_h, int out_w, int stride_d, int pad_d, int pad_h, int pad_w,
                    int dilation_d, int dilation_h, int dilation_w, int tiles_down,
                    int tiles_across, int tiles, int rows) {
  const int lane = threadIdx.x, lanes = blockDim.x, thread = threadIdx.y * lanes + lane;
  const int threads = lanes * blockDim.y;
  const int first_channel = blockIdx.y * lanes * CHANNELS,
            channel = first_channel + lane * CHANNELS;
  const Sizes s{channels,   in_d,       in_h,       in_w,         out_d, out_h,
                out_w,      stride_d,   pad_d,      pad_h,        pad_w, dilation_d,
                dilation_h, dilation_w, tiles_down, tiles_across, rows};

  Sums sums = {};
  const int first_depth = blockIdx.z * DEPTHS;  // the first depth of the taps
  const int begin = channel < channels ? blockIdx.x * blockDim.y + threadIdx.y : tiles;
#pragma unroll 1
  for (long long next = begin; next < tiles; next += gridDim.x * blockDim.y) {
    const int tile = static_cast<int>(next);
    const bool is_cut = column_of(s, tile) + (COLUMNS - 1) * dilation_w >= out_w;
    Sums before;
    if (COLUMNS > 1 && is_cut) before = sums;
    add_tile<false>(sums, sums, x, dy, s, tile, channel, first_depth);
    if (COLUMNS > 1 && is_cut && has_nan(sums)) {
      Sums again = sums;
      correct(again, before, x, dy, s, tile, channel, first_depth);
      sums = again;
    }
  }

  // Adds the sums of the block's tiles, a row of taps at a time.
  DYNAMIC_SHARED(shared);
  float* const row_sums = reinterpret_cast<float*>(shared);        // (columns, channels, threads)
  float* const totals = row_sums + KERNEL_W * CHANNELS * threads;  // (channels, taps)
#pragma unroll
  for (int line = 0; line < DEPTHS * KERNEL_H; ++line) {
    __syncthreads();
#pragma unroll
    for (int kw = 0; kw < KERNEL_W; ++kw) {
#pragma unroll
      for (int v = 0; v < CHANNELS; ++v) {
        row_sums[(kw * CHANNELS + v) * threads + thread] =
            sums.of[line / KERNEL_H][line % KERNEL_H][kw][v];
      }
    }
    __syncthreads();
    for (int i = thread; i < KERNEL_W * CHANNELS * lanes; i += threads) {
      const int of_lane = i % lanes, which = i / lanes;
      float sum = 0.0f;
      for (int y = 0; y < blockDim.y; ++y) sum += row_sums[which * threads + y * lanes + of_lane];
      const int at = of_lane * CHANNELS + which % CHANNELS;
      totals[at * kTaps + line * KERNEL_W + which / CHANNELS] = sum;
    }
  }
  __syncthreads();
  const int all_taps = gridDim.z * kTaps;
  float* const to = partial +
                    (static_cast<long long>(blockIdx.x) * channels + first_channel) * all_taps +
                    blockIdx.z * kTaps;
  const int count = min(lanes * CHANNELS, channels - first_channel) * kTaps;
  for (int i = thread; i < count; i += threads) to[i / kTaps * all_taps + i % kTaps] = totals[i];
}
