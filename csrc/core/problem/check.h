#pragma once

#include <stdexcept>
#include <string>
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
