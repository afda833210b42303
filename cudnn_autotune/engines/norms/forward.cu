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

struct Statistics {
  float shift[kChannels], sum[kChannels] = {}, squares[kChannels] = {};

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
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    norm_forward(const ELEMENT* __restrict__ x, const PARAMETER* __restrict__ weight,
                 const PARAMETER* __restrict__ bias, const ELEMENT* __restrict__ residual,
                 ELEMENT* __restrict__ y, float* mean_of, float* inv_std_of, float* unbiased_of,
                 float2* sums, unsigned* counters, int batch, int channels, int spatial, int slabs,
                 int parts, int tile, float eps) {
  DYNAMIC_SHARED(shared);
  auto* const scratch = reinterpret_cast<float*>(shared);
  // The mean and the inverse deviation of each channel of the slab.
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
      Statistics statistics;
      if (place.vectors > 0) {
        // Differences from one of the numbers: a large mean would cancel.
        float first[VECTOR];
        load(x + place.start(of, part)).get(first);
#pragma unroll
        for (int c = 0; c < kChannels; ++c) statistics.shift[c] = first[c];
      }
      if (kKeeps) {
        for (int group = 0; group < kGroups; ++group) {
          wait_for_group();
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
#pragma unroll
          for (int i = 0; i < UNROLLED; ++i) {
            if (v + i < place.vectors) statistics.add(vectors[i]);
          }
        }
      }
      // The first number of a part is that of all its threads, but only those have it that have
      // vectors; so the thread that adds up a channel loads it again.
      const float2 sum = add_threads(statistics.sum, statistics.squares, scratch);
      if (threadIdx.x < kSlabChannels && slab * kSlabChannels + threadIdx.x < channels) {
        const int at = PLANES ? place.start(of, part)
                              : place.start(of, part) - place.channel + slab * kSlabChannels +
                                    static_cast<int>(threadIdx.x);
        const float n = static_cast<float>(of.count(part));
        const float squares = sum.y - sum.x * sum.x / n;
        slab_sums[part * kSlabChannels + threadIdx.x] =
            make_float2(to_float(x[at]) + sum.x / n, squares < 0.0f ? 0.0f : squares);
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
        const float squares = all.y - all.x * all.x / n;
        const float variance = (squares < 0.0f ? 0.0f : squares) / n;
        const float mean = first + all.x / n, inv_std = 1.0f / sqrtf(variance + eps);
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
