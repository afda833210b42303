// Folds batch norms into the weights and biases of several convolutions, and lays the weights out:
//
//   folded weight = weight * s,  s = scale / sqrt(variance + eps) for each output channel
//   folded bias = (bias - mean) * s + shift
//
// It computes in float32 and rounds once. A vector that is not given has no part in it.
//
// A weight is (rows, columns, turns), or (rows, turns, columns), dense, where the last index is the
// fastest, and a row is an output channel. It keeps its order, or gets the other one.
//
// A block works on some rows of one weight. DRAM bounds it: a thread moves 16 bytes or more at once
// where the order stays. Where it changes, a warp reads with a stride, and the sectors that it
// leaves are in the L1 cache for the warps beside it.

constexpr int kMost = 40;    // weights of a launch
constexpr int kVectors = 5;  // those of an output channel
enum Vector { kScale, kVariance, kMean, kBias, kShift };
constexpr int kPiece = 8;  // numbers that a thread moves at once

// csrc/weights/weights_cuda.cpp has the same.
struct Item {
  const void* weight;
  void* folded_weight;
  const void* vectors[kVectors];  // null: not given
  void* folded_bias;              // null: there is none
  float eps;
  int kinds;  // two bits for each vector, the first one lowest: 0 float, 1 half, 2 bfloat16
  int rows;
  int columns, turns;  // their product is the length of a row
  int is_turned;       // whether the order changes, from (columns, turns)
  int first_block;
  int rows_per_block;
};
struct Items {
  Item all[kMost];
  int count;
};

__device__ __forceinline__ float number(const Item& item, Vector vector, int row) {
  const void* const values = item.vectors[vector];
  switch ((item.kinds >> (2 * vector)) & 3) {
    case 0:
      return static_cast<const float*>(values)[row];
    case 1:
      return to_float(static_cast<const half*>(values)[row]);
    default:
      return to_float(static_cast<const bfloat16*>(values)[row]);
  }
}
__device__ __forceinline__ float number_or(const Item& item, Vector vector, int row, float other) {
  return item.vectors[vector] == nullptr ? other : number(item, vector, row);
}
__device__ __forceinline__ float scale_of(const Item& item, int row) {
  const float scale = number_or(item, kScale, row, 1.0f);
  if (item.vectors[kVariance] == nullptr) return scale;
  return scale / sqrtf(number(item, kVariance, row) + item.eps);
}

template <typename T>
struct alignas(sizeof(T) * kPiece > 16 ? 16 : sizeof(T) * kPiece) Piece {
  T numbers[kPiece];
};

__device__ __forceinline__ bool is_aligned(const void* pointer) {
  return reinterpret_cast<unsigned long long>(pointer) % 16 == 0;
}

// The rows [first, last) in the order that they have.
__device__ __forceinline__ void keep(const Item& item, int first, int last) {
  const int length = item.columns * item.turns;
  const WEIGHT* const source = static_cast<const WEIGHT*>(item.weight);
  FOLDED* const target = static_cast<FOLDED*>(item.folded_weight);
  const long long begin = static_cast<long long>(first) * length;
  if (length % kPiece == 0 && is_aligned(source) && is_aligned(target)) {
    const int pieces_of_row = length / kPiece;
    const int pieces = (last - first) * pieces_of_row;
    for (int i = threadIdx.x; i < pieces; i += THREADS) {
      const float scale = scale_of(item, first + i / pieces_of_row);
      const Piece<WEIGHT> from = reinterpret_cast<const Piece<WEIGHT>*>(source + begin)[i];
      Piece<FOLDED> to;
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        to.numbers[j] = from_float<FOLDED>(to_float(from.numbers[j]) * scale);
      }
      reinterpret_cast<Piece<FOLDED>*>(target + begin)[i] = to;
    }
    return;
  }
  const int numbers = (last - first) * length;
  for (int i = threadIdx.x; i < numbers; i += THREADS) {
    const float scale = scale_of(item, first + i / length);
    target[begin + i] = from_float<FOLDED>(to_float(source[begin + i]) * scale);
  }
}

// The rows [first, last), from (columns, turns) to (turns, columns).
__device__ __forceinline__ void turn(const Item& item, int first, int last) {
  const int length = item.columns * item.turns;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int lines = (last - first) * item.turns;
  for (int line = warp; line < lines; line += THREADS / 32) {
    const int row = first + line / item.turns, place = line % item.turns;
    const float scale = scale_of(item, row);
    const long long begin = static_cast<long long>(row) * length;
    const WEIGHT* const source = static_cast<const WEIGHT*>(item.weight) + begin + place;
    FOLDED* const target = static_cast<FOLDED*>(item.folded_weight) + begin + place * item.columns;
#pragma unroll 4
    for (int column = lane; column < item.columns; column += 32) {
      target[column] = from_float<FOLDED>(to_float(source[column * item.turns]) * scale);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) fold_weights(const Items items) {
  int place = 0;
  while (place + 1 < items.count &&
         static_cast<int>(blockIdx.x) >= items.all[place + 1].first_block) {
    ++place;
  }
  const Item& item = items.all[place];
  const int first = (static_cast<int>(blockIdx.x) - item.first_block) * item.rows_per_block;
  const int last = min(first + item.rows_per_block, item.rows);
  if (item.is_turned) {
    turn(item, first, last);
  } else {
    keep(item, first, last);
  }
  if (item.folded_bias == nullptr) return;
  for (int row = first + static_cast<int>(threadIdx.x); row < last; row += THREADS) {
    const float centred = number_or(item, kBias, row, 0.0f) - number_or(item, kMean, row, 0.0f);
    const float bias = centred * scale_of(item, row) + number_or(item, kShift, row, 0.0f);
    static_cast<FOLDED*>(item.folded_bias)[row] = from_float<FOLDED>(bias);
  }
}
