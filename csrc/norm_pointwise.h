#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/cuda_driver.h"

namespace cudnn_autotune {

// The operator `norm_pointwise` of cudnn_autotune/engines/norms/pointwise.py, which has its schema.

// One launch of its kernel.
struct PointwiseLaunch {
  LoadedKernel kernel;
  std::array<unsigned, 2> grid;
  unsigned threads;
  int shared_bytes;  // dynamic
  int32_t tiles;
};

// What a launch depends on. The names are those of PointwiseProblem in pointwise_plan.py.
struct PointwiseKey {
  c10::DeviceIndex device;
  int64_t plan;
  at::ScalarType dtype, vectors;
  int64_t pixels, channels, out_channels;
  bool bias, residual;
  std::string activation;

  bool operator<(const PointwiseKey& other) const;
};

// Loads a launch for the key's device, which is current; null if the kernel does not compute it.
// Throws PlanError.
using PointwiseLoader =
    std::function<std::shared_ptr<const PointwiseLaunch>(const PointwiseKey& key)>;
void set_pointwise_loader(PointwiseLoader loader);

// Loads the kernel of a cubin for the current device. Throws PlanError.
LoadedKernel load_pointwise(const std::string& cubin, int shared_bytes);

}  // namespace cudnn_autotune
