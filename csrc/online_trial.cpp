#include "online_trial.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "other_paths.h"

namespace cudnn_autotune {
namespace {

const at::Tensor& written(const ConvProblem& problem, const at::Tensor& x, const at::Tensor& w,
                          const at::Tensor& y) {
  return problem.op == ConvOp::fprop ? y : problem.op == ConvOp::dgrad ? x : w;
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
  while (in_flight_ > 0) {
    Timing& timing = timings_[oldest_];
    const cudaError_t status = cudaEventQuery(timing.end);
    if (status == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());
      return;
    }
    C10_CUDA_CHECK(status);
    oldest_ = (oldest_ + 1) % kTimings;
    --in_flight_;
    if (!timing.reported) continue;
    float time_ms = 0;
    C10_CUDA_CHECK(cudaEventElapsedTime(&time_ms, timing.begin, timing.end));
    const std::lock_guard lock(mutex_);
    samples_.push_back({timing.way, timing.round, time_ms});
  }
}

bool OnlineTrial::take_turn(size_t& way, int64_t& round, bool& is_first) {
  const std::lock_guard lock(mutex_);
  while (position_ < order_.size() && !active_[order_[position_]]) ++position_;
  if (position_ >= order_.size()) {
    order_.clear();
    for (size_t i = 0; i < ways_.size(); ++i) {
      if (active_[i]) order_.push_back(i);
    }
    if (order_.empty()) return false;
    std::shuffle(order_.begin(), order_.end(), random_);
    position_ = 0;
    ++round_;
  }
  way = order_[position_++];
  round = round_;
  is_first = !has_run_[way];
  has_run_[way] = true;
  return true;
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
  const bool capturing = is_capturing();
  if (!capturing) read_finished();
  size_t turn = 0;
  int64_t round = 0;
  bool is_first = false;
  if (!capturing && in_flight_ < kTimings && take_turn(turn, round, is_first)) {
    if (timings_.empty()) {
      timings_.resize(kTimings);
      for (Timing& timing : timings_) {
        C10_CUDA_CHECK(cudaEventCreate(&timing.begin));
        C10_CUDA_CHECK(cudaEventCreate(&timing.end));
      }
    }
    Timing& timing = timings_[(oldest_ + in_flight_) % kTimings];
    timing.way = turn;
    timing.round = round;
    timing.reported = !is_first;
    try {
      launch(ways_[turn], problem, x, w, y, &timing);
      ++in_flight_;
      return;
    } catch (const CudnnError&) {
      // Dropped below; the leader serves the call.
    } catch (const c10::OutOfMemoryError&) {
      // Its workspace cannot be had.
    }
    const std::lock_guard lock(mutex_);
    active_[turn] = false;
    failures_.push_back(turn);
  }
  const Way* leader = nullptr;
  {
    const std::lock_guard lock(mutex_);
    leader = &ways_[leader_];
  }
  launch(*leader, problem, x, w, y, nullptr);
}

}  // namespace cudnn_autotune
