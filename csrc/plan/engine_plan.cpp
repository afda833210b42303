#include "plan/engine_plan.h"

#include <utility>

#include "call/aten_conv.h"
#include "call/torch_bridge.h"

namespace cudnn_autotune {

EnginePlan::EnginePlan(std::shared_ptr<ConvPlan> engine)
    : Plan(engine->problem(), engine->config().text(), engine->workspace_bytes()),
      engine_(std::move(engine)) {}

at::Tensor EnginePlan::launch(const Operands& operands, void* workspace) {
  engine_->execute(current_handle(), operands.pointers(), workspace);
  if (engine_->config().is_unfused) add_bias(operands.y, operands.bias);
  return {};
}

}  // namespace cudnn_autotune
