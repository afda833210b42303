#include "core/problem/activation.h"

#include <array>
#include <charconv>
#include <cstddef>
#include <stdexcept>
#include <system_error>

namespace cudnn_autotune {
namespace {

// The names, in the order of the enumerators.
constexpr std::array<std::string_view, 13> kActivationNames{
    "",      "relu", "silu", "gelu",       "gelu_tanh", "sigmoid", "hardswish",
    "relu6", "tanh", "mish", "leaky_relu", "elu",       "prelu"};
static_assert(kActivationNames.size() == static_cast<size_t>(ActivationKind::prelu) + 1);

// Numbers in this range are written without an exponent, by C++ and by Python alike.
constexpr double kLeastParameter = 1e-4;
constexpr double kMostParameter = 1e3;

[[noreturn]] void refuse_activation(std::string_view name) {
  std::string allowed = "''";
  for (size_t i = 1; i < kActivationNames.size(); ++i) {
    const Activation one{static_cast<ActivationKind>(i)};
    allowed += ", " + std::string(kActivationNames[i]) + (one.has_parameter() ? "(PARAMETER)" : "");
  }
  throw std::invalid_argument("activation must be one of " + allowed +
                              ", where PARAMETER is from 0.0001 to 1000, got '" +
                              std::string(name) + "'");
}

}  // namespace

std::string Activation::name() const {
  std::string text(kActivationNames.at(static_cast<size_t>(kind)));
  if (!has_parameter()) return text;
  std::array<char, 32> digits{};  // the shortest that are read back as the same number
  const auto end = std::to_chars(digits.begin(), digits.end(), parameter, std::chars_format::fixed);
  return text + "(" + std::string(digits.begin(), end.ptr) + ")";
}

Activation parse_activation(std::string_view name) {
  const size_t bracket = name.find('(');
  const std::string_view kind_name = name.substr(0, bracket);
  for (size_t i = 0; i < kActivationNames.size(); ++i) {
    if (kind_name != kActivationNames[i]) continue;
    Activation found{static_cast<ActivationKind>(i)};
    const bool is_given = bracket != std::string_view::npos;
    if (found.has_parameter() != is_given) break;
    if (is_given) {
      const std::string_view rest = name.substr(bracket + 1);
      if (rest.empty() || rest.back() != ')') break;
      const char* const end = rest.data() + rest.size() - 1;
      const auto read = std::from_chars(rest.data(), end, found.parameter);
      const bool is_read = read.ec == std::errc() && read.ptr == end;
      if (!is_read || !(found.parameter >= kLeastParameter && found.parameter <= kMostParameter))
        break;
    }
    return found;
  }
  refuse_activation(name);
}

}  // namespace cudnn_autotune
