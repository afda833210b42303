// Runs a CUDA kernel on a CPU, for tests without a GPU: each thread is a fibre, the fibres of a
// warp meet in collective instructions, and those of a block in __syncthreads(). What CUDA leaves
// undefined is an error here where it can be seen: lanes that meet in different instructions,
// misaligned accesses, shared memory that is written out of bounds or read before it is written
// (it is full of NaN), copies to shared memory that nobody waited for (they are done as late as
// possible). Blocks, warps and lanes run in their order or, if `reversed`, from the last to the
// first, so that a missing barrier gives another result.
#pragma once

#if !defined(__x86_64__)
#error "the emulation switches stacks in assembly of x86-64"
#endif

#include <sys/mman.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

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

enum class State { ready, at_collective, at_barrier, done };
using Collective = void (*)(void* const* arguments);  // of all lanes

struct Copy {
  void* target;
  const void* source;
  int bytes;
  bool valid;
};

struct Thread {
  void* stack_pointer = nullptr;
  State state = State::ready;
  Collective collective = nullptr;
  void* arguments = nullptr;
  dim3 index{};
  int lane = 0;
  std::deque<std::vector<Copy>> groups;  // of asynchronous copies
  std::vector<Copy> open;
};

inline Thread* current = nullptr;
inline void* scheduler = nullptr;
inline dim3 block_index, block_size, grid_size;
inline std::vector<unsigned char> shared_storage;
inline unsigned char* shared_start = nullptr;
inline size_t shared_size = 0;
inline std::string error;
inline void (*body)(void*) = nullptr;
inline void* body_argument = nullptr;
// How often 128 bytes, such as a matrix, were loaded from shared memory, and how many more accesses
// were needed because they lay in the same banks.
inline long long matrices_loaded = 0, bank_conflicts = 0;

extern "C" void emulation_switch(void** save, void* load);
asm(R"(
.text
.local emulation_switch
.type emulation_switch, @function
emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulation_switch, .-emulation_switch
)");

inline void fail(const std::string& what) {
  if (error.empty()) {
    error = what;
    if (current != nullptr) {
      error += " (block " + std::to_string(block_index.x) + "," + std::to_string(block_index.y) +
               "," + std::to_string(block_index.z) + " thread " + std::to_string(current->index.x) +
               "," + std::to_string(current->index.y) + "," + std::to_string(current->index.z) +
               ")";
    }
  }
}

inline void yield(State state) {
  current->state = state;
  emulation_switch(&current->stack_pointer, scheduler);
}

inline void entry() {
  body(body_argument);
  yield(State::done);
}

inline void collective(Collective what, void* arguments) {
  current->collective = what;
  current->arguments = arguments;
  yield(State::at_collective);
}

inline unsigned char* shared_memory() { return shared_start; }

inline float from_half(unsigned short bits) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return static_cast<float>(value);
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

// The fragments of one lane.
struct MmaArguments {
  float* d;
  const unsigned* a;
  const unsigned* b;
};

template <typename T>
float element(unsigned two, int which) {
  const auto bits = static_cast<unsigned short>(two >> (16 * which));
  return std::is_same_v<T, half> ? from_half(bits) : from_bfloat16(bits);
}

// The rows and columns of registers are those of the PTX manual, "Matrix Fragments for mma".
template <int k, typename T>
void mma(float (&d)[4], const unsigned* a, const unsigned* b) {
  MmaArguments mine{d, a, b};
  collective(
      [](void* const* lanes) {
        float left[16][k], right[k][8];
        for (int lane = 0; lane < kLanes; ++lane) {
          const auto& from = *static_cast<MmaArguments*>(lanes[lane]);
          const int g = lane / 4, t = lane % 4;
          for (int which = 0; which < 2; ++which) {
            for (int r = 0; r < k / 4; ++r) {
              left[g + 8 * (r % 2)][2 * t + which + 8 * (r / 2)] = element<T>(from.a[r], which);
            }
            for (int r = 0; r < k / 8; ++r) {
              right[2 * t + which + 8 * r][g] = element<T>(from.b[r], which);
            }
          }
        }
        for (int lane = 0; lane < kLanes; ++lane) {
          float* to = static_cast<MmaArguments*>(lanes[lane])->d;
          for (int r = 0; r < 4; ++r) {
            const int row = lane / 4 + 8 * (r / 2), column = 2 * (lane % 4) + r % 2;
            float sum = to[r];
            for (int i = 0; i < k; ++i) sum += left[row][i] * right[i][column];
            to[r] = sum;
          }
        }
      },
      &mine);
}

inline float tf32(unsigned bits) {
  if (bits & 0x1fffu) fail("a register of an mma in TF32 was not rounded by to_tf32()");
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline void mma_tf32(float (&d)[4], const unsigned* a, const unsigned* b) {
  MmaArguments mine{d, a, b};
  collective(
      [](void* const* lanes) {
        float left[16][8], right[8][8];
        for (int lane = 0; lane < kLanes; ++lane) {
          const auto& from = *static_cast<MmaArguments*>(lanes[lane]);
          const int g = lane / 4, t = lane % 4;
          for (int r = 0; r < 4; ++r) left[g + 8 * (r % 2)][t + 4 * (r / 2)] = tf32(from.a[r]);
          for (int r = 0; r < 2; ++r) right[t + 4 * r][g] = tf32(from.b[r]);
        }
        for (int lane = 0; lane < kLanes; ++lane) {
          float* to = static_cast<MmaArguments*>(lanes[lane])->d;
          for (int r = 0; r < 4; ++r) {
            const int row = lane / 4 + 8 * (r / 2), column = 2 * (lane % 4) + r % 2;
            float sum = to[r];
            for (int i = 0; i < 8; ++i) sum += left[row][i] * right[i][column];
            to[r] = sum;
          }
        }
      },
      &mine);
}

struct LoadArguments {
  unsigned* registers;
  const void* row;
};

template <int matrices, bool transposed>
void load(unsigned (&registers)[matrices], const void* row) {
  LoadArguments mine{registers, row};
  collective(
      [](void* const* lanes) {
        for (int matrix = 0; matrix < matrices; ++matrix) {
          unsigned short values[8][8];
          int accesses[8] = {};  // of each group of four banks
          for (int r = 0; r < 8; ++r) {
            const void* from = static_cast<LoadArguments*>(lanes[8 * matrix + r])->row;
            const auto place = reinterpret_cast<uintptr_t>(from);
            if (place % 16 != 0) return fail("a row of a matrix is not aligned to 16 bytes");
            const auto offset = place - reinterpret_cast<uintptr_t>(shared_start);
            if (offset + 16 > shared_size) {
              return fail("a row of a matrix is not in shared memory");
            }
            ++accesses[place / 16 % 8];
            std::memcpy(values[r], from, 16);
          }
          int most = 0;
          for (int i = 0; i < 8; ++i) most = accesses[i] > most ? accesses[i] : most;
          ++matrices_loaded;
          bank_conflicts += most - 1;
          for (int lane = 0; lane < kLanes; ++lane) {
            const int g = lane / 4, t = lane % 4;
            const unsigned low = transposed ? values[2 * t][g] : values[g][2 * t];
            const unsigned high = transposed ? values[2 * t + 1][g] : values[g][2 * t + 1];
            static_cast<LoadArguments*>(lanes[lane])->registers[matrix] = low | (high << 16);
          }
        }
      },
      &mine);
}

// Neighbouring words of 4 bytes, which as many lanes load at a time as take 128 bytes.
template <int words>
void load_words(unsigned (&registers)[words], const void* from) {
  LoadArguments mine{registers, from};
  collective(
      [](void* const* lanes) {
        constexpr int kTogether = kLanes / words;
        for (int first = 0; first < kLanes; first += kTogether) {
          std::set<uintptr_t> in_bank[kLanes];
          for (int lane = first; lane < first + kTogether; ++lane) {
            const auto& to = *static_cast<LoadArguments*>(lanes[lane]);
            const auto place = reinterpret_cast<uintptr_t>(to.row);
            const auto offset = place - reinterpret_cast<uintptr_t>(shared_start);
            if (place % (4 * words) != 0) return fail("a misaligned access");
            if (offset + 4 * words > shared_size) return fail("a number is not in shared memory");
            for (int i = 0; i < words; ++i) in_bank[(place / 4 + i) % kLanes].insert(place / 4 + i);
            std::memcpy(to.registers, to.row, 4 * words);
          }
          size_t most = 0;
          for (const auto& found : in_bank) most = found.size() > most ? found.size() : most;
          ++matrices_loaded;
          bank_conflicts += static_cast<long long>(most) - 1;
        }
      },
      &mine);
}

inline void perform(const Copy& copy) {
  if (copy.valid) {
    std::memcpy(copy.target, copy.source, copy.bytes);
  } else {
    std::memset(copy.target, 0, copy.bytes);
  }
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

// Runs the lanes of a warp until all are at a barrier or done. Returns false after an error.
inline bool run_warp(Thread* const* lanes, int count, bool reversed) {
  while (true) {
    for (int i = 0; i < count; ++i) {
      Thread* thread = lanes[reversed ? count - 1 - i : i];
      if (thread->state != State::ready) continue;
      current = thread;
      emulation_switch(&scheduler, thread->stack_pointer);
      if (!error.empty()) return false;
    }
    int at_collective = 0, at_barrier = 0;
    for (int i = 0; i < count; ++i) {
      at_collective += lanes[i]->state == State::at_collective;
      at_barrier += lanes[i]->state == State::at_barrier;
    }
    if (at_collective == 0) return true;
    current = lanes[0];
    void* arguments[kLanes];
    for (int i = 0; i < count; ++i) {
      if (lanes[i]->state != State::at_collective || lanes[i]->collective != lanes[0]->collective) {
        fail("lanes of a warp meet in different instructions, or some have returned");
        return false;
      }
      arguments[i] = lanes[i]->arguments;
    }
    if (count != kLanes) {
      fail("a collective instruction in a warp of less than 32 lanes");
      return false;
    }
    lanes[0]->collective(arguments);
    if (!error.empty()) return false;
    for (int i = 0; i < count; ++i) lanes[i]->state = State::ready;
  }
}

inline void run_block(std::vector<Thread>& threads, unsigned char* stacks, bool reversed) {
  const int count = static_cast<int>(threads.size());
  for (int i = 0; i < count; ++i) {
    Thread& thread = threads[i];
    thread = Thread{};
    const unsigned x = block_size.x, y = block_size.y;
    thread.index = {i % x, i / x % y, i / (x * y)};
    thread.lane = i % kLanes;
    auto* top = reinterpret_cast<void**>(stacks + (i + 1) * kStackBytes);
    // emulation_switch() pops six registers and returns to entry(), on a stack that is aligned as
    // after a call.
    top -= 2;
    *top = reinterpret_cast<void*>(&entry);
    top -= 6;
    std::memset(top, 0, 6 * sizeof(void*));
    thread.stack_pointer = top;
  }
  const int warps = (count + kLanes - 1) / kLanes;
  while (true) {
    for (int i = 0; i < warps; ++i) {
      const int warp = reversed ? warps - 1 - i : i;
      Thread* lanes[kLanes];
      int lane = 0;
      for (; lane < kLanes && warp * kLanes + lane < count; ++lane) {
        lanes[lane] = &threads[warp * kLanes + lane];
      }
      if (!run_warp(lanes, lane, reversed)) return;
    }
    bool waits = false;
    for (auto& thread : threads) {
      if (thread.state == State::at_barrier) {
        thread.state = State::ready;
        waits = true;
      }
    }
    if (!waits) return;
  }
}

template <typename... Arguments, size_t... i>
void call(void (*kernel)(Arguments...), void** arguments, std::index_sequence<i...>) {
  kernel(*static_cast<std::remove_reference_t<Arguments>*>(arguments[i])...);
}

template <typename... Arguments>
const char* run(void (*kernel)(Arguments...), int argument_count, const unsigned* grid,
                const unsigned* block, unsigned shared_bytes, void** arguments, bool reversed) {
  error.clear();
  current = nullptr;
  if (argument_count != sizeof...(Arguments)) {
    error = "the kernel takes " + std::to_string(sizeof...(Arguments)) + " arguments";
    return error.c_str();
  }
  grid_size = {grid[0], grid[1], grid[2]};
  block_size = {block[0], block[1], block[2]};
  const size_t threads = size_t{block[0]} * block[1] * block[2];
  if (threads == 0 || threads > 1024 || grid[1] > 65535 || grid[2] > 65535) {
    error = "the grid or the block is too large";
    return error.c_str();
  }
  const std::pair<decltype(kernel), void**> what{kernel, arguments};
  body_argument = const_cast<void*>(static_cast<const void*>(&what));
  body = [](void* argument) {
    const auto& [kernel, arguments] = *static_cast<decltype(what)*>(argument);
    call(kernel, arguments, std::index_sequence_for<Arguments...>());
  };
  std::vector<Thread> fibres(threads);
  const size_t stack_bytes = threads * kStackBytes;
  void* stacks = mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) return "no memory for the stacks";
  shared_size = shared_bytes;
  shared_storage.resize(shared_bytes + 2 * kBandBytes + 128);
  const auto first = reinterpret_cast<uintptr_t>(shared_storage.data()) + kBandBytes;
  shared_start = reinterpret_cast<unsigned char*>((first + 127) / 128 * 128);
  const size_t blocks = size_t{grid[0]} * grid[1] * grid[2];
  for (size_t i = 0; i < blocks && error.empty(); ++i) {
    const size_t b = reversed ? blocks - 1 - i : i;
    block_index = {static_cast<unsigned>(b % grid[0]), static_cast<unsigned>(b / grid[0] % grid[1]),
                   static_cast<unsigned>(b / grid[0] / grid[1])};
    std::memset(shared_storage.data(), 0xff, shared_storage.size());  // NaN in every type
    run_block(fibres, static_cast<unsigned char*>(stacks), reversed);
    for (auto byte = shared_storage.data(); byte < shared_start; ++byte) {
      if (*byte != 0xff) fail("shared memory is written before its beginning");
    }
    for (auto byte = shared_start + shared_bytes;
         byte < shared_storage.data() + shared_storage.size(); ++byte) {
      if (*byte != 0xff) fail("shared memory is written behind its end");
    }
  }
  munmap(stacks, stack_bytes);
  return error.c_str();
}

}  // namespace emulation

#define threadIdx (emulation::current->index)
#define blockIdx (emulation::block_index)
#define blockDim (emulation::block_size)
#define gridDim (emulation::grid_size)
#define warpSize 32

inline void __syncthreads() { emulation::yield(emulation::State::at_barrier); }
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
  emulation::current->open.push_back({target, source, bytes, valid});
}
inline void commit_copies() {
  auto& thread = *emulation::current;
  thread.groups.push_back(std::move(thread.open));
  thread.open.clear();
}
template <int pending>
void copies_arrived() {
  auto& groups = emulation::current->groups;
  while (groups.size() > pending) {
    for (const auto& copy : groups.front()) emulation::perform(copy);
    groups.pop_front();
  }
}

// What the compiler calls where a pointer is misaligned for its type (-fsanitize=alignment).
extern "C" void __ubsan_handle_type_mismatch_v1(void*, void*) {
  emulation::fail("a misaligned access");
}
