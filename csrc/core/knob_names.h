#pragma once

#include <cudnn.h>

#include <string>

namespace cudnn_autotune {

// The frontend's name of a knob (`KERNEL_CFG`), or an empty string for one that it cannot set.
std::string knob_name(cudnnBackendKnobType_t backend_knob);

// Whether the frontend has a knob of that name.
bool is_knob_name(const std::string& name);

}  // namespace cudnn_autotune
