#include "recipe.h"

#include "core/check.h"
#include "torch_bridge.h"

namespace cudnn_autotune {
namespace {

const char* name(Buffer buffer) {
  constexpr std::array names{"x", "w", "y", "bias", "residual", "workspace"};
  return names.at(static_cast<size_t>(buffer));
}

// What the address is a multiple of, as far as the problem says: a power of two, in bytes.
int64_t alignment_of(const Address& address, const ConvProblem& problem) {
  int64_t known = kMostAligned;  // what an epilogue adds
  if (address.buffer == Buffer::x) known = problem.x_alignment;
  if (address.buffer == Buffer::w) known = problem.w_alignment;
  if (address.buffer == Buffer::y) known = problem.y_alignment;
  if (address.buffer == Buffer::workspace) known = kWorkspaceAligned;
  const int64_t either = known | address.offset;
  return either & -either;
}

class LaunchCheck {
 public:
  LaunchCheck(const ConvProblem& problem, int64_t workspace_bytes)
      : problem_(problem), workspace_bytes_(workspace_bytes) {}

  void operator()(const KernelLaunch& kernel) const {
    for (const auto& argument : kernel.arguments) {
      if (const auto* address = std::get_if<Address>(&argument)) check(*address);
    }
  }

  void operator()(const EngineLaunch& engine) const {
    const ConvProblem& inner = engine.problem;
    check(engine.x, inner.x_alignment, engine.engine_text);
    check(engine.w, inner.w_alignment, engine.engine_text);
    check(engine.y, inner.y_alignment, engine.engine_text);
    if (inner.has_bias() != engine.bias.has_value() ||
        inner.has_residual() != engine.residual.has_value()) {
      throw PlanError(engine.engine_text + " lacks a bias or residual, or is given one too many");
    }
    if (engine.bias) check(*engine.bias, kMostAligned, engine.engine_text);
    if (engine.residual) check(*engine.residual, kMostAligned, engine.engine_text);
  }

  void operator()(const FunctionLaunch& /*function*/) const {}

 private:
  int64_t bytes_of(Buffer buffer) const {
    std::vector<int64_t> shape;
    switch (buffer) {
      case Buffer::x:
        shape = problem_.input_shape();
        break;
      case Buffer::w:
        shape = problem_.weight_shape();
        break;
      case Buffer::y:
        shape = problem_.output_shape();
        break;
      case Buffer::bias:
        if (!problem_.has_bias()) return 0;
        shape = {problem_.weight_shape()[0]};
        break;
      case Buffer::residual:
        if (!problem_.has_residual()) return 0;
        shape = problem_.output_shape();
        break;
      case Buffer::workspace:
        return workspace_bytes_;
    }
    return problem_.bytes_of(shape);
  }

  void check(const Address& address) const {
    const int64_t bytes = bytes_of(address.buffer);
    if (address.offset >= 0 && address.offset < bytes) return;
    throw PlanError("offset " + std::to_string(address.offset) + " is outside of " +
                    name(address.buffer) + ", which has " + std::to_string(bytes) + " bytes");
  }

  void check(const Address& address, int64_t alignment, const std::string& engine) const {
    check(address);
    if (alignment_of(address, problem_) >= alignment) return;
    throw PlanError("offset " + std::to_string(address.offset) + " in " + name(address.buffer) +
                    " is not known to be a multiple of the " + std::to_string(alignment) +
                    " bytes that " + engine + " asks for");
  }

  const ConvProblem& problem_;
  int64_t workspace_bytes_;
};

}  // namespace

void check_launches(const std::vector<Launch>& launches, const ConvProblem& problem,
                    int64_t workspace_bytes) {
  for (const Launch& launch : launches) std::visit(LaunchCheck(problem, workspace_bytes), launch);
}

}  // namespace cudnn_autotune
