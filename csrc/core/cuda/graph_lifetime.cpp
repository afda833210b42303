#include "core/cuda/graph_lifetime.h"

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "core/cuda/cuda_driver.h"

namespace cudnn_autotune {
namespace {

using Kept = std::set<std::shared_ptr<const void>>;

// What one capture uses. A user object of CUDA, which the graph owns, stands for it.
struct Capture {
  unsigned long long id = 0;
  Kept kept;
  Capture* next = nullptr;  // the next one in the stack `destroyed`
};

// Never destroyed, because graphs may outlive everything else.
struct Captures {
  std::mutex mutex;
  std::map<unsigned long long, Capture*> by_id;
  Kept for_ever;                             // of graphs that could not be given a user object
  std::atomic<Capture*> destroyed{nullptr};  // a stack, whose elements by_id may still have

  static Captures& instance() {
    static auto* all = new Captures();
    return *all;
  }
};

// CUDA calls this on a thread of its own, or on the one that destroys the graph. It must neither
// wait nor call CUDA.
void graph_is_destroyed(void* context) {
  auto* capture = static_cast<Capture*>(context);
  std::atomic<Capture*>& destroyed = Captures::instance().destroyed;
  capture->next = destroyed.load(std::memory_order_relaxed);
  while (!destroyed.compare_exchange_weak(capture->next, capture, std::memory_order_release,
                                          std::memory_order_relaxed)) {
  }
}

// The capture that a stream is in, and its graph. None if it is not captured, or if its capture is
// broken.
std::optional<std::pair<unsigned long long, cudaGraph_t>> active(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
  if (!went_well(cudaStreamGetCaptureInfo(stream, &status, &id, &graph)) ||
      status != cudaStreamCaptureStatusActive) {
    return std::nullopt;
  }
  return std::pair(id, graph);
}

// A new capture that the graph owns; null if CUDA refuses.
Capture* owned_by(cudaGraph_t graph, unsigned long long id) {
  auto capture = std::make_unique<Capture>();
  capture->id = id;
  cudaUserObject_t object = nullptr;
  if (!went_well(cudaUserObjectCreate(&object, capture.get(), &graph_is_destroyed, 1,
                                      cudaUserObjectNoDestructorSync))) {
    return nullptr;
  }
  Capture* const owned = capture.release();
  // From now on the graph, its copies and what is instantiated from it own the object.
  if (went_well(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove))) return owned;
  static_cast<void>(went_well(cudaUserObjectRelease(object, 1)));  // as if a graph were destroyed
  return nullptr;
}

}  // namespace

std::optional<unsigned long long> capture_of(cudaStream_t stream) {
  const auto found = active(stream);
  return found ? std::optional(found->first) : std::nullopt;
}

void keep_for_graph(cudaStream_t stream, std::shared_ptr<const void> used) {
  const auto current = active(stream);
  if (!current) return;
  const auto [id, graph] = *current;
  Captures& captures = Captures::instance();
  const std::lock_guard lock(captures.mutex);
  const auto found = captures.by_id.find(id);
  Capture* const capture = found != captures.by_id.end() ? found->second : owned_by(graph, id);
  if (capture == nullptr) {
    captures.for_ever.insert(std::move(used));
    return;
  }
  captures.by_id.emplace(id, capture);
  capture->kept.insert(std::move(used));
}

void release_of_destroyed_graphs() {
  Captures& captures = Captures::instance();
  if (captures.destroyed.load(std::memory_order_relaxed) == nullptr) return;
  Capture* capture = captures.destroyed.exchange(nullptr, std::memory_order_acquire);
  const RelaxedCapture relaxed;  // a plan unloads kernels
  while (capture != nullptr) {
    const std::unique_ptr<Capture> released(std::exchange(capture, capture->next));
    const std::lock_guard lock(captures.mutex);
    const auto found = captures.by_id.find(released->id);
    if (found != captures.by_id.end() && found->second == released.get()) {
      captures.by_id.erase(found);
    }
  }
}

size_t kept_for_graphs() {
  Captures& captures = Captures::instance();
  const std::lock_guard lock(captures.mutex);
  size_t count = captures.for_ever.size();
  for (const auto& [id, capture] : captures.by_id) count += capture->kept.size();
  return count;
}

}  // namespace cudnn_autotune
