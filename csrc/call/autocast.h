#pragma once

#include <ATen/core/Tensor.h>

// What this package takes of <ATen/autocast_mode.h>, which includes the declarations of all of
// ATen's operators: half of the time to compile a file.

namespace at::autocast {

TORCH_API bool is_autocast_enabled(at::DeviceType device_type);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
TORCH_API at::Tensor cached_cast(at::ScalarType to_type, const at::Tensor& arg,
                                 at::DeviceType device_type);

}  // namespace at::autocast
