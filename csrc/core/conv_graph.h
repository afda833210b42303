#pragma once

#include <cudnn_frontend.h>

#include <memory>
#include <string>
#include <vector>

#include "core/conv_plan.h"
#include "core/conv_problem.h"
#include "core/engine_config.h"

namespace cudnn_autotune {

using DevicePropertiesPtr = std::shared_ptr<const cudnn_frontend::DeviceProperties>;

// Reads a GPU's JSON description (cudnn_frontend::DeviceProperties). Throws
// std::invalid_argument naming `device` where cuDNN does not take it.
DevicePropertiesPtr parse_device_properties(const std::string& json);

// The frontend's graph of one problem. Derived from Graph because the candidate list that cuDNN's
// own samplers take (`ExecutionPlan`) is protected there.
class ConvGraph : private cudnn_frontend::graph::Graph {
 public:
  // For the GPU of `handle`, or, where `device` is set, for the one that it describes (`handle`
  // is then null). Throws CudnnError.
  ConvGraph(const ConvProblem& problem, cudnnHandle_t handle, DevicePropertiesPtr device);

  const ConvProblem& problem() const { return problem_; }

  // Engine configs of one heuristic mode, best first; empty where the mode has none.
  cudnn_frontend::EngineConfigList query(cudnn_frontend::HeurMode_t mode) const;

  // The descriptor of an engine config. Throws CudnnError where cuDNN has no such config.
  cudnn_frontend::ManagedOpaqueDescriptor descriptor(const EngineConfig& config) const;

  // Builds; run-time-compiled engines compile here (some 0.3 s). Safe from several threads at
  // once. Throws CudnnError.
  std::shared_ptr<ConvPlan> build(const EngineConfig& config,
                                  const cudnn_frontend::ManagedOpaqueDescriptor& descriptor) const;

 private:
  ConvProblem problem_;
};

}  // namespace cudnn_autotune
