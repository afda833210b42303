// The gradients of a batch norm with statistics of the batch, or of a group norm in channels_last,
// of a residual that was added and of an activation behind them. See tile.cuh, and forward.cu for
// what PASS means.
//
// With dz, the gradient of the activation's argument, the gradient of x is
// (dz - mean(dz) - xhat * mean(dz * xhat)) * weight * inv_std. VALUE says what the derivative of
// the activation is computed of: 0 nothing or x, 1 the output, 2 x and the residual, 3 a mask.
//
// With PASS 0 a block keeps dz, and with KEEPS_X x too. Else it reads x again, from the end to the
// beginning, because that is what the cache still has; each slab begins where the last one ended. A
// part that is streamed takes its vectors in the same order.

// Vectors of a streamed part that a thread reads together. What is kept needs the registers.
constexpr int kStreamed = PASS == 0 ? 1 : UNROLLED;
constexpr bool kSums = PASS != 2, kApplies = PASS != 1;
constexpr bool kKeepsX = PASS == 0 && KEEPS_X;
constexpr bool kNeedsArgument = ACTIVATION != 0 && (VALUE == 0 || VALUE == 2);
// Gradients of weight and bias. In a group norm they are of each image, to be added up.
#if OF_GROUP
using Gradient = float;
#else
using Gradient = PARAMETER;
#endif
// The second pass takes dz from where the first one has stored it, if it has.
constexpr bool kReadsDz = PASS == 2 && STORES_DZ;

// The gradient of the activation's argument z. `value` is the output if VALUE is 1, else z.
__device__ __forceinline__ float gradient(float grad, float value) {
  switch (ACTIVATION) {
    case 1:
    case 7:
    case 10:
      return passes(value) ? grad : damped(grad);
    case 2: {
      const float gate = 1.0f / (1.0f + expf(-value));
      return grad * gate * (1.0f + value * (1.0f - gate));
    }
    case 3: {
      const float density = 0.39894228040143268f * expf(-0.5f * value * value);
      return grad * (0.5f * (1.0f + erff(value * 0.70710678118654752f)) + value * density);
    }
    case 4: {
      const float squared = value * value;
      const float t = tanhf(0.79788456080286536f * value * (1.0f + 0.044715f * squared));
      const float slope = 0.79788456080286536f * (1.0f + 3.0f * 0.044715f * squared);
      return grad * (0.5f * (1.0f + t) + 0.5f * value * (1.0f - t * t) * slope);
    }
    case 5: {
      const float y = VALUE == 1 ? value : activate<5>(value);
      return grad * (1.0f - y) * y;
    }
    case 6:
      return value < -3.0f ? 0.0f : value <= 3.0f ? grad * (value * (1.0f / 3.0f) + 0.5f) : grad;
    default:
      return grad;
  }
}

// Tensors that are read, and what is known of this thread's channels.
struct Operands {
  const ELEMENT *dy, *dy_2, *x, *value;
  float mean[kChannels], scale[kChannels], shift[kChannels];
};

// What is read at one place beside x and dy.
struct Beside {
  Vector dy_2, value;
  unsigned bits;
  __device__ __forceinline__ void get(const Operands& operands, const Division& of,
                                      const Place& place, int v) {
    if (SECOND) dy_2 = load(operands.dy_2 + place[v]);
    if (VALUE == 1 || VALUE == 2) value = load(operands.value + place[v]);
    if (MASK) bits = reinterpret_cast<const unsigned char*>(operands.value)[place.mask_at(of, v)];
  }
};

// Turns dy into dz.
__device__ __forceinline__ void differentiate(float (&dy)[VECTOR], const float (&x)[VECTOR],
                                              const Beside& beside, const Operands& of) {
  float second[VECTOR], value[VECTOR];
  if (SECOND) beside.dy_2.get(second);
  if (VALUE == 1 || VALUE == 2) beside.value.get(value);
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    const int c = PLANES ? 0 : i;
    float argument = VALUE == 1 ? value[i] : 0.0f;
    if (kNeedsArgument) {
      argument = normalized(x[i], of.mean[c], of.scale[c], of.shift[c]);
      if (VALUE == 2) argument += value[i];
    }
    if (SECOND) dy[i] += second[i];
    if (MASK) {
      dy[i] = (beside.bits >> i & 1) != 0 ? dy[i] : damped(dy[i]);
    } else {
      dy[i] = gradient(dy[i], argument);
    }
  }
}

// Begins to copy the vectors of one group.
__device__ __forceinline__ void copy_group(const Place& place, int group, int size,
                                           const ELEMENT* x, const ELEMENT* dy,
                                           unsigned char* kept_x, unsigned char* kept_dz) {
  for (int v = group * size; v < min((group + 1) * size, place.vectors); ++v) {
    if (kKeepsX) copy_vector(kept_at(kept_x, v), x + place[v]);
    copy_vector(kept_at(kept_dz, v), dy + place[v]);
  }
  end_group();
}

// Adds the sums of all threads with the same lane. Returns the two of channel threadIdx.x of the
// slab to each thread that has one.
__device__ __forceinline__ float2 add_threads(float (&first)[kChannels], float (&second)[kChannels],
                                              float* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int by = LANES; by < 32; by *= 2) {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      first[i] += __shfl_xor_sync(0xffffffffu, first[i], by);
      second[i] += __shfl_xor_sync(0xffffffffu, second[i], by);
    }
  }
  auto* const sums = reinterpret_cast<float2*>(scratch);
  if (lane < LANES) {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      sums[warp * kSlabChannels + lane * kChannels + i] = make_float2(first[i], second[i]);
    }
  }
  __syncthreads();
  float2 sum = make_float2(0.0f, 0.0f);
  if (threadIdx.x < kSlabChannels) {
    for (int i = 0; i < kWarps; ++i) {
      const float2 more = sums[i * kSlabChannels + threadIdx.x];
      sum.x += more.x;
      sum.y += more.y;
    }
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    norm_backward(const ELEMENT* __restrict__ dy, const ELEMENT* __restrict__ dy_2,
                  const ELEMENT* __restrict__ x, const ELEMENT* __restrict__ value,
                  const PARAMETER* __restrict__ weight, const PARAMETER* __restrict__ bias,
                  const float* __restrict__ mean_of, const float* __restrict__ inv_std_of,
                  ELEMENT* __restrict__ dx, Gradient* dweight, Gradient* dbias, ELEMENT* dz_of,
                  float2* sums, float2* totals, Counter* counters, int batch, int channels,
                  int spatial, int slabs, int parts, int tile) {
  DYNAMIC_SHARED(shared);
  auto* const scratch = reinterpret_cast<float*>(shared);
  // The sums of dz and of dz * (x - mean) of each channel of the slab.
  auto* const found = reinterpret_cast<float2*>(scratch + kSumFloats);
  const Division of{batch, channels, spatial, slabs, parts, tile};
  const int together = gridDim.x / parts;  // slabs that are worked on at a time
  const int part = blockIdx.x / together;
  const int steps = (tile + kUnits - 1) / kUnits;
  constexpr int kTurns = PASS == 0 ? kGroups : 1;  // in which a part is added up
  const int group_size = (steps + kTurns - 1) / kTurns;
  unsigned char* const kept_x = shared + kScratchBytes;
  unsigned char* const kept_dz = kept_x + (kKeepsX ? steps * THREADS * kVectorBytes : 0);
  bool is_backwards = false;  // whether the last group of a part comes first in its sums
  const auto group_at = [&](int i) { return is_backwards ? kGroups - 1 - i : i; };
#if PASS == 0
  Team team(counters + slabs, parts, found + kSlabChannels);
  const Place begin(of, blockIdx.x % together, part);
  for (int group = 0; group < kGroups; ++group) {
    copy_group(begin, group, group_size, x, dy, kept_x, kept_dz);
  }
  if (!team.has_part()) {
    copies_arrived<0>();
    return;
  }
#endif

  for (int slab = blockIdx.x % together; slab < slabs; slab += together) {
    const Place place(of, slab, part), next(of, slab + together, part);
    Operands operands{dy, dy_2, x, value, {}, {}, {}};
    float inv_std[kChannels] = {};
    if (place.channel < channels) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const int channel = place.channel + c, at = of.statistic(place.image, channel);
        operands.mean[c] = mean_of[at];
        inv_std[c] = inv_std_of[at];
        operands.scale[c] = inv_std[c] * parameter(weight, channel, 1.0f);
        operands.shift[c] = parameter(bias, channel, 0.0f);
      }
    }

    if (kSums) {
      float2* const slab_sums = sums + static_cast<long long>(slab) * parts * kSlabChannels;
      float sum[kChannels], products[kChannels];
      const auto begin_sums = [&] {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) sum[c] = products[c] = 0.0f;
      };
      // Adds one vector, and returns its dz.
      const auto add = [&](const Place& there, int v, const Vector& x_vector,
                           const Vector& dy_vector, const Beside& beside) {
        float numbers[VECTOR], dz[VECTOR];
        x_vector.get(numbers);
        dy_vector.get(dz);
        differentiate(dz, numbers, beside, operands);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
          const int c = PLANES ? 0 : i;
          sum[c] += dz[i];
          products[c] += dz[i] * (numbers[i] - operands.mean[c]);
        }
        const Vector result = Vector::of(dz);
        if (STORES_DZ) *reinterpret_cast<Vector*>(dz_of + there[v]) = result;
        return result;
      };
      // Writes the sums of a part.
      const auto write_sums = [&](int which) {
        const float2 of_block = add_threads(sum, products, scratch);
        if (threadIdx.x < kSlabChannels) slab_sums[which * kSlabChannels + threadIdx.x] = of_block;
      };
      const auto add_up_streamed = [&](int which) {
        const Place there(of, slab, which);
        begin_sums();
        for (int i_group = 0; i_group < kTurns; ++i_group) {
          const int group = group_at(i_group);
          const int end = min((group + 1) * group_size, there.vectors);
          for (int v = group * group_size; v < end; v += kStreamed) {
            Vector xs[kStreamed], dys[kStreamed];
            Beside beside[kStreamed];
#pragma unroll
            for (int i = 0; i < kStreamed; ++i) {
              if (v + i >= end) continue;
              xs[i] = load(x + there[v + i]);
              dys[i] = load(dy + there[v + i]);
              beside[i].get(operands, of, there, v + i);
            }
#pragma unroll
            for (int i = 0; i < kStreamed; ++i) {
              if (v + i < end) add(there, v + i, xs[i], dys[i], beside[i]);
            }
          }
        }
        write_sums(which);
      };
#if PASS == 0
      begin_sums();
      for (int i_group = 0; i_group < kGroups; ++i_group) {
        const int group = group_at(i_group);
        const int end = min((group + 1) * group_size, place.vectors);
        wait_for_group();
        for (int v = group * group_size; v < end; v += UNROLLED) {
          Vector xs[UNROLLED];
          Beside beside[UNROLLED];
#pragma unroll
          for (int i = 0; i < UNROLLED; ++i) {
            if (v + i >= end) continue;
            xs[i] = kKeepsX ? *kept_at(kept_x, v + i) : load(x + place[v + i]);
            beside[i].get(operands, of, place, v + i);
          }
#pragma unroll
          for (int i = 0; i < UNROLLED; ++i) {
            if (v + i >= end) continue;
            Vector* const kept = kept_at(kept_dz, v + i);
            *kept = add(place, v + i, xs[i], *kept, beside[i]);
          }
        }
      }
      write_sums(part);
      // What is read while the blocks wait: the group of the next slab that comes first.
      const int first = (kKeepsX ? 0 : kGroups - 1 - group_at(0)) * group_size;
      if (kKeepsX) prefetch(x, next, first, group_size);
      prefetch(dy, next, first, group_size);
      team.meet(slab, counters + slab, add_up_streamed);
      const bool writes_gradients = team.has_first_part();
      is_backwards = !kKeepsX && !is_backwards;
#else
      add_up_streamed(part);
      if (!is_last_of(counters + slab, parts, reinterpret_cast<int*>(scratch))) return;
      constexpr bool writes_gradients = true;
#endif
      const float2 all =
          add_parts(slab_sums, parts, scratch, [](int, float2 numbers) { return numbers; });
      if (threadIdx.x < kSlabChannels) {
        const int image = of.image(slab), channel = of.channel(slab) + threadIdx.x;
        if (channel < channels && writes_gradients) {
          const int at = of.channels_before(image) + channel;
          if (dbias != nullptr) dbias[at] = from_float<Gradient>(all.x);
          if (dweight != nullptr) {
            dweight[at] = from_float<Gradient>(all.y * inv_std_of[of.statistic(image, channel)]);
          }
          if (PASS != 0) totals[at] = all;
        }
        found[threadIdx.x] = all;
      }
      __syncthreads();
    }

    if (kApplies) {
      if (kAddsChannels) {  // the sums of a group, of dz * weight
        const int channel = of.channel(slab) + threadIdx.x;
        if (threadIdx.x < kSlabChannels && channel < channels) {
          const int first = channel / kOfGroup * kOfGroup;
          const float2* const of_image = totals + of.channels_before(place.image);
          float2 all = make_float2(0.0f, 0.0f);
#pragma unroll 8
          for (int c = first; c < first + kOfGroup; ++c) {
            const float2 one = load_fresh(of_image + c);
            const float factor = parameter(weight, c, 1.0f);
            all.x += one.x * factor;
            all.y += one.y * factor;
          }
          found[threadIdx.x] = all;
        }
        __syncthreads();
      }
      // dx = dz * scale + (x - mean) * slope + constant
      float slope[kChannels] = {}, constant[kChannels] = {};
      if (place.channel < channels) {
        const float n = static_cast<float>(of.count()) * kOfGroup;
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          const float2 all = kSums || kAddsChannels
                                 ? found[place.channel + c - of.channel(slab)]
                                 : totals[of.channels_before(place.image) + place.channel + c];
          const float scale = kAddsChannels ? inv_std[c] : operands.scale[c];
          slope[c] = -scale * (inv_std[c] * inv_std[c]) * (all.y / n);
          constant[c] = -scale * (all.x / n);
        }
      }
      const auto apply = [&](const Place& there, int v, const float (&numbers)[VECTOR],
                             float (&dz)[VECTOR]) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
          const int c = PLANES ? 0 : i;
          dz[i] = dz[i] * operands.scale[c] +
                  ((numbers[i] - operands.mean[c]) * slope[c] + constant[c]);
        }
        store(dx + there[v], dz);
      };
      const auto apply_streamed = [&](const Place& there) {
        for (int last = there.vectors - 1; last >= 0; last -= kStreamed) {
          Vector xs[kStreamed], dys[kStreamed];
          Beside beside[kStreamed];
#pragma unroll
          for (int i = 0; i < kStreamed; ++i) {
            if (last - i < 0) continue;
            xs[i] = load(x + there[last - i]);
            dys[i] = load((kReadsDz ? dz_of : dy) + there[last - i]);
            if (!kReadsDz) beside[i].get(operands, of, there, last - i);
          }
#pragma unroll
          for (int i = 0; i < kStreamed; ++i) {
            if (last - i < 0) continue;
            float numbers[VECTOR], dz[VECTOR];
            xs[i].get(numbers);
            dys[i].get(dz);
            if (!kReadsDz) differentiate(dz, numbers, beside[i], operands);
            if (PASS == 0) Vector::of(dz).get(dz);  // rounded, as where it is kept
            apply(there, last - i, numbers, dz);
          }
        }
      };
#if PASS == 0
      for (int i_group = 0; i_group < kGroups; ++i_group) {
        const int group = group_at(i_group);
        const int end = min((group + 1) * group_size, place.vectors);
        for (int v = group * group_size; v < end; v += UNROLLED) {
          Vector xs[UNROLLED];
#pragma unroll
          for (int i = 0; i < UNROLLED; ++i) {
            if (v + i < end) xs[i] = kKeepsX ? *kept_at(kept_x, v + i) : load(x + place[v + i]);
          }
#pragma unroll
          for (int i = 0; i < UNROLLED; ++i) {
            if (v + i >= end) continue;
            float numbers[VECTOR], dz[VECTOR];
            xs[i].get(numbers);
            kept_at(kept_dz, v + i)->get(dz);
            apply(place, v + i, numbers, dz);
          }
        }
        // This thread alone reads and writes its places in shared memory.
        copy_group(next, group, group_size, x, dy, kept_x, kept_dz);
      }
      for (int i = 0; i < team.adopted(); ++i) apply_streamed(Place(of, slab, team.adopted(i)));
#else
      apply_streamed(place);
#endif
      __syncthreads();  // before `found` is written again
    }
  }
}
