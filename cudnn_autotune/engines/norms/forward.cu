// A batch norm with statistics of the batch, plus a residual, then an activation. See tile.cuh.
//
// With PASS 0 one launch does it all: each block keeps its part of x in shared memory while the
// blocks of the slab add up their statistics, so x is read once. All blocks must be on the GPU
// together. With PASS 1 a launch finds the statistics, and with PASS 2 another one applies them,
// from the end of each part to its beginning, because that is what the cache still has.

constexpr bool kKeeps = PASS == 0, kSums = PASS != 2, kApplies = PASS != 1;

// Begins to copy the vectors of one group.
__device__ __forceinline__ void copy_group(const Place& place, int group, int size,
                                           const ELEMENT* x, unsigned char* kept) {
  for (int v = group * size; v < min((group + 1) * size, place.vectors); ++v) {
    copy_vector(kept_at(kept, v), x + place[v]);
  }
  end_group();
}

// The number, the mean and the sum of squared differences from it, of values of one channel.
struct Moments {
  float count = 0.0f, mean = 0.0f, squares = 0.0f;

  __device__ __forceinline__ void merge(const Moments& other) {
    const float all = count + other.count;
    const float share = all > 0.0f ? other.count / all : 0.0f;
    const float d = other.mean - mean;
    mean += d * share;
    squares += other.squares + d * d * count * share;
    count = all;
  }
};

// The sums of one thread: of differences from its first values, since a large mean would cancel.
// Its mean counts from a number that all threads of a channel know, and so rounds as little.
struct Statistics {
  float shift[kChannels] = {}, sum[kChannels] = {}, squares[kChannels] = {};

  __device__ __forceinline__ void start(const Vector& first) {
    float x[VECTOR];
    first.get(x);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) shift[c] = x[c];
  }
  __device__ __forceinline__ void add(const Vector& vector) {
    float x[VECTOR];
    vector.get(x);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      const int c = PLANES ? 0 : i;
      const float d = x[i] - shift[c];
      sum[c] += d;
      squares[c] += d * d;
    }
  }
  __device__ __forceinline__ Moments of(int channel, float count, float origin) const {
    if (count == 0.0f) return {};
    const float mean = sum[channel] / count;
    const float squared = squares[channel] - sum[channel] * mean;
    return {count, shift[channel] - origin + mean, squared < 0.0f ? 0.0f : squared};
  }
};

// Merges what all threads with the same lane have. Returns the moments of channel threadIdx.x of
// the slab to each thread that has one. `origins` begin with the numbers that means count from.
__device__ __forceinline__ Moments merge_threads(const Statistics& of, int vectors,
                                                 const float2* origins, float* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto* const sums = reinterpret_cast<float2*>(scratch);
  float* const counts = scratch + 2 * kWarps * kSlabChannels;
  const float count = static_cast<float>(vectors * (PLANES ? VECTOR : 1));
#pragma unroll
  for (int i = 0; i < kChannels; ++i) {
    Moments mine = of.of(i, count, origins[threadIdx.x % LANES * kChannels + i].x);
#pragma unroll
    for (int by = LANES; by < 32; by *= 2) {
      mine.merge({__shfl_xor_sync(0xffffffffu, mine.count, by),
                  __shfl_xor_sync(0xffffffffu, mine.mean, by),
                  __shfl_xor_sync(0xffffffffu, mine.squares, by)});
    }
    if (lane < LANES) {
      sums[warp * kSlabChannels + lane * kChannels + i] = make_float2(mine.mean, mine.squares);
      counts[warp * LANES + lane] = mine.count;
    }
  }
  __syncthreads();
  Moments all;
  if (threadIdx.x < kSlabChannels) {
    for (int i = 0; i < kWarps; ++i) {
      const float2 more = sums[i * kSlabChannels + threadIdx.x];
      all.merge({counts[i * LANES + threadIdx.x / kChannels], more.x, more.y});
    }
  }
  return all;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    norm_forward(const ELEMENT* __restrict__ x, const PARAMETER* __restrict__ weight,
                 const PARAMETER* __restrict__ bias, const ELEMENT* __restrict__ residual,
                 ELEMENT* __restrict__ y, float* mean_of, float* inv_std_of, float* unbiased_of,
                 float2* sums, unsigned* counters, int batch, int channels, int spatial, int slabs,
                 int parts, int tile, float eps) {
  DYNAMIC_SHARED(shared);
  auto* const scratch = reinterpret_cast<float*>(shared);
  // The mean and the inverse deviation of each channel of the slab; before they are known, its
  // first number, from which the means of parts count.
  auto* const found = reinterpret_cast<float2*>(scratch + kSumFloats);
  unsigned char* const kept = shared + kScratchBytes;
  const Division of{batch, channels, spatial, slabs, parts, tile};
  const int together = gridDim.x / parts;  // slabs that are worked on at a time
  const int part = blockIdx.x / together;
  const int group_size = ((tile + kUnits - 1) / kUnits + kGroups - 1) / kGroups;
  if (kKeeps) {
    const Place place(of, blockIdx.x % together, part);
    for (int group = 0; group < kGroups; ++group) copy_group(place, group, group_size, x, kept);
  }

  for (int slab = blockIdx.x % together; slab < slabs; slab += together) {
    const Place place(of, slab, part);
    float2* const slab_sums = sums + static_cast<long long>(slab) * parts * kSlabChannels;

    if (kSums) {
      if (threadIdx.x < kSlabChannels) {
        const int channel = slab * kSlabChannels + threadIdx.x;
        const int at = PLANES ? channel * spatial : channel;
        found[threadIdx.x].x = channel < channels ? to_float(x[at]) : 0.0f;
      }
      Statistics statistics;
      if (kKeeps) {
        for (int group = 0; group < kGroups; ++group) {
          wait_for_group();
          if (group == 0 && place.vectors > 0) statistics.start(*kept_at(kept, 0));
          const int end = min((group + 1) * group_size, place.vectors);
#pragma unroll 2
          for (int v = group * group_size; v < end; ++v) statistics.add(*kept_at(kept, v));
        }
      } else {
        for (int v = 0; v < place.vectors; v += UNROLLED) {
          Vector vectors[UNROLLED];
#pragma unroll
          for (int i = 0; i < UNROLLED; ++i) {
            if (v + i < place.vectors) vectors[i] = load(x + place[v + i]);
          }
          if (v == 0) statistics.start(vectors[0]);
#pragma unroll
          for (int i = 0; i < UNROLLED; ++i) {
            if (v + i < place.vectors) statistics.add(vectors[i]);
          }
        }
      }
      __syncthreads();  // `found` has the first number of each channel
      const Moments moments = merge_threads(statistics, place.vectors, found, scratch);
      if (threadIdx.x < kSlabChannels) {
        slab_sums[part * kSlabChannels + threadIdx.x] = make_float2(moments.mean, moments.squares);
      }
      if (!meet(counters + slab, parts, scratch)) return;
      // The means of parts differ little from the first one's.
      const float first = load_fresh(slab_sums + threadIdx.x % kSlabChannels).x;
      const float2 all = add_parts(slab_sums, parts, scratch, [&](int p, float2 numbers) {
        const float n = static_cast<float>(of.count(p));
        const float d = numbers.x - first;
        return make_float2(n * d, numbers.y + n * d * d);
      });
      if (threadIdx.x < kSlabChannels) {
        const float n = static_cast<float>(of.count());
        const float squares = all.y - all.x * (all.x / n);
        const float variance = (squares < 0.0f ? 0.0f : squares) / n;
        const float mean = found[threadIdx.x].x + (first + all.x / n),
                    inv_std = 1.0f / sqrtf(variance + eps);
        const int channel = slab * kSlabChannels + threadIdx.x;
        if (channel < channels && (part == 0 || !kKeeps)) {
          mean_of[channel] = mean;
          inv_std_of[channel] = inv_std;
          unbiased_of[channel] = variance * (n / (n - 1.0f));
        }
        found[threadIdx.x] = make_float2(mean, inv_std);
      }
      __syncthreads();
    }

    if (kApplies) {
      float mean[kChannels], scale[kChannels], shift[kChannels];
      if (place.vectors > 0) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          const int channel = place.channel + c;
          const float2 of_channel = kSums ? found[channel - slab * kSlabChannels]
                                          : make_float2(mean_of[channel], inv_std_of[channel]);
          mean[c] = of_channel.x;
          scale[c] = of_channel.y * parameter(weight, channel, 1.0f);
          shift[c] = parameter(bias, channel, 0.0f);
        }
      }
      const Place next(of, slab + together, part);
      const auto apply = [&](int v, const Vector& vector, const Vector& addend) {
        float values[VECTOR], added[VECTOR];
        vector.get(values);
        if (RESIDUAL) addend.get(added);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
          const int c = PLANES ? 0 : i;
          const float z = normalized(values[i], mean[c], scale[c], shift[c]);
          values[i] = activated(RESIDUAL ? z + added[i] : z);
        }
        store(y + place[v], values);
      };
      if (kKeeps) {
        for (int group = 0; group < kGroups; ++group) {
          const int end = min((group + 1) * group_size, place.vectors);
          for (int v = group * group_size; v < end; v += UNROLLED) {
            Vector addends[UNROLLED];
#pragma unroll
            for (int i = 0; i < UNROLLED; ++i) {
              if (RESIDUAL && v + i < end) addends[i] = load(residual + place[v + i]);
            }
#pragma unroll
            for (int i = 0; i < UNROLLED; ++i) {
              if (v + i < end) apply(v + i, *kept_at(kept, v + i), addends[i]);
            }
          }
          // This thread alone reads and writes its places in shared memory.
          copy_group(next, group, group_size, x, kept);
        }
      } else {
        for (int last = place.vectors - 1; last >= 0; last -= UNROLLED) {
          Vector vectors[UNROLLED], addends[UNROLLED];
#pragma unroll
          for (int i = 0; i < UNROLLED; ++i) {
            if (last - i < 0) continue;
            vectors[i] = load(x + place[last - i]);
            if (RESIDUAL) addends[i] = load(residual + place[last - i]);
          }
#pragma unroll
          for (int i = 0; i < UNROLLED; ++i) {
            if (last - i >= 0) apply(last - i, vectors[i], addends[i]);
          }
        }
      }
      __syncthreads();  // before `found` is written again
    }
  }
}
