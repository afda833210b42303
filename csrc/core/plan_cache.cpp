#include "core/plan_cache.h"

#include <atomic>
#include <utility>

namespace cudnn_autotune {
namespace {

std::atomic<size_t> plans_per_thread{256};

}  // namespace

PlanCache& PlanCache::of_this_thread() {
  static thread_local PlanCache cache;
  return cache;
}

void PlanCache::set_capacity(size_t plans) { plans_per_thread = plans; }
size_t PlanCache::capacity() { return plans_per_thread; }

bool PlanCache::touch(const ChoiceKey& key) {
  const auto found = where_.find(key);
  if (found == where_.end()) return false;
  plans_.splice(plans_.begin(), plans_, found->second);
  return true;
}

CachedPlan& PlanCache::put(CachedPlan plan) {
  for (auto old = plans_.begin(); old != plans_.end();) {
    if (old->key == plan.key || !old->version.is_current()) {
      where_.erase(old->key);
      old = plans_.erase(old);
    } else {
      ++old;
    }
  }
  plans_.push_front(std::move(plan));
  where_[plans_.front().key] = plans_.begin();
  while (plans_.size() > capacity() && plans_.size() > 1) {
    where_.erase(plans_.back().key);
    plans_.pop_back();
  }
  return plans_.front();
}

}  // namespace cudnn_autotune
