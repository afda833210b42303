#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace cudnn_autotune {

// leaky_relu and elu have a parameter: the slope below zero, and alpha. prelu has slopes below zero
// in a tensor, one for each channel.
enum class ActivationKind : uint8_t {
  none,
  relu,
  silu,
  gelu,
  gelu_tanh,
  sigmoid,
  hardswish,
  relu6,
  tanh,
  mish,
  leaky_relu,
  elu,
  prelu
};

struct Activation {
  ActivationKind kind = ActivationKind::none;
  double parameter = 0;  // 0 of a kind that has none

  bool has_parameter() const {
    return kind == ActivationKind::leaky_relu || kind == ActivationKind::elu;
  }
  // The name, as Python's Activation of engines/activations.py writes it: "", "relu",
  // "leaky_relu(0.1)".
  std::string name() const;
};

inline bool operator==(const Activation& one, const Activation& other) {
  return one.kind == other.kind && one.parameter == other.parameter;
}

// The activation of this name. Throws std::invalid_argument, which names the argument `activation`
// and all that is allowed.
Activation parse_activation(std::string_view name);

}  // namespace cudnn_autotune
