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
  void put(const ChoiceKey& key, std::string text);
  // Not where anything was forgotten since `forgettings()` was that number: false then.
  bool put_unless_forgotten(const ChoiceKey& key, std::string text, uint64_t forgettings);
  void erase(const ChoiceKey& key);
  // Under every policy. What is being decided by calls is stale as well.
  void erase(const ConvProblem& problem);
  void clear();
  // How often choices were taken back on purpose (a pin, an agreement, a new start): what was found
  // out of a problem meanwhile may be what is not wanted any more.
  uint64_t forgettings() const;

  // Grows whenever a choice that stood was changed or removed: what was cached before is stale.
  uint64_t epoch() const { return epoch_.load(std::memory_order_acquire); }

  // Held while a problem is being tuned: timings do not disturb each other, and two threads that
  // miss on one problem tune it once. Recursive: a strategy may itself run convolutions.
  std::recursive_mutex& tuning_mutex() { return tuning_mutex_; }

 private:
  mutable std::shared_mutex mutex_;
  std::recursive_mutex tuning_mutex_;
  std::unordered_map<ChoiceKey, std::string, ChoiceKeyHash> choices_;
  uint64_t forgettings_ = 0;
  std::atomic<uint64_t> epoch_{0};

  void put_locked(const ChoiceKey& key, std::string text);
};

}  // namespace cudnn_autotune
