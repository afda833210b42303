// Tiles of images in shared memory, which the kernels of grouped convolutions read.

// One dimension of a tile of `tile` output elements, of a forward convolution or of the gradient of
// its input.
template <bool is_dgrad, int kernel, int stride, int pad, int tile>
struct Axis {
  // Output elements are `u * kOutStep + phase`, with u from the tile's first; tap j of a phase
  // reads element `u * kInStep + kFirst + offset(phase, j)` of the input.
  static constexpr int kPhases = is_dgrad ? stride : 1;
  static constexpr int kOutStep = is_dgrad ? stride : 1;
  static constexpr int kInStep = is_dgrad ? 1 : stride;

  __device__ static constexpr int filter_tap(int phase, int j) {
    return is_dgrad ? (phase + pad) % stride + stride * j : j;
  }
  __device__ static constexpr int taps(int phase) {
    return (kernel - filter_tap(phase, 0) + kOutStep - 1) / kOutStep;
  }
  __device__ static constexpr int distance(int phase, int j) {
    return is_dgrad ? (phase + pad) / stride - j : j - pad;
  }
  __device__ static constexpr int extreme(int sign) {
    int most = -(1 << 30);
    for (int phase = 0; phase < kPhases; ++phase) {
      for (int j = 0; j < taps(phase); ++j) {
        if (sign * distance(phase, j) > most) most = sign * distance(phase, j);
      }
    }
    return sign * most;
  }
  static constexpr int kFirst = extreme(-1);
  static constexpr int kExtent = (tile - 1) * kInStep + extreme(1) - kFirst + 1;
  __device__ static constexpr int offset(int phase, int j) { return distance(phase, j) - kFirst; }
};
constexpr int kThreads = 32 * WARPS;
constexpr int kInWidth = MERGE * GROUP_IN, kOutWidth = MERGE * GROUP_OUT;
constexpr int kInChunks = kInWidth / 8;
constexpr int kElementBytes = sizeof(ELEMENT), kChunkBytes = 8 * kElementBytes;
constexpr bool kIsTf32 = kElementBytes == 4;

// The sizes of a tensor.
struct Extents {
  int images, y, x, channels;
};

// The first output of a tile.
struct Place {
  int image, y, x;
};
__device__ __forceinline__ Place place_of(unsigned tile, unsigned tiles_y, unsigned tiles_x) {
  const unsigned row = tile / tiles_x, image = row / tiles_y;
  return Place{static_cast<int>(image) * TILE_IMAGES,
               static_cast<int>(row - image * tiles_y) * TILE_Y,
               static_cast<int>(tile - row * tiles_x) * TILE_X};
}

// A tile of a channels_last tensor in shared memory: images, rows, columns by their residue modulo
// the step (those that neighbouring outputs read are neighbours), `chunks` of 8 channels. A pixel
// takes an odd multiple of a chunk's bytes, so that one chunk of any 8 neighbours (4 in float32)
// lies in different banks.
template <typename Y, typename X, int images, int chunks>
struct Tile {
  static constexpr int kPitch = (chunks | 1) * kChunkBytes;
  static constexpr int kPlane = (X::kExtent + X::kInStep - 1) / X::kInStep;
  static constexpr int kRowPixels = X::kInStep * kPlane;
  static constexpr int kImagePixels = Y::kExtent * kRowPixels;
  static constexpr int kBytes = images * kImagePixels * kPitch;

  // Bytes to an element of the input, from where that of the output's first element lies.
  __device__ static constexpr int offset(int row, int column) {
    return (row * kRowPixels + column % X::kInStep * kPlane + column / X::kInStep) * kPitch;
  }
  // Bytes to the input of output (y, x) of an image of the tile.
  __device__ static constexpr int place(int image, int y, int x) {
    return (image * kImagePixels + y * Y::kInStep * kRowPixels + x) * kPitch;
  }

  // The threads that copy are kDown rows of kAcross; each copies kTurns rows of the same columns.
  // kAcross is such that the warps execute the fewest instructions, about.
  static constexpr int kVectors = chunks * (kChunkBytes / 16);  // 16 bytes each, per pixel
  static constexpr int kCopies = X::kExtent * kVectors, kRows = images * Y::kExtent;
  __device__ static constexpr int turns(int across) {
    return (kRows + kThreads / across - 1) / (kThreads / across);
  }
  __device__ static constexpr int instructions(int across) {
    const int warps = (kThreads / across * across + 31) / 32;
    return warps * ((kCopies + across - 1) / across) * (25 + 6 * turns(across));
  }
  __device__ static constexpr int best_across() {
    int best = kCopies < kThreads ? kCopies : kThreads;
    for (int across = best - 1; across >= 8; --across) {
      if (instructions(across) < instructions(best)) best = across;
    }
    return best;
  }
  static constexpr int kAcross = best_across();
  static constexpr int kDown = kThreads / kAcross, kTurns = turns(kAcross);
  static constexpr int kUnrolled = kTurns <= 16 ? kTurns : 8;

  // Copies the tile; what lies outside of the images is zero. `tensor` begins at the first channel,
  // `place` is that of the output.
  __device__ __forceinline__ static void stage(unsigned char* tile, const ELEMENT* tensor,
                                               const Extents& extents, const Place& place) {
    const int first_y = place.y * Y::kInStep + Y::kFirst;
    const int first_x = place.x * X::kInStep + X::kFirst;
    const int first_row = threadIdx.x / kAcross;
    if (kThreads % kAcross != 0 && first_row >= kDown) return;
    const long long row_elements = static_cast<long long>(extents.x) * extents.channels;
    tensor += place.image * row_elements * extents.y;
#pragma unroll 1
    for (int i = threadIdx.x % kAcross; i < kCopies; i += kAcross) {
      const int column = i / kVectors, vector = i % kVectors, x = first_x + column;
      const bool is_inside = static_cast<unsigned>(x) < static_cast<unsigned>(extents.x);
      const ELEMENT* from = tensor + (x * extents.channels + vector * (16 / kElementBytes));
      if (images == 1) from += (first_y + first_row) * row_elements;
      unsigned char* const to =
          tile + offset(0, column) + first_row * (kRowPixels * kPitch) + vector * 16;
#pragma unroll kUnrolled
      for (int turn = 0; turn < kTurns; ++turn) {
        const int row = first_row + turn * kDown;
        if (kRows % kDown != 0 && row >= kRows) break;
        const int image = images == 1 ? 0 : row / Y::kExtent;
        const int y = first_y + row - image * Y::kExtent;
        const bool exists = is_inside &&
                            static_cast<unsigned>(y) < static_cast<unsigned>(extents.y) &&
                            (images == 1 || place.image + image < extents.images);
        // Several images are small ones: see tiles_of() in grouped_layer.py.
        const int skipped =
            images == 1 ? 0 : (image * extents.y + y) * static_cast<int>(row_elements);
        copy_async<16>(to + turn * (kDown * kRowPixels * kPitch), from + skipped, exists);
        if (images == 1) from += kDown * row_elements;
      }
    }
  }
};
