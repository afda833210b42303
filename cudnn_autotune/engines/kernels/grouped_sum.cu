// Adds up `parts` arrays of `count` sums in float32, which follow one another, and rounds: the end
// of a gradient of weights whose pixels were divided among blocks. A block computes 32 elements.
// Warp w adds parts w, w + 8, ..., then the first warp adds the warps' sums, so the order is always
// the same.

constexpr int kWarps = 8;

extern "C" __global__ void __launch_bounds__(32 * kWarps)
    grouped_sum(const float* sums, ELEMENT* result, int parts, int count) {
  DYNAMIC_SHARED(shared);
  float* const of_warps = reinterpret_cast<float*>(shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const long long element = blockIdx.x * 32LL + lane;
  float sum = 0.0f;
  if (element < count) {
#pragma unroll 4
    for (int part = warp; part < parts; part += kWarps) {
      sum += sums[static_cast<long long>(part) * count + element];
    }
  }
  of_warps[threadIdx.x] = sum;
  __syncthreads();
  if (warp == 0 && element < count) {
#pragma unroll
    for (int other = 1; other < kWarps; ++other) sum += of_warps[other * 32 + lane];
    result[element] = from_float<ELEMENT>(sum);
  }
}
