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
// Outputs that are NaN but should not be are listed, and each is written by a thread of its own, or
// by eight if they are few. Before that, pixels with a NaN are listed: if they are few, each of as
// many threads computes eight channels of one from its definition.
//
// If the block's first row is full of NaN, mostly the whole input is not finite, and the block
// stops after it. Then the bits of every second row of the input suffice to see that most outputs
// are NaN. The other outputs are listed and computed from their definition. If they are too many,
// the block is computed again, and does not stop.
//
// A block runs this code once, so loading the instructions is a good part of its time. Loops are
// unrolled only where registers are an array, or loads are to be on their way together.

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
constexpr int kOctetChannels = CHANNELS_LAST || CHANNELS > 8 ? 8 : CHANNELS;  // that are read
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
constexpr int kTogether = KERNEL_W < 8 ? KERNEL_W : 8;  // taps whose inputs are loaded together

// One lane's part of the sum of an output, without products of zeros: `lanes` lanes share the sum.
__device__ __forceinline__ float exact_sum(const ELEMENT* x, const ELEMENT* filter, const Shape& s,
                                           int image, int channel, int row, int column, int lane,
                                           int lanes) {
  constexpr int kAcross = ceil_div(KERNEL_W, kTogether);
  float sum = 0.0f;
#pragma unroll 1
  for (int part = lane; part < KERNEL_H * kAcross; part += lanes) {
    const int kh = part / kAcross, first = part % kAcross * kTogether;
    const int from_row = row - s.pad_h + kh, from = column - s.pad_w + first;
    if (from_row < 0 || from_row >= s.in_h) continue;
    const ELEMENT* const in_row = x + offset(s, image, channel, from_row, 0, s.in_h, s.in_w);
    // These loads have no condition, so that they are on their way together.
    ELEMENT inputs[kTogether], taps[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int at = min(max(from + i, 0), s.in_w - 1);
      const int tap = kh * KERNEL_W + min(first + i, KERNEL_W - 1);
      inputs[i] = in_row[CHANNELS_LAST ? at * s.channels : at];
      taps[i] = filter[TURNED ? kTaps - 1 - tap : tap];
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const bool is_inside = first + i < KERNEL_W && from + i >= 0 && from + i < s.in_w;
      sum += is_inside ? to_float(inputs[i]) * to_float(taps[i]) : 0.0f;
    }
  }
  return sum;
}

// The elements of eight channels, which are `apart` from each other.
__device__ __forceinline__ uint4 gathered(const ELEMENT* from, int apart) {
  unsigned two[4] = {};
#pragma unroll
  for (int i = 0; i < kOctetChannels; ++i) {
    two[i / 2] |= static_cast<unsigned>(from[static_cast<long long>(i) * apart].bits) << i % 2 * 16;
  }
  return make_uint4(two[0], two[1], two[2], two[3]);
}
// Those of a pixel; `pixels` are those of a channel.
__device__ __forceinline__ uint4 eight_channels(const ELEMENT* from, int pixels) {
  if (CHANNELS_LAST) return *reinterpret_cast<const uint4*>(from);
  return gathered(from, pixels);
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
      eight[i] = eight_channels(from, height * width);
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
  int first_tile, first_channel, first_out;
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

  // Bits of an octet's channels that are the block's.
  __device__ __forceinline__ unsigned own(int octet) const {
    if (channel_of(octet) >= s.channels) return 0;
    return CHANNELS == 4 ? 0xfu << first_channel - channel_of(0) : 0xffu;
  }

  __device__ __forceinline__ int row_of(int row) const { return SIGNAL ? 0 : row; }

  // The first column of a tile in the output.
  __device__ __forceinline__ int column_of(int tile, int row) const {
    return (SIGNAL ? row : (first_tile + tile) % s.tiles_across) * kTileColumns;
  }

  // The weights of eight channels.
  __device__ __forceinline__ uint4 weights_of(int octet, int tap) const {
    if (channel_of(octet) >= s.channels) return make_uint4(0, 0, 0, 0);
    const ELEMENT* const filter = w + static_cast<long long>(channel_of(octet)) * kTaps;
    return gathered(filter + (TURNED ? kTaps - 1 - tap : tap), kTaps);
  }

  static constexpr int kInRow = kOctets * kTileColumns * kTiles;  // pixels of eight channels

  // The place of a pixel of the block, of eight channels; `column` is one of the tensor.
  struct Place {
    int octet, image, channel, row, column;
  };
  __device__ __forceinline__ Place place_of(int item) const {
    const int octet = item % kOctets, in_tile = item / kOctets % kTileColumns;
    const int tile = item / (kOctets * kTileColumns) % kTiles;
    const int row = first_out + item / kInRow;
    return {octet, (first_tile + tile) / s.tiles_across, channel_of(octet), row_of(row),
            column_of(tile, row) + in_tile};
  }

  __device__ __forceinline__ bool exists(const Place& place) const {
    return place.image < s.images && place.channel < s.channels && place.column < s.out_w;
  }

  // Bits of the channels that are NaN and the block's.
  __device__ __forceinline__ unsigned nan_of(const uint4& outputs, int octet) const {
    const uint2 found = bits_of(outputs);
    return found.x & found.y & own(octet);
  }

  // Computes outputs of a pixel, which `found` has bits for, from their definition.
  __device__ __forceinline__ void write_pixel(const Place& place, unsigned found,
                                              const uint4* vectors) const {
    float sums[8] = {};
#pragma unroll 1
    for (int kh = 0; kh < KERNEL_H; ++kh) {
      const int row = place.row - s.pad_h + kh;
      if (row < 0 || row >= s.in_h) continue;
#pragma unroll 1
      for (int first = 0; first < KERNEL_W; first += kTogether) {
        uint4 inputs[kTogether] = {}, taps[kTogether] = {};
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int kw = first + i, column = place.column - s.pad_w + kw;
          if (kw >= KERNEL_W || column < 0 || column >= s.in_w) continue;
          const long long at = offset(s, place.image, place.channel, row, column, s.in_h, s.in_w);
          inputs[i] = eight_channels(x + at, s.in_h * s.in_w);
          const int tap = kh * KERNEL_W + kw;
          taps[i] = kHasVectors ? vectors[place.octet * kTaps + tap] : weights_of(place.octet, tap);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const unsigned two[4] = {inputs[i].x, inputs[i].y, inputs[i].z, inputs[i].w};
          const unsigned by[4] = {taps[i].x, taps[i].y, taps[i].z, taps[i].w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float2 a = unpack<ELEMENT>(two[j]), b = unpack<ELEMENT>(by[j]);
            sums[2 * j] += a.x * b.x;
            sums[2 * j + 1] += a.y * b.y;
          }
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
  // and does nothing, if there are more than threads, or than a quarter of all.
  template <typename IsWrong>
  __device__ __forceinline__ bool write_few(int end, const IsWrong& is_wrong) const {
    if (threadIdx.x == 0) *listed = 0;
    __syncthreads();
    constexpr int kLoads = 4;  // together
    const int items = (end - first_out) * kInRow, most = min(kThreads, items / 4);
#pragma unroll 1
    for (int begin = threadIdx.x; begin < items; begin += kLoads * kThreads) {
      if (*static_cast<volatile int*>(listed) > most) break;
      uint4 outputs[kLoads] = {};
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        const int item = begin + k * kThreads;
        if (item >= items || !is_wrong(first_out + item / kInRow)) continue;
        const Place place = place_of(item);
        if (!exists(place)) continue;
        outputs[k] = eight_channels(
            y + offset(s, place.image, place.channel, place.row, place.column, s.out_h, s.out_w),
            s.out_h * s.out_w);
      }
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        const int item = begin + k * kThreads;
        const unsigned found = nan_of(outputs[k], item % kOctets);
        if (found == 0) continue;
        const int place = atomicAdd(listed, 1);
        if (place < most) list[place] = item << 8 | static_cast<int>(found);
      }
    }
    __syncthreads();
    const int count = *listed;
    if (count > most) return false;
    uint4* const vectors = reinterpret_cast<uint4*>(bits);
    for (int i = threadIdx.x; kHasVectors && i < kOctets * kTaps; i += kThreads) {
      vectors[i] = weights_of(i / kTaps, i % kTaps);
    }
    __syncthreads();
    if (threadIdx.x < count) {
      const int item = list[threadIdx.x];
      write_pixel(place_of(item >> 8), item & 0xff, vectors);
    }
    return true;
  }

  // Writes NaN to all outputs.
  __device__ __forceinline__ void fill(int end) const {
    const float nan = activate<ACTIVATION>(__uint_as_float(0x7fffffffu));
    const unsigned two = pack<ELEMENT>(nan, nan);
#pragma unroll 1
    for (int item = threadIdx.x; item < kInRow; item += kThreads) {
      const Place place = place_of(item);
      int rows = exists(place) ? end - first_out : 0;
      if (SIGNAL) rows = min(rows, ceil_div(s.out_w - place.column, kTileColumns));
      const unsigned down = row_bytes(s, s.out_w) / 2;
      ELEMENT* to = y + offset(s, place.image, max(place.channel, first_channel), place.row,
                               place.column, s.out_h, s.out_w);
#pragma unroll 1
      for (; rows > 0; --rows, to += down) {
        if (!CHANNELS_LAST) {
#pragma unroll
          for (int i = 0; i < kOctetChannels; ++i) {
            to[static_cast<long long>(i) * s.out_h * s.out_w].bits =
                static_cast<unsigned short>(two);
          }
        } else if (CHANNELS == 4) {
          *reinterpret_cast<uint2*>(to) = make_uint2(two, two);
        } else {
          *reinterpret_cast<uint4*>(to) = make_uint4(two, two, two, two);
        }
      }
    }
  }

  // Returns whether outputs are open: those of channels with a weight that is not finite are not.
  __device__ __forceinline__ bool read_weights() {
    if (threadIdx.x < kOctets) closed[threadIdx.x] = 0xffu & ~own(threadIdx.x);
    __syncthreads();
#pragma unroll 1
    for (int at = threadIdx.x; at < kOctets * kTaps; at += kThreads) {
      const int octet = at / kTaps;
      const uint4 eight = weights_of(octet, at % kTaps);
      const unsigned two[4] = {eight.x, eight.y, eight.z, eight.w};
      unsigned plus = 0, minus = 0, not_finite = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const unsigned value = two[i / 2] >> i % 2 * 16 & 0xffffu, size = value & 0x7fffu;
        plus |= static_cast<unsigned>(size == 0 || value < 0x8000u) << i;
        minus |= static_cast<unsigned>(size == 0 || value >= 0x8000u) << i;
        not_finite |= static_cast<unsigned>(size >= kInfinity) << i;
      }
      weights[at] = make_uint2(plus * kEachByte, minus * kEachByte);
      if (not_finite) atomicOr(reinterpret_cast<int*>(closed + octet), not_finite);
    }
    __syncthreads();
    unsigned all = 0xffu;
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet) all &= closed[octet];
    return all != 0xffu;
  }

  // Reads the input of `count` rows of outputs from `first` on: every `step`-th row.
  __device__ __forceinline__ void read_input(int first, int count, int step) {
    const int items = (count + KERNEL_H - 1 + step - 1) / step * kTiles * kRowWords * kOctets;
#pragma unroll 1
    for (int item = threadIdx.x; item < items; item += kThreads) {
      const int octet = item % kOctets, word = item / kOctets % kRowWords;
      const int tile = item / (kOctets * kRowWords) % kTiles;
      const int i = item / (kOctets * kRowWords * kTiles) * step, row = first - s.pad_h + i;
      const int image = (first_tile + tile) / s.tiles_across, channel = channel_of(octet);
      const int column = column_of(tile, row) - s.pad_w + word * 4;
      uint2 found = make_uint2(0, 0);
      if (image < s.images && channel < s.channels && (SIGNAL || (row >= 0 && row < s.in_h))) {
        found = bits_of_columns(x, s, image, channel, row_of(row), column, s.in_h, s.in_w);
      }
      bits[((i * kOctets + octet) * kTiles + tile) * kRowWords + word] = found;
    }
  }

  // Finds the bits of an item's outputs in every `step`-th row of the filter, from `kh` on. Returns
  // whether a matrix that it depends on has an input that is not finite.
  __device__ __forceinline__ bool find(unsigned (&plus)[kItemWords], unsigned (&minus)[kItemWords],
                                       const uint2* from, int octet, int kh, int step) const {
    bool is_met = false;
#pragma unroll 1
    for (; kh < KERNEL_H; kh += step) {
      const uint2* const words_of_row = from + kh * (kOctets * kTiles * kRowWords);
      unsigned any = 0;
#pragma unroll
      for (int i = 0; i < kItemWords + 2 * (kSteps - 1); ++i) {
        any |= words_of_row[i].x | words_of_row[i].y;
      }
      if (any == 0) continue;
      is_met = true;
      const uint2* const row = weights + (octet * KERNEL_H + kh) * KERNEL_W;
#pragma unroll(kTapWords <= 2 ? kTapWords : 1)
      for (int first = 0; first < kTapWords; ++first) {
        uint2 words[kItemWords + 1];
#pragma unroll
        for (int j = 0; j <= kItemWords; ++j) {
          words[j] = make_uint2(0, 0);
          if (j < kItemWords || 4 * first + 1 < KERNEL_W) words[j] = words_of_row[first + j];
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

  // A lane's part of an output; infinity if it is `plus` or `minus`.
  __device__ __forceinline__ float sum_of(const Place& place, bool plus, bool minus, int lane,
                                          int lanes) const {
    if (plus || minus) return __uint_as_float(plus ? 0x7f800000u : 0xff800000u);
    const ELEMENT* const filter = w + static_cast<long long>(place.channel) * kTaps;
    return exact_sum(x, filter, s, place.image, place.channel, place.row, place.column, lane,
                     lanes);
  }

  __device__ __forceinline__ void write_sum(const Place& place, float sum) const {
    const long long at =
        offset(s, place.image, place.channel, place.row, place.column, s.out_h, s.out_w);
    y[at] = from_float<ELEMENT>(finish(sum, bias, residual, place.channel, at));
  }

  // What is not listed is written by one thread.
  __device__ __noinline__ void write(int image, int channel, int row, int column, bool plus,
                                     bool minus) const {
    const Place place{0, image, channel, row, column};
    write_sum(place, sum_of(place, plus, minus, 0, 1));
  }

  // Lists outputs of an item that are not NaN by the bits that have been read. If the block has
  // stopped, these are all of them, and are listed for their definition. Else those that are NaN
  // in y are listed.
  __device__ __forceinline__ void list_item(int first, int item, bool is_stopped) {
    const int octet = item % kOctets, across = item / kOctets % kItemsAcross;
    const int tile = item / (kOctets * kItemsAcross) % kTiles;
    const int i = item / (kOctets * kItemsAcross * kTiles), row = first + i;
    const int image = (first_tile + tile) / s.tiles_across, channel = channel_of(octet);
    const int column = column_of(tile, row) + across * 16;
    if (image >= s.images || channel >= s.channels || column >= s.out_w) return;
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
    const int step = is_stopped ? 2 : 1;
    const bool is_met = find(plus, minus, from, octet, i % step, step);
    // The rows of zeros before a filter, in a chain of warps, meet other rows of the input.
    if (!is_met && kMissing == 0 && !is_stopped) return;
#pragma unroll 1
    for (int j = 0; j < kItemWords; ++j) {
      const unsigned now_plus = plus[0], now_minus = minus[0];
#pragma unroll
      for (int k = 1; k < kItemWords; ++k) plus[k - 1] = plus[k], minus[k - 1] = minus[k];
      unsigned open = ~(now_plus & now_minus);
      if (open == 0) continue;
      if (!is_stopped) {
        const uint2 now =
            bits_of_columns(y, s, image, channel, row_of(row), column + 4 * j, s.out_h, s.out_w);
        open &= now.x & now.y;
      }
      int place = atomicAdd(listed, __popc(open));
      if (is_stopped && place >= kListed) return;
#pragma unroll 1
      for (; open != 0; open &= open - 1) {
        const int k = 31 - __clz(open & -open);
        const int at = 4 * j + k / 8, of = k % 8;
        const bool is_plus = !is_stopped && (now_plus >> k & 1);
        const bool is_minus = !is_stopped && (now_minus >> k & 1);
        if (place < kListed) {
          const int pixel = ((row - first_out) * kTiles + tile) * kTileColumns + across * 16 + at;
          list[place++] = (pixel * (8 * kOctets) + octet * 8 + of) * 4 + 2 * is_plus + is_minus;
        } else if (!is_stopped) {
          write(image, channel + of, row_of(row), column + at, is_plus, is_minus);
        }
      }
    }
  }

  // Writes what is listed. Eight lanes share a sum of a short list, because they wait for loads.
  __device__ __forceinline__ void write_listed() const {
    const int count = min(*listed, kListed), shift = 2 * count <= kThreads ? 3 : 0;
    const int lanes = 1 << shift, lane = threadIdx.x & (lanes - 1);
#pragma unroll 1
    for (int first = 0; first < count; first += kThreads >> shift) {
      const int i = first + (threadIdx.x >> shift);
      const int one = list[min(i, count - 1)];
      const int channel = one / 4 % (8 * kOctets), pixel = one / (4 * 8 * kOctets);
      const int tile = pixel / kTileColumns % kTiles;
      const int row = first_out + pixel / (kTileColumns * kTiles);
      const Place place{0, (first_tile + tile) / s.tiles_across, channel_of(0) + channel,
                        row_of(row), column_of(tile, row) + pixel % kTileColumns};
      float sum = sum_of(place, one & 2, one & 1, lane, lanes);
#pragma unroll 1
      for (int bits = 1; bits < lanes; bits *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bits);
      if (lane == 0 && i < count) write_sum(place, sum);
    }
  }
};

// Computes outputs of a block again, in rows that `rows` has a bit for. If the block `is_stopped`,
// these are all its rows. Then this returns false, and the block has to be computed again, if more
// than a few outputs may not be NaN.
__device__ __noinline__ bool repair(unsigned char* shared, const ELEMENT* x, const ELEMENT* w,
                                    ELEMENT* y, const ELEMENT* bias, const ELEMENT* residual,
                                    Shape s, int first_tile, int first_channel, int first_out,
                                    int end_out, unsigned rows, bool is_stopped) {
  Repair block{x, w, y, bias, residual, s, first_tile, first_channel, first_out};
  block.use(shared);
  is_stopped = kIsSampled && is_stopped;
  const auto is_wrong = [&](int row) { return (rows >> (row - first_out) % 32 & 1) != 0; };
  if (!is_stopped && block.write_few(end_out, is_wrong)) return true;
  if (!block.read_weights()) return true;
  const int in_row = kOctets * kItemsAcross * kTiles;
  const int most = min(kListed, (end_out - first_out) * block.kInRow / 2);
#pragma unroll 1
  for (int first = first_out, end; first < end_out; first = end) {
    end = first + 1;
    if (!is_wrong(first)) continue;
    // The rows from `first` on that are looked at together.
    end = min(end_out, first + kBitsRows - KERNEL_H + 1);
    while (!is_wrong(end - 1)) --end;
    block.read_input(first, end - first, is_stopped ? 2 : 1);
    if (threadIdx.x == 0 && (first == first_out || !is_stopped)) *block.listed = 0;
    __syncthreads();
#pragma unroll 1
    for (int item = threadIdx.x; item < (end - first) * in_row; item += kThreads) {
      if (is_stopped && *static_cast<volatile int*>(block.listed) > most) break;
      if (is_wrong(first + item / in_row)) block.list_item(first, item, is_stopped);
    }
    __syncthreads();
    const bool is_open = is_stopped && *block.listed > most;
    if (is_stopped && !is_open && end == end_out) block.fill(end_out);
    __syncthreads();
    if (is_open) return false;
    if (!is_stopped || end == end_out) block.write_listed();
    __syncthreads();
  }
  return true;
}
