#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace cudnn_autotune {

// Counts, by reason, the calls that ATen served because cuDNN could not, and the remembered choices
// that could not be used. Such calls are no errors, but a user can see them
// (cudnn_autotune.fallbacks()). All functions are safe to use from several threads.
void count_fallback(const char* reason);
std::map<std::string, int64_t> fallbacks();
void clear_fallbacks();

}  // namespace cudnn_autotune
