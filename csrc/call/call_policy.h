#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "call/settings.h"

namespace cudnn_autotune {

// By which policy a call of aten::convolution, aten::convolution_backward or a norm's operator
// (aten_norms.h) is served. Of these the first that there is: that of the marked input (a program
// that was traced), that of the layer or of the converted forward that makes the call, that of the
// forward whose derivative autograd computes, that of the process (`enable()`). A call without one
// is left to PyTorch.

// The arguments of an operator that give its policy.
struct OperatorPolicy {
  std::string_view sampling;     // "" takes the setting
  int64_t workspace_limit = -1;  // bytes; -1 takes the setting
  bool is_process_wide = false;  // that of `enable()`
};

// The policy of a call with this input on this thread; none while TorchScript traces or a
// OwnPathGuard lives.
std::optional<OperatorPolicy> policy_of_call(const at::Tensor& input);

// Serves the calls that this thread makes while it lives, unless a policy that comes later stands
// nearer to them. Guards of one thread end in the reverse order of their beginnings. Throws
// c10::ValueError for an unknown mode or a negative limit.
class PolicyScope {
 public:
  PolicyScope(std::string_view sampling, int64_t workspace_limit);
  ~PolicyScope() { leave(); }
  PolicyScope(const PolicyScope&) = delete;
  PolicyScope& operator=(const PolicyScope&) = delete;

  // The same without a guard: each enter() needs its leave() on the same thread.
  static void enter(std::string_view sampling, int64_t workspace_limit);
  static void leave();
};

// Hands the policy of this thread's call, unless it is the process's, on to the derivative of
// `output`. Autograd computes it later, on a thread of its own.
void label_derivative(const at::Tensor& input, const at::Tensor& output);

// A new tensor, which from here on carries a policy to the convolution whose input it is.
at::Tensor marked(at::Tensor copy, std::string_view sampling, int64_t workspace_limit);

// The policy of the process, as arguments of an operator.
struct ProcessWidePolicy {
  std::string sampling;     // "" takes the setting
  int64_t workspace_limit;  // bytes; -1 takes the setting
};
// The policy of the process; none while PyTorch's kernels serve its own functions.
std::optional<ProcessWidePolicy> process_wide();
// Sets the policy of the process and returns the one before. Safe to call from several threads.
std::optional<ProcessWidePolicy> exchange_process_wide(
    const std::optional<ProcessWidePolicy>& policy);

}  // namespace cudnn_autotune
