#include "online_trial.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <random>
#include <utility>

#include "captured_plans.h"
#include "core/check.h"
#include "other_paths.h"

namespace cudnn_autotune {
namespace {

const at::Tensor& written(const ConvProblem& problem, const at::Tensor& x, const at::Tensor& w,
                          const at::Tensor& y) {
  return problem.op == ConvOp::fprop ? y : problem.op == ConvOp::dgrad ? x : w;
}

}  // namespace

std::vector<TrialLedger::Sample> TrialLedger::take_samples() {
  const std::lock_guard lock(mutex_);
  return std::exchange(samples_, {});
}

std::vector<size_t> TrialLedger::failures() const {
  const std::lock_guard lock(mutex_);
  return failures_;
}

void TrialLedger::drop(size_t way) {
  const std::lock_guard lock(mutex_);
  active_.at(way) = false;
}

void TrialLedger::lead(size_t way) {
  const std::lock_guard lock(mutex_);
  static_cast<void>(active_.at(way));
  leader_ = way;
}

void TrialLedger::decide(std::optional<size_t> way) {
  const std::lock_guard lock(mutex_);
  if (way) static_cast<void>(active_.at(*way));
  decided_.store(way ? static_cast<int64_t>(*way) : kOwnPath, std::memory_order_release);
}

size_t TrialLedger::ways() const {
  const std::lock_guard lock(mutex_);
  return active_.size();
}

void TrialLedger::join() {
  const std::lock_guard lock(mutex_);
  active_.push_back(true);
  has_run_.push_back(false);
}

std::optional<TrialLedger::Turn> TrialLedger::take_turn() {
  const std::lock_guard lock(mutex_);
  // Alone, there is nothing to compare: the first call need not pay for events.
  if (active_.size() < 2) return std::nullopt;
  // Of each two calls one is the leader's, by lot: were it always the first, of two layers that
  // share a problem only one would ever be timed.
  is_second_ = !is_second_;
  if (!is_second_) leads_second_ = std::bernoulli_distribution(0.5)(random_);
  if (is_second_ == leads_second_) return std::nullopt;
  while (position_ < order_.size() && !active_[order_[position_]]) ++position_;
  if (position_ >= order_.size()) {
    order_.clear();
    for (size_t i = 0; i < active_.size(); ++i) {
      if (active_[i]) order_.push_back(i);
    }
    position_ = 0;
    if (order_.empty()) return std::nullopt;
    std::shuffle(order_.begin(), order_.end(), random_);
    ++round_;
  }
  const size_t way = order_[position_++];
  const bool is_first = !has_run_[way];
  has_run_[way] = true;
  return Turn{way, round_, is_first};
}

size_t TrialLedger::leading() {
  const std::lock_guard lock(mutex_);
  if (!active_.at(leader_)) {
    const auto other = std::find(active_.begin(), active_.end(), true);
    if (other != active_.end()) leader_ = static_cast<size_t>(other - active_.begin());
  }
  return leader_;
}

void TrialLedger::report(const Sample& sample) {
  const std::lock_guard lock(mutex_);
  static_cast<void>(active_.at(sample.way));
  samples_.push_back(sample);
}

bool TrialLedger::fail(size_t way) {
  const std::lock_guard lock(mutex_);
  active_.at(way) = false;
  failures_.push_back(way);
  return std::find(active_.begin(), active_.end(), true) != active_.end();
}

OnlineTrial::OnlineTrial(Way first, Chore chore) : chore_(std::move(chore)) {
  join(std::move(first));
}

OnlineTrial::~OnlineTrial() {
  ledger_->end();
  for (const Timing& timing : timings_) {
    static_cast<void>(cudaEventDestroy(timing.begin));
    static_cast<void>(cudaEventDestroy(timing.end));
  }
}

void OnlineTrial::join(Way way) {
  ways_.push_back(std::move(way));
  ledger_->join();
}

const OnlineTrial::Way* OnlineTrial::decided() const {
  static const auto* own_path = new Way{kAten, nullptr};
  const int64_t way = ledger_->decided();
  if (way == TrialLedger::kUndecided) return nullptr;
  return way == TrialLedger::kOwnPath ? own_path : &ways_[static_cast<size_t>(way)];
}

void OnlineTrial::do_chore(const at::Tensor& x, const at::Tensor& w, const at::Tensor& y) {
  // The first call costs what it costs without a trial.
  if (!chore_ || ledger_->calls() < 2) return;
  // A chore allocates, loads and waits, while another thread may be capturing.
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  // And a backward may run under autocast, which would recast what is compared.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  // It is over where it throws, and it may run this very problem.
  Chore chore = std::exchange(chore_, nullptr);
  Done done = chore(x, w, y);
  if (done.joins) join(*std::move(done.joins));
  if (done.is_more) chore_ = std::move(chore);
}

void OnlineTrial::read_finished() {
  // Many at once: each look costs about as much as an event, and a look that comes too early twice.
  if (in_flight_ < kReadAt || ++calls_since_look_ < kLookEvery) return;
  calls_since_look_ = 0;
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
    if (timing.reported) ledger_->report({timing.way, timing.round, time_ms});
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

void OnlineTrial::launch(const Way& way, const ConvProblem& problem, const at::Tensor& x,
                         const at::Tensor& w, const at::Tensor& y, Timing* timing, bool captures) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  // Before the first event: an idle GPU would wait for it in between.
  c10::DataPtr workspace;
  cudnnHandle_t handle = nullptr;
  if (way.plan != nullptr) {
    workspace = workspace_of(*way.plan, captures);
    handle = current_handle();
  }
  if (timing != nullptr) C10_CUDA_CHECK(cudaEventRecord(timing->begin, stream));
  at::Tensor result;
  if (way.plan != nullptr) {
    way.plan->execute(handle, pointers(x, w, y), workspace.get());
  } else if (way.text == kMatmul) {
    run_matmul(problem, x, w, y);
  } else {
    result = run_aten(problem, x, w, y);
  }
  if (timing != nullptr) C10_CUDA_CHECK(cudaEventRecord(timing->end, stream));
  // ATen brings memory of its own; the copy is not part of its time.
  if (result.defined()) written(problem, x, w, y).copy_(result);
}

bool OnlineTrial::serves(size_t way, const ConvProblem& problem, const at::Tensor& x,
                         const at::Tensor& w, const at::Tensor& y, Timing* timing) {
  try {
    launch(ways_[way], problem, x, w, y, timing, false);
    return true;
  } catch (const CudnnError&) {
    if (!ledger_->fail(way)) throw;
  } catch (const c10::Error&) {
    // No memory for its workspace, or cuBLAS or ATen refuse.
    if (!ledger_->fail(way)) throw;
  }
  return false;
}

void OnlineTrial::run(const ConvProblem& problem, const at::Tensor& x, const at::Tensor& w,
                      const at::Tensor& y) {
  ledger_->count_call();
  if (is_capturing()) {
    const Way& leader = ways_[ledger_->leading()];
    keep_for_graphs(leader.plan);
    launch(leader, problem, x, w, y, nullptr, true);
    return;
  }
  do_chore(x, w, y);
  read_finished();
  const auto turn = in_flight_ < kTimings ? ledger_->take_turn() : std::nullopt;
  if (turn) {
    if (timings_.empty()) make_timings();
    Timing& timing = timings_[(oldest_ + in_flight_) % kTimings];
    timing.way = turn->way;
    timing.round = turn->round;
    timing.reported = !turn->is_first;
    if (serves(turn->way, problem, x, w, y, &timing)) {
      ++in_flight_;
      return;
    }
  }
  while (!serves(ledger_->leading(), problem, x, w, y, nullptr)) {
  }
}

}  // namespace cudnn_autotune
