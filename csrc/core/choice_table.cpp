#include "core/choice_table.h"

#include <iterator>
#include <utility>

namespace cudnn_autotune {

ChoiceTable& ChoiceTable::instance() {
  // Never destroyed: threads may still be running at exit.
  static auto* table = new ChoiceTable();
  return *table;
}

std::optional<std::string> ChoiceTable::find(const ChoiceKey& key) const {
  const std::shared_lock lock(mutex_);
  const auto found = choices_.find(key);
  if (found == choices_.end()) return std::nullopt;
  return found->second;
}

void ChoiceTable::put(const ChoiceKey& key, std::string text) {
  const std::unique_lock lock(mutex_);
  const auto [entry, is_new] = choices_.try_emplace(key, text);
  if (is_new || entry->second == text) return;
  entry->second = std::move(text);
  epoch_.fetch_add(1, std::memory_order_release);
}

void ChoiceTable::erase(const ChoiceKey& key) {
  const std::unique_lock lock(mutex_);
  if (choices_.erase(key) > 0) epoch_.fetch_add(1, std::memory_order_release);
}

void ChoiceTable::erase(const ConvProblem& problem) {
  const std::unique_lock lock(mutex_);
  for (auto entry = choices_.begin(); entry != choices_.end();) {
    entry = entry->first.problem == problem ? choices_.erase(entry) : std::next(entry);
  }
  epoch_.fetch_add(1, std::memory_order_release);
}

void ChoiceTable::clear() {
  const std::unique_lock lock(mutex_);
  choices_.clear();
  epoch_.fetch_add(1, std::memory_order_release);
}

size_t ChoiceTable::size() const {
  const std::shared_lock lock(mutex_);
  return choices_.size();
}

}  // namespace cudnn_autotune
