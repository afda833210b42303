// The gradient of a grouped 2-d convolution's weights on tensor cores, channels_last, 16-bit types.
//
// A block goes over tiles of output pixels (of one image, or of several small ones) for a slab of
// groups, copies a tile of dy and what of x it meets into shared memory, and adds to sums that stay
// in registers. With p a pixel, o an output channel, i a pair of a filter tap and 8 input channels
// (a chunk), a warp computes M_TILES pairs of chunks by N_TILES x 8 output channels of a group:
//   dw[i][o] = sum over p of x[p + tap(i)][channels(i)] * dy[p][o]
// Both factors lie with the channels of a pixel together and the pixels are what is summed, so both
// are loaded transposed. Any two chunks make a matrix of 16 rows: 3x3 filters of 24 channels (27
// chunks) take 14 mma for 16 pixels and 8 output channels. For the banks see grouped.cu.
//
// Of a pixel outside of the output dy is zero, but its x may be real, and infinite: its rows of x
// are read from zeros instead. Groups whose width is no multiple of 8 are computed MERGE at a time;
// the products between them are left out of what is written.
//
// Blocks of one slab write their sums to the workspace; grouped_sum.cu adds them in their order.
//
// What bounds it, 16 pixels of a 24-wide group: 1.5 KB of DRAM; 42 mma (84 clocks); 68 matrices of
// 128 bytes from shared memory (68 clocks) where two warps share the chunks. A multiprocessor's
// warps hold some 10 KB of sums each, which are written once and read once, mostly in L2.

using Y = Axis<false, KERNEL_Y, STRIDE_Y, PAD_Y, TILE_Y>;
using X = Axis<false, KERNEL_X, STRIDE_X, PAD_X, TILE_X>;
using Input = Tile<Y, X, TILE_IMAGES, SLAB * kInChunks>;
using Gradient = Tile<Axis<false, 1, 1, 0, TILE_Y>, Axis<false, 1, 1, 0, TILE_X>, TILE_IMAGES,
                      SLAB * kOutWidth / 8>;

constexpr int kTaps = KERNEL_Y * KERNEL_X;
constexpr int kChunks = kTaps * kInChunks;
constexpr int kNParts = kOutWidth / (8 * N_TILES);
constexpr int kMParts = WARPS / (SLAB * kNParts);  // of a block

constexpr int kPixels = TILE_IMAGES * TILE_Y * TILE_X;
constexpr int kSteps = (kPixels + 15) / 16;
constexpr int kZeroBytes = 128;  // at the beginning of shared memory: each bank once
constexpr int kStageBytes = Input::kBytes + Gradient::kBytes;

// What to keep of an offset in shared memory: all of it, or its bank, which is of the zeros then.
__device__ __forceinline__ int kept(bool exists) { return exists ? -1 : kZeroBytes - 16; }

// Block (s, b, z) adds up slab s of tiles b, b + gridDim.y, ... of images x tiles_y x tiles_x, into
// sums[b] of the filters' shape. If one block's registers do not hold a group's sums, those of
// different z compute different chunks.
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    grouped_wgrad(const ELEMENT* x, const ELEMENT* dy, float* sums, int images, int in_y, int in_x,
                  int in_channels, int out_y, int out_x, int out_channels, int tiles, int tiles_y,
                  int tiles_x) {
  DYNAMIC_SHARED(shared);
  const Extents from{images, in_y, in_x, in_channels}, to{images, out_y, out_x, out_channels};
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = warp / (kMParts * kNParts);
  const int m_part = blockIdx.z * kMParts + warp / kNParts % kMParts, n_part = warp % kNParts;

  // The rows of x that this lane loads: pixel `lane % 8 + lane / 16 * 8` of 16, and of each pair of
  // chunks that of lane / 8 % 2. If the chunks end, the last is computed again, but not written.
  const auto chunk_of = [&](int m, int half) { return (m_part * M_TILES + m) * 2 + half; };
  int chunk_offsets[M_TILES];
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) {
    const int chunk = min(chunk_of(m, lane / 8 % 2), kChunks - 1), tap = chunk / kInChunks;
    chunk_offsets[m] = Input::offset(tap / KERNEL_X, tap % KERNEL_X) +
                       (group * kInChunks + chunk % kInChunks) * 16;
  }
  // Those of dy: pixel lane % 16, and of each pair of n tiles that of lane / 16.
  const int n_offset = ((group * kNParts + n_part) * N_TILES + lane / 16) * 16;

  float found[M_TILES][N_TILES][4] = {};
  const auto add_step = [&](int step, int stage_offset, const Place& place) {
    const int dy_pixel = step * 16 + lane % 16;
    const int gradient = (stage_offset + Input::kBytes + dy_pixel * Gradient::kPitch + n_offset) &
                         kept(kPixels % 16 == 0 || dy_pixel < kPixels);
    unsigned b[N_TILES][2];
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
      if (n + 1 < N_TILES) {
        unsigned two[4];
        load_transposed(two, shared + gradient + n * 16);
        b[n][0] = two[0], b[n][1] = two[1], b[n + 1][0] = two[2], b[n + 1][1] = two[3];
      } else {
        load_transposed(b[n], shared + gradient + n * 16);
      }
    }
    const int pixel = step * 16 + lane % 8 + lane / 16 * 8;
    const int column = pixel % TILE_X, row = pixel / TILE_X % TILE_Y;
    const int image = pixel / (TILE_X * TILE_Y);
    const int keep = kept(place.image + image < images && place.y + row < out_y &&
                          place.x + column < out_x && pixel < kPixels);
    const int input = stage_offset + Input::place(image, row, column);
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      unsigned a[4];
      load_transposed(a, shared + ((input + chunk_offsets[m]) & keep));
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) mma_16x8x16<ELEMENT>(found[m][n], a, b[n]);
    }
  };

  const auto stage_tile = [&](int tile, int stage) {
    const Place place = place_of(tile, tiles_y, tiles_x);
    unsigned char* const stages = shared + kZeroBytes + stage * kStageBytes;
    Input::stage(stages, x + blockIdx.x * (SLAB * kInWidth), from, place);
    Gradient::stage(stages + Input::kBytes, dy + blockIdx.x * (SLAB * kOutWidth), to, place);
  };
  if (threadIdx.x < kZeroBytes / 16) {
    *reinterpret_cast<uint4*>(shared + threadIdx.x * 16) = make_uint4(0, 0, 0, 0);
  }
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
    const Place place = place_of(tile, tiles_y, tiles_x);
#pragma unroll 2
    for (int step = 0; step < kSteps; ++step) {
      add_step(step, kZeroBytes + stage * kStageBytes, place);
    }
    __syncthreads();
    if (STAGES == 2) stage ^= 1;
  }

  // This lane holds channel lane / 4 of both chunks, output channels 2 (lane % 4) and the next.
  const long long rows =
      static_cast<long long>(blockIdx.y) * out_channels + (blockIdx.x * SLAB + group) * kOutWidth;
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int chunk = chunk_of(m, r / 2);
        const int o = (n_part * N_TILES + n) * 8 + lane % 4 * 2 + r % 2;
        const int i = chunk % kInChunks * 8 + lane / 4;
        if (chunk < kChunks && o / GROUP_OUT == i / GROUP_IN) {
          sums[((rows + o) * kTaps + chunk / kInChunks) * GROUP_IN + i % GROUP_IN] = found[m][n][r];
        }
      }
    }
  }
}
