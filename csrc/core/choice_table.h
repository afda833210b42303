#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <unordered_map>

#include "core/conv_problem.h"

namespace cudnn_autotune {

// The text of a choice that is not cuDNN's: what PyTorch itself would run.
constexpr const char* kAten = "aten";

// Process-wide: (problem, policy) -> the text of the chosen engine config, or kAten.
class ChoiceTable {
 public:
  static ChoiceTable& instance();

  std::optional<std::string> find(const ChoiceKey& key) const;
  // Not where the problem was forgotten since forgettings() was that number: nullopt then. Else the
  // epoch as of which the choice stands.
  std::optional<uint64_t> put_unless_forgotten(const ChoiceKey& key, std::string text,
                                               uint64_t forgettings);
  void erase(const ChoiceKey& key);
  // Under every policy. What is being decided by calls is stale as well.
  void erase(const ConvProblem& problem);
  void clear();
  // How often a problem's choices were taken back on purpose (a pin, an agreement, a new start):
  // what was found out of it meanwhile may be what is not wanted any more.
  uint64_t forgettings(const ConvProblem& problem) const;
  // As put_unless_forgotten, without a choice.
  std::optional<uint64_t> epoch_unless_forgotten(const ConvProblem& problem,
                                                 uint64_t forgettings) const;

  // Grows whenever a choice that stood was changed or removed: what was cached before is stale.
  uint64_t epoch() const { return epoch_.load(std::memory_order_acquire); }

  // Held while a problem is being tuned: timings do not disturb each other, and two threads that
  // miss on one problem tune it once. Recursive: a strategy may itself run convolutions.
  std::recursive_mutex& tuning_mutex() { return tuning_mutex_; }

 private:
  mutable std::shared_mutex mutex_;
  std::recursive_mutex tuning_mutex_;
  std::unordered_map<ChoiceKey, std::string, ChoiceKeyHash> choices_;
  uint64_t forgettings_ = 0;                                               // of all problems
  std::unordered_map<ChoiceKey, uint64_t, ChoiceKeyHash> forgettings_of_;  // by problem alone
  std::atomic<uint64_t> epoch_{0};

  uint64_t forgettings_locked(const ConvProblem& problem) const;
};

}  // namespace cudnn_autotune
