// Outputs of depthwise_mma.cu that a zero of T times an infinity or NaN has made NaN: finds them,
// and computes them again.
//
// What an infinity or a NaN makes of an output depends on signs alone. So an input is two bits, and
// a weight too: whether it is positive, and whether it is negative; NaN and a weight of zero are
// both. An output has a bit for plus infinity, where an input meets a weight of its sign, and one
// for minus infinity; it is NaN where it has both. A word has the bits of eight channels of four
// columns. So a tap of 32 outputs takes six instructions, and most outputs of a tensor that is full
// of NaN or infinities have both bits after one or two rows of the filter.
//
// Outputs that are NaN but should not be are listed, and each is written by a thread of its own.
//
// Two shorter ways come first. If all rows of the block have a NaN, mostly the whole input is not
// finite: then the bits of every second row of the input suffice to see that all outputs are NaN.
// Else pixels with a NaN are listed, and if they are few, each of as many threads computes
// eight channels of one from its definition.

constexpr int kListed = 1024;  // outputs in the list
static_assert(kThreads <= kListed, "a pixel of each thread fits");
// An item of a thread: eight or sixteen columns of eight channels.
constexpr int kItemWords = COLUMN_BLOCKS > 1 ? 4 : 2;
constexpr int kItemsAcross = ceil_div(COLUMN_BLOCKS, 2);
constexpr int kRowWords = 2 * kTileVectors;  // of a tile
constexpr int kTapWords = ceil_div(KERNEL_W, 4);
// Shared memory: rows of the input as bits, the weights as bits, the list and its length.
constexpr int kBitsBytes = kOctets * kTiles * kRowWords * 8;  // of a row
constexpr int kTaps = KERNEL_H * KERNEL_W;
constexpr bool kIsSampled = KERNEL_H >= 4;  // whether every second row of the input may suffice
constexpr int kWeightBytes = ceil_div(kOctets * KERNEL_H * KERNEL_W, 2) * 16;
constexpr int kListBytes = 4 * kListed + 16, kClosedBytes = 16;
constexpr int kBitsRows =
    (SHARED_BYTES - kWeightBytes - kListBytes - kClosedBytes) / kBitsBytes;  // at a time
static_assert(kBitsRows >= KERNEL_H, "the bits of the rows that an output depends on fit");
static_assert(kOctets <= 4, "each octet has an integer");
// Whether the weights of eight channels fit beside the list, as vectors.
constexpr bool kHasVectors =
    kTaps * kOctets * kVectorBytes <= kBitsRows * kBitsBytes + kWeightBytes;

// The bits of an infinity of the type.
__device__ constexpr unsigned infinity_of(half) { return 0x7c00; }
__device__ constexpr unsigned infinity_of(bfloat16) { return 0x7f80; }
constexpr unsigned kInfinity = infinity_of(ELEMENT{});

constexpr unsigned kEachByte = 0x01010101u;

// The sum of an output without products of zeros.
__device__ __forceinline__ float exact_sum(const ELEMENT* x, const ELEMENT* filter, const Shape& s,
                                           int image, int channel, int row, int column) {
  float sum = 0.0f;
#pragma unroll 1
  for (int kh = 0; kh < KERNEL_H; ++kh) {
    const int from_row = row - s.pad_h + kh;
    if (from_row < 0 || from_row >= s.in_h) continue;
#pragma unroll 8
    for (int kw = 0; kw < KERNEL_W; ++kw) {
      const int from = column - s.pad_w + kw;
      if (from < 0 || from >= s.in_w) continue;
      const ELEMENT tap{static_cast<unsigned short>(weight(filter, kh, kw))};
      sum += to_float(x[offset(s, image, channel, from_row, from, s.in_h, s.in_w)]) * to_float(tap);
    }
  }
  return sum;
}

// The elements of eight channels; `pixels` are those of a channel.
__device__ __forceinline__ uint4 eight_channels(const ELEMENT* from, const Shape& s, int channel,
                                                int pixels) {
  if (CHANNELS_LAST) return *reinterpret_cast<const uint4*>(from);
  unsigned two[4] = {};
#pragma unroll
  for (int i = 0; i < (CHANNELS < 8 ? CHANNELS : 8); ++i) {
    if (channel + i >= s.channels) break;
    two[i / 2] |= static_cast<unsigned>(from[static_cast<long long>(i) * pixels].bits)
                  << i % 2 * 16;
  }
  return make_uint4(two[0], two[1], two[2], two[3]);
}

// Returns 16 ones for each of two numbers that is `infinity` or NaN. `infinity` has both.
__device__ __forceinline__ unsigned is_infinity_or_nan(unsigned two, unsigned infinity) {
#if defined(__CUDACC_RTC__)
  unsigned found;
  if constexpr (kInfinity == infinity_of(half{})) {
    asm("set.equ.u32.f16x2 %0, %1, %2;" : "=r"(found) : "r"(two), "r"(infinity));
    return found;
  }
#if __CUDA_ARCH__ >= 900
  asm("set.equ.u32.bf16x2 %0, %1, %2;" : "=r"(found) : "r"(two), "r"(infinity));
  return found;
#endif
#endif
  unsigned result = 0;
#pragma unroll
  for (int shift = 0; shift < 32; shift += 16) {
    const unsigned number = two >> shift & 0xffffu;
    const bool is_nan = (number & 0x7fffu) > kInfinity;
    if (is_nan || number == (infinity & 0xffffu)) result |= 0xffffu << shift;
  }
  return result;
}

// The bits of eight channels: x has those that are plus infinity, y those that are minus infinity;
// both have NaN.
__device__ __forceinline__ uint2 bits_of(const uint4& channels) {
  const unsigned two[4] = {channels.x, channels.y, channels.z, channels.w};
  unsigned plus = 0, minus = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned places = 0x20001u << 2 * i;  // 2 i, and 2 i + 1 above 16 bits
    plus |= is_infinity_or_nan(two[i], kInfinity * 0x10001u) & places;
    minus |= is_infinity_or_nan(two[i], (kInfinity | 0x8000u) * 0x10001u) & places;
  }
  return make_uint2((plus | plus >> 16) & 0xffu, (minus | minus >> 16) & 0xffu);
}

// The bits of four columns; zeros outside of the tensor. A SIGNAL's column is one of the tensor,
// and its row is 0.
__device__ __forceinline__ uint2 bits_of_columns(const ELEMENT* tensor, const Shape& s, int image,
                                                 int channel, int row, int column, int height,
                                                 int width) {
  const long long n = image;
  const ELEMENT* from =
      tensor + (CHANNELS_LAST ? ((n * height + row) * width + column) * s.channels + channel
                              : ((n * s.channels + channel) * height + row) * width + column);
  uint4 eight[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    eight[i] = make_uint4(0, 0, 0, 0);
    if (static_cast<unsigned>(column + i) < static_cast<unsigned>(width)) {
      eight[i] = eight_channels(from, s, channel, height * width);
    }
    from += CHANNELS_LAST ? s.channels : 1;
  }
  uint2 bits = make_uint2(0, 0);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint2 found = bits_of(eight[i]);
    bits.x |= found.x << 8 * i;
    bits.y |= found.y << 8 * i;
  }
  return bits;
}

// Computes outputs of a block again, in rows that `rows` has a bit for.
struct Repair {
  const ELEMENT *x, *w;
  ELEMENT* y;
  const ELEMENT *bias, *residual;
  Shape s;
  int first_tile, first_channel;
  uint2* bits;
  uint2* weights;  // the positive and the negative ones, the same byte for each of four columns
  int *listed, *list;
  unsigned* closed;  // channels whose outputs stay as they are

  __device__ __forceinline__ void use(unsigned char* shared) {
    bits = reinterpret_cast<uint2*>(shared);
    weights = reinterpret_cast<uint2*>(shared + kBitsRows * kBitsBytes);
    listed = reinterpret_cast<int*>(shared + kBitsRows * kBitsBytes + kWeightBytes);
    list = listed + 4;
    closed = reinterpret_cast<unsigned*>(list + kListed);
  }

  __device__ __forceinline__ int channel_of(int octet) const {
    return (CHANNELS_LAST ? first_channel / 8 * 8 : first_channel) + octet * 8;
  }

  // Whether bit i of an octet is a channel of the block.
  __device__ __forceinline__ bool has(int octet, int i) const {
    const int channel = channel_of(octet) + i;
    return channel >= first_channel && channel < first_channel + CHANNELS && channel < s.channels;
  }

  __device__ __forceinline__ int row_of(int row) const { return SIGNAL ? 0 : row; }

  // The first column of a tile in the output.
  __device__ __forceinline__ int column_of(int tile, int row) const {
    return (SIGNAL ? row : (first_tile + tile) % s.tiles_across) * kTileColumns;
  }

  // The weights of eight channels.
  __device__ __forceinline__ uint4 weights_of(int octet, int tap) const {
    unsigned two[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (!has(octet, i)) continue;
      const ELEMENT* const filter = w + static_cast<long long>(channel_of(octet) + i) * kTaps;
      two[i / 2] |= weight(filter, tap / KERNEL_W, tap % KERNEL_W) << i % 2 * 16;
    }
    return make_uint4(two[0], two[1], two[2], two[3]);
  }

  static constexpr int kInRow = kOctets * kTileColumns * kTiles;  // pixels of eight channels

  // The place of a pixel of the block, of eight channels; `column` is one of the tensor.
  struct Place {
    int octet, image, channel, row, column;
  };
  __device__ __forceinline__ Place place_of(int first, int item) const {
    const int octet = item % kOctets, in_tile = item / kOctets % kTileColumns;
    const int tile = item / (kOctets * kTileColumns) % kTiles;
    const int row = first + item / kInRow;
    return {octet, (first_tile + tile) / s.tiles_across, channel_of(octet), row_of(row),
            column_of(tile, row) + in_tile};
  }

  // The outputs of a pixel; zeros if there are none.
  __device__ __forceinline__ uint4 outputs_of(const Place& place) const {
    if (place.image >= s.images || place.channel >= s.channels || place.column >= s.out_w) {
      return make_uint4(0, 0, 0, 0);
    }
    const long long at =
        offset(s, place.image, place.channel, place.row, place.column, s.out_h, s.out_w);
    return eight_channels(y + at, s, place.channel, s.out_h * s.out_w);
  }

  // Bits of the channels that are NaN and the block's.
  __device__ __forceinline__ unsigned nan_of(const uint4& outputs, int octet) const {
    const uint2 found = bits_of(outputs);
    unsigned own = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) own |= static_cast<unsigned>(has(octet, i)) << i;
    return found.x & found.y & own;
  }

  // Computes outputs of a pixel that are NaN from their definition.
  __device__ __forceinline__ void write_pixel(const Place& place, const uint4* vectors) const {
    const unsigned found = nan_of(outputs_of(place), place.octet);
    float sums[8] = {};
#pragma unroll 1
    for (int kh = 0; kh < KERNEL_H; ++kh) {
      const int row = place.row - s.pad_h + kh;
      if (row < 0 || row >= s.in_h) continue;
#pragma unroll(KERNEL_W < 8 ? KERNEL_W : 8)
      for (int kw = 0; kw < KERNEL_W; ++kw) {
        const int column = place.column - s.pad_w + kw;
        if (column < 0 || column >= s.in_w) continue;
        const long long at = offset(s, place.image, place.channel, row, column, s.in_h, s.in_w);
        const uint4 eight = eight_channels(x + at, s, place.channel, s.in_h * s.in_w);
        const int tap = kh * KERNEL_W + kw;
        const uint4 by =
            kHasVectors ? vectors[place.octet * kTaps + tap] : weights_of(place.octet, tap);
        const unsigned inputs[4] = {eight.x, eight.y, eight.z, eight.w};
        const unsigned filters[4] = {by.x, by.y, by.z, by.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 a = unpack<ELEMENT>(inputs[i]), b = unpack<ELEMENT>(filters[i]);
          sums[2 * i] += a.x * b.x;
          sums[2 * i + 1] += a.y * b.y;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if ((found >> i & 1) == 0) continue;
      const int channel = place.channel + i;
      const long long at =
          offset(s, place.image, channel, place.row, place.column, s.out_h, s.out_w);
      y[at] = from_float<ELEMENT>(finish(sums[i], bias, residual, channel, at));
    }
  }

  // Computes pixels with a NaN from their definition, in rows of which `is_wrong`. Returns false,
  // and does nothing, if there are more than `most`, which is no more than threads.
  template <typename IsWrong>
  __device__ __forceinline__ bool write_few(int first, int end, int most,
                                            const IsWrong& is_wrong) const {
    uint4* const vectors = reinterpret_cast<uint4*>(bits);
    if (threadIdx.x == 0) *listed = 0;
    for (int i = threadIdx.x; kHasVectors && i < kOctets * kTaps; i += kThreads) {
      vectors[i] = weights_of(i / kTaps, i % kTaps);
    }
    __syncthreads();
    constexpr int kTogether = 4;  // loads
    const int items = (end - first) * kInRow;
#pragma unroll 1
    for (int begin = threadIdx.x; begin < items; begin += kTogether * kThreads) {
      if (*static_cast<volatile int*>(listed) > most) break;
      uint4 outputs[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const int item = begin + k * kThreads;
        outputs[k] = make_uint4(0, 0, 0, 0);
        if (item < items && is_wrong(first + item / kInRow)) {
          outputs[k] = outputs_of(place_of(first, item));
        }
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const int item = begin + k * kThreads;
        if (nan_of(outputs[k], item % kOctets) == 0) continue;
        const int place = atomicAdd(listed, 1);
        if (place < most) list[place] = item;
      }
    }
    __syncthreads();
    const int count = *listed;
    if (count <= most && threadIdx.x < count) {
      write_pixel(place_of(first, list[threadIdx.x]), vectors);
    }
    __syncthreads();
    return count <= most;
  }

  __device__ __forceinline__ void read_weights() {
    if (threadIdx.x < kOctets) {
      unsigned others = 0;
      for (int i = 0; i < 8; ++i) others |= static_cast<unsigned>(!has(threadIdx.x, i)) << i;
      closed[threadIdx.x] = others;
    }
    __syncthreads();
    for (int at = threadIdx.x; at < kOctets * KERNEL_H * KERNEL_W; at += kThreads) {
      const int octet = at / (KERNEL_H * KERNEL_W), tap = at % (KERNEL_H * KERNEL_W);
      unsigned plus = 0, minus = 0, not_finite = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (!has(octet, i)) continue;
        const long long channel = channel_of(octet) + i;
        const unsigned value =
            weight(w + channel * KERNEL_H * KERNEL_W, tap / KERNEL_W, tap % KERNEL_W);
        const bool is_zero = (value & 0x7fffu) == 0;
        plus |= static_cast<unsigned>(is_zero || value < 0x8000u) << i;
        minus |= static_cast<unsigned>(is_zero || value >= 0x8000u) << i;
        not_finite |= static_cast<unsigned>((value & 0x7fffu) >= kInfinity) << i;
      }
      weights[at] = make_uint2(plus * kEachByte, minus * kEachByte);
      if (not_finite) atomicOr(reinterpret_cast<int*>(closed + octet), not_finite);
    }
  }

  // Reads the input of `count` rows of outputs from `first` on: every `step`-th row, and zeros in
  // place of others.
  __device__ __forceinline__ void read_input(int first, int count, int step) {
    const int items = (count + KERNEL_H - 1) * kTiles * kTileVectors * kOctets;
#pragma unroll 1
    for (int item = threadIdx.x; item < items; item += kThreads) {
      const int octet = item % kOctets, vector = item / kOctets % kTileVectors;
      const int tile = item / (kOctets * kTileVectors) % kTiles;
      const int i = item / (kOctets * kTileVectors * kTiles), row = first - s.pad_h + i;
      const int image = (first_tile + tile) / s.tiles_across, channel = channel_of(octet);
      const int column = column_of(tile, row) - s.pad_w + vector * 8;
      uint2 low = make_uint2(0, 0), high = make_uint2(0, 0);
      if (i % step == 0 && image < s.images && channel < s.channels &&
          (SIGNAL || (row >= 0 && row < s.in_h))) {
        low = bits_of_columns(x, s, image, channel, row_of(row), column, s.in_h, s.in_w);
        high = bits_of_columns(x, s, image, channel, row_of(row), column + 4, s.in_h, s.in_w);
      }
      reinterpret_cast<uint4*>(
          bits)[((i * kOctets + octet) * kTiles + tile) * kTileVectors + vector] =
          make_uint4(low.x, low.y, high.x, high.y);
    }
  }

  // Finds the bits of an item's outputs. Returns whether a matrix that it depends on has an input
  // that is not finite.
  __device__ __forceinline__ bool find(unsigned (&plus)[kItemWords], unsigned (&minus)[kItemWords],
                                       const uint2* from, int octet) const {
    bool is_met = false;
#pragma unroll 1
    for (int kh = 0; kh < KERNEL_H; ++kh, from += kOctets * kTiles * kRowWords) {
      unsigned any = 0;
#pragma unroll
      for (int i = 0; i < kItemWords + 2 * (kSteps - 1); ++i) any |= from[i].x | from[i].y;
      if (any == 0) continue;
      is_met = true;
      const uint2* const row = weights + (octet * KERNEL_H + kh) * KERNEL_W;
#pragma unroll(kTapWords <= 2 ? kTapWords : 1)
      for (int first = 0; first < kTapWords; ++first) {
        uint2 words[kItemWords + 1];
#pragma unroll
        for (int j = 0; j <= kItemWords; ++j) {
          words[j] = make_uint2(0, 0);
          if (j < kItemWords || 4 * first + 1 < KERNEL_W) words[j] = from[first + j];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (4 * first + i >= KERNEL_W) break;
          const uint2 tap = row[4 * first + i];
#pragma unroll
          for (int j = 0; j < kItemWords; ++j) {
            const unsigned x_plus = __funnelshift_r(words[j].x, words[j + 1].x, 8 * i);
            const unsigned x_minus = __funnelshift_r(words[j].y, words[j + 1].y, 8 * i);
            plus[j] |= (x_plus & tap.x) | (x_minus & tap.y);
            minus[j] |= (x_minus & tap.x) | (x_plus & tap.y);
          }
        }
      }
      unsigned both = ~0u;
#pragma unroll
      for (int j = 0; j < kItemWords; ++j) both &= plus[j] & minus[j];
      if (both == ~0u) break;
    }
    return is_met;
  }

  // Writes an output: infinity if it is `plus` or `minus`.
  __device__ __noinline__ void write(int image, int channel, int row, int column, bool plus,
                                     bool minus) const {
    float sum = __uint_as_float(plus ? 0x7f800000u : 0xff800000u);
    if (!plus && !minus) {
      const ELEMENT* const filter = w + static_cast<long long>(channel) * KERNEL_H * KERNEL_W;
      sum = exact_sum(x, filter, s, image, channel, row, column);
    }
    const long long at = offset(s, image, channel, row, column, s.out_h, s.out_w);
    y[at] = from_float<ELEMENT>(finish(sum, bias, residual, channel, at));
  }

  // Lists outputs of an item that are NaN and should not be. If `only_look`, it lists none, and
  // returns whether some may not be NaN by what has been read.
  template <bool only_look>
  __device__ __forceinline__ bool list_item(int first, int item) {
    const int octet = item % kOctets, across = item / kOctets % kItemsAcross;
    const int tile = item / (kOctets * kItemsAcross) % kTiles;
    const int i = item / (kOctets * kItemsAcross * kTiles), row = first + i;
    const int image = (first_tile + tile) / s.tiles_across, channel = channel_of(octet);
    const int column = column_of(tile, row) + across * 16;
    if (image >= s.images || channel >= s.channels || column >= s.out_w) return false;
    unsigned plus[kItemWords], minus[kItemWords];
#pragma unroll
    for (int j = 0; j < kItemWords; ++j) {
      plus[j] = closed[octet] * kEachByte;
      for (int k = 0; k < 4; ++k) {
        if (column + 4 * j + k >= s.out_w) plus[j] |= 0xffu << 8 * k;
      }
      minus[j] = plus[j];
    }
    const uint2* const from =
        bits + ((i * kOctets + octet) * kTiles + tile) * kRowWords + across * 4;
    const bool is_met = find(plus, minus, from, octet);
    if (only_look) {
      unsigned both = ~0u;
#pragma unroll
      for (int j = 0; j < kItemWords; ++j) both &= plus[j] & minus[j];
      return both != ~0u;
    }
    // The rows of zeros before a filter, in a chain of warps, meet other rows of the input.
    if (!is_met && kMissing == 0) return false;
#pragma unroll
    for (int j = 0; j < kItemWords; ++j) {
      if ((plus[j] & minus[j]) == ~0u) continue;
      const uint2 now =
          bits_of_columns(y, s, image, channel, row_of(row), column + 4 * j, s.out_h, s.out_w);
      const unsigned wrong = now.x & now.y & ~(plus[j] & minus[j]);
      if (wrong == 0) continue;
#pragma unroll 1
      for (int k = 0; k < 32; ++k) {
        if ((wrong >> k & 1) == 0) continue;
        const int at = column + 4 * j + k / 8, of = channel + k % 8;
        const int place = atomicAdd(listed, 1);
        const bool is_plus = plus[j] >> k & 1, is_minus = minus[j] >> k & 1;
        if (place < kListed) {
          const int pixel = (i * kTiles + tile) * kTileColumns + across * 16 + 4 * j + k / 8;
          list[place] = (pixel * (8 * kOctets) + octet * 8 + k % 8) * 4 + 2 * is_plus + is_minus;
        } else {
          write(image, of, row_of(row), at, is_plus, is_minus);
        }
      }
    }
    return false;
  }

  __device__ __forceinline__ void write_listed(int first) const {
    const int count = min(*listed, kListed);
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const int channel = list[i] / 4 % (8 * kOctets), pixel = list[i] / (4 * 8 * kOctets);
      const int tile = pixel / kTileColumns % kTiles;
      const int row = first + pixel / (kTileColumns * kTiles);
      write((first_tile + tile) / s.tiles_across, channel_of(0) + channel, row_of(row),
            column_of(tile, row) + pixel % kTileColumns, list[i] & 2, list[i] & 1);
    }
  }
};

__device__ __noinline__ void repair(unsigned char* shared, const ELEMENT* x, const ELEMENT* w,
                                    ELEMENT* y, const ELEMENT* bias, const ELEMENT* residual,
                                    Shape s, int first_tile, int first_channel, int first_out,
                                    int end_out, unsigned rows) {
  Repair block{x, w, y, bias, residual, s, first_tile, first_channel};
  block.use(shared);
  const auto is_wrong = [&](int row) { return (rows >> (row - first_out) % 32 & 1) != 0; };
  const int in_row = kOctets * kItemsAcross * kTiles;
  // The end of the rows from `first` on that are looked at together.
  const auto end_of = [&](int first) {
    int end = min(end_out, first + kBitsRows - KERNEL_H + 1);
    while (!is_wrong(end - 1)) --end;
    return end;
  };
  const int in_block = min(32, end_out - first_out);
  const bool is_full = ~rows << (32 - in_block) == 0;
  bool is_nan = kIsSampled && is_full;  // all of it
  if (is_nan) block.read_weights();
#pragma unroll 1
  for (int first = first_out, end; is_nan && first < end_out; first = end) {
    end = end_of(first);
    block.read_input(first, end - first, 2);
    __syncthreads();
    bool is_open = false;
#pragma unroll 1
    for (int item = threadIdx.x; item < (end - first) * in_row; item += kThreads) {
      is_open |= block.list_item<true>(first, item);
    }
    is_nan = !__syncthreads_or(is_open);
  }
  if (is_nan) return;
  // If all rows have a NaN, the bits are less work than many of the block's pixels.
  const int pixels = (end_out - first_out) * block.kInRow;
  const int most = is_full ? min(kThreads, pixels / 4) : kThreads;
  if (block.write_few(first_out, end_out, most, is_wrong)) return;
  block.read_weights();
#pragma unroll 1
  for (int first = first_out, end; first < end_out; first = end) {
    end = first + 1;
    if (!is_wrong(first)) continue;
    end = end_of(first);
    block.read_input(first, end - first, 1);
    if (threadIdx.x == 0) *block.listed = 0;
    __syncthreads();
#pragma unroll 1
    for (int item = threadIdx.x; item < (end - first) * in_row; item += kThreads) {
      if (is_wrong(first + item / in_row)) block.list_item<false>(first, item);
    }
    __syncthreads();
    block.write_listed(first);
    __syncthreads();
  }
}
