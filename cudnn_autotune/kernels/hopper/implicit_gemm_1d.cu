// A 1-d convolution of stride 1 on the tensor cores of compute capability 9.0, channels_last: the
// forward (DGRAD 0), or the gradient of the input (DGRAD 1) with any stride. "in" is what is read
// (x, or dy), "out" what is written (y, or dx).
//
// A block computes M_TILES * WARPGROUPS * 64 positions of the output, of one image, for N_TILE
// channels of one group. Its input, with all that the taps reach, is copied to shared memory once,
// in planes of 8 channels, where a position is a row of 16 bytes. With tap(i) the position that tap
// i begins at, the output is
//   out[p][o] = sum over i and c of in[p + tap(i)][c] * filter[i][c][o]
// so each tap is a matrix product of the same rows, begun at another one. Filters pass through a
// ring of stages, some taps at a time.
//
// A product sums over 16 channels, two planes. If a group has an odd number of planes, the last one
// of two neighbouring taps goes into one product, and what is left of an odd number of taps is
// multiplied by a plane of zeros.
//
// A gradient with a stride: outputs of one residue modulo the stride (a phase) see every stride'th
// tap, with a stride of 1. Each block computes one phase.
//
// Layers of as many channels share a kernel: what depends on the filters' length comes with the
// launch.
//
// What bounds it. A product of 64 x 16 by 16 x N takes N / 2 clocks, and 16 + N / 4 for its
// operands to come from shared memory.

constexpr int kThreads = 128 * WARPGROUPS;
constexpr int kTile = 64 * M_TILES * WARPGROUPS;
constexpr int kInWidth = 8 * PLANES;  // channels of a group
constexpr int kOutPlanes = N_TILE / 8;
// The filters of a stage are matrices, one for each tap, whose columns are channels of the output,
// and whose sum is over those of the input. In fprop a row has 8 channels of the input, in dgrad 8
// of the output. Planes take an odd number of rows, so that they begin in different banks.
constexpr int kInner = DGRAD ? kOutPlanes : PLANES;
constexpr int kFilterPitch = (DGRAD ? kInWidth : N_TILE) + 1;
constexpr int kTapRows = kInner * kFilterPitch;
constexpr int kAlongSum = DGRAD ? 8 : kFilterPitch, kAcross = DGRAD ? kFilterPitch : 8;
constexpr int kScratchPitch = 2 * N_TILE + 16;
constexpr int kBuffers = KEEPS_FILTERS ? 2 : 1;

struct Sizes {
  int in_length, in_channels, out_length, out_channels;
  int kernel, padding, dilation, stride;
  int filter_channels;
};

// The taps that the outputs of a phase see. Tap i reads position unit + first + i * step, and is
// tap `first_filter + i * filter_step` of the filter.
struct Taps {
  int count, first, step, first_filter, filter_step;

  __device__ __forceinline__ static Taps of(const Sizes& s, int phase) {
    if (!DGRAD) return {s.kernel, -s.padding, s.dilation, 0, 1};
    const int from = phase + s.padding;
    int residue = from % s.stride;
    if (residue < 0) residue += s.stride;
    const int count = residue < s.kernel ? (s.kernel - residue + s.stride - 1) / s.stride : 0;
    return {count, (from - residue) / s.stride - (count - 1) * s.dilation, s.dilation,
            residue + (count - 1) * s.stride, -s.stride};
  }
};

// Copies taps of the filters of a block's channels to a stage; zeros behind the last one. Each
// thread copies some rows of the taps that follow each other in a filter, of every some filters.
struct FilterCopy {
  int row, abreast, together, first, place;

  __device__ __forceinline__ explicit FilterCopy(int stage_taps)
      : row(stage_taps * kInner),
        abreast(min(row, kThreads)),
        together(kThreads / abreast),
        first(threadIdx.x / abreast),
        place(threadIdx.x % abreast) {}

  __device__ __forceinline__ void copy(unsigned char* stage, const ELEMENT* w, const Sizes& s,
                                       const Taps& taps, int begin) const {
    if (first >= together) return;
    const long long filter = static_cast<long long>(s.kernel) * s.filter_channels;
    for (int here = place; here < row; here += abreast) {
      const int tap = begin + here / kInner;
      const bool exists = tap < taps.count;
      const int filter_tap = exists ? taps.first_filter + tap * taps.filter_step : 0;
      const ELEMENT* from =
          w + first * filter + filter_tap * s.filter_channels + 8 * (here % kInner);
      unsigned char* to = stage + (here * kFilterPitch + first) * 16;
#pragma unroll 4
      for (int outer = first; outer < kFilterPitch - 1; outer += together) {
        copy_async_cached(to, from, exists);
        from += together * filter;
        to += 16 * together;
      }
    }
  }
};

// Adds the bias and the residual to the sums of 16 positions, which a warp holds, and stores them.
__device__ __forceinline__ void store(const float (&sums)[N_TILE / 2], unsigned char* scratch,
                                      ELEMENT* out, const ELEMENT* bias, const ELEMENT* residual,
                                      const ELEMENT* slope, const Sizes& s, int first, int step) {
  const int lane = threadIdx.x % 32;
  const auto place_of = [&](int r) {
    return static_cast<long long>(first + r * step) * s.out_channels;
  };
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = lane / 4 + 8 * h;
    const bool adds = residual != nullptr && first + r * step < s.out_length;
    finish_row<ACTIVATION, kOutPlanes>(sums, h, bias, adds ? residual + place_of(r) : nullptr,
                                       slope, scratch + r * kScratchPitch);
  }
  __syncwarp();
  for (int i = lane; i < 16 * kOutPlanes; i += 32) {
    const int r = i / kOutPlanes, plane = i % kOutPlanes;
    if (first + r * step < s.out_length) {
      *reinterpret_cast<uint4*>(out + place_of(r) + 8 * plane) =
          *reinterpret_cast<const uint4*>(scratch + r * kScratchPitch + 16 * plane);
    }
  }
  __syncwarp();
}

// The matrices of the filters of `count` taps times those of the input of a warpgroup, whose first
// row is at `rows`. If a group has an odd number of planes, the stage has a tap of zeros behind an
// odd number of taps.
__device__ __forceinline__ void multiply(float (&sums)[M_TILES][N_TILE / 2], unsigned rows,
                                         int pitch, unsigned filters, unsigned zeros,
                                         const Taps& taps, int first_tap, int count) {
  rows += 16 * first_tap * taps.step;
  int done = 0;
  // There is a tap, and each begins by itself: else ptxas may wait behind every product.
#pragma unroll 1
  do {
    begin_products();
    const Matrix left = Matrix::at(rows + 16 * done * taps.step, pitch, 8);
    const Matrix right = Matrix::at(filters + 16 * done * kTapRows, kAlongSum, kAcross);
#pragma unroll
    for (int pair = 0; pair < PLANES / 2; ++pair) {
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
        MULTIPLY<ELEMENT, 0, DGRAD>(sums[m], left + (2 * pair * pitch + 64 * m),
                                    right + 2 * pair * kAlongSum);
      }
    }
  } while (++done < count);
  if (PLANES % 2 == 1) {
#pragma unroll 1
    for (int tap = 0; tap < count; tap += 2) {
      begin_products();
      const unsigned from = rows + 16 * (tap * taps.step + (PLANES - 1) * pitch);
      const Matrix right =
          Matrix::at(filters + 16 * (tap * kTapRows + (PLANES - 1) * kAlongSum), kTapRows, kAcross);
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
        const unsigned a = from + 16 * 64 * m;
        const int to_next = tap + 1 < count ? taps.step : (zeros - a) / 16;
        MULTIPLY<ELEMENT, 0, DGRAD>(sums[m], Matrix::at(a, to_next, 8), right);
      }
    }
  }
  commit_products();
}

// gridDim.y is groups times slices of N_TILE channels, gridDim.z the phases. `tiles` are those of
// an image, all_tiles those of all images; without KEEPS_FILTERS, gridDim.x is as many. `pitch` is
// the odd number of rows that a plane of the input takes, stage_taps the taps of a stage, of which
// held_stages are in shared memory at a time.
extern "C" __global__ void __launch_bounds__(kThreads, REGISTER_BLOCKS)
    implicit_gemm_1d(const ELEMENT* in, const ELEMENT* w, ELEMENT* out, const ELEMENT* bias,
                     const ELEMENT* residual, const ELEMENT* slope, int in_length, int in_channels,
                     int out_length, int out_channels, int kernel, int padding, int dilation,
                     int stride, int tiles, int all_tiles, int pitch, int buffer_bytes,
                     int stage_taps, int held_stages) {
  DYNAMIC_SHARED(shared);
  const int out_width = out_channels / (in_channels / kInWidth), slices = out_width / N_TILE;
  const int group = blockIdx.y / slices, slice = blockIdx.y % slices;
  const int phase = blockIdx.z, first_channel = group * out_width + slice * N_TILE;
  const Sizes s{in_length,    in_channels, out_length,
                out_channels, kernel,      padding,
                dilation,     stride,      DGRAD ? out_width : kInWidth};
  const Taps taps = Taps::of(s, phase);
  in += group * kInWidth;
  w += DGRAD ? static_cast<long long>(group) * kInWidth * kernel * out_width + slice * N_TILE
             : static_cast<long long>(first_channel) * kernel * kInWidth;
  out += first_channel;
  if (bias != nullptr) bias += first_channel;
  if (residual != nullptr) residual += first_channel;
  if (slope != nullptr) slope += first_channel;

  const int stages = (taps.count + stage_taps - 1) / stage_taps;
  const int stage_bytes = 16 * stage_taps * kTapRows;
  unsigned char* const filters = shared + kBuffers * buffer_bytes;
  unsigned char* const zeros = filters + held_stages * stage_bytes;
  if (threadIdx.x < 64) reinterpret_cast<uint4*>(zeros)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  const FilterCopy filter_copy(stage_taps);
  const auto copy_stage = [&](int i) {
    if (i < stages) {
      filter_copy.copy(filters + i % STAGES * stage_bytes, w, s, taps, i * stage_taps);
    }
    commit_copies();
  };
  const auto copy_tile = [&](int tile, int buffer) {
    copy_planes<PLANES, kThreads>(
        shared + buffer * buffer_bytes, pitch,
        in + static_cast<long long>(tile / tiles) * in_length * in_channels, in_channels, in_length,
        tile % tiles * kTile + taps.first, kTile + (taps.count - 1) * taps.step);
  };
  // The same in all lanes, as the compiler sees by this.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int first_row = warpgroup * (64 * M_TILES);

  int buffer = 0;
  copy_tile(blockIdx.x, buffer);
  for (int tile = blockIdx.x; tile < all_tiles; tile += gridDim.x) {
    float sums[M_TILES][N_TILE / 2];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
      for (int i = 0; i < N_TILE / 2; ++i) sums[m][i] = 0.0f;
    }
    unsigned char* const here = shared + buffer * buffer_bytes;
    const unsigned rows = shared_address(here) + 16 * first_row;
    const unsigned ring = shared_address(filters), zero_rows = shared_address(zeros);
    if (KEEPS_FILTERS) {
      if (tile == blockIdx.x) copy_stage(0);
      copies_arrived<0>();
      publish_writes();
      // All have this tile, and have stored the one before.
      __syncthreads();
      if (stages > 0) multiply(sums, rows, pitch, ring, zero_rows, taps, 0, taps.count);
      buffer ^= 1;
      if (tile + gridDim.x < all_tiles) copy_tile(tile + gridDim.x, buffer);
      commit_copies();
    } else {
#pragma unroll
      for (int i = 0; i < STAGES - 2; ++i) copy_stage(i);
      for (int i = 0; i < stages; ++i) {
        copies_arrived<STAGES - 3>();
        publish_writes();
        // All have the stage i, and are done with i - 2.
        __syncthreads();
        copy_stage(i + STAGES - 2);
        multiply(sums, rows, pitch, ring + i % STAGES * stage_bytes, zero_rows, taps,
                 i * stage_taps, min(stage_taps, taps.count - i * stage_taps));
        products_done<1>();
      }
      copies_arrived<0>();
    }
    products_done<0>();
    __syncthreads();

    unsigned char* const scratch = here + threadIdx.x / 32 * (16 * kScratchPitch);
    const long long first = static_cast<long long>(tile / tiles) * out_length * out_channels;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      const int unit = tile % tiles * kTile + first_row + 64 * m + threadIdx.x % 128 / 32 * 16;
      store(sums[m], scratch, out + first, bias, residual == nullptr ? residual : residual + first,
            slope, s, unit * stride + phase, stride);
    }
  }
}
