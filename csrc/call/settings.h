#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace cudnn_autotune {

// All functions of this file are safe to call from several threads.

// Gives a sampling mode a small number, so that the key of a choice holds no string. A name that is
// registered already keeps its number. Throws c10::ValueError beyond 100 modes.
int16_t register_sampling(const std::string& name);
// The registered names, by number.
std::vector<std::string> sampling_names();
// The name of a number that register_sampling() returned. The reference is valid for good.
const std::string& sampling_name(int16_t id);

// The process-wide settings, for calls that do not give their own.
struct Settings {
  int16_t sampling = 0;          // number of a sampling mode
  int64_t workspace_limit = -1;  // bytes; -1: no limit
  int32_t benchmark_limit = 0;   // candidates to time; 0: all
};
Settings settings();
// Each setting has a function of its own, so that a thread that sets one does not undo what another
// thread does to the others.
void set_sampling(int16_t id);
void set_workspace_limit(int64_t bytes);
void set_benchmark_limit(int32_t candidates);

// The sampling mode and workspace limit of one call.
struct CallPolicy {
  int16_t sampling;
  int64_t workspace_limit;  // bytes; -1: no limit
};
// Takes them from the call's arguments, or from the settings where these are "" and -1. Throws
// c10::ValueError (Python's ValueError), which names the argument and what is allowed.
CallPolicy resolve(std::string_view sampling, int64_t workspace_limit);

// How often a probe's calls asked for each problem, by problem_key(). Threads of autograd count,
// too.
struct ProbedCalls {
  std::mutex mutex;
  std::map<std::string, int64_t> counts;
};

// Marks the calls of this thread as those of a probe, which looks at what a model calls, as long as
// the guard lives. Autograd hands this mark (c10's debug info) on to the threads that run a
// backward begun here. Calls of other threads are not marked.
class ProbeGuard {
 public:
  // `number` must be below 0, so that no benchmark limit equals it. Else c10::ValueError is thrown.
  ProbeGuard(int32_t number, std::shared_ptr<ProbedCalls> calls);

 private:
  c10::DebugInfoGuard guard_;
};

// The benchmark limit for the key of a call on this thread: the number of its probe, or else the
// setting. So the choices that a probe's calls lead to have keys of their own.
int32_t benchmark_limit_of_call();

// Adds a call to the counts of this thread's probe, if there is one.
void count_probed_call(const std::string& problem_key);

}  // namespace cudnn_autotune
