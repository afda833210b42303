#include "call/workspace_pages.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <memory>

#include "call/torch_bridge.h"
#include "core/cuda/cuda_driver.h"
#include "core/cuda/graph_lifetime.h"

namespace cudnn_autotune {
namespace {

constexpr size_t kPages = 256;  // 1 MiB in all; half of the pages are in each partition
constexpr size_t kCyclesBytes = (kPages + 1) * sizeof(uint32_t);
// One page more than kPages, so that the first one can begin at a page boundary.
constexpr size_t kBytes = (kPages + 1) * WorkspacePages::kPageBytes + kCyclesBytes;
// A measurement fails if memory is short, or if the GPU is so busy that no block runs on the
// multiprocessor in question, or that the partitions do not stand out. The next attempt follows
// after twice as many calls.
constexpr int kMostAttempts = 6;

}  // namespace

WorkspacePages& WorkspacePages::of_current_device() {
  // It is never freed, because graphs and streams may outlive everything else.
  static const auto* all = [] {
    auto* made = new std::vector<std::unique_ptr<WorkspacePages>>();
    for (int i = 0; i < c10::cuda::device_count(); ++i) made->emplace_back(new WorkspacePages(i));
    return made;
  }();
  return *all->at(c10::cuda::current_device());
}

c10::DataPtr WorkspacePages::take(bool captures) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device_));
  if (captures) return {of_capture(stream), device};
  const std::lock_guard lock(mutex_);
  if (!is_known(false) || pages_.empty()) return {};
  Page* page = of_stream(stream);
  if (page == nullptr) return {};
  return {page->address, page, &give_back, device};
}

WorkspacePages::Count WorkspacePages::count() {
  release_of_destroyed_graphs();
  const bool captures = is_capturing();
  std::unique_lock lock(mutex_);
  while (state_ != State::known && !captures) {
    const RelaxedCapture relaxed;
    if (state_ == State::none && !measure()) break;
    const cudaEvent_t measured = measured_;
    lock.unlock();
    const bool waited = went_well(cudaEventSynchronize(measured));
    lock.lock();
    if (!waited) break;
    if (state_ == State::measuring) has_ended();
  }
  return {pages_.size(), unused_.size()};
}

void WorkspacePages::give_back(void* context) {
  Page* page = static_cast<Page*>(context);
  const std::lock_guard lock(page->owner->mutex_);
  page->owner->free_[page->stream].push_back(page);
}

WorkspacePages::Page* WorkspacePages::unused() {
  if (unused_.empty()) return nullptr;
  Page* page = unused_.back();
  unused_.pop_back();
  return page;
}

WorkspacePages::Page* WorkspacePages::of_stream(cudaStream_t stream) {
  auto& own = free_[stream];
  Page* page = nullptr;
  if (own.empty()) {
    page = unused();
  } else {
    page = own.back();
    own.pop_back();
  }
  if (page != nullptr) page->stream = stream;
  return page;
}

void* WorkspacePages::of_capture(cudaStream_t stream) {
  const auto capture = capture_of(stream);
  if (!capture) return nullptr;
  const std::pair key(*capture, stream);
  Page* page = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!is_known(true)) return nullptr;
    const auto known = captured_.find(key);
    if (known != captured_.end()) return known->second->address;
    page = unused();
    if (page == nullptr) return nullptr;
    captured_.emplace(key, page);
  }
  keep_for_graph(stream, std::shared_ptr<Page>(page, [key](Page* returned) {
                   WorkspacePages& owner = *returned->owner;
                   const std::lock_guard lock(owner.mutex_);
                   owner.captured_.erase(key);
                   owner.unused_.push_back(returned);
                 }));
  return page->address;
}

bool WorkspacePages::is_known(bool captures) {
  if (state_ == State::known) return true;
  if (state_ == State::none && (captures || --calls_until_next_ > 0)) return false;
  // In CUDA's default mode these calls would break the capture of another thread.
  const RelaxedCapture relaxed;
  if (state_ == State::measuring) return has_ended();
  measure();
  return false;
}

bool WorkspacePages::measure() {
  if (attempts_ == kMostAttempts) {
    state_ = State::known;  // with no pages
    return false;
  }
  ++attempts_;
  calls_until_next_ = 1 << attempts_;
  const PageDistance* distance = PageDistance::of_current_device();
  if (distance == nullptr || !allocate()) return false;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  char* first = first_page();
  auto* cycles = reinterpret_cast<uint32_t*>(first + kPages * kPageBytes);
  if (!went_well(cudaMemsetAsync(first, 0, kPages * kPageBytes + kCyclesBytes, stream))) {
    return false;
  }
  distance->measure(stream, first, kPages, cycles);
  if (!went_well(cudaMemcpyAsync(cycles_, cycles, kCyclesBytes, cudaMemcpyDeviceToHost, stream)) ||
      !went_well(cudaEventRecord(measured_, stream))) {
    return false;
  }
  state_ = State::measuring;
  return true;
}

bool WorkspacePages::has_ended() {
  const cudaError_t status = cudaEventQuery(measured_);
  if (went_well(status)) {
    read();
  } else if (status != cudaErrorNotReady) {
    state_ = State::none;
  }
  return state_ == State::known;
}

bool WorkspacePages::allocate() {
  // The memory is never freed, because that would wait for the device.
  if (memory_ != nullptr) return true;
  void* memory = nullptr;
  void* pinned = nullptr;
  cudaEvent_t event = nullptr;
  if (went_well(cudaEventCreateWithFlags(&event, cudaEventDisableTiming)) &&
      went_well(cudaHostAlloc(&pinned, kCyclesBytes, cudaHostAllocPortable)) &&
      went_well(cudaMalloc(&memory, kBytes))) {
    memory_ = memory;
    cycles_ = static_cast<uint32_t*>(pinned);
    measured_ = event;
    return true;
  }
  if (pinned != nullptr) static_cast<void>(went_well(cudaFreeHost(pinned)));
  if (event != nullptr) static_cast<void>(went_well(cudaEventDestroy(event)));
  return false;
}

char* WorkspacePages::first_page() const {
  auto* memory = static_cast<char*>(memory_);
  return memory + (kPageBytes - reinterpret_cast<uintptr_t>(memory) % kPageBytes) % kPageBytes;
}

void WorkspacePages::read() {
  const std::vector<size_t> far = PageDistance::far({cycles_, cycles_ + kPages});
  state_ = State::none;
  // The kernel did not run, or was disturbed, or the L2 cache has one partition.
  if (far.empty()) return;
  pages_.resize(far.size());
  for (size_t i = 0; i < far.size(); ++i) {
    pages_[i].owner = this;
    pages_[i].address = first_page() + far[i] * kPageBytes;
    unused_.push_back(&pages_[i]);
  }
  state_ = State::known;
}

}  // namespace cudnn_autotune
