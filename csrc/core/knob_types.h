#pragma once

#include <string>

namespace cudnn_frontend {
enum class KnobType_t;
}

namespace cudnn_autotune {

// NOT_SET where the frontend has no knob of that name.
cudnn_frontend::KnobType_t knob_type(const std::string& name);

}  // namespace cudnn_autotune
