#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace cudnn_autotune {

// Two tiny kernels of our own: one reads every multiprocessor's cycle counter beside the GPU's
// wall clock, the other holds a stream until the host lets go.
class GpuClock {
 public:
  // One multiprocessor's counters, as the kernel writes them; zero where it did not run.
  struct Reading {
    uint64_t cycles = 0;
    uint64_t ns = 0;
  };

  // Of the current device; null where the driver does not take the kernels.
  static GpuClock* of_current_device();

  // How many readings a stamp has.
  size_t multiprocessors() const { return multiprocessors_; }
  // Enqueues the reading of all counters into `readings`, device memory for multiprocessors().
  void stamp(cudaStream_t stream, Reading* readings) const;
  // Enqueues a wait for release(), or for `most_ns`, whichever comes first.
  void hold(cudaStream_t stream, uint64_t most_ns) const;
  void release() const;

  // Mean clock between two stamps; nullopt where they are too close for the counters' resolution.
  static std::optional<double> mhz(const Reading* begin, const Reading* end, size_t count);

 private:
  GpuClock() = default;

  size_t multiprocessors_ = 0;
  void* stamp_kernel_ = nullptr;
  void* hold_kernel_ = nullptr;
  uint32_t* released_ = nullptr;  // pinned, read by the kernel over the bus
};

}  // namespace cudnn_autotune
