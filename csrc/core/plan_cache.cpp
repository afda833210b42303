#include "core/plan_cache.h"

#include <atomic>
#include <utility>

namespace cudnn_autotune {
namespace {

std::atomic<size_t> entries_per_thread{256};
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
  for (auto old = entries_.begin(); old != entries_.end();) {
    if (old->key == entry.key || !old->version.is_current()) {
      where_.erase(old->key);
      old = entries_.erase(old);
    } else {
      ++old;
    }
  }
  entries_.push_front(std::move(entry));
  where_[entries_.front().key] = entries_.begin();
  while (entries_.size() > capacity() && entries_.size() > 1) {
    where_.erase(entries_.back().key);
    entries_.pop_back();
  }
  return entries_.front();
}

}  // namespace cudnn_autotune
