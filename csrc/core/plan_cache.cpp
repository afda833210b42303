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

void PlanCache::start(uint64_t epoch) {
  where_.clear();
  plans_.clear();
  epoch_ = epoch;
}

CachedPlan* PlanCache::find_and_touch(const ChoiceKey& key) {
  const auto found = where_.find(key);
  if (found == where_.end()) return nullptr;
  plans_.splice(plans_.begin(), plans_, found->second);
  return &plans_.front();
}

CachedPlan& PlanCache::put(CachedPlan plan, uint64_t epoch) {
  if (epoch != epoch_) start(epoch);
  const auto old = where_.find(plan.key);
  if (old != where_.end()) {
    plans_.erase(old->second);
    where_.erase(old);
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
