#pragma once

#include <array>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace cudnn_autotune {

// A plan cannot be built, or cannot be launched. The message names the candidate or the problem.
class PlanError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A failure inside cuDNN or its frontend. The message names the call, the status and the problem,
// and the two environment variables that make cuDNN log more.
class CudnnError : public PlanError {
 public:
  CudnnError(const std::string& call, const std::string& status, const std::string& problem)
      : PlanError("cuDNN: " + call + " failed (" + status + ") for " + problem +
                  ". Set CUDNN_LOGLEVEL_DBG=2 CUDNN_LOGDEST_DBG=stderr for cuDNN's own account of "
                  "it.") {}
};

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

// Throws CudnnError if a call of the frontend (which returns `error_t`) failed. Only then the text
// of `problem` is made.
#define CUDNN_AUTOTUNE_CHECK_FRONTEND(call, problem)                                \
  do {                                                                              \
    auto cudnn_autotune_error = (call);                                             \
    if (cudnn_autotune_error.is_bad()) {                                            \
      throw ::cudnn_autotune::CudnnError(#call, cudnn_autotune_error.get_message(), \
                                         (problem).text());                         \
    }                                                                               \
  } while (0)
