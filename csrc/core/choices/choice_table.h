#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "core/problem/conv_problem.h"

namespace cudnn_autotune {

// The version of one problem's choices at the moment when one of them was looked up. It tells
// whether the answer is still valid. A version that no ChoiceTable gave is never current.
class ChoiceVersion {
 public:
  ChoiceVersion() = default;

  // Whether no choice of this problem, under any policy, was changed or removed since. Takes no
  // lock, and changes of other problems do not matter.
  bool is_current() const {
    return counters_ != nullptr && counters_->changes.load(std::memory_order_acquire) == changes_;
  }

 private:
  friend class ChoiceTable;

  // Counters of one problem. They only grow, and change only under the table's lock.
  struct Counters {
    std::atomic<uint64_t> changes{0};      // choices changed or removed, forgetting included
    std::atomic<uint64_t> forgettings{0};  // calls of forget() or forget_all()
  };

  explicit ChoiceVersion(const std::shared_ptr<Counters>& counters)
      : counters_(counters), changes_(counters->changes), forgettings_(counters->forgettings) {}

  bool was_forgotten() const {
    return counters_ == nullptr || counters_->forgettings.load() != forgettings_;
  }

  std::shared_ptr<const Counters> counters_;
  uint64_t changes_ = 0;
  uint64_t forgettings_ = 0;
};

// What was chosen in this process: (problem, policy) -> the text of a candidate
// (build_plan.h). All methods are safe to use from several threads.
class ChoiceTable {
 public:
  struct Found {
    std::optional<std::string> text;  // nullopt: nothing is chosen yet
    ChoiceVersion version;            // valid as long as this answer is
  };

  static ChoiceTable& instance();

  Found find(const ChoiceKey& key);
  // Records a choice and returns its version, unless the problem was forgotten since `asked`: a
  // user who pins an engine during a search does not want the result of that search. Then nothing
  // is recorded, and the version that is returned is not current.
  ChoiceVersion put_unless_forgotten(const ChoiceKey& key, std::string text,
                                     const ChoiceVersion& asked);
  // Removes a choice, unless another text has replaced `text` meanwhile.
  void erase(const ChoiceKey& key, const std::string& text);
  // Removes the choices of a problem under every policy. Searches and trials of it that are under
  // way can record nothing any more.
  void forget(const ConvProblem& problem);
  void forget_all();

  // How often a choice of any problem was changed or removed.
  uint64_t changes() const { return changes_.load(std::memory_order_acquire); }

  // Held while a problem is tuned, so that searches do not disturb each other's timings and two
  // threads that miss the same problem tune it once. It is recursive because a sampling strategy
  // may itself run convolutions.
  std::recursive_mutex& tuning_mutex() { return tuning_mutex_; }

 private:
  using Counters = ChoiceVersion::Counters;

  std::mutex mutex_;
  std::recursive_mutex tuning_mutex_;
  std::unordered_map<ChoiceKey, std::string, ChoiceKeyHash> choices_;
  // By problem (the key's policy is the default one), for each problem that was looked up since
  // the last forget_all().
  std::unordered_map<ChoiceKey, std::shared_ptr<Counters>, ChoiceKeyHash> counters_;

  std::atomic<uint64_t> changes_{0};

  // The caller of both holds the lock.
  const std::shared_ptr<Counters>& counters_of(const ConvProblem& problem);
  void count_change(Counters& counters);
};

}  // namespace cudnn_autotune
