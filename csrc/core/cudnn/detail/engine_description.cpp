#include "core/cudnn/detail/engine_description.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "core/cudnn/detail/knob_names.h"
#include "core/problem/check.h"

namespace cudnn_autotune {
namespace {

namespace fe = cudnn_frontend;

// The name of a note without its prefix: TENSOR_CORE for CUDNN_NUMERICAL_NOTE_TENSOR_CORE. One that
// is newer than the frontend is `NOTE_10`.
template <typename Note>
std::string note_name(Note note) {
  constexpr std::string_view kPrefix = "NOTE_";
  const std::string name = fe::to_string(note);
  const size_t prefix = name.find(kPrefix);
  if (name.rfind("CUDNN_", 0) != 0 || prefix == std::string::npos) {
    return std::string(kPrefix) + std::to_string(static_cast<int>(note));
  }
  return name.substr(prefix + kPrefix.size());
}

// More kinds of notes than any version of cuDNN has.
constexpr int64_t kMostNotes = 64;

template <typename Note>
std::vector<std::string> notes(cudnnBackendDescriptor_t engine, cudnnBackendAttributeName_t name,
                               cudnnBackendAttributeType_t type, const ConvProblem& problem) {
  std::vector<Note> values(kMostNotes);
  int64_t count = 0;
  const auto status =
      fe::detail::get_attribute(engine, name, type, kMostNotes, &count, values.data());
  if (status != CUDNN_STATUS_SUCCESS) {
    throw CudnnError("reading an engine's notes", fe::detail::get_error_string(status),
                     problem.text());
  }
  std::vector<std::string> names;
  for (int64_t i = 0; i < std::min(count, kMostNotes); ++i) names.push_back(note_name(values[i]));
  return names;
}

fe::ManagedOpaqueDescriptor engine_of(const fe::ManagedOpaqueDescriptor& descriptor,
                                      const ConvProblem& problem) {
  auto engine = fe::make_shared_backend_pointer(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  cudnnBackendDescriptor_t raw_engine = engine->get_backend_descriptor();
  int64_t count = 0;
  const auto status =
      fe::detail::get_attribute(descriptor->get_backend_descriptor(), CUDNN_ATTR_ENGINECFG_ENGINE,
                                CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count, &raw_engine);
  if (status != CUDNN_STATUS_SUCCESS) {
    throw CudnnError("reading the engine of a config", fe::detail::get_error_string(status),
                     problem.text());
  }
  return engine;
}

std::vector<std::string> behavior_notes_of(const fe::ManagedOpaqueDescriptor& engine,
                                           const ConvProblem& problem) {
  return notes<cudnnBackendBehaviorNote_t>(engine->get_backend_descriptor(),
                                           CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE,
                                           CUDNN_TYPE_BEHAVIOR_NOTE, problem);
}

}  // namespace

EngineConfig engine_config(const fe::ManagedOpaqueDescriptor& descriptor,
                           const ConvProblem& problem, bool is_unfused) {
  EngineConfig config;
  config.is_unfused = is_unfused;
  std::vector<std::pair<cudnnBackendKnobType_t, int64_t>> knobs;
  const auto status = fe::detail::get_engine_id_and_knobs(descriptor, config.engine, knobs);
  if (status != CUDNN_STATUS_SUCCESS) {
    throw CudnnError("reading an engine config", fe::detail::get_error_string(status),
                     problem.text());
  }
  for (const auto& [type, value] : knobs) config.knobs[knob_name(type)] = value;
  return config;
}

std::vector<std::string> behavior_notes(const fe::ManagedOpaqueDescriptor& descriptor,
                                        const ConvProblem& problem) {
  return behavior_notes_of(engine_of(descriptor, problem), problem);
}

Candidate described(const fe::ManagedOpaqueDescriptor& descriptor, EngineConfig config,
                    const ConvProblem& problem, const std::string& heuristic_mode) {
  Candidate candidate;
  candidate.config = std::move(config);
  candidate.heuristic_mode = heuristic_mode;
  auto managed = descriptor;
  CUDNN_AUTOTUNE_CHECK_FRONTEND(fe::detail::get_workspace_size(managed, candidate.workspace_bytes),
                                problem);
  const auto engine = engine_of(descriptor, problem);
  candidate.numerical_notes = notes<cudnnBackendNumericalNote_t>(
      engine->get_backend_descriptor(), CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
      problem);
  candidate.behavior_notes = behavior_notes_of(engine, problem);
  return candidate;
}

}  // namespace cudnn_autotune
