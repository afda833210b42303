// Depthwise convolution of stride 1 on tensor cores: each channel is convolved with a filter of its
// own. dgrad is the same convolution of dy with the filter turned round (TURNED).
//
// A row of the filter, applied to eight outputs side by side, is a product with a banded matrix
// T of 8 columns: T[k][n] = filter[k - n], and zero where there is no such weight. An mma
// multiplies 16 positions (each a block of eight columns somewhere in a row) of one channel by T.
// Efficiency is KERNEL_W / (8 kSteps), 7/16 for 7 wide and 31/40 for 31 wide, of a rate 15 times
// that of FMAs.
//
// A block computes CHANNELS channels of `rows` rows of kTiles tiles; a tile is 8 COLUMN_BLOCKS
// columns of an image, and the positions are those of all tiles. It walks down the input's rows.
// A warp holds T of kFilterRows filter rows of its channels in registers, and the sums of the
// kFilterRows - 1 output rows that are not complete. So a row is loaded from shared memory once and
// multiplied by all filter rows; the mma that adds to a sum also moves it to its next place. A
// filter with more rows is divided among CHAINED warps: each passes on the sums that it has
// completed, and the next one starts from them one input row later.
//
// What bounds it: memory and the issue of instructions, about equally, for 7x7; the mma for filters
// that are much larger.
//
// A step does three things to different rows, between two barriers:
// - Row i + STAGES is copied to shared memory, asynchronously and as it is in memory.
// - Row i + 1 is arranged as planes, one a channel: the 16-byte vector s PITCH + j of a plane has
//   columns 8j to 8j + 7 of tile s, from the leftmost that the tile's outputs depend on.
// - Row i is multiplied. What it completes is transposed back to channels_last in the next step.
//
// Zeros of T multiply inputs that an output does not depend on. If one of these is infinite or NaN
// the sum becomes NaN. So the block looks again at rows with a sum that is NaN when it is done, or
// after its first row if that is full of NaN: see depthwise_mma_not_finite.cuh.

// Computes a block. Returns false if it has to be computed again without `may_stop`.
__device__ __forceinline__ bool compute(const ELEMENT* x, const ELEMENT* w, ELEMENT* y,
                                        const ELEMENT* bias, const ELEMENT* residual,
                                        const Shape& s, int rows, bool may_stop) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = warp / kChannelGroups;  // in the chain of warps that divide a filter
  const int warp_channel = warp % kChannelGroups * WARP_CHANNELS;

  const int channel_blocks = ceil_div(s.channels, CHANNELS);
  const int tile_groups = ceil_div(s.images * s.tiles_across, kTiles);
  const int first_channel = blockIdx.x % channel_blocks * CHANNELS;
  const int first_tile = blockIdx.x / channel_blocks % tile_groups * kTiles;
  const int first_out = blockIdx.x / channel_blocks / tile_groups * rows;
  const int end_out = min(first_out + rows, SIGNAL ? ceil_div(s.out_w, kTileColumns) : s.out_h);
  // Rows above the image add nothing, but an output is written when its last row has been seen.
  const int last_of_first = first_out - s.pad_h + KERNEL_H - 1;
  const int first_row = min(max(first_out - s.pad_h, 0), last_of_first);
  const int steps = end_out - s.pad_h + KERNEL_H - 1 - first_row;
  const int end_row = min(first_row + steps, SIGNAL ? 1 << 30 : s.in_h);

  unsigned char* const halves = shared + kHalvesAt;
  Fetcher fetcher(shared, s, first_tile, first_channel, first_row);
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    const int row = first_row + i;
    fetcher.fetch(x, i * STAGE_BYTES, s, row >= 0 && row < end_row);
    commit_copies();
  }

  // T of the warp's filter rows: register k of lane (g, t) has T[8k + 2t][g] and the one below it.
  unsigned bands[WARP_CHANNELS][kFilterRows][kSteps];
  float sums[WARP_CHANNELS][kFilterRows][4];
#pragma unroll
  for (int c = 0; c < WARP_CHANNELS; ++c) {
    const int channel = first_channel + warp_channel + c;
    const ELEMENT* filter = w + static_cast<long long>(channel) * KERNEL_H * KERNEL_W;
#pragma unroll
    for (int r = 0; r < kFilterRows; ++r) {
      const int row = channel < s.channels ? rank * kFilterRows + r - kMissing : -1;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const int column = 8 * k + 2 * t - g;
        bands[c][r][k] = weight(filter, row, column) | weight(filter, row, column + 1) << 16;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[c][r][i] = 0.0f;
    }
  }
  for (int i = threadIdx.x; i < PARTIAL_BYTES / 4; i += kThreads) {
    reinterpret_cast<float*>(halves + kHalfBytes + kPartialsAt)[i] = 0.0f;
  }
  if (threadIdx.x == 0) *reinterpret_cast<int*>(shared + kFlagAt) = 0;  // rows to look at again

  Arranger arranger(shared, halves, first_channel);
  Writer writer(halves + kOutAt, s, first_tile, first_channel, warp_channel, first_out);
  const int position = lane % 16;
  const int vector = tile_of(position) * PITCH + column_block_of(position);
  const unsigned char* const matrices =
      kept(halves + (warp_channel * PLANE + vector + lane / 16) * kVectorBytes);
  const unsigned char* const last_matrices =
      kept(halves + (warp_channel * PLANE + vector + kSteps - 1) * kVectorBytes);
  unsigned char* const packed =
      kept(halves + kOutAt +
           ((warp_channel / 8 * OUT_OCTET + warp_channel % 8 * kOutChannel + g) * 4 + t) * 4);
  unsigned char* const partials =
      kept(halves + kPartialsAt + ((rank * CHANNELS + warp_channel) * 32 + lane) * 16);
  // Input rows that this warp's filter rows multiply for one of the block's outputs.
  const int first_filter_row = rank * kFilterRows - kMissing;
  const int begin_products = max(first_out - s.pad_h + first_filter_row, 0);
  const int end_products = min(end_out - s.pad_h + first_filter_row + kFilterRows - 1, end_row);

  unsigned nan_rows = 0;  // modulo 32

  copies_arrived<STAGES - 1>();
  __syncthreads();
  arranger.arrange(0, 0, first_channel);

  int stage = 0;  // bytes to row i
  int now = 0;    // bytes to what has this step's planes
  const auto step = [&](int i, bool has_products) {
    copies_arrived<STAGES - 2>();
    __syncthreads();
    const int row = first_row + i, other = kHalfBytes - now;
    fetcher.fetch(x, stage, s, row + STAGES >= 0 && row + STAGES < end_row);
    commit_copies();
    stage = stage == (STAGES - 1) * STAGE_BYTES ? 0 : stage + STAGE_BYTES;
    arranger.arrange(stage, other, first_channel);
    const bool is_complete = row >= last_of_first;

#pragma unroll
    for (int c = 0; c < WARP_CHANNELS; ++c) {
      float next[4] = {0.0f, 0.0f, 0.0f, 0.0f}, result[4];
      if (CHAINED > 1 && rank > 0) {
        const float4 before =
            *reinterpret_cast<const float4*>(partials + other - kRankBytes + c * 32 * 16);
        next[0] = before.x, next[1] = before.y, next[2] = before.z, next[3] = before.w;
      }
      unsigned a[kSteps / 2 + 1][4], last[2];
      if (has_products) {
#pragma unroll
        for (int k = 0; k < kSteps / 2; ++k) {
          load_matrices(a[k], matrices + now + (c * PLANE + 2 * k) * kVectorBytes);
        }
        if (kSteps % 2) load_matrices(last, last_matrices + now + c * PLANE * kVectorBytes);
      }
#pragma unroll
      for (int r = kFilterRows - 1; r >= 0; --r) {
        // Adds filter row r to the sums of the output that has seen the rows before it.
        float (&d)[4] = r == kFilterRows - 1 ? result : sums[c][r];
        const float (&before)[4] = r > 0 ? sums[c][r > 0 ? r - 1 : 0] : next;
        if (!has_products) {
#pragma unroll
          for (int j = 0; j < 4; ++j) d[j] = before[j];
          continue;
        }
#pragma unroll
        for (int k = 0; k < kSteps / 2; ++k) {
          const unsigned b[2] = {bands[c][r][2 * k], bands[c][r][2 * k + 1]};
          if (k == 0) {
            mma_16x8x16<ELEMENT>(d, a[k], b, before);
          } else {
            mma_16x8x16<ELEMENT>(d, a[k], b);
          }
        }
        if (kSteps == 1) {
          mma_16x8x8<ELEMENT>(d, last, bands[c][r][0], before);
        } else if (kSteps % 2) {
          mma_16x8x8<ELEMENT>(d, last, bands[c][r][kSteps - 1]);
        }
      }

      if (rank < CHAINED - 1) {
        *reinterpret_cast<float4*>(partials + now + c * 32 * 16) =
            make_float4(result[0], result[1], result[2], result[3]);
      } else if (is_complete && i < steps) {
        const int channel = first_channel + warp_channel + c;
        const float total = result[0] + result[1] + (result[2] + result[3]);
        if (total != total) nan_rows |= 1u << (row - last_of_first) % 32;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          // Columns 2t and 2t + 1 of position g + 8k.
          if (HAS_BIAS || HAS_RESIDUAL || ACTIVATION) {
            const int tile = first_tile + tile_of(g + 8 * k), image = tile / s.tiles_across;
            const int out_row = row - last_of_first + first_out;
            const int column = first_column(s, tile, g + 8 * k) + 2 * t;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const long long at = offset(s, image, channel, out_row, column + j, s.out_h, s.out_w);
              const int in_row = column + j + (SIGNAL ? out_row * kTileColumns : 0);
              if (image < s.images && channel < s.channels && in_row < s.out_w) {
                result[2 * k + j] = finish(result[2 * k + j], bias, residual, channel, at);
              }
            }
          }
          const unsigned two = pack<ELEMENT>(result[2 * k], result[2 * k + 1]);
          if (CHANNELS_LAST) {
            *reinterpret_cast<unsigned*>(packed + now + (c * kOutChannel + 8 * k) * kVectorBytes) =
                two;
          } else if (channel < s.channels) {
            writer.write_two(y, k, c, two, s);
          }
        }
      }
    }

    // The row that the last step completed; contiguous rows have been written.
    if (CHANNELS_LAST ? row > last_of_first : is_complete) {
      if (CHANNELS_LAST) writer.write_transposed(y, other, s);
      writer.next_row(s);
    }
    now = other;
  };
  int i = 0;
  int end = kIsSampled && may_stop ? last_of_first - first_row + 1 : steps + 1;
  bool is_stopped = false;
#pragma unroll 1
  while (true) {
    if (CHAINED == 1) {
#pragma unroll 1
      for (; i < end; ++i) step(i, true);
    }
    // A chained warp's part of a large filter may lie outside of the image for many rows. Other
    // filters are all multiplied, because a second loop costs registers.
#pragma unroll 1
    while (CHAINED > 1 && i < end) {
      const int end_here = min(end_products - first_row, end);
      if (first_row + i >= begin_products && i < end_here) {
#pragma unroll 1
        do {
          step(i++, true);
        } while (i < end_here);
      } else {
        step(i++, false);
      }
    }
    if (end > steps) break;
    end = steps + 1;
    // The first row is full of NaN if all lanes that have outputs there have found one.
    bool has_outputs = false;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int tile = first_tile + tile_of(g + 8 * k);
      has_outputs |=
          tile / s.tiles_across < s.images && first_column(s, tile, g + 8 * k) + 2 * t < s.out_w;
    }
    has_outputs &= rank == CHAINED - 1 && first_channel + warp_channel < s.channels;
    if (__syncthreads_or(has_outputs && nan_rows == 0)) continue;
    // If a weight that is not finite is the reason, the input tells little.
    bool is_finite = true;
#pragma unroll
    for (int at = 0; at < WARP_CHANNELS * kFilterRows * kSteps; ++at) {
      const unsigned band =
          bands[at / kSteps / kFilterRows][at / kSteps % kFilterRows][at % kSteps];
      is_finite &= (band & 0x7fffu) < kInfinity && (band >> 16 & 0x7fffu) < kInfinity;
    }
    is_stopped = !__syncthreads_or(!is_finite);
    if (is_stopped) break;
  }

  if (nan_rows != 0) atomicOr(reinterpret_cast<int*>(shared + kFlagAt), nan_rows);
  __syncthreads();
  const unsigned nan = *reinterpret_cast<const unsigned*>(shared + kFlagAt);
  if (nan == 0) return true;
  copies_arrived<0>();
  __syncthreads();
  return repair(shared, x, w, y, bias, residual, s, first_tile, first_channel, first_out, end_out,
                is_stopped ? ~0u : nan, is_stopped);
}

// A loop around the first time would cost it registers.
__device__ __noinline__ void compute_again(const ELEMENT* x, const ELEMENT* w, ELEMENT* y,
                                           const ELEMENT* bias, const ELEMENT* residual, Shape s,
                                           int rows) {
  compute(x, w, y, bias, residual, s, rows, false);
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    depthwise_mma(const ELEMENT* x, const ELEMENT* w, ELEMENT* y, const ELEMENT* bias,
                  const ELEMENT* residual, int images, int channels, int in_h, int in_w, int out_h,
                  int out_w, int pad_h, int pad_w, int tiles_across, int rows) {
  const Shape s{images, channels, in_h, in_w, out_h, out_w, pad_h, pad_w, tiles_across};
  if (!compute(x, w, y, bias, residual, s, rows, true)) {
    compute_again(x, w, y, bias, residual, s, rows);
  }
}
