#pragma once

#include <cudnn.h>

#include <optional>
#include <string>

namespace cudnn_autotune {

// The name of a knob in cuDNN's enum, without its prefix, such as `KERNEL_CFG`. (The frontend's
// KnobType_t has the same names, but not all of them.) A knob newer than this table is `KNOB_46`.
std::string knob_name(cudnnBackendKnobType_t knob);

// A number is read for every knob, also for one that has a name by now: `KNOB_44` may have been
// written before it had one. nullopt if no knob has that name.
std::optional<cudnnBackendKnobType_t> knob_by_name(const std::string& name);

}  // namespace cudnn_autotune
