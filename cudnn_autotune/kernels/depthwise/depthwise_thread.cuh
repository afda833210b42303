// Parts of both depthwise.cu and depthwise_tile.cu: the words of a pixel's channels, and the
// products of a row of pixels with a thread's filters.
//
// Macros: ELEMENT, CHANNELS and COLUMNS of a thread, DGRAD, KH, KW, STRIDE_H, STRIDE_W.

using T = ELEMENT;

constexpr int kSlots = (KH + STRIDE_H - 1) / STRIDE_H;
constexpr int kTapGroups = (KW + STRIDE_W - 1) / STRIDE_W;
#if DGRAD
constexpr int kRowsRead = 1, kRowsWritten = STRIDE_H;
constexpr int kWindow = COLUMNS + kTapGroups - 1, kWritten = COLUMNS * STRIDE_W;
#else
constexpr int kRowsRead = STRIDE_H < KH ? STRIDE_H : KH, kRowsWritten = 1;
constexpr int kWindow = (COLUMNS - 1) * STRIDE_W + KW, kWritten = COLUMNS;
#endif
static_assert(kWindow <= 32 && kWritten <= 32, "columns are bits of a mask");

// The channels of a pixel, as they lie in memory.
template <int bytes>
struct BitsOf;
template <>
struct BitsOf<2> {
  using Type = unsigned short;
};
template <>
struct BitsOf<4> {
  using Type = unsigned;
};
template <>
struct BitsOf<8> {
  using Type = uint2;
};
template <>
struct BitsOf<16> {
  using Type = uint4;
};
using Bits = BitsOf<CHANNELS * sizeof(T)>::Type;

__device__ __forceinline__ void to_words(unsigned short bits, unsigned (&words)[1]) {
  words[0] = bits;
}
__device__ __forceinline__ void to_words(unsigned bits, unsigned (&words)[1]) { words[0] = bits; }
__device__ __forceinline__ void to_words(uint2 bits, unsigned (&words)[2]) {
  words[0] = bits.x, words[1] = bits.y;
}
__device__ __forceinline__ void to_words(uint4 bits, unsigned (&words)[4]) {
  words[0] = bits.x, words[1] = bits.y, words[2] = bits.z, words[3] = bits.w;
}
__device__ __forceinline__ void from_words(const unsigned (&words)[1], unsigned short& bits) {
  bits = static_cast<unsigned short>(words[0]);
}
__device__ __forceinline__ void from_words(const unsigned (&words)[1], unsigned& bits) {
  bits = words[0];
}
__device__ __forceinline__ void from_words(const unsigned (&words)[2], uint2& bits) {
  bits = make_uint2(words[0], words[1]);
}
__device__ __forceinline__ void from_words(const unsigned (&words)[4], uint4& bits) {
  bits = make_uint4(words[0], words[1], words[2], words[3]);
}
constexpr int kWords = (CHANNELS * sizeof(T) + 3) / 4;

template <typename E = T>
__device__ __forceinline__ void to_floats(Bits bits, float (&values)[CHANNELS]) {
  unsigned words[kWords];
  to_words(bits, words);
  if constexpr (sizeof(E) == 4) {
#pragma unroll
    for (int v = 0; v < CHANNELS; ++v) values[v] = __uint_as_float(words[v]);
  } else if constexpr (CHANNELS == 1) {
    values[0] = unpack<E>(words[0]).x;
  } else {
#pragma unroll
    for (int v = 0; v < CHANNELS; v += 2) {
      const float2 two = unpack<E>(words[v / 2]);
      values[v] = two.x, values[v + 1] = two.y;
    }
  }
}
template <typename E = T>
__device__ __forceinline__ Bits to_bits(const float (&values)[CHANNELS]) {
  unsigned words[kWords];
  if constexpr (sizeof(E) == 4) {
#pragma unroll
    for (int v = 0; v < CHANNELS; ++v) words[v] = __float_as_uint(values[v]);
  } else if constexpr (CHANNELS == 1) {
    words[0] = pack<E>(values[0], 0.0f);
  } else {
#pragma unroll
    for (int v = 0; v < CHANNELS; v += 2) words[v / 2] = pack<E>(values[v], values[v + 1]);
  }
  Bits bits;
  from_words(words, bits);
  return bits;
}

// Keeps the compiler from computing an address again, from its parts, at each use.
template <typename Pointer>
__device__ __forceinline__ Pointer kept(Pointer pointer) {
#ifdef __CUDACC_RTC__
  asm("" : "+l"(pointer));
  __builtin_assume(__isGlobal(pointer));
#endif
  return pointer;
}

// Returns bit j if column first + j * pitch is one of `width`.
template <int count>
__device__ __forceinline__ unsigned columns_inside(int first, int pitch, int width) {
  unsigned mask = 0;
#pragma unroll
  for (int j = 0; j < count; ++j) {
    const int column = first + j * pitch;
    if (column >= 0 && column < width) mask |= 1u << j;
  }
  return mask;
}

// Adds a row that was read to the sums. `phase` is its phase in x where x is read; `begins`
// says whether it is the first one of a step, when the sums move down a slot.
__device__ __forceinline__ void add_products(
    float (&sums)[kSlots][kRowsWritten][kWritten][CHANNELS], const float (&row)[kWindow][CHANNELS],
    const float (&filter)[KH][KW][CHANNELS], int phase, bool begins, int step, int rows) {
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    // Many slots are worth a branch: tiles waste kSlots - 1 rows of products without it.
    const int index = step + slot - (kSlots - 1);
    if (kSlots > 3 && (index < 0 || index >= rows)) continue;
#pragma unroll
    for (int q = 0; q < kRowsWritten; ++q) {
      const int kh = DGRAD ? q + STRIDE_H * slot : phase + STRIDE_H * (kSlots - 1 - slot);
      // The last slot with a tap of this phase begins with zero.
      const bool is_last = slot + 1 == kSlots || (DGRAD && kh + STRIDE_H >= KH);
      if (begins) {
#pragma unroll
        for (int j = 0; j < kWritten; ++j) {
#pragma unroll
          for (int v = 0; v < CHANNELS; ++v) {
            sums[slot][q][j][v] = is_last ? 0.0f : sums[slot + 1 < kSlots ? slot + 1 : 0][q][j][v];
          }
        }
      }
      if (kh >= KH) continue;
#pragma unroll
      for (int kw = 0; kw < KW; ++kw) {
#pragma unroll
        for (int t = 0; t < COLUMNS; ++t) {
          const int from = DGRAD ? t + kTapGroups - 1 - kw / STRIDE_W : t * STRIDE_W + kw;
          const int to = DGRAD ? t * STRIDE_W + kw % STRIDE_W : t;
#pragma unroll
          for (int v = 0; v < CHANNELS; ++v) {
            sums[slot][q][to][v] += row[from][v] * filter[kh][kw][v];
          }
        }
      }
    }
  }
}
