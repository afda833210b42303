// The loads of a warp for an mma, and the products; grouped_wgrad.cu explains them.

using Y = Axis<false, KERNEL_Y, STRIDE_Y, PAD_Y, TILE_Y>;
using X = Axis<false, KERNEL_X, STRIDE_X, PAD_X, TILE_X>;
using Input = Tile<Y, X, TILE_IMAGES, BLOCK_GROUPS * kInChunks>;
using Gradient = Tile<Axis<false, 1, 1, 0, TILE_Y>, Axis<false, 1, 1, 0, TILE_X>, TILE_IMAGES,
                      BLOCK_GROUPS * kOutWidth / 8>;

constexpr int kTaps = KERNEL_Y * KERNEL_X;
constexpr int kChunks = KERNEL_X * kInChunks;  // per row tap
constexpr int kNParts = kOutWidth / (8 * N_TILES);
constexpr int kMParts = WARPS / (BLOCK_GROUPS * kNParts);  // per block

constexpr int kSegmentsAcross = TILE_X / 8;
constexpr int kSegments = TILE_IMAGES * kSegmentsAcross;  // segments that begin in one row
static_assert(TILE_X % 8 == 0 && TILE_Y % ROWS == 0, "segments fill a tile");
constexpr int kZeroBytes = 256;  // at the beginning of shared memory
constexpr int kStageBytes = Input::kBytes + Gradient::kBytes;

struct Segment {
  int image, x;
};
__device__ __forceinline__ Segment segment_of(int segment) {
  return Segment{segment / kSegmentsAcross, segment % kSegmentsAcross * 8};
}

// The sums of a warp: pairs of chunks from `first_pair`, and N_TILES of the groups from
// `first_n_tile`, which are in `group`.
struct Part {
  int group, first_pair, first_n_tile;

  __device__ __forceinline__ int chunk(int pair, int half) const {
    return (first_pair + pair) * 2 + half;
  }
  // Bytes to a chunk from the first tap of a pixel. If the chunks end, the last is computed again,
  // but not written.
  __device__ __forceinline__ int chunk_offset(int pair, int half) const {
    const int i = min(chunk(pair, half), kChunks - 1);
    return Input::offset(0, i / kInChunks) + (group * kInChunks + i % kInChunks) * kChunkBytes;
  }
};

// The operands of a lane, from ROWS rows of two segments.
template <typename T>
struct Operands {
  static constexpr int kSegmentsTogether = 2;

  // The place of a lane's rows of matrices: `place` bytes from the beginning of shared memory, and
  // further down by `step`. Rows that do not exist are zeros, in the same bank.
  struct Rows {
    int place, step;
  };
  __device__ __forceinline__ static Rows rows_at(int place, int step, bool exists) {
    return exists ? Rows{place, step} : Rows{place & (128 - 16), 0};
  }

  int lane, n_offset, chunk_offsets[PAIRS];
  Rows gradient, input[PAIRS];

  // The lane loads rows of chunk lane / 8 % 2 of each pair, and of segment lane / 16. From dy it
  // loads rows of segment lane / 8 % 2, and of tile lane / 16 of each two n tiles.
  __device__ __forceinline__ explicit Operands(const Part& part)
      : lane(threadIdx.x % 32), n_offset((part.first_n_tile + lane / 16) * 16) {
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      chunk_offsets[pair] = part.chunk_offset(pair, lane / 8 % 2);
    }
  }

  // Goes to the segments, whose `columns` columns from the tile's first are in the output.
  __device__ __forceinline__ void go_to(int first_segment, int first_y, int stage, int columns) {
    const int dy_index = first_segment + lane / 8 % 2;
    const Segment dy_segment = segment_of(dy_index);
    gradient = rows_at(stage + Input::kBytes + n_offset +
                           Gradient::place(dy_segment.image, first_y, dy_segment.x + lane % 8),
                       Gradient::offset(1, 0), kSegments % 2 == 0 || dy_index < kSegments);

    const int x_index = first_segment + lane / 16;
    const Segment x_segment = segment_of(x_index);
    const bool exists = COLUMNS_FIT || x_segment.x + lane % 8 < columns;
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      input[pair] =
          rows_at(stage + Input::place(x_segment.image, first_y, x_segment.x + lane % 8) +
                      chunk_offsets[pair],
                  Input::offset(1, 0), exists && (kSegments % 2 == 0 || x_index < kSegments));
    }
  }

  __device__ __forceinline__ void load_gradient(unsigned (&b)[N_TILES][2],
                                                const unsigned char* shared, int y) const {
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
      const unsigned char* const at = shared + gradient.place + y * gradient.step + n * 16;
      if (n + 1 < N_TILES) {
        unsigned two[4];
        load_transposed(two, at);
        b[n][0] = two[0], b[n][1] = two[1], b[n + 1][0] = two[2], b[n + 1][1] = two[3];
      } else {
        load_transposed(b[n], at);
      }
    }
  }
  __device__ __forceinline__ void load_input(unsigned (&a)[4], const unsigned char* shared,
                                             int pair, int row) const {
    load_transposed(a, shared + input[pair].place + row * input[pair].step);
  }
  __device__ __forceinline__ static void multiply(float (&sums)[4], const unsigned (&a)[4],
                                                  const unsigned (&b)[2]) {
    mma_16x8x16<T>(sums, a, b);
  }
};

// The operands from one segment in TF32. A lane loads the numbers of pixel lane % 4 and of the
// fourth after it, in channel lane / 4.
template <>
struct Operands<float> {
  static constexpr int kSegmentsTogether = 1;

  int lane, n_offset, chunk_offsets[PAIRS][2];
  int gradient, input;
  bool exists[2];

  __device__ __forceinline__ explicit Operands(const Part& part)
      : lane(threadIdx.x % 32), n_offset(part.first_n_tile * kChunkBytes + lane / 4 * 4) {
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; ++i) {
      chunk_offsets[i / 2][i % 2] = part.chunk_offset(i / 2, i % 2) + lane / 4 * 4;
    }
  }

  __device__ __forceinline__ void go_to(int first_segment, int first_y, int stage, int columns) {
    const Segment segment = segment_of(first_segment);
    const int x = segment.x + lane % 4;
    gradient = stage + Input::kBytes + n_offset + Gradient::place(segment.image, first_y, x);
    input = stage + Input::place(segment.image, first_y, x);
#pragma unroll
    for (int i = 0; i < 2; ++i) exists[i] = COLUMNS_FIT || x + 4 * i < columns;
  }

  __device__ __forceinline__ void load_gradient(unsigned (&b)[N_TILES][2],
                                                const unsigned char* shared, int y) const {
#pragma unroll
    for (int i = 0; i < 2 * N_TILES; ++i) {
      const unsigned char* const pixel = shared + gradient + Gradient::place(0, y, i % 2 * 4);
      b[i / 2][i % 2] = to_tf32(load_number(pixel + i / 2 * kChunkBytes));
    }
  }
  __device__ __forceinline__ void load_input(unsigned (&a)[4], const unsigned char* shared,
                                             int pair, int row) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned char* const chunk = shared + input + chunk_offsets[pair][i % 2];
      const float number =
          load_number(chunk + Input::offset(row, 0) + Input::place(0, 0, i / 2 * 4));
      a[i] = to_tf32(exists[i / 2] ? number : 0.0f);
    }
  }
  __device__ __forceinline__ static void multiply(float (&sums)[4], const unsigned (&a)[4],
                                                  const unsigned (&b)[2]) {
    mma_16x8x8_tf32(sums, a, b);
  }
};
