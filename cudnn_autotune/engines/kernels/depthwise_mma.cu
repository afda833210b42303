// Depthwise convolution of stride 1 on tensor cores: each channel is convolved with a filter of its
// own. dgrad is the same convolution of dy with the filter turned round (TURNED).
//
// A row of the filter, applied to eight outputs side by side, is a product with a banded matrix
// T of 8 columns: T[k][n] = filter[k - n], and zero where there is no such weight. An mma
// multiplies 16 positions (each a block of eight columns somewhere in a row) of one channel by T.
// Efficiency is KERNEL_W / (8 kSteps), 7/16 for 7 wide and 31/40 for 31 wide, of a rate 15 times
// that of FMAs.
//
// A block computes CHANNELS channels of `rows` rows of kStrips strips; a strip is 8 COLUMN_BLOCKS
// columns of an image, and the positions are those of all strips. It walks down the input's rows.
// A warp holds T of FILTER_ROWS filter rows of its channels in registers, and the sums of the
// FILTER_ROWS - 1 output rows that are not complete. So a row is loaded from shared memory once and
// multiplied by all filter rows; the mma that adds to a sum also moves it to its next place. A
// filter with more rows is divided among CHAINED warps: each passes on the sums that it has
// completed, and the next one starts from them one input row later.
//
// A step does three things to different rows, between two barriers:
// - Row i + STAGES is copied to shared memory, asynchronously and as it is in memory.
// - Row i + 1 is arranged as planes, one a channel: the 16-byte piece s kPitch + j of a plane has
//   columns 8j to 8j + 7 of strip s, from the leftmost that the strip's outputs depend on.
// - Row i is multiplied. What it completes is transposed back to channels_last in the next step.
//
// Bank conflicts. channels_last is transposed by ldmatrix, whose rows are 8 channels of one pixel.
// Pixels are 8 q + 2 i + j within 32; matrix i has its 8 pixels of all q and j, so that a lane
// receives 8 neighbours in four registers and writes them at once. The slot of a pixel puts j and
// q ^ i into the lowest bits, so those of a matrix, and also neighbours, lie in different banks.
// Planes are 4 pieces apart modulo 8, so 4 pieces of two channels fill the banks. Positions of one
// matrix lie in different banks by the order of strips among the positions, and by kPitch.
//
// Zeros of T multiply inputs that an output does not depend on. If one of these is infinite or NaN
// the sum becomes NaN. So where a block finds a NaN among its outputs, it computes such outputs
// again, one by one, from the inputs that they do depend on.
//
// Macros: ELEMENT, KERNEL_H, KERNEL_W, TURNED, SIGNAL, CHANNELS_LAST, COLUMN_BLOCKS (1, 2, 4, 8 or
// 16), CHANNELS (4, 8, 16 or 32), WARP_CHANNELS, CHAINED, STAGES, MIN_BLOCKS, ACTIVATION, HAS_BIAS,
// HAS_RESIDUAL; of contiguous tensors COPY_BYTES (of one copy), SHIFT (columns from a multiple of 8
// to the leftmost that a strip depends on) and STORE_PAIRS (whether the output's rows are even).

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int kStrips = 16 / COLUMN_BLOCKS;
constexpr int kSteps = ceil_div(KERNEL_W + 7, 8);    // pieces that eight outputs depend on
constexpr int kPieces = COLUMN_BLOCKS + kSteps - 1;  // of a strip
__device__ constexpr int strip_pitch() {
  if (COLUMN_BLOCKS == 4) return kPieces + (10 - kPieces % 4) % 4;  // 2 modulo 4
  return COLUMN_BLOCKS < 4 ? kPieces | 1 : kPieces;
}
constexpr int kPitch = strip_pitch();
constexpr int kGroups = ceil_div(kStrips * kPitch, 4);  // of four pieces of a plane
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
// What the steps use in turns: planes, outputs, and sums that are passed on.
constexpr int kOutAt = kPlaneBytes, kLinksAt = kOutAt + kOutBytes;
constexpr int kHalfBytes = kLinksAt + kLinkBytes;
constexpr int kHalvesAt = STAGES * kRawBytes, kFlagAt = kHalvesAt + 2 * kHalfBytes;

constexpr int kStripColumns = 8 * COLUMN_BLOCKS;

struct Shape {
  int images, channels;
  int in_h, in_w, out_h, out_w;
  int pad_h, pad_w;
  int strips_across;  // of an image
};

// Where a position is: its strip in the block, and its column block in the strip.
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

// The place of a pixel among 32 in a raw row, see above.
__device__ __forceinline__ int slot_of(int pixel) {
  const int j = pixel % 2, i = pixel / 2 % 4, q = pixel / 8 % 4;
  return pixel / 32 * 32 + (j | (q ^ i) << 1 | i << 3);
}
__device__ __forceinline__ int raw_piece(int slot, int octet) {
  return slot * kOctets + (octet ^ (slot * kOctets / 8 % kOctets));
}

// Copies rows of the input to shared memory. A thread's copies have the same places in each row.
constexpr int kCopies = CHANNELS_LAST ? kStrips * kPitch * 8 * kOctets : kRawBytes / COPY_BYTES;
constexpr int kThreadCopies = ceil_div(kCopies, kThreads);
static_assert(!CHANNELS_LAST || kWarps % kOctets == 0, "a thread's copies are of one octet");

struct Fetcher {
  unsigned sources[kThreadCopies];  // bytes from x, in the next row
  int columns[kThreadCopies];       // in that row; negative if there is nothing to read
  unsigned char* target;            // in stage 0

  __device__ __forceinline__ Fetcher(unsigned char* raw, const Shape& s, int first_strip,
                                     int first_channel, int first_row) {
#pragma unroll
    for (int k = 0; k < kThreadCopies; ++k) {
      const int copy = threadIdx.x + k * kThreads;
      int strip, column, channel;
      if (CHANNELS_LAST) {
        const int pixel = copy / kOctets;
        strip = pixel / (8 * kPitch);
        column = pixel % (8 * kPitch);
        channel = first_channel / 8 * 8 + copy % kOctets * 8;
        if (k == 0) target = kept(raw + raw_piece(slot_of(pixel), copy % kOctets) * kPiece);
      } else {
        const int byte = copy * COPY_BYTES % kRawStrip;
        strip = copy * COPY_BYTES / kRawStrip % kStrips;
        channel = first_channel + copy * COPY_BYTES / (kRawStrip * kStrips);
        column = byte / 2 - SHIFT;
        if (k == 0) target = kept(raw + copy * COPY_BYTES);
      }
      const bool is_needed = copy < kCopies && column < 8 * kPieces;
      const int image = (first_strip + strip) / s.strips_across;
      column += (first_strip + strip) % s.strips_across * kStripColumns - s.pad_w;
      const bool is_there = is_needed && image < s.images && channel < s.channels;
      // A tensor has less than 2**32 bytes. What is not read may lie anywhere.
      const long long at = offset(s, image, channel, first_row, column, s.in_h, s.in_w);
      sources[k] = static_cast<unsigned>(2 * at);
      if (SIGNAL) column += first_row * kStripColumns;
      columns[k] = is_there ? column : -(1 << 30);
    }
  }

  // Copies the next row.
  __device__ __forceinline__ void fetch(const ELEMENT* x, int stage_bytes, const Shape& s,
                                        bool is_inside) {
    const char* const from = reinterpret_cast<const char*>(x);
    unsigned char* const to = target + stage_bytes;
#pragma unroll
    for (int k = 0; k < kThreadCopies; ++k) {
      const bool is_valid =
          is_inside && static_cast<unsigned>(columns[k]) < static_cast<unsigned>(s.in_w);
      if (kCopies % kThreads == 0 || k < kThreadCopies - 1 ||
          threadIdx.x < kCopies - k * kThreads) {
        if (COPY_BYTES >= 4) {
          copy_async<(COPY_BYTES >= 4 ? COPY_BYTES : 4)>(to + k * kThreads * COPY_BYTES,
                                                         from + sources[k], is_valid);
        } else {
          unsigned short element = 0;
          if (is_valid) element = *reinterpret_cast<const unsigned short*>(from + sources[k]);
          *reinterpret_cast<unsigned short*>(to + k * kThreads * COPY_BYTES) = element;
        }
      }
      sources[k] += row_bytes(s, s.in_w);
      if (SIGNAL) columns[k] += kStripColumns;
    }
  }
};

// Arranges rows as planes.
struct Arranger {
  static constexpr int kItems =
      ceil_div(CHANNELS_LAST ? kGroups * kOctets : CHANNELS * kStrips * kPieces,
               CHANNELS_LAST ? kWarps : kThreads);
  unsigned char* sources[CHANNELS_LAST ? 1 : kItems];
  unsigned char* targets[CHANNELS_LAST ? 1 : kItems];

  __device__ __forceinline__ Arranger(unsigned char* raw, unsigned char* planes,
                                      int first_channel) {
    if (CHANNELS_LAST) {
      // An item is four pieces of eight channels, which a warp transposes.
      const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
      const int group = warp / kOctets, octet = warp % kOctets, matrix = lane / 8;
      const int slot = slot_of(lane % 8 / 2 * 8 + matrix * 2 + lane % 2);
      sources[0] = kept(raw + (group * 32 * kOctets + raw_piece(slot, octet)) * kPiece);
      int channel = octet * 8 + lane / 4;
      if (CHANNELS == 4) channel = max(0, channel - first_channel % 8);
      targets[0] = kept(planes + (channel * kPlane + group * 4 + lane % 4) * kPiece);
    } else {
      // An item is a piece.
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        const int item = threadIdx.x + k * kThreads;
        const int piece = item % kPieces, strip = item / kPieces % kStrips;
        const int channel = item / (kPieces * kStrips);
        sources[k] = kept(raw + (channel * kStrips + strip) * kRawStrip + piece * kPiece);
        targets[k] = kept(planes + (channel * kPlane + strip * kPitch + piece) * kPiece);
      }
    }
  }

  __device__ __forceinline__ void arrange(int stage_bytes, int half_bytes, int first_channel) {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      unsigned eight[4];
      unsigned char* to;
      if (CHANNELS_LAST) {
        constexpr int kGroupsOn = kWarps / kOctets;
        if (k == kItems - 1 && threadIdx.x / 32 + k * kWarps >= kGroups * kOctets) break;
        load_transposed(eight, sources[0] + stage_bytes + k * kGroupsOn * 32 * kOctets * kPiece);
        to = targets[0] + half_bytes + k * kGroupsOn * 4 * kPiece;
        // Of the eight channels that are loaded, four may be another block's.
        if (CHANNELS == 4 && threadIdx.x % 32 / 16 != first_channel / 4 % 2) continue;
      } else {
        if (threadIdx.x + k * kThreads >= CHANNELS * kStrips * kPieces) break;
        const unsigned char* const from = sources[CHANNELS_LAST ? 0 : k] + stage_bytes;
        const uint4 low = *reinterpret_cast<const uint4*>(from);
        const uint4 high = *reinterpret_cast<const uint4*>(from + kPiece);
        const unsigned words[9] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w, 0};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = i + SHIFT / 2;
          eight[i] = SHIFT % 2 ? __funnelshift_r(words[at], words[at + 1], 16) : words[at];
        }
        to = targets[CHANNELS_LAST ? 0 : k] + half_bytes;
      }
      *reinterpret_cast<uint4*>(to) = make_uint4(eight[0], eight[1], eight[2], eight[3]);
    }
  }
};

// Writes outputs. Those of contiguous tensors come from the lane that has them: columns 2t and
// 2t + 1 of positions g and g + 8, of the warp's first channel. Those of channels_last are
// transposed by warps: an item is four pieces of eight channels.
struct Writer {
  static constexpr int kItems = CHANNELS_LAST ? ceil_div(4 * kOctets, kWarps) : 2;
  unsigned char* sources[kItems];
  unsigned targets[kItems];  // bytes from y, in the next row
  int columns[kItems];       // in that row; out_w and more if there is nothing to write

  __device__ __forceinline__ Writer(unsigned char* out, const Shape& s, int first_strip,
                                    int first_channel, int warp_channel, int first_out) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      int position = g + 8 * k, column = 2 * t, channel = first_channel + warp_channel;
      bool is_there = true;
      if (CHANNELS_LAST) {
        const int item = warp + k * kWarps;
        is_there = item < 4 * kOctets;
        const int first = item % (2 * kOctets) + item / (2 * kOctets) % 2 * 8;
        position = first + t / kOctets * 2 * kOctets;
        channel = first_channel + t % kOctets * 8;
        column = g;
        // This lane gives ldmatrix a row of another lane's outputs.
        const int matrix = lane / 8, q = lane % 8 / 2;
        const int row = (CHANNELS == 4 ? matrix % 2 : matrix) * 2 + lane % 2;
        sources[k] = kept(out + (q % kOctets * kOutOctet + row * kOutChannel + first +
                                 q / kOctets * 2 * kOctets) *
                                    kPiece);
      }
      const int strip = first_strip + strip_of(position), image = strip / s.strips_across;
      column += (strip % s.strips_across * COLUMN_BLOCKS + column_block_of(position)) * 8;
      const long long at = offset(s, image, channel, first_out, column, s.out_h, s.out_w);
      targets[k] = static_cast<unsigned>(2 * at);
      if (SIGNAL) column += first_out * kStripColumns;
      columns[k] = is_there && image < s.images && channel < s.channels ? column : 1 << 30;
    }
  }

  __device__ __forceinline__ void next_row(const Shape& s) {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      targets[k] += row_bytes(s, s.out_w);
      if (SIGNAL) columns[k] += kStripColumns;
    }
  }

  // Writes two columns of item k, of the channel that is `channel` after the warp's first.
  __device__ __forceinline__ void write_two(ELEMENT* y, int k, int channel, unsigned two,
                                            const Shape& s) {
    char* const to = reinterpret_cast<char*>(y) + (targets[k] + 2u * channel * s.out_h * s.out_w);
    if (STORE_PAIRS) {
      if (columns[k] < s.out_w) *reinterpret_cast<unsigned*>(to) = two;
    } else {
      unsigned short* const elements = reinterpret_cast<unsigned short*>(to);
      if (columns[k] < s.out_w) elements[0] = static_cast<unsigned short>(two);
      if (columns[k] + 1 < s.out_w) elements[1] = static_cast<unsigned short>(two >> 16);
    }
  }

  __device__ __forceinline__ void write_transposed(ELEMENT* y, int half_bytes, const Shape& s) {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (k == kItems - 1 && threadIdx.x / 32 + k * kWarps >= 4 * kOctets) break;
      unsigned eight[4];
      load_transposed(eight, sources[k] + half_bytes);
      if (columns[k] >= s.out_w) continue;
      char* const to = reinterpret_cast<char*>(y) + targets[k];
      if (CHANNELS == 4) {
        *reinterpret_cast<uint2*>(to) = make_uint2(eight[0], eight[1]);
      } else {
        *reinterpret_cast<uint4*>(to) = make_uint4(eight[0], eight[1], eight[2], eight[3]);
      }
    }
  }
};

// The weight of a row and a column of the filter, as bits; zero outside of it.
__device__ __forceinline__ unsigned weight(const ELEMENT* filter, int row, int column) {
  if (row < 0 || column < 0 || column >= KERNEL_W) return 0;
  const int at = row * KERNEL_W + column;
  return filter[TURNED ? KERNEL_H * KERNEL_W - 1 - at : at].bits;
}

// What a convolution makes of a sum. `at` is the output's offset.
__device__ __forceinline__ float finish(float sum, const ELEMENT* bias, const ELEMENT* residual,
                                        int channel, long long at) {
  if (HAS_BIAS) sum += to_float(bias[channel]);
  if (HAS_RESIDUAL) sum += to_float(residual[at]);
  return activate<ACTIVATION>(sum);
}

// Computes outputs of the block that are NaN again, without products of zeros.
__device__ void repair(const ELEMENT* x, const ELEMENT* w, ELEMENT* y, const ELEMENT* bias,
                       const ELEMENT* residual, const Shape& s, int first_strip, int first_channel,
                       int first_out, int end_out) {
  const int count = kStrips * (end_out - first_out) * kStripColumns * CHANNELS;
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int channel = first_channel + i % CHANNELS;
    const int strip = first_strip + i / (CHANNELS * kStripColumns) % kStrips;
    const int image = strip / s.strips_across;
    int column = strip % s.strips_across * kStripColumns + i / CHANNELS % kStripColumns;
    int row = first_out + i / (CHANNELS * kStripColumns * kStrips);
    if (SIGNAL) column += row * kStripColumns, row = 0;
    if (channel >= s.channels || image >= s.images || column >= s.out_w) continue;
    const long long at = offset(s, image, channel, row, column, s.out_h, s.out_w);
    const float old = to_float(y[at]);
    if (old == old) continue;
    float sum = 0.0f;
#pragma unroll 1
    for (int kh = 0; kh < KERNEL_H; ++kh) {
      const int from_row = row - s.pad_h + kh;
      if (from_row < 0 || from_row >= s.in_h) continue;
#pragma unroll 1
      for (int kw = 0; kw < KERNEL_W && sum == sum; ++kw) {
        const int from = column - s.pad_w + kw;
        if (from < 0 || from >= s.in_w) continue;
        const ELEMENT tap{static_cast<unsigned short>(
            weight(w + static_cast<long long>(channel) * KERNEL_H * KERNEL_W, kh, kw))};
        sum +=
            to_float(x[offset(s, image, channel, from_row, from, s.in_h, s.in_w)]) * to_float(tap);
      }
    }
    y[at] = from_float<ELEMENT>(finish(sum, bias, residual, channel, at));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    depthwise_mma(const ELEMENT* x, const ELEMENT* w, ELEMENT* y, const ELEMENT* bias,
                  const ELEMENT* residual, int images, int channels, int in_h, int in_w, int out_h,
                  int out_w, int pad_h, int pad_w, int strips_across, int rows) {
  DYNAMIC_SHARED(shared);
  const Shape s{images, channels, in_h, in_w, out_h, out_w, pad_h, pad_w, strips_across};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int link = warp / kChannelGroups, warp_channel = warp % kChannelGroups * WARP_CHANNELS;

  const int channel_blocks = ceil_div(channels, CHANNELS);
  const int strip_groups = ceil_div(images * strips_across, kStrips);
  const int first_channel = blockIdx.x % channel_blocks * CHANNELS;
  const int first_strip = blockIdx.x / channel_blocks % strip_groups * kStrips;
  const int first_out = blockIdx.x / channel_blocks / strip_groups * rows;
  const int end_out = min(first_out + rows, SIGNAL ? ceil_div(out_w, kStripColumns) : out_h);
  // Rows above the image add nothing, but an output is written when its last row has been seen.
  const int last_of_first = first_out - pad_h + KERNEL_H - 1;
  const int first_row = min(max(first_out - pad_h, 0), last_of_first);
  const int steps = end_out - pad_h + KERNEL_H - 1 - first_row;
  const int end_row = min(first_row + steps, SIGNAL ? 1 << 30 : in_h);

  unsigned char* const halves = shared + kHalvesAt;
  Fetcher fetcher(shared, s, first_strip, first_channel, first_row);
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    const int row = first_row + i;
    fetcher.fetch(x, i * kRawBytes, s, row >= 0 && row < end_row);
    commit_copies();
  }

  // T of the warp's filter rows: register k of lane (g, t) has T[8k + 2t][g] and the one below it.
  unsigned bands[WARP_CHANNELS][kFilterRows][kSteps];
  float sums[WARP_CHANNELS][kFilterRows][4];
#pragma unroll
  for (int c = 0; c < WARP_CHANNELS; ++c) {
    const int channel = first_channel + warp_channel + c;
    const ELEMENT* filter = w + static_cast<long long>(channel) * KERNEL_H * KERNEL_W;
#pragma unroll
    for (int r = 0; r < kFilterRows; ++r) {
      const int row = channel < channels ? link * kFilterRows + r - kMissing : -1;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const int column = 8 * k + 2 * t - g;
        bands[c][r][k] = weight(filter, row, column) | weight(filter, row, column + 1) << 16;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[c][r][i] = 0.0f;
    }
  }
  for (int i = threadIdx.x; i < kLinkBytes / 4; i += kThreads) {
    reinterpret_cast<float*>(halves + kHalfBytes + kLinksAt)[i] = 0.0f;
  }
  if (threadIdx.x == 0) *reinterpret_cast<int*>(shared + kFlagAt) = 0;

  Arranger arranger(shared, halves, first_channel);
  Writer writer(halves + kOutAt, s, first_strip, first_channel, warp_channel, first_out);
  const int position = lane % 16;
  const int piece = strip_of(position) * kPitch + column_block_of(position);
  const unsigned char* const matrices =
      kept(halves + (warp_channel * kPlane + piece + lane / 16) * kPiece);
  const unsigned char* const last_matrices =
      kept(halves + (warp_channel * kPlane + piece + kSteps - 1) * kPiece);
  unsigned char* const packed =
      kept(halves + kOutAt +
           ((warp_channel / 8 * kOutOctet + warp_channel % 8 * kOutChannel + g) * 4 + t) * 4);
  unsigned char* const links =
      kept(halves + kLinksAt + ((link * CHANNELS + warp_channel) * 32 + lane) * 16);
  float poison = 0.0f;  // NaN if a result was

  copies_arrived<STAGES - 1>();
  __syncthreads();
  arranger.arrange(0, 0, first_channel);

  int stage = 0;  // bytes to row i
  int now = 0;    // bytes to what has this step's planes
#pragma unroll 1
  for (int i = 0; i <= steps; ++i) {
    copies_arrived<STAGES - 2>();
    __syncthreads();
    const int row = first_row + i, other = kHalfBytes - now;
    fetcher.fetch(x, stage, s, row + STAGES >= 0 && row + STAGES < end_row);
    commit_copies();
    stage = stage == (STAGES - 1) * kRawBytes ? 0 : stage + kRawBytes;
    arranger.arrange(stage, other, first_channel);
    const bool is_complete = row >= last_of_first;

#pragma unroll
    for (int c = 0; c < WARP_CHANNELS; ++c) {
      unsigned a[kSteps / 2 + 1][4], last[2];
#pragma unroll
      for (int k = 0; k < kSteps / 2; ++k) {
        load_matrices(a[k], matrices + now + (c * kPlane + 2 * k) * kPiece);
      }
      if (kSteps % 2) load_matrices(last, last_matrices + now + c * kPlane * kPiece);

      float next[4] = {0.0f, 0.0f, 0.0f, 0.0f}, result[4];
      constexpr int kLink = CHANNELS * 32 * 16;
      if (CHAINED > 1 && link > 0) {
        const float4 before = *reinterpret_cast<const float4*>(links + other - kLink + c * 32 * 16);
        next[0] = before.x, next[1] = before.y, next[2] = before.z, next[3] = before.w;
      }
#pragma unroll
      for (int r = kFilterRows - 1; r >= 0; --r) {
        // Adds filter row r to the sums of the output that has seen the rows before it.
        float d[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) d[j] = r > 0 ? sums[c][r - 1][j] : next[j];
#pragma unroll
        for (int k = 0; k < kSteps / 2; ++k) {
          const unsigned b[2] = {bands[c][r][2 * k], bands[c][r][2 * k + 1]};
          mma_16x8x16<ELEMENT>(d, a[k], b);
        }
        if (kSteps % 2) mma_16x8x8<ELEMENT>(d, last, bands[c][r][kSteps - 1]);
#pragma unroll
        for (int j = 0; j < 4; ++j) (r == kFilterRows - 1 ? result : sums[c][r])[j] = d[j];
      }

      if (link < CHAINED - 1) {
        *reinterpret_cast<float4*>(links + now + c * 32 * 16) =
            make_float4(result[0], result[1], result[2], result[3]);
      } else if (is_complete && i < steps) {
        const int channel = first_channel + warp_channel + c;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          // Columns 2t and 2t + 1 of position g + 8k.
          if (HAS_BIAS || HAS_RESIDUAL || ACTIVATION) {
            const int strip = first_strip + strip_of(g + 8 * k), image = strip / strips_across;
            const int out_row = row - last_of_first + first_out;
            const int column =
                (strip % strips_across * COLUMN_BLOCKS + column_block_of(g + 8 * k)) * 8 + 2 * t;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const long long at = offset(s, image, channel, out_row, column + j, out_h, out_w);
              const int in_row = column + j + (SIGNAL ? out_row * kStripColumns : 0);
              if (image < images && channel < channels && in_row < out_w) {
                result[2 * k + j] = finish(result[2 * k + j], bias, residual, channel, at);
              }
            }
          }
          const unsigned two = pack<ELEMENT>(result[2 * k], result[2 * k + 1]);
          if (CHANNELS_LAST) {
            *reinterpret_cast<unsigned*>(packed + now + (c * kOutChannel + 8 * k) * kPiece) = two;
          } else if (channel < channels) {
            writer.write_two(y, k, c, two, s);
          }
        }
        poison += ((result[0] + result[1]) + (result[2] + result[3])) * 0.0f;
      }
    }

    // The row that the last step completed; contiguous rows have been written.
    if (CHANNELS_LAST ? row > last_of_first : is_complete) {
      if (CHANNELS_LAST) writer.write_transposed(y, other, s);
      writer.next_row(s);
    }
    now = other;
  }

  if (poison != 0.0f) *reinterpret_cast<int*>(shared + kFlagAt) = 1;
  __syncthreads();
  if (*reinterpret_cast<int*>(shared + kFlagAt)) {
    repair(x, w, y, bias, residual, s, first_strip, first_channel, first_out, end_out);
  }
}
