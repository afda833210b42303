#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "core/choice_table.h"
#include "core/conv_plan.h"
#include "core/conv_problem.h"
#include "torch_bridge.h"

namespace cudnn_autotune {

// Ways of computing one problem that take turns in the caller's own calls. Each call is timed
// between two events that nobody waits for; they are read when they have long passed. Which ways
// stay, and when it is over, the policy (Python) decides on a thread of its own.
//
// run() belongs to one thread, that of the plan cache that holds the trial; all else to any.
class OnlineTrial {
 public:
  struct Way {
    std::string text;                // an engine config, kAten or kMatmul
    std::shared_ptr<ConvPlan> plan;  // null for the latter two
  };
  struct Sample {
    size_t way;
    int64_t round;  // all ways of a round ran one after the other
    double time_ms;
  };

  explicit OnlineTrial(Way first);
  ~OnlineTrial();
  OnlineTrial(const OnlineTrial&) = delete;
  OnlineTrial& operator=(const OnlineTrial&) = delete;

  // More ways join the next round. Each one's first call is not reported: it loads the kernel.
  void offer(std::vector<Way> ways);
  std::vector<Sample> take_samples();
  // Ways that failed to run, and were dropped by themselves.
  std::vector<size_t> failures() const;
  void drop(size_t way);
  // Who serves calls that cannot be timed (under capture, or while all events are in flight).
  void lead(size_t way);
  void decide(size_t way);

  // Null while undecided. The way stays where it is.
  const Way* decided() const { return decided_.load(std::memory_order_acquire); }
  int64_t calls() const { return calls_.load(std::memory_order_relaxed); }

  // Computes the problem by the way whose turn it is. A way that fails is dropped, and the leader
  // serves the call. Throws what the leader throws.
  void run(const ConvProblem& problem, const at::Tensor& x, const at::Tensor& w,
           const at::Tensor& y);

 private:
  struct Timing {
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
    size_t way = 0;
    int64_t round = 0;
    bool reported = true;
  };
  static constexpr size_t kTimings = 64;

  void read_finished();
  void make_timings();
  struct Turn {
    size_t number = 0;
    const Way* way = nullptr;
    int64_t round = 0;
    bool is_first = false;
  };
  std::optional<Turn> take_turn();
  const Way& leading();
  void launch(const Way& way, const ConvProblem& problem, const at::Tensor& x, const at::Tensor& w,
              const at::Tensor& y, Timing* timing);

  // The calling thread's.
  std::vector<Timing> timings_;  // a ring
  size_t oldest_ = 0;
  size_t in_flight_ = 0;

  mutable std::mutex mutex_;
  std::deque<Way> ways_;  // addresses stay: a known way may be read without the lock
  std::vector<bool> active_;
  std::vector<bool> has_run_;
  std::vector<size_t> order_;
  size_t position_ = 0;
  int64_t round_ = -1;
  size_t leader_ = 0;
  std::vector<Sample> samples_;
  std::vector<size_t> failures_;
  std::minstd_rand random_;
  std::atomic<const Way*> decided_{nullptr};
  std::atomic<int64_t> calls_{0};
};

}  // namespace cudnn_autotune
