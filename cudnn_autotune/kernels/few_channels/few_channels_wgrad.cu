// The gradient of the weight for images or volumes with few channels, on tensor cores: output
// channels times pixels, times pixels times window elements. A block adds over its tiles of two
// rows of TILE_Q pixels, and writes its sums to the workspace; sum_parts adds those of all blocks.
// If the output has one row (IS_SIGNAL), the two are neighbouring segments of it.
//
// An mma takes neighbouring pixels in pairs. Here a pair is one of pixels below each other: the
// block makes words of the image's rows, word e of row h holding elements e of the rows h and h +
// SECOND_ROW. Then element n of the window of pixel q is word PIXEL_STEP * q + n of its row, at
// whatever step, and one access is a register of the right fragment. The left ones, of the
// output's gradient, are loaded transposed. An mma has 8 pairs. If planes are contiguous
// (IS_PLANAR), a left register is made of the words of two rows, which have two pixels each. So
// lane (g, t) has the pairs 2 t and 2 t + 1. A row of gradients is copied with what lies before and
// behind it in whole vectors. So it begins a shift behind a multiple of 16 bytes, the same for
// channels g and g + 8.
//
// A pixel outside of the output has the gradient zero, and its window is replaced by zeros as well,
// since zero times infinity is no zero.
//
// Banks: a row of gradients is an odd number of 16 bytes, so the 8 rows of a matrix, or of
// channels, lie in different banks; with different shifts two channels may meet. Lane (g, t) reads
// word PIXEL_STEP * t + g: these lie in different banks, or are the same, for steps up to 8 words;
// where an eight of elements belongs to two rows, words may meet.

constexpr int SECOND_ROW =
    IS_SIGNAL ? 1 : STRIDE_H;  // rows of the image from a pixel to its pair's
constexpr int IMAGE_ROWS = KERNEL_H + SECOND_ROW;
constexpr int IMAGE_BYTES = PLANES * IMAGE_ROWS * PITCH * 2;
constexpr int GRADIENT_ROW = TILE_Q + (IS_SHIFTED ? 8 : 0);  // elements of a row of a plane
constexpr int GRADIENT_PITCH = 2 * (IS_PLANAR ? 2 * GRADIENT_ROW : BLOCK_CHANNELS) + 16;  // bytes
constexpr int GRADIENT_BYTES = (IS_PLANAR ? BLOCK_CHANNELS : 2 * TILE_Q) * GRADIENT_PITCH;
constexpr int COPIED_BYTES = GRADIENT_BYTES + IMAGE_BYTES;

static_assert(TILE_P == (IS_SIGNAL ? 1 : 2) && (KERNEL_D * KERNEL_H == 1 || !IS_SIGNAL), "");
static_assert(SHARED_BYTES >= 2 * COPIED_BYTES + PLANES * KERNEL_H * PITCH * 4, "copies, pairs");

// The place of a tile.
__device__ __forceinline__ Tile begin_of(int index, const Shape& shape) {
  Tile tile = tile_at(index, shape);
  if (IS_SIGNAL) tile.q *= 2;
  return tile;
}
// The place of a tile's second row.
__device__ __forceinline__ Tile second_of(const Tile& tile) {
  return IS_SIGNAL ? Tile{tile.image, tile.p, tile.q + TILE_Q}
                   : Tile{tile.image, tile.p + 1, tile.q};
}

// The place of the gradients of a tile's first pixel and the block's first channel.
__device__ __forceinline__ long long gradients_of(const Tile& tile, const Shape& shape,
                                                  int first_channel) {
  const long long plane = tile.sample(shape) * shape.channels + first_channel;
  const int row = IS_3D ? tile.depth(shape) * shape.p + tile.p : tile.p;
  return plane * ((IS_3D ? shape.z : 1) * shape.p * shape.q) + row * shape.q + tile.q;
}

// Begins to copy the gradients of a tile's pixels, those of both rows in turns; zeros outside of
// the output and behind the last channel, but for those of the same vector in contiguous planes.
__device__ __forceinline__ void begin_gradients(unsigned char* target,
                                                const ELEMENT* __restrict__ y, const Tile& tile,
                                                const Shape& shape, int first_channel,
                                                long long count) {
#if IS_PLANAR
  constexpr int copies = GRADIENT_ROW / 8;
  const int apart = (IS_3D ? shape.z : 1) * shape.p * shape.q;
  // In 32 bits from the vector of the first gradient on.
  const long long begin = gradients_of(tile, shape, first_channel);
  const int begin_shift = IS_SHIFTED ? static_cast<int>(begin) & 7 : 0;
  y += begin - begin_shift;
  const int left = static_cast<int>(min(count - begin + begin_shift, 0x7fffffffll));
  for (int i = threadIdx.x; i < BLOCK_CHANNELS * copies; i += THREADS) {
    const int channel = i / copies, column = (i - channel * copies) * 8;
    unsigned char* const to = target + channel * GRADIENT_PITCH + 2 * column;
    const bool is_channel = first_channel + channel < shape.channels;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int first = begin_shift + channel * apart + row * (IS_SIGNAL ? TILE_Q : shape.q);
      const int shift = IS_SHIFTED ? first & 7 : 0, from = first - shift + column;
      const int columns = shape.q - tile.q - (IS_SIGNAL ? row * TILE_Q : 0);
      const bool valid = is_channel && tile.p + (IS_SIGNAL ? 0 : row) < shape.p &&
                         column - shift < columns && from < left;
      // The last vector of all may have fewer than 8.
      copy_async_some(to + 2 * row * GRADIENT_ROW, y + (valid ? from : 0),
                      valid ? 2 * min(left - from, 8) : 0);
    }
  }
#else
  constexpr int copies = BLOCK_CHANNELS / GRADIENT_COPY;
  y += static_cast<long long>(tile.image) * shape.p * shape.q * shape.channels + first_channel;
#pragma unroll 2
  for (int i = threadIdx.x; i < 2 * TILE_Q * copies; i += THREADS) {
    const int pixel = i / copies, channel = i % copies * GRADIENT_COPY;
    const int row = pixel / TILE_Q, column = pixel % TILE_Q;
    const Tile begin = row == 0 ? tile : second_of(tile);
    const int p = begin.p, q = begin.q + column;
    const bool valid = p < shape.p && q < shape.q && first_channel + channel < shape.channels;
    copy_elements<GRADIENT_COPY>(
        reinterpret_cast<ELEMENT*>(target + (2 * column + row) * GRADIENT_PITCH) + channel,
        y + (valid ? (p * shape.q + q) * shape.channels + channel : 0), valid);
  }
#endif
}

// Makes words of pairs of rows. The second half is zero if there is no second row of pixels.
__device__ __forceinline__ void pair_rows(unsigned* target, const unsigned char* image,
                                          bool has_second) {
  constexpr int fours = PITCH / 4;
  const auto* from = reinterpret_cast<const uint2*>(image);
  const unsigned mask = has_second ? 0xffff0000u : 0u;
#pragma unroll 2
  for (int i = threadIdx.x; i < PLANES * KERNEL_H * fours; i += THREADS) {
    // A plane of the image has SECOND_ROW rows more, or there are other planes.
    const int at = IS_SIGNAL ? i : i + i / (KERNEL_H * fours) * SECOND_ROW * fours;
    const uint2 first = from[at], second = from[at + (IS_SIGNAL ? PLANES : SECOND_ROW) * fours];
    uint4 words;
    words.x = (first.x & 0xffffu) | ((second.x << 16) & mask);
    words.y = (first.x >> 16) | (second.x & mask);
    words.z = (first.y & 0xffffu) | ((second.y << 16) & mask);
    words.w = (first.y >> 16) | (second.y & mask);
    reinterpret_cast<uint4*>(target)[i] = words;
  }
}

__device__ __forceinline__ unsigned word_at(const unsigned char* place) {
  return *reinterpret_cast<const unsigned*>(place);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    few_channels_wgrad(const ELEMENT* __restrict__ x, const ELEMENT* __restrict__ y,
                       float* __restrict__ parts, int depth, int height, int width, int channels,
                       int z, int p, int q, int pad_d, int pad_h, int pad_w, int tiles_p,
                       int tiles_q, int tiles) {
  const Shape shape{depth, height, width, channels, z, p, q, pad_d, pad_h, pad_w, tiles_p, tiles_q};
  DYNAMIC_SHARED(shared);
  auto* const pairs = reinterpret_cast<unsigned*>(shared + 2 * COPIED_BYTES);
  const Share share = share_of_this_thread();
  const int lane = threadIdx.x % 32;
  const int first_channel = blockIdx.y * BLOCK_CHANNELS;

#if IS_PLANAR
  const long long count =
      static_cast<long long>(tiles / (tiles_p * tiles_q)) * channels * p * q;  // of gradients
  const unsigned apart = static_cast<unsigned>(IS_3D ? z : 1) * p * q;
#else
  const long long count = 0;
  // Row lane % 8 of matrix lane / 8: two matrices of channels, of each of two fours of columns.
  const int gradient_offset = (lane % 8 + lane / 16 * 8) * GRADIENT_PITCH + lane / 8 % 2 * 16;
#endif
  const unsigned* words[N_TILES];  // this lane's first ones
#pragma unroll
  for (int j = 0; j < N_TILES; ++j) words[j] = pairs + place_of(j, share);
  float sums[M_TILES][N_TILES][4] = {};

  const auto begin_tile = [&](int index, int buffer) {
    unsigned char* target = shared + buffer * COPIED_BYTES;
    const Tile tile = begin_of(index, shape);
    begin_gradients(target, y, tile, shape, first_channel, count);
    auto* const image = reinterpret_cast<ELEMENT*>(target + GRADIENT_BYTES);
    begin_copy<IS_SIGNAL ? 1 : IMAGE_ROWS, THREADS>(image, x, tile, shape);
    if (IS_SIGNAL) begin_copy<1, THREADS>(image + PLANES * PITCH, x, second_of(tile), shape);
    commit_copies();
  };
  begin_tile(blockIdx.x, 0);
  int buffer = 0;
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    copies_arrived<0>();
    __syncthreads();  // all have them, and are done with the other buffer and the pairs
    if (index + gridDim.x < tiles) begin_tile(index + gridDim.x, buffer ^ 1);
    const unsigned char* gradients = shared + buffer * COPIED_BYTES;
    const Tile tile = begin_of(index, shape), second = second_of(tile);
    pair_rows(pairs, gradients + GRADIENT_BYTES, second.p < p && second.q < q);
    __syncthreads();
    const int columns = min(TILE_Q, q - tile.q);
    const int second_columns = IS_SIGNAL ? q - second.q : columns;
#if IS_PLANAR
    // Where this lane's two pixels of both rows are, and in which half of a word.
    const unsigned first =
        static_cast<unsigned>(gradients_of(tile, shape, first_channel)) + share.g * apart;
    const int shift = IS_SHIFTED ? first & 7 : 0;
    const int second_shift = IS_SHIFTED && !IS_SIGNAL ? (first + q) & 7 : shift;
    const auto* const above = gradients + share.g * GRADIENT_PITCH + 4 * share.t + shift / 2 * 4;
    const auto* const below = gradients + share.g * GRADIENT_PITCH + 4 * share.t +
                              2 * GRADIENT_ROW + second_shift / 2 * 4;
    const int odd = HAS_ODD_ROWS ? shift % 2 : 0, second_odd = HAS_ODD_ROWS ? second_shift % 2 : 0;
    const unsigned halves = (odd ? 0x32 : 0x10) | (second_odd ? 0x7600 : 0x5400);
    const unsigned next_halves = (odd ? 0x10 : 0x32) | (second_odd ? 0x5400 : 0x7600);
#endif
#pragma unroll 1
    for (int column = 8 * share.warp_k; column < columns; column += 8 * WARPS_K) {
#if IS_RAGGED
      // The bits of pixels that there are.
      const bool is_last = column + 8 > min(columns, second_columns);
      unsigned masks[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int pixel = column + pixel_of(share) + APART * k;
        masks[k] = (pixel < columns ? 0xffffu : 0u) | (pixel < second_columns ? 0xffff0000u : 0u);
      }
#endif
      unsigned left[M_TILES][4];
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
#if IS_PLANAR
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int at = (16 * m + 8 * h) * GRADIENT_PITCH + 2 * column;
          const unsigned a = word_at(above + at), b = word_at(below + at);
          left[m][h] = __byte_perm(a, b, halves);
          left[m][2 + h] =
              __byte_perm(HAS_ODD_ROWS ? word_at(above + at + 4 * odd) : a,
                          HAS_ODD_ROWS ? word_at(below + at + 4 * second_odd) : b, next_halves);
#if IS_RAGGED
          if (is_last) left[m][h] &= masks[0], left[m][2 + h] &= masks[1];
#endif
        }
#else
        load_transposed(left[m],
                        gradients + gradient_offset + 2 * column * GRADIENT_PITCH + 32 * m);
#endif
      }
#pragma unroll
      for (int j = 0; j < N_TILES; ++j) {
        const unsigned* const word = words[j] + PIXEL_STEP * column;
        unsigned right[2] = {word[0], word[APART * PIXEL_STEP]};
#if IS_RAGGED
        if (is_last) right[0] &= masks[0], right[1] &= masks[1];
#endif
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) mma_16x8x16<ELEMENT>(sums[m][j], left[m], right);
      }
    }
    buffer ^= 1;
  }
  write_sums<1, 8>(reinterpret_cast<float*>(shared), parts, sums, share, channels, first_channel);
}
