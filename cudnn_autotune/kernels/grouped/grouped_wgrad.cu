// The gradient of a grouped 2-d convolution's weights on tensor cores, channels_last: of 16-bit
// types, and of float32 in TF32.
//
// A block goes over tiles of output pixels (of one image, or of several small ones) for
// BLOCK_GROUPS groups, copies a tile of dy and what of x it meets into shared memory, and adds to
// sums that stay in registers. With p a pixel, o an output channel, i a filter tap and 8 input
// channels (a chunk),
//   dw[i][o] = sum over p of x[p + tap(i)][channels(i)] * dy[p][o]
// Both factors lie with the channels of a pixel together and the pixels are what is summed, so both
// are loaded transposed. The 16 pixels of an mma are 8 neighbours each of two segments, and its 16
// rows two chunks of any column taps. A warp computes PAIRS of those for all row taps and
// N_TILES x 8 output channels of a group: going down ROWS rows of the segments, it loads each row
// of x and of dy once, for 3 mma of a 3x3 filter. For the banks see grouped.cu.
//
// In TF32 an mma takes 8 pixels of one segment. ldmatrix cannot transpose numbers of 32 bits, so
// lanes load each by itself: 8 channels of 4 neighbouring pixels, which lie in different banks.
//
// Of a pixel outside of the output dy is zero, but its x may be real, and infinite: if it is beside
// the output, x is read from zeros instead, and if it is below, its products are left out. Groups
// whose width is no multiple of 8 are computed MERGE at a time; the products between them are left
// out of what is written.
//
// Blocks of the same groups write their sums to the workspace; sum_parts.cu adds them in their
// order.
//
// What bounds it: DRAM, if enough warps go over long rows of segments; of 3x3 filters of 24
// channels, 16 pixels take 1.5 KB of DRAM, 45 mma (90 clocks), and with PAIRS 1 some 50 matrices of
// 128 bytes from shared memory (50 clocks).

using Mine = Operands<ELEMENT>;
constexpr int kSegmentGroups = (kSegments + Mine::kSegmentsTogether - 1) / Mine::kSegmentsTogether;
constexpr int kSteps = kSegmentGroups * (TILE_Y / ROWS);
static_assert(SHARED_BYTES == kZeroBytes + STAGES * kStageBytes, "zeros and tiles");
constexpr int kInRows = (ROWS - 1) * STRIDE_Y + KERNEL_Y;

// Block (s, b, z) adds up the s-th BLOCK_GROUPS groups of tiles b, b + gridDim.y, ... of images x
// tiles_y x tiles_x, into sums[b] of the filters' shape. If one block's registers do not hold a
// group's sums, those of different z compute different chunks.
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    grouped_wgrad(const ELEMENT* x, const ELEMENT* dy, float* sums, int images, int in_y, int in_x,
                  int in_channels, int out_y, int out_x, int out_channels, int tiles, int tiles_y,
                  int tiles_x) {
  DYNAMIC_SHARED(shared);
  const Extents from{images, in_y, in_x, in_channels}, to{images, out_y, out_x, out_channels};
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = warp / (kMParts * kNParts);
  const int m_part = blockIdx.z * kMParts + warp / kNParts % kMParts, n_part = warp % kNParts;
  const Part part{group, m_part * PAIRS, (group * kNParts + n_part) * N_TILES};
  Mine mine(part);

  float found[KERNEL_Y][PAIRS][N_TILES][4] = {};
  const auto add_step = [&](int step, int stage_offset, const Place& place) {
    const int first_y = step / kSegmentGroups * ROWS;
    const int y_left = out_y - place.y - first_y;
    mine.go_to(step % kSegmentGroups * Mine::kSegmentsTogether, first_y, stage_offset,
               out_x - place.x);

    unsigned b[ROWS][N_TILES][2];
#pragma unroll
    for (int row = 0; row < kInRows; ++row) {
      if (row % STRIDE_Y == 0 && row / STRIDE_Y < ROWS) {
        mine.load_gradient(b[row / STRIDE_Y], shared, row / STRIDE_Y);
      }
      if (row % STRIDE_Y >= KERNEL_Y) continue;  // no output reads it
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        unsigned a[4];
        mine.load_input(a, shared, pair, row);
#pragma unroll
        for (int tap = 0; tap < KERNEL_Y; ++tap) {
          const int y = (row - tap) / STRIDE_Y;
          if (row < tap || (row - tap) % STRIDE_Y != 0 || y >= ROWS) continue;
          if (!ROWS_FIT && y >= y_left) continue;
#pragma unroll
          for (int n = 0; n < N_TILES; ++n) Mine::multiply(found[tap][pair][n], a, b[y][n]);
        }
      }
    }
  };

  const auto stage_tile = [&](const Place& place, int stage) {
    unsigned char* const stages = shared + kZeroBytes + stage * kStageBytes;
    Input::stage(stages, x + blockIdx.x * (BLOCK_GROUPS * kInWidth), from, place);
    Gradient::stage(stages + Input::kBytes, dy + blockIdx.x * (BLOCK_GROUPS * kOutWidth), to,
                    place);
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
  sums += ((blockIdx.x * BLOCK_GROUPS + group) * kOutWidth + first_o) * (kTaps * GROUP_IN);
#pragma unroll
  for (int i = 0; i < 2 * PAIRS; ++i) {
    const int chunk = part.chunk(i / 2, i % 2), channel = chunk % kInChunks * 8 + lane / 4;
    if (chunk >= kChunks) continue;
    float* const to = sums + (chunk / kInChunks * GROUP_IN + channel % GROUP_IN);
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
      if (MERGE > 1 && (first_o + n * 8) / GROUP_OUT != channel / GROUP_IN) continue;
#pragma unroll
      for (int tap = 0; tap < KERNEL_Y; ++tap) {
#pragma unroll
        for (int o = 0; o < 2; ++o) {
          to[((n * 8 + o) * kTaps + tap * KERNEL_X) * GROUP_IN] =
              found[tap][i / 2][n][i % 2 * 2 + o];
        }
      }
    }
  }
}
