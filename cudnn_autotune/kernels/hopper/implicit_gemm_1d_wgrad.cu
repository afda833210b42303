// The weight's gradient of a 1-d convolution of stride 1 on the tensor cores of compute capability
// 9.0, channels_last: for each tap r, and channels c and o of x and dy in a group,
//   dw[o][r][c] = sum over p of x[p + r * dilation - padding][c] * dy[p][o]
//
// A block computes M_TILES * WARPGROUPS matrices of 64 x N_TILE, over some of the positions p:
// tiles of kTile, of one image after the other. A tile of dy, and what the taps reach of x, pass
// through a ring of STAGES stages in shared memory, in planes of 8 channels, where a position is a
// row of 16 bytes. So positions are the sum of a product, and both matrices are transposed ones.
//
// The 64 rows of a matrix are 8 times the 8 channels of a plane: of 8 neighbouring taps, whose rows
// begin `dilation` positions apart, or with BY_PLANES of 8 planes.
//
// Behind the last position of an image dy is zero, but x may be real, and infinite, which would
// make a NaN. So in the last tile of an image, unless it is whole, the left matrices are loaded to
// registers, where x is zero too at such positions. x counts as zero beyond the signal: a dy that
// is not finite makes that NaN, as in cuDNN and PyTorch, which multiply padding by it.
//
// What bounds it. A product of 64 x 16 by 16 x N takes N / 2 clocks, and 16 + N / 4 for its
// operands to come from shared memory.

constexpr int kThreads = 128 * WARPGROUPS;
constexpr int kTile = 64;
constexpr int kOutPlanes = N_TILE / 8, kOutPitch = kTile + 1;
constexpr int kInWidth = 8 * PLANES, kOutWidth = SLICES * N_TILE;  // channels of a group
constexpr int kMatrices = M_TILES * WARPGROUPS;                    // of a block
// Matrices of the same taps.
constexpr int kOfTaps = BY_PLANES ? PLANES / 8 : PLANES;
constexpr int kTapsOfRows = BY_PLANES ? 1 : 8;
constexpr int kInBytes = 16 * PLANES * PITCH;
constexpr int kStageBytes = kInBytes + 16 * kOutPlanes * kOutPitch;
constexpr int kZerosAt = STAGES * kStageBytes;  // a row
static_assert(kZerosAt + 16 <= SHARED_BYTES, "the layout of shared memory");

// gridDim.x is the blocks that divide the matrices of a group, gridDim.y groups * SLICES, gridDim.z
// the runs that the tiles are divided among. `sums` are arrays of float32, one for each run.
// PITCH is the odd number of rows that a plane of x takes.
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    implicit_gemm_1d_wgrad(const ELEMENT* x, const ELEMENT* dy, float* sums, int images,
                           int in_length, int in_channels, int out_length, int out_channels,
                           int kernel, int padding, int dilation) {
  DYNAMIC_SHARED(shared);
  const int group = blockIdx.y / SLICES, slice = blockIdx.y % SLICES;
  const int first_channel = group * kOutWidth + slice * N_TILE;
  x += group * kInWidth;
  dy += first_channel;
  const int matrices = (kernel + kTapsOfRows - 1) / kTapsOfRows * kOfTaps;
  const int first_matrix = blockIdx.x * kMatrices;
  const int first_tap = first_matrix / kOfTaps * kTapsOfRows;
  const int last_matrix = min(first_matrix + kMatrices, matrices) - 1;
  const int last_tap = (last_matrix / kOfTaps + 1) * kTapsOfRows - 1;

  const int tiles = (out_length + kTile - 1) / kTile, all_tiles = images * tiles;
  const int runs = gridDim.z, run = blockIdx.z;
  const int stages = (all_tiles - run + runs - 1) / runs;
  const auto copy_stage = [&](int i) {
    if (i < stages) {
      unsigned char* const stage = shared + i % STAGES * kStageBytes;
      const long long image = (run + i * runs) / tiles;
      const int first = (run + i * runs) % tiles * kTile;
      copy_planes<PLANES, kThreads>(stage, PITCH, x + image * in_length * in_channels, in_channels,
                                    in_length, first + first_tap * dilation - padding,
                                    kTile + (last_tap - first_tap) * dilation);
      copy_planes<kOutPlanes, kThreads>(stage + kInBytes, kOutPitch,
                                        dy + image * out_length * out_channels, out_channels,
                                        out_length, first, kTile);
    }
    commit_copies();
  };
  if (threadIdx.x == 0) *reinterpret_cast<uint4*>(shared + kZerosAt) = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < STAGES - 2; ++i) copy_stage(i);

  // The same in all lanes, as the compiler sees by this.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int mine = first_matrix + warpgroup * M_TILES, lane = threadIdx.x % 32;
  float found[M_TILES][N_TILE / 2];
  unsigned rows[M_TILES];
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
    for (int i = 0; i < N_TILE / 2; ++i) found[m][i] = 0.0f;
    const int matrix = min(mine + m, last_matrix);
    const int tap = matrix / kOfTaps * kTapsOfRows - first_tap;
    const int plane = matrix % kOfTaps * (BY_PLANES ? 8 : 1);
    rows[m] = 16 * (plane * PITCH + tap * dilation);
  }
  for (int i = 0; i < stages; ++i) {
    copies_arrived<STAGES - 3>();
    publish_writes();
    // All have the stage i, and are done with i - 2.
    __syncthreads();
    copy_stage(i + STAGES - 2);
    const unsigned stage = shared_address(shared) + i % STAGES * kStageBytes;
    const auto right_at = [&](int step) {
      return Matrix::at(stage + kInBytes + 16 * 16 * step, 8, kOutPitch);
    };
    const int left = out_length - (run + i * runs) % tiles * kTile;  // positions that exist
    if (left >= kTile) {
      begin_products();
#pragma unroll
      for (int step = 0; step < kTile / 16; ++step) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
          MULTIPLY<ELEMENT, 1, 1>(
              found[m],
              Matrix::at(stage + rows[m] + 16 * 16 * step, 8, BY_PLANES ? PITCH : dilation),
              right_at(step));
        }
      }
      commit_products();
      products_done<1>();
    } else {
#pragma unroll 1
      for (int step = 0; 16 * step < left; ++step) {
        // The lane gives the row of a position, of the first or the second 8 of the warp's rows.
        const int position = 16 * step + lane / 16 * 8 + lane % 8;
        const int octet = threadIdx.x % 128 / 32 * 2 + lane / 8 % 2;
        const int row = 16 * (position + octet * (BY_PLANES ? PITCH : dilation));
        unsigned a[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
          const int place = i % STAGES * kStageBytes + static_cast<int>(rows[m]) + row;
          load_transposed(a[m], shared + (position < left ? place : kZerosAt));
        }
        begin_products();
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
          MULTIPLY_REGISTERS<ELEMENT, 1>(found[m], a[m], right_at(step));
        }
        commit_products();
        products_done<0>();
      }
    }
  }
  products_done<0>();

  sums += static_cast<long long>(run) * (gridDim.y / SLICES) * kOutWidth * kernel * kInWidth;
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) {
    if (mine + m > last_matrix) break;
    const int first = (mine + m) / kOfTaps * kTapsOfRows, plane = (mine + m) % kOfTaps;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int octet = threadIdx.x % 128 / 32 * 2 + h;
      const int tap = first + (BY_PLANES ? 0 : octet);
      const int c = (BY_PLANES ? plane * 8 + octet : plane) * 8 + lane / 4;
      if (tap >= kernel) continue;
#pragma unroll
      for (int j = 0; j < kOutPlanes; ++j) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int o = 8 * j + lane % 4 * 2 + k;
          sums[(static_cast<long long>(first_channel + o) * kernel + tap) * kInWidth + c] =
              found[m][4 * j + 2 * h + k];
        }
      }
    }
  }
}
