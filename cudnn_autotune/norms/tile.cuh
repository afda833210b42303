// What the kernels of batch norms share: how a tensor is divided, and how blocks add up.
//
// A slab is a set of channels whose statistics are found together: LANES * VECTOR neighbouring
// channels of a tensor in channels_last, or one channel of a contiguous tensor (PLANES). A slab is
// divided into `parts` of `tile` units each; a unit is a row of the slab in channels_last, a vector
// in a contiguous tensor. A block works on one part. A thread reads vectors of VECTOR numbers.
//
// All sums run in a fixed order, so equal operands give equal results.
//
// A group norm of GROUPS groups has the statistics of a group of one image where a batch norm has
// those of a channel: `channels` are the groups of all images, and `batch` is the number of
// channels in a group. A group is contiguous in memory (PLANES), so its vectors may reach over the
// end of a channel. Weight and bias are those of a channel. With GROUPS 0 it is a batch norm.
//
// A group norm in channels_last has OF_GROUP channels in a group, and each slab is of one image.
// Sums are those of a channel of an image. With more than one channel in a group there are two
// passes, and the second one adds up the channels of a group. With OF_GROUP 0 it is none.
//
// With PASS 0 one launch computes a norm, with a block for each part of the slabs that it works on
// at a time: a team. Its blocks wait for each other's sums. They need not be on the GPU together,
// because a kernel of another stream may hold multiprocessors until this launch has ended. So a
// block claims its part when it starts. A block that has waited for some microseconds adopts a part
// of its team that no block has claimed, and streams it: it reads the part twice instead of keeping
// it. A block that starts later, and finds its part adopted, ends. So blocks only wait for blocks
// that run. Sums and results have the same bits whether a part is kept or streamed.

constexpr int kVectorBytes = VECTOR * static_cast<int>(sizeof(ELEMENT));
// Sums that a thread has of each kind: one a channel.
constexpr int kChannels = PLANES ? 1 : VECTOR;
constexpr int kSlabChannels = LANES * kChannels;
// Units that a block works on at a time.
constexpr int kUnits = THREADS / LANES;
constexpr int kWarps = THREADS / 32;
constexpr int kGroupsOfImage = GROUPS ? GROUPS : 1;
constexpr bool kByImage = OF_GROUP != 0;
constexpr bool kAddsChannels = OF_GROUP > 1;
constexpr int kOfGroup = kByImage ? OF_GROUP : 1;
// A mask, of a tensor in channels_last, has a byte for each vector of 16 bytes, a bit for each
// number, the first one lowest.
constexpr int kSegment = 8;
static_assert(!MASK || (!PLANES && kVectorBytes == 16), "what a byte of a mask stands for");
static_assert(GROUPS == 0 || PLANES, "a group is contiguous");
static_assert(!kByImage || (!PLANES && !MASK), "slabs of one image are rows");
static_assert(!kAddsChannels || PASS != 0, "channels of a group are of several slabs");
// Groups of asynchronous copies into which a block divides its part.
constexpr int kGroups = 4;
// The first bytes of shared memory, where sums of threads are added: two floats a channel of each
// warp and one a lane, or two floats a thread. Behind them are two floats a channel of the slab,
// and what a block knows of its team.
constexpr int kWarpFloats = LANES * kWarps * (2 * kChannels + 1);
constexpr int kSumFloats = kWarpFloats > 2 * THREADS ? kWarpFloats : 2 * THREADS;
constexpr int kMostParts = 512;
constexpr int kTeamBytes = PASS == 0 ? 16 + 2 * kMostParts : 0;
constexpr int kScratchBytes = (4 * (kSumFloats + 2 * kSlabChannels) + kTeamBytes + 127) / 128 * 128;
static_assert(SCRATCH_BYTES == kScratchBytes, "what the launch reserves");
// Clock cycles for which a block waits before it adopts a part.
constexpr long long kPatience = 8192;

using Counter = unsigned long long;

#ifdef __CUDACC_RTC__
// Loads what other blocks have written.
__device__ __forceinline__ float2 load_fresh(const float2* from) {
  float2 value;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "l"(from)
               : "memory");
  return value;
}
// Loads a counter; what was written before it was set is visible then.
__device__ __forceinline__ Counter load_acquire(const Counter* counter) {
  Counter value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(counter) : "memory");
  return value;
}
__device__ __forceinline__ void let_others_run() {}
// Begins to bring what is at an address into the L2 cache.
__device__ __forceinline__ void prefetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
#else
__device__ __forceinline__ float2 load_fresh(const float2* from) { return *from; }
__device__ __forceinline__ Counter load_acquire(const Counter* counter) {
  return *static_cast<const volatile Counter*>(counter);
}
__device__ __forceinline__ void let_others_run() { emulation::wait_for_blocks(); }
__device__ __forceinline__ void prefetch(const void*) {}
#endif

// VECTOR numbers in memory.
template <int numbers>
struct alignas(kVectorBytes) Numbers {
  Two<ELEMENT> twos[numbers / 2];
  __device__ __forceinline__ static Numbers of(const float (&values)[numbers]) {
    Numbers result;
#pragma unroll
    for (int i = 0; i < numbers / 2; ++i) {
      result.twos[i] = Two<ELEMENT>::of(values[2 * i], values[2 * i + 1]);
    }
    return result;
  }
  __device__ __forceinline__ void get(float (&values)[numbers]) const {
#pragma unroll
    for (int i = 0; i < numbers / 2; ++i) {
      const float2 two = twos[i].values();
      values[2 * i] = two.x;
      values[2 * i + 1] = two.y;
    }
  }
};
template <>
struct Numbers<1> {
  ELEMENT number;
  __device__ __forceinline__ static Numbers of(const float (&values)[1]) {
    return {from_float<ELEMENT>(values[0])};
  }
  __device__ __forceinline__ void get(float (&values)[1]) const { values[0] = to_float(number); }
};
using Vector = Numbers<VECTOR>;

__device__ __forceinline__ Vector load(const ELEMENT* from) {
  return *reinterpret_cast<const Vector*>(from);
}
__device__ __forceinline__ void store(ELEMENT* to, const float (&values)[VECTOR]) {
  *reinterpret_cast<Vector*>(to) = Vector::of(values);
}

// The sizes of a tensor, and how it is divided.
struct Division {
  int batch, channels, spatial;
  int slabs, parts, tile;

  // Values of a channel that are added up, in all parts and in one.
  __device__ __forceinline__ int count() const { return kByImage ? spatial : batch * spatial; }
  __device__ __forceinline__ int count(int part) const {
    const int unit = PLANES ? VECTOR : 1;
    return min(tile, count() / unit - part * tile) * unit;
  }
  // The image of a slab, which is 0 if all images are added up together, and its first channel.
  __device__ __forceinline__ int slabs_of_image() const { return kByImage ? slabs / batch : slabs; }
  __device__ __forceinline__ int image(int slab) const {
    return kByImage ? slab / slabs_of_image() : 0;
  }
  __device__ __forceinline__ int channel(int slab) const {
    return (slab - image(slab) * slabs_of_image()) * kSlabChannels;
  }
  // The place of an image's first channel among values that all channels of all images have.
  __device__ __forceinline__ int channels_before(int image) const {
    return kByImage ? image * channels : 0;
  }
  // The place of a channel among the statistics.
  __device__ __forceinline__ int statistic(int image, int channel) const {
    return (channels_before(image) + channel) / kOfGroup;
  }
};

// The vectors of one thread in a part of a slab.
struct Place {
  int image;    // of the slab
  int channel;  // the first of this thread's
  int vectors;  // how many it has
  int first;    // its first unit
  // Of a contiguous tensor: vectors of all channels and of one channel. The first one is the
  // vectors of a group, if there are groups.
  int stride, plane;
  int begin;  // the number before the first unit

  __device__ __forceinline__ Place(const Division& of, int slab, int part) {
    const int lane = static_cast<int>(threadIdx.x) % LANES;
    image = of.image(slab);
    // Behind the last slab there is no channel.
    channel = (slab < of.slabs ? of.channel(slab) : of.channels) + lane * kChannels;
    first = part * of.tile + static_cast<int>(threadIdx.x) / LANES;
    begin = kByImage && slab < of.slabs ? image * of.spatial * of.channels : 0;
    plane = of.spatial / VECTOR;
    const int units = GROUPS ? of.count() / VECTOR : PLANES ? of.batch * plane : of.count();
    stride = GROUPS ? units : PLANES ? of.channels * plane : of.channels;
    const int left = min((part + 1) * of.tile, units) - first;
    vectors = left > 0 && channel < of.channels ? (left + kUnits - 1) / kUnits : 0;
  }
  // The first number of a vector.
  __device__ __forceinline__ int operator[](int vector) const {
    return at(first + vector * kUnits);
  }
  // The place of its first number in the slab of a contiguous group.
  __device__ __forceinline__ int number(int vector) const {
    return (first + vector * kUnits) * VECTOR;
  }
  // The byte of a vector in a mask, which is divided into segments of kSegment vectors of each row,
  // so that a slab's bytes are neighbours.
  __device__ __forceinline__ int mask_at(const Division& of, int vector) const {
    const int column = channel / VECTOR, segment = column / kSegment * kSegment;
    const int width = min(kSegment, of.channels / VECTOR - segment);
    return segment * of.count() + (first + vector * kUnits) * width + column - segment;
  }

 private:
  __device__ __forceinline__ int at(int unit) const {
    if (!PLANES) return begin + unit * stride + channel;
    if (GROUPS) return (channel * stride + unit) * VECTOR;
    const int image = unit / plane;
    return (image * stride + channel * plane + unit - image * plane) * VECTOR;
  }
};

// Begins to bring vectors of this thread into the L2 cache, one of each of its lines.
__device__ __forceinline__ void prefetch(const ELEMENT* tensor, const Place& place, int first,
                                         int vectors) {
  constexpr int kOfLine = LANES * kVectorBytes < 128 ? LANES : 128 / kVectorBytes;
  if (threadIdx.x % kOfLine != 0) return;
  for (int v = first; v < min(first + vectors, place.vectors); ++v) prefetch(tensor + place[v]);
}

// Where a vector of this thread is kept.
__device__ __forceinline__ Vector* kept_at(unsigned char* kept, int vector) {
  return reinterpret_cast<Vector*>(kept + (vector * THREADS + threadIdx.x) * kVectorBytes);
}

// Copies to where vectors are kept, in groups.
#if PASS == 0
__device__ __forceinline__ void copy_vector(Vector* to, const ELEMENT* from) {
  copy_async<kVectorBytes>(to, from);
}
__device__ __forceinline__ void end_group() { commit_copies(); }
// Waits for the oldest group of a part, whose last group was the last to end.
__device__ __forceinline__ void wait_for_group() {
  commit_copies();  // an empty group, so that as many are pending each time
  copies_arrived<kGroups>();
}
#else
__device__ __forceinline__ void copy_vector(Vector*, const ELEMENT*) {}
__device__ __forceinline__ void end_group() {}
__device__ __forceinline__ void wait_for_group() {}
#endif

// Adds `term(part, numbers of a part)` over the parts of a slab. Returns the sum of channel
// threadIdx.x to each thread that has one.
template <typename Term>
__device__ __forceinline__ float2 add_parts(const float2* slab, int parts, float* scratch,
                                            const Term& term) {
  constexpr int kAtATime = THREADS / kSlabChannels;
  const int channel = threadIdx.x % kSlabChannels;
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 8
  for (int part = threadIdx.x / kSlabChannels; part < parts; part += kAtATime) {
    const float2 more = term(part, load_fresh(slab + part * kSlabChannels + channel));
    sum.x += more.x;
    sum.y += more.y;
  }
  auto* const sums = reinterpret_cast<float2*>(scratch);
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x < kSlabChannels) {
    for (int i = 1; i < min(kAtATime, parts); ++i) {
      const float2 more = sums[i * kSlabChannels + channel];
      sum.x += more.x;
      sum.y += more.y;
    }
  }
  return sum;
}

// Tells the other blocks of the slab that the sums of one more part are written. Each launch adds
// `parts` to the counter, which is never reset, and begins at a multiple of them. Returns to thread
// 0 the number that stands for all parts, and whether this was the last one.
struct Published {
  Counter all;
  bool is_last;
};
__device__ __forceinline__ Published publish(Counter* counter, int parts) {
  __syncthreads();
  if (threadIdx.x != 0) return {};
  __threadfence();
  const Counter before = atomicAdd(counter, Counter{1});
  const Counter all = (before / parts + 1) * parts;
  return {all, before + 1 == all};
}

// Tells all threads what thread 0 knows, by a place in shared memory.
__device__ __forceinline__ int answer_of_first(int answer, int* place) {
  if (threadIdx.x == 0) *place = answer;
  __syncthreads();
  const int result = *place;
  __syncthreads();
  return result;
}

// Publishes a part in a launch whose blocks do not wait. Returns whether this block may read the
// sums of all parts, because it is the last.
__device__ __forceinline__ bool is_last_of(Counter* counter, int parts, int* place) {
  if (parts == 1) {
    __syncthreads();
    return true;
  }
  const Published published = publish(counter, parts);
  if (threadIdx.x == 0) __threadfence();
  return answer_of_first(published.is_last, place) != 0;
}

// The blocks that work on the same slabs, one for each part.
//
// A block's claim is a counter that all launches leave even, and at the same number. The block adds
// 1 when it starts, and again if it was even: then its part is its own. A block that adopts the
// part adds 1 before that.
class Team {
 public:
  // Begins this block's own claim. `shared` are kTeamBytes of shared memory.
  __device__ __forceinline__ Team(Counter* claims, int parts, void* shared)
      : parts_(parts),
        together_(static_cast<int>(gridDim.x) / parts),
        claims_(claims + blockIdx.x % together_),
        shared_(static_cast<Shared*>(shared)) {
    if (parts > 1 && threadIdx.x == 0) before_ = atomicAdd(own_claim(), Counter{1});
  }
  // Ends it. Returns whether this block has its part.
  __device__ __forceinline__ bool has_part() {
    if (parts_ == 1) return true;
    const bool is_mine = before_ % 2 == 0;
    if (threadIdx.x == 0) {
      if (is_mine) atomicAdd(own_claim(), Counter{1});
      shared_->unclaimed = before_;
    }
    return answer_of_first(is_mine, &shared_->answer) != 0;
  }
  __device__ __forceinline__ int part() const { return blockIdx.x / together_; }
  // The number of parts that this block has adopted, and these.
  __device__ __forceinline__ int adopted() const { return adopted_; }
  __device__ __forceinline__ int adopted(int i) const { return shared_->adopted[i]; }
  // Whether this is the one block that has a slab's first part.
  __device__ __forceinline__ bool has_first_part() const {
    bool result = part() == 0;
    for (int i = 0; i < adopted_; ++i) result = result || adopted(i) == 0;
    return result;
  }

  // Tells the team that the sums of this block's part of a slab are written, lets `add_up(part)`
  // write those of adopted parts, and waits for the sums of all parts.
  template <typename AddUp>
  __device__ __forceinline__ void meet(int slab, Counter* counter, const AddUp& add_up) {
    if (parts_ == 1) {
      __syncthreads();
      return;
    }
    const Counter all = publish(counter, parts_).all;
    // All parts have a block as soon as the first slab is done.
    long long patience = slab < together_ ? kPatience : kForEver;
    int left = adopted_;
    while (true) {
      int next = -1;
      if (left > 0) {
        next = adopted(--left);
      } else {
        if (answer_of_first(has_come(counter, all, patience), &shared_->answer)) return;
        next = adopt();
        patience = next < 0 ? kForEver : 0;
      }
      if (next < 0) continue;
      add_up(next);
      publish(counter, parts_);
    }
  }

 private:
  static constexpr long long kForEver = -1;
  struct Shared {
    Counter unclaimed;  // a claim that no block has made in this launch
    int answer;
    unsigned short adopted[kMostParts];
  };
  static_assert(sizeof(Shared) <= kTeamBytes || PASS != 0, "what is reserved");

  __device__ __forceinline__ Counter* own_claim() const { return claims_ + part() * together_; }

  // Waits until a counter has reached a number, for some cycles. Returns whether it has.
  __device__ __forceinline__ static bool has_come(const Counter* counter, Counter number,
                                                  long long patience) {
    if (threadIdx.x != 0) return false;
    const long long begun = clock64();
    while (load_acquire(counter) < number) {
      if (patience != kForEver && clock64() - begun >= patience) return false;
      let_others_run();
    }
    __threadfence();
    return true;
  }

  // Adopts a part that no block has claimed. Returns it, or -1 if there is none.
  __device__ __forceinline__ int adopt() {
    // Blocks start in their order, so the last parts are the likeliest, a different one for each.
    const auto candidate = [&](int i) { return (2 * parts_ - 1 - part() + i) % parts_; };
    while (true) {
      answer_of_first(parts_, &shared_->answer);
      for (int i = threadIdx.x; i < parts_; i += THREADS) {
        if (load_acquire(claims_ + candidate(i) * together_) == shared_->unclaimed) {
          atomicMin(&shared_->answer, i);
        }
      }
      __syncthreads();
      const int first = shared_->answer;
      __syncthreads();
      if (first == parts_) return -1;
      const int found = candidate(first);
      bool is_mine = false;
      if (threadIdx.x == 0) {
        const Counter unclaimed = shared_->unclaimed;
        is_mine = atomicCAS(claims_ + found * together_, unclaimed, unclaimed + 1) == unclaimed;
        if (is_mine) shared_->adopted[adopted_] = static_cast<unsigned short>(found);
      }
      if (answer_of_first(is_mine, &shared_->answer) == 0) continue;
      ++adopted_;
      return found;
    }
  }

  int parts_, together_, adopted_ = 0;
  Counter* claims_;     // of the blocks of all parts, `together_` apart
  Counter before_ = 0;  // this block's claim, in thread 0
  Shared* shared_;
};

__device__ __forceinline__ float parameter(const PARAMETER* values, int channel, float otherwise) {
  return values == nullptr ? otherwise : to_float(values[channel]);
}

// What the activation is computed of.
__device__ __forceinline__ float normalized(float x, float mean, float scale, float bias) {
  return (x - mean) * scale + bias;
}

// The gradient of the argument of a ReLU, ReLU6 or leaky ReLU where it is not that of the output y.
__device__ __forceinline__ float damped(float grad) {
#if ACTIVATION == 10
  return grad * ACTIVATION_PARAMETER;
#else
  return 0.0f;
#endif
}
// Whether it is that of the output.
__device__ __forceinline__ bool passes(float y) {
  return ACTIVATION == 10 ? y > 0.0f : !(y <= 0.0f || (ACTIVATION == 7 && y >= 6.0f));
}
