#pragma once

#include <c10/core/Allocator.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "core/page_distance.h"

namespace cudnn_autotune {

// Workspaces of a page at most lie where kernels run fastest (see PageDistance). They are lent as
// the caching allocator lends memory: what is given back serves the same stream again, whose order
// keeps its kernels apart, and no other stream. A captured graph keeps its page: it may be replayed
// beside anything.
class WorkspacePages {
 public:
  static constexpr size_t kPageBytes = PageDistance::kPageBytes;

  static WorkspacePages& of_current_device();

  // A page for one launch on the current stream. Null where none is left, or none is known: on a
  // GPU without partitions, or as long as the measurement runs, which the first call enqueues on
  // its stream; nobody waits for it here.
  c10::DataPtr take();
  // Pages that are fit for it, in use or not; waits for the measurement.
  size_t count();

 private:
  struct Page {
    WorkspacePages* owner;
    void* address;
    cudaStream_t stream;
  };
  enum class State { none, measuring, known };

  explicit WorkspacePages(int device) : device_(device) {}
  static void give_back(void* page);
  // With the lock held, outside of captures.
  bool is_known(bool wait);
  void measure();
  void read();

  const int device_;
  std::mutex mutex_;
  State state_ = State::none;
  int attempts_ = 0;
  c10::DataPtr memory_;         // the pages, then their cycles
  uint32_t* cycles_ = nullptr;  // pinned
  cudaEvent_t measured_ = nullptr;
  std::vector<Page> pages_;    // addresses stay once it is filled
  std::vector<Page*> unused_;  // that no stream has seen
  std::map<cudaStream_t, std::vector<Page*>> free_;
  std::map<std::pair<unsigned long long, cudaStream_t>, Page*> captured_;
};

}  // namespace cudnn_autotune
