#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <unordered_map>

#include "core/choice_table.h"
#include "core/conv_plan.h"
#include "core/conv_problem.h"

namespace cudnn_autotune {

class OnlineTrial;

struct CachedPlan {
  ChoiceKey key;
  // Of the choice that it was made of; of a trial or what is provisional: as of when it was begun.
  ChoiceVersion version;
  std::shared_ptr<ConvPlan> plan = nullptr;  // null: PyTorch's own path was chosen, or a matmul
  bool is_matmul = false;
  // Not decided yet: candidates take turns in the calls. `plan` is then not used.
  std::shared_ptr<OnlineTrial> trial = nullptr;
  // Made while a stream was being captured, when nothing may be timed: to be tuned at the next
  // call outside a capture.
  bool provisional = false;
};

// One thread's built plans, least recently used last. A plan costs about 200 KiB of host memory
// (pytorch issue 104369) and is not safe to share between threads, hence the bound and the
// thread. A choice whose plan was dropped here is rebuilt, not tuned again.
class PlanCache {
 public:
  static PlanCache& of_this_thread();

  // Null where the key is not there, or where choices of its problem have changed since.
  CachedPlan* find(const ChoiceKey& key) {
    if (plans_.empty() || !(plans_.front().key == key)) {
      if (!touch(key)) return nullptr;
    }
    return plans_.front().version.is_current() ? &plans_.front() : nullptr;
  }
  // Also where it is stale already: it then serves one call. Drops the others that are.
  CachedPlan& put(CachedPlan plan);

  // Plans that each thread may keep. 0 or less is refused by the caller.
  static void set_capacity(size_t plans);
  static size_t capacity();

 private:
  // Brings it to the front; false where it is not there.
  bool touch(const ChoiceKey& key);

  std::list<CachedPlan> plans_;
  std::unordered_map<ChoiceKey, std::list<CachedPlan>::iterator, ChoiceKeyHash> where_;
};

}  // namespace cudnn_autotune
