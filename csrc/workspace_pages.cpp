#include "workspace_pages.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "torch_bridge.h"

namespace cudnn_autotune {
namespace {

constexpr size_t kPages = 256;  // half of them in either partition: 1 MiB in all
constexpr size_t kCyclesBytes = (kPages + 1) * sizeof(uint32_t);
// Measurements, while the GPU is too busy to run a block on the multiprocessor in question.
constexpr int kMostAttempts = 8;

}  // namespace

WorkspacePages& WorkspacePages::of_current_device() {
  // Never freed: graphs and streams may outlive everything else.
  static const auto* all = [] {
    auto* made = new std::vector<std::unique_ptr<WorkspacePages>>();
    for (int i = 0; i < c10::cuda::device_count(); ++i) made->emplace_back(new WorkspacePages(i));
    return made;
  }();
  return *all->at(c10::cuda::current_device());
}

c10::DataPtr WorkspacePages::take() {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  const bool captures = is_capturing();
  const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device_));
  const std::lock_guard lock(mutex_);
  if (captures ? state_ != State::known : !is_known(false)) return {};
  const auto unused = [this]() -> Page* {
    if (unused_.empty()) return nullptr;
    Page* page = unused_.back();
    unused_.pop_back();
    return page;
  };
  if (captures) {
    cudaStreamCaptureStatus status{};
    unsigned long long capture = 0;
    C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &capture));
    const auto [entry, is_new] = captured_.try_emplace({capture, stream}, nullptr);
    if (is_new) entry->second = unused();
    if (entry->second == nullptr) return {};
    return {entry->second->address, device};
  }
  auto& own = free_[stream];
  Page* page = nullptr;
  if (own.empty()) {
    page = unused();
  } else {
    page = own.back();
    own.pop_back();
  }
  if (page == nullptr) return {};
  page->stream = stream;
  return {page->address, page, &give_back, device};
}

size_t WorkspacePages::count() {
  const std::lock_guard lock(mutex_);
  for (int i = 0; i <= kMostAttempts && !is_known(true); ++i) {
  }
  return pages_.size();
}

void WorkspacePages::give_back(void* context) {
  Page* page = static_cast<Page*>(context);
  const std::lock_guard lock(page->owner->mutex_);
  page->owner->free_[page->stream].push_back(page);
}

bool WorkspacePages::is_known(bool wait) {
  if (state_ == State::known) return true;
  // Another thread may be capturing.
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  if (state_ == State::none) {
    measure();
    if (state_ == State::none) return false;
  }
  const cudaError_t status = wait ? cudaEventSynchronize(measured_) : cudaEventQuery(measured_);
  if (status == cudaErrorNotReady) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  C10_CUDA_CHECK(status);
  read();
  return state_ == State::known;
}

void WorkspacePages::measure() {
  const PageDistance* distance = PageDistance::of_current_device();
  if (distance == nullptr || ++attempts_ > kMostAttempts) {
    memory_.clear();
    state_ = State::known;  // and there is none
    return;
  }
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  constexpr size_t kBytes = (kPages + 1) * kPageBytes;
  if (memory_.get() == nullptr) {
    try {
      memory_ = c10::cuda::CUDACachingAllocator::get()->allocate(kBytes + kCyclesBytes);
    } catch (const c10::OutOfMemoryError&) {
      return;  // there may be some at the next call
    }
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&measured_, cudaEventDisableTiming));
    void* pinned = nullptr;
    C10_CUDA_CHECK(cudaHostAlloc(&pinned, kCyclesBytes, cudaHostAllocPortable));
    cycles_ = static_cast<uint32_t*>(pinned);
  }
  auto* first = static_cast<char*>(memory_.get());
  first += (kPageBytes - reinterpret_cast<uintptr_t>(first) % kPageBytes) % kPageBytes;
  auto* cycles = reinterpret_cast<uint32_t*>(first + kPages * kPageBytes);
  C10_CUDA_CHECK(cudaMemsetAsync(first, 0, kPages * kPageBytes + kCyclesBytes, stream));
  distance->measure(stream, first, kPages, cycles);
  C10_CUDA_CHECK(cudaMemcpyAsync(cycles_, cycles, kCyclesBytes, cudaMemcpyDeviceToHost, stream));
  C10_CUDA_CHECK(cudaEventRecord(measured_, stream));
  state_ = State::measuring;
}

void WorkspacePages::read() {
  const std::vector<uint32_t> cycles(cycles_, cycles_ + kPages);
  if (std::find(cycles.begin(), cycles.end(), 0u) != cycles.end()) {
    state_ = State::none;  // it did not run
    return;
  }
  auto* first = static_cast<char*>(memory_.get());
  first += (kPageBytes - reinterpret_cast<uintptr_t>(first) % kPageBytes) % kPageBytes;
  for (const size_t i : PageDistance::far(cycles)) {
    pages_.push_back({this, first + i * kPageBytes, nullptr});
  }
  for (Page& page : pages_) unused_.push_back(&page);
  if (pages_.empty()) memory_.clear();
  state_ = State::known;
}

}  // namespace cudnn_autotune
