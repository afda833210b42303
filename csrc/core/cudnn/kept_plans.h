#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

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

}  // namespace cudnn_autotune
