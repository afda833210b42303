#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace cudnn_autotune {

// Calls that ATen served because cuDNN could not, and remembered choices that may not serve, by
// reason. Never silent, never an error.
void count_fallback(const char* reason);
std::map<std::string, int64_t> fallbacks();
void clear_fallbacks();

}  // namespace cudnn_autotune
