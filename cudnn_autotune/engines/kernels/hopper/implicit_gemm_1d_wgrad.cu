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
// Positions behind the last one, and those of x beyond the signal, are zeros. A zero times an
// infinity or NaN would be NaN, so a sum that is NaN is computed again from what exists.
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
static_assert(STAGES * kStageBytes <= SHARED_BYTES, "the layout of shared memory");

struct Sizes {
  int images, in_length, in_channels, out_length, out_channels, kernel, padding, dilation;
};

// A sum of a run's positions without the zeros.
__device__ __noinline__ float exact_sum(const ELEMENT* x, const ELEMENT* dy, const Sizes& s,
                                        int tap, int c, int o, int run, int runs) {
  const int tiles = (s.out_length + kTile - 1) / kTile;
  float sum = 0.0f;
  for (int tile = run; tile < s.images * tiles; tile += runs) {
    const long long image = tile / tiles;
    const int first = tile % tiles * kTile, last = min(first + kTile, s.out_length);
    for (int p = first; p < last; ++p) {
      const int i = p + tap * s.dilation - s.padding;
      if (i < 0 || i >= s.in_length) continue;
      sum += to_float(x[(image * s.in_length + i) * s.in_channels + c]) *
             to_float(dy[(image * s.out_length + p) * s.out_channels + o]);
    }
  }
  return sum;
}

// gridDim.x is the blocks that divide the matrices of a group, gridDim.y groups * SLICES, gridDim.z
// the runs that the tiles are divided among. `sums` are arrays of float32, one for each run.
// PITCH is the odd number of rows that a plane of x takes.
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    implicit_gemm_1d_wgrad(const ELEMENT* x, const ELEMENT* dy, float* sums, int images,
                           int in_length, int in_channels, int out_length, int out_channels,
                           int kernel, int padding, int dilation) {
  DYNAMIC_SHARED(shared);
  const Sizes s{images,       in_length, in_channels, out_length,
                out_channels, kernel,    padding,     dilation};
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
#pragma unroll
  for (int i = 0; i < STAGES - 2; ++i) copy_stage(i);

  // The same in all lanes, as the compiler sees by this.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int mine = first_matrix + warpgroup * M_TILES;
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
    begin_products();
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) {
      const Matrix right = Matrix::at(stage + kInBytes + 16 * 16 * step, 8, kOutPitch);
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
        MULTIPLY<ELEMENT, 1, 1>(
            found[m], Matrix::at(stage + rows[m] + 16 * 16 * step, 8, BY_PLANES ? PITCH : dilation),
            right);
      }
    }
    commit_products();
    products_done<1>();
  }
  products_done<0>();

  sums += static_cast<long long>(run) * (gridDim.y / SLICES) * kOutWidth * kernel * kInWidth;
  const int lane = threadIdx.x % 32;
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
          float sum = found[m][4 * j + 2 * h + k];
          if (sum != sum) sum = exact_sum(x, dy, s, tap, c, o, run, runs);
          sums[(static_cast<long long>(first_channel + o) * kernel + tap) * kInWidth + c] = sum;
        }
      }
    }
  }
}
