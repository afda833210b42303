// Copies `count` positions of a signal, from `begin` on, to planes of 8 channels in shared memory,
// where a position is a row of 16 bytes and a plane begins every `pitch` rows, an odd number, so
// that planes begin in different banks. Positions beyond the signal are zeros. Neighbouring threads
// copy the planes of a position; `channels` are elements from one to the next.
template <int planes, int threads>
__device__ __forceinline__ void copy_planes(unsigned char* to, int pitch, const ELEMENT* signal,
                                            int channels, int length, int begin, int count) {
  constexpr int kTogether = threads / planes;  // positions
  const int plane = threadIdx.x % planes, first = threadIdx.x / planes;
  if (first >= kTogether) return;
  const ELEMENT* from = signal + static_cast<long long>(begin + first) * channels + 8 * plane;
  to += (plane * pitch + first) * 16;
  const long long step = static_cast<long long>(kTogether) * channels;
#pragma unroll 4
  for (int i = first; i < count; i += kTogether) {
    const bool exists = static_cast<unsigned>(begin + i) < static_cast<unsigned>(length);
    copy_async_cached(to, exists ? from : signal, exists);
    from += step;
    to += 16 * kTogether;
  }
}
