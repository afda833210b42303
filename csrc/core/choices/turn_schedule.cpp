#include "core/choices/turn_schedule.h"

#include <algorithm>
#include <utility>

namespace cudnn_autotune {

std::vector<TurnSchedule::Sample> TurnSchedule::take_samples() {
  const std::lock_guard lock(mutex_);
  return std::exchange(samples_, {});
}

std::vector<size_t> TurnSchedule::failures() const {
  const std::lock_guard lock(mutex_);
  return failures_;
}

void TurnSchedule::drop(size_t implementation) {
  const std::lock_guard lock(mutex_);
  is_active_.at(implementation) = false;
}

void TurnSchedule::set_leader(size_t implementation) {
  const std::lock_guard lock(mutex_);
  static_cast<void>(is_active_.at(implementation));
  leader_ = implementation;
}

void TurnSchedule::rest(size_t implementations) {
  const std::lock_guard lock(mutex_);
  if (is_active_.size() <= implementations) is_resting_ = true;
}

void TurnSchedule::decide(std::optional<size_t> implementation, bool is_provisional) {
  const std::lock_guard lock(mutex_);
  if (implementation) static_cast<void>(is_active_.at(*implementation));
  is_provisional_.store(is_provisional, std::memory_order_relaxed);
  decided_.store(implementation ? static_cast<int64_t>(*implementation) : kOwnPath,
                 std::memory_order_release);
}

size_t TurnSchedule::implementation_count() const {
  const std::lock_guard lock(mutex_);
  return is_active_.size();
}

void TurnSchedule::join() {
  const std::lock_guard lock(mutex_);
  is_active_.push_back(true);
  is_resting_ = false;
}

std::optional<TurnSchedule::Turn> TurnSchedule::take_turn() {
  const std::lock_guard lock(mutex_);
  // One implementation alone has nothing to be compared with: the call need not pay for events.
  if (is_active_.size() < 2 || is_resting_) return std::nullopt;
  // The leader serves one call of each pair, at random the first or the second: if it were always
  // the first, only one of two layers that share a problem would ever be measured.
  is_second_ = !is_second_;
  if (!is_second_) leads_second_ = std::bernoulli_distribution(0.5)(random_);
  if (is_second_ == leads_second_) return std::nullopt;
  while (position_ < order_.size() && !is_active_[order_[position_]]) ++position_;
  if (position_ >= order_.size()) {
    order_.clear();
    for (size_t i = 0; i < is_active_.size(); ++i) {
      if (is_active_[i]) order_.push_back(i);
    }
    position_ = 0;
    if (order_.empty()) return std::nullopt;
    std::shuffle(order_.begin(), order_.end(), random_);
    ++round_;
  }
  return Turn{order_[position_++], round_};
}

size_t TurnSchedule::leader() {
  const std::lock_guard lock(mutex_);
  if (!is_active_.at(leader_)) {
    const auto other = std::find(is_active_.begin(), is_active_.end(), true);
    if (other != is_active_.end()) leader_ = static_cast<size_t>(other - is_active_.begin());
  }
  return leader_;
}

void TurnSchedule::report(const Sample& sample) {
  const std::lock_guard lock(mutex_);
  static_cast<void>(is_active_.at(sample.implementation));
  samples_.push_back(sample);
}

bool TurnSchedule::fail(size_t implementation) {
  const std::lock_guard lock(mutex_);
  is_active_.at(implementation) = false;
  is_resting_ = false;
  failures_.push_back(implementation);
  const auto is_another_left = [this] {
    return std::find(is_active_.begin(), is_active_.end(), true) != is_active_.end();
  };
  if (is_another_left()) return true;
  // Those that were slower than this one serve again.
  is_active_.assign(is_active_.size(), true);
  for (const size_t failed : failures_) is_active_[failed] = false;
  return is_another_left();
}

}  // namespace cudnn_autotune
