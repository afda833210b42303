#pragma once

#include <c10/core/Allocator.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "core/page_distance.h"

namespace cudnn_autotune {

// Workspaces of a page at most lie where kernels run fastest (see PageDistance). They are lent as
// the caching allocator lends memory: what is given back serves the same stream again, whose order
// keeps its kernels apart, and no other stream. A captured graph, which may be replayed beside
// anything, has its page until it is destroyed.
//
// The memory is CUDA's own, and not the caching allocator's: whoever has redirected that to a pool
// of theirs for a moment (torch.compile, torch.cuda.use_mem_pool) would have the pages in it.
class WorkspacePages {
 public:
  static constexpr size_t kPageBytes = PageDistance::kPageBytes;
  struct Count {
    size_t all = 0;
    size_t unused = 0;  // that no stream or graph has
  };

  static WorkspacePages& of_current_device();

  // A page for one launch on the current stream, which captures or not. Null where none is left, or
  // none is known: on a GPU without partitions, or as long as the measurement runs, which the first
  // call outside of a capture enqueues on its stream; nobody waits for it here.
  c10::DataPtr take(bool captures);
  // Waits for the measurement, others' calls meanwhile do not.
  Count count();

 private:
  struct Page {
    WorkspacePages* owner = nullptr;
    void* address = nullptr;
    cudaStream_t stream = nullptr;
    unsigned long long capture = 0;
    Page* next = nullptr;  // in returned_
  };
  enum class State { none, measuring, known };

  explicit WorkspacePages(int device) : device_(device) {}
  static void give_back(void* page);
  // On the thread that destroys the graph, which may hold the lock, or on one of CUDA's: it must
  // neither wait nor call CUDA.
  static void graph_is_destroyed(void* page);

  // All of these with the lock held.
  bool is_known(bool captures);
  // Whether it has begun; the state is `known` once it has been tried often enough.
  bool measure();
  bool allocate();
  bool has_ended();
  void read();
  void reclaim();
  char* first_page() const;
  Page* unused();
  Page* of_stream(cudaStream_t stream);
  Page* of_capture(cudaStream_t stream);

  const int device_;
  std::mutex mutex_;
  State state_ = State::none;
  int attempts_ = 0;
  int calls_until_next_ = 0;
  void* memory_ = nullptr;      // the pages, then their cycles
  uint32_t* cycles_ = nullptr;  // pinned
  cudaEvent_t measured_ = nullptr;
  std::vector<Page> pages_;    // addresses stay once it is filled
  std::vector<Page*> unused_;  // that no stream has seen since the last graph had them
  std::map<cudaStream_t, std::vector<Page*>> free_;
  std::map<std::pair<unsigned long long, cudaStream_t>, Page*> captured_;
  std::atomic<Page*> returned_{nullptr};  // by graphs: a stack
};

}  // namespace cudnn_autotune
