#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "core/cudnn/conv_plan.h"
#include "core/problem/conv_problem.h"
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

// Whether a candidate's text is that of an engine config of cuDNN, which may not exist.
bool is_engine(const std::string& text);

// Builds the plan that a candidate's text names, for a CUDA device: an engine config
// (core/cudnn/engine_config.h), kOwnPath, kMatmul, or `name@version[:settings]`, which the builder
// that Python has set knows. nullopt: the GPU is not here, which kOwnPath and kMatmul do not ask.
// Other threads may capture meanwhile. Throws PlanError if it does not build.
std::shared_ptr<Plan> build_plan(const ConvProblem& problem, const std::string& text,
                                 std::optional<c10::DeviceIndex> device);

// Builds what is no engine and neither kOwnPath nor kMatmul. Called from any thread without the
// GIL, with the device current. Throws PlanError.
using PlanBuilder = std::function<std::shared_ptr<Plan>(
    const ConvProblem& problem, const std::string& text, c10::DeviceIndex device)>;
void set_plan_builder(PlanBuilder builder);

}  // namespace cudnn_autotune
