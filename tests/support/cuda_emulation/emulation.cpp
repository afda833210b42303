// Runs the threads of a kernel that was compiled with emulation.h.
#include "emulation.h"

#include <sys/mman.h>

#include <algorithm>
#include <deque>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace emulation {

Thread* current = nullptr;
dim3 block_index, block_size, grid_size;
unsigned char* shared_start = nullptr;
long long cycles = 0;
int* any_of_block = nullptr;

namespace {

struct Copy {
  void* target;
  const void* source;
  int bytes;
  bool valid;
};

struct Product {
  float* d;
  int n;
  float (*to_float)(unsigned short);
  uint64_t a, b;
  bool transposed_a, transposed_b;
  unsigned registers[4];  // those of a, if it is in registers
  bool has_registers;
};

struct Fibre : Thread {
  std::deque<std::vector<Copy>> groups;  // of asynchronous copies
  std::vector<Copy> open;
  std::deque<std::vector<Product>> batches;  // of products of a warpgroup
  std::vector<Product> open_batch;
};

void* scheduler = nullptr;
std::vector<unsigned char> shared_storage;
size_t shared_size = 0;
std::string error;
void (*entered)(void**) = nullptr;
void** entered_with = nullptr;
bool copies_at_once = false;
bool takes_turns = false;
// Random numbers: <random> includes <cmath>, whose names some in the header are.
unsigned random_state = 0;
unsigned random_number() {
  random_state = random_state * 1664525u + 1013904223u;
  return random_state >> 16;
}
// How often 128 bytes, such as a matrix, were loaded from shared memory, and how many more accesses
// were needed because they lay in the same banks.
long long matrices_loaded = 0, bank_conflicts = 0;
// Products of matrices that warps have multiplied.
long long products = 0;

}  // namespace

long long numbers_converted = 0;

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

void fail(const char* what) {
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

void yield(State state) {
  current->state = state;
  emulation_switch(&current->stack_pointer, scheduler);
}

void wait_for_blocks() {
  cycles += 1000;
  yield(State::waits_for_blocks);
}

static void entry() {
  entered(entered_with);
  yield(State::done);
}

void collective(Collective what, void* arguments) {
  current->collective = what;
  current->arguments = arguments;
  yield(State::at_collective);
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

template <int k, typename T>
void mma(float (&d)[4], const unsigned* a, const unsigned* b) {
  MmaArguments mine{d, a, b};
  collective(
      [](void* const* lanes) {
        ++products;
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

float tf32(unsigned bits) {
  if (bits & 0x1fffu) fail("a register of an mma in TF32 was not rounded by to_tf32()");
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

void mma_tf32(float (&d)[4], const unsigned* a, const unsigned* b) {
  MmaArguments mine{d, a, b};
  collective(
      [](void* const* lanes) {
        ++products;
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

static Fibre& fibre() { return static_cast<Fibre&>(*current); }

// The number at an index of a matrix along m or n, and along the sum.
static float number_at(const Product& of, uint64_t descriptor, bool transposed, int across,
                       int along) {
  const auto field = [&](int first) { return static_cast<size_t>(descriptor >> first & 0x3fff); };
  const int inside = transposed ? across % 8 : along % 8, row = transposed ? along % 8 : across % 8;
  const size_t rows = field(0) + row + along / 8 * field(16) + across / 8 * field(32);
  if (16 * rows + 16 > shared_size) {
    fail("a row of a matrix is not in shared memory");
    return 0.0f;
  }
  unsigned short bits;
  std::memcpy(&bits, shared_start + 16 * rows + 2 * inside, 2);
  return of.to_float(bits);
}

static void multiply(Product& mine) {
  collective(
      [](void* const* lanes) {
        const auto& first = *static_cast<Product*>(lanes[0]);
        const auto index = current->index;
        const int warp = (index.z * block_size.y + index.y) * block_size.x + index.x;
        const int first_row = warp / kLanes % 4 * 16;
        std::vector<float> left(16 * 16), right(16 * first.n);
        products += first.n / 8;
        for (int lane = 0; lane < kLanes && first.has_registers; ++lane) {
          const auto& from = *static_cast<Product*>(lanes[lane]);
          const int g = lane / 4, t = lane % 4;
          for (int i = 0; i < 8; ++i) {
            const int r = i / 2, k = 2 * t + i % 2 + 8 * (r / 2), m = g + 8 * (r % 2);
            const auto bits = static_cast<unsigned short>(from.registers[r] >> (16 * (i % 2)));
            left[k * 16 + m] = first.to_float(bits);
          }
        }
        for (int k = 0; k < 16; ++k) {
          for (int m = 0; m < 16 && !first.has_registers; ++m) {
            left[k * 16 + m] = number_at(first, first.a, first.transposed_a, first_row + m, k);
          }
          for (int column = 0; column < first.n; ++column) {
            right[k * first.n + column] = number_at(first, first.b, first.transposed_b, column, k);
          }
        }
        for (int lane = 0; lane < kLanes; ++lane) {
          const auto& to = *static_cast<Product*>(lanes[lane]);
          if (to.a != first.a || to.b != first.b) return fail("lanes multiply other matrices");
          for (int r = 0; r < first.n / 2; ++r) {
            const int row = lane / 4 + r / 2 % 2 * 8, column = r / 4 * 8 + lane % 4 * 2 + r % 2;
            for (int k = 0; k < 16; ++k) {
              to.d[r] += left[k * 16 + row] * right[k * first.n + column];
            }
          }
        }
      },
      &mine);
}

void wgmma(float* d, int n, float (*to_float)(unsigned short), uint64_t a, uint64_t b,
           bool transposed_a, bool transposed_b) {
  fibre().open_batch.push_back({d, n, to_float, a, b, transposed_a, transposed_b, {}, false});
}

void wgmma(float* d, int n, float (*to_float)(unsigned short), const unsigned (&a)[4], uint64_t b,
           bool transposed_b) {
  fibre().open_batch.push_back(
      {d, n, to_float, 0, b, false, transposed_b, {a[0], a[1], a[2], a[3]}, true});
}

void commit_products() {
  fibre().batches.push_back(std::move(fibre().open_batch));
  fibre().open_batch.clear();
}

void wait_for_products(int pending) {
  auto& batches = fibre().batches;
  while (batches.size() > static_cast<size_t>(pending)) {
    for (auto& product : batches.front()) multiply(product);
    batches.pop_front();
  }
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

template void mma<8, half>(float (&)[4], const unsigned*, const unsigned*);
template void mma<8, bfloat16>(float (&)[4], const unsigned*, const unsigned*);
template void mma<16, half>(float (&)[4], const unsigned*, const unsigned*);
template void mma<16, bfloat16>(float (&)[4], const unsigned*, const unsigned*);
template void load<1, false>(unsigned (&)[1], const void*);
template void load<2, false>(unsigned (&)[2], const void*);
template void load<4, false>(unsigned (&)[4], const void*);
template void load<1, true>(unsigned (&)[1], const void*);
template void load<2, true>(unsigned (&)[2], const void*);
template void load<4, true>(unsigned (&)[4], const void*);
template void load_words<1>(unsigned (&)[1], const void*);
template void load_words<2>(unsigned (&)[2], const void*);

static void perform(const Copy& copy) {
  if (copy.valid) {
    std::memcpy(copy.target, copy.source, copy.bytes);
  } else {
    std::memset(copy.target, 0, copy.bytes);
  }
}

void copy(void* target, const void* source, int bytes, bool valid) {
  const Copy one{target, source, bytes, valid};
  if (copies_at_once) return perform(one);
  fibre().open.push_back(one);
}

void commit() {
  fibre().groups.push_back(std::move(fibre().open));
  fibre().open.clear();
}

void wait(int pending) {
  auto& groups = fibre().groups;
  while (groups.size() > static_cast<size_t>(pending)) {
    for (const auto& copy : groups.front()) perform(copy);
    groups.pop_front();
  }
}

// Runs the lanes of a warp until all are at a barrier or done. That of a warpgroup is one, too.
// Returns false after an error.
static bool run_warp(Thread* const* lanes, int count, bool reversed) {
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

// The threads of a block and its memory.
class Block {
 public:
  Block(size_t threads, size_t shared_bytes)
      : threads_(threads),
        stack_bytes_(threads * kStackBytes),
        shared_bytes_(shared_bytes),
        storage_(shared_bytes + 2 * kBandBytes + 128) {
    stacks_ = mmap(nullptr, stack_bytes_, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks_ == MAP_FAILED) fail("no memory for the stacks");
    const auto first = reinterpret_cast<uintptr_t>(storage_.data()) + kBandBytes;
    shared_ = reinterpret_cast<unsigned char*>((first + 127) / 128 * 128);
  }
  ~Block() {
    if (stacks_ != MAP_FAILED) munmap(stacks_, stack_bytes_);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  bool is_done() const { return is_done_; }

  void start(dim3 index) {
    index_ = index;
    is_done_ = false;
    std::memset(storage_.data(), 0xff, storage_.size());  // NaN in every type
    for (size_t i = 0; i < threads_.size(); ++i) {
      Fibre& thread = threads_[i];
      thread = Fibre{};
      const unsigned at = static_cast<unsigned>(i), x = block_size.x, y = block_size.y;
      thread.index = {at % x, at / x % y, at / (x * y)};
      thread.lane = static_cast<int>(i % kLanes);
      auto* top =
          reinterpret_cast<void**>(static_cast<unsigned char*>(stacks_) + (i + 1) * kStackBytes);
      // emulation_switch() pops six registers and returns to entry(), on a stack that is aligned as
      // after a call.
      top -= 2;
      *top = reinterpret_cast<void*>(&entry);
      top -= 6;
      std::memset(top, 0, 6 * sizeof(void*));
      thread.stack_pointer = top;
    }
  }

  // Runs until the block is done, waits for others, or has failed, or until another one may have a
  // turn. Returns whether it did nothing but wait.
  bool resume(bool reversed) {
    bool was_ready = false, is_idle = true;
    block_index = index_;
    shared_start = shared_;
    shared_size = shared_bytes_;
    any_of_block = &any_;
    for (auto& thread : threads_) {
      was_ready = was_ready || thread.state == State::ready;
      if (thread.state == State::waits_for_blocks) thread.state = State::ready;
    }
    const int count = static_cast<int>(threads_.size());
    const int warps = (count + kLanes - 1) / kLanes;
    while (true) {
      for (int i = 0; i < warps; ++i) {
        const int warp = reversed ? warps - 1 - i : i;
        Thread* lanes[kLanes];
        int lane = 0;
        for (; lane < kLanes && warp * kLanes + lane < count; ++lane) {
          lanes[lane] = &threads_[warp * kLanes + lane];
        }
        if (!run_warp(lanes, lane, reversed)) return false;
      }
      if (release_warpgroups()) continue;
      bool waits = false;
      for (const auto& thread : threads_) {
        if (thread.state == State::waits_for_blocks) return is_idle && !was_ready;
        if (thread.state == State::at_warpgroup) {
          fail("a warp of a warpgroup is missing");
          return false;
        }
        waits = waits || thread.state == State::at_barrier;
      }
      if (!waits) break;
      is_idle = false;
      for (auto& thread : threads_) {
        if (thread.state == State::at_barrier) thread.state = State::ready;
      }
      if (takes_turns && random_number() % 4 == 0) return false;
    }
    is_done_ = true;
    for (auto byte = storage_.data(); byte < shared_; ++byte) {
      if (*byte != 0xff) fail("shared memory is written before its beginning");
    }
    for (auto byte = shared_ + shared_bytes_; byte < storage_.data() + storage_.size(); ++byte) {
      if (*byte != 0xff) fail("shared memory is written behind its end");
    }
    return false;
  }

 private:
  // Lets the warpgroups go on that wait for nobody. Returns whether there are such.
  bool release_warpgroups() {
    constexpr size_t kThreads = 128;
    bool found = false;
    for (size_t first = 0; first + kThreads <= threads_.size(); first += kThreads) {
      const auto begin = threads_.begin() + first, end = begin + kThreads;
      const auto is_here = [](const Fibre& one) { return one.state == State::at_warpgroup; };
      if (!std::all_of(begin, end, is_here)) continue;
      found = true;
      for (auto thread = begin; thread != end; ++thread) thread->state = State::ready;
    }
    return found;
  }

  std::vector<Fibre> threads_;
  void* stacks_;
  size_t stack_bytes_, shared_bytes_;
  std::vector<unsigned char> storage_;
  unsigned char* shared_;
  dim3 index_{};
  bool is_done_ = false;
  int any_ = 0;  // what __syncthreads_or() finds
};

// Blocks have so many turns, at most, while none of them ends, and while all of them wait.
constexpr int kMostTurns = 100000, kMostIdleTurns = 1000;

const char* run(void (*body)(void**), void** arguments, const unsigned* grid, const unsigned* block,
                unsigned shared_bytes, bool reversed, unsigned resident, unsigned seed,
                unsigned first_block) {
  error.clear();
  current = nullptr;
  copies_at_once = reversed;
  grid_size = {grid[0], grid[1], grid[2]};
  block_size = {block[0], block[1], block[2]};
  const size_t threads = size_t{block[0]} * block[1] * block[2];
  if (threads == 0 || threads > 1024 || grid[1] > 65535 || grid[2] > 65535) {
    error = "the grid or the block is too large";
    return error.c_str();
  }
  entered = body;
  entered_with = arguments;
  random_state = seed;
  takes_turns = seed != 0;
  const size_t all_blocks = size_t{grid[0]} * grid[1] * grid[2], blocks = all_blocks - first_block;
  std::vector<unsigned> order(blocks);
  for (size_t i = 0; i < blocks; ++i)
    order[i] = static_cast<unsigned>(reversed ? all_blocks - 1 - i : first_block + i);
  for (size_t i = blocks; takes_turns && i > 1; --i) {
    std::swap(order[i - 1], order[random_number() % i]);
  }
  std::deque<Block> there;
  size_t started = 0;
  const auto start_next = [&](Block& place) {
    const unsigned b = order[started++];
    place.start({b % grid[0], b / grid[0] % grid[1], b / grid[0] / grid[1]});
  };
  while (there.size() < std::min<size_t>(resident, blocks)) {
    start_next(there.emplace_back(threads, shared_bytes));
  }
  size_t done = 0;
  int turns = 0, idle_turns = 0;
  while (done < blocks && error.empty()) {
    bool is_idle = true;
    for (Block& one : there) {
      if (one.is_done()) continue;
      is_idle = one.resume(reversed) && is_idle;
      if (!error.empty()) break;
      if (!one.is_done()) continue;
      ++done;
      turns = 0;
      if (started < blocks) start_next(one);
    }
    idle_turns = is_idle ? idle_turns + 1 : 0;
    if (++turns > kMostTurns || idle_turns > kMostIdleTurns) {
      fail("all blocks wait for each other, or for one that has not started");
    }
  }
  return error.c_str();
}

}  // namespace emulation

extern "C" void work(long long* counts) {
  counts[0] = emulation::matrices_loaded;
  counts[1] = emulation::bank_conflicts;
  counts[2] = emulation::products;
  counts[3] = emulation::numbers_converted;
  emulation::matrices_loaded = emulation::bank_conflicts = 0;
  emulation::products = emulation::numbers_converted = 0;
}

// What the compiler calls where a pointer is misaligned for its type (-fsanitize=alignment).
extern "C" void __ubsan_handle_type_mismatch_v1(void*, void*) {
  emulation::fail("a misaligned access");
}
