// Rows of an image in shared memory. All taps and channels of a row of a window lie together there,
// as they do in the image: channels are not padded. A channels_last image is one plane of pixels of
// CHANNELS elements, a contiguous one a plane of single elements for each channel.
//
// The image of a tile of a 3-d output is the part of the input that one of its depths needs: planes
// of KERNEL_D depths, for each channel if contiguous.

constexpr int ROW = KERNEL_W * CHANNELS;         // elements of a row of a window
constexpr int PIXEL_STEP = STRIDE_W * CHANNELS;  // elements between output pixels

struct Shape {
  int depth, height, width;  // sizes of the input
  int channels, z, p, q;     // sizes of the output
  int pad_d, pad_h, pad_w;
  int tiles_p, tiles_q;
};

struct Tile {
  int image, p, q;  // the place of its first output pixel; images of a sample are its depths

  // The sample, and the depth of the output.
  __device__ __forceinline__ int sample(const Shape& shape) const {
    return IS_3D ? image / shape.z : image;
  }
  __device__ __forceinline__ int depth(const Shape& shape) const {
    return IS_3D ? image % shape.z : 0;
  }
};

__device__ __forceinline__ Tile tile_at(int index, const Shape& shape) {
  const int row = index / shape.tiles_q;
  const int image = row / shape.tiles_p;
  return {image, (row - image * shape.tiles_p) * TILE_P, (index - row * shape.tiles_q) * TILE_Q};
}

// Begins to copy neighbouring elements to shared memory; zeros if not `valid`.
template <int elements>
__device__ __forceinline__ void copy_elements(ELEMENT* to, const ELEMENT* from, bool valid) {
  if constexpr (sizeof(ELEMENT) * elements < 4) {
    *to = valid ? *from : ELEMENT{0};
  } else {
    copy_async<sizeof(ELEMENT) * elements>(to, from, valid);
  }
}

// Begins to copy the rows that a tile's windows need, `rows` of each plane, zeros outside of the
// image: PITCH elements of each, of which the first window has those from LEFT on. COPY elements at
// a multiple of COPY are either inside of a row or outside.
template <int rows, int threads>
__device__ __forceinline__ void begin_copy(ELEMENT* target, const ELEMENT* __restrict__ x,
                                           const Tile& tile, const Shape& shape) {
  constexpr int copies = PITCH / COPY;
  const int row_elements = shape.width * CHANNELS;
  const int first = CHANNELS * (STRIDE_W * tile.q - shape.pad_w) - LEFT;  // a multiple of 8
  const int top = STRIDE_H * tile.p - shape.pad_h;
  const int front = IS_3D ? STRIDE_D * tile.depth(shape) - shape.pad_d : 0;
  const int depths = IS_3D ? shape.depth : 1;
  const int plane_elements = shape.height * row_elements;
  x += static_cast<long long>(tile.sample(shape)) * (PLANES / KERNEL_D) * depths * plane_elements;
  for (int i = threadIdx.x; i < rows * copies; i += threads) {
    const int row = i / copies;
    const int element = first + (i - row * copies) * COPY;
    const int h = top + row;
    const bool is_inside = h >= 0 && h < shape.height && element >= 0 && element < row_elements;
    const ELEMENT* const from = x + (is_inside ? h * row_elements + element : 0);
    // What only depends on the plane is the same for all threads.
#pragma unroll(PLANES <= 8 ? PLANES : 4)
    for (int plane = 0; plane < PLANES; ++plane) {
      const int channel = plane / KERNEL_D, d = front + plane - channel * KERNEL_D;
      const bool is_there = !IS_3D || (d >= 0 && d < depths);
      const int at = is_there ? (channel * depths + d) * plane_elements : 0;
      copy_elements<COPY>(target + plane * rows * PITCH + i * COPY, from + at,
                          is_inside && is_there);
    }
  }
}
