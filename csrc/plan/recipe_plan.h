#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/problem/conv_problem.h"
#include "plan/plan.h"
#include "plan/recipe.h"

namespace cudnn_autotune {

// A sequence of launches into the operands and a workspace. To launch it takes no memory from the
// heap, and calls no Python unless a FunctionLaunch does.
class RecipePlan final : public Plan {
 public:
  // Loads the kernels and builds the engines for a CUDA device. `workspace_bytes` is the size of
  // Buffer::workspace. Throws PlanError, which names the text, if one of them does not load or
  // build, or if an address is not in its buffer or less aligned than its engine asks for.
  static std::shared_ptr<RecipePlan> build(const ConvProblem& problem, const std::string& text,
                                           const std::vector<Launch>& launches,
                                           int64_t workspace_bytes, c10::DeviceIndex device);
  ~RecipePlan() override;

  // Throws PlanError, which names the text, and c10::OutOfMemoryError of a FunctionLaunch.
  at::Tensor launch(const Operands& operands, void* workspace) override;

 private:
  class Step;
  class KernelStep;
  class EngineStep;
  class FunctionStep;
  struct Memory;

  RecipePlan(const ConvProblem& problem, const std::string& text, int64_t own_bytes,
             int64_t engine_bytes, std::vector<std::unique_ptr<Step>> steps);

  int64_t own_bytes_;  // of Buffer::workspace
  int64_t engines_at_;
  std::vector<std::unique_ptr<Step>> steps_;
};

}  // namespace cudnn_autotune
