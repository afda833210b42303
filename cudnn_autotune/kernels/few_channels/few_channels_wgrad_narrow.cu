// The gradient of the weight for few channels and few filters, of half types and in TF32, with
// stride 1 in rows and columns, on tensor cores: planes of the image and shifts, times pixels,
// times filters and sides.
//
// Element i of a row of the image and the gradient of pixel q add to element i - q of a row of the
// weight, but for the padding. That is 2 s + side, with a shift s and a side of 0 or 1. So a row of
// the left matrix is a row of the image from element 2 s on, whose words are read as they are; a
// column of the right matrix is the gradients of a filter from pixel -side on. A word has two
// numbers of a half type or one that is rounded to TF32, so that an mma takes 16 pixels or 8.
//
// A block goes along DEPTHS depths of a tile of TILE_P rows. While it computes one, the next depth
// is copied: KERNEL_D + 1 slots have a depth of the image each, and two the gradients. A warp goes
// down the rows of its GROUP columns. It reads a row of the image once, and multiplies it with the
// gradients of KERNEL_H rows, which it keeps in registers. The block writes its sums to the
// workspace; sum_parts adds those of all blocks.
//
// In shared memory each channel is a plane, in either layout: pixels of all channels are taken
// apart on the way (if not IS_PLANAR). A row of a contiguous gradient begins anywhere, and is
// copied with what lies before and behind it in whole vectors.
//
// At either end of a row is an element that only one side has. The gradient of the other side is
// zero there. If the element is not finite, the sides are multiplied one after the other, each
// without the other's elements.
//
// Banks: planes of the image are as many words more than a multiple of 32 as lanes of a row read,
// and those of gradients 8.

constexpr int THREADS = 32 * WARPS;
constexpr int PAIR = 4 / sizeof(ELEMENT);  // elements of a word
constexpr int VECTOR = 4 * PAIR;           // of 16 bytes
constexpr int GROUP = 8 * PAIR;            // pixels of an mma
constexpr int SIDES = KERNEL_W > 1 ? 2 : 1;
constexpr int SHIFTS = (KERNEL_W + 1) / 2;
constexpr int COLUMNS = PLANES * KERNEL_H * KERNEL_W;
constexpr int TILE_H = TILE_P + KERNEL_H - 1;
constexpr int LEAD = LEFT % PAIR;                  // the image's words begin so much earlier
constexpr int GRADIENT_ROW = TILE_Q + 2 * VECTOR;  // elements
constexpr int SLOTS = KERNEL_D + 1;
constexpr int SLOT = PIXEL * IMAGE_PLANE;                // elements of a depth of the image
constexpr int GRADIENT_SLOT = FILTERS * GRADIENT_PLANE;  // and of the gradients
constexpr int GROUPS = TILE_Q / GROUP;
constexpr int IMAGE_BYTES = sizeof(ELEMENT) * SLOTS * SLOT;

static_assert(CHANNELS == 1 && STRIDE_H == 1 && STRIDE_W == 1 && TILE_Q % GROUP == 0, "");
static_assert(PITCH % 8 == 0 && PITCH >= LEFT + TILE_Q + 2 * SHIFTS - 2, "a row of the tile fits");
static_assert(IMAGE_PLANE >= TILE_H * PITCH && GRADIENT_PLANE >= TILE_P * GRADIENT_ROW, "");
static_assert(DEPTH_ROWS >= PIXEL * SHIFTS && 16 * M_TILES >= KERNEL_D * DEPTH_ROWS, "");
static_assert(4 * N_TILES >= FILTERS, "");
static_assert(SHARED_BYTES >= IMAGE_BYTES + 2 * sizeof(ELEMENT) * GRADIENT_SLOT, "a tile");
static_assert(SHARED_BYTES >= 4 * FILTERS * COLUMNS, "sums");

// A row of the left matrix. DEPTH_ROWS are of the same depth, those to spare as others are.
struct LeftRow {
  int kd, channel, shift;
  bool is_there;
};
__device__ __forceinline__ LeftRow left_row(int row) {
  const int of_depth = row % DEPTH_ROWS, known = of_depth % (PIXEL * SHIFTS);
  const bool is_there = row < KERNEL_D * DEPTH_ROWS && of_depth == known;
  return {row < KERNEL_D * DEPTH_ROWS ? row / DEPTH_ROWS : 0, known / SHIFTS, known % SHIFTS,
          is_there};
}

// Loads neighbouring words.
template <int count>
__device__ __forceinline__ void load_words(unsigned* words, const ELEMENT* from) {
  if constexpr (count == 4) {
    const uint4 loaded = *reinterpret_cast<const uint4*>(from);
    words[0] = loaded.x, words[1] = loaded.y, words[2] = loaded.z, words[3] = loaded.w;
  } else if constexpr (count == 2) {
    const uint2 loaded = *reinterpret_cast<const uint2*>(from);
    words[0] = loaded.x, words[1] = loaded.y;
  } else {
    words[0] = *reinterpret_cast<const unsigned*>(from);
  }
}

// Copies VECTOR pixels of a row of `width` pixels, of so many channels each, to planes that are
// `apart`; zeros outside. The row begins at a multiple of `copy` elements.
template <int channels, int copy>
__device__ __forceinline__ void copy_pixels(ELEMENT* target, int apart,
                                            const ELEMENT* __restrict__ row, int pixel, int width,
                                            bool valid) {
  unsigned words[4 * channels] = {};
#pragma unroll
  for (int i = 0; i < VECTOR * channels; i += copy) {
    const int at = pixel * channels + i;
    if (!valid || at < 0 || at >= width * channels) continue;
    if constexpr (copy < PAIR) {
      const unsigned bits = *reinterpret_cast<const unsigned short*>(row + at);
      words[i / 2] |= bits << i % 2 * 16;
    } else {
      load_words<copy / PAIR>(words + i / PAIR, row + at);
    }
  }
#pragma unroll
  for (int c = 0; c < channels; ++c) {
    unsigned vector[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int first = PAIR * i * channels + c, second = first + channels;
      vector[i] = PAIR == 1
                      ? words[first]
                      : __byte_perm(words[first / 2], words[second / 2],
                                    (first % 2 ? 0x32 : 0x10) | (second % 2 ? 0x7600 : 0x5400));
    }
    *reinterpret_cast<uint4*>(target + c * apart) = {vector[0], vector[1], vector[2], vector[3]};
  }
}

// A depth of a tile, that of first pixel (p, q). Those up to `end` follow.
struct Step {
  int index, sample, z, end, p, q;
  bool is_first;
};
__device__ __forceinline__ int parts_of(const Shape& shape) {  // of a sample's depths
  return IS_3D ? (shape.z + DEPTHS - 1) / DEPTHS : 1;
}
__device__ __forceinline__ Step first_step(int index, const Shape& shape) {
  const Tile tile = tile_at(index, shape);
  const int parts = parts_of(shape), sample = tile.image / parts;
  const int z = (tile.image - sample * parts) * DEPTHS;
  return {index, sample, z, IS_3D ? min(z + DEPTHS, shape.z) : 1, tile.p, tile.q, true};
}
__device__ __forceinline__ Step step_after(Step step, const Shape& shape) {
  if (++step.z >= step.end) return first_step(step.index + gridDim.x, shape);
  step.is_first = false;
  return step;
}

// The place of the gradients of a tile's first pixel and the block's first channel, of contiguous
// planes.
__device__ __forceinline__ long long gradients_of(const Step& step, const Shape& shape,
                                                  int first_channel) {
  const long long plane = step.sample * shape.channels + first_channel;
  const int row = IS_3D ? step.z * shape.p + step.p : step.p;
  return plane * ((IS_3D ? shape.z : 1) * shape.p * shape.q) + row * shape.q + step.q;
}

// Begins to copy the gradients of a step: a shift behind the begin of a row, those of the tile's
// pixel -VECTOR and behind it.
__device__ __forceinline__ void begin_gradients(ELEMENT* target, const ELEMENT* __restrict__ y,
                                                const Step& step, const Shape& shape,
                                                int first_channel, long long count) {
  constexpr int copies = GRADIENT_ROW / VECTOR;
#if IS_PLANAR
  const int apart = (IS_3D ? shape.z : 1) * shape.p * shape.q;
  // In 32 bits from the vector of the first gradient on.
  const long long begin = gradients_of(step, shape, first_channel);
  const int begin_shift = static_cast<int>(begin) & (VECTOR - 1);
  y += begin - begin_shift;
  const int before = begin < VECTOR ? 0 : VECTOR;
  const int left = static_cast<int>(min(count - begin + begin_shift, 0x7fffffffll));
  for (int i = threadIdx.x; i < TILE_P * copies; i += THREADS) {
    const int row = i / copies, column = (i - row * copies) * VECTOR;
    const bool is_row = step.p + row < shape.p;
#pragma unroll 4
    for (int filter = 0; filter < FILTERS; ++filter) {
      const int first = begin_shift + filter * apart + row * shape.q;
      const int shift = first & (VECTOR - 1), from = first - shift + column - VECTOR;
      const bool valid = is_row && column - VECTOR - shift < shape.q - step.q && from >= -before &&
                         from < left && first_channel + filter < shape.channels;
      // The last vector of all may not be whole.
      copy_async_some(target + filter * GRADIENT_PLANE + row * GRADIENT_ROW + column,
                      y + (valid ? from : 0),
                      valid ? static_cast<int>(sizeof(ELEMENT)) * min(left - from, VECTOR) : 0);
    }
  }
#else
  const int image = IS_3D ? step.sample * shape.z + step.z : step.sample;
  y += static_cast<long long>(image) * shape.p * shape.q * FILTERS;
  for (int i = threadIdx.x; i < TILE_P * copies; i += THREADS) {
    const int row = i / copies, column = (i - row * copies) * VECTOR;
    const bool valid = step.p + row < shape.p;
    copy_pixels<FILTERS, GRADIENT_COPY>(target + row * GRADIENT_ROW + column, GRADIENT_PLANE,
                                        y + (valid ? (step.p + row) * shape.q * FILTERS : 0),
                                        step.q + column - VECTOR, shape.q, valid);
  }
#endif
}

// Begins to copy the depths of the image that a step needs, or the last of them if the others are
// there.
__device__ __forceinline__ void begin_image(ELEMENT* target, const ELEMENT* __restrict__ x,
                                            const Step& step, const Shape& shape, int number) {
  constexpr int copy = IS_PLANAR ? COPY : VECTOR;
  constexpr int copies = PITCH / copy;
  const int depths = IS_3D ? shape.depth : 1, row_elements = shape.width * (IS_PLANAR ? 1 : PIXEL);
  const int depth_elements = shape.height * row_elements;
  const int first = step.q - shape.pad_w - LEFT, top = step.p - shape.pad_h;
  x += static_cast<long long>(step.sample) * (IS_PLANAR ? PIXEL : 1) * depths * depth_elements;
  for (int kd = step.is_first || STRIDE_D > 1 ? 0 : KERNEL_D - 1; kd < KERNEL_D; ++kd) {
    const int d = IS_3D ? STRIDE_D * step.z - shape.pad_d + kd : 0;
    const bool is_there = d >= 0 && d < depths;
    ELEMENT* const slot = target + (number + kd) % SLOTS * SLOT;
    for (int i = threadIdx.x; i < TILE_H * copies; i += THREADS) {
      const int row = i / copies, column = (i - row * copies) * copy;
      const int h = top + row, element = first + column;
      const bool is_row = is_there && h >= 0 && h < shape.height;
      const ELEMENT* const from = x + (is_row ? d * depth_elements + h * row_elements : 0);
      ELEMENT* const to = slot + row * PITCH + column;
#if IS_PLANAR
      const bool is_inside = is_row && element >= 0 && element < row_elements;
#pragma unroll(PIXEL <= 8 ? PIXEL : 4)
      for (int channel = 0; channel < PIXEL; ++channel) {
        copy_elements<COPY>(to + channel * IMAGE_PLANE,
                            from + (is_inside ? channel * depths * depth_elements + element : 0),
                            is_inside);
      }
#else
      copy_pixels<PIXEL, COPY>(to, IMAGE_PLANE, from, element, shape.width, is_row);
#endif
    }
  }
}

// The bits of a word's elements, of place `first` and the next one, that are places of a row.
__device__ __forceinline__ unsigned bits_inside(int first, int size) {
  const auto limit = static_cast<unsigned>(size);
  if (PAIR == 1) return static_cast<unsigned>(first) < limit ? 0xffffffffu : 0u;
  return (static_cast<unsigned>(first) < limit ? 0xffffu : 0u) |
         (static_cast<unsigned>(first + 1) < limit ? 0xffff0000u : 0u);
}

// Bits of the exponents of a word: all of a number are set if it is not finite.
__device__ __forceinline__ constexpr unsigned exponents_of(half) { return 0x7c007c00u; }
__device__ __forceinline__ constexpr unsigned exponents_of(bfloat16) { return 0x7f807f80u; }
__device__ __forceinline__ constexpr unsigned exponents_of(float) { return 0x7f800000u; }
constexpr unsigned EXPONENTS = exponents_of(ELEMENT{});

// A word of shared memory as an operand of an mma.
__device__ __forceinline__ unsigned operand(unsigned word) {
  return PAIR == 1 ? to_tf32(__uint_as_float(word)) : word;
}

// sums += left * right.
template <typename T>
__device__ __forceinline__ void multiply(float (&sums)[4], const unsigned (&left)[4],
                                         const unsigned (&right)[2]) {
  if constexpr (PAIR == 2) {
    mma_16x8x16<T>(sums, left, right);
  } else {
    mma_16x8x8_tf32(sums, left, right);
  }
}

// Multiplies the sides one after the other, each with what belongs to its pixels.
__device__ __forceinline__ void multiply_sides(float (&sums)[M_TILES][N_TILES][4],
                                               const unsigned (&left)[M_TILES][4],
                                               const unsigned (&right)[N_TILES][2],
                                               const unsigned (&inside)[2][2]) {
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      unsigned of_side[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) of_side[i] = left[m][i] & inside[side][i / 2];
#pragma unroll
      for (int j = 0; j < N_TILES; ++j) {
        float both[4] = {};
        multiply<ELEMENT>(both, of_side, right[j]);
        sums[m][j][side] += both[side];
        sums[m][j][2 + side] += both[2 + side];
      }
    }
  }
}

// The GROUP columns of a warp, and this lane's part of them.
struct Strip {
  const unsigned* image;      // its words of the first row, of the first plane
  const unsigned* gradients;  // words of all rows of the tile
  int g, t;
  int begin;       // the pixel of the first column
  unsigned place;  // of the lane's first gradient in its row, but for the row's shift
  int rows, q;
  unsigned first;  // the place in the output of the tile's first gradient, of filter g / 2
  unsigned apart;  // of filters
};

// KERNEL_H rows of the image: the first ones of a tile, some that have all gradients' rows, those
// behind the last gradients' row, or any, at an edge.
enum class Rows { first, middle, last, any };

// Row h of the image has the gradients of rows h to h - KERNEL_H + 1. A row of gradients is in slot
// row % KERNEL_H.
template <Rows are>
__device__ __forceinline__ void go_down(float (&sums)[KERNEL_H][M_TILES][N_TILES][4],
                                        unsigned (&right)[KERNEL_H][N_TILES][2],
                                        const int (&places)[M_TILES][2], const Strip& strip,
                                        int top) {
  const int rows = strip.rows;
  // What belongs to pixels of each side, of a lane's two words of both matrices.
  unsigned inside[2][2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int pixel = strip.begin + PAIR * (strip.t + 4 * k);
    inside[0][k] = bits_inside(pixel, strip.q);
    inside[1][k] = SIDES == 2 ? bits_inside(pixel - 1, strip.q) : inside[0][k];
  }
#pragma unroll
  for (int slot = 0; slot < KERNEL_H; ++slot) {
    const int h = top + slot;
    if (are == Rows::first || are == Rows::middle || (are == Rows::any && h < rows)) {
      const unsigned first = strip.first + h * strip.q;
#pragma unroll
      for (int j = 0; j < N_TILES; ++j) {
        const int own = 4 * j + strip.g / 2,
                  filter = 4 * j + 3 < FILTERS ? own : min(own, FILTERS - 1);
        const unsigned shift = IS_SHIFTED ? (first + 4 * j * strip.apart) & (VECTOR - 1) : 0;
        const unsigned place = strip.place + shift;
        const unsigned* const at = strip.gradients + filter * (GRADIENT_PLANE / PAIR) +
                                   h * (GRADIENT_ROW / PAIR) + place / PAIR;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          right[slot][j][k] = PAIR == 1 ? operand(at[4 * k])
                                        : __funnelshift_r(at[4 * k], at[4 * k + 1], place % 2 * 16);
          if (are == Rows::any) right[slot][j][k] &= strip.g % 2 ? inside[1][k] : inside[0][k];
        }
      }
    }
    if (are == Rows::last ? slot == KERNEL_H - 1 : are == Rows::any && h >= rows + KERNEL_H - 1) {
      break;
    }
    unsigned left[M_TILES][4];
    unsigned spoilt = 0u;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int k = i / 2;
        left[m][i] = operand(strip.image[places[m][i % 2] + h * (PITCH / PAIR) + 4 * k]);
        if (are != Rows::any) continue;
        left[m][i] &= inside[0][k] | inside[1][k];
        // What is not finite carries into the sign.
        const unsigned of_one_side = left[m][i] & (inside[0][k] ^ inside[1][k]);
        spoilt |= (of_one_side & EXPONENTS) + (EXPONENTS & ~(EXPONENTS << 1));
      }
    }
    const bool is_spoilt = are == Rows::any && __any_sync(0xffffffffu, spoilt & 0x80008000u);
#pragma unroll
    for (int kh = 0; kh < KERNEL_H; ++kh) {
      if (are == Rows::first  ? kh > slot
          : are == Rows::last ? kh <= slot
                              : are == Rows::any && (h < kh || h - kh >= rows)) {
        continue;
      }
      const auto& gradients = right[(slot - kh + KERNEL_H) % KERNEL_H];
      if (is_spoilt) {
        multiply_sides(sums[kh], left, gradients, inside);
        continue;
      }
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
        for (int j = 0; j < N_TILES; ++j) {
          multiply<ELEMENT>(sums[kh][m][j], left[m], gradients[j]);
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    few_channels_wgrad(const ELEMENT* __restrict__ x, const ELEMENT* __restrict__ y,
                       float* __restrict__ parts, int depth, int height, int width, int channels,
                       int z, int p, int q, int pad_d, int pad_h, int pad_w, int tiles_p,
                       int tiles_q, int tiles) {
  const Shape shape{depth, height, width, channels, z, p, q, pad_d, pad_h, pad_w, tiles_p, tiles_q};
  DYNAMIC_SHARED(shared);
  auto* const image = reinterpret_cast<ELEMENT*>(shared);
  auto* const gradients = reinterpret_cast<ELEMENT*>(shared + IMAGE_BYTES);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int first_channel = blockIdx.y * FILTERS;
  const long long count = static_cast<long long>(tiles / (parts_of(shape) * tiles_p * tiles_q)) *
                          channels * (IS_3D ? z : 1) * p * q;  // of gradients
  float sums[KERNEL_H][M_TILES][N_TILES][4] = {};

  const auto begin_step = [&](const Step& step, int number) {
    begin_image(image, x, step, shape, number);
    begin_gradients(gradients + number % 2 * GRADIENT_SLOT, y, step, shape, first_channel, count);
    commit_copies();
  };
  Step next = first_step(blockIdx.x, shape);
  begin_step(next, 0);
  for (int number = 0; next.index < tiles; ++number) {
    copies_arrived<0>();
    __syncthreads();  // all have them, and are done with the step before
    const Step step = next;
    next = step_after(step, shape);
    const bool is_ahead = KERNEL_D == 1 || (STRIDE_D == 1 && !next.is_first);
    if (is_ahead && next.index < tiles) begin_step(next, number + 1);

    int places[M_TILES][2];  // the first words of this lane's rows g and g + 8 of the left matrix
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; ++i) {
      const LeftRow row = left_row(8 * i + g);
      places[i / 2][i % 2] = ((number + row.kd) % SLOTS * SLOT + row.channel * IMAGE_PLANE) / PAIR +
                             2 / PAIR * row.shift + LEFT / PAIR + t;
    }
    Strip strip;
    strip.gradients = reinterpret_cast<const unsigned*>(gradients + number % 2 * GRADIENT_SLOT);
    strip.g = g, strip.t = t;
    strip.rows = min(TILE_P, p - step.p);
    strip.q = q;
    strip.apart = static_cast<unsigned>(IS_3D ? z : 1) * p * q;
    strip.first =
        static_cast<unsigned>(gradients_of(step, shape, first_channel)) + g / 2 * strip.apart;
#pragma unroll 1
    for (int group = warp; group < GROUPS; group += WARPS) {
      strip.begin = step.q - LEAD + GROUP * group;
      if (strip.begin >= q + SIDES - 1) break;
      strip.image = reinterpret_cast<const unsigned*>(image) + 8 * group;
      strip.place = VECTOR - LEAD + GROUP * group + PAIR * t - g % 2;
      unsigned right[KERNEL_H][N_TILES][2];
      if (strip.begin <= 0 || strip.begin + GROUP > q || strip.rows % KERNEL_H != 0) {
#pragma unroll 1
        for (int top = 0; top < strip.rows + KERNEL_H - 1; top += KERNEL_H) {
          go_down<Rows::any>(sums, right, places, strip, top);
        }
        continue;
      }
      go_down<Rows::first>(sums, right, places, strip, 0);
#pragma unroll 1
      for (int top = KERNEL_H; top < strip.rows; top += KERNEL_H) {
        go_down<Rows::middle>(sums, right, places, strip, top);
      }
      go_down<Rows::last>(sums, right, places, strip, strip.rows);
    }
    if (!is_ahead && next.index < tiles) {
      __syncthreads();
      begin_step(next, number + 1);
    }
  }

  // Adds the sums of warps, one after the other.
  auto* const total = reinterpret_cast<float*>(shared);
  for (int turn = 0; turn < WARPS; ++turn) {
    __syncthreads();
    if (warp != turn) continue;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const LeftRow row = left_row(16 * m + 8 * (r / 2) + g);
        const int kw = 2 * row.shift + r % 2;
        if (!row.is_there || kw >= KERNEL_W) continue;
#pragma unroll
        for (int j = 0; j < N_TILES; ++j) {
          const int filter = 4 * j + t;
          if (filter >= FILTERS) continue;
#pragma unroll
          for (int kh = 0; kh < KERNEL_H; ++kh) {
            // A window is in the order of the weight in memory.
            const int at = IS_PLANAR
                               ? ((row.channel * KERNEL_D + row.kd) * KERNEL_H + kh) * KERNEL_W + kw
                               : ((row.kd * KERNEL_H + kh) * KERNEL_W + kw) * PIXEL + row.channel;
            float& sum = total[filter * COLUMNS + at];
            sum = turn == 0 ? sums[kh][m][j][r] : sum + sums[kh][m][j][r];
          }
        }
      }
    }
  }
  __syncthreads();
  parts += (static_cast<long long>(blockIdx.x) * channels + first_channel) * COLUMNS;
  const int written = min(FILTERS, channels - first_channel) * COLUMNS;
  for (int i = threadIdx.x; i < written; i += THREADS) parts[i] = total[i];
}
