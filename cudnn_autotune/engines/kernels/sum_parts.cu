// Adds arrays of `count` numbers that lie one after the other, always in the same order. A warp
// adds 32 neighbouring numbers of every WARPS-th array, and the block adds its warps' sums.

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    sum_parts(const float* __restrict__ parts, ELEMENT* __restrict__ result, int arrays,
              int count) {
  DYNAMIC_SHARED(shared);
  auto* const sums = reinterpret_cast<float*>(shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int place = blockIdx.x * 32 + lane;
  float sum = 0.0f;
  if (place < count) {
#pragma unroll 4
    for (int i = warp; i < arrays; i += WARPS) {
      sum += parts[static_cast<long long>(i) * count + place];
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (warp == 0 && place < count) {
    for (int i = 1; i < WARPS; ++i) sum += sums[32 * i + lane];
    result[place] = from_float<ELEMENT>(sum);
  }
}
