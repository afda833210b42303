// A batch norm with statistics of the batch, or a group norm, plus a residual, then an activation.
// See tile.cuh.
//
// With PASS 0 one launch does it all: each block keeps its part of x in shared memory while the
// blocks of the slab add up their statistics, so x is read once. With PASS 1 a launch finds the
// statistics, and with PASS 2 another one applies them, from the end of each part to its beginning,
// because that is what the cache still has.
//
// With MASK it also writes where the activation passes gradients on, which is all that the backward
// needs of the output.
//
// Running statistics that are given move towards those of the batch by `momentum`.

// Vectors of a streamed part that a thread reads together. What is kept needs the registers.
constexpr int kStreamed = PASS == 0 ? 1 : UNROLLED;
constexpr bool kSums = PASS != 2, kApplies = PASS != 1;

// Begins to copy the vectors of one group.
__device__ __forceinline__ void copy_group(const Place& place, int group, int size,
                                           const ELEMENT* x, unsigned char* kept) {
  for (int v = group * size; v < min((group + 1) * size, place.vectors); ++v) {
    copy_vector(kept_at(kept, v), x + place[v]);
  }
  end_group();
}

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
};

// Merges what all threads with the same lane have: the mean, and the sum of squared differences
// from it. Returns them to each thread that has a channel of the slab, for channel threadIdx.x.
// `origins` are the numbers from which means count.
__device__ __forceinline__ float2 merge_threads(const Statistics& of, int vectors,
                                                const float2* origins, float* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float count = static_cast<float>(vectors * (PLANES ? VECTOR : 1));
  const float inverse = count > 0.0f ? 1.0f / count : 0.0f;
  float mean[kChannels], squares[kChannels];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    const float origin = origins[threadIdx.x % LANES * kChannels + c].x;
    const float difference = of.sum[c] * inverse;
    mean[c] = count > 0.0f ? of.shift[c] - origin + difference : 0.0f;
    squares[c] = of.squares[c] - of.sum[c] * difference;
  }
#pragma unroll
  for (int by = LANES; by < 32; by *= 2) {
    const float others = __shfl_xor_sync(0xffffffffu, count, by);
    const float all = count + others;
    const float share = all > 0.0f ? others / all : 0.0f, weight = count * share;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      const float d = __shfl_xor_sync(0xffffffffu, mean[c], by) - mean[c];
      squares[c] += __shfl_xor_sync(0xffffffffu, squares[c], by) + d * d * weight;
      mean[c] += d * share;
    }
    count = all;
  }
  auto* const moments = reinterpret_cast<float2*>(scratch);
  float* const counts = scratch + 2 * kWarps * kSlabChannels;
  if (lane < LANES) {
    counts[warp * LANES + lane] = count;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      moments[warp * kSlabChannels + lane * kChannels + c] = make_float2(mean[c], squares[c]);
    }
  }
  __syncthreads();
  if (threadIdx.x >= kSlabChannels) return make_float2(0.0f, 0.0f);
  // The means of warps differ little from the first one's.
  const float first = moments[threadIdx.x].x;
  float n = 0.0f, sum = 0.0f, total = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    const float2 more = moments[i * kSlabChannels + threadIdx.x];
    const float of_warp = counts[i * LANES + threadIdx.x / kChannels];
    const float d = more.x - first;
    n += of_warp;
    sum += of_warp * d;
    total += more.y + of_warp * d * d;
  }
  if (n == 0.0f) return make_float2(0.0f, 0.0f);
  return make_float2(first + sum / n, total - sum * (sum / n));
}

// The weight and bias of the channels of a group, for numbers one after the other.
struct GroupAffine {
  const PARAMETER *weight, *bias;
  int spatial, channel, rest;  // `rest` is the place in the channel
  float scale, shift;

  // Begins at a number of the group whose first channel is `first`.
  __device__ __forceinline__ GroupAffine(const PARAMETER* weight, const PARAMETER* bias,
                                         const Division& of, int first, int number)
      : weight(weight), bias(bias), spatial(of.spatial) {
    if (!GROUPS) return;
    channel = number / spatial;
    rest = number - channel * spatial;
    channel += first;
    read();
  }
  __device__ __forceinline__ void next() {
    if (++rest != spatial) return;
    rest = 0;
    ++channel;
    read();
  }

 private:
  __device__ __forceinline__ void read() {
    scale = parameter(weight, channel, 1.0f);
    shift = parameter(bias, channel, 0.0f);
  }
};

// The mean and the variance of the group of a channel, from those of all its channels.
template <typename Moments>
__device__ __forceinline__ float2 moments_of_group(int channel, const Moments& moments) {
  const int first = channel / kOfGroup * kOfGroup;
  const float origin = moments(first).x;  // from which means count
  float sum = 0.0f, squares = 0.0f, variances = 0.0f;
#pragma unroll 8
  for (int i = 0; i < kOfGroup; ++i) {
    const float2 one = moments(first + i);
    const float d = one.x - origin;
    sum += d;
    squares += d * d;
    variances += one.y;
  }
  constexpr float kShare = 1.0f / kOfGroup;
  const float between = squares * kShare - (sum * kShare) * (sum * kShare);
  return make_float2(origin + sum * kShare, variances * kShare + (between < 0.0f ? 0.0f : between));
}

// Updates a running statistic, if it is given.
__device__ __forceinline__ void move_towards(float* running, int channel, float value,
                                             float momentum) {
  if (running == nullptr) return;
  running[channel] = (1.0f - momentum) * running[channel] + momentum * value;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    norm_forward(const ELEMENT* __restrict__ x, const PARAMETER* __restrict__ weight,
                 const PARAMETER* __restrict__ bias, const ELEMENT* __restrict__ residual,
                 ELEMENT* __restrict__ y, float* mean_of, float* inv_std_of, float* unbiased_of,
                 unsigned char* __restrict__ mask, float* running_mean, float* running_var,
                 float2* sums, Counter* counters, int batch, int channels, int spatial, int slabs,
                 int parts, int tile, float eps, float momentum) {
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
#if PASS == 0
  Team team(counters + slabs, parts, found + kSlabChannels);
  const Place begin(of, blockIdx.x % together, part);
  for (int group = 0; group < kGroups; ++group) copy_group(begin, group, group_size, x, kept);
  if (!team.has_part()) {
    copies_arrived<0>();
    return;
  }
#endif

  for (int slab = blockIdx.x % together; slab < slabs; slab += together) {
    const Place place(of, slab, part), next(of, slab + together, part);
    float scale[kChannels] = {}, shift[kChannels] = {};
    if (kApplies && place.channel < channels) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        scale[c] = GROUPS ? 1.0f : parameter(weight, place.channel + c, 1.0f);
        shift[c] = GROUPS ? 0.0f : parameter(bias, place.channel + c, 0.0f);
      }
    }
    float2* const slab_sums = sums + static_cast<long long>(slab) * parts * kSlabChannels;

    if (kSums) {
      if (threadIdx.x < kSlabChannels) {
        const int channel = of.channel(slab) + threadIdx.x;
        const int at = GROUPS   ? channel * of.count()
                       : PLANES ? channel * spatial
                                : of.channels_before(of.image(slab)) * spatial + channel;
        found[threadIdx.x].x = channel < channels ? to_float(x[at]) : 0.0f;
      }
      // Writes the sums of a part, of what threads have added up.
      const auto write_sums = [&](const Statistics& statistics, const Place& there, int which) {
        __syncthreads();  // `found` has the first number of each channel
        const float2 moments = merge_threads(statistics, there.vectors, found, scratch);
        if (threadIdx.x < kSlabChannels) {
          slab_sums[which * kSlabChannels + threadIdx.x] = moments;
        }
      };
      const auto add_up_streamed = [&](int which) {
        const Place there(of, slab, which);
        Statistics statistics;
        for (int v = 0; v < there.vectors; v += kStreamed) {
          Vector vectors[kStreamed];
#pragma unroll
          for (int i = 0; i < kStreamed; ++i) {
            if (v + i < there.vectors) vectors[i] = load(x + there[v + i]);
          }
          if (v == 0) statistics.start(vectors[0]);
#pragma unroll
          for (int i = 0; i < kStreamed; ++i) {
            if (v + i < there.vectors) statistics.add(vectors[i]);
          }
        }
        write_sums(statistics, there, which);
      };
#if PASS == 0
      Statistics statistics;
      for (int group = 0; group < kGroups; ++group) {
        wait_for_group();
        if (group == 0 && place.vectors > 0) statistics.start(*kept_at(kept, 0));
        const int end = min((group + 1) * group_size, place.vectors);
#pragma unroll 2
        for (int v = group * group_size; v < end; ++v) statistics.add(*kept_at(kept, v));
      }
      write_sums(statistics, place, part);
      // what is read while the blocks wait
      if (RESIDUAL) prefetch(residual, place, 0, group_size);
      prefetch(x, next, 0, group_size);
      team.meet(slab, counters + slab, add_up_streamed);
      const bool writes_statistics = team.has_first_part();
#else
      add_up_streamed(part);
      if (!is_last_of(counters + slab, parts, reinterpret_cast<int*>(scratch))) return;
      constexpr bool writes_statistics = true;
#endif
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
        const int channel = of.statistic(of.image(slab), of.channel(slab) + threadIdx.x);
        if (kAddsChannels) {
          slab_sums[threadIdx.x] = make_float2(mean, variance);
        } else if (of.channel(slab) + threadIdx.x < channels && writes_statistics) {
          const float unbiased = variance * (n / (n - 1.0f));
          mean_of[channel] = mean;
          inv_std_of[channel] = inv_std;
          if (unbiased_of != nullptr) unbiased_of[channel] = unbiased;
          move_towards(running_mean, channel, mean, momentum);
          move_towards(running_var, channel, unbiased, momentum);
        }
        found[threadIdx.x] = make_float2(mean, inv_std);
      }
      __syncthreads();
    }

    if (kApplies) {
      if (kAddsChannels) {
        const int channel = of.channel(slab) + threadIdx.x;
        if (threadIdx.x < kSlabChannels && channel < channels) {
          const float2 moments = moments_of_group(channel, [&](int c) {
            const long long of_slab = place.image * of.slabs_of_image() + c / kSlabChannels;
            return load_fresh(sums + of_slab * parts * kSlabChannels + c % kSlabChannels);
          });
          const float inv_std = 1.0f / sqrtf(moments.y + eps);
          if (part == 0 && channel % kOfGroup == 0) {
            mean_of[of.statistic(place.image, channel)] = moments.x;
            inv_std_of[of.statistic(place.image, channel)] = inv_std;
          }
          found[threadIdx.x] = make_float2(moments.x, inv_std);
        }
        __syncthreads();
      }
      float mean[kChannels];
      if (place.channel < channels) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          const int at = of.statistic(place.image, place.channel + c);
          const float2 of_channel = kSums || kAddsChannels
                                        ? found[place.channel + c - of.channel(slab)]
                                        : make_float2(mean_of[at], inv_std_of[at]);
          mean[c] = of_channel.x;
          scale[c] *= of_channel.y;
        }
      }
      const auto apply = [&](const Place& there, int v, const Vector& vector,
                             const Vector& addend) {
        float values[VECTOR], added[VECTOR];
        vector.get(values);
        if (RESIDUAL) addend.get(added);
        GroupAffine affine(weight, bias, of, slab % kGroupsOfImage * batch, there.number(v));
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
          const int c = PLANES ? 0 : i;
          const float z =
              GROUPS ? normalized(values[i], mean[c], scale[c] * affine.scale, affine.shift)
                     : normalized(values[i], mean[c], scale[c], shift[c]);
          values[i] = activate<ACTIVATION>(RESIDUAL ? z + added[i] : z);
          if (GROUPS && i + 1 < VECTOR) affine.next();
        }
        const Vector result = Vector::of(values);
        *reinterpret_cast<Vector*>(y + there[v]) = result;
        if (MASK) {
          result.get(values);  // as they were rounded
          unsigned bits = 0;
#pragma unroll
          for (int i = 0; i < VECTOR; ++i) bits |= static_cast<unsigned>(passes(values[i])) << i;
          mask[there.mask_at(of, v)] = static_cast<unsigned char>(bits);
        }
      };
      const auto apply_streamed = [&](const Place& there) {
        for (int last = there.vectors - 1; last >= 0; last -= kStreamed) {
          Vector vectors[kStreamed], addends[kStreamed];
#pragma unroll
          for (int i = 0; i < kStreamed; ++i) {
            if (last - i < 0) continue;
            vectors[i] = load(x + there[last - i]);
            if (RESIDUAL) addends[i] = load(residual + there[last - i]);
          }
#pragma unroll
          for (int i = 0; i < kStreamed; ++i) {
            if (last - i >= 0) apply(there, last - i, vectors[i], addends[i]);
          }
        }
      };
#if PASS == 0
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
            if (v + i < end) apply(place, v + i, *kept_at(kept, v + i), addends[i]);
          }
        }
        // This thread alone reads and writes its places in shared memory.
        copy_group(next, group, group_size, x, kept);
      }
      for (int i = 0; i < team.adopted(); ++i) apply_streamed(Place(of, slab, team.adopted(i)));
#else
      apply_streamed(place);
#endif
      __syncthreads();  // before `found` is written again
    }
  }
}
