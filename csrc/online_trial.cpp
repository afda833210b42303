#include "online_trial.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <set>
#include <utility>

#include "core/check.h"
#include "other_paths.h"

namespace cudnn_autotune {
namespace {

const at::Tensor& written(const ConvProblem& problem, const at::Tensor& x, const at::Tensor& w,
                          const at::Tensor& y) {
  return problem.op == ConvOp::fprop ? y : problem.op == ConvOp::dgrad ? x : w;
}

// A graph replays a plan's kernels, which may be unloaded with the plan; and a trial drops plans as
// a matter of course. So those that were captured stay.
void keep_for_graphs(const std::shared_ptr<ConvPlan>& plan) {
  if (plan == nullptr) return;
  static std::mutex mutex;
  static auto* captured = new std::set<std::shared_ptr<ConvPlan>>();
  const std::lock_guard lock(mutex);
  captured->insert(plan);
}

}  // namespace

OnlineTrial::OnlineTrial(Way first) : random_(std::random_device{}()) { offer({std::move(first)}); }

OnlineTrial::~OnlineTrial() {
  for (const Timing& timing : timings_) {
    static_cast<void>(cudaEventDestroy(timing.begin));
    static_cast<void>(cudaEventDestroy(timing.end));
  }
}

void OnlineTrial::offer(std::vector<Way> ways) {
  const std::lock_guard lock(mutex_);
  for (Way& way : ways) {
    ways_.push_back(std::move(way));
    active_.push_back(true);
    has_run_.push_back(false);
  }
}

std::vector<OnlineTrial::Sample> OnlineTrial::take_samples() {
  const std::lock_guard lock(mutex_);
  return std::exchange(samples_, {});
}

std::vector<size_t> OnlineTrial::failures() const {
  const std::lock_guard lock(mutex_);
  return failures_;
}

void OnlineTrial::drop(size_t way) {
  const std::lock_guard lock(mutex_);
  active_.at(way) = false;
}

void OnlineTrial::lead(size_t way) {
  const std::lock_guard lock(mutex_);
  static_cast<void>(ways_.at(way));
  leader_ = way;
}

void OnlineTrial::decide(size_t way) {
  const std::lock_guard lock(mutex_);
  decided_.store(&ways_.at(way), std::memory_order_release);
}

void OnlineTrial::read_finished() {
  if (in_flight_ == 0) return;
  // Another thread may be capturing: a query would break its capture.
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  while (in_flight_ > 0) {
    const Timing& timing = timings_[oldest_];
    float time_ms = 0;
    const cudaError_t status = cudaEventElapsedTime(&time_ms, timing.begin, timing.end);
    if (status == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());
      return;
    }
    C10_CUDA_CHECK(status);
    oldest_ = (oldest_ + 1) % kTimings;
    --in_flight_;
    if (!timing.reported) continue;
    const std::lock_guard lock(mutex_);
    samples_.push_back({timing.way, timing.round, time_ms});
  }
}

void OnlineTrial::make_timings() {
  std::vector<Timing> timings(kTimings);
  for (Timing& timing : timings) {
    C10_CUDA_CHECK(cudaEventCreate(&timing.begin));
    C10_CUDA_CHECK(cudaEventCreate(&timing.end));
  }
  timings_ = std::move(timings);
}

std::optional<OnlineTrial::Turn> OnlineTrial::take_turn() {
  const std::lock_guard lock(mutex_);
  // Alone, there is nothing to compare: the first call need not pay for events.
  if (ways_.size() < 2) return std::nullopt;
  while (position_ < order_.size() && !active_[order_[position_]]) ++position_;
  if (position_ >= order_.size()) {
    order_.clear();
    for (size_t i = 0; i < ways_.size(); ++i) {
      if (active_[i]) order_.push_back(i);
    }
    position_ = 0;
    if (order_.empty()) return std::nullopt;
    std::shuffle(order_.begin(), order_.end(), random_);
    ++round_;
  }
  const size_t number = order_[position_++];
  const bool is_first = !has_run_[number];
  has_run_[number] = true;
  return Turn{number, &ways_[number], round_, is_first};
}

const OnlineTrial::Way& OnlineTrial::leading() {
  const std::lock_guard lock(mutex_);
  if (!active_[leader_]) {
    const auto other = std::find(active_.begin(), active_.end(), true);
    if (other != active_.end()) leader_ = static_cast<size_t>(other - active_.begin());
  }
  return ways_[leader_];
}

void OnlineTrial::launch(const Way& way, const ConvProblem& problem, const at::Tensor& x,
                         const at::Tensor& w, const at::Tensor& y, Timing* timing) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  if (timing != nullptr) C10_CUDA_CHECK(cudaEventRecord(timing->begin, stream));
  at::Tensor result;
  if (way.plan != nullptr) {
    execute(*way.plan, pointers(x, w, y));
  } else if (way.text == kMatmul) {
    run_matmul(problem, x, w, y);
  } else {
    result = run_aten(problem, x, w, y);
  }
  if (timing != nullptr) C10_CUDA_CHECK(cudaEventRecord(timing->end, stream));
  // ATen brings memory of its own; the copy is not part of its time.
  if (result.defined()) written(problem, x, w, y).copy_(result);
}

void OnlineTrial::run(const ConvProblem& problem, const at::Tensor& x, const at::Tensor& w,
                      const at::Tensor& y) {
  calls_.fetch_add(1, std::memory_order_relaxed);
  if (is_capturing()) {
    const Way& leader = leading();
    keep_for_graphs(leader.plan);
    launch(leader, problem, x, w, y, nullptr);
    return;
  }
  read_finished();
  const auto turn = in_flight_ < kTimings ? take_turn() : std::nullopt;
  if (turn) {
    if (timings_.empty()) make_timings();
    Timing& timing = timings_[(oldest_ + in_flight_) % kTimings];
    timing.way = turn->number;
    timing.round = turn->round;
    timing.reported = !turn->is_first;
    try {
      launch(*turn->way, problem, x, w, y, &timing);
      ++in_flight_;
      return;
    } catch (const CudnnError&) {
      // Dropped below; the leader serves the call.
    } catch (const c10::Error&) {
      // No memory for its workspace, or cuBLAS or ATen refuse.
    }
    const std::lock_guard lock(mutex_);
    active_[turn->number] = false;
    failures_.push_back(turn->number);
  }
  launch(leading(), problem, x, w, y, nullptr);
}

}  // namespace cudnn_autotune
