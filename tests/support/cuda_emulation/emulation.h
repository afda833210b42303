// Runs a CUDA kernel on a CPU, for tests without a GPU: each thread is a fibre, the fibres of a
// warp meet in collective instructions, and those of a block in __syncthreads(). What CUDA leaves
// undefined is an error here where it can be seen: lanes that meet in different instructions,
// misaligned accesses, shared memory that is written out of bounds or read before it is written
// (it is full of NaN), copies to shared memory and products of a warpgroup that nobody waited for
// (they are done as late as possible), blocks that wait for each other for ever. Blocks, warps and
// lanes run in their order or, if `reversed`, from the last to the first, so that a missing barrier
// gives another result. Then copies are done as early as possible, so that one that overwrites what
// a product still reads does too.
//
// So many blocks are `resident` at a time; another one starts when one of them ends. With a `seed`
// they start in a random order, and take turns at random barriers.
//
// This header is what a kernel is compiled with; emulation.cpp, which runs it, is compiled once.
#pragma once

#if !defined(__x86_64__)
#error "the emulation switches stacks in assembly of x86-64"
#endif

#include <cstdint>
#include <cstring>
#include <type_traits>

// What kernels call of <cmath>, most of which takes longer to parse than a kernel to compile.
extern "C" {
float erff(float) noexcept;
float expf(float) noexcept;
float expm1f(float) noexcept;
float sqrtf(float) noexcept;
float tanhf(float) noexcept;
}

struct dim3 {
  unsigned x, y, z;
};
struct alignas(4) ushort2 {
  unsigned short x, y;
};
struct alignas(8) ushort4 {
  unsigned short x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline ushort2 make_ushort2(unsigned short x, unsigned short y) { return {x, y}; }
inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z,
                            unsigned short w) {
  return {x, y, z, w};
}
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __restrict__
#define __constant__ static
#define __launch_bounds__(...)
#define __shared__ static_assert(false, "only DYNAMIC_SHARED is emulated");

struct half;
struct bfloat16;

namespace emulation {

constexpr int kLanes = 32;
constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kBandBytes = 1 << 10;
constexpr unsigned kFullMask = 0xffffffffu;

enum class State { ready, at_collective, at_warpgroup, at_barrier, waits_for_blocks, done };
using Collective = void (*)(void* const* arguments);  // of all lanes

struct Thread {
  void* stack_pointer = nullptr;
  State state = State::ready;
  Collective collective = nullptr;
  void* arguments = nullptr;
  dim3 index{};
  int lane = 0;
};

extern Thread* current;
extern dim3 block_index, block_size, grid_size;
extern unsigned char* shared_start;
extern int* any_of_block;  // what __syncthreads_or() finds

// The first failure of a run is its result.
void fail(const char* what);
// Lets other threads run until this one's state is ready again.
void yield(State state);
// Lets other blocks run; what a thread calls that waits for them.
void wait_for_blocks();
// Clock cycles, which pass while blocks wait.
extern long long cycles;
// Returns when all lanes of the warp have called it with the same function, which has run.
void collective(Collective what, void* arguments);

// The rows and columns of registers are those of the PTX manual, "Matrix Fragments for mma". k is 8
// or 16, T is half or bfloat16.
template <int k, typename T>
void mma(float (&d)[4], const unsigned* a, const unsigned* b);
void mma_tf32(float (&d)[4], const unsigned* a, const unsigned* b);
// The rows of 16 x n of a product of a warpgroup that this warp holds. Of the matrices in shared
// memory, descriptors tell the places of the rows of 16 bytes, as the PTX manual has it in "Matrix
// Descriptor" and "Canonical Layouts".
void wgmma(float* d, int n, float (*to_float)(unsigned short), uint64_t a, uint64_t b,
           bool transposed_a, bool transposed_b);
// The same with a in registers, as those of mma<16, T>.
void wgmma(float* d, int n, float (*to_float)(unsigned short), const unsigned (&a)[4], uint64_t b,
           bool transposed_b);
// Such products are done when products_done() waits for their batch.
void commit_products();
void wait_for_products(int pending);
// Matrices of 8 x 8 half words, 1, 2 or 4.
template <int matrices, bool transposed>
void load(unsigned (&registers)[matrices], const void* row);
// Neighbouring words of 4 bytes, 1 or 2, which as many lanes load at a time as take 128 bytes.
template <int words>
void load_words(unsigned (&registers)[words], const void* from);
// Asynchronous copies, which are done when copies_arrived() waits for their group, or at once.
void copy(void* target, const void* source, int bytes, bool valid);
void commit();
void wait(int pending);

inline unsigned char* shared_memory() { return shared_start; }

inline float from_half(unsigned short bits) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}
// Numbers of 16 bits that threads have converted to multiply them one by one.
extern long long numbers_converted;
inline float convert_half(unsigned short bits) {
  ++numbers_converted;
  return from_half(bits);
}
inline unsigned short to_half(float value) {
  const auto rounded = static_cast<_Float16>(value);
  unsigned short bits;
  std::memcpy(&bits, &rounded, 2);
  return bits;
}
inline unsigned short to_bfloat16(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline float from_bfloat16(unsigned short bits) {
  const unsigned wide = static_cast<unsigned>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

template <typename T, int n>
void wgmma(float (&d)[n / 2], uint64_t a, uint64_t b, bool transposed_a, bool transposed_b) {
  wgmma(d, n, std::is_same<T, half>::value ? from_half : from_bfloat16, a, b, transposed_a,
        transposed_b);
}
template <typename T, int n>
void wgmma(float (&d)[n / 2], const unsigned (&a)[4], uint64_t b, bool transposed_b) {
  wgmma(d, n, std::is_same<T, half>::value ? from_half : from_bfloat16, a, b, transposed_b);
}

template <typename T>
struct ShuffleArguments {
  T value;
  int source;
  T result;
};

template <typename T>
T shuffle(unsigned mask, T value, int source) {
  if (mask != kFullMask) fail("only shuffles of all lanes are emulated");
  ShuffleArguments<T> mine{value, source, value};
  collective(
      [](void* const* lanes) {
        for (int lane = 0; lane < kLanes; ++lane) {
          auto& to = *static_cast<ShuffleArguments<T>*>(lanes[lane]);
          if (to.source < 0 || to.source >= kLanes) continue;
          to.result = static_cast<ShuffleArguments<T>*>(lanes[to.source])->value;
        }
      },
      &mine);
  return mine.result;
}

const char* run(void (*body)(void**), void** arguments, const unsigned* grid, const unsigned* block,
                unsigned shared_bytes, bool reversed, unsigned resident, unsigned seed,
                unsigned first_block);

template <auto kernel, typename... Arguments>
const char* run(void (*)(Arguments...), int count, const unsigned* grid, const unsigned* block,
                unsigned shared_bytes, void** arguments, bool reversed, unsigned resident,
                unsigned seed, unsigned first_block) {
  if (count != sizeof...(Arguments)) return "the kernel takes another number of arguments";
  const auto body = [](void** arguments) {
    // Braces, so that the arguments are taken in their order.
    struct Call {
      explicit Call(Arguments... values) { kernel(values...); }
    };
    Call{*static_cast<std::remove_reference_t<Arguments>*>(*arguments++)...};
  };
  return run(body, arguments, grid, block, shared_bytes, reversed, resident, seed, first_block);
}

}  // namespace emulation

#define threadIdx (emulation::current->index)
#define blockIdx (emulation::block_index)
#define blockDim (emulation::block_size)
#define gridDim (emulation::grid_size)
#define warpSize 32

inline void __syncthreads() { emulation::yield(emulation::State::at_barrier); }
inline int __syncthreads_or(int is_true) {
  *emulation::any_of_block |= is_true != 0;
  __syncthreads();
  const int result = *emulation::any_of_block;
  __syncthreads();
  *emulation::any_of_block = 0;
  __syncthreads();
  return result;
}
inline void __threadfence() {}
inline void __syncwarp(unsigned mask = emulation::kFullMask) {
  if (mask != emulation::kFullMask) emulation::fail("only __syncwarp() of all lanes is emulated");
  emulation::collective([](void* const*) {}, nullptr);
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int source) {
  return emulation::shuffle(mask, value, source % 32);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return emulation::shuffle(mask, value, emulation::current->lane ^ bits);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned by) {
  return emulation::shuffle(mask, value, emulation::current->lane + static_cast<int>(by));
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned by) {
  return emulation::shuffle(mask, value, emulation::current->lane - static_cast<int>(by));
}
inline int __any_sync(unsigned mask, int is_true) {
  for (int bits = emulation::kLanes / 2; bits > 0; bits /= 2) {
    is_true |= __shfl_xor_sync(mask, is_true, bits);
  }
  return is_true;
}
template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T atomicAdd(T* address, T value) {
  const T old = *address;
  *address = old + value;
  return old;
}
template <typename T>
T atomicMin(T* address, T value) {
  const T old = *address;
  if (value < old) *address = value;
  return old;
}
template <typename T>
T atomicCAS(T* address, T expected, T value) {
  const T old = *address;
  if (old == expected) *address = value;
  return old;
}
inline long long clock64() { return emulation::cycles; }
inline int atomicOr(int* address, int value) {
  const int old = *address;
  *address = old | value;
  return old;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = low | (static_cast<uint64_t>(high) << 32);
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<unsigned>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  }
  return result;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  const uint64_t bits = low | (static_cast<uint64_t>(high) << 32);
  return static_cast<unsigned>(bits >> (shift & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  const uint64_t bits = low | (static_cast<uint64_t>(high) << 32);
  return static_cast<unsigned>(bits << (shift & 31) >> 32);
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(bits); }
template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float a, float b) { return a / b; }

// The instructions of device.cuh.
inline unsigned to_tf32(float value) {
  if (value != value) return 0x7fffe000u;
  return (__float_as_uint(value) + 0x1000u) & ~0x1fffu;  // to the nearest, ties away from zero
}
inline float load_number(const void* from) {
  unsigned word[1];
  emulation::load_words(word, from);
  return __uint_as_float(word[0]);
}
inline float2 load_two_numbers(const void* from) {
  unsigned words[2];
  emulation::load_words(words, from);
  return make_float2(__uint_as_float(words[0]), __uint_as_float(words[1]));
}
inline void mma_16x8x8_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  emulation::mma_tf32(d, a, b);
}
template <int matrices>
void load_matrices(unsigned (&registers)[matrices], const void* row) {
  emulation::load<matrices, false>(registers, row);
}
template <int matrices>
void load_transposed(unsigned (&registers)[matrices], const void* row) {
  emulation::load<matrices, true>(registers, row);
}
template <int bytes>
void copy_async(void* target, const void* source, bool valid = true) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "what cp.async copies");
  const auto place = reinterpret_cast<uintptr_t>(target);
  if (place % bytes || (valid && reinterpret_cast<uintptr_t>(source) % bytes)) {
    return emulation::fail("a copy to shared memory is not aligned");
  }
  emulation::copy(target, source, bytes, valid);
}
inline void copy_async_cached(void* target, const void* source, bool valid) {
  copy_async<16>(target, source, valid);
}
inline void copy_async_some(void* target, const void* source, int bytes) {
  if (bytes < 0 || bytes > 16) return emulation::fail("a copy has more than 16 bytes");
  copy_async<16>(target, source, false);
  if (reinterpret_cast<uintptr_t>(source) % 16) {
    return emulation::fail("a copy to shared memory is not aligned");
  }
  emulation::copy(target, source, bytes, true);
}
inline void commit_copies() { emulation::commit(); }
template <int pending>
void copies_arrived() {
  emulation::wait(pending);
}
