// Transposes matrices: of each image of a tensor, (rows, columns) becomes (columns, rows). Both are
// dense, with the last index fastest. It moves bits and computes nothing.
//
// A block moves a tile through shared memory: some rows and columns of one image, or all of some
// images. In global memory it is segments: one a row in the source, unless rows are short and no
// whole vectors, and one a column in the target, unless the tile has whole columns. Else it is one
// segment. Segments may begin anywhere. A slot is a vector of 16 bytes, aligned, that has elements
// of a segment. At the ends of a segment only its own elements are moved, one by one.
//
// In shared memory a row begins as far from a multiple of 16 bytes as it does in the source, so
// that a slot is stored as a vector. A slot of the target is gathered, element by element. The next
// thread gathers kVector rows farther, or a column farther. Where rows are whole vectors, these
// would lie in the same banks, so 16 bytes are left out behind each kVector rows.
//
// DRAM bounds it: a slot costs some 150 instructions on both sides together, and an H100 can issue
// some 300 in the time of its bytes.

#if ELEMENT_BYTES == 2
using Element = unsigned short;
#else
using Element = unsigned;
#endif
constexpr int kVector = 16 / ELEMENT_BYTES;
constexpr int kNone = -1;

union Vector {
  Element elements[kVector];
  uint4 whole;
};

struct Tensor {
  Element* target;
  const Element* source;
  int images;
  Divisor rows, columns;                     // sizes of the source
  int tile_images, tile_rows, tile_columns;  // fewer in tiles at the ends
  Divisor tiles_down, tiles_across;
  Divisor source_slots, target_slots;  // per segment
  bool reads_rows, writes_columns;
  int pitch;  // elements between rows in shared memory
  int skew;   // bits of a row's number that are added to its place
};

struct Segments {
  long long begin;
  int pitch, count, length;
};

struct Slot {
  unsigned segment;
  int first;  // the element of the segment that the vector begins with
  long long place;

  __device__ __forceinline__ Slot(const Segments& segments, const Divisor& slots, unsigned slot) {
    unsigned vector = slot;
    segment = slots.split(vector);
    const long long start = segments.begin + static_cast<long long>(segment) * segments.pitch;
    first = static_cast<int>(vector) * kVector - (static_cast<int>(start) & (kVector - 1));
    place = start + first;
  }
  __device__ __forceinline__ int begin() const { return max(first, 0); }
  __device__ __forceinline__ int end(const Segments& segments) const {
    return min(first + kVector, segments.length);
  }
  __device__ __forceinline__ bool is_whole(const Segments& segments) const {
    return first >= 0 && first + kVector <= segments.length;
  }
};

__device__ __forceinline__ int shared_place(const Tensor& t, int row) {
  return row * t.pitch + (row & t.skew);
}

__device__ __forceinline__ void read_tile(const Tensor& t, const Segments& from, Element* shared) {
  const auto slots = static_cast<unsigned>(from.count * t.source_slots.value);
  for (unsigned begin = threadIdx.x; begin < slots; begin += THREADS * ITEMS) {
    uint4 values[ITEMS];
    int places[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      places[i] = kNone;
      if (begin + i * THREADS >= slots) continue;
      const Slot slot(from, t.source_slots, begin + i * THREADS);
      if (!slot.is_whole(from)) continue;
      values[i] = *reinterpret_cast<const uint4*>(t.source + slot.place);
      places[i] = shared_place(t, static_cast<int>(slot.segment)) + slot.first;
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (places[i] != kNone) *reinterpret_cast<uint4*>(shared + places[i]) = values[i];
    }
    if (t.columns.value % kVector == 0) continue;  // there is no other
#pragma unroll 1
    for (unsigned i = begin; i < min(slots, begin + ITEMS * THREADS); i += THREADS) {
      const Slot slot(from, t.source_slots, i);
      if (slot.is_whole(from)) continue;
      Element* const to = shared + shared_place(t, static_cast<int>(slot.segment));
      const Element* const elements = t.source + (slot.place - slot.first);
#pragma unroll 1
      for (int j = slot.begin(); j < slot.end(from); ++j) to[j] = elements[j];
    }
  }
}

// The place in shared memory of an element of a target's segment.
struct Place {
  int image_row, row, column;

  __device__ __forceinline__ Place(const Tensor& t, unsigned segment, int element)
      : image_row(0), row(element), column(static_cast<int>(segment)) {
    if (t.writes_columns) return;
    auto rest = static_cast<unsigned>(element);
    unsigned columns = t.rows.split(rest);
    row = static_cast<int>(rest);
    image_row = static_cast<int>(t.columns.split(columns)) * t.rows.value;
    column = static_cast<int>(columns);
  }
  __device__ __forceinline__ int shared(const Tensor& t) const {
    return shared_place(t, image_row + row) + column;
  }
  // Goes on to the next element.
  __device__ __forceinline__ void step(const Tensor& t) {
    ++row;
    const bool ends_column = row == t.rows.value;
    row = ends_column ? 0 : row;
    column += ends_column ? 1 : 0;
    const bool ends_image = column == t.columns.value;
    column = ends_image ? 0 : column;
    image_row += ends_image ? t.rows.value : 0;
  }
};

__device__ __forceinline__ void write_tile(const Tensor& t, const Segments& to,
                                           const Element* shared) {
  const auto slots = static_cast<unsigned>(to.count * t.target_slots.value);
  for (unsigned i = threadIdx.x; i < slots; i += THREADS) {
    const Slot slot(to, t.target_slots, i);
    if (slot.is_whole(to)) {
      Place place(t, slot.segment, slot.first);
      Vector vector;
      if (t.rows.value % kVector == 0) {  // it lies in one column, and is not divided by a skew
        const Element* const first = shared + place.shared(t);
#pragma unroll
        for (int j = 0; j < kVector; ++j) vector.elements[j] = first[j * t.pitch];
      } else {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          vector.elements[j] = shared[place.shared(t)];
          place.step(t);
        }
      }
      reinterpret_cast<uint4*>(t.target)[slot.place / kVector] = vector.whole;
    } else {
      Element* const elements = t.target + (slot.place - slot.first);
#pragma unroll 1
      for (int j = slot.begin(); j < slot.end(to); ++j) {
        elements[j] = shared[Place(t, slot.segment, j).shared(t)];
      }
    }
  }
}

__device__ __forceinline__ void transpose_tile(const Tensor& t, unsigned block) {
  unsigned across = block;
  unsigned down = t.tiles_across.split(across);
  const int image = static_cast<int>(t.tiles_down.split(down)) * t.tile_images;
  const int row = static_cast<int>(down) * t.tile_rows;
  const int column = static_cast<int>(across) * t.tile_columns;
  const int columns = min(t.tile_columns, t.columns.value - column);
  const int rows = min(t.tile_rows, t.rows.value - row);
  const int rows_of_images = min(t.tile_images, t.images - image) * rows;
  const long long begin = static_cast<long long>(image) * t.rows.value * t.columns.value;
  const Segments from{begin + static_cast<long long>(row) * t.columns.value + column,
                      t.columns.value, t.reads_rows ? rows_of_images : 1,
                      t.reads_rows ? columns : rows_of_images * columns};
  const Segments to{begin + static_cast<long long>(column) * t.rows.value + row, t.rows.value,
                    t.writes_columns ? columns : 1,
                    t.writes_columns ? rows : rows_of_images * columns};
  DYNAMIC_SHARED(memory);
  Element* const shared = reinterpret_cast<Element*>(memory) + (from.begin & (kVector - 1));
  read_tile(t, from, shared);
  __syncthreads();
  write_tile(t, to, shared);
}

// clang-format off
#define PARAMETERS(n)                                                                              \
  Element* __restrict__ target##n, const Element* __restrict__ source##n, int blocks##n,           \
  int images##n, DivisorArgument rows##n, DivisorArgument columns##n, int tile_images##n,          \
  int tile_rows##n, int tile_columns##n, DivisorArgument tiles_down##n,                            \
  DivisorArgument tiles_across##n, DivisorArgument source_slots##n,                                \
  DivisorArgument target_slots##n, int reads_rows##n, int writes_columns##n, int pitch##n,         \
  int skew##n
#define TENSOR(n)                                                                                  \
  Tensor {                                                                                         \
    target##n, source##n, images##n, Divisor(rows##n), Divisor(columns##n), tile_images##n,        \
    tile_rows##n, tile_columns##n, Divisor(tiles_down##n), Divisor(tiles_across##n),               \
    Divisor(source_slots##n), Divisor(target_slots##n), reads_rows##n != 0,                        \
    writes_columns##n != 0, pitch##n, skew##n                                                      \
  }
// clang-format on

// The tensors one after the other, each beginning with a block of its own.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    transpose(PARAMETERS(0) SECOND THIRD) {
  unsigned block = blockIdx.x;
#if TENSORS > 1
  if (block >= static_cast<unsigned>(blocks0)) {
    block -= blocks0;
#if TENSORS > 2
    if (block >= static_cast<unsigned>(blocks1)) return transpose_tile(TENSOR(2), block - blocks1);
#endif
    return transpose_tile(TENSOR(1), block);
  }
#endif
  transpose_tile(TENSOR(0), block);
}
