#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace cudnn_autotune {

// An engine of cuDNN and its knob settings. Knobs go by name (knob_names.h), since the frontend's
// numbers differ from the backend's. The text form, `eng67:KERNEL_CFG=3,WORKSPACE=0` or `eng0`,
// lists the knobs by name and leads back to the same plan.
struct EngineConfig {
  int64_t engine = -1;
  std::map<std::string, int64_t> knobs;

  std::string text() const;
  // Throws std::invalid_argument naming `engine_text` where it does not parse.
  static EngineConfig parse(const std::string& engine_text);

  bool operator==(const EngineConfig& other) const {
    return engine == other.engine && knobs == other.knobs;
  }
  bool operator<(const EngineConfig& other) const {
    return engine != other.engine ? engine < other.engine : knobs < other.knobs;
  }
};

}  // namespace cudnn_autotune
