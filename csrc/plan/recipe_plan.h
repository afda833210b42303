#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "core/problem/conv_problem.h"
#include "plan/plan.h"

namespace cudnn_autotune {

// What a recipe is made of, as in cudnn_autotune/engines/recipe.py.

enum class Buffer : uint8_t { x, w, y, bias, residual, slope, workspace };
constexpr std::array kBufferNames{"x", "w", "y", "bias", "residual", "slope", "workspace"};

struct Address {
  Buffer buffer;
  int64_t offset = 0;  // in bytes, from the buffer's first element
};

// A descriptor by which TMA copies boxes of a tensor; dimensions come innermost first.
struct TensorMap {
  Address address;
  DataType element;
  std::vector<uint64_t> shape;    // in elements
  std::vector<uint64_t> strides;  // in bytes, of all dimensions but the innermost
  std::vector<uint32_t> box;      // in elements
  int swizzle_bytes = 0;          // 0, 32, 64 or 128
};

struct KernelLaunch {
  using Argument = std::variant<Address, int32_t, int64_t, float, TensorMap>;

  std::string cubin;
  std::string function;
  std::array<uint32_t, 3> grid;
  std::array<uint32_t, 3> block;
  std::array<uint32_t, 3> cluster;  // in blocks
  int shared_bytes = 0;             // dynamic
  std::vector<Argument> arguments;
};

// An engine of another problem. Its own workspace lies behind the recipe's.
struct EngineLaunch {
  ConvProblem problem;
  std::string engine_text;
  Address x, w, y;
  std::optional<Address> bias, residual;
};

// A function that enqueues on the current stream. `workspace` is the recipe's, in bytes (uint8).
struct FunctionLaunch {
  std::function<void(const Operands& operands, const at::Tensor& workspace)> function;
};

using Launch = std::variant<KernelLaunch, EngineLaunch, FunctionLaunch>;

// What every workspace, and the engines' part of it, begins at a multiple of, in bytes.
constexpr int64_t kWorkspaceAligned = 256;

// A sequence of launches into the operands and a workspace. To launch it takes no memory from the
// heap, and calls no Python unless a FunctionLaunch does.
class RecipePlan final : public Plan {
 public:
  // Loads the kernels and builds the engines for a CUDA device. `workspace_bytes` is the size of
  // Buffer::workspace. Throws PlanError, which names the text, if one of them does not load or
  // build. Python has checked addresses, clusters and tensor maps (engines/recipe_checks.py).
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
