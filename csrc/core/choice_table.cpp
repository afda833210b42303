#include "core/choice_table.h"

#include <iterator>
#include <utility>

namespace cudnn_autotune {

ChoiceTable& ChoiceTable::instance() {
  // Never destroyed: threads may still be running at exit.
  static auto* table = new ChoiceTable();
  return *table;
}

ChoiceTable::Found ChoiceTable::find(const ChoiceKey& key) {
  const std::lock_guard lock(mutex_);
  const Standing standing(history_locked(key.problem));
  const auto found = choices_.find(key);
  if (found == choices_.end()) return {std::nullopt, standing};
  return {found->second, standing};
}

Standing ChoiceTable::put_unless_forgotten(const ChoiceKey& key, std::string text,
                                           const Standing& asked) {
  const std::lock_guard lock(mutex_);
  if (asked.was_forgotten()) return {};
  const auto& history = history_locked(key.problem);
  const auto [entry, is_new] = choices_.try_emplace(key, text);
  if (!is_new && entry->second != text) {
    entry->second = std::move(text);
    ++history->changes;
  }
  return Standing(history);
}

void ChoiceTable::erase(const ChoiceKey& key, const std::string& text) {
  const std::lock_guard lock(mutex_);
  const auto found = choices_.find(key);
  if (found == choices_.end() || found->second != text) return;
  choices_.erase(found);
  ++history_locked(key.problem)->changes;
}

void ChoiceTable::forget(const ConvProblem& problem) {
  const std::lock_guard lock(mutex_);
  for (auto entry = choices_.begin(); entry != choices_.end();) {
    entry = entry->first.problem == problem ? choices_.erase(entry) : std::next(entry);
  }
  const auto& history = history_locked(problem);
  ++history->forgettings;
  ++history->changes;
}

void ChoiceTable::forget_all() {
  const std::lock_guard lock(mutex_);
  choices_.clear();
  for (const auto& [problem, history] : histories_) {
    ++history->forgettings;
    ++history->changes;
  }
  // Whoever still holds one sees that it is stale; who asks again gets a new one.
  histories_.clear();
}

const std::shared_ptr<Standing::History>& ChoiceTable::history_locked(const ConvProblem& problem) {
  auto& history = histories_[{problem, {}}];
  if (history == nullptr) history = std::make_shared<History>();
  return history;
}

}  // namespace cudnn_autotune
