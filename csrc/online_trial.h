#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
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

// Whose turn it is, how long turns took, and what was decided of it: what the calls of a trial and
// the policy's own thread share. It holds numbers only. No method, nor its destruction, calls CUDA
// or cuDNN: cuDNN captures streams of its own, and another thread's cudaDeviceSynchronize fails
// meanwhile; so all of that is left to the caller's thread.
class TrialLedger {
 public:
  struct Sample {
    size_t way;
    int64_t round;  // all ways of a round ran one after the other
    double time_ms;
  };
  struct Turn {
    size_t way;
    int64_t round;
    bool is_first;
  };
  static constexpr int64_t kUndecided = -1;
  static constexpr int64_t kOwnPath = -2;  // PyTorch's, whether or not it is one of the ways

  // The policy's.
  std::vector<Sample> take_samples();
  // Ways that failed to run, and were dropped by themselves.
  std::vector<size_t> failures() const;
  void drop(size_t way);
  // Who serves the calls that are nobody's turn: one of each two, and those that cannot be timed
  // (under capture, or while all events are in flight).
  void lead(size_t way);
  // Nothing: PyTorch's own path.
  void decide(std::optional<size_t> way);
  // False once no call can come any more.
  bool is_in_use() const { return is_in_use_.load(std::memory_order_acquire); }
  int64_t calls() const { return calls_.load(std::memory_order_relaxed); }
  // How many have joined.
  size_t ways() const;

  // The caller's.
  void join();
  int64_t decided() const { return decided_.load(std::memory_order_acquire); }
  // None: the call is the leader's, and not timed. So is one of each two: a trial then costs half
  // as much a call, and what is slow serves half as often.
  std::optional<Turn> take_turn();
  size_t leading();
  void report(const Sample& sample);
  // Whether another way is left.
  bool fail(size_t way);
  void count_call() { calls_.fetch_add(1, std::memory_order_relaxed); }
  void end() { is_in_use_.store(false, std::memory_order_release); }

 private:
  mutable std::mutex mutex_;
  std::vector<bool> active_;
  std::vector<bool> has_run_;
  std::vector<size_t> order_;
  size_t position_ = 0;
  int64_t round_ = -1;
  bool is_second_ = true;      // of a pair of calls, the last one
  bool leads_second_ = false;  // of the pair, the leader's
  size_t leader_ = 0;
  std::vector<Sample> samples_;
  std::vector<size_t> failures_;
  std::minstd_rand random_{std::random_device{}()};
  std::atomic<int64_t> decided_{kUndecided};
  std::atomic<int64_t> calls_{0};
  std::atomic<bool> is_in_use_{true};
};

// Ways of computing one problem that take turns in the caller's own calls, the leader in between.
// A turn is timed between two events that nobody waits for; they are read when they have long
// passed. Which ways stay, and when it is over, the policy (Python) decides on a thread of its own.
//
// It belongs to one thread, that of the plan cache that holds it, and is destroyed there.
class OnlineTrial {
 public:
  struct Way {
    std::string text;                // an engine config, kAten or kMatmul
    std::shared_ptr<ConvPlan> plan;  // null for the latter two
  };
  // A piece of what is still to be prepared, done within a call on the call's own tensors, of
  // which the one that is written may be overwritten.
  struct Done {
    std::optional<Way> joins;
    bool is_more = false;
  };
  using Chore = std::function<Done(const at::Tensor& x, const at::Tensor& w, const at::Tensor& y)>;

  // The chore is called once a call, from the second on, until there is no more.
  OnlineTrial(Way first, Chore chore);
  ~OnlineTrial();
  OnlineTrial(const OnlineTrial&) = delete;
  OnlineTrial& operator=(const OnlineTrial&) = delete;

  const std::shared_ptr<TrialLedger>& ledger() const { return ledger_; }
  // Takes part from the next round on. Its first call is not reported: it loads the kernel.
  void join(Way way);
  // Null while undecided. The way lives as long as the trial.
  const Way* decided() const;

  // Computes the problem by the way whose turn it is. A way that fails is dropped, and the leader
  // serves the call. Throws what the last way and the chore throw.
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
  static constexpr size_t kReadAt = 8;
  static constexpr size_t kLookEvery = 8;

  void do_chore(const at::Tensor& x, const at::Tensor& w, const at::Tensor& y);
  void read_finished();
  void make_timings();
  void launch(const Way& way, const ConvProblem& problem, const at::Tensor& x, const at::Tensor& w,
              const at::Tensor& y, Timing* timing, bool captures);
  // False where the way fails: it is dropped then. Throws what the last one throws.
  bool serves(size_t way, const ConvProblem& problem, const at::Tensor& x, const at::Tensor& w,
              const at::Tensor& y, Timing* timing);

  std::vector<Timing> timings_;  // a ring
  size_t oldest_ = 0;
  size_t in_flight_ = 0;
  size_t calls_since_look_ = 0;
  std::deque<Way> ways_;  // addresses stay
  Chore chore_;           // empty when all is prepared
  std::shared_ptr<TrialLedger> ledger_ = std::make_shared<TrialLedger>();
};

}  // namespace cudnn_autotune
