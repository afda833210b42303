#include "core/cudnn/detail/conv_plan_impl.h"

#include <utility>

#include "core/problem/check.h"

namespace cudnn_autotune {

std::shared_ptr<ConvPlan> make_conv_plan(cudnn_frontend::ExecutionPlan plan,
                                         const ConvProblem& problem, const EngineConfig& config,
                                         bool is_read_back) {
  auto impl = std::make_shared<ConvPlan::Impl>(ConvPlan::Impl{std::move(plan)});
  const auto descriptor = impl->plan.get_raw_desc();
  const int64_t workspace_bytes = impl->plan.getWorkspaceSize();
  return std::make_shared<ConvPlan>(std::move(impl), descriptor, workspace_bytes, problem, config,
                                    is_read_back);
}

std::string ConvPlan::serialized() const {
  try {
    return impl_->plan.getJsonRepresentation();
  } catch (const cudnn_frontend::cudnnException& exception) {
    throw CudnnError("serializing a plan of " + config_.text(), exception.what(), problem_.text());
  }
}

}  // namespace cudnn_autotune
