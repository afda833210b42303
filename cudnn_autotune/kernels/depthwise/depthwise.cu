// Depthwise convolutions and their gradient of the input (DGRAD) in channels_last, on CUDA cores.
//
// A thread computes a thread tile: CHANNELS adjacent channels (one load of a pixel), a few columns,
// and many rows, which it walks down. Its filters stay in registers, and so do the sums of all rows
// that are not complete yet. So each pixel is loaded and converted once a thread, and only the
// columns where tiles overlap and the rows where tiles begin are loaded twice, mostly from L1.
// The lanes of a warp are adjacent channels, then adjacent columns: accesses are coalesced.
//
// Both operations pair a y pixel with x pixels. Along a dimension with stride S, dilation D and
// padding P, choose a residue r < D. The y pixels r + D c and the x pixels S r - P + D (S c + p),
// with a phase p < S, depend only on each other: tap p + S m pairs y index c with x index c + m.
// All this is known at compile time, so with any stride each product that is computed is needed:
//   fprop: a step reads the S rows of x index i, and completes row i - (M - 1) of y;
//   dgrad: a step reads row i of y, and completes the S rows of x index i;
// where M = ceil(taps / S) is how many rows, or groups of S rows, are open at a time: the slots.
// Slot 0 is complete after this step; the sums move down a slot with their first product.
//
// The next row is loaded before the products of one are computed. By the count of bytes and of
// instructions, DRAM bounds 3x3, and 5x5 with a stride; the instructions bound larger kernels, and
// about 7 in 10 of those of 7x7 in float32 are products.

// The largest c with D S c <= P - S r: the first x index of residue r that has a pixel.
__device__ __forceinline__ int first_index(int residue, int stride, int padding, int dilation) {
  const int distance = padding - stride * residue, period = dilation * stride;
  return distance >= 0 ? distance / period : -((period - 1 - distance) / period);
}

// Tensors are (image, depth, height, width, channel); `read` and `written` are x and y, or y and x.
// A tile has `rows` rows of y, or groups of rows of x. The block is (channels / CHANNELS, tiles).
// With `multiplier` > 1, output channel k reads channel k / multiplier of the input.
extern "C" __global__ void __launch_bounds__(256)
    depthwise_channels_last(const T* __restrict__ read, const T* __restrict__ weight,
                            T* __restrict__ written,
#if HAS_BIAS
                            const T* __restrict__ bias,
#endif
#if HAS_RESIDUAL
                            const T* __restrict__ residual,
#endif
                            int channels, int multiplier, int depth_read, int height_read,
                            int width_read, int depth_written, int height_written,
                            int width_written, int stride_d, int padding_d, int padding_h,
                            int padding_w, int dilation_d, int dilation_h, int dilation_w,
                            int tiles_down, int tiles_across, int tiles, int rows) {
  constexpr int kTaps = KT * KH * KW;
  DYNAMIC_SHARED(shared);
  T* const filters = reinterpret_cast<T*>(shared);
  {
    const int first = blockIdx.y * blockDim.x * CHANNELS;
    const int count = min(static_cast<int>(blockDim.x) * CHANNELS, channels - first) * kTaps;
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < count; i += blockDim.x * blockDim.y) {
      filters[i] = weight[static_cast<long long>(first) * kTaps + i];
    }
  }
  __syncthreads();
  const int channel = (blockIdx.y * blockDim.x + threadIdx.x) * CHANNELS;
  int tile = blockIdx.x * blockDim.y + threadIdx.y;
  if (channel >= channels || static_cast<unsigned>(tile) >= static_cast<unsigned>(tiles)) return;

  float filter[KT][KH][KW][CHANNELS];
#pragma unroll
  for (int v = 0; v < CHANNELS; ++v) {
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
      filter[tap / (KH * KW)][tap / KW % KH][tap % KW][v] =
          to_float(filters[(threadIdx.x * CHANNELS + v) * kTaps + tap]);
    }
  }

  const int depth = tile % depth_written;
  tile /= depth_written;
  const int column_residue = tile % tiles_across % dilation_w;
  int column_index = tile % tiles_across / dilation_w * COLUMNS;
  tile /= tiles_across;
  const int row_residue = tile % tiles_down % dilation_h;
  int row_index = tile % tiles_down / dilation_h * rows;
  const int image = tile / tiles_down;

#if DGRAD
  column_index += first_index(column_residue, STRIDE_W, padding_w, dilation_w);
  row_index += first_index(row_residue, STRIDE_H, padding_h, dilation_h);
#endif
  const int x_column = STRIDE_W * column_residue - padding_w + dilation_w * STRIDE_W * column_index;
  const int x_row = STRIDE_H * row_residue - padding_h + dilation_h * STRIDE_H * row_index;
#if DGRAD
  const int column_read = column_residue + dilation_w * (column_index - (kTapGroups - 1));
  const int row_read = row_residue + dilation_h * (row_index - (kSlots - 1));
  const int column_written = x_column, row_written = x_row;
#else
  const int column_read = x_column, row_read = x_row;
  const int column_written = column_residue + dilation_w * column_index;
  const int row_written = row_residue + dilation_h * row_index;
#endif
  const unsigned columns_read = columns_inside<kWindow>(column_read, dilation_w, width_read);
  const unsigned columns_written =
      columns_inside<kWritten>(column_written, dilation_w, width_written);

  // Bytes, so that the next pixel's address is one addition away.
  const int channels_read = channels / multiplier;
  const long long step_read = sizeof(T) * static_cast<long long>(dilation_w) * channels_read;
  const long long step_written = sizeof(T) * static_cast<long long>(dilation_w) * channels;
  const long long pitch_read = sizeof(T) * static_cast<long long>(width_read) * channels_read;
  const long long pitch_written = sizeof(T) * static_cast<long long>(width_written) * channels;
  const long long line_step_read = pitch_read * dilation_h;
  const long long line_step_written = pitch_written * dilation_h;

  // The begin of the next row's window, in each depth that is read.
  unsigned columns_of_depth[KT];
  const char* lines[KT];
#pragma unroll
  for (int kt = 0; kt < KT; ++kt) {
#if DGRAD
    const int distance = depth + padding_d - kt * dilation_d;
    const int from = distance % stride_d == 0 ? distance / stride_d : -1;
#else
    const int from = depth * stride_d - padding_d + kt * dilation_d;
#endif
    columns_of_depth[kt] = from >= 0 && from < depth_read ? columns_read : 0;
    lines[kt] =
        reinterpret_cast<const char*>(read) +
        ((static_cast<long long>(image) * depth_read + from) * height_read + row_read) *
            pitch_read +
        sizeof(T) * (static_cast<long long>(column_read) * channels_read + channel / multiplier);
    lines[kt] = kept(lines[kt]);
  }
  long long line_written =
      ((static_cast<long long>(image) * depth_written + depth) * height_written + row_written) *
          pitch_written +
      sizeof(T) * (static_cast<long long>(column_written) * channels + channel);

  // Loads the window of the next row of a depth. Depths are loaded in turns; `phase` is the row's.
  Bits next[kWindow];
  int row_next = row_read;
  const auto load = [&](int phase, int kt) {
    const unsigned mask = row_next >= 0 && row_next < height_read ? columns_of_depth[kt] : 0;
    const char* pixel = kept(lines[kt]);
    const int rows_on = phase + 1 < kRowsRead || DGRAD ? 1 : STRIDE_H - kRowsRead + 1;
    lines[kt] += rows_on * line_step_read;
    if (kt + 1 == KT) row_next += rows_on * dilation_h;
#pragma unroll
    for (int j = 0; j < kWindow; ++j, pixel += step_read) {
      next[j] = Bits{};
      if (mask >> j & 1) next[j] = *reinterpret_cast<const Bits*>(pixel);
    }
  };

#if HAS_BIAS
  float biases[CHANNELS];
#pragma unroll
  for (int v = 0; v < CHANNELS; ++v) biases[v] = to_float(bias[channel + v]);
#endif
  int row_stored = row_written;
  const auto store = [&](float (&values)[kWritten][CHANNELS]) {
    const unsigned mask = row_stored >= 0 && row_stored < height_written ? columns_written : 0;
    char* pixel = kept(reinterpret_cast<char*>(written) + line_written);
#if HAS_RESIDUAL
    const char* other = reinterpret_cast<const char*>(residual) + line_written;
#endif
    line_written += line_step_written;
    row_stored += dilation_h;
#pragma unroll
    for (int j = 0; j < kWritten; ++j, pixel += step_written) {
#if HAS_BIAS
#pragma unroll
      for (int v = 0; v < CHANNELS; ++v) values[j][v] += biases[v];
#endif
#if HAS_RESIDUAL
      Bits bits{};
      if (mask >> j & 1) bits = *reinterpret_cast<const Bits*>(other + j * step_written);
      float others[CHANNELS];
      to_floats(bits, others);
#pragma unroll
      for (int v = 0; v < CHANNELS; ++v) values[j][v] += others[v];
#endif
#pragma unroll
      for (int v = 0; v < CHANNELS; ++v) values[j][v] = activate<ACTIVATION>(values[j][v]);
      const Bits result = to_bits(values[j]);
      if (mask >> j & 1) *reinterpret_cast<Bits*>(pixel) = result;
    }
  };

  float sums[kSlots][kRowsWritten][kWritten][CHANNELS] = {};
  load(0, 0);
#pragma unroll 1
  for (int step = 0; step < rows + kSlots - 1; ++step) {
#pragma unroll
    for (int phase = 0; phase < kRowsRead; ++phase) {
#pragma unroll
      for (int kt = 0; kt < KT; ++kt) {
        float row[kWindow][CHANNELS];
#pragma unroll
        for (int j = 0; j < kWindow; ++j) to_floats(next[j], row[j]);
        load((phase + (kt + 1) / KT) % kRowsRead, (kt + 1) % KT);
        add_products(sums, row, filter[kt], phase, phase == 0 && kt == 0, step, rows);
      }
    }
    if (step >= kSlots - 1) {
#pragma unroll
      for (int q = 0; q < kRowsWritten; ++q) store(sums[0][q]);
    }
  }
}
