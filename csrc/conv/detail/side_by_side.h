#pragma once

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace cudnn_autotune {

// Runs pieces of work that are too small for a GPU side by side, on a few streams. The first one is
// the caller's, which waits for the others in the end.
class SideBySide {
 public:
  SideBySide() : streams_{c10::cuda::getCurrentCUDAStream()} {
    // The same ones in each call of a thread: the memory of a workspace stays with its stream.
    static thread_local Lent lent;
    const auto& others = lent.of(streams_[0].device_index());
    streams_.insert(streams_.end(), others.begin(), others.end());
  }

  // Runs `work(n)` for each n below `count`.
  template <typename Work>
  void run(int64_t count, const Work& work) {
    const size_t used = std::min(kMost, static_cast<size_t>(count));
    at::cuda::CUDAEvent begun;
    begun.record(streams_[0]);
    for (size_t i = 1; i < used; ++i) begun.block(streams_[i]);
    const auto join = [&] {
      for (size_t i = 1; i < used; ++i) {
        at::cuda::CUDAEvent done;
        done.record(streams_[i]);
        done.block(streams_[0]);
      }
    };
    try {
      for (int64_t n = 0; n < count; ++n) {
        const c10::cuda::CUDAStreamGuard stream(streams_[static_cast<size_t>(n) % used]);
        work(n);
      }
    } catch (...) {
      // The caller frees what the other streams may still read.
      try {
        join();
      } catch (const c10::Error&) {
      }
      throw;
    }
    join();
  }

 private:
  static constexpr size_t kMost = 4;
  using Streams = std::vector<c10::cuda::CUDAStream>;

  // The streams that one thread has, by device. The next thread gets those of a thread that ended.
  //
  // They are not of PyTorch's pool, whose streams others have too: while this thread captures,
  // their work would be captured as well. They are never destroyed.
  class Lent {
   public:
    Lent() = default;
    Lent(const Lent&) = delete;
    Lent& operator=(const Lent&) = delete;
    ~Lent() {
      const std::lock_guard lock(mutex());
      for (auto& [device, streams] : streams_) unused()[device].push_back(std::move(streams));
    }

    const Streams& of(c10::DeviceIndex device) {
      auto& found = streams_[device];
      if (found.empty()) {
        const std::lock_guard lock(mutex());
        auto& others = unused()[device];
        if (!others.empty()) {
          found = std::move(others.back());
          others.pop_back();
        }
      }
      while (found.size() < kMost - 1) {
        const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
        cudaStream_t stream = nullptr;
        C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        found.push_back(c10::cuda::getStreamFromExternal(stream, device));
      }
      return found;
    }

   private:
    // Neither is destroyed: threads may end after the process's statics.
    static std::mutex& mutex() {
      static auto* made = new std::mutex();
      return *made;
    }
    static std::map<c10::DeviceIndex, std::vector<Streams>>& unused() {
      static auto* made = new std::map<c10::DeviceIndex, std::vector<Streams>>();
      return *made;
    }
    std::map<c10::DeviceIndex, Streams> streams_;
  };

  Streams streams_;
};

}  // namespace cudnn_autotune
