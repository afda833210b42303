// The gradient of a grouped 2-d convolution's weights on tensor cores, channels_last, 16-bit types.
//
// A block goes over tiles of output pixels (of one image, or of several small ones) for a slab of
// groups, copies a tile of dy and what of x it meets into shared memory, and adds to sums that stay
// in registers. With p a pixel, o an output channel, i a filter tap and 8 input channels (a chunk),
//   dw[i][o] = sum over p of x[p + tap(i)][channels(i)] * dy[p][o]
// Both factors lie with the channels of a pixel together and the pixels are what is summed, so both
// are loaded transposed. The 16 pixels of an mma are 8 neighbours each of two strips, and its 16
// rows two chunks of any column taps. A warp computes PAIRS of those for all row taps and
// N_TILES x 8 output channels of a group: going down ROWS rows of the strips, it loads each row of
// x and of dy once, for 3 mma of a 3x3 filter. For the banks see grouped.cu.
//
// Of a pixel outside of the output dy is zero, but its x may be real, and infinite: if it is beside
// the output, x is read from zeros instead, and if it is below, its products are left out. Groups
// whose width is no multiple of 8 are computed MERGE at a time; the products between them are left
// out of what is written.
//
// Blocks of one slab write their sums to the workspace; sum_parts.cu adds them in their order.
//
// What bounds it: DRAM, if enough warps go over long rows of strips; of 3x3 filters of 24 channels,
// 16 pixels take 1.5 KB of DRAM, 45 mma (90 clocks), and with PAIRS 1 some 50 matrices of 128 bytes
// from shared memory (50 clocks).

using Y = Axis<false, KERNEL_Y, STRIDE_Y, PAD_Y, TILE_Y>;
using X = Axis<false, KERNEL_X, STRIDE_X, PAD_X, TILE_X>;
using Input = Tile<Y, X, TILE_IMAGES, SLAB * kInChunks>;
using Gradient = Tile<Axis<false, 1, 1, 0, TILE_Y>, Axis<false, 1, 1, 0, TILE_X>, TILE_IMAGES,
                      SLAB * kOutWidth / 8>;

constexpr int kTaps = KERNEL_Y * KERNEL_X;
constexpr int kChunks = KERNEL_X * kInChunks;  // of one row tap
constexpr int kNParts = kOutWidth / (8 * N_TILES);
constexpr int kMParts = WARPS / (SLAB * kNParts);  // of a block

constexpr int kStripsAcross = TILE_X / 8;
constexpr int kStrips = TILE_IMAGES * kStripsAcross;  // that begin in one row
constexpr int kStripPairs = (kStrips + 1) / 2;
constexpr int kSteps = kStripPairs * (TILE_Y / ROWS);
constexpr int kInRows = (ROWS - 1) * STRIDE_Y + KERNEL_Y;
static_assert(TILE_X % 8 == 0 && TILE_Y % ROWS == 0, "strips fill a tile");
constexpr int kZeroBytes = 256;  // at the beginning of shared memory
constexpr int kStageBytes = Input::kBytes + Gradient::kBytes;

// Where a lane reads its rows of matrices: `place` bytes from the beginning of shared memory, and
// further down by `step`. What does not exist is zeros, in the same bank.
struct Rows {
  int place, step;
};
__device__ __forceinline__ Rows rows_at(int place, int step, bool exists) {
  return exists ? Rows{place, step} : Rows{place & (128 - 16), 0};
}

struct Strip {
  int image, x;
};
__device__ __forceinline__ Strip strip_of(int strip) {
  return Strip{strip / kStripsAcross, strip % kStripsAcross * 8};
}

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

  // The rows of x that this lane loads: of each pair of chunks that of lane / 8 % 2, of the strips
  // that of lane / 16. If the chunks end, the last is computed again, but not written.
  const auto chunk_of = [&](int pair, int half) { return (m_part * PAIRS + pair) * 2 + half; };
  int chunk_offsets[PAIRS];
#pragma unroll
  for (int pair = 0; pair < PAIRS; ++pair) {
    const int chunk = min(chunk_of(pair, lane / 8 % 2), kChunks - 1);
    chunk_offsets[pair] =
        Input::offset(0, chunk / kInChunks) + (group * kInChunks + chunk % kInChunks) * 16;
  }
  // Those of dy: of the strips that of lane / 8 % 2, and of each two n tiles that of lane / 16.
  const int n_offset = ((group * kNParts + n_part) * N_TILES + lane / 16) * 16;

  float found[KERNEL_Y][PAIRS][N_TILES][4] = {};
  const auto add_step = [&](int step, int stage_offset, const Place& place) {
    const int first_strip = step % kStripPairs * 2, first_y = step / kStripPairs * ROWS;
    const int y_left = out_y - place.y - first_y;

    const int dy_index = first_strip + lane / 8 % 2;
    const Strip dy_strip = strip_of(dy_index);
    const Rows gradient =
        rows_at(stage_offset + Input::kBytes + n_offset +
                    Gradient::place(dy_strip.image, first_y, dy_strip.x + lane % 8),
                Gradient::offset(1, 0), kStrips % 2 == 0 || dy_index < kStrips);

    const int x_index = first_strip + lane / 16;
    const Strip x_strip = strip_of(x_index);
    const bool exists = COLUMNS_FIT || place.x + x_strip.x + lane % 8 < out_x;
    Rows input[PAIRS];
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      input[pair] =
          rows_at(stage_offset + Input::place(x_strip.image, first_y, x_strip.x + lane % 8) +
                      chunk_offsets[pair],
                  Input::offset(1, 0), exists && (kStrips % 2 == 0 || x_index < kStrips));
    }

    unsigned b[ROWS][N_TILES][2];
#pragma unroll
    for (int row = 0; row < kInRows; ++row) {
      if (row % STRIDE_Y == 0 && row / STRIDE_Y < ROWS) {
        const int y = row / STRIDE_Y;
#pragma unroll
        for (int n = 0; n < N_TILES; n += 2) {
          const unsigned char* const at = shared + gradient.place + y * gradient.step + n * 16;
          if (n + 1 < N_TILES) {
            unsigned two[4];
            load_transposed(two, at);
            b[y][n][0] = two[0], b[y][n][1] = two[1];
            b[y][n + 1][0] = two[2], b[y][n + 1][1] = two[3];
          } else {
            load_transposed(b[y][n], at);
          }
        }
      }
      if (row % STRIDE_Y >= KERNEL_Y) continue;  // no output reads it
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        unsigned a[4];
        load_transposed(a, shared + input[pair].place + row * input[pair].step);
#pragma unroll
        for (int tap = 0; tap < KERNEL_Y; ++tap) {
          const int y = (row - tap) / STRIDE_Y;
          if (row < tap || (row - tap) % STRIDE_Y != 0 || y >= ROWS) continue;
          if (!ROWS_FIT && y >= y_left) continue;
#pragma unroll
          for (int n = 0; n < N_TILES; ++n) {
            mma_16x8x16<ELEMENT>(found[tap][pair][n], a, b[y][n]);
          }
        }
      }
    }
  };

  const auto stage_tile = [&](const Place& place, int stage) {
    unsigned char* const stages = shared + kZeroBytes + stage * kStageBytes;
    Input::stage(stages, x + blockIdx.x * (SLAB * kInWidth), from, place);
    Gradient::stage(stages + Input::kBytes, dy + blockIdx.x * (SLAB * kOutWidth), to, place);
  };
  if (threadIdx.x < kZeroBytes / 16) {
    *reinterpret_cast<uint4*>(shared + threadIdx.x * 16) = make_uint4(0, 0, 0, 0);
  }
  int tile = blockIdx.y, stage = 0;
  Place place = place_of(tile, tiles_y, tiles_x), next = place;
  if (STAGES == 2) stage_tile(place, 0);
  commit_copies();
  for (; tile < tiles; tile += gridDim.y, place = next) {
    if (STAGES == 1) stage_tile(place, 0);
    if (tile + gridDim.y < tiles) {
      next = place_of(tile + gridDim.y, tiles_y, tiles_x);
      if (STAGES == 2) stage_tile(next, stage ^ 1);
    }
    commit_copies();
    copies_arrived<STAGES - 1>();
    __syncthreads();
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      add_step(step, kZeroBytes + stage * kStageBytes, place);
    }
    __syncthreads();
    if (STAGES == 2) stage ^= 1;
  }

  // This lane holds channel lane / 4 of both chunks, output channels 2 (lane % 4) and the next.
  const int first_o = n_part * N_TILES * 8 + lane % 4 * 2;
  sums += static_cast<long long>(blockIdx.y) * out_channels * (kTaps * GROUP_IN);
  sums += ((blockIdx.x * SLAB + group) * kOutWidth + first_o) * (kTaps * GROUP_IN);
#pragma unroll
  for (int i = 0; i < 2 * PAIRS; ++i) {
    const int chunk = chunk_of(i / 2, i % 2), channel = chunk % kInChunks * 8 + lane / 4;
    if (chunk >= kChunks) continue;
    float* const mine = sums + (chunk / kInChunks * GROUP_IN + channel % GROUP_IN);
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
      if (MERGE > 1 && (first_o + n * 8) / GROUP_OUT != channel / GROUP_IN) continue;
#pragma unroll
      for (int tap = 0; tap < KERNEL_Y; ++tap) {
#pragma unroll
        for (int o = 0; o < 2; ++o) {
          mine[((n * 8 + o) * kTaps + tap * KERNEL_X) * GROUP_IN] =
              found[tap][i / 2][n][i % 2 * 2 + o];
        }
      }
    }
  }
}
