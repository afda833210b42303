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
  put_locked(key, std::move(text));
}

bool ChoiceTable::put_unless_forgotten(const ChoiceKey& key, std::string text,
                                       uint64_t forgettings) {
  const std::unique_lock lock(mutex_);
  if (forgettings != forgettings_) return false;
  put_locked(key, std::move(text));
  return true;
}

void ChoiceTable::put_locked(const ChoiceKey& key, std::string text) {
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
  ++forgettings_;
  epoch_.fetch_add(1, std::memory_order_release);
}

void ChoiceTable::clear() {
  const std::unique_lock lock(mutex_);
  choices_.clear();
  ++forgettings_;
  epoch_.fetch_add(1, std::memory_order_release);
}

uint64_t ChoiceTable::forgettings() const {
  const std::shared_lock lock(mutex_);
  return forgettings_;
}

}  // namespace cudnn_autotune
