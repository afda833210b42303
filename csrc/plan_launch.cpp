#include "plan_launch.h"

#include <c10/util/DimVector.h>

#include "torch_bridge.h"

namespace cudnn_autotune {

void add_bias(const at::Tensor& y, const at::Tensor& bias) {
  c10::DimVector over_channels(y.dim(), 1);
  over_channels[1] = bias.size(0);
  y.add_(bias.view(over_channels));
}

void launch(ConvPlan& plan, cudnnHandle_t handle, const Operands& operands, void* workspace) {
  plan.execute(handle, operands.pointers(), workspace);
  if (plan.config().is_unfused) add_bias(operands.y, operands.bias);
}

void execute(ConvPlan& plan, const Operands& operands, bool captures) {
  const c10::DataPtr workspace = workspace_of(plan, captures);
  launch(plan, current_handle(), operands, workspace.get());
}

}  // namespace cudnn_autotune
