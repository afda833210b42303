// Moves rows into shared memory, into planes of channels, and back to memory; for
// depthwise_mma.cu.
//
// Bank conflicts. channels_last is transposed by ldmatrix, whose rows are 8 channels of one pixel.
// Pixels are 8 q + 2 i + j within 32; matrix i has its 8 pixels of all q and j, so that a lane
// receives 8 neighbours in four registers and writes them at once. The slot of a pixel puts j and
// q ^ i into the lowest bits, so those of a matrix, and also neighbours, lie in different banks.
// Planes are 4 vectors apart modulo 8, so 4 vectors of two channels fill the banks. Positions of
// one matrix lie in different banks by the order of tiles among the positions, and by PITCH.

// The place of a pixel among 32 in a staged row, see above.
__device__ __forceinline__ int slot_of(int pixel) {
  const int j = pixel % 2, i = pixel / 2 % 4, q = pixel / 8 % 4;
  return pixel / 32 * 32 + (j | (q ^ i) << 1 | i << 3);
}
__device__ __forceinline__ int stage_vector(int slot, int octet) {
  return slot * kOctets + (octet ^ (slot * kOctets / 8 % kOctets));
}

// Copies rows of the input to shared memory. A thread's copies have the same places in each row.
constexpr int kCopies = CHANNELS_LAST ? kTiles * PITCH * 8 * kOctets : STAGE_BYTES / COPY_BYTES;
constexpr int kThreadCopies = ceil_div(kCopies, kThreads);
static_assert(!CHANNELS_LAST || kWarps % kOctets == 0, "a thread's copies are of one octet");

struct Fetcher {
  unsigned sources[kThreadCopies];  // bytes from x, in the next row
  int columns[kThreadCopies];       // in that row; negative if there is nothing to read
  unsigned char* target;            // in stage 0

  __device__ __forceinline__ Fetcher(unsigned char* stages, const Shape& s, int first_tile,
                                     int first_channel, int first_row) {
#pragma unroll
    for (int k = 0; k < kThreadCopies; ++k) {
      const int copy = threadIdx.x + k * kThreads;
      int tile, column, channel;
      if (CHANNELS_LAST) {
        const int pixel = copy / kOctets;
        tile = pixel / (8 * PITCH);
        column = pixel % (8 * PITCH);
        channel = first_channel / 8 * 8 + copy % kOctets * 8;
        if (k == 0)
          target = kept(stages + stage_vector(slot_of(pixel), copy % kOctets) * kVectorBytes);
      } else {
        const int byte = copy * COPY_BYTES % kStageTile;
        tile = copy * COPY_BYTES / kStageTile % kTiles;
        channel = first_channel + copy * COPY_BYTES / (kStageTile * kTiles);
        column = byte / 2 - SHIFT;
        if (k == 0) target = kept(stages + copy * COPY_BYTES);
      }
      const bool is_needed = copy < kCopies && column < 8 * kTileVectors;
      const int image = (first_tile + tile) / s.tiles_across;
      column += (first_tile + tile) % s.tiles_across * kTileColumns - s.pad_w;
      const bool is_there = is_needed && image < s.images && channel < s.channels;
      // A tensor has less than 2**32 bytes. What is not read may lie anywhere.
      const long long at = offset(s, image, channel, first_row, column, s.in_h, s.in_w);
      sources[k] = static_cast<unsigned>(2 * at);
      if (SIGNAL) column += first_row * kTileColumns;
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
      if (SIGNAL) columns[k] += kTileColumns;
    }
  }
};

// Arranges rows as planes.
struct Arranger {
  static constexpr int kItems =
      ceil_div(CHANNELS_LAST ? kGroups * kOctets : CHANNELS * kTiles * kTileVectors,
               CHANNELS_LAST ? kWarps : kThreads);
  unsigned char* sources[CHANNELS_LAST ? 1 : kItems];
  unsigned char* targets[CHANNELS_LAST ? 1 : kItems];

  __device__ __forceinline__ Arranger(unsigned char* stages, unsigned char* planes,
                                      int first_channel) {
    if (CHANNELS_LAST) {
      // An item is four vectors of eight channels, which a warp transposes.
      const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
      const int group = warp / kOctets, octet = warp % kOctets, matrix = lane / 8;
      const int slot = slot_of(lane % 8 / 2 * 8 + matrix * 2 + lane % 2);
      sources[0] = kept(stages + (group * 32 * kOctets + stage_vector(slot, octet)) * kVectorBytes);
      int channel = octet * 8 + lane / 4;
      if (CHANNELS == 4) channel = max(0, channel - first_channel % 8);
      targets[0] = kept(planes + (channel * PLANE + group * 4 + lane % 4) * kVectorBytes);
    } else {
      // An item is a vector.
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        const int item = threadIdx.x + k * kThreads;
        const int vector = item % kTileVectors, tile = item / kTileVectors % kTiles;
        const int channel = item / (kTileVectors * kTiles);
        sources[k] = kept(stages + (channel * kTiles + tile) * kStageTile + vector * kVectorBytes);
        targets[k] = kept(planes + (channel * PLANE + tile * PITCH + vector) * kVectorBytes);
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
        load_transposed(eight,
                        sources[0] + stage_bytes + k * kGroupsOn * 32 * kOctets * kVectorBytes);
        to = targets[0] + half_bytes + k * kGroupsOn * 4 * kVectorBytes;
        // Four of the eight channels that are loaded may be another block's.
        if (CHANNELS == 4 && threadIdx.x % 32 / 16 != first_channel / 4 % 2) continue;
      } else {
        if (threadIdx.x + k * kThreads >= CHANNELS * kTiles * kTileVectors) break;
        const unsigned char* const from = sources[CHANNELS_LAST ? 0 : k] + stage_bytes;
        const uint4 low = *reinterpret_cast<const uint4*>(from);
        const uint4 high = *reinterpret_cast<const uint4*>(from + kVectorBytes);
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
// transposed by warps: an item is four vectors of eight channels.
struct Writer {
  static constexpr int kItems = CHANNELS_LAST ? ceil_div(4 * kOctets, kWarps) : 2;
  unsigned char* sources[kItems];
  unsigned targets[kItems];  // bytes from y, in the next row
  int columns[kItems];       // in that row; out_w and more if there is nothing to write

  __device__ __forceinline__ Writer(unsigned char* out, const Shape& s, int first_tile,
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
        sources[k] = kept(out + (q % kOctets * OUT_OCTET + row * kOutChannel + first +
                                 q / kOctets * 2 * kOctets) *
                                    kVectorBytes);
      }
      const int tile = first_tile + tile_of(position), image = tile / s.tiles_across;
      column += first_column(s, tile, position);
      const long long at = offset(s, image, channel, first_out, column, s.out_h, s.out_w);
      targets[k] = static_cast<unsigned>(2 * at);
      if (SIGNAL) column += first_out * kTileColumns;
      columns[k] = is_there && image < s.images && channel < s.channels ? column : 1 << 30;
    }
  }

  __device__ __forceinline__ void next_row(const Shape& s) {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      targets[k] += row_bytes(s, s.out_w);
      if (SIGNAL) columns[k] += kTileColumns;
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
