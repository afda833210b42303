#pragma once

#include <array>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>

namespace cudnn_autotune {

// The enumerator of this name. Enumerators are numbered from 0, in the order of the names. Throws
// std::invalid_argument, which names the argument and all that is allowed.
template <typename Enum, size_t count>
Enum by_name(const std::string& argument, std::string_view text,
             const std::array<const char*, count>& names) {
  std::string allowed;
  for (size_t i = 0; i < count; ++i) {
    if (text == names[i]) return static_cast<Enum>(i);
    allowed += (i > 0 ? ", " : "") + std::string(names[i]);
  }
  throw std::invalid_argument(argument + " must be one of " + allowed + ", got '" +
                              std::string(text) + "'");
}

}  // namespace cudnn_autotune
