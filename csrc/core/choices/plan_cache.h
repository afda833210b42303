#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <unordered_map>

#include "core/choices/choice_table.h"
#include "core/problem/conv_problem.h"

namespace cudnn_autotune {

class OnlineTrial;
class Plan;

// What computes a problem: a plan, or an undecided trial of several.
struct ChosenPath {
  std::shared_ptr<Plan> plan = nullptr;
  std::shared_ptr<OnlineTrial> trial = nullptr;  // null if there is a plan
};

struct CacheEntry {
  ChoiceKey key;
  ChoiceVersion version;  // of the choice; of a trial or a provisional plan: when it was begun
  ChosenPath path;
  // Not the final choice: made without a search while a stream was captured, or with less than a
  // search may have later. After `calls_left` more calls, the next one outside of a capture is a
  // miss.
  bool is_provisional = false;
  int64_t calls_left = 0;
  int64_t calls = 0;  // how many it was made to serve; 0: made during a capture
};

// The built plans of one thread, in order of their last use. Each takes host memory, so their
// number is bounded, by as many as PyTorch keeps: to build one again takes a millisecond or two,
// which a program that alternates between many sizes would wait for in every call. A plan may not
// be used by two threads at once, so each thread has its own cache. A choice whose plan was dropped
// here is built again, not tuned again.
class PlanCache {
 public:
  static PlanCache& of_this_thread();
  // True while the cache of this thread is destroyed, at the thread's end. CUDA may already have
  // forgotten the thread.
  static bool is_thread_ending();

  PlanCache() = default;
  PlanCache(const PlanCache&) = delete;
  PlanCache& operator=(const PlanCache&) = delete;
  ~PlanCache();

  // The entry of `key`; null if there is none, or if a choice of its problem has changed since it
  // was made. It is valid until put() is called.
  CacheEntry* find(const ChoiceKey& key) {
    if (entries_.empty() || !(entries_.front().key == key)) {
      if (!move_to_front(key)) return nullptr;
    }
    return entries_.front().version.is_current() ? &entries_.front() : nullptr;
  }
  // Adds an entry, or replaces the one of its key, and drops those that are not current. If the new
  // entry is not current itself, find() does not return it; the caller may use it once.
  CacheEntry& put(CacheEntry entry);

  // How many entries each thread keeps, 1 or more. The caller checks it.
  static void set_capacity(size_t entries);
  static size_t capacity();

 private:
  // Returns false if there is no entry of this key.
  bool move_to_front(const ChoiceKey& key);
  void remove(std::list<CacheEntry>::iterator entry);

  std::list<CacheEntry> entries_;  // last used first
  std::unordered_map<ChoiceKey, std::list<CacheEntry>::iterator, ChoiceKeyHash> where_;
  uint64_t changes_ = 0;  // ChoiceTable::changes() when the entries were last looked through
};

}  // namespace cudnn_autotune
