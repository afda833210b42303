#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>

namespace cudnn_autotune {

// An engine of cuDNN with the values of its knobs. Knobs are given by name (knob_names.h), because
// the frontend numbers them in another way than the backend. The text form is
// `eng67:KERNEL_CFG=3,WORKSPACE=0` or `eng0`, with the knobs in alphabetical order, or the same
// after `unfused:`. Equal configs have equal texts.
struct EngineConfig {
  int64_t engine = -1;
  std::map<std::string, int64_t> knobs;
  // Of a problem with a bias: the engine is one of the convolution alone, and whoever runs it adds
  // the bias afterwards.
  bool is_unfused = false;

  std::string text() const;
  // Also reads the number of a knob that has a name (`KNOB_24`), and then knows it by its name.
  // Throws std::invalid_argument, which names `engine_text`, if the text does not parse.
  static EngineConfig parse(const std::string& engine_text);

  bool operator==(const EngineConfig& other) const {
    return engine == other.engine && knobs == other.knobs && is_unfused == other.is_unfused;
  }
  bool operator<(const EngineConfig& other) const {
    return std::tie(is_unfused, engine, knobs) <
           std::tie(other.is_unfused, other.engine, other.knobs);
  }
};

}  // namespace cudnn_autotune
