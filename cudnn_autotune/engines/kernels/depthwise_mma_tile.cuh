// The outputs of a block of depthwise_mma.cu, and the division of its shared memory.
//
// Macros: ELEMENT, KERNEL_H, KERNEL_W, TURNED, SIGNAL, CHANNELS_LAST, COLUMN_BLOCKS (1, 2, 4, 8 or
// 16), CHANNELS (4, 8, 16 or 32), WARP_CHANNELS, CHAINED, STAGES, MIN_BLOCKS, ACTIVATION, HAS_BIAS,
// HAS_RESIDUAL; of contiguous tensors COPY_BYTES (of one copy), SHIFT (columns from a multiple of 8
// to the leftmost that a strip depends on) and STORE_PAIRS (whether the output's rows are even).

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int kStrips = 16 / COLUMN_BLOCKS;
constexpr int kSteps = ceil_div(KERNEL_W + 7, 8);    // pieces that eight outputs depend on
constexpr int kPieces = COLUMN_BLOCKS + kSteps - 1;  // per strip
__device__ constexpr int strip_pitch() {
  if (COLUMN_BLOCKS == 4) return kPieces + (10 - kPieces % 4) % 4;  // 2 modulo 4
  return COLUMN_BLOCKS < 4 ? kPieces | 1 : kPieces;
}
constexpr int kPitch = strip_pitch();
constexpr int kGroups = ceil_div(kStrips * kPitch, 4);  // four pieces of a plane each
constexpr int kPlane = kGroups * 4 + (kGroups % 2 ? 0 : 4);
constexpr int kOctets = ceil_div(CHANNELS, 8);
constexpr int kFilterRows = ceil_div(KERNEL_H, CHAINED);
constexpr int kMissing = kFilterRows * CHAINED - KERNEL_H;  // rows of zeros before the filter's
constexpr int kChannelGroups = CHANNELS / WARP_CHANNELS;
constexpr int kWarps = kChannelGroups * CHAINED;
constexpr int kThreads = 32 * kWarps;
constexpr int kPiece = 16;  // bytes

// Rows as they are in memory. Of contiguous tensors a strip has a piece more, because of SHIFT.
constexpr int kRawStrip = (kPitch + 1) * kPiece;
constexpr int kRawBytes =
    CHANNELS_LAST ? kGroups * 32 * kOctets * kPiece : CHANNELS * kStrips * kRawStrip;
constexpr int kPlaneBytes = CHANNELS * kPlane * kPiece;
// Outputs: a piece has 8 columns of a channel. A channel has 16 and one more, eight channels two
// more, so that ldmatrix finds its rows in different banks.
constexpr int kOutChannel = 17, kOutOctet = 8 * kOutChannel + 2;
constexpr int kOutBytes = CHANNELS_LAST ? kOctets * kOutOctet * kPiece : 0;
constexpr int kLinkBytes = (CHAINED - 1) * CHANNELS * 32 * 16;
// Buffers that the steps use in turns: planes, outputs, and sums that are passed on.
constexpr int kOutAt = kPlaneBytes, kLinksAt = kOutAt + kOutBytes;
constexpr int kHalfBytes = kLinksAt + kLinkBytes;
constexpr int kHalvesAt = STAGES * kRawBytes, kFlagAt = kHalvesAt + 2 * kHalfBytes;

constexpr int kStripColumns = 8 * COLUMN_BLOCKS;

struct Shape {
  int images, channels;
  int in_h, in_w, out_h, out_w;
  int pad_h, pad_w;
  int strips_across;  // per image
};

// The place of a position: its strip in the block, and its column block in the strip.
__device__ __forceinline__ int strip_of(int position) {
  if (COLUMN_BLOCKS == 1 || COLUMN_BLOCKS == 16) return position / COLUMN_BLOCKS;
  return position % 8 / COLUMN_BLOCKS * 2 + position / 8;
}
__device__ __forceinline__ int column_block_of(int position) { return position % COLUMN_BLOCKS; }

// An element's offset. If the tensor is a SIGNAL, of one row, `row` is a segment of kStripColumns.
__device__ __forceinline__ long long offset(const Shape& s, int image, int channel, int row,
                                            int column, int height, int width) {
  const long long n = image;
  if (SIGNAL) column += row * kStripColumns, row = 0;
  return CHANNELS_LAST ? ((n * height + row) * width + column) * s.channels + channel
                       : ((n * s.channels + channel) * height + row) * width + column;
}
// Bytes from a row to the next one.
__device__ __forceinline__ unsigned row_bytes(const Shape& s, int width) {
  return 2u * (SIGNAL ? kStripColumns : width) * (CHANNELS_LAST ? s.channels : 1);
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
