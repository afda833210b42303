// A depthwise convolution of one dimension with few taps and stride 1, contiguous, or with TURNED
// the gradient of its input, which is one with the taps turned round:
//   out[row][p] = sum over t of in[row][p + t - padding] * filter[row % channels][t]
//
// A thread computes 16 bytes of the output, aligned, wherever its row begins: rows of an odd number
// of elements, such as a causal layer's, are written in whole vectors too. It loads the vectors
// that hold what the taps read, and moves them to the output's place in registers. Where a vector
// meets the end of a row, or reads beyond one, it adds the products one by one. What bounds it are
// bytes.

constexpr int kVector = 16 / sizeof(ELEMENT);
constexpr int kWindow = kVector + TAPS - 1;
// Vectors that hold a window which begins anywhere in the first one.
constexpr int kLoads = (kWindow + 2 * kVector - 2) / kVector;
constexpr int kWords = 4 * kLoads;

union Elements {
  uint4 vector;
  ELEMENT elements[kVector];
};

// Moves words down by `bytes`, less than 16 and a multiple of an element's.
__device__ __forceinline__ void move_down(unsigned (&words)[kWords], int bytes) {
#pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    const bool moves = bytes / 4 & step;
#pragma unroll
    for (int i = 0; i + step < kWords; ++i) words[i] = moves ? words[i + step] : words[i];
  }
  if (sizeof(ELEMENT) == 2) {
    const int bits = bytes % 4 * 8;
#pragma unroll
    for (int i = 0; i + 1 < kWords; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], bits);
  }
}

__device__ __forceinline__ float filter_tap(const ELEMENT* w, int row, int channels, int t) {
  return to_float(w[row % channels * TAPS + (TURNED ? TAPS - 1 - t : t)]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    depthwise_1d(const ELEMENT* in, const ELEMENT* w, ELEMENT* out, const ELEMENT* bias,
                 const ELEMENT* residual, int channels, int rows, int in_length, int out_length,
                 int padding) {
  const unsigned total = static_cast<unsigned>(rows) * out_length, in_total = rows * in_length;
  const unsigned first = (blockIdx.x * static_cast<unsigned>(THREADS) + threadIdx.x) * kVector;
  if (first >= total) return;
  const int row = first / out_length, p = first % out_length, begin = p - padding;
  float sums[kVector];
  if (p + kVector <= out_length && begin >= 0 && begin + kWindow <= in_length) {
    const unsigned from = static_cast<unsigned>(row) * in_length + begin;
    const int skipped = from % kVector;
    unsigned words[kWords];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      // The last vector may be behind the window, and behind the tensor.
      const unsigned at = from - skipped + i * kVector;
      uint4 vector = make_uint4(0, 0, 0, 0);
      if (at < from + kWindow) {
        if (at + kVector <= in_total) {
          vector = *reinterpret_cast<const uint4*>(in + at);
        } else {
          Elements last{vector};
#pragma unroll
          for (int j = 0; j < kVector; ++j) {
            if (at + j < in_total) last.elements[j] = in[at + j];
          }
          vector = last.vector;
        }
      }
      words[4 * i] = vector.x;
      words[4 * i + 1] = vector.y;
      words[4 * i + 2] = vector.z;
      words[4 * i + 3] = vector.w;
    }
    move_down(words, skipped * sizeof(ELEMENT));
    float window[kWords * 4 / sizeof(ELEMENT)];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(ELEMENT) == 2) {
        const float2 two = unpack<ELEMENT>(words[i]);
        window[2 * i] = two.x;
        window[2 * i + 1] = two.y;
      } else {
        window[i] = __uint_as_float(words[i]);
      }
    }
    float filter[TAPS];
#pragma unroll
    for (int t = 0; t < TAPS; ++t) filter[t] = filter_tap(w, row, channels, t);
    const float start = bias == nullptr ? 0.0f : to_float(bias[row % channels]);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      sums[j] = 0.0f;
#pragma unroll
      for (int t = 0; t < TAPS; ++t) sums[j] += window[j + t] * filter[t];
      sums[j] += start;
    }
  } else {
    int here = row, place = p;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      sums[j] = 0.0f;
      if (here < rows) {
        const ELEMENT* const line = in + static_cast<unsigned>(here) * in_length;
        for (int t = 0; t < TAPS; ++t) {
          const int i = place + t - padding;
          if (i >= 0 && i < in_length) {
            sums[j] += to_float(line[i]) * filter_tap(w, here, channels, t);
          }
        }
        if (bias != nullptr) sums[j] += to_float(bias[here % channels]);
      }
      if (++place == out_length) {
        place = 0;
        ++here;
      }
    }
  }
  const bool is_whole = first + kVector <= total;
  Elements results{make_uint4(0, 0, 0, 0)};
  if (residual != nullptr) {
    if (is_whole) {
      results.vector = *reinterpret_cast<const uint4*>(residual + first);
    } else {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (first + j < total) results.elements[j] = residual[first + j];
      }
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) sums[j] += to_float(results.elements[j]);
  }
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    results.elements[j] = from_float<ELEMENT>(activate<ACTIVATION>(sums[j]));
  }
  if (is_whole) {
    *reinterpret_cast<uint4*>(out + first) = results.vector;
  } else {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (first + j < total) out[first + j] = results.elements[j];
    }
  }
}
