#include "core/choices/plan_cache.h"

#include <atomic>
#include <iterator>
#include <utility>

namespace cudnn_autotune {
namespace {

std::atomic<size_t> entries_per_thread{10000};
thread_local bool is_ending = false;

}  // namespace

PlanCache& PlanCache::of_this_thread() {
  static thread_local PlanCache cache;
  return cache;
}

bool PlanCache::is_thread_ending() { return is_ending; }

PlanCache::~PlanCache() { is_ending = true; }

void PlanCache::set_capacity(size_t entries) { entries_per_thread = entries; }
size_t PlanCache::capacity() { return entries_per_thread; }

bool PlanCache::move_to_front(const ChoiceKey& key) {
  const auto found = where_.find(key);
  if (found == where_.end()) return false;
  entries_.splice(entries_.begin(), entries_, found->second);
  return true;
}

CacheEntry& PlanCache::put(CacheEntry entry) {
  // Choices seldom change, so that a cache of many plans is seldom looked through.
  const uint64_t changes = ChoiceTable::instance().changes();
  if (changes != changes_) {
    changes_ = changes;
    for (auto old = entries_.begin(); old != entries_.end();) {
      const auto next = std::next(old);
      if (!old->version.is_current()) remove(old);
      old = next;
    }
  }
  const auto same = where_.find(entry.key);
  if (same != where_.end()) remove(same->second);
  entries_.push_front(std::move(entry));
  where_[entries_.front().key] = entries_.begin();
  while (entries_.size() > capacity() && entries_.size() > 1) remove(std::prev(entries_.end()));
  return entries_.front();
}

void PlanCache::remove(std::list<CacheEntry>::iterator entry) {
  where_.erase(entry->key);
  entries_.erase(entry);
}

}  // namespace cudnn_autotune
