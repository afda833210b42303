#include "conv/online_trial.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <utility>

#include "core/cuda/cuda_driver.h"
#include "core/cuda/graph_lifetime.h"
#include "core/problem/check.h"
#include "plan/pytorch_plans.h"

namespace cudnn_autotune {

namespace {

// About twice what the host takes to enqueue an engine between two events.
constexpr uint64_t kDelayNs = 20'000;

// Whether nothing is left to be done on a stream.
bool is_idle(cudaStream_t stream) {
  // In CUDA's default mode a query would break the capture of another thread.
  const RelaxedCapture relaxed;
  return went_well(cudaStreamQuery(stream));
}

}  // namespace

OnlineTrial::OnlineTrial(std::shared_ptr<Plan> first, PreparationStep preparation_step,
                         int64_t first_step)
    : preparation_step_(std::move(preparation_step)),
      first_step_(first_step),
      next_step_(first_step) {
  join(std::move(first));
}

OnlineTrial::~OnlineTrial() {
  schedule_->end();
  for (const Timing& timing : timings_) {
    static_cast<void>(cudaEventDestroy(timing.begin));
    static_cast<void>(cudaEventDestroy(timing.end));
  }
}

void OnlineTrial::join(std::shared_ptr<Plan> implementation) {
  implementations_.push_back(std::move(implementation));
  schedule_->join();
}

std::shared_ptr<Plan> OnlineTrial::decided() const {
  const int64_t decided = schedule_->decided();
  if (decided == TurnSchedule::kUndecided) return nullptr;
  if (decided == TurnSchedule::kOwnPath) {
    return std::make_shared<OwnPathPlan>(implementations_.front()->problem());
  }
  return implementations_[static_cast<size_t>(decided)];
}

std::shared_ptr<Plan> OnlineTrial::before_first_step() {
  if (schedule_->calls() + 1 >= first_step_) return nullptr;
  schedule_->count_call();
  return implementations_.front();
}

void OnlineTrial::prepare(const Operands& operands) {
  // A problem that is called only once costs no more than it does without a trial.
  if (!preparation_step_ || schedule_->calls() < next_step_) return;
  // The step allocates, loads kernels and waits. In CUDA's default capture mode that would break
  // the capture of another thread.
  const RelaxedCapture relaxed;
  // In a backward, autocast may be active: it would cast the operands of what is compared.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  // The step is taken out of the member while it runs, because it may run this very problem, and
  // so that a step that throws is the last one.
  PreparationStep step = std::exchange(preparation_step_, nullptr);
  StepResult result = step(operands);
  if (result.joins) join(std::move(result.joins));
  if (result.calls_to_next == 0) return;
  next_step_ = schedule_->calls() + result.calls_to_next;
  preparation_step_ = std::move(step);
}

void OnlineTrial::read_finished() {
  if (in_flight_ < kReadFrom || ++calls_since_read_ < kReadEvery) return;
  calls_since_read_ = 0;
  // In CUDA's default capture mode an event query would break the capture of another thread.
  const RelaxedCapture relaxed;
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
    schedule_->report({timing.implementation, timing.round, time_ms});
  }
}

void OnlineTrial::make_timings() {
  std::vector<Timing> timings(kTimings);
  for (Timing& timing : timings) {
    C10_CUDA_CHECK(cudaEventCreate(&timing.begin));
    C10_CUDA_CHECK(cudaEventCreate(&timing.end));
  }
  timings_ = std::move(timings);
  const RelaxedCapture relaxed;
  kernels_ = TimingKernels::of_current_device();
}

void OnlineTrial::launch(Plan& plan, const Operands& operands, Timing* timing, bool captures) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  // On an idle GPU the host's time between the two events would count as the kernel's. So the
  // workspace is taken before them, and the GPU kept busy.
  const c10::DataPtr workspace = workspace_of(plan.workspace_bytes(), captures);
  if (timing != nullptr) {
    if (kernels_ != nullptr && is_idle(stream)) kernels_->delay(stream, kDelayNs);
    C10_CUDA_CHECK(cudaEventRecord(timing->begin, stream));
  }
  const at::Tensor result = plan.launch(operands, workspace.get());
  if (timing != nullptr) C10_CUDA_CHECK(cudaEventRecord(timing->end, stream));
  // The copy is not part of the measured time.
  if (result.defined()) operands.result(plan.problem().op).copy_(result);
}

bool OnlineTrial::try_launch(size_t implementation, const Operands& operands, Timing* timing) {
  try {
    launch(*implementations_[implementation], operands, timing, false);
    return true;
  } catch (const PlanError&) {
    if (!schedule_->fail(implementation)) throw;
  } catch (const c10::OutOfMemoryError&) {
    schedule_->run_out_of_memory();
    if (!schedule_->fail(implementation)) throw;
  } catch (const c10::Error&) {
    // cuBLAS or ATen refuse the problem.
    if (!schedule_->fail(implementation)) throw;
  }
  return false;
}

void OnlineTrial::run(const Operands& operands) {
  schedule_->count_call();
  if (is_capturing()) {
    const auto& leader = implementations_[schedule_->leader()];
    keep_for_graph(c10::cuda::getCurrentCUDAStream().stream(), leader);
    launch(*leader, operands, nullptr, true);
    return;
  }
  prepare(operands);
  read_finished();
  const auto turn = in_flight_ < kTimings ? schedule_->take_turn() : std::nullopt;
  if (turn) {
    if (timings_.empty()) make_timings();
    Timing& timing = timings_[(oldest_ + in_flight_) % kTimings];
    timing.implementation = turn->implementation;
    timing.round = turn->round;
    if (try_launch(turn->implementation, operands, &timing)) {
      ++in_flight_;
      return;
    }
  }
  while (!try_launch(schedule_->leader(), operands, nullptr)) {
  }
}

}  // namespace cudnn_autotune
