#pragma once

#include <cudnn_frontend.h>

#include <memory>
#include <string>
#include <vector>

#include "core/cudnn/conv_plan.h"
#include "core/cudnn/engine_config.h"
#include "core/problem/conv_problem.h"

namespace cudnn_autotune {

struct ConvPlan::Impl {
  cudnn_frontend::ExecutionPlan plan;
};

using DevicePropertiesPtr = std::shared_ptr<const cudnn_frontend::DeviceProperties>;

// Parses the JSON description of a GPU (cudnn_frontend::DeviceProperties). Throws
// std::invalid_argument, which names `device`, if cuDNN does not take it.
DevicePropertiesPtr parse_device_properties(const std::string& json);

// The frontend's graph of one problem. It is derived from Graph because the operation graph, from
// which engine configs and plans are made, is a protected member there.
class ConvGraph : private cudnn_frontend::graph::Graph {
 public:
  // Builds the graph for the GPU of `handle`, or for the one that `device` describes; then `handle`
  // is null. With `is_unfused` the graph is that of the convolution without the problem's epilogue.
  // Throws CudnnError.
  ConvGraph(const ConvProblem& problem, cudnnHandle_t handle, DevicePropertiesPtr device,
            bool is_unfused = false);

  const ConvProblem& problem() const { return problem_; }

  // The engine configs of one heuristic mode, in cuDNN's order, best first. Empty if it has none.
  cudnn_frontend::EngineConfigList query(cudnn_frontend::HeurMode_t mode) const;

  // The descriptor of an engine config. Throws CudnnError if cuDNN has no such config.
  cudnn_frontend::ManagedOpaqueDescriptor descriptor(const EngineConfig& config) const;

  // Builds a plan. An engine that is compiled at run time compiles here, for some 0.3 s. Safe to
  // call from several threads. Throws CudnnError.
  std::shared_ptr<ConvPlan> build(const EngineConfig& config,
                                  const cudnn_frontend::ManagedOpaqueDescriptor& descriptor) const;

  // Makes a plan of what ConvPlan::serialized() returned for the same problem and config, on the
  // same GPU and with the same cuDNN. It compiles nothing. `handle` is that of the calling thread,
  // or null if the GPU is given by a description. Safe to call from several threads. Throws
  // CudnnError.
  std::shared_ptr<ConvPlan> read_back(const EngineConfig& config, const std::string& serialized,
                                      cudnnHandle_t handle) const;

 private:
  using Tensor = std::shared_ptr<cudnn_frontend::graph::Tensor_attributes>;

  // Adds the problem's epilogue to the result of its convolution; returns the last result.
  Tensor add_epilogue(Tensor result);
  Tensor add_pointwise(cudnn_frontend::PointwiseMode_t mode, const Tensor& a, const Tensor& b = {});
  Tensor add_relu6(const Tensor& input);
  Tensor add_activation(const Tensor& input);
  // Adds an input with a number for each channel of the output.
  Tensor add_per_channel(const char* name, int64_t uid);

  ConvProblem problem_;
};

}  // namespace cudnn_autotune
