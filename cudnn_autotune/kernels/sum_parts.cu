// Adds arrays of `count` numbers that lie one after the other, always in the same order. A thread
// adds NUMBERS neighbouring numbers of every PARTS-th array, and the block adds its PARTS sums.

struct alignas(NUMBERS * sizeof(float)) Sums {
  float numbers[NUMBERS];
};
struct alignas(NUMBERS * sizeof(ELEMENT)) Results {
  ELEMENT numbers[NUMBERS];
};

extern "C" __global__ void __launch_bounds__(32 * PARTS * COLUMNS)
    sum_parts(const float* __restrict__ parts, ELEMENT* __restrict__ result, int arrays,
              int count) {
  DYNAMIC_SHARED(shared);
  auto* const sums = reinterpret_cast<Sums*>(shared);
  constexpr int kAcross = 32 * COLUMNS;
  const int column = threadIdx.x % kAcross, part = threadIdx.x / kAcross;
  // A block whose size does not divide 2^31 may reach beyond it.
  const unsigned place = (blockIdx.x * kAcross + column) * NUMBERS;
  Sums sum = {};
  const bool exists = place < static_cast<unsigned>(count);
  if (exists) {
#pragma unroll 8
    for (int i = part; i < arrays; i += PARTS) {
      const Sums more =
          *reinterpret_cast<const Sums*>(parts + (static_cast<long long>(i) * count + place));
#pragma unroll
      for (int n = 0; n < NUMBERS; ++n) sum.numbers[n] += more.numbers[n];
    }
  }
  if (PARTS > 1) {
    sums[threadIdx.x] = sum;
    __syncthreads();
  }
  if (part == 0 && exists) {
    for (int i = 1; i < PARTS; ++i) {
#pragma unroll
      for (int n = 0; n < NUMBERS; ++n) sum.numbers[n] += sums[kAcross * i + column].numbers[n];
    }
    Results results;
#pragma unroll
    for (int n = 0; n < NUMBERS; ++n) results.numbers[n] = from_float<ELEMENT>(sum.numbers[n]);
    *reinterpret_cast<Results*>(result + place) = results;
  }
}
