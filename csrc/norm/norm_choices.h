#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>

#include "core/problem/check.h"
#include "norm/norm_ops.h"

namespace cudnn_autotune {

// The choice between PyTorch's kernels and this package's, in one place for all norms: those of
// ATen's operators (aten_norms.h), and those with an activation of converted modules
// (bindings.h).

// A converted norm, which asks for the calls of its forward.
struct NormModule {
  void* object = nullptr;  // a PyObject; null for functions and others
  int64_t serial = 0;      // the module's number; 0 for none
};
// While one lives, a module asks for the calls of its thread. Those of one thread end in the
// reverse order of their beginnings.
class NormModuleScope {
 public:
  explicit NormModuleScope(const NormModule& module) noexcept;
  ~NormModuleScope();
  NormModuleScope(const NormModuleScope&) = delete;
  NormModuleScope& operator=(const NormModuleScope&) = delete;

 private:
  NormModule former_;
};

// What was chosen for calls of a norm.
struct NormVerdict {
  bool is_served;          // by the kernels of this package; else by PyTorch's
  int64_t most_calls = 0;  // the number of calls that it holds for; 0 for all
};

// Whether the kernels compute a call, as far as that is known or can be chosen now. Calls for which
// nothing asks, neither a module nor a policy, are PyTorch's.
//
// Args:
//   suits: whether they can. It is not called where PyTorch's kernels are known to be faster.
bool is_served(const NormCall& call, const NormKind& kind, c10::function_ref<bool()> suits);

// What `compute` makes of a call that the kernels compute; nothing where PyTorch computes it.
template <typename Suits, typename Compute>
auto if_served(const NormCall& call, const NormKind& kind, const Suits& suits,
               const Compute& compute) -> std::optional<decltype(compute())> {
  try {
    if (is_served(call, kind, suits)) return compute();
  } catch (const PlanError&) {  // PyTorch's kernel is always there
  }
  return std::nullopt;
}

// Chooses what computes calls like one that was not asked about; nothing if that cannot be said
// now. It may call ATen's norms, which are PyTorch's then.
using NormChooser = std::function<std::optional<NormVerdict>(
    const NormCall& call, const NormKind& kind, void* module, std::string_view sampling)>;
void set_norm_chooser(NormChooser chooser);
// Clears all choices.
void forget_norms();

// While one lives, the kernels compute the norms of its thread that they can, whatever was chosen,
// so that they can be timed.
class NormsByKernelsGuard {
 public:
  NormsByKernelsGuard() noexcept;
  ~NormsByKernelsGuard();
  NormsByKernelsGuard(const NormsByKernelsGuard&) = delete;
  NormsByKernelsGuard& operator=(const NormsByKernelsGuard&) = delete;
};

}  // namespace cudnn_autotune
