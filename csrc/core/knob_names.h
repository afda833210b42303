#pragma once

#include <cudnn.h>

#include <optional>
#include <string>

namespace cudnn_autotune {

// A knob's name in cuDNN's enum without its prefix, `KERNEL_CFG` (the frontend's KnobType_t has
// the same names for those that it knows), or `KNOB_44` for one that is newer than this table.
std::string knob_name(cudnnBackendKnobType_t knob);

// nullopt where no knob has that name.
std::optional<cudnnBackendKnobType_t> knob_by_name(const std::string& name);

}  // namespace cudnn_autotune
