#include "plan/build_plan.h"

#include <utility>

#include "call/aten_conv.h"
#include "call/torch_bridge.h"
#include "core/cudnn/engine_list.h"
#include "core/problem/check.h"
#include "plan/pytorch_plans.h"

namespace cudnn_autotune {
namespace {

PlanBuilder& plan_builder() {
  static PlanBuilder builder;
  return builder;
}

}  // namespace

EnginePlan::EnginePlan(std::shared_ptr<ConvPlan> engine)
    : Plan(engine->problem(), engine->config().text(), engine->workspace_bytes()),
      engine_(std::move(engine)) {}

at::Tensor EnginePlan::launch(const Operands& operands, void* workspace) {
  engine_->execute(current_handle(), operands.pointers(), workspace);
  if (engine_->config().is_unfused) add_bias(operands.y, operands.bias);
  return {};
}

void set_plan_builder(PlanBuilder builder) { plan_builder() = std::move(builder); }

bool is_engine(const std::string& text) {
  return text != kOwnPath && text != kMatmul && text.find('@') == std::string::npos;
}

std::shared_ptr<Plan> build_plan(const ConvProblem& problem, const std::string& text,
                                 std::optional<c10::DeviceIndex> device) {
  if (text == kOwnPath) return std::make_shared<OwnPathPlan>(problem);
  if (text == kMatmul) return std::make_shared<MatmulPlan>(problem);
  if (!device) throw PlanError(text + " is built for a CUDA device of this machine only");
  const OnDevice guard(device);
  if (!is_engine(text)) {
    if (!plan_builder()) throw PlanError("nothing builds " + text + " for " + problem.text());
    // A convolution that a builder makes must not be tuned: that would wait for the thread that
    // tunes, which waits for this plan.
    const OwnPathGuard own_path;
    try {
      return plan_builder()(problem, text, *device);
    } catch (const PlanError& error) {
      throw PlanError("building " + text + " for " + problem.text() + ": " + error.what());
    }
  }
  return std::make_shared<EnginePlan>(EngineList(problem, &current_handle).build(text));
}

}  // namespace cudnn_autotune
