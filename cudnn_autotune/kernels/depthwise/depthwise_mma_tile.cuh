// The outputs of a block of depthwise_mma.cu, and the division of its shared memory.
//
// Macros: ELEMENT, KERNEL_H, KERNEL_W, TURNED, SIGNAL, CHANNELS_LAST, COLUMN_BLOCKS (1, 2, 4, 8 or
// 16), CHANNELS (4, 8, 16 or 32), WARP_CHANNELS, CHAINED, STAGES, MIN_BLOCKS, ACTIVATION, HAS_BIAS,
// HAS_RESIDUAL; of contiguous tensors COPY_BYTES (of one copy), SHIFT (columns from a multiple of 8
// to the leftmost that a tile depends on) and STORE_PAIRS (whether the output's rows are even); and
// the layout, which depthwise_mma.py computes: PITCH (vectors from a tile to the next), PLANE
// (vectors of a channel), OUT_OCTET (vectors of the outputs of eight channels), STAGE_BYTES (a row
// of the input as it is in memory), OUT_BYTES, PARTIAL_BYTES, SHARED_BYTES.

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int kTiles = 16 / COLUMN_BLOCKS;
constexpr int kSteps = ceil_div(KERNEL_W + 7, 8);  // vectors that eight outputs depend on
constexpr int kTileVectors = COLUMN_BLOCKS + kSteps - 1;
constexpr int kGroups = ceil_div(kTiles * PITCH, 4);  // four vectors of a plane each
constexpr int kOctets = ceil_div(CHANNELS, 8);
constexpr int kFilterRows = ceil_div(KERNEL_H, CHAINED);
constexpr int kMissing = kFilterRows * CHAINED - KERNEL_H;  // rows of zeros before the filter's
constexpr int kChannelGroups = CHANNELS / WARP_CHANNELS;
constexpr int kWarps = kChannelGroups * CHAINED;
constexpr int kThreads = 32 * kWarps;
constexpr int kVectorBytes = 16;
static_assert(PITCH >= kTileVectors, "a tile's vectors fit");
static_assert(PLANE >= 4 * kGroups && PLANE % 8 == 4, "planes begin in other banks");

// A row of the input. Of contiguous tensors a tile has a vector more, because of SHIFT.
constexpr int kStageTile = (PITCH + 1) * kVectorBytes;
static_assert(CHANNELS_LAST ? STAGE_BYTES >= kGroups * 32 * kOctets * kVectorBytes
                            : STAGE_BYTES == CHANNELS * kTiles * kStageTile,
              "a row fits");
// Outputs: a vector has 8 columns of a channel. A channel has 16 and one more, eight channels two
// more, so that ldmatrix finds its rows in different banks.
constexpr int kOutChannel = 17;
static_assert(OUT_OCTET == 8 * kOutChannel + 2, "outputs lie in different banks");
static_assert(!CHANNELS_LAST || OUT_BYTES >= kOctets * OUT_OCTET * kVectorBytes, "outputs fit");
constexpr int kRankBytes = CHANNELS * 32 * 16;  // the sums that a warp of a chain passes on
static_assert(PARTIAL_BYTES >= (CHAINED - 1) * kRankBytes, "partial sums fit");
// Buffers that the steps use in turns: planes, outputs, and partial sums.
constexpr int kOutAt = CHANNELS * PLANE * kVectorBytes, kPartialsAt = kOutAt + OUT_BYTES;
constexpr int kHalfBytes = kPartialsAt + PARTIAL_BYTES;
constexpr int kHalvesAt = STAGES * STAGE_BYTES, kFlagAt = kHalvesAt + 2 * kHalfBytes;
static_assert(kFlagAt + sizeof(int) <= SHARED_BYTES, "all of it fits");

constexpr int kTileColumns = 8 * COLUMN_BLOCKS;

struct Shape {
  int images, channels;
  int in_h, in_w, out_h, out_w;
  int pad_h, pad_w;
  int tiles_across;  // per image
};

// The place of a position: its tile in the block, and its column block in the tile.
__device__ __forceinline__ int tile_of(int position) {
  if (COLUMN_BLOCKS == 1 || COLUMN_BLOCKS == 16) return position / COLUMN_BLOCKS;
  return position % 8 / COLUMN_BLOCKS * 2 + position / 8;
}
__device__ __forceinline__ int column_block_of(int position) { return position % COLUMN_BLOCKS; }
// The first column of a position, in a tile that is counted from the first image's.
__device__ __forceinline__ int first_column(const Shape& s, int tile, int position) {
  return (tile % s.tiles_across * COLUMN_BLOCKS + column_block_of(position)) * 8;
}

// An element's offset. If the tensor is a SIGNAL, of one row, `row` is a segment of kTileColumns.
__device__ __forceinline__ long long offset(const Shape& s, int image, int channel, int row,
                                            int column, int height, int width) {
  const long long n = image;
  if (SIGNAL) column += row * kTileColumns, row = 0;
  return CHANNELS_LAST ? ((n * height + row) * width + column) * s.channels + channel
                       : ((n * s.channels + channel) * height + row) * width + column;
}
// Bytes from a row to the next one.
__device__ __forceinline__ unsigned row_bytes(const Shape& s, int width) {
  return 2u * (SIGNAL ? kTileColumns : width) * (CHANNELS_LAST ? s.channels : 1);
}

// The weight of a row and a column of the filter, as bits; zero outside of it.
__device__ __forceinline__ unsigned weight(const ELEMENT* filter, int row, int column) {
  if (row < 0 || column < 0 || column >= KERNEL_W) return 0;
  const int at = row * KERNEL_W + column;
  return filter[TURNED ? KERNEL_H * KERNEL_W - 1 - at : at].bits;
}

// Makes an output of a sum. `at` is the output's offset.
__device__ __forceinline__ float finish(float sum, const ELEMENT* bias, const ELEMENT* residual,
                                        int channel, long long at) {
  if (HAS_BIAS) sum += to_float(bias[channel]);
  if (HAS_RESIDUAL) sum += to_float(residual[at]);
  return activate<ACTIVATION>(sum);
}

// Keeps an address in shared memory in a register. It would be computed anew in each step, which
// costs more than all the rest.
#ifdef __CUDACC_RTC__
__device__ __forceinline__ unsigned char* kept(const unsigned char* pointer) {
  const unsigned address = __shfl_sync(0xffffffffu, shared_address(pointer), threadIdx.x % 32);
  return static_cast<unsigned char*>(__cvta_shared_to_generic(address));
}
#else
__device__ unsigned char* kept(unsigned char* pointer) { return pointer; }
#endif
