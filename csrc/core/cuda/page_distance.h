#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace cudnn_autotune {

// Measures how far pages of memory are from the multiprocessor with the highest number.
//
// The L2 cache of a large GPU has two partitions. Each serves half of all 4 KiB pages, and half of
// the multiprocessors are 200 cycles nearer to it than the others (H200: 290 against 490 cycles).
// In some kernels the blocks fetch their next tile from a counter in the workspace. Such a kernel
// runs up to 30 % longer if the counter is near the multiprocessors on which the first blocks
// start: those start earlier and read the counter faster, so they take a tile too many, and all
// others wait for them. The highest-numbered multiprocessors are among those (seen on three H200s).
// So a workspace far from them is best.
class PageDistance {
 public:
  static constexpr size_t kPageBytes = 4096;

  // The one of the current device. Null if the driver does not take the kernel.
  static const PageDistance* of_current_device();

  // Enqueues the measurement of `count` pages, whose memory must be zero. It writes the latency of
  // each page, in cycles, to `cycles`: count + 1 words of device memory, which must be zero before,
  // and stay zero if no block came to run on the multiprocessor.
  void measure(cudaStream_t stream, void* pages, uint32_t count, uint32_t* cycles) const;

  // The indices of the pages in the far partition. Empty if the latencies do not fall into two
  // groups.
  static std::vector<size_t> far(const std::vector<uint32_t>& cycles);

 private:
  PageDistance() = default;

  uint32_t multiprocessors_ = 0;
  void* kernel_ = nullptr;
};

}  // namespace cudnn_autotune
