#include "call/fallback_counts.h"

#include <functional>
#include <mutex>
#include <string_view>

namespace cudnn_autotune {
namespace {

std::mutex mutex;
std::map<std::string, int64_t, std::less<>> counts;

}  // namespace

void count_fallback(const char* reason) {
  const std::lock_guard lock(mutex);
  const auto known = counts.find(std::string_view(reason));
  ++(known == counts.end() ? counts[reason] : known->second);
}

std::map<std::string, int64_t> fallbacks() {
  const std::lock_guard lock(mutex);
  return {counts.begin(), counts.end()};
}

void clear_fallbacks() {
  const std::lock_guard lock(mutex);
  counts.clear();
}

}  // namespace cudnn_autotune
