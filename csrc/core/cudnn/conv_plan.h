#pragma once

#include <cudnn.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "core/cudnn/engine_config.h"
#include "core/problem/conv_problem.h"

namespace cudnn_autotune {

// The device addresses of the forward convolution's three tensors, and of those that its epilogue
// reads. fprop writes y, dgrad writes x and wgrad writes w.
struct ConvPointers {
  void* x = nullptr;
  void* w = nullptr;
  void* y = nullptr;
  void* bias = nullptr;      // null: none
  void* residual = nullptr;  // null: none
  void* slope = nullptr;     // null: none

  bool operator==(const ConvPointers& other) const {
    return x == other.x && w == other.w && y == other.y && bias == other.bias &&
           residual == other.residual && slope == other.slope;
  }
};

// The unique ids of these tensors in every graph that this library builds.
constexpr int64_t kUidX = 1;
constexpr int64_t kUidW = 2;
constexpr int64_t kUidY = 3;
constexpr int64_t kUidBias = 4;
constexpr int64_t kUidResidual = 5;
// Of the constants of hard-swish, which cuDNN has as no operation of its own:
// x * min(max(x + 3, 0), 6) / 6.
constexpr int64_t kUidThree = 6;
constexpr int64_t kUidSixth = 7;
// The slopes of prelu.
constexpr int64_t kUidSlope = 8;

// What a launch of a problem binds: unique ids, and an address for each. It is made in calls, so it
// needs no heap.
struct Bindings {
  // Without the problem's epilogue if `is_unfused`.
  Bindings(const ConvProblem& problem, const ConvPointers& pointers, bool is_unfused);

  int64_t count = 0;
  std::array<int64_t, kUidSlope> uids{};
  std::array<void*, kUidSlope> addresses{};
};

// A built execution plan. Two threads may not use it at once (pytorch issue 103939).
class ConvPlan {
 public:
  // Holds the frontend's plan, whose headers are slow to compile and stay out of this one.
  struct Impl;

  // `descriptor` is that of the frontend's plan, which `impl` keeps alive.
  ConvPlan(std::shared_ptr<const Impl> impl, cudnnBackendDescriptor_t descriptor,
           int64_t workspace_bytes, const ConvProblem& problem, EngineConfig config,
           bool is_read_back);
  ~ConvPlan();
  ConvPlan(const ConvPlan&) = delete;
  ConvPlan& operator=(const ConvPlan&) = delete;

  // Whether it was read back, and not built.
  bool is_read_back() const { return is_read_back_; }
  const EngineConfig& config() const { return config_; }
  const ConvProblem& problem() const { return problem_; }
  int64_t workspace_bytes() const { return workspace_bytes_; }
  const Impl& impl() const { return *impl_; }

  // The plan with its compiled code, for ConvGraph::read_back(). Throws CudnnError.
  std::string serialized() const;

  // Enqueues the plan on the handle's stream. `workspace` is device memory of workspace_bytes() or
  // more. If the config is unfused, the caller adds the bias. Throws CudnnError.
  void execute(cudnnHandle_t handle, const ConvPointers& pointers, void* workspace);

 private:
  class VariantPack;

  std::shared_ptr<const Impl> impl_;
  cudnnBackendDescriptor_t descriptor_;
  int64_t workspace_bytes_;
  ConvProblem problem_;
  EngineConfig config_;
  bool is_read_back_;
  // The addresses of the last launch, which are mostly those of the next one.
  std::unique_ptr<VariantPack> pack_;
};

}  // namespace cudnn_autotune
