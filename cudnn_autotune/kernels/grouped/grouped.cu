// A grouped 2-d convolution on tensor cores, channels_last, of 16-bit types and of float32 in TF32:
// the forward (DGRAD 0) and the gradient of its input (DGRAD 1), which is a convolution of dy with
// the filters transposed and turned round. "in" is what is read (x, or dy), "out" what is written
// (y, or dx).
//
// A block computes a tile of output pixels (of one image, or of several small ones) for
// BLOCK_GROUPS groups. It copies the tile's input, halo and all, and the groups' filters into
// shared memory. The 16 pixels of an mma are 8 neighbours each of two segments. A warp computes
// ROWS rows of two segments, in GROUPS groups one after the other, N_TILES x 8 output channels of
// each. With p a pixel, o an output channel and i a pair of a filter tap and 8 input channels (a
// chunk),
//   out[p][o] = sum over i of in[p + tap(i)][channels(i)] * filter[o][tap(i)][channels(i)]
// Rows of 16 bytes are taken by ldmatrix from where they lie: no im2col is written. A warp loads
// each row of the input once for each column tap, and multiplies it for all row taps that read it:
// a pair of chunks as they are. Of an odd last chunk it loads two rows together; for outputs that
// read both, they are the two halves of an mma, for others one of them is an mma of half the depth.
// So 3x3 filters of 24 channels (27 chunks) take 13.5 mma, not 18. Blocks stay and go over tiles
// with the same filters; with two STAGES the next tile is copied meanwhile.
//
// Banks. The 8 rows of a matrix are 8 neighbouring pixels of one image row, since TILE_X is a
// multiple of 8. A pixel takes an odd multiple of 16 bytes, so they lie in different banks. A
// forward with a stride keeps the columns of each residue modulo the stride together, so that these
// pixels are neighbours as well. A filter also takes an odd multiple of 16 bytes.
//
// In TF32 an mma takes one chunk, so there are no pairs. Each lane loads its two channels of a
// chunk as 8 bytes, 4 pixels at a time, and a pixel takes an odd multiple of 32 bytes.
//
// A gradient with a stride: dx pixels of one residue (a phase) see the same taps, every stride'th,
// with a stride of 1. A block computes all phases from one tile of dy.
//
// Groups whose width is no multiple of 8 are computed MERGE at a time, with zeros in the filter. A
// zero times an infinity or NaN of a neighbouring group would be NaN. So a tile with a sum that is
// NaN is multiplied again, as it lies in shared memory, and with it the block's next tiles: apart,
// each merged group with zeros in place of the inputs of others. What is loaded stays the same.
// There are two mma in place of one for groups of 4 channels, and 10 in place of 9 for groups
// of 12.
//
// What bounds it. L2 takes a request of up to 128 bytes from a multiprocessor each 2.4 clocks, so
// blocks of 64 channels are best, and GROUPS lets a warp store 32 bytes or more of a pixel at once.
// Then 64 pixels of an 8-wide group take 12 loads of matrices and 24 mma, beside as many
// instructions to round and store the sums, and a third of that to copy the input.

// Rounds the sums of an item and stores them. `channel` is the first one.
template <int phase_y, int phase_x>
__device__ __forceinline__ void store(const float (&sums)[GROUPS][ROWS][N_TILES][4],
                                      unsigned char* scratch, ELEMENT* out, const ELEMENT* bias,
                                      const ELEMENT* residual, const Extents& to,
                                      const Place& place, int first_segment, int channel) {
  const int lane = threadIdx.x % 32;
  // Each lane stores 16 bytes of a pixel, where it holds 2 channels of each n tile.
  long long places[kStores];
  int rows[kStores];
  unsigned char* vectors[kStores];
#pragma unroll
  for (int i = 0; i < kStores; ++i) {
    const int vector = i * 32 + lane, pixel = vector / kVectors, n = vector % kVectors;
    const int segment = first_segment + pixel / 8 % 2;
    const Place from = segment_place(segment);
    const int image = place.image + from.image;
    const int y = (place.y + from.y + pixel / 16) * Y::kOutStep + phase_y;
    const int x = (place.x + from.x + pixel % 8) * X::kOutStep + phase_x;
    const bool exists =
        pixel < 16 * kStoredRows && segment < kSegments && image < to.images && x < to.x;
    const int index = (image * to.y + y) * to.x + x;
    places[i] = static_cast<long long>(index) * to.channels + channel + n * (16 / kElementBytes);
    rows[i] = exists ? y : to.y;
    vectors[i] = scratch + pixel * kScratchPitch + n * 16;
  }
  using Pair = Two<ELEMENT>;
  unsigned char* const mine = scratch + lane / 4 * kScratchPitch + lane % 4 * sizeof(Pair);
  Pair biases[kStoredTiles];
#pragma unroll
  for (int n = 0; n < kStoredTiles && HAS_BIAS; ++n) {
    biases[n] = *reinterpret_cast<const Pair*>(bias + channel + n * 8 + lane % 4 * 2);
  }
#pragma unroll
  for (int first = 0; first < ROWS; first += kStoredRows) {
    bool exists[kStores];
#pragma unroll
    for (int i = 0; i < kStores; ++i) {
      const int row = first + (i * 32 + lane) / kVectors / 16;
      exists[i] = rows[i] < to.y - first * Y::kOutStep && (ROWS % kStoredRows == 0 || row < ROWS);
      if (HAS_RESIDUAL && exists[i]) {
        *reinterpret_cast<uint4*>(vectors[i]) =
            *reinterpret_cast<const uint4*>(residual + places[i]);
      }
    }
    if (HAS_RESIDUAL) __syncwarp();
#pragma unroll
    for (int row = first; row < first + kStoredRows && row < ROWS; ++row) {
#pragma unroll
      for (int n = 0; n < kStoredTiles; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          auto* const two = reinterpret_cast<Pair*>(
              mine + ((row - first) * 16 + h * 8) * kScratchPitch + n * kChunkBytes);
          const float* const found = sums[n / N_TILES][row][n % N_TILES] + 2 * h;
          float low = found[0], high = found[1];
          if (HAS_BIAS) {
            const float2 more = biases[n].values();
            low += more.x;
            high += more.y;
          }
          if (HAS_RESIDUAL) {
            const float2 more = two->values();
            low += more.x;
            high += more.y;
          }
          *two = Pair::of(activate<ACTIVATION>(low), activate<ACTIVATION>(high));
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kStores; ++i) {
      if (exists[i]) {
        *reinterpret_cast<uint4*>(out + places[i]) = *reinterpret_cast<const uint4*>(vectors[i]);
      }
      places[i] += static_cast<long long>(kStoredRows * Y::kOutStep * to.x) * to.channels;
    }
    __syncwarp();
  }
}

// Returns a number that is NaN if one of the sums is.
__device__ __forceinline__ float total_of(const float (&sums)[GROUPS][ROWS][N_TILES][4]) {
  float totals[4] = {};
#pragma unroll
  for (int i = 0; i < GROUPS * ROWS * N_TILES * 4; ++i) {
    totals[i % 4] += sums[i / 4 / (ROWS * N_TILES)][i / 4 / N_TILES % ROWS][i / 4 % N_TILES][i % 4];
  }
  return totals[0] + totals[1] + (totals[2] + totals[3]);
}

// What a warp computes at a time.
struct Item {
  int part, first_group, first_segment, first_channel;  // the channel is one of the block's

  __device__ __forceinline__ explicit Item(int item)
      : part(item % kParts),
        first_group(item / kParts % (BLOCK_GROUPS / GROUPS) * GROUPS),
        first_segment(item / (kParts * (BLOCK_GROUPS / GROUPS)) * 2),
        first_channel(first_group * kOutWidth + part * N_TILES * 8) {}

  __device__ __forceinline__ const unsigned char* inputs(const unsigned char* tile) const {
    return tile + first_group * kInChunks * kChunkBytes;
  }
  __device__ __forceinline__ const unsigned char* weights(const unsigned char* filters) const {
    return filters + first_group * kRows * kFilterPitch + part * N_TILES * kNextFilters;
  }
};

// Computes outputs of a phase. Where merged groups are not multiplied apart, it stops at a sum that
// is NaN, and returns false.
template <bool apart, int phase_y, int phase_x>
__device__ __forceinline__ bool compute(const unsigned char* tile, const unsigned char* filters,
                                        unsigned char* scratch, ELEMENT* out, const ELEMENT* bias,
                                        const ELEMENT* residual, const Extents& to,
                                        const Place& place) {
  using P = Phase<phase_y, phase_x>;
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < kItems; i += WARPS) {
    const Item item(i);
    float sums[GROUPS][ROWS][N_TILES][4] = {};
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      const unsigned char* const inputs = item.inputs(tile) + g * kInChunks * kChunkBytes;
      const unsigned char* const weights = item.weights(filters) + g * kRows * kFilterPitch;
      if constexpr (apart) {
        float second[ROWS][N_TILES][4] = {};
        const Apart groups{second, item.part * N_TILES};
        multiply<P>(sums[g], inputs, weights, item.first_segment, lane, groups);
        groups.join(sums[g]);
      } else {
        multiply<P>(sums[g], inputs, weights, item.first_segment, lane, All());
      }
    }
    if constexpr (MERGE > 1 && !apart) {
      const float total = total_of(sums);
      if (__any_sync(0xffffffffu, total != total)) return false;
    }
    store<phase_y, phase_x>(sums, scratch, out, bias, residual, to, place, item.first_segment,
                            blockIdx.x * BLOCK_GROUPS * kOutWidth + item.first_channel);
  }
  return true;
}

template <bool apart, int phase>
__device__ __forceinline__ bool compute_phases(const unsigned char* tile,
                                               const unsigned char* filters, unsigned char* scratch,
                                               ELEMENT* out, const ELEMENT* bias,
                                               const ELEMENT* residual, const Extents& to,
                                               const Place& place) {
  if constexpr (phase < Y::kPhases * X::kPhases) {
    return compute<apart, phase / X::kPhases, phase % X::kPhases>(tile, filters, scratch, out, bias,
                                                                  residual, to, place) &&
           compute_phases<apart, phase + 1>(tile, filters, scratch, out, bias, residual, to, place);
  }
  return true;
}

__device__ __forceinline__ float rounded(float value) { return __uint_as_float(to_tf32(value)); }
template <typename T>
__device__ __forceinline__ T rounded(T value) {
  return value;
}

// Copies the filters of the block's groups, rounded if it is TF32, with zeros between merged
// groups.
__device__ __forceinline__ void stage_filters(unsigned char* filters, const ELEMENT* w) {
  constexpr int kRowElements = kTaps * kGroupColumns, kTogether = 16 / kElementBytes;
  constexpr int kCopies = kRowElements / kTogether;
  w += static_cast<long long>(blockIdx.x) * (BLOCK_GROUPS * kRows) * kRowElements;
  if constexpr (MERGE > 1) {
    for (int i = threadIdx.x; i < BLOCK_GROUPS * kRows * kTaps * kColumns; i += kThreads) {
      const int row = i / (kTaps * kColumns), column = i % kColumns;
      const int tap = i / kColumns % kTaps;
      ELEMENT value{0};
      if (row / kGroupRows % MERGE == column / kGroupColumns) {
        value = w[row * kRowElements + tap * kGroupColumns + column % kGroupColumns];
      }
      reinterpret_cast<ELEMENT*>(filters + row * kFilterPitch)[tap * kColumns + column] =
          rounded(value);
    }
  } else if constexpr (kIsTf32) {
#pragma unroll 4
    for (int i = threadIdx.x; i < BLOCK_GROUPS * kRows * kCopies; i += kThreads) {
      const float4 four = reinterpret_cast<const float4*>(w)[i];
      *reinterpret_cast<uint4*>(filters + i / kCopies * kFilterPitch + i % kCopies * 16) =
          make_uint4(to_tf32(four.x), to_tf32(four.y), to_tf32(four.z), to_tf32(four.w));
    }
  } else {
    for (int i = threadIdx.x; i < BLOCK_GROUPS * kRows * kCopies; i += kThreads) {
      copy_async<16>(filters + i / kCopies * kFilterPitch + i % kCopies * 16, w + i * kTogether);
    }
  }
}

// Computes tiles from `tile` on, every gridDim.y-th. It stops at one with a sum that is NaN, unless
// merged groups are multiplied apart; then the first tile is there, in `stage`, and copies of the
// next one have begun.
template <bool apart>
__device__ __forceinline__ void compute_tiles(int& tile, int& stage, const ELEMENT* in,
                                              ELEMENT* out, const ELEMENT* bias,
                                              const ELEMENT* residual, const Extents& from,
                                              const Extents& to, int tiles, int tiles_y,
                                              int tiles_x) {
  DYNAMIC_SHARED(shared);
  unsigned char* const stages = shared + kFilterBytes;
  unsigned char* const scratch = stages + STAGES * Input::kBytes + threadIdx.x / 32 * kScratchBytes;
  const auto stage_tile = [&](const Place& place, int stage) {
    Input::stage(stages + stage * Input::kBytes, in + blockIdx.x * (BLOCK_GROUPS * kInWidth), from,
                 place);
  };
  Place place = place_of(tile, tiles_y, tiles_x), next = place;
  if (STAGES == 2 && !apart) stage_tile(place, 0);
  commit_copies();
  for (bool is_there = apart; tile < tiles; tile += gridDim.y, place = next, is_there = false) {
    if (STAGES == 1 && !is_there) stage_tile(place, 0);
    if (tile + gridDim.y < tiles) {
      next = place_of(tile + gridDim.y, tiles_y, tiles_x);
      if (STAGES == 2 && !is_there) stage_tile(next, stage ^ 1);
    }
    commit_copies();
    copies_arrived<STAGES - 1>();
    __syncthreads();
    const bool done = compute_phases<apart, 0>(stages + stage * Input::kBytes, shared, scratch, out,
                                               bias, residual, to, place);
    if constexpr (MERGE > 1 && !apart) {
      if (__syncthreads_or(!done)) break;
    } else {
      __syncthreads();
    }
    if (STAGES == 2) stage ^= 1;
  }
}

// It is no part of the kernel, whose registers it would take.
__device__ __noinline__ void compute_apart(int tile, int stage, const ELEMENT* in, ELEMENT* out,
                                           const ELEMENT* bias, const ELEMENT* residual,
                                           Extents from, Extents to, int tiles, int tiles_y,
                                           int tiles_x) {
  compute_tiles<true>(tile, stage, in, out, bias, residual, from, to, tiles, tiles_y, tiles_x);
}

// Block (s, b) computes the s-th BLOCK_GROUPS groups of tiles b, b + gridDim.y, ... of images x
// tiles_y x tiles_x.
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    grouped(const ELEMENT* in, const ELEMENT* w, ELEMENT* out, const ELEMENT* bias,
            const ELEMENT* residual, int images, int in_y, int in_x, int in_channels, int out_y,
            int out_x, int out_channels, int tiles, int tiles_y, int tiles_x) {
  DYNAMIC_SHARED(shared);
  const Extents from{images, in_y, in_x, in_channels}, to{images, out_y, out_x, out_channels};
  stage_filters(shared, w);
  int tile = blockIdx.y, stage = 0;
  compute_tiles<false>(tile, stage, in, out, bias, residual, from, to, tiles, tiles_y, tiles_x);
  if constexpr (MERGE > 1) {
    if (tile < tiles) {
      compute_apart(tile, stage, in, out, bias, residual, from, to, tiles, tiles_y, tiles_x);
    }
  }
}
