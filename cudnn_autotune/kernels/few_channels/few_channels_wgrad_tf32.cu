// The gradient of the weight for images or volumes with few channels, in TF32 on tensor cores, as
// few_channels_wgrad.cu computes it for half types. An mma takes 8 neighbouring pixels of a row,
// one in each register, so that the image's rows are read as they are: element n of the window of
// pixel q is number PIXEL_STEP * q + n of its row. A tile is one row of TILE_Q pixels.
//
// Rows r and r + 8 of the left matrix are channels 2 r and 2 r + 1, which one access reads. If
// planes are contiguous (IS_PLANAR), they are channels r and r + 8.
//
// Banks: a pixel's gradients are 8 or 24 words more than a multiple of 32, so that the 4 pixels and
// 4 pairs of channels of a half warp lie in different ones, and a plane's row 4 words more. The
// image is read as by few_channels_wgrad.cu.

constexpr int IMAGE_BYTES = PLANES * KERNEL_H * PITCH * 4;
constexpr int GRADIENT_PITCH = IS_PLANAR ? TILE_Q + 4 : BLOCK_CHANNELS + 8;
constexpr int GRADIENT_BYTES = (IS_PLANAR ? BLOCK_CHANNELS : TILE_Q) * GRADIENT_PITCH * 4;
constexpr int COPIED_BYTES = GRADIENT_BYTES + IMAGE_BYTES;

static_assert(TILE_P == 1, "");
static_assert(SHARED_BYTES >= 2 * COPIED_BYTES, "copies");

// Begins to copy the gradients of a tile's pixels; zeros outside of the output and behind the last
// channel.
__device__ __forceinline__ void begin_gradients(float* target, const float* __restrict__ y,
                                                const Tile& tile, const Shape& shape,
                                                int first_channel) {
#if IS_PLANAR
  constexpr int copies = TILE_Q / GRADIENT_COPY;
  const int apart = (IS_3D ? shape.z : 1) * shape.p * shape.q;
  y += static_cast<long long>(tile.sample(shape) * shape.channels + first_channel) * apart +
       (tile.depth(shape) * shape.p + tile.p) * shape.q + tile.q;
#pragma unroll 2
  for (int i = threadIdx.x; i < BLOCK_CHANNELS * copies; i += THREADS) {
    const int channel = i / copies, column = i % copies * GRADIENT_COPY;
    const bool valid = tile.q + column < shape.q && first_channel + channel < shape.channels;
    copy_elements<GRADIENT_COPY>(target + channel * GRADIENT_PITCH + column,
                                 y + (valid ? channel * apart + column : 0), valid);
  }
#else
  constexpr int copies = BLOCK_CHANNELS / GRADIENT_COPY;
  y += (static_cast<long long>(tile.image) * shape.p + tile.p) * shape.q * shape.channels +
       first_channel;
#pragma unroll 2
  for (int i = threadIdx.x; i < TILE_Q * copies; i += THREADS) {
    const int column = i / copies, channel = i % copies * GRADIENT_COPY;
    const int q = tile.q + column;
    const bool valid = q < shape.q && first_channel + channel < shape.channels;
    copy_elements<GRADIENT_COPY>(target + column * GRADIENT_PITCH + channel,
                                 y + (valid ? q * shape.channels + channel : 0), valid);
  }
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    few_channels_wgrad(const float* __restrict__ x, const float* __restrict__ y,
                       float* __restrict__ parts, int depth, int height, int width, int channels,
                       int z, int p, int q, int pad_d, int pad_h, int pad_w, int tiles_p,
                       int tiles_q, int tiles) {
  const Shape shape{depth, height, width, channels, z, p, q, pad_d, pad_h, pad_w, tiles_p, tiles_q};
  DYNAMIC_SHARED(shared);
  const Share share = share_of_this_thread();
  const int first_channel = blockIdx.y * BLOCK_CHANNELS;
  int places[N_TILES];
#pragma unroll
  for (int j = 0; j < N_TILES; ++j) places[j] = place_of(j, share);
  float sums[M_TILES][N_TILES][4] = {};

  const auto begin_tile = [&](int index, int buffer) {
    unsigned char* target = shared + buffer * COPIED_BYTES;
    const Tile tile = tile_at(index, shape);
    begin_gradients(reinterpret_cast<float*>(target), y, tile, shape, first_channel);
    begin_copy<KERNEL_H, THREADS>(reinterpret_cast<float*>(target + GRADIENT_BYTES), x, tile,
                                  shape);
    commit_copies();
  };
  begin_tile(blockIdx.x, 0);
  int buffer = 0;
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    copies_arrived<0>();
    __syncthreads();  // all have them, and are done with the other buffer
    if (index + gridDim.x < tiles) begin_tile(index + gridDim.x, buffer ^ 1);
    const unsigned char* copied = shared + buffer * COPIED_BYTES;
    const float* gradients =
        reinterpret_cast<const float*>(copied) +
        (IS_PLANAR ? share.g * GRADIENT_PITCH + share.t : share.t * GRADIENT_PITCH + 2 * share.g);
    const float* image = reinterpret_cast<const float*>(copied + GRADIENT_BYTES);
    const int columns = min(TILE_Q, q - tile_at(index, shape).q);
#pragma unroll 1
    for (int column = 8 * share.warp_k; column < columns; column += 8 * WARPS_K) {
      unsigned left[M_TILES][4];
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
#if IS_PLANAR
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          left[m][k] =
              to_tf32(gradients[(16 * m + k % 2 * 8) * GRADIENT_PITCH + column + k / 2 * 4]);
        }
#else
        const float* const at = gradients + column * GRADIENT_PITCH + 16 * m;
        const float2 here = load_two_numbers(at);
        const float2 behind = load_two_numbers(at + 4 * GRADIENT_PITCH);
        left[m][0] = to_tf32(here.x), left[m][1] = to_tf32(here.y);
        left[m][2] = to_tf32(behind.x), left[m][3] = to_tf32(behind.y);
#endif
      }
#pragma unroll
      for (int j = 0; j < N_TILES; ++j) {
        const float* const at = image + places[j] + PIXEL_STEP * column;
        unsigned right[2] = {to_tf32(at[0]), to_tf32(at[4 * PIXEL_STEP])};
#if IS_RAGGED
        if (column + share.t >= columns) right[0] = 0u;
        if (column + share.t + 4 >= columns) right[1] = 0u;
#endif
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) mma_16x8x8_tf32(sums[m][j], left[m], right);
      }
    }
    buffer ^= 1;
  }
  write_sums<IS_PLANAR ? 1 : 2, IS_PLANAR ? 8 : 1>(reinterpret_cast<float*>(shared), parts, sums,
                                                   share, channels, first_channel);
}
