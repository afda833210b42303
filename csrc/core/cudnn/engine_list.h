#pragma once

#include <cudnn.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/cudnn/candidate.h"
#include "core/cudnn/conv_plan.h"
#include "core/cudnn/engine_config.h"
#include "core/problem/conv_problem.h"

namespace cudnn_autotune {

// What a compiled plan is for. Its cuDNN and driver are those of this process.
struct PlanName {
  std::string problem;  // ConvProblem::text()
  std::string engine;   // EngineConfig::text()
  std::string gpu;      // a JSON description of a GPU; empty: the current CUDA device
};

// Plans with their compiled code, which another process wrote and a later one will read. Both
// functions are called from any thread, and throw nothing that a caller should see.
struct KeptPlans {
  std::string behavior_note;  // engines with this note are kept; empty: all are
  std::function<std::optional<std::string>(const PlanName&)> find;
  std::function<void(const PlanName&, const std::string& serialized)> keep;
};

// Null: nothing is kept.
std::shared_ptr<const KeptPlans> kept_plans();
void set_kept_plans(std::shared_ptr<const KeptPlans> kept);

// Lists the engine configs that cuDNN offers for one problem, and builds their plans. The GPU is
// that of a handle, or one that is not here and is given by its JSON description. Several threads
// may use an EngineList at once.
//
// A problem whose epilogue is a bias alone has two kinds of configs: those of the graph that adds
// the bias, and unfused ones (EngineConfig::is_unfused).
class EngineList {
 public:
  // Returns the calling thread's handle of the current device.
  using HandleOfThread = cudnnHandle_t (*)();

  EngineList(const ConvProblem& problem, HandleOfThread handle);
  EngineList(const ConvProblem& problem, const std::string& device_json);
  ~EngineList();
  EngineList(const EngineList&) = delete;
  EngineList& operator=(const EngineList&) = delete;

  const ConvProblem& problem() const;

  // The configs of a heuristic mode ("A", "B" or "FALLBACK") in cuDNN's order, without those that
  // an earlier query of this object has listed. Where there are two kinds they alternate, and an
  // unfused one comes first: PyTorch runs that. Throws std::invalid_argument for another mode, and
  // CudnnError.
  std::vector<Candidate> query(const std::string& heuristic_mode);

  // Builds a plan, or reads it back if it is kept (KeptPlans). Throws CudnnError if the config
  // does not exist or does not build.
  std::shared_ptr<ConvPlan> build(const EngineConfig& config);

  // Builds a config that is given as text. Another version of cuDNN or of this library may have
  // written the text, so one that does not parse throws CudnnError too.
  std::shared_ptr<ConvPlan> build(const std::string& engine_text);
  // The kept plan of a config; null if there is none. It compiles nothing. Throws CudnnError if the
  // config does not exist.
  std::shared_ptr<ConvPlan> read_back(const std::string& engine_text);
  // What this cuDNN says of a config; its heuristic_mode is "". Throws CudnnError if the config
  // does not exist.
  Candidate describe(const std::string& engine_text);

 private:
  struct Impl;

  EngineConfig parse(const std::string& engine_text) const;

  std::unique_ptr<Impl> impl_;
};

}  // namespace cudnn_autotune
