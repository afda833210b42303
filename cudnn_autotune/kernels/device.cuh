// Types and instructions that the kernels share. NVRTC compiles the kernels without any header of
// CUDA's, so nothing has to be installed. Tests compile the same sources for a CPU, where
// tests/support/cuda_emulation/emulation.h provides the instructions.
//
// Fragments of a matrix are spread over the lanes of a warp as PTX defines it: with
// g = lane / 4 and t = lane % 4, a register of a holds row g (or g + 8), columns 2t and 2t + 1.

struct half {
  unsigned short bits;
};
struct bfloat16 {
  unsigned short bits;
};

#ifdef __CUDACC_RTC__

// The block's dynamic shared memory, aligned to 128 bytes.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

__device__ __forceinline__ float to_float(half value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}
__device__ __forceinline__ float to_float(bfloat16 value) {
  return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}

// Two numbers in one register, the first one in the lower half, rounded to the nearest.
template <typename T>
__device__ __forceinline__ unsigned pack(float low, float high);
template <>
__device__ __forceinline__ unsigned pack<half>(float low, float high) {
  unsigned result;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
#else
  unsigned short bits[2];
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits[0]) : "f"(low));
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits[1]) : "f"(high));
  result = bits[0] | (static_cast<unsigned>(bits[1]) << 16);
#endif
  return result;
}
__device__ __forceinline__ unsigned bfloat16_bits(float value) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;  // NaN
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
template <>
__device__ __forceinline__ unsigned pack<bfloat16>(float low, float high) {
#if __CUDA_ARCH__ >= 800
  unsigned result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
#else
  return bfloat16_bits(low) | (bfloat16_bits(high) << 16);
#endif
}

#if __CUDA_ARCH__ >= 800

// All lanes of a warp must execute an mma together. It is volatile so that the compiler does not
// move it behind a branch where only some of them use its result.

// d = c + a * b, with a of 16 x 16, b of 16 x 8, c and d of 16 x 8 in float32.
template <typename T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const unsigned (&a)[4],
                                            const unsigned (&b)[2], const float (&c)[4]);
template <>
__device__ __forceinline__ void mma_16x8x16<half>(float (&d)[4], const unsigned (&a)[4],
                                                  const unsigned (&b)[2], const float (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}
template <>
__device__ __forceinline__ void mma_16x8x16<bfloat16>(float (&d)[4], const unsigned (&a)[4],
                                                      const unsigned (&b)[2], const float (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}
// d = c + a * b, with a of 16 x 8, b of 8 x 8, c and d of 16 x 8 in float32.
template <typename T>
__device__ __forceinline__ void mma_16x8x8(float (&d)[4], const unsigned (&a)[2], unsigned b,
                                           const float (&c)[4]);
template <>
__device__ __forceinline__ void mma_16x8x8<half>(float (&d)[4], const unsigned (&a)[2], unsigned b,
                                                 const float (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
template <>
__device__ __forceinline__ void mma_16x8x8<bfloat16>(float (&d)[4], const unsigned (&a)[2],
                                                     unsigned b, const float (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// d += a * b
template <typename T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const unsigned (&a)[4],
                                            const unsigned (&b)[2]) {
  mma_16x8x16<T>(d, a, b, d);
}
template <typename T>
__device__ __forceinline__ void mma_16x8x8(float (&d)[4], const unsigned (&a)[2], unsigned b) {
  mma_16x8x8<T>(d, a, b, d);
}

// Rounds to TF32, which has 10 bits of mantissa. It takes two instructions.
__device__ __forceinline__ unsigned to_tf32(float value) {
  unsigned result;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(value));
  return result;
}
// Loads a number, or two neighbouring ones, from shared memory.
__device__ __forceinline__ float load_number(const void* from) {
  return *static_cast<const float*>(from);
}
__device__ __forceinline__ float2 load_two_numbers(const void* from) {
  return *static_cast<const float2*>(from);
}
// d += a * b in TF32, with a of 16 x 8, b of 8 x 8. A register holds one number: a[0] that of row g
// and column t, a[1] of row g + 8, a[2] of column t + 4, a[3] of both; b[0] that of row t and
// column g, b[1] of row t + 4.
__device__ __forceinline__ void mma_16x8x8_tf32(float (&d)[4], const unsigned (&a)[4],
                                                const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Loads 8 x 8 matrices of 16-bit numbers from shared memory. Lane 8 i + r gives the address of row
// r of matrix i, 16 bytes at a multiple of 16. Register i of a lane receives row g, columns 2t and
// 2t + 1 of matrix i; if transposed, column g, rows 2t and 2t + 1. The addresses of further lanes
// are ignored, but must be valid.
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}
__device__ __forceinline__ void load_matrices(unsigned (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row)));
}
__device__ __forceinline__ void load_matrices(unsigned (&r)[1], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
               : "=r"(r[0])
               : "r"(shared_address(row)));
}
__device__ __forceinline__ void load_transposed(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}
__device__ __forceinline__ void load_transposed(unsigned (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row)));
}
__device__ __forceinline__ void load_transposed(unsigned (&r)[1], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
               : "=r"(r[0])
               : "r"(shared_address(row)));
}

// Copies 4, 8 or 16 bytes, aligned to as many, from global to shared memory; zeros if not `valid`,
// and then `source` is not read. The copy is complete after copies_arrived() of its group.
template <int bytes>
__device__ __forceinline__ void copy_async(void* target, const void* source, bool valid = true) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "what cp.async copies");
  const int read = valid ? bytes : 0;
  if (bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(target)),
                 "l"(source), "r"(read)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(target)),
                 "l"(source), "n"(bytes), "r"(read)
                 : "memory");
  }
}
// As copy_async<16>, but through the L1 cache. It is faster on an H200 where blocks copy what
// others of the multiprocessor copied, and where threads that read next to each other write to
// places that are far apart.
__device__ __forceinline__ void copy_async_cached(void* target, const void* source, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(target)),
               "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}
// As copy_async<16>, of the first `bytes` of 16, from 0 to all; zeros behind them.
__device__ __forceinline__ void copy_async_some(void* target, const void* source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(target)),
               "l"(source), "r"(bytes)
               : "memory");
}
// Ends a group of this thread's copies.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until all groups of this thread but the last `pending` are complete. Other threads see them
// after a __syncthreads().
template <int pending>
__device__ __forceinline__ void copies_arrived() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

#endif  // __CUDA_ARCH__ >= 800

#else

#define DYNAMIC_SHARED(name) unsigned char* const name = emulation::shared_memory()

__device__ __forceinline__ float to_float(half value) {
  return emulation::convert_half(value.bits);
}
__device__ __forceinline__ float to_float(bfloat16 value) {
  return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}
template <typename T>
__device__ __forceinline__ unsigned pack(float low, float high);
template <>
__device__ __forceinline__ unsigned pack<half>(float low, float high) {
  return emulation::to_half(low) | (static_cast<unsigned>(emulation::to_half(high)) << 16);
}
template <>
__device__ __forceinline__ unsigned pack<bfloat16>(float low, float high) {
  return emulation::to_bfloat16(low) | (static_cast<unsigned>(emulation::to_bfloat16(high)) << 16);
}
template <typename T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const unsigned (&a)[4],
                                            const unsigned (&b)[2]) {
  emulation::mma<16, T>(d, a, b);
}
template <typename T>
__device__ __forceinline__ void mma_16x8x8(float (&d)[4], const unsigned (&a)[2], unsigned b) {
  emulation::mma<8, T>(d, a, &b);
}
template <typename T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const unsigned (&a)[4],
                                            const unsigned (&b)[2], const float (&c)[4]) {
  for (int i = 0; i < 4; ++i) d[i] = c[i];
  emulation::mma<16, T>(d, a, b);
}
template <typename T>
__device__ __forceinline__ void mma_16x8x8(float (&d)[4], const unsigned (&a)[2], unsigned b,
                                           const float (&c)[4]) {
  for (int i = 0; i < 4; ++i) d[i] = c[i];
  emulation::mma<8, T>(d, a, &b);
}

#endif  // __CUDACC_RTC__

__device__ __forceinline__ float to_float(float value) { return value; }

template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ half from_float<half>(float value) {
  return half{static_cast<unsigned short>(pack<half>(value, 0.0f))};
}
template <>
__device__ __forceinline__ bfloat16 from_float<bfloat16>(float value) {
  return bfloat16{static_cast<unsigned short>(pack<bfloat16>(value, 0.0f))};
}

// The two numbers of a register, as pack() made it.
template <typename T>
__device__ __forceinline__ float2 unpack(unsigned two) {
  return make_float2(to_float(T{static_cast<unsigned short>(two)}),
                     to_float(T{static_cast<unsigned short>(two >> 16)}));
}

// Two neighbouring numbers in memory.
template <typename T>
struct Two {
  unsigned bits;
  __device__ __forceinline__ static Two of(float low, float high) {
    return Two{pack<T>(low, high)};
  }
  __device__ __forceinline__ float2 values() const { return unpack<T>(bits); }
};
template <>
struct Two<float> {
  float2 both;
  __device__ __forceinline__ static Two of(float low, float high) {
    return Two{make_float2(low, high)};
  }
  __device__ __forceinline__ float2 values() const { return both; }
};

#ifndef ACTIVATION_PARAMETER
#define ACTIVATION_PARAMETER 0.0f
#endif

// The activations that a convolution can be fused with, by the number that the macro ACTIVATION
// gives: 0 none, 1 relu, 2 silu, 3 gelu, 4 gelu_tanh, 5 sigmoid, 6 hardswish, 7 relu6, 8 tanh,
// 9 mish, 10 leaky_relu, 11 elu. NaN stays NaN. The slope of leaky_relu and the alpha of elu are
// the macro ACTIVATION_PARAMETER. 12 is prelu, which kernels compute that know a number's channel.
constexpr int kPrelu = 12;
template <int activation>
__device__ __forceinline__ float activate(float x) {
  switch (activation) {
    case 1:
      return x < 0.0f ? 0.0f : x;
    case 2:
      return x / (1.0f + expf(-x));
    case 3:
      return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    case 4:
      return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    case 5:
      return 1.0f / (1.0f + expf(-x));
    case 6: {
      const float gate = x + 3.0f;
      return x * (gate < 0.0f ? 0.0f : gate > 6.0f ? 6.0f : gate) * (1.0f / 6.0f);
    }
    case 7:
      return x < 0.0f ? 0.0f : x > 6.0f ? 6.0f : x;
    case 8:
      return tanhf(x);
    case 9: {
      // x * tanh(log(1 + e)) with e = exp(x), as a fraction of polynomials of e. From 20 on it is
      // x.
      const float e = expf(x < 20.0f ? x : 20.0f);
      const float n = e * (e + 2.0f);
      return x * (n / (n + 2.0f));
    }
    case 10:
      return x > 0.0f ? x : x * ACTIVATION_PARAMETER;
    case 11:
      return x > 0.0f ? x : expm1f(x) * ACTIVATION_PARAMETER;
    default:
      return x;
  }
}
