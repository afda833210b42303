#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>

#include "core/problem/conv_problem.h"
#include "plan/operands.h"

namespace cudnn_autotune {

// What computes one problem on one device. Whoever runs a plan need not know of which kind it is.
// Two threads may not use a plan at once (pytorch issue 103939).
class Plan {
 public:
  virtual ~Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  const ConvProblem& problem() const { return problem_; }
  // The candidate's text, of which build_plan() makes the same plan.
  const std::string& text() const { return text_; }
  int64_t workspace_bytes() const { return workspace_bytes_; }
  // Whether the result is a tensor that launch() allocates. Others write one of the operands.
  virtual bool allocates_result() const { return false; }
  // Whether it was read back, so that nothing was compiled.
  virtual bool is_read_back() const { return false; }

  // Enqueues the computation on the current stream of the plan's device, which must be current.
  // `workspace` is device memory of workspace_bytes() or more. Returns the result if the plan
  // allocates it, in the layout that the operators promise; else an undefined tensor. Throws
  // PlanError, c10::Error where ATen refuses, and c10::OutOfMemoryError where it allocates more.
  virtual at::Tensor launch(const Operands& operands, void* workspace) = 0;

 protected:
  Plan(const ConvProblem& problem, std::string text, int64_t workspace_bytes = 0)
      : problem_(problem), text_(std::move(text)), workspace_bytes_(workspace_bytes) {}

 private:
  ConvProblem problem_;
  std::string text_;
  int64_t workspace_bytes_;
};

// As launch(), with a workspace from workspace_of(). `captures` says whether the current stream is
// being captured. Throws c10::OutOfMemoryError too.
inline at::Tensor execute(Plan& plan, const Operands& operands, bool captures) {
  const c10::DataPtr workspace = workspace_of(plan.workspace_bytes(), captures);
  return plan.launch(operands, workspace.get());
}

}  // namespace cudnn_autotune
