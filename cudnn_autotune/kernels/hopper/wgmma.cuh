// Matrices in shared memory, as the matrix instruction of a warpgroup (wgmma) reads them without a
// swizzle: in rows of 16 bytes, each at a multiple of 16 bytes. Eight rows that follow each other
// are a core matrix of 8 x 8 numbers.
//
// In a matrix that is not transposed, the 8 numbers of a row follow each other along the sum (k);
// in a transposed one, along the other dimension (m or n). So a tensor whose 8 channels are a row,
// and whose positions follow each other, is both: its positions are m, and channels the sum, or
// positions the sum, and channels m. And since a matrix may begin at any row, it may begin at any
// position: that is how a tap of a filter moves it.
//
// A warpgroup is four warps, the first of which has a number that is a multiple of 4. Each warp
// holds 16 rows of the result, in the fragments of mma: d[4 j + 2 h + i] is that of row g + 8 h and
// column 8 j + 2 t + i, with g = lane / 4 and t = lane % 4.

struct Matrix {
  unsigned long long descriptor;

  // Steps are in rows of 16 bytes: `along_sum` leads from a core matrix to the next one along the
  // sum, `across` to the next one along the other dimension.
  __device__ __forceinline__ static Matrix at(unsigned address, int along_sum, int across) {
    return Matrix{static_cast<unsigned long long>(address >> 4) |
                  static_cast<unsigned long long>(along_sum) << 16 |
                  static_cast<unsigned long long>(across) << 32};
  }
  // The matrix that begins `rows` rows of 16 bytes behind this one.
  __device__ __forceinline__ Matrix operator+(int rows) const {
    return Matrix{descriptor + static_cast<unsigned long long>(rows)};
  }
};

// Adds bias and residual, which may be null, to the first `eights` * 8 columns of a row of a
// result, row g + 8 h of a warp's, and writes what the activation gives for them to shared memory.
// Bias and slope are of the first `filters` columns; where these are fewer than all, there is no
// residual. Only PReLU reads a slope.
template <int activation, int eights, int filters = 8 * eights, typename T, int count>
__device__ __forceinline__ void finish_row(const float (&d)[count], int h, const T* bias,
                                           const T* residual, const T* slope, unsigned char* row) {
  constexpr bool kIsWhole = filters == 8 * eights;
  const auto pair_at = [](const T* from, int at) {
    if (kIsWhole) return reinterpret_cast<const Two<T>*>(from + at)->values();
    return make_float2(at < filters ? to_float(from[at]) : 0.0f,
                       at + 1 < filters ? to_float(from[at + 1]) : 0.0f);
  };
#pragma unroll
  for (int j = 0; j < eights; ++j) {
    const int at = 8 * j + threadIdx.x % 4 * 2;
    float low = d[4 * j + 2 * h], high = d[4 * j + 2 * h + 1];
    if (bias != nullptr) {
      const float2 more = pair_at(bias, at);
      low += more.x;
      high += more.y;
    }
    if (kIsWhole && residual != nullptr) {
      const float2 more = pair_at(residual, at);
      low += more.x;
      high += more.y;
    }
    if (activation == kPrelu) {
      const float2 below = pair_at(slope, at);
      low = low > 0.0f ? low : low * below.x;
      high = high > 0.0f ? high : high * below.y;
    }
    *reinterpret_cast<Two<T>*>(row + at * 2) =
        Two<T>::of(activate<activation>(low), activate<activation>(high));
  }
}

template <typename T>
constexpr bool kIsHalf = false;
template <>
constexpr bool kIsHalf<half> = true;

#ifdef __CUDACC_RTC__

// Makes this thread's writes to shared memory visible to matrix instructions, behind a barrier.
__device__ __forceinline__ void publish_writes() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Comes before the first instruction of a batch, and after registers of its results were written.
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Ends a batch of products.
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until all batches of this warp but the last `pending` are complete.
template <int pending>
__device__ __forceinline__ void products_done() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// Waits until all warps of this warpgroup are here.
__device__ __forceinline__ void sync_warpgroup() {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + threadIdx.x / 128) : "memory");
}

#else

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(static_cast<const unsigned char*>(pointer) -
                               emulation::shared_memory());
}
__device__ __forceinline__ void publish_writes() {}
__device__ __forceinline__ void begin_products() {}
__device__ __forceinline__ void commit_products() { emulation::commit_products(); }
template <int pending>
__device__ __forceinline__ void products_done() {
  emulation::wait_for_products(pending);
}
__device__ __forceinline__ void sync_warpgroup() {
  emulation::yield(emulation::State::at_warpgroup);
}

#endif  // __CUDACC_RTC__
