#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace cudnn_autotune {

// How far pages of memory are from the multiprocessor with the highest number.
//
// The L2 cache of a large GPU has two partitions; each serves its half of all 4 KiB pages, and half
// of the multiprocessors is 200 cycles nearer to it than the others (H200: 290 against 490). A
// kernel whose blocks fetch their next tile from a counter runs up to 30 % longer where that
// counter is near the multiprocessors on which the first blocks start: they have the earlier start
// and the shorter way, take a tile too many, and all wait for them. The highest-numbered ones are
// among those (three H200s).
class PageDistance {
 public:
  static constexpr size_t kPageBytes = 4096;

  // Of the current device; null where the driver does not take the kernel.
  static const PageDistance* of_current_device();

  // Enqueues the measurement of `count` pages, zeroed memory. `cycles` are count + 1 zeroed words
  // of device memory; they stay zero where no block came to run on the multiprocessor.
  void measure(cudaStream_t stream, void* pages, uint32_t count, uint32_t* cycles) const;

  // The pages of the far partition, by their cycles; none where these do not fall into two groups.
  static std::vector<size_t> far(const std::vector<uint32_t>& cycles);

 private:
  PageDistance() = default;

  uint32_t multiprocessors_ = 0;
  void* kernel_ = nullptr;
};

}  // namespace cudnn_autotune
