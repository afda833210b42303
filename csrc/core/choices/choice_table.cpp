#include "core/choices/choice_table.h"

#include <iterator>
#include <utility>

namespace cudnn_autotune {

ChoiceTable& ChoiceTable::instance() {
  // It is never destroyed, because threads may still use it while the process exits.
  static auto* table = new ChoiceTable();
  return *table;
}

ChoiceTable::Found ChoiceTable::find(const ChoiceKey& key) {
  const std::lock_guard lock(mutex_);
  const ChoiceVersion version(counters_of(key.problem));
  const auto found = choices_.find(key);
  if (found == choices_.end()) return {std::nullopt, version};
  return {found->second, version};
}

ChoiceVersion ChoiceTable::put_unless_forgotten(const ChoiceKey& key, std::string text,
                                                const ChoiceVersion& asked) {
  const std::lock_guard lock(mutex_);
  if (asked.was_forgotten()) return {};
  const auto& counters = counters_of(key.problem);
  const auto [entry, is_new] = choices_.try_emplace(key, text);
  if (!is_new && entry->second != text) {
    entry->second = std::move(text);
    count_change(*counters);
  }
  return ChoiceVersion(counters);
}

void ChoiceTable::erase(const ChoiceKey& key, const std::string& text) {
  const std::lock_guard lock(mutex_);
  const auto found = choices_.find(key);
  if (found == choices_.end() || found->second != text) return;
  choices_.erase(found);
  count_change(*counters_of(key.problem));
}

void ChoiceTable::forget(const ConvProblem& problem) {
  const std::lock_guard lock(mutex_);
  for (auto entry = choices_.begin(); entry != choices_.end();) {
    entry = entry->first.problem == problem ? choices_.erase(entry) : std::next(entry);
  }
  const auto& counters = counters_of(problem);
  ++counters->forgettings;
  count_change(*counters);
}

void ChoiceTable::forget_all() {
  const std::lock_guard lock(mutex_);
  choices_.clear();
  for (const auto& [problem, counters] : counters_) {
    ++counters->forgettings;
    count_change(*counters);
  }
  // Versions that are still held keep the old counters, and are never current again.
  counters_.clear();
}

const std::shared_ptr<ChoiceVersion::Counters>& ChoiceTable::counters_of(
    const ConvProblem& problem) {
  auto& counters = counters_[{problem, {}}];
  if (counters == nullptr) counters = std::make_shared<Counters>();
  return counters;
}

void ChoiceTable::count_change(Counters& counters) {
  ++counters.changes;
  ++changes_;
}

}  // namespace cudnn_autotune
