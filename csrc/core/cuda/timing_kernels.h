#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace cudnn_autotune {

// Two small kernels that measurements on a GPU need. One reads the cycle counter of every
// multiprocessor together with the GPU's wall clock, which gives the clock frequency. The other one
// blocks a stream until a flag in host memory is set, or for some time.
class TimingKernels {
 public:
  // The counters of one multiprocessor; zero if the kernel did not run on it.
  struct Reading {
    uint64_t cycles = 0;
    uint64_t ns = 0;
  };

  // Those of the current device. Null if the driver does not take them.
  static TimingKernels* of_current_device();

  // The number of readings that stamp() writes.
  size_t multiprocessors() const { return multiprocessors_; }
  // Enqueues a kernel that reads all counters into `readings`, device memory for multiprocessors()
  // of them.
  void stamp(cudaStream_t stream, Reading* readings) const;
  // Enqueues a kernel that blocks the stream until unblock(), or for `most_ns`, whichever is
  // shorter. One stream of a device may be blocked at a time.
  void block(cudaStream_t stream, uint64_t most_ns) const;
  void unblock() const;
  // Enqueues a kernel that runs for `ns`, on any number of streams.
  void delay(cudaStream_t stream, uint64_t ns) const;

  // The mean clock frequency between two stamps. nullopt if they are too close for the resolution
  // of the wall clock.
  static std::optional<double> mhz(const Reading* begin, const Reading* end, size_t count);

 private:
  TimingKernels() = default;

  size_t multiprocessors_ = 0;
  void* stamp_kernel_ = nullptr;
  void* block_kernel_ = nullptr;
  uint32_t* released_ = nullptr;  // the flag, in pinned host memory; one that is never set follows
};

}  // namespace cudnn_autotune
