// Solves a convolution of stride 1 by an engine for the opposite direction: turns its filters
// round, with input and output channels exchanged within each group, and adds a bias behind the
// engine.
//
// ELEMENT is the tensors' type as device.cuh names it. CHANNELS_LAST says how the tensors lie.

using Element = ELEMENT;

__device__ __forceinline__ float load(const float* from) { return *from; }
template <typename T>
__device__ __forceinline__ float load(const T* from) {
  return to_float(*from);
}
__device__ __forceinline__ void store(float* to, float value) { *to = value; }
template <typename T>
__device__ __forceinline__ void store(T* to, float value) {
  to->bits = static_cast<unsigned short>(pack<T>(value, 0.0f));
}

// target[g * inputs + c][k][taps - 1 - t] = source[g * outputs + k][c][t], for groups of `inputs`
// input channels and `outputs` output channels. A row of blocks writes one filter of the target.
// The indices of the target are in the order of its memory, so that stores are contiguous.
extern "C" __global__ void reverse_filters(Element* target, const Element* source, int inputs,
                                           int outputs, int taps) {
  const int place = blockIdx.y * blockDim.x + threadIdx.x;
  if (place >= outputs * taps) return;
  const int filter = blockIdx.x, group = filter / inputs, c = filter % inputs;
#if CHANNELS_LAST
  const int k = place % outputs, t = taps - 1 - place / outputs;
  const long long from = ((group * outputs + k) * static_cast<long long>(taps) + t) * inputs + c;
#else
  const int k = place / taps, t = taps - 1 - place % taps;
  const long long from = ((group * outputs + k) * static_cast<long long>(inputs) + c) * taps + t;
#endif
  target[filter * static_cast<long long>(outputs) * taps + place] = source[from];
}

// y += bias, of `count` elements with `pixels` pixels in an image. The sum is rounded once more, as
// it is by PyTorch.
extern "C" __global__ void add_bias(Element* y, const Element* bias, int count, int channels,
                                    int pixels) {
  // A block whose size does not divide 2^31 may reach beyond it.
  const unsigned place = blockIdx.x * blockDim.x + threadIdx.x;
  if (place >= static_cast<unsigned>(count)) return;
#if CHANNELS_LAST
  const int channel = place % channels;
#else
  const int channel = place / pixels % channels;
#endif
  store(y + place, load(y + place) + load(bias + channel));
}
