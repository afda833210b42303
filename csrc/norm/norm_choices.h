#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>

#include "norm/norm_ops.h"

namespace cudnn_autotune {

// The choice between PyTorch's kernels and this package's, in one place for all norms: those of
// ATen's operators (aten_norms.h), and those with an activation of converted modules
// (bindings.h).

// What asks for a norm, and by which policy.
struct NormAsker {
  void* module = nullptr;     // a converted norm, as a PyObject; null for functions and others
  int64_t serial = 0;         // the module's number; 0 for none
  std::string_view sampling;  // of others than modules; "" takes the setting
  bool takes_batches = true;  // else only calls of one image, as those of instance norms
};

// The asker of this thread's call; nothing where PyTorch computes it without being asked.
std::optional<NormAsker> asker_of_norm(const at::Tensor& input);

// While one lives, a converted norm asks for the calls of its thread. Those of one thread end in
// the reverse order of their beginnings.
class NormModuleScope {
 public:
  NormModuleScope(void* module, int64_t serial) noexcept;
  ~NormModuleScope();
  NormModuleScope(const NormModuleScope&) = delete;
  NormModuleScope& operator=(const NormModuleScope&) = delete;

 private:
  NormAsker former_;
};

// What was chosen for calls of a norm.
struct NormVerdict {
  bool is_served;          // by the kernels of this package; else by PyTorch's
  int64_t most_calls = 0;  // the number of calls that it holds for; 0 for all
};

// Whether the kernels compute a call, as far as that is known or can be chosen now.
//
// Args:
//   suits: whether they can. It is not called where PyTorch's kernels are known to be faster.
bool is_served(const NormCall& call, const NormKind& kind, const NormAsker& asker,
               c10::function_ref<bool()> suits);

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
