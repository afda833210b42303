#include "core/cudnn/kept_plans.h"

#include <mutex>
#include <utility>

namespace cudnn_autotune {
namespace {

// Never destroyed, because threads may build plans while the process exits.
struct Current {
  std::mutex mutex;
  std::shared_ptr<const KeptPlans> kept;
};

Current& current() {
  static auto* current = new Current();
  return *current;
}

}  // namespace

std::shared_ptr<const KeptPlans> kept_plans() {
  const std::lock_guard lock(current().mutex);
  return current().kept;
}

void set_kept_plans(std::shared_ptr<const KeptPlans> kept) {
  const std::lock_guard lock(current().mutex);
  std::swap(current().kept, kept);
}

}  // namespace cudnn_autotune
