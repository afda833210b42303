#pragma once

#include <dlfcn.h>

namespace cudnn_autotune {

// Points `function` at the function of this name in a library that is open, or at nothing if the
// library has none. Returns whether it has one.
template <typename Function>
bool bind_symbol(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace cudnn_autotune
