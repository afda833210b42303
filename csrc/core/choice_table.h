#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "core/conv_problem.h"

namespace cudnn_autotune {

// The text of a choice that is not cuDNN's: what PyTorch itself would run.
constexpr const char* kAten = "aten";

// As of when something is known of one problem's choices. Whether it still holds is seen without a
// lock, and does not depend on other problems. One that no ChoiceTable gave never holds.
class Standing {
 public:
  Standing() = default;

  // Whether no choice of the problem, under any policy, was changed or removed since.
  bool holds() const {
    return history_ != nullptr && history_->changes.load(std::memory_order_acquire) == changes_;
  }

 private:
  friend class ChoiceTable;

  // Of one problem. Only grows, and only under the table's lock.
  struct History {
    std::atomic<uint64_t> changes{0};
    // Those on purpose (a pin, an agreement, a new start): what was being found out of the problem
    // meanwhile may be what is not wanted any more.
    std::atomic<uint64_t> forgettings{0};
  };

  explicit Standing(const std::shared_ptr<History>& history)
      : history_(history), changes_(history->changes), forgettings_(history->forgettings) {}

  bool was_forgotten() const {
    return history_ == nullptr || history_->forgettings.load() != forgettings_;
  }

  std::shared_ptr<const History> history_;
  uint64_t changes_ = 0;
  uint64_t forgettings_ = 0;
};

// Process-wide: (problem, policy) -> the text of the chosen engine config, or kAten.
class ChoiceTable {
 public:
  struct Found {
    std::optional<std::string> text;  // nullopt: nothing is chosen
    Standing standing;                // of this very answer
  };

  static ChoiceTable& instance();

  Found find(const ChoiceKey& key);
  // Not where the problem was forgotten since `asked`: what is returned does not hold then. Else it
  // is that of the choice.
  Standing put_unless_forgotten(const ChoiceKey& key, std::string text, const Standing& asked);
  // Not where another text has taken its place.
  void erase(const ChoiceKey& key, const std::string& text);
  // Under every policy. What is being decided by calls is stale as well.
  void forget(const ConvProblem& problem);
  void forget_all();

  // Held while a problem is being tuned: timings do not disturb each other, and two threads that
  // miss on one problem tune it once. Recursive: a strategy may itself run convolutions.
  std::recursive_mutex& tuning_mutex() { return tuning_mutex_; }

 private:
  using History = Standing::History;

  std::mutex mutex_;
  std::recursive_mutex tuning_mutex_;
  std::unordered_map<ChoiceKey, std::string, ChoiceKeyHash> choices_;
  // By problem alone; of each that somebody has asked for since all was forgotten.
  std::unordered_map<ChoiceKey, std::shared_ptr<History>, ChoiceKeyHash> histories_;

  const std::shared_ptr<History>& history_locked(const ConvProblem& problem);
};

}  // namespace cudnn_autotune
