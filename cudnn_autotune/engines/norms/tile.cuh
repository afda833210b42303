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

constexpr int kVectorBytes = VECTOR * static_cast<int>(sizeof(ELEMENT));
// Sums that a thread has of each kind: one a channel.
constexpr int kChannels = PLANES ? 1 : VECTOR;
constexpr int kSlabChannels = LANES * kChannels;
// Units that a block works on at a time.
constexpr int kUnits = THREADS / LANES;
constexpr int kWarps = THREADS / 32;
constexpr int kGroupsOfImage = GROUPS ? GROUPS : 1;
// A mask, of a tensor in channels_last, has a byte for each vector of 16 bytes, a bit for each
// number, the first one lowest.
constexpr int kSegment = 8;
static_assert(!MASK || (!PLANES && kVectorBytes == 16), "what a byte of a mask stands for");
static_assert(GROUPS == 0 || PLANES, "a group is contiguous");
// Groups of asynchronous copies into which a block divides its part.
constexpr int kGroups = 4;
// The first bytes of shared memory, where sums of threads are added: two floats a channel of each
// warp and one a lane, or two floats a thread. Behind them are two floats a channel of the slab.
constexpr int kWarpFloats = LANES * kWarps * (2 * kChannels + 1);
constexpr int kSumFloats = kWarpFloats > 2 * THREADS ? kWarpFloats : 2 * THREADS;
constexpr int kScratchBytes = (4 * (kSumFloats + 2 * kSlabChannels) + 127) / 128 * 128;
static_assert(SCRATCH_BYTES == kScratchBytes, "what the launch reserves");

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
// Waits until a counter has reached a number.
__device__ __forceinline__ void wait_for(const Counter* counter, Counter number) {
  Counter reached;
  do {
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(reached) : "l"(counter) : "memory");
  } while (reached < number);
}
// Begins to bring what is at an address into the L2 cache.
__device__ __forceinline__ void prefetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
#else
__device__ __forceinline__ float2 load_fresh(const float2* from) { return *from; }
__device__ __forceinline__ void wait_for(const Counter* counter, Counter number) {
  while (*static_cast<const volatile Counter*>(counter) < number) emulation::wait_for_blocks();
}
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

  // Values of a channel, in the tensor and in one part.
  __device__ __forceinline__ int count() const { return batch * spatial; }
  __device__ __forceinline__ int count(int part) const {
    const int unit = PLANES ? VECTOR : 1;
    return min(tile, count() / unit - part * tile) * unit;
  }
};

// The vectors of one thread in a part of a slab.
struct Place {
  int channel;  // the first of this thread's
  int vectors;  // how many it has
  int first;    // its first unit
  // Of a contiguous tensor: vectors of all channels and of one channel. The first one is the
  // vectors of a group, if there are groups.
  int stride, plane;

  __device__ __forceinline__ Place(const Division& of, int slab, int part) {
    const int lane = static_cast<int>(threadIdx.x) % LANES;
    channel = slab * kSlabChannels + lane * kChannels;
    first = part * of.tile + static_cast<int>(threadIdx.x) / LANES;
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
    if (!PLANES) return unit * stride + channel;
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

// Tells the other blocks of the slab that this one has written its sums. Returns whether it may
// read those of all: in one launch with the other blocks it waits for them, else it may if it is
// the last. Each launch adds `parts` to the counter, which is never reset, and begins at a multiple
// of them.
__device__ __forceinline__ bool meet(Counter* counter, int parts, float* scratch) {
  __syncthreads();
  if (parts == 1) return true;
  auto* const is_last = reinterpret_cast<int*>(scratch);
  if (threadIdx.x == 0) {
    __threadfence();
    const Counter before = atomicAdd(counter, Counter{1});
    const Counter all = (before / parts + 1) * parts;
    if (PASS == 0) wait_for(counter, all);
    __threadfence();
    *is_last = before + 1 == all;
  }
  __syncthreads();
  const bool result = PASS == 0 || *is_last;
  __syncthreads();
  return result;
}

__device__ __forceinline__ float parameter(const PARAMETER* values, int channel, float otherwise) {
  return values == nullptr ? otherwise : to_float(values[channel]);
}

// What the activation is computed of.
__device__ __forceinline__ float normalized(float x, float mean, float scale, float bias) {
  return (x - mean) * scale + bias;
}

// Whether a ReLU or ReLU6 passes the gradient of its output y on; where it does not, it is 0.
__device__ __forceinline__ bool passes(float y) {
  return !(y <= 0.0f || (ACTIVATION == 7 && y >= 6.0f));
}
