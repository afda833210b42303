#pragma once

#include <cudnn.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/conv_plan.h"
#include "core/conv_problem.h"
#include "core/engine_config.h"

namespace cudnn_autotune {

struct Candidate {
  EngineConfig config;
  int64_t workspace_bytes = 0;
  std::vector<std::string> numerical_notes;
  std::vector<std::string> behavior_notes;
  std::string heuristic_mode;  // the first that lists it: "A", "B" or "FALLBACK"
};

// Whether PyTorch's rules admit a config: determinism where it is asked for, inputs never converted
// to a narrower type, no tensor cores for float32 without TF32, no reduced-precision sums where
// they are switched off; the errata; and a limit on the workspace (bytes; -1: none).
bool is_allowed(const Candidate& candidate, const ConvProblem& problem, int64_t workspace_limit);

// The engine configs that cuDNN offers for one problem, on a GPU that is here (by its handle) or
// on one that is not (by its JSON description, handle null). Nothing is built until it is asked
// for. Not safe to use from two threads at once.
class EngineSearch {
 public:
  EngineSearch(const ConvProblem& problem, cudnnHandle_t handle);
  EngineSearch(const ConvProblem& problem, const std::string& device_json);
  ~EngineSearch();
  EngineSearch(const EngineSearch&) = delete;
  EngineSearch& operator=(const EngineSearch&) = delete;

  const ConvProblem& problem() const;

  // Configs of a heuristic mode ("A", "B" or "FALLBACK") in cuDNN's order, without those that an
  // earlier query of this object has listed.
  std::vector<Candidate> query(const std::string& heuristic_mode);

  // Throws CudnnError where the config does not exist or does not build.
  std::shared_ptr<ConvPlan> build(const EngineConfig& config);

  // By text, which another version of cuDNN or of this library may have written: one that does not
  // parse is a config that does not exist.
  std::shared_ptr<ConvPlan> build(const std::string& engine_text);
  // What this cuDNN says of it; in no heuristic mode. Throws CudnnError where it does not exist.
  Candidate describe(const std::string& engine_text);

  struct BuildResult {
    std::shared_ptr<ConvPlan> plan;  // null where it did not build
    std::string error;
  };
  // Builds on the caller's thread and on `threads` - 1 more, as far as they can be had, each of
  // which first calls `enter_thread` (it makes the CUDA device current, as it must be on the
  // caller's). Texts that do not parse and configs that do not build carry the reason.
  std::vector<BuildResult> build(const std::vector<std::string>& engine_texts, int threads,
                                 const std::function<void()>& enter_thread);

 private:
  struct Impl;

  EngineConfig parse(const std::string& engine_text) const;

  std::unique_ptr<Impl> impl_;
};

}  // namespace cudnn_autotune
