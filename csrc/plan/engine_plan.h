#pragma once

#include <memory>

#include "core/cudnn/conv_plan.h"
#include "plan/plan.h"

namespace cudnn_autotune {

// An engine of cuDNN, and behind an unfused one a kernel of PyTorch's that adds the bias.
class EnginePlan final : public Plan {
 public:
  explicit EnginePlan(std::shared_ptr<ConvPlan> engine);

  const std::shared_ptr<ConvPlan>& engine() const { return engine_; }
  bool is_read_back() const override { return engine_->is_read_back(); }
  // Throws CudnnError.
  at::Tensor launch(const Operands& operands, void* workspace) override;

 private:
  std::shared_ptr<ConvPlan> engine_;
};

}  // namespace cudnn_autotune
