#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <random>
#include <vector>

namespace cudnn_autotune {

// Decides which implementation of an OnlineTrial runs in which call, and collects the measured
// times. The calls of a trial and Python's thread, which judges the times, share it. All methods
// are safe to use from several threads. Implementations are given by their index in the order in
// which they joined; an index that does not exist throws std::out_of_range.
//
// It holds numbers only: no method, nor the destructor, calls CUDA or cuDNN. cuDNN captures a
// stream of its own while it answers a heuristic query, and a cudaDeviceSynchronize in any other
// thread fails meanwhile. So everything but compiling happens on the caller's thread, in
// OnlineTrial.
class TurnSchedule {
 public:
  // One measured call.
  struct Sample {
    size_t implementation;
    int64_t round;  // in a round each active implementation has one turn
    double time_ms;
  };
  // One call that is to be measured.
  struct Turn {
    size_t implementation;
    int64_t round;
  };
  static constexpr int64_t kUndecided = -1;
  static constexpr int64_t kOwnPath = -2;  // PyTorch's own path, which need not have joined

  // Called by Python's thread:

  // Returns the samples reported since the last call, and removes them.
  std::vector<Sample> take_samples();
  // The implementations that failed to run. They have no more turns.
  std::vector<size_t> failures() const;
  // Gives an implementation no more turns.
  void drop(size_t implementation);
  // Sets which implementation serves the calls that are not measured: every second call, and those
  // that cannot be measured (during stream capture, or while all events are in use).
  void set_leader(size_t implementation);
  // Gives nobody a turn, so that the leader serves every call, until another implementation joins
  // or one fails. Does nothing if more than `implementations` have joined already.
  void rest(size_t implementations);
  // Ends the trial. nullopt: PyTorch's own path is the choice. `is_provisional`: it is not final.
  void decide(std::optional<size_t> implementation, bool is_provisional);
  // Whether an implementation failed in a turn because memory was short.
  bool ran_out_of_memory() const { return ran_out_of_memory_.load(std::memory_order_relaxed); }
  // False once the OnlineTrial is destroyed, and no more calls can come.
  bool is_in_use() const { return is_in_use_.load(std::memory_order_acquire); }
  int64_t calls() const { return calls_.load(std::memory_order_relaxed); }
  // How many implementations have joined, dropped ones included.
  size_t implementation_count() const;

  // Called by OnlineTrial, in a caller's thread:

  void join();
  // An implementation's index, kUndecided or kOwnPath.
  int64_t decided() const { return decided_.load(std::memory_order_acquire); }
  // Whether the choice is provisional, once it is decided.
  bool is_provisional() const { return is_provisional_.load(std::memory_order_relaxed); }
  // The turn of this call. nullopt: the leader serves the call, and it is not measured. That is the
  // case for one of every two calls, so that a trial's overhead is halved, and slow implementations
  // run half as often.
  std::optional<Turn> take_turn();
  // The implementation that serves calls without a turn. If it was dropped, another active one
  // takes its place.
  size_t leader();
  void report(const Sample& sample);
  // Records that an implementation failed to run or is wrong, and drops it. If no other is active,
  // all that were dropped for another reason are active again. Returns whether there are any.
  bool fail(size_t implementation);
  // Records that memory was short for one that fails next.
  void run_out_of_memory() { ran_out_of_memory_.store(true, std::memory_order_relaxed); }
  void count_call() { calls_.fetch_add(1, std::memory_order_relaxed); }
  void end() { is_in_use_.store(false, std::memory_order_release); }

 private:
  mutable std::mutex mutex_;
  std::vector<bool> is_active_;
  std::vector<size_t> order_;  // of the turns in this round
  size_t position_ = 0;        // in order_
  int64_t round_ = -1;
  bool is_second_ = true;      // whether the last call was the second of its pair
  bool leads_second_ = false;  // whether the leader serves the second call of this pair
  bool is_resting_ = false;
  size_t leader_ = 0;
  std::vector<Sample> samples_;
  std::vector<size_t> failures_;
  std::minstd_rand random_{std::random_device{}()};
  std::atomic<bool> ran_out_of_memory_{false};
  std::atomic<bool> is_provisional_{false};
  std::atomic<int64_t> decided_{kUndecided};
  std::atomic<int64_t> calls_{0};
  std::atomic<bool> is_in_use_{true};
};

}  // namespace cudnn_autotune
