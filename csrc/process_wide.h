#pragma once

#include <c10/core/DispatchKey.h>

#include <cstdint>
#include <optional>
#include <string>

namespace cudnn_autotune {

// What cudnn_autotune.enable() does: aten::convolution and aten::convolution_backward, in which all
// convolutions of PyTorch and their derivatives end, are computed by this package's operators.

// The sampling mode and the workspace limit of these calls, as arguments of an operator.
struct ProcessWidePolicy {
  std::string sampling;     // "" takes the setting
  int64_t workspace_limit;  // bytes; -1 takes the setting
};

// Registers the kernels that read the policy for this backend, once; they stay registered, because
// a thread may be running one at any time. Safe to call from several threads, but not while any
// runs one of PyTorch's convolutions on this backend, since it writes what PyTorch's dispatcher
// reads.
void serve_process_wide(c10::DispatchKey backend);

// Sets the policy of all threads and returns the one before. Without a policy the kernels call
// PyTorch's own. Safe to call from several threads.
std::optional<ProcessWidePolicy> exchange_process_wide(
    const std::optional<ProcessWidePolicy>& policy);

}  // namespace cudnn_autotune
