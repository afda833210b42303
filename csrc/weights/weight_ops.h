#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>

#include <functional>
#include <string>

namespace cudnn_autotune {

// The operator `fold_weights` of cudnn_autotune/compile/weights/operators.py, which has its schema.

// Returns the machine code of its kernel for a GPU and the dtypes of weights and results. Throws
// PlanError.
using WeightKernels = std::function<std::string(c10::DeviceIndex device, at::ScalarType weight,
                                                at::ScalarType folded)>;
void set_weight_kernels(WeightKernels kernels);

}  // namespace cudnn_autotune
