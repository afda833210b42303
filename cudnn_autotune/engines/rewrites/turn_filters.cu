// Filters turned around, with the input and the output channels of each group swapped: with them a
// forward convolution of stride 1 is the gradient of an input, and the other way round. And the
// bias, which no gradient has.
//
// turn_filters moves bits. The source has `rows` output channels of `columns` input channels in
// each group, the target `columns` of `rows`. Tap t becomes tap taps - 1 - t. Where channels are
// the fastest index, a block transposes a tile of rows and columns of one tap through shared
// memory, so that both sides move whole lines; else the taps of a filter are segments on both
// sides, and a thread moves one element.

#if ELEMENT_BYTES == 2
using Bits = unsigned short;
#else
using Bits = unsigned;
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    turn_filters(Bits* __restrict__ target, const Bits* __restrict__ source, int count,
                 DivisorArgument rows_, DivisorArgument columns_, DivisorArgument taps_,
                 DivisorArgument tiles_) {
  const Divisor rows(rows_), columns(columns_), taps(taps_);
#if CHANNELS_LAST
  constexpr int kTile = 32;  // rows and columns; a row is one element longer in shared memory
  const Divisor tiles(tiles_);
  DYNAMIC_SHARED(memory);
  Bits* const tile = reinterpret_cast<Bits*>(memory);
  const int tiles_across = (columns.value + kTile - 1) / kTile;
  unsigned of_tap = blockIdx.x;
  unsigned tap = tiles.split(of_tap);
  const unsigned group = taps.split(tap);
  const int row = static_cast<int>(of_tap) / tiles_across * kTile;
  const int column = static_cast<int>(of_tap) % tiles_across * kTile;
  const int lane = static_cast<int>(threadIdx.x) % kTile;
  for (int i = static_cast<int>(threadIdx.x) / kTile; i < kTile; i += THREADS / kTile) {
    if (row + i >= rows.value || column + lane >= columns.value) continue;
    const long long filter = static_cast<long long>(group) * rows.value + row + i;
    tile[i * (kTile + 1) + lane] =
        source[(filter * taps.value + tap) * columns.value + column + lane];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x) / kTile; i < kTile; i += THREADS / kTile) {
    if (row + lane >= rows.value || column + i >= columns.value) continue;
    const long long filter = static_cast<long long>(group) * columns.value + column + i;
    target[(filter * taps.value + taps.value - 1 - tap) * rows.value + row + lane] =
        tile[lane * (kTile + 1) + i];
  }
#else
  const unsigned at = blockIdx.x * THREADS + threadIdx.x;
  if (at >= static_cast<unsigned>(count)) return;
  unsigned tap = at;
  unsigned row = taps.split(tap);
  unsigned column = rows.split(row);
  const unsigned group = columns.split(column);
  const long long filter = static_cast<long long>(group) * rows.value + row;
  target[at] = source[(filter * columns.value + column) * taps.value + taps.value - 1 - tap];
#endif
}

// Adds the bias of each channel, behind `inner` elements of which the next channel begins.
extern "C" __global__ void __launch_bounds__(THREADS)
    add_bias(ELEMENT* __restrict__ y, const ELEMENT* __restrict__ bias, int count,
             DivisorArgument channels, DivisorArgument inner) {
  const unsigned at = blockIdx.x * THREADS + threadIdx.x;
  if (at >= static_cast<unsigned>(count)) return;
  unsigned rest = at;
  unsigned channel = Divisor(inner).split(rest);
  Divisor(channels).split(channel);
  y[at] = from_float<ELEMENT>(to_float(y[at]) + to_float(bias[channel]));
}
