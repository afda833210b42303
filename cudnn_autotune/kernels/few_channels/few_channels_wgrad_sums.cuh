// The place of few_channels_wgrad's sums in a block, and their stores. A warp computes
// M_TILES * 16 channels times N_TILES * 8 window elements; WARPS_N warps have all elements, and
// WARPS_K groups of them take turns with the pixels. Elements behind the last one are computed with
// the first one's numbers, and dropped.

constexpr int THREADS = 32 * WARPS_N * WARPS_K;
constexpr int COLUMNS = PLANES * KERNEL_H * ROW;  // window elements
constexpr int BLOCK_CHANNELS = 16 * M_TILES;
constexpr int BLOCK_COLUMNS = WARPS_N * N_TILES * 8;

static_assert(TILE_Q % 8 == 0 && PITCH % 8 == 0 && BLOCK_COLUMNS >= COLUMNS, "");
static_assert(PITCH >= LEFT + PIXEL_STEP * (TILE_Q - 1) + ROW, "a row of the tile fits");
static_assert(SHARED_BYTES >= BLOCK_CHANNELS * BLOCK_COLUMNS * 4, "sums");

// The sums of a thread: it is lane (g, t) of the warp that has part warp_n of the elements, and
// turn warp_k of the pixels.
struct Share {
  int g, t, warp_n, warp_k;
};

__device__ __forceinline__ Share share_of_this_thread() {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  return {lane / 4, lane % 4, warp % WARPS_N, warp / WARPS_N};
}

// The pixels of a lane: this one of an eight, and APART behind it.
constexpr int APART = IS_PLANAR && sizeof(ELEMENT) == 2 ? 1 : 4;
__device__ __forceinline__ int pixel_of(const Share& share) {
  return APART == 1 ? 2 * share.t : share.t;
}

// The begin of element j of a warp's eight in the rows of an image, for a lane's first pixel.
__device__ __forceinline__ int place_of(int j, const Share& share) {
  const int n = (share.warp_n * N_TILES + j) * 8 + share.g;
  return LEFT + PIXEL_STEP * pixel_of(share) + (n < COLUMNS ? n / ROW * PITCH + n % ROW : 0);
}

// Adds the sums of the groups of warps, one after the other, and writes the block's to its part of
// the workspace. Row r of an mma's result, and row r + 8, are channels LOWER * r and LOWER * r +
// UPPER of a sixteen.
template <int LOWER, int UPPER>
__device__ __forceinline__ void write_sums(float* total, float* __restrict__ parts,
                                           const float (&sums)[M_TILES][N_TILES][4],
                                           const Share& share, int channels, int first_channel) {
  for (int k = 0; k < WARPS_K; ++k) {
    __syncthreads();
    if (share.warp_k != k) continue;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
      for (int j = 0; j < N_TILES; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int channel = 16 * m + LOWER * share.g + UPPER * (r / 2);
          const int column = (share.warp_n * N_TILES + j) * 8 + 2 * share.t + r % 2;
          float& sum = total[channel * BLOCK_COLUMNS + column];
          sum = k == 0 ? sums[m][j][r] : sum + sums[m][j][r];
        }
      }
    }
  }
  __syncthreads();
  parts += (static_cast<long long>(blockIdx.x) * channels + first_channel) * COLUMNS;
  const int count = min(BLOCK_CHANNELS, channels - first_channel) * COLUMNS;
  for (int i = threadIdx.x; i < count; i += THREADS) {
    parts[i] = total[i / COLUMNS * BLOCK_COLUMNS + i % COLUMNS];
  }
}
