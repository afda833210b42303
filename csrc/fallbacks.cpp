#include "fallbacks.h"

#include <mutex>

namespace cudnn_autotune {
namespace {

std::mutex mutex;
std::map<std::string, int64_t> counts;

}  // namespace

void count_fallback(const char* reason) {
  const std::lock_guard lock(mutex);
  ++counts[reason];
}

std::map<std::string, int64_t> fallbacks() {
  const std::lock_guard lock(mutex);
  return counts;
}

void clear_fallbacks() {
  const std::lock_guard lock(mutex);
  counts.clear();
}

}  // namespace cudnn_autotune
