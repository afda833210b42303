// Pairs of neighbouring elements of a window, each a register of a fragment and one access of 4
// bytes; single elements if they are float32. The pairs of all rows of a window are numbered one
// after the other, so that only the last register may have some to spare: 77 pairs are 80 for
// 7x7x3. What belongs to no window is removed from a pair by a mask. So no product is computed that
// the convolution does not have, and infinities stay where they belong.
//
// A row may begin some elements before the window (`lead`), at most LEADS.

constexpr int TILE_H = (TILE_P - 1) * STRIDE_H + KERNEL_H;  // rows of a plane in a tile
constexpr int TILE_BYTES = PLANES * TILE_H * PITCH * static_cast<int>(sizeof(ELEMENT));
constexpr int PAIR = 4 / sizeof(ELEMENT);                   // elements of a register
constexpr int ROW_PAIRS = (ROW + LEADS + PAIR - 1) / PAIR;  // in a row of a window
constexpr int PAIRS = PLANES * KERNEL_H * ROW_PAIRS;        // in a window
constexpr int REGISTERS = (PAIRS + 3) / 4;                  // a lane has every fourth pair

// The place of a pair, in elements from the begin of the window's pairs.
__device__ __forceinline__ constexpr int pair_offset(int pair) {
  const int known = pair < PAIRS ? pair : PAIRS - 1;
  const int row = known / ROW_PAIRS;
  return (row / KERNEL_H * TILE_H + row % KERNEL_H) * PITCH + known % ROW_PAIRS * PAIR;
}
// The place of pair 4 i + t of this lane. A sum of constants and of what only depends on t.
__device__ __forceinline__ int lane_offset(int i, int t) {
  int offset = pair_offset(4 * i) + PAIR * t;
#pragma unroll
  for (int j = 1; j < 4; ++j) {
    const int jump = pair_offset(4 * i + j) - pair_offset(4 * i + j - 1) - PAIR;
    if (jump != 0) offset += t >= j ? jump : 0;
  }
  return offset;
}
// The bits of a pair that belong to the window.
__device__ __forceinline__ unsigned pair_mask(int pair, int lead) {
  if (pair >= PAIRS) return 0u;
  if (PAIR == 1) return ~0u;
  const int element = pair % ROW_PAIRS * 2 - lead;
  return (element >= 0 && element < ROW ? 0x0000ffffu : 0u) |
         (element >= -1 && element + 1 < ROW ? 0xffff0000u : 0u);
}
__device__ __forceinline__ unsigned lane_mask(int i, int t, int lead) {
  unsigned mask = ~0u;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const unsigned wanted = pair_mask(4 * i + j, lead);
    if (wanted != ~0u) mask = t == j ? wanted : mask;
  }
  return mask;
}

// sums = addends + left * right, of one register of window elements or of two.
template <typename T>
__device__ __forceinline__ void multiply(float (&sums)[4], const unsigned (&left)[2],
                                         const unsigned (&more)[2], const unsigned (&right)[2],
                                         const float (&addends)[4]) {
  if constexpr (PAIR == 2) {
    mma_16x8x16<T>(sums, {left[0], left[1], more[0], more[1]}, right, addends);
  } else {
#pragma unroll
    for (int k = 0; k < 4; ++k) sums[k] = addends[k];
    mma_16x8x8_tf32(sums, {left[0], left[1], more[0], more[1]}, right);
  }
}
template <typename T>
__device__ __forceinline__ void multiply(float (&sums)[4], const unsigned (&left)[2],
                                         unsigned right, const float (&addends)[4]) {
  if constexpr (PAIR == 2) {
    mma_16x8x8<T>(sums, left, right, addends);
  } else {
#pragma unroll
    for (int k = 0; k < 4; ++k) sums[k] = addends[k];
    mma_16x8x8_tf32(sums, {left[0], left[1], 0u, 0u}, {right, 0u});
  }
}
