#pragma once

#include <c10/core/Allocator.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "core/cuda/page_distance.h"

namespace cudnn_autotune {

// Lends the pages of memory where kernels run fastest (see PageDistance) as workspaces of at most
// one page. It works like the caching allocator: a page that is given back is lent to the same
// stream again, whose order keeps its kernels apart, and to no other stream. A captured graph,
// which may be replayed beside anything, keeps its page until it is destroyed. All methods are safe
// to call from several threads.
//
// The memory comes from cudaMalloc and not from the caching allocator, because a caller may have
// redirected that to a memory pool of its own (torch.compile, torch.cuda.use_mem_pool).
class WorkspacePages {
 public:
  static constexpr size_t kPageBytes = PageDistance::kPageBytes;
  struct Count {
    size_t all = 0;
    size_t unused = 0;  // pages that no stream or graph has
  };

  static WorkspacePages& of_current_device();

  // A page for one launch on the current stream. `captures` says whether that stream is captured.
  // Null if no page is left, or none is known: on a GPU whose L2 cache has one partition, or until
  // the measurement has ended. The first call outside of a capture enqueues the measurement on its
  // stream and does not wait for it.
  c10::DataPtr take(bool captures);
  // Waits for the measurement, and meanwhile does not block the calls of other threads.
  Count count();

 private:
  struct Page {
    WorkspacePages* owner = nullptr;
    void* address = nullptr;
    cudaStream_t stream = nullptr;
  };
  enum class State { none, measuring, known };

  explicit WorkspacePages(int device) : device_(device) {}
  static void give_back(void* page);
  // The address of the page that the capture of the stream has. The caller does not hold the lock.
  void* of_capture(cudaStream_t stream);

  // The caller of these holds the lock.
  bool is_known(bool captures);
  // Enqueues the measurement, and returns whether that went well. After kMostAttempts the state is
  // `known`, with no pages.
  bool measure();
  bool allocate();
  bool has_ended();
  void read();
  char* first_page() const;
  Page* unused();
  Page* of_stream(cudaStream_t stream);

  const int device_;
  std::mutex mutex_;
  State state_ = State::none;
  int attempts_ = 0;
  int calls_until_next_ = 0;
  void* memory_ = nullptr;      // the pages, followed by their latencies
  uint32_t* cycles_ = nullptr;  // the latencies in pinned host memory
  cudaEvent_t measured_ = nullptr;
  std::vector<Page> pages_;    // filled once, so that the addresses of its elements stay valid
  std::vector<Page*> unused_;  // never lent, or given back by a destroyed graph
  std::map<cudaStream_t, std::vector<Page*>> free_;
  std::map<std::pair<unsigned long long, cudaStream_t>, Page*> captured_;
};

}  // namespace cudnn_autotune
