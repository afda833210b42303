// Depthwise convolutions and their gradient of the input (DGRAD) in channels_last, in two
// dimensions without dilation: depthwise.cu with tiles in shared memory.
//
// A block copies all pixels that its tile reads to shared memory at once, with zeros outside of the
// image, and waits for them once. The other blocks of the multiprocessor compute meanwhile: so many
// more bytes are under way than registers could receive. A thread then walks down its thread tile
// as in depthwise.cu, but reads the pixels from shared memory, at addresses known at compile time.
//
// Macros besides those of depthwise_thread.cuh: GROUPS of CHANNELS, ROWS of a thread, THREADS_H and
// THREADS_W of a block, MIN_BLOCKS, SHARED_BYTES, HAS_BIAS, HAS_RESIDUAL, ACTIVATION.

constexpr int kThreads = GROUPS * THREADS_H * THREADS_W;
constexpr int kTaps = KH * KW;
constexpr int kTileRows = ROWS * THREADS_H, kTileColumns = COLUMNS * THREADS_W;
#if DGRAD
constexpr int kStepRows = 1, kStepColumns = 1;
constexpr int kReadRows = kTileRows + kSlots - 1, kReadColumns = kTileColumns + kTapGroups - 1;
#else
constexpr int kStepRows = STRIDE_H, kStepColumns = STRIDE_W;
constexpr int kReadRows = (kTileRows - 1) * STRIDE_H + KH;
constexpr int kReadColumns = (kTileColumns - 1) * STRIDE_W + KW;
#endif
constexpr int kVector = 16 / sizeof(T);  // elements that a thread copies at a time
constexpr int kBlockChannels = GROUPS * CHANNELS;
constexpr int kVectors = kBlockChannels / kVector;
constexpr int kPixelBytes = kBlockChannels * sizeof(T), kRowBytes = kReadColumns * kPixelBytes;
static_assert(SHARED_BYTES == kReadRows * kRowBytes + kTaps * kPixelBytes, "pixels and filters");
static_assert(kBlockChannels % kVector == 0 && kThreads % kVectors == 0, "vectors fill");

// The filter's taps of a thread's channels, which lie one channel after the other.
template <typename E = T>
__device__ __forceinline__ void load_filter(const unsigned char* from,
                                            float (&filter)[KH][KW][CHANNELS]) {
#pragma unroll
  for (int i = 0; i < CHANNELS * kTaps; ++i) {
    float& value = filter[i % kTaps / KW][i % kTaps % KW][i / kTaps];
    if constexpr (sizeof(E) == 4) {
      value = reinterpret_cast<const float*>(from)[i];
    } else {
      const float2 two = unpack<E>(reinterpret_cast<const unsigned*>(from)[i / 2]);
      value = i % 2 ? two.y : two.x;
    }
  }
}

// Tensors are (image, height, width, channel); `read` and `written` are x and y, or y and x. A
// block has a tile of y pixels, or of groups of STRIDE_H x STRIDE_W pixels of x. The grid has the
// chunks of channels, tiles of a row, rows of tiles, and images, in one dimension.
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    depthwise_tile(const T* __restrict__ read, const T* __restrict__ weight,
                   T* __restrict__ written,
#if HAS_BIAS
                   const T* __restrict__ bias,
#endif
#if HAS_RESIDUAL
                   const T* __restrict__ residual,
#endif
                   int channels, int height_read, int width_read, int height_written,
                   int width_written, int padding_h, int padding_w, int chunks, int tiles_h,
                   int tiles_w) {
  DYNAMIC_SHARED(shared);
  unsigned char* const filters = shared + kReadRows * kRowBytes;
  const int block = blockIdx.x;
  const int first_channel = block % chunks * kBlockChannels;
  const int tile_column = block / chunks % tiles_w * kTileColumns;
  const int tile_row = block / chunks / tiles_w % tiles_h * kTileRows;
  const long long image = block / chunks / tiles_w / tiles_h;
#if DGRAD
  // The first group of pixels begins at, or before, the image.
  const int first_row_read = tile_row + padding_h / STRIDE_H - (kSlots - 1);
  const int first_column_read = tile_column + padding_w / STRIDE_W - (kTapGroups - 1);
#else
  const int first_row_read = tile_row * STRIDE_H - padding_h;
  const int first_column_read = tile_column * STRIDE_W - padding_w;
#endif

  {
    const int vector = threadIdx.x % kVectors, channel = first_channel + vector * kVector;
    const T* const from = read + image * height_read * width_read * channels + channel;
    constexpr int kAtOnce = kThreads / kVectors;  // pixels that the block copies
    const unsigned height = height_read, width = channel < channels ? width_read : 0;
    int row = first_row_read + threadIdx.x / kVectors / kReadColumns;
    int column = threadIdx.x / kVectors % kReadColumns;
#pragma unroll 4
    for (int i = threadIdx.x / kVectors; i < kReadRows * kReadColumns; i += kAtOnce) {
      const int from_column = first_column_read + column;
      const bool is_inside =
          static_cast<unsigned>(row) < height && static_cast<unsigned>(from_column) < width;
      copy_async<16>(shared + i * kPixelBytes + vector * 16,
                     from + static_cast<long long>(row * width_read + from_column) * channels,
                     is_inside);
      row += kAtOnce / kReadColumns;
      column += kAtOnce % kReadColumns;
      if (column >= kReadColumns) column -= kReadColumns, ++row;
    }
    const T* const taps = weight + static_cast<long long>(first_channel) * kTaps;
    const int count = min(kBlockChannels, channels - first_channel) * kTaps / kVector;
    for (int i = threadIdx.x; i < count; i += kThreads) {
      copy_async<16>(filters + i * 16, taps + i * kVector);
    }
    commit_copies();
  }

  const int group = threadIdx.x % GROUPS, thread_tile = threadIdx.x / GROUPS;
  const int channel = first_channel + group * CHANNELS;
  const int thread_row = thread_tile / THREADS_W * ROWS,
            thread_column = thread_tile % THREADS_W * COLUMNS;
#if DGRAD
  const int column_written =
      (tile_column + thread_column + padding_w / STRIDE_W) * STRIDE_W - padding_w;
  int row_written = (tile_row + thread_row + padding_h / STRIDE_H) * STRIDE_H - padding_h;
  const int row_groups = (height_written - row_written + STRIDE_H - 1) / STRIDE_H;
#else
  const int column_written = tile_column + thread_column;
  int row_written = tile_row + thread_row;
  const int row_groups = height_written - row_written;
#endif
  const int rows = min(ROWS, row_groups);
  const unsigned columns_written = columns_inside<kWritten>(column_written, 1, width_written);
  const long long step_written = sizeof(T) * static_cast<long long>(channels);
  long long line_written =
      ((image * height_written + row_written) * width_written + column_written) * step_written +
      sizeof(T) * static_cast<long long>(channel);
  const long long line_step_written = step_written * width_written;

  copies_arrived<0>();
  __syncthreads();
  if (channel >= channels || columns_written == 0 || rows <= 0) return;

  float filter[KH][KW][CHANNELS];
  load_filter(filters + group * CHANNELS * kTaps * sizeof(T), filter);
#if HAS_BIAS
  float biases[CHANNELS];
#pragma unroll
  for (int v = 0; v < CHANNELS; ++v) biases[v] = to_float(bias[channel + v]);
#endif
  const auto store = [&](float (&values)[kWritten][CHANNELS]) {
    const bool is_inside = row_written >= 0 && row_written < height_written;
    const unsigned mask = is_inside ? columns_written : 0;
    char* pixel = kept(reinterpret_cast<char*>(written) + line_written);
#if HAS_RESIDUAL
    const char* other = reinterpret_cast<const char*>(residual) + line_written;
#endif
    line_written += line_step_written;
    ++row_written;
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

  const unsigned char* line = shared + thread_row * kStepRows * kRowBytes +
                              thread_column * kStepColumns * kPixelBytes +
                              group * CHANNELS * sizeof(T);
  float sums[kSlots][kRowsWritten][kWritten][CHANNELS] = {};
#pragma unroll 1
  for (int step = 0; step < rows + kSlots - 1; ++step, line += kStepRows * kRowBytes) {
#pragma unroll
    for (int phase = 0; phase < kRowsRead; ++phase) {
      // The last step has only those rows that its y pixels need.
      const bool is_used = DGRAD || phase + STRIDE_H * (kSlots - 1) < KH;
      if (!is_used && step == rows + kSlots - 2) continue;
      float row[kWindow][CHANNELS];
#pragma unroll
      for (int j = 0; j < kWindow; ++j) {
        to_floats(*reinterpret_cast<const Bits*>(line + phase * kRowBytes + j * kPixelBytes),
                  row[j]);
      }
      add_products(sums, row, filter, phase, phase == 0, step, rows);
    }
    if (step >= kSlots - 1) {
#pragma unroll
      for (int q = 0; q < kRowsWritten; ++q) store(sums[0][q]);
    }
  }
}
