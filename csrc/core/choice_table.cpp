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

std::optional<uint64_t> ChoiceTable::put_unless_forgotten(const ChoiceKey& key, std::string text,
                                                          uint64_t forgettings) {
  const std::unique_lock lock(mutex_);
  if (forgettings != forgettings_locked(key.problem)) return std::nullopt;
  const auto [entry, is_new] = choices_.try_emplace(key, text);
  if (!is_new && entry->second != text) {
    entry->second = std::move(text);
    epoch_.fetch_add(1, std::memory_order_release);
  }
  return epoch();
}

std::optional<uint64_t> ChoiceTable::epoch_unless_forgotten(const ConvProblem& problem,
                                                            uint64_t forgettings) const {
  const std::shared_lock lock(mutex_);
  if (forgettings != forgettings_locked(problem)) return std::nullopt;
  return epoch();
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
  ++forgettings_of_[{problem, {}}];
  epoch_.fetch_add(1, std::memory_order_release);
}

void ChoiceTable::clear() {
  const std::unique_lock lock(mutex_);
  choices_.clear();
  ++forgettings_;
  epoch_.fetch_add(1, std::memory_order_release);
}

uint64_t ChoiceTable::forgettings(const ConvProblem& problem) const {
  const std::shared_lock lock(mutex_);
  return forgettings_locked(problem);
}

uint64_t ChoiceTable::forgettings_locked(const ConvProblem& problem) const {
  const auto found = forgettings_of_.find({problem, {}});
  return forgettings_ + (found == forgettings_of_.end() ? 0 : found->second);
}

}  // namespace cudnn_autotune
