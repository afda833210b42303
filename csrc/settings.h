#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cudnn_autotune {

// Sampling modes have small numbers, so that the key of a choice holds no string.
// Registering a known name returns its number again.
int16_t register_sampling(const std::string& name);
std::vector<std::string> sampling_names();
const std::string& sampling_name(int16_t id);

// What a call does not say itself; process-wide.
struct Settings {
  int16_t sampling = 0;
  int64_t workspace_limit = -1;  // bytes; -1: no limit
  int32_t benchmark_limit = 0;   // candidates to time; 0: all
};
Settings settings();
// Each on its own, so that no thread undoes what another sets meanwhile.
void set_sampling(int16_t id);
void set_workspace_limit(int64_t bytes);
void set_benchmark_limit(int32_t candidates);

// The mode and limit of one call: its own arguments, or the settings where it gives "" and -1.
// Throws c10::ValueError (Python's ValueError) naming the argument and what is allowed.
struct CallPolicy {
  int16_t sampling;
  int64_t workspace_limit;
};
CallPolicy resolve(std::string_view sampling, int64_t workspace_limit);

// While it lives, the calls of this thread are a probe's, and so is what autograd's threads do of a
// backward that begins here: autograd hands debug info on. Calls of other threads are not.
class ProbeGuard {
 public:
  // `number` is below 0, so that no benchmark limit is like it.
  explicit ProbeGuard(int32_t number);

 private:
  c10::DebugInfoGuard guard_;
};

// The benchmark limit in the key of a call that is made here and now: the settings', or the number
// of its probe. So what a probe leads to is chosen under a policy of its own.
int32_t benchmark_limit_of_call();

}  // namespace cudnn_autotune
