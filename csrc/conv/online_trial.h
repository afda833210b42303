#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "call/torch_bridge.h"
#include "core/choices/turn_schedule.h"
#include "core/cuda/timing_kernels.h"
#include "plan/operands.h"
#include "plan/plan.h"

namespace cudnn_autotune {

// Compares implementations of one problem in the caller's own calls: they take turns, and the
// leader serves the calls in between. A turn is timed with two CUDA events. No call waits for them:
// they are read some calls later. Python decides on a thread of its own which implementations stay
// and when the trial is over.
//
// A trial belongs to one thread, that of the plan cache that holds it, and is destroyed there.
class OnlineTrial {
 public:
  struct StepResult {
    std::shared_ptr<Plan> joins;  // takes part from now on; may be null
    int64_t calls_to_next = 0;    // 1: the next call runs a step; 0: all are done
  };
  // One step of the preparation, such as building and checking one candidate. It runs within a
  // call, on the call's tensors, and may overwrite the one that the operation writes.
  using PreparationStep = std::function<StepResult(const Operands& operands)>;

  // Runs `preparation_step` in the call of this number, 2 or more, and in each that it then asks
  // for.
  OnlineTrial(std::shared_ptr<Plan> first, PreparationStep preparation_step, int64_t first_step);
  ~OnlineTrial();
  OnlineTrial(const OnlineTrial&) = delete;
  OnlineTrial& operator=(const OnlineTrial&) = delete;

  const std::shared_ptr<TurnSchedule>& schedule() const { return schedule_; }
  // Adds an implementation, which has turns from the next round on. It must have run before, since
  // the first run of a kernel loads it.
  void join(std::shared_ptr<Plan> implementation);
  // The choice, or null while undecided.
  std::shared_ptr<Plan> decided() const;

  // The plan that serves this call, which it counts, as long as the trial has not begun; then null:
  // run() serves it. A plan that allocates its result need not be copied until then.
  std::shared_ptr<Plan> before_first_step();
  // Computes the problem with the implementation whose turn it is, on the current stream. One that
  // fails is dropped, and the leader serves the call. Throws what the last implementation that is
  // left throws (PlanError, c10::Error), and what the preparation step throws.
  void run(const Operands& operands);

 private:
  // A measured call whose events may not have passed yet.
  struct Timing {
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
    size_t implementation = 0;
    int64_t round = 0;
  };
  static constexpr size_t kTimings = 64;
  // To query an event costs about as much as to record one, and a query that comes too early has to
  // be repeated. So events are read once kReadFrom are in flight, in one of kReadEvery calls.
  static constexpr size_t kReadFrom = 8;
  static constexpr size_t kReadEvery = 8;

  void prepare(const Operands& operands);
  void read_finished();
  void make_timings();
  void launch(Plan& plan, const Operands& operands, Timing* timing, bool captures);
  // Launches an implementation. If it fails, drops it and returns false, or throws if it was the
  // last one.
  bool try_launch(size_t implementation, const Operands& operands, Timing* timing);

  std::vector<Timing> timings_;  // a ring buffer
  // Null before the first turn, and where the driver does not take them.
  TimingKernels* kernels_ = nullptr;
  size_t oldest_ = 0;
  size_t in_flight_ = 0;
  size_t calls_since_read_ = 0;
  std::vector<std::shared_ptr<Plan>> implementations_;
  PreparationStep preparation_step_;  // empty once the preparation is complete
  const int64_t first_step_;          // the number of the call that runs it first
  int64_t next_step_;                 // the number of the call that runs it next
  std::shared_ptr<TurnSchedule> schedule_ = std::make_shared<TurnSchedule>();
};

}  // namespace cudnn_autotune
