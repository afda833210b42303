#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>

#include "norm_ops.h"

namespace cudnn_autotune {

// What was chosen for calls of a norm.
struct NormVerdict {
  bool is_served;          // by the kernels of this package; else by PyTorch's
  int64_t most_calls = 0;  // the number of calls that it holds for; 0 for all
};

// Verdicts by the signatures of calls. Not safe to call from several threads.
class NormVerdicts {
 public:
  // With more than `most` verdicts they begin anew: sizes may keep changing.
  explicit NormVerdicts(size_t most) : most_(most) {}

  // Whether the kernels compute a call like this one. Nothing if that was not chosen, or was
  // chosen for a number of calls, which are over.
  std::optional<bool> find(const NormCallSignature& signature) {
    const auto found = known_.find(signature);
    if (found == known_.end()) return std::nullopt;
    NormVerdict& verdict = found->second;
    const bool is_served = verdict.is_served;
    if (verdict.most_calls > 0 && --verdict.most_calls == 0) known_.erase(found);
    return is_served;
  }
  void set(NormCallSignature signature, const NormVerdict& verdict) {
    if (known_.size() >= most_) known_.clear();
    known_.insert_or_assign(std::move(signature), verdict);
  }
  void clear() { known_.clear(); }

 private:
  size_t most_;
  std::unordered_map<NormCallSignature, NormVerdict, NormCallSignature::Hash> known_;
};

}  // namespace cudnn_autotune
