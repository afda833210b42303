#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "core/problem/conv_problem.h"
#include "plan/operands.h"

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

// Checks what can be known of a recipe before anything is built. Throws PlanError if an address is
// not in its buffer, or less aligned than its engine asks for, if an engine lacks a bias, if a
// cluster does not divide its grid, or if TMA takes no such tensor map.
void check_launches(const std::vector<Launch>& launches, const ConvProblem& problem,
                    int64_t workspace_bytes);

}  // namespace cudnn_autotune
