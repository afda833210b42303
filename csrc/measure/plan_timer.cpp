#include "measure/plan_timer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <mutex>
#include <utility>

#include "call/torch_bridge.h"
#include "call/workspace_pages.h"
#include "core/problem/check.h"

namespace cudnn_autotune {
namespace {

// CUDA's queue holds some 1,000 launches. With more of them behind a blocked stream, the host would
// wait for the GPU, and the GPU for the host.
constexpr int64_t kMostBlockedLaunches = 300;
constexpr uint64_t kMostBlockedNs = 20'000'000;

// Blocks a stream, and unblocks it at the latest when it is destroyed, also if the host throws.
class StreamBlock {
 public:
  StreamBlock(const TimingKernels* kernels, cudaStream_t stream) : kernels_(kernels) {
    if (kernels_ != nullptr) kernels_->block(stream, kMostBlockedNs);
  }
  ~StreamBlock() { unblock(); }
  StreamBlock(const StreamBlock&) = delete;
  StreamBlock& operator=(const StreamBlock&) = delete;

  void unblock() {
    if (kernels_ != nullptr) kernels_->unblock();
    kernels_ = nullptr;
  }

 private:
  const TimingKernels* kernels_;
};

// Waits for a stream when it is destroyed, also if the host throws: what is enqueued uses memory
// that is freed then.
class StreamWait {
 public:
  explicit StreamWait(cudaStream_t stream) : stream_(stream) {}
  ~StreamWait() { static_cast<void>(cudaStreamSynchronize(stream_)); }
  StreamWait(const StreamWait&) = delete;
  StreamWait& operator=(const StreamWait&) = delete;

 private:
  cudaStream_t stream_;
};

// Why a candidate does not run; empty if it does. Memory may be short, or ATen refuses. A failure
// of CUDA itself shows at the next call.
template <typename Run>
std::string failure_of(const Run& run) {
  try {
    run();
  } catch (const PlanError& error) {
    return error.what();
  } catch (const c10::OutOfMemoryError& error) {
    return std::string("out of memory: ") + error.what_without_backtrace();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

// Ends in torch what CUDAGraph::capture_end() has left when it failed (torch 2.11). While the
// allocators believe that a capture is under way, no cached memory is freed, and while the
// generator of random numbers believes it, no call draws any.
void give_up(std::unique_ptr<at::cuda::CUDAGraph> captured, c10::DeviceIndex device,
             const at::cuda::MempoolId_t& pool) {
  try {
    c10::cuda::CUDACachingAllocator::endAllocateToPool(device, pool);
    c10::cuda::CUDACachingAllocator::releasePool(device, pool);
  } catch (const c10::Error&) {
    return;  // it failed later, and all has ended
  }
  // The allocator of pinned memory still asks the graph which streams it captures.
  static_cast<void>(captured.release());
  // The generator's state is private to torch; the end of a capture that succeeds resets it.
  at::cuda::CUDAGraph other;
  other.capture_begin(at::cuda::graph_pool_handle(), cudaStreamCaptureModeThreadLocal);
  const auto bytes = at::TensorOptions().device(at::kCUDA, device).dtype(at::kByte);
  at::empty({1}, bytes).zero_();  // torch warns of a graph without a node
  other.capture_end();
}

// All timers of a device share one stream, because cuBLAS keeps a workspace for every stream that
// it has seen. It is none of PyTorch's pool, whose streams are given to callers as well: what they
// launch while a timer captures would become part of its graph.
c10::cuda::CUDAStream timing_stream(c10::DeviceIndex device) {
  static std::mutex mutex;
  static auto* streams = new std::map<c10::DeviceIndex, c10::cuda::CUDAStream>();
  const std::lock_guard lock(mutex);
  const auto known = streams->find(device);
  if (known != streams->end()) return known->second;
  const OnDevice on_device(device);
  cudaStream_t made = nullptr;
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
  return streams->emplace(device, c10::cuda::getStreamFromExternal(made, device)).first->second;
}

at::Tensor device_bytes(const at::Tensor& like, int64_t bytes) {
  return at::empty({bytes}, like.options().dtype(at::kByte).memory_format(std::nullopt));
}

}  // namespace

std::recursive_mutex& measuring_mutex(c10::DeviceIndex device) {
  static std::mutex mutex;
  // They are never destroyed, because threads may still measure while the process exits.
  static auto* mutexes = new std::map<c10::DeviceIndex, std::recursive_mutex>();
  const std::lock_guard lock(mutex);
  return (*mutexes)[device];
}

PlanTimer::PlanTimer(std::vector<Operands> operands, int64_t flush_bytes, bool workspace_pages)
    : operands_(std::move(operands)),
      flush_bytes_(flush_bytes),
      stream_(timing_stream(operands_.at(0).x.device().index())),
      kernels_(nullptr) {
  const c10::cuda::CUDAGuard device(operands_[0].x.device());
  kernels_ = TimingKernels::of_current_device();
  // The operands were written on the caller's stream, and are read on the timer's.
  c10::cuda::getCurrentCUDAStream().synchronize();
  if (!workspace_pages) return;
  WorkspacePages& pages = WorkspacePages::of_current_device();
  if (pages.count().all == 0) return;
  const std::lock_guard measuring(measuring_mutex(stream_.device_index()));
  const c10::cuda::CUDAStreamGuard on_stream(stream_);
  for (int64_t place = 0; place < kPlaces; ++place) {
    c10::DataPtr page = pages.take(false);
    if (!page) break;
    pages_.push_back(std::move(page));
  }
}

PlanTimer::~PlanTimer() {
  // run() waits for all its work. Work can be left only after a failure of CUDA itself.
  for (cudaEvent_t event : events_) static_cast<void>(cudaEventDestroy(event));
}

size_t PlanTimer::add(std::shared_ptr<Plan> plan) {
  candidates_.push_back({std::move(plan)});
  return candidates_.size() - 1;
}

void PlanTimer::set_workspace(at::Tensor workspace) {
  TORCH_CHECK_VALUE(workspace.scalar_type() == at::kByte && workspace.is_contiguous() &&
                        workspace.device() == operands_[0].x.device(),
                    "workspace must be a contiguous uint8 tensor on the device of the operands");
  const c10::cuda::CUDAGuard device(operands_[0].x.device());
  // The caller's stream may still run kernels that use this memory.
  c10::cuda::getCurrentCUDAStream().synchronize();
  graphs_.clear();  // captured graphs contain the old address
  workspace_ = std::move(workspace);
}

bool PlanTimer::uses_page(const Plan& plan) const {
  const int64_t need = plan.workspace_bytes();
  return need > 0 && need <= kPlaceBytes && !pages_.empty();
}

void* PlanTimer::workspace_for(Candidate& candidate) const {
  if (uses_page(*candidate.plan)) return pages_[candidate.next_place++ % pages_.size()].get();
  if (!workspace_.defined()) return nullptr;
  const int64_t spare = workspace_.numel() - candidate.plan->workspace_bytes();
  const int64_t places = std::clamp(spare / kPlaceBytes + 1, int64_t{1}, kPlaces);
  const int64_t place = candidate.next_place++ % places;
  return static_cast<char*>(workspace_.data_ptr()) + place * kPlaceBytes;
}

void PlanTimer::enqueue(const Batch& batch) {
  Candidate& candidate = candidates_.at(batch.candidate);
  for (int64_t call = 0; call < batch.calls; ++call) {
    const auto& operands = operands_[batch.cold ? next_operands_++ % operands_.size() : 0];
    candidate.plan->launch(operands, workspace_for(candidate));
  }
}

void PlanTimer::capture(const Batch& batch) {
  auto& graph = graphs_[{batch.candidate, batch.calls, batch.cold}];
  if (graph != nullptr) return;
  auto captured = std::make_unique<at::cuda::CUDAGraph>();
  const auto pool = at::cuda::graph_pool_handle();
  captured->capture_begin(pool, cudaStreamCaptureModeThreadLocal);
  std::exception_ptr failure;
  try {
    enqueue(batch);
  } catch (...) {
    failure = std::current_exception();
  }
  try {
    captured->capture_end();
  } catch (const c10::Error&) {
    // What was enqueued cannot be captured, such as a function of Python's that waits for the GPU.
    if (!failure) failure = std::current_exception();
    give_up(std::move(captured), stream_.device_index(), pool);
  }
  if (failure) std::rethrow_exception(failure);
  graph = std::move(captured);
}

void PlanTimer::reserve(size_t batches) {
  while (events_.size() < 2 * batches) {
    cudaEvent_t event = nullptr;
    C10_CUDA_CHECK(cudaEventCreate(&event));
    events_.push_back(event);
  }
  if (kernels_ == nullptr) return;
  const auto bytes = static_cast<int64_t>(2 * batches * kernels_->multiprocessors() *
                                          sizeof(TimingKernels::Reading));
  if (!readings_.defined() || readings_.numel() < bytes) {
    readings_ = device_bytes(operands_[0].x, bytes);
  }
}

std::vector<PlanTimer::Sample> PlanTimer::run(const std::vector<Batch>& batches, size_t lead) {
  const std::lock_guard measuring(measuring_mutex(stream_.device_index()));
  const RelaxedCapture relaxed;  // a caller's capture in another thread goes on
  const c10::cuda::CUDAGuard device(operands_[0].x.device());
  const c10::cuda::CUDAStreamGuard on_stream(stream_);
  const at::NoGradGuard no_grad;
  std::vector<Sample> samples(batches.size());
  for (size_t i = 0; i < batches.size(); ++i) {
    TORCH_CHECK_VALUE(batches[i].candidate < candidates_.size(), "batches: no candidate ",
                      batches[i].candidate);
    TORCH_CHECK_VALUE(batches[i].calls >= 1, "batches: calls must be 1 or more, got ",
                      batches[i].calls);
    const Plan& plan = *candidates_[batches[i].candidate].plan;
    const int64_t room = workspace_.defined() ? workspace_.numel() : 0;
    TORCH_CHECK_VALUE(uses_page(plan) || plan.workspace_bytes() <= room, "batches: ", plan.text(),
                      " needs ", plan.workspace_bytes(),
                      " bytes of workspace, and set_workspace() "
                      "gave ",
                      room);
    if (batches[i].as_graph) samples[i].error = failure_of([&] { capture(batches[i]); });
  }
  reserve(batches.size());
  const bool any_cold = std::any_of(batches.begin(), batches.end(), [](auto& b) { return b.cold; });
  if (any_cold && flush_bytes_ > 0 && !flush_.defined()) {
    try {
      flush_ = device_bytes(operands_[0].x, flush_bytes_);
    } catch (const c10::OutOfMemoryError&) {
      flush_bytes_ = 0;  // only the rotation over the operands keeps the cache cold then
    }
  }
  TimingKernels::Reading* stamps = nullptr;
  if (kernels_ != nullptr) {
    stamps = static_cast<TimingKernels::Reading*>(readings_.data_ptr());
    C10_CUDA_CHECK(cudaMemsetAsync(stamps, 0, readings_.numel(), stream_));
  }
  const auto stamp = [&](size_t at) {
    if (stamps != nullptr) kernels_->stamp(stream_, stamps + at * kernels_->multiprocessors());
  };
  // The most that the first run of a candidate can have taken on the GPU: the time from the return
  // of its launch, which loads the kernel, to its end.
  std::vector<double> most_ms(batches.size(), std::numeric_limits<double>::infinity());
  {
    const StreamWait wait(stream_);
    StreamBlock block(lead > 0 ? kernels_ : nullptr, stream_);
    int64_t launches = 0;
    for (size_t i = 0; i < batches.size(); ++i) {
      const Batch& batch = batches[i];
      Candidate& candidate = candidates_[batch.candidate];
      const bool is_first = lead == 0 && batch.calls == 1 && !candidate.has_run;
      if (batch.cold && flush_bytes_ > 0) {
        C10_CUDA_CHECK(cudaMemsetAsync(flush_.data_ptr(), 0, flush_bytes_, stream_));
      }
      stamp(2 * i);
      C10_CUDA_CHECK(cudaEventRecord(events_[2 * i], stream_));
      if (samples[i].error.empty()) {
        samples[i].error = failure_of([&] {
          if (batch.as_graph) {
            graphs_.at({batch.candidate, batch.calls, batch.cold})->replay();
          } else {
            enqueue(batch);
          }
        });
      }
      candidate.has_run = true;
      const auto launched = std::chrono::steady_clock::now();
      C10_CUDA_CHECK(cudaEventRecord(events_[2 * i + 1], stream_));
      stamp(2 * i + 1);
      if (is_first) {
        C10_CUDA_CHECK(cudaEventSynchronize(events_[2 * i + 1]));
        const std::chrono::duration<double, std::milli> waited =
            std::chrono::steady_clock::now() - launched;
        most_ms[i] = waited.count();
      }
      launches += 5 + (batch.as_graph ? 1 : batch.calls);
      if (i + 1 >= lead || launches > kMostBlockedLaunches) block.unblock();
    }
  }
  stream_.synchronize();
  std::vector<TimingKernels::Reading> readings;
  if (stamps != nullptr) {
    readings.resize(2 * batches.size() * kernels_->multiprocessors());
    C10_CUDA_CHECK(cudaMemcpy(readings.data(), stamps, readings.size() * sizeof(readings[0]),
                              cudaMemcpyDeviceToHost));
  }
  for (size_t i = 0; i < batches.size(); ++i) {
    float elapsed_ms = 0;
    C10_CUDA_CHECK(cudaEventElapsedTime(&elapsed_ms, events_[2 * i], events_[2 * i + 1]));
    const double run_ms = std::min<double>(elapsed_ms, most_ms[i]);
    samples[i].time_ms = run_ms / static_cast<double>(batches[i].calls);
    samples[i].loading_ms = elapsed_ms - run_ms;
    if (stamps == nullptr) continue;
    const size_t count = kernels_->multiprocessors();
    const auto* begin = readings.data() + 2 * i * count;
    samples[i].clock_mhz = TimingKernels::mhz(begin, begin + count, count).value_or(0);
  }
  return samples;
}

}  // namespace cudnn_autotune
