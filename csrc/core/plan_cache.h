#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <unordered_map>

#include "core/conv_plan.h"
#include "core/conv_problem.h"

namespace cudnn_autotune {

class OnlineTrial;

struct CachedPlan {
  ChoiceKey key;
  std::shared_ptr<ConvPlan> plan;  // null: PyTorch's own path was chosen, or a matrix product
  bool is_matmul = false;
  // Not decided yet: candidates take turns in the calls. `plan` is then not used.
  std::shared_ptr<OnlineTrial> trial = nullptr;
  // Made while a stream was being captured, when nothing may be timed: to be tuned at the next
  // call outside a capture.
  bool provisional = false;
  // Of a trial: ChoiceTable::forgettings when it was asked for.
  uint64_t forgettings = 0;
};

// One thread's built plans, least recently used last. A plan costs about 200 KiB of host memory
// (pytorch issue 104369) and is not safe to share between threads, hence the bound and the
// thread. A choice whose plan was dropped here is rebuilt, not tuned again.
class PlanCache {
 public:
  static PlanCache& of_this_thread();

  // Null where the key is not there, or where choices have changed since it was put.
  CachedPlan* find(const ChoiceKey& key, uint64_t epoch) {
    if (epoch != epoch_) start(epoch);
    if (!plans_.empty() && plans_.front().key == key) return &plans_.front();
    return find_and_touch(key);
  }
  CachedPlan& put(CachedPlan plan, uint64_t epoch);

  // Plans that each thread may keep. 0 or less is refused by the caller.
  static void set_capacity(size_t plans);
  static size_t capacity();

 private:
  void start(uint64_t epoch);
  CachedPlan* find_and_touch(const ChoiceKey& key);

  std::list<CachedPlan> plans_;
  std::unordered_map<ChoiceKey, std::list<CachedPlan>::iterator, ChoiceKeyHash> where_;
  uint64_t epoch_ = 0;
};

}  // namespace cudnn_autotune
