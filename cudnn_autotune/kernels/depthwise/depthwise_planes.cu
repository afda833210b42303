// Depthwise convolutions and their gradient of the input (DGRAD) in contiguous layout, on CUDA
// cores.
//
// A block computes a tile of a few planes: it copies what it reads to shared memory as float32,
// with zeros around the image, computes from there, and collects its results in shared memory too.
// So global memory is read and written in whole vectors, each pixel is converted once, and a tap
// costs no comparison. A thread computes COLUMNS adjacent columns of one plane and walks down its
// rows. The filters stay in registers, and so do the sums of the rows that are not complete yet,
// as in depthwise.cu, which says how strides, dilations and both operations pair pixels.
//
// A row that is read with a stride lies in shared memory as its phases one after the other. So
// neighbouring lanes read at a distance of COLUMNS words, which is odd: there are no bank conflicts
// within a row. A row costs a load for each column of the window, and KH * KW products for each
// column of the result.

using T = ELEMENT;

constexpr int kSlots = (KH + STRIDE_H - 1) / STRIDE_H;
constexpr int kTapGroups = (KW + STRIDE_W - 1) / STRIDE_W;
#if DGRAD
constexpr int kRowsRead = 1, kRowsWritten = STRIDE_H, kRowStep = 1, kPhases = 1;
constexpr int kWindow = COLUMNS + (kTapGroups - 1) * DILATION_W, kWritten = COLUMNS * STRIDE_W;
static_assert(STRIDE_W == 1 || DILATION_W == 1, "some x columns would have no row_thread");
#else
constexpr int kRowsRead = STRIDE_H < KH ? STRIDE_H : KH, kRowsWritten = 1;
constexpr int kRowStep = STRIDE_H, kPhases = STRIDE_W;
constexpr int kWindow = (COLUMNS - 1) * STRIDE_W + (KW - 1) * DILATION_W + 1, kWritten = COLUMNS;
#endif

constexpr bool kSkipsDepths = DGRAD && KT > 1 && STRIDE_D > 1;  // some taps meet no depth of y

// Numbers that one instruction loads or stores.
template <typename E, int count>
struct alignas(count * sizeof(E) < 16 ? count * sizeof(E) : 16) Vector {
  E elements[count];
};
// `count` elements of T as they lie in memory: in words, if they fill any.
template <typename E, int count, bool fills_words = (count * sizeof(E) >= 4)>
struct Packed {
  Vector<unsigned, count * sizeof(E) / 4> words;
  __device__ __forceinline__ void unpack_to(float (&values)[count]) const {
#pragma unroll
    for (int j = 0; j < count; ++j) {
      if constexpr (sizeof(E) == 4) {
        values[j] = __uint_as_float(words.elements[j]);
      } else {
        const float2 two = unpack<E>(words.elements[j / 2]);
        values[j] = j % 2 == 0 ? two.x : two.y;
      }
    }
  }
  __device__ __forceinline__ void pack_from(const float (&values)[count]) {
#pragma unroll
    for (int j = 0; j < count; j += 4 / sizeof(E)) {
      if constexpr (sizeof(E) == 4) {
        words.elements[j] = __float_as_uint(values[j]);
      } else {
        words.elements[j / 2] = pack<E>(values[j], values[j + 1]);
      }
    }
  }
};
template <typename E>
struct Packed<E, 1, false> {
  E element;
  __device__ __forceinline__ void unpack_to(float (&values)[1]) const {
    values[0] = to_float(element);
  }
  __device__ __forceinline__ void pack_from(const float (&values)[1]) {
    element = from_float<E>(values[0]);
  }
};
using In = Packed<T, VECTOR_IN>;
using Out = Packed<T, VECTOR_OUT>;

__device__ __forceinline__ int floor_divide(int a, int b) {
  return a >= 0 ? a / b : -((b - 1 - a) / b);
}

// The walk of a block's threads over the lines of a tile, its planes' rows: `abreast` threads take
// the vectors of a line, and as many lines as there are threads for are walked at a time.
struct Walk {
  int abreast, vector, line, row, plane;
  int lines_on, rows_on, planes_on, rows;
  __device__ __forceinline__ Walk(int vectors, int rows, int lines)
      : abreast(min(vectors, THREADS)), rows(rows) {
    const int thread = threadIdx.x;
    lines_on = THREADS / abreast;
    rows_on = lines_on % rows;
    planes_on = lines_on / rows;
    vector = thread % abreast;
    line = thread / abreast;
    if (line >= lines_on) line = lines;
    begin();
  }
  __device__ __forceinline__ void begin() {
    row = line % rows;
    plane = line / rows;
  }
  __device__ __forceinline__ void advance() {
    line += lines_on;
    row += rows_on;
    plane += planes_on;
    if (row >= rows) row -= rows, ++plane;
  }
};

// Moves the sums down a slot.
__device__ __forceinline__ void move_sums(float (&sums)[kSlots][kRowsWritten][kWritten]) {
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
    for (int q = 0; q < kRowsWritten; ++q) {
#pragma unroll
      for (int j = 0; j < kWritten; ++j) {
        sums[slot][q][j] = slot + 1 < kSlots ? sums[slot + 1 < kSlots ? slot + 1 : 0][q][j] : 0.0f;
      }
    }
  }
}

// Adds a row that was read to the sums. `phase` is its phase in x where x is read; `begins`
// says whether it is the first one of a step, when the sums move down a slot.
__device__ __forceinline__ void add_products(float (&sums)[kSlots][kRowsWritten][kWritten],
                                             const float (&window)[kWindow],
                                             const float (&filter)[KH][KW], int phase, bool begins,
                                             int step, int rows) {
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    // Many slots are worth a branch: tiles waste kSlots - 1 rows of products without it.
    const int index = step + slot - (kSlots - 1);
    if (kSlots > 3 && (index < 0 || index >= rows)) continue;
#pragma unroll
    for (int q = 0; q < kRowsWritten; ++q) {
      const int kh = DGRAD ? q + STRIDE_H * slot : phase + STRIDE_H * (kSlots - 1 - slot);
      if (begins) {
#pragma unroll
        for (int j = 0; j < kWritten; ++j) {
          sums[slot][q][j] =
              slot + 1 < kSlots ? sums[slot + 1 < kSlots ? slot + 1 : 0][q][j] : 0.0f;
        }
      }
      if (kh >= KH) continue;
#pragma unroll
      for (int kw = 0; kw < KW; ++kw) {
#pragma unroll
        for (int t = 0; t < COLUMNS; ++t) {
          const int from = DGRAD ? t + (kTapGroups - 1 - kw / STRIDE_W) * DILATION_W
                                 : t * STRIDE_W + kw * DILATION_W;
          const int to = DGRAD ? t * STRIDE_W + kw % STRIDE_W : t;
          sums[slot][q][to] += window[from] * filter[kh][kw];
        }
      }
    }
  }
}

// Tensors are (outer, plane, height, width); `read` and `written` are x and y, or y and x. In 2-d
// all planes are one outer's, in 3-d those of a channel. A tile has `tile_planes` planes, and
// `tile_rows` and `tile_columns` y pixels, or groups of x pixels, in rows and columns. For them it
// reads `planes_in`, `rows_in` and `vectors_in` vectors; a phase of a row has `pitch` floats,
// and a row of results `pitch_out`. Both are multiples of 4.
extern "C" __global__ void __launch_bounds__(THREADS)
    depthwise_planes(const T* __restrict__ read, const T* __restrict__ weight,
                     T* __restrict__ written,
#if HAS_BIAS
                     const T* __restrict__ bias,
#endif
#if HAS_RESIDUAL
                     const T* __restrict__ residual,
#endif
                     int channels, int planes_read, int height_read, int width_read,
                     int planes_written, int height_written, int width_written, int padding_d,
                     int padding_h, int padding_w, int dilation_d, int dilation_h, int plane_tiles,
                     int row_tiles, int column_tiles, int tile_planes, int tile_rows,
                     int tile_columns, int planes_in, int rows_in, int vectors_in, int pitch,
                     int pitch_out) {
  DYNAMIC_SHARED(shared);
  float* const tile = reinterpret_cast<float*>(shared);
  float* const results = tile + planes_in * rows_in * kPhases * pitch;

  int block = blockIdx.x;
  const int column_tile = block % column_tiles;
  block /= column_tiles;
  const int residue = block % row_tiles % dilation_h;
  int row_index = block % row_tiles / dilation_h * tile_rows;
  block /= row_tiles;
  const int first_plane = block % plane_tiles * tile_planes;
  const int outer = block / plane_tiles;

  int column_index = column_tile * tile_columns;
#if DGRAD
  column_index += floor_divide(padding_w, STRIDE_W);
  row_index += floor_divide(padding_h - STRIDE_H * residue, dilation_h * STRIDE_H);
#endif
  const int x_row = STRIDE_H * residue - padding_h + dilation_h * STRIDE_H * row_index;
  const int x_column = STRIDE_W * column_index - padding_w;
#if DGRAD
  const int row_read = residue + dilation_h * (row_index - (kSlots - 1));
  const int column_read = column_index - (kTapGroups - 1) * DILATION_W;
  const int plane_read = floor_divide(first_plane + padding_d - (KT - 1) * dilation_d, STRIDE_D);
  const int row_written = x_row, column_written = x_column;
#else
  const int row_read = x_row, column_read = x_column;
  const int plane_read = first_plane * STRIDE_D - padding_d;
  const int row_written = residue + dilation_h * row_index, column_written = column_index;
#endif

  {
    // SHIFT columns before the first one that is needed, vectors are aligned.
    const int lines_in = planes_in * rows_in, line_floats = kPhases * pitch;
    const T* const origin =
        read + static_cast<long long>(outer) * planes_read * height_read * width_read;
    const Walk first(vectors_in, rows_in, lines_in);
    for (int vector = first.vector; vector < vectors_in; vector += first.abreast) {
      const int u = VECTOR_IN * vector, column = column_read - SHIFT + u;
      const bool is_column = column >= 0 && column < width_read;
      // One vector has all phases, or is one element.
      float* const target = tile + (VECTOR_IN == 1 ? u % kPhases * pitch : 0) + u / kPhases;
      Walk walk = first;
      while (walk.line < lines_in) {
        constexpr int kAtOnce = 8;  // loads of a thread, to hide their latency
        In loaded[kAtOnce];
        const int first_line = walk.line;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const unsigned plane = plane_read + walk.plane;
          const unsigned row = row_read + dilation_h * walk.row;
          loaded[i] = In{};
          if (is_column && walk.line < lines_in && plane < static_cast<unsigned>(planes_read) &&
              row < static_cast<unsigned>(height_read)) {
            // Tensors have less than 2**31 elements.
            loaded[i] = *reinterpret_cast<const In*>(
                origin + ((plane * height_read + row) * width_read + column));
          }
          walk.advance();
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int line = first_line + i * walk.lines_on;
          if (line >= lines_in) break;
          float values[VECTOR_IN];
          loaded[i].unpack_to(values);
          constexpr int kVectorPhases = VECTOR_IN == 1 ? 1 : kPhases;
          constexpr int kRun = VECTOR_IN / kVectorPhases;  // adjacent floats of a phase
#pragma unroll
          for (int phase = 0; phase < kVectorPhases; ++phase) {
            Vector<float, kRun> run;
#pragma unroll
            for (int j = 0; j < kRun; ++j) run.elements[j] = values[j * kVectorPhases + phase];
            *reinterpret_cast<Vector<float, kRun>*>(target + line * line_floats + phase * pitch) =
                run;
          }
        }
      }
    }
  }
  __syncthreads();

  const int columns_out = tile_columns * (kWritten / COLUMNS);
  const int rows_out = tile_rows * kRowsWritten;
  // Results begin where vectors are aligned, `before` columns before the tile's.
  const int before = column_written - floor_divide(column_written, VECTOR_OUT) * VECTOR_OUT;
  const int row_threads = tile_columns / COLUMNS;
  const int row_thread = threadIdx.x % row_threads, plane_of_tile = threadIdx.x / row_threads;
  if (plane_of_tile < tile_planes && first_plane + plane_of_tile < planes_written) {
    const int plane = first_plane + plane_of_tile;
    float filter[KT][KH][KW];
    {
      const T* const taps =
          weight + static_cast<long long>((IS_3D ? outer : plane) % channels) * (KT * KH * KW);
#pragma unroll
      for (int tap = 0; tap < KT * KH * KW; ++tap) {
        filter[tap / (KH * KW)][tap / KW % KH][tap % KW] = to_float(taps[tap]);
      }
    }
    const float* lines[KT];  // the next row of each plane that is read; null if a tap meets none
#pragma unroll
    for (int kt = 0; kt < KT; ++kt) {
#if DGRAD
      const int distance = plane + padding_d - kt * dilation_d;
      const bool is_read = distance % STRIDE_D == 0;
      const int from = floor_divide(distance, STRIDE_D) - plane_read;
#else
      const bool is_read = true;
      const int from = plane_of_tile * STRIDE_D + kt * dilation_d;
#endif
      lines[kt] =
          is_read ? tile + from * rows_in * kPhases * pitch + row_thread * COLUMNS : nullptr;
    }
    float* result = results + plane_of_tile * rows_out * pitch_out + before + row_thread * kWritten;

    float sums[kSlots][kRowsWritten][kWritten] = {};
#pragma unroll 1
    for (int step = 0; step < tile_rows + kSlots - 1; ++step) {
      if (kSkipsDepths) move_sums(sums);
#pragma unroll
      for (int kt = 0; kt < KT; ++kt) {
        if (kSkipsDepths && lines[kt] == nullptr) continue;
#pragma unroll
        for (int phase = 0; phase < kRowsRead; ++phase) {
          float window[kWindow];
#pragma unroll
          for (int j = 0; j < kWindow; ++j) {
            const int u = j + SHIFT;
            window[j] = lines[kt][(phase * kPhases + u % kPhases) * pitch + u / kPhases];
          }
          add_products(sums, window, filter[kt], phase, !kSkipsDepths && kt == 0 && phase == 0,
                       step, tile_rows);
        }
        lines[kt] += kRowStep * kPhases * pitch;
      }
      if (step >= kSlots - 1) {
#pragma unroll
        for (int q = 0; q < kRowsWritten; ++q) {
#pragma unroll
          for (int j = 0; j < kWritten; ++j) result[q * pitch_out + j] = sums[0][q][j];
        }
        result += kRowsWritten * pitch_out;
      }
    }
  }
  __syncthreads();

  {
    const int vectors = (before + columns_out + VECTOR_OUT - 1) / VECTOR_OUT;
    const int lines_out = tile_planes * rows_out;
    const long long origin =
        static_cast<long long>(outer) * planes_written * height_written * width_written;
    const Walk first(vectors, rows_out, lines_out);
    for (int vector = first.vector; vector < vectors; vector += first.abreast) {
      const int from = VECTOR_OUT * vector - before, column = column_written + from;
      // A tile may begin or end within a vector.
      const int begin = max(0, max(-from, -column));
      const int end = min(VECTOR_OUT, min(columns_out - from, width_written - column));
      if (begin >= end) continue;
      for (Walk walk = first; walk.line < lines_out; walk.advance()) {
        const unsigned plane = first_plane + walk.plane;
        const unsigned row = row_written + dilation_h * walk.row;
        if (plane >= static_cast<unsigned>(planes_written) ||
            row >= static_cast<unsigned>(height_written)) {
          continue;
        }
        const long long offset =
            origin + static_cast<int>((plane * height_written + row) * width_written + column);
        const auto sums = *reinterpret_cast<const Vector<float, VECTOR_OUT>*>(
            results + walk.line * pitch_out + VECTOR_OUT * vector);
        float values[VECTOR_OUT];
#pragma unroll
        for (int j = 0; j < VECTOR_OUT; ++j) values[j] = sums.elements[j];
#if HAS_BIAS
        const float added = to_float(bias[(IS_3D ? outer : plane) % channels]);
#pragma unroll
        for (int j = 0; j < VECTOR_OUT; ++j) values[j] += added;
#endif
        const bool is_whole = end - begin == VECTOR_OUT;
#if HAS_RESIDUAL
        float others[VECTOR_OUT] = {};
        if (is_whole) {
          reinterpret_cast<const Out*>(residual + offset)->unpack_to(others);
        } else {
#pragma unroll
          for (int j = 0; j < VECTOR_OUT; ++j) {
            if (j >= begin && j < end) others[j] = to_float(residual[offset + j]);
          }
        }
#pragma unroll
        for (int j = 0; j < VECTOR_OUT; ++j) values[j] += others[j];
#endif
#pragma unroll
        for (int j = 0; j < VECTOR_OUT; ++j) values[j] = activate<ACTIVATION>(values[j]);
        if (is_whole) {
          Out packed;
          packed.pack_from(values);
          *reinterpret_cast<Out*>(written + offset) = packed;
        } else {
#pragma unroll
          for (int j = 0; j < VECTOR_OUT; ++j) {
            if (j >= begin && j < end) written[offset + j] = from_float<T>(values[j]);
          }
        }
      }
    }
  }
}
