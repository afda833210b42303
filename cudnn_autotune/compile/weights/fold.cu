// Folds batch norms into the weights and biases of several convolutions, and lays the weights out:
//
//   folded weight = weight * s,  s = scale / sqrt(variance + eps) for each output channel
//   folded bias = (bias - mean) * s + shift
//
// It computes in float32 and rounds once. A vector that is not given has no part in it.
//
// A weight is contiguous, (rows, channels, window), or in channels_last, (rows, window, channels);
// the last index is the fastest, and a row is an output channel. It keeps its order, or gets the
// other one. One that keeps it is (rows, length of a row, 1), or a single row if nothing is folded.
//
// DRAM bounds it. A block works on a tile of one weight: some whole rows, or some channels of one
// row, or a part of their window. Its reads are all in flight before the first one is used. Where
// the order changes, the tile goes through shared memory, so that neighbouring threads read and
// write neighbouring numbers, 8 or 16 bytes each where the addresses allow that.

constexpr int kNumbersOfThread = 16;
constexpr int kNumbersOfTile = THREADS * kNumbersOfThread;
constexpr int kVectors = 5;  // those of an output channel
enum Vector { kScale, kVariance, kMean, kBias, kShift };
enum Order { kKept, kToChannelsLast, kToContiguous };

// csrc/weights/fold_table.h has the same.
struct Item {
  const void* weight;
  void* folded_weight;
  int rows, channels, window;
  int channel_parts, window_parts;  // how many tiles are beside each other
  int first_block;
  unsigned short tile_rows, tile_channels, tile_window;
  unsigned char order;
  unsigned char folded;  // the place of what is folded, from the table's end; 0: nothing is
};
struct Folded {
  const void* vectors[kVectors];  // null: not given
  void* bias;                     // null: there is none
  float eps;
  int kinds;  // two bits for each vector, the first one lowest: 0 float, 1 half, 2 bfloat16
};
constexpr int kMostItems = 84;
constexpr int kMostFolded = 72;
constexpr int kHints = 60;
struct Table {
  union {
    Item items[kMostItems];      // from the front
    Folded folded[kMostFolded];  // from the back
  };
  unsigned char first_items[kHints];  // the item of each 2^shift-th block
  short count, shift;
};

// Divides numbers of a tile. The inverse is never too small, and too large by two millionths at
// most, so that quotients of numbers below 5000 by such numbers are exact.
struct Divisor {
  unsigned inverse;
  __device__ __forceinline__ explicit Divisor(int divisor)
      : inverse(static_cast<unsigned>(__fdividef(2147485952.0f, static_cast<float>(divisor))) + 1) {
  }
  __device__ __forceinline__ int quotient(int number) const {
    const unsigned long long product = static_cast<unsigned>(number);
    return static_cast<int>(product * inverse >> 31);
  }
};
static_assert(kNumbersOfTile < 5000, "what is divided exactly");

// Of a number that is not negative, which a compiler need not know.
__device__ __forceinline__ int eighth(int number) { return static_cast<unsigned>(number) / 8; }

// The part of a weight that a block works on.
struct Tile {
  const Table& table;
  Item item;
  int first_row, rows, first_channel, channels, first_place, places;
  Divisor by_channels, by_places;
  int size;        // numbers
  float* scales;   // of the rows, in shared memory
  float* numbers;  // contiguous in shared memory; a word more is behind each 8 channels

  __device__ __forceinline__ bool is_folded() const { return item.folded != 0; }
  __device__ __forceinline__ const Folded& folded() const {
    return table.folded[kMostFolded - item.folded];
  }
  __device__ __forceinline__ float scale(int row) const { return is_folded() ? scales[row] : 1.0f; }
};

// How many numbers a thread moves at once: 16 bytes in channels_last, 4 numbers of a contiguous
// tile, and of one that keeps its order 16 bytes of the wider type.
template <typename T>
constexpr int kOnceInChannelsLast = 16 / sizeof(T);
constexpr int kOnceContiguous = 4;
constexpr int kOnceKept = 16 / (sizeof(WEIGHT) > sizeof(FOLDED) ? sizeof(WEIGHT) : sizeof(FOLDED));

// Orders of a tile's numbers in memory, which neighbouring threads move. Each tells where the tile
// begins in the weight, and where a number is in the weight from there, and in the tile.

struct Kept {
  const Tile& tile;
  __device__ __forceinline__ int begin() const { return tile.first_channel; }
  __device__ __forceinline__ int in_weight(int number) const { return number; }
  __device__ __forceinline__ float scale(int number) const {
    return tile.scale(tile.by_channels.quotient(number));
  }
};

template <bool has_whole_windows>
struct Contiguous {
  const Tile& tile;
  __device__ __forceinline__ int begin() const {
    return tile.first_channel * tile.item.window + tile.first_place;
  }
  __device__ __forceinline__ int in_weight(int number) const {
    if (has_whole_windows) return number;
    return number + tile.by_places.quotient(number) * (tile.item.window - tile.places);
  }
  __device__ __forceinline__ int in_tile(int number) const {
    return number + eighth(tile.by_places.quotient(number));
  }
  // The numbers are scaled in the other order.
  __device__ __forceinline__ float scale(int) const { return 1.0f; }
  // A thread's neighbouring numbers are as many words. Each 8 lanes begin with another one of them,
  // else 4 lanes of a warp would meet in a bank.
  __device__ __forceinline__ int distance(int i) const {
    return (i + first_word()) % kOnceContiguous;
  }
  __device__ __forceinline__ void before_filling(float (&values)[kOnceContiguous]) const {
    rotate(values, first_word());
  }
  __device__ __forceinline__ void after_taking(float (&values)[kOnceContiguous]) const {
    rotate(values, kOnceContiguous - first_word());
  }

 private:
  __device__ __forceinline__ static int first_word() { return threadIdx.x / 8 % kOnceContiguous; }
  // Moves the value `by` to the front.
  __device__ __forceinline__ static void rotate(float (&values)[kOnceContiguous], int by) {
#pragma unroll
    for (int bit = 1; bit < kOnceContiguous; bit *= 2) {
      float rotated[kOnceContiguous];
#pragma unroll
      for (int i = 0; i < kOnceContiguous; ++i) rotated[i] = values[(i + bit) % kOnceContiguous];
#pragma unroll
      for (int i = 0; i < kOnceContiguous; ++i) values[i] = by & bit ? rotated[i] : values[i];
    }
  }
};

struct ChannelsLast {
  const Tile& tile;
  __device__ __forceinline__ int begin() const {
    return tile.first_place * tile.item.channels + tile.first_channel;
  }
  __device__ __forceinline__ int in_weight(int number) const {
    return number + tile.by_channels.quotient(number) * (tile.item.channels - tile.channels);
  }
  __device__ __forceinline__ int in_tile(int number) const {
    const int line = tile.by_channels.quotient(number), row = tile.by_places.quotient(line);
    const int channel = number + (row - line) * tile.channels;  // counted in all rows
    return channel * tile.places + line - row * tile.places + eighth(channel);
  }
  __device__ __forceinline__ float scale(int number) const {
    return tile.scale(tile.by_places.quotient(tile.by_channels.quotient(number)));
  }
  // A thread's neighbouring numbers are channels. With the word behind each 8 channels the distance
  // of neighbouring threads is odd, so that they meet in no bank.
  __device__ __forceinline__ int distance(int i) const { return i * tile.places; }
  template <int count>
  __device__ __forceinline__ void before_filling(float (&)[count]) const {}
  template <int count>
  __device__ __forceinline__ void after_taking(float (&)[count]) const {}
};

template <typename T, typename Layout>
__device__ __forceinline__ T* begin_of(T* weight, const Layout& layout) {
  const Item& item = layout.tile.item;
  const long long rows = static_cast<long long>(layout.tile.first_row);
  return weight + rows * (item.channels * item.window) + layout.begin();
}
template <typename Layout>
__device__ __forceinline__ const WEIGHT* source_of(const Layout& layout) {
  return begin_of(static_cast<const WEIGHT*>(layout.tile.item.weight), layout);
}
template <typename Layout>
__device__ __forceinline__ FOLDED* target_of(const Layout& layout) {
  return begin_of(static_cast<FOLDED*>(layout.tile.item.folded_weight), layout);
}

__device__ __forceinline__ float number(const Folded& folded, Vector vector, int row) {
  const void* const values = folded.vectors[vector];
  switch ((folded.kinds >> (2 * vector)) & 3) {
    case 0:
      return static_cast<const float*>(values)[row];
    case 1:
      return to_float(static_cast<const half*>(values)[row]);
    default:
      return to_float(static_cast<const bfloat16*>(values)[row]);
  }
}
__device__ __forceinline__ float number_or(const Folded& folded, Vector vector, int row,
                                           float other) {
  return folded.vectors[vector] == nullptr ? other : number(folded, vector, row);
}

// Writes the scales of the rows, for all threads of the block, and the biases.
__device__ __forceinline__ void fold_rows(const Tile& tile) {
  const Folded& folded = tile.folded();
  if (static_cast<int>(threadIdx.x) < tile.rows) {  // no tile has more rows than threads
    const int row = tile.first_row + static_cast<int>(threadIdx.x);
    float scale = number_or(folded, kScale, row, 1.0f);
    if (folded.vectors[kVariance] != nullptr) {
      scale = scale / sqrtf(number(folded, kVariance, row) + folded.eps);
    }
    tile.scales[threadIdx.x] = scale;
    if (folded.bias != nullptr && tile.first_channel == 0 && tile.first_place == 0) {
      const float centred =
          number_or(folded, kBias, row, 0.0f) - number_or(folded, kMean, row, 0.0f);
      const float bias = centred * scale + number_or(folded, kShift, row, 0.0f);
      static_cast<FOLDED*>(folded.bias)[row] = from_float<FOLDED>(bias);
    }
  }
  __syncthreads();
}

// Neighbouring numbers that a thread moves at once.
template <typename T, int count>
struct alignas(count * sizeof(T)) Numbers {
  static_assert(count * sizeof(T) <= 16, "what an instruction moves");
  unsigned words[count * sizeof(T) / 4];

  __device__ __forceinline__ void get(float (&values)[count]) const {
#pragma unroll
    for (int i = 0; i < count; i += 2) {
      if constexpr (sizeof(T) == 4) {
        values[i] = __uint_as_float(words[i]);
        values[i + 1] = __uint_as_float(words[i + 1]);
      } else {
        const float2 two = unpack<T>(words[i / 2]);
        values[i] = two.x;
        values[i + 1] = two.y;
      }
    }
  }
  __device__ __forceinline__ static Numbers of(const float (&values)[count]) {
    Numbers made;
#pragma unroll
    for (int i = 0; i < count; i += 2) {
      if constexpr (sizeof(T) == 4) {
        made.words[i] = __float_as_uint(values[i]);
        made.words[i + 1] = __float_as_uint(values[i + 1]);
      } else {
        made.words[i / 2] = pack<T>(values[i], values[i + 1]);
      }
    }
    return made;
  }
};
template <int count, typename T>
__device__ __forceinline__ bool are_aligned(const T* numbers) {
  return reinterpret_cast<unsigned long long>(numbers) % (count * sizeof(T)) == 0;
}
template <int count, typename T>
__device__ __forceinline__ void store(T* numbers, const float (&values)[count]) {
  *reinterpret_cast<Numbers<T, count>*>(numbers) = Numbers<T, count>::of(values);
}

// The first number that this thread moves in a step of `count`.
template <int count>
__device__ __forceinline__ int first_number(int step) {
  return (step * THREADS + static_cast<int>(threadIdx.x)) * count;
}

// The numbers of this thread that are on their way from memory.
struct Read {
  unsigned words[kNumbersOfThread * sizeof(WEIGHT) / 4];

  template <int count, typename Layout>
  __device__ __forceinline__ void start(const Layout& layout) {
    const WEIGHT* const source = source_of(layout);
#pragma unroll
    for (int step = 0; step < kNumbersOfThread / count; ++step) {
      const int first = first_number<count>(step);
      if (first + count > layout.tile.size) break;
      const auto read =
          *reinterpret_cast<const Numbers<WEIGHT, count>*>(source + layout.in_weight(first));
#pragma unroll
      for (int i = 0; i < kWords<count>; ++i) words[step * kWords<count> + i] = read.words[i];
    }
  }
  template <int count>
  __device__ __forceinline__ void get(int step, float (&values)[count]) const {
    Numbers<WEIGHT, count> read;
#pragma unroll
    for (int i = 0; i < kWords<count>; ++i) read.words[i] = words[step * kWords<count> + i];
    read.get(values);
  }

 private:
  template <int count>
  static constexpr int kWords = count * sizeof(WEIGHT) / 4;
};

// Fills the tile in shared memory.
template <int count, typename Layout>
__device__ __forceinline__ void fill(const Layout& layout, const Read& read) {
#pragma unroll
  for (int step = 0; step < kNumbersOfThread / count; ++step) {
    const int first = first_number<count>(step);
    if (first >= layout.tile.size) break;
    const float scale = layout.scale(first);
    float values[count];
    read.get(step, values);
    layout.before_filling(values);
    float* const to = layout.tile.numbers + layout.in_tile(first);
#pragma unroll
    for (int i = 0; i < count; ++i) to[layout.distance(i)] = values[i] * scale;
  }
}
template <typename Layout>
__device__ __forceinline__ void fill_one_by_one(const Layout& layout) {
  const WEIGHT* const source = source_of(layout);
#pragma unroll 4
  for (int i = threadIdx.x; i < layout.tile.size; i += THREADS) {
    layout.tile.numbers[layout.in_tile(i)] =
        to_float(source[layout.in_weight(i)]) * layout.scale(i);
  }
}

// Writes the tile in shared memory to the folded weight.
template <int count, typename Layout>
__device__ __forceinline__ void write(const Layout& layout) {
  FOLDED* const target = target_of(layout);
#pragma unroll
  for (int step = 0; step < kNumbersOfThread / count; ++step) {
    const int first = first_number<count>(step);
    if (first >= layout.tile.size) break;
    const float scale = layout.scale(first);
    const float* const from = layout.tile.numbers + layout.in_tile(first);
    float values[count];
#pragma unroll
    for (int i = 0; i < count; ++i) values[i] = from[layout.distance(i)] * scale;
    layout.after_taking(values);
    store(target + layout.in_weight(first), values);
  }
}
template <typename Layout>
__device__ __forceinline__ void write_one_by_one(const Layout& layout) {
  FOLDED* const target = target_of(layout);
#pragma unroll 4
  for (int i = threadIdx.x; i < layout.tile.size; i += THREADS) {
    target[layout.in_weight(i)] =
        from_float<FOLDED>(layout.tile.numbers[layout.in_tile(i)] * layout.scale(i));
  }
}

// Writes a tile that keeps its order.
__device__ __forceinline__ void write_kept(const Kept& layout, const Read& read) {
  FOLDED* const target = target_of(layout);
#pragma unroll
  for (int step = 0; step < kNumbersOfThread / kOnceKept; ++step) {
    const int first = first_number<kOnceKept>(step);
    if (first + kOnceKept > layout.tile.size) break;
    const float scale = layout.scale(first);
    float values[kOnceKept];
    read.get(step, values);
#pragma unroll
    for (int i = 0; i < kOnceKept; ++i) values[i] *= scale;
    store(target + first, values);
  }
}
// The same for the numbers from a first one on.
__device__ __forceinline__ void keep_one_by_one(const Kept& layout, int first) {
  const WEIGHT* const source = source_of(layout);
  FOLDED* const target = target_of(layout);
#pragma unroll 4
  for (int i = first + static_cast<int>(threadIdx.x); i < layout.tile.size; i += THREADS) {
    target[i] = from_float<FOLDED>(to_float(source[i]) * layout.scale(i));
  }
}

// Whether threads move more than one number at once of a tile that is contiguous in memory, or in
// channels_last, or keeps its order.
template <typename T>
__device__ __forceinline__ bool can_move_contiguous(const Tile& tile, const T* begin) {
  return tile.places == tile.item.window && tile.size % kOnceContiguous == 0 &&
         are_aligned<kOnceContiguous>(begin);
}
template <typename T>
__device__ __forceinline__ bool can_move_channels_last(const Tile& tile, const T* begin) {
  return tile.item.channels % kOnceInChannelsLast<T> == 0 &&
         are_aligned<kOnceInChannelsLast<T>>(begin);
}
__device__ __forceinline__ bool can_keep(const Kept& kept) {
  return (!kept.tile.is_folded() || kept.tile.item.channels % kOnceKept == 0) &&
         are_aligned<kOnceKept>(source_of(kept)) && are_aligned<kOnceKept>(target_of(kept));
}

__device__ __forceinline__ int item_of_block(const Table& table) {
  const int block = blockIdx.x;
  int place = table.first_items[block >> table.shift];
  while (place + 1 < table.count && block >= table.items[place + 1].first_block) ++place;
  return place;
}

__device__ __forceinline__ Tile tile_of_block(const Table& table, float* memory) {
  const Item item = table.items[item_of_block(table)];
  const int tile_rows = item.tile_rows, tile_channels = item.tile_channels;
  const int tile_window = item.tile_window;
  const unsigned part = blockIdx.x - item.first_block;
  const unsigned parts_of_row = item.channel_parts * item.window_parts;
  const unsigned row_part = part / parts_of_row;
  unsigned channel_part = part - row_part * parts_of_row, window_part = 0;
  if (item.window_parts > 1) {
    window_part = channel_part % item.window_parts;
    channel_part /= item.window_parts;
  }
  const int first_place = static_cast<int>(window_part) * tile_window;
  const int first_channel = static_cast<int>(channel_part) * tile_channels;
  const int first_row = static_cast<int>(row_part) * tile_rows;
  const int rows = min(tile_rows, item.rows - first_row);
  const int channels = min(tile_channels, item.channels - first_channel);
  const int places = min(tile_window, item.window - first_place);
  return {table,
          item,
          first_row,
          rows,
          first_channel,
          channels,
          first_place,
          places,
          Divisor(channels),
          Divisor(places),
          rows * channels * places,
          memory,
          memory + THREADS};
}

extern "C" __global__ void __launch_bounds__(THREADS) fold_weights(const Table table) {
  DYNAMIC_SHARED(memory);
  const Tile tile = tile_of_block(table, reinterpret_cast<float*>(memory));
  const Kept kept{tile};
  const Contiguous<false> contiguous{tile};
  const Contiguous<true> whole{tile};
  const ChannelsLast channels_last{tile};
  constexpr int kOnceRead = kOnceInChannelsLast<WEIGHT>, kOnceWritten = kOnceInChannelsLast<FOLDED>;
  Read read;
  bool has_started = false;
  switch (tile.item.order) {
    case kKept:
      has_started = can_keep(kept);
      if (has_started) read.start<kOnceKept>(kept);
      break;
    case kToChannelsLast:
      has_started = can_move_contiguous(tile, source_of(contiguous));
      if (has_started) read.start<kOnceContiguous>(whole);
      break;
    case kToContiguous:
      has_started = can_move_channels_last(tile, source_of(channels_last));
      if (has_started) read.start<kOnceRead>(channels_last);
      break;
  }
  if (tile.is_folded()) fold_rows(tile);
  switch (tile.item.order) {
    case kKept:
      if (has_started) write_kept(kept, read);
      keep_one_by_one(kept, has_started ? tile.size / kOnceKept * kOnceKept : 0);
      break;
    case kToChannelsLast:
      if (has_started) {
        fill<kOnceContiguous>(whole, read);
      } else {
        fill_one_by_one(contiguous);
      }
      __syncthreads();
      if (can_move_channels_last(tile, target_of(channels_last))) {
        write<kOnceWritten>(channels_last);
      } else {
        write_one_by_one(channels_last);
      }
      break;
    case kToContiguous:
      if (has_started) {
        fill<kOnceRead>(channels_last, read);
      } else {
        fill_one_by_one(channels_last);
      }
      __syncthreads();
      if (can_move_contiguous(tile, target_of(contiguous))) {
        write<kOnceContiguous>(whole);
      } else {
        write_one_by_one(contiguous);
      }
      break;
  }
}
