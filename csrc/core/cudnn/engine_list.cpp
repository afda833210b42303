#include "core/cudnn/engine_list.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "core/cudnn/cudnn_library.h"
#include "core/cudnn/detail/conv_graph.h"
#include "core/cudnn/detail/knob_names.h"
#include "core/cudnn/errata.h"
#include "core/problem/check.h"

namespace cudnn_autotune {
namespace {

namespace fe = cudnn_frontend;

fe::HeurMode_t heuristic_mode(const std::string& mode) {
  if (mode == "A") return fe::HeurMode_t::A;
  if (mode == "B") return fe::HeurMode_t::B;
  if (mode == "FALLBACK") return fe::HeurMode_t::FALLBACK;
  throw std::invalid_argument("heuristic_mode must be 'A', 'B' or 'FALLBACK', got '" + mode + "'");
}

// 86 for 8.6; 0 if there is no device.
int64_t compute_capability_here() {
  int device = 0;
  int major = 0;
  int minor = 0;
  const bool is_known =
      cudaGetDevice(&device) == cudaSuccess &&
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess;
  return is_known ? int64_t{10} * major + minor : 0;
}

// The same of a GPU that JSON describes, which cuDNN has taken: `"deviceVer": 860`.
int64_t compute_capability_in(const std::string& device_json) {
  const std::string field = "\"deviceVer\"";
  const size_t found = device_json.find(field);
  if (found == std::string::npos) return 0;
  const size_t digits = device_json.find_first_not_of(": \t\r\n", found + field.size());
  return digits == std::string::npos ? 0 : std::atoll(device_json.c_str() + digits) / 10;
}

// Never destroyed, because threads may build plans while the process exits.
struct Current {
  std::mutex mutex;
  std::shared_ptr<const KeptPlans> kept;
};

Current& current() {
  static auto* current = new Current();
  return *current;
}

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

// Throws CudnnError if a call of cuDNN failed.
void check(cudnnStatus_t status, const char* call, const ConvProblem& problem) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  throw CudnnError(call, fe::detail::get_error_string(status), problem.text());
}

template <typename Note>
std::vector<std::string> notes(cudnnBackendDescriptor_t engine, cudnnBackendAttributeName_t name,
                               cudnnBackendAttributeType_t type, const ConvProblem& problem) {
  std::vector<Note> values(kMostNotes);
  int64_t count = 0;
  check(fe::detail::get_attribute(engine, name, type, kMostNotes, &count, values.data()),
        "reading an engine's notes", problem);
  std::vector<std::string> names;
  for (int64_t i = 0; i < std::min(count, kMostNotes); ++i) names.push_back(note_name(values[i]));
  return names;
}

fe::ManagedOpaqueDescriptor engine_of(const fe::ManagedOpaqueDescriptor& descriptor,
                                      const ConvProblem& problem) {
  auto engine = fe::make_shared_backend_pointer(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  cudnnBackendDescriptor_t raw_engine = engine->get_backend_descriptor();
  int64_t count = 0;
  check(fe::detail::get_attribute(descriptor->get_backend_descriptor(), CUDNN_ATTR_ENGINECFG_ENGINE,
                                  CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count, &raw_engine),
        "reading the engine of a config", problem);
  return engine;
}

std::vector<std::string> behavior_notes_of(const fe::ManagedOpaqueDescriptor& engine,
                                           const ConvProblem& problem) {
  return notes<cudnnBackendBehaviorNote_t>(engine->get_backend_descriptor(),
                                           CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE,
                                           CUDNN_TYPE_BEHAVIOR_NOTE, problem);
}

// The engine and its knobs. Whether it is unfused is not in the descriptor.
EngineConfig engine_config(const fe::ManagedOpaqueDescriptor& descriptor,
                           const ConvProblem& problem, bool is_unfused) {
  EngineConfig config;
  config.is_unfused = is_unfused;
  std::vector<std::pair<cudnnBackendKnobType_t, int64_t>> knobs;
  check(fe::detail::get_engine_id_and_knobs(descriptor, config.engine, knobs),
        "reading an engine config", problem);
  for (const auto& [type, value] : knobs) config.knobs[knob_name(type)] = value;
  return config;
}

}  // namespace

std::shared_ptr<const KeptPlans> kept_plans() {
  const std::lock_guard lock(current().mutex);
  return current().kept;
}

void set_kept_plans(std::shared_ptr<const KeptPlans> kept) {
  const std::lock_guard lock(current().mutex);
  std::swap(current().kept, kept);
}

struct EngineList::Impl {
  Impl(const ConvProblem& problem, HandleOfThread handle)
      : problem(problem), handle(handle), compute_capability(compute_capability_here()) {
    make_graphs(handle(), nullptr);
  }
  Impl(const ConvProblem& problem, const std::string& device_json)
      : problem(problem), gpu(device_json) {
    make_graphs(nullptr, parse_device_properties(device_json));
    compute_capability = compute_capability_in(device_json);
  }

  void make_graphs(cudnnHandle_t own_handle, const DevicePropertiesPtr& device) {
    if (problem.has_only_bias()) unfused.emplace(problem, own_handle, device, /*is_unfused=*/true);
    try {
      whole.emplace(problem, own_handle, device);
    } catch (const CudnnError&) {
      if (!unfused) throw;
    }
  }

  const ConvGraph& graph_of(const EngineConfig& config) const {
    const auto& graph = config.is_unfused ? unfused : whole;
    if (!graph) {
      throw CudnnError("finding " + config.text(), "cuDNN has no such graph", problem.text());
    }
    return *graph;
  }

  // The reference stays valid.
  const fe::ManagedOpaqueDescriptor& descriptor(const EngineConfig& config) {
    const std::lock_guard lock(mutex);
    const auto known = descriptors.find(config);
    if (known != descriptors.end()) return known->second;
    return descriptors.emplace(config, graph_of(config).descriptor(config)).first->second;
  }

  // What keeps the plan of a config; null if nothing does.
  std::shared_ptr<const KeptPlans> keeper(const fe::ManagedOpaqueDescriptor& descriptor) const {
    auto kept = kept_plans();
    if (kept == nullptr || kept->behavior_note.empty()) return kept;
    const auto notes = behavior_notes_of(engine_of(descriptor, problem), problem);
    const bool is_kept = std::find(notes.begin(), notes.end(), kept->behavior_note) != notes.end();
    return is_kept ? kept : nullptr;
  }

  PlanName name(const EngineConfig& config) const { return {problem.text(), config.text(), gpu}; }

  // Null if no plan is kept, if cuDNN does not take it, or if this thread gets no handle.
  std::shared_ptr<ConvPlan> read_back(const KeptPlans& kept, const EngineConfig& config) const {
    try {
      const auto serialized = kept.find(name(config));
      if (!serialized) return nullptr;
      auto* own_handle = handle == nullptr ? nullptr : handle();
      return graph_of(config).read_back(config, *serialized, own_handle);
    } catch (const std::exception&) {
      return nullptr;
    }
  }

  std::shared_ptr<ConvPlan> build(const EngineConfig& config,
                                  const fe::ManagedOpaqueDescriptor& descriptor) const {
    const ConvGraph& graph = graph_of(config);
    const auto kept = keeper(descriptor);
    if (kept == nullptr) return graph.build(config, descriptor);
    if (auto plan = read_back(*kept, config)) return plan;
    auto plan = graph.build(config, descriptor);
    try {
      kept->keep(name(config), plan->serialized());
    } catch (const CudnnError&) {
      // cuDNN cannot serialize it, so the next process compiles it again.
    }
    return plan;
  }

  // The configs of one graph that no earlier query has listed.
  std::vector<Candidate> list(const std::optional<ConvGraph>& graph, const std::string& mode) {
    std::vector<Candidate> candidates;
    if (!graph || ends_the_process(mode, problem, cudnn_runtime_version())) return candidates;
    for (const auto& descriptor : graph->query(heuristic_mode(mode))) {
      auto config = engine_config(descriptor, problem, &graph == &unfused);
      {
        const std::lock_guard lock(mutex);
        if (!listed.insert(config).second) continue;
        descriptors.emplace(config, descriptor);
      }
      candidates.push_back(describe(descriptor, std::move(config), mode));
    }
    return candidates;
  }

  // `mode` is the one that lists it, or "".
  Candidate describe(const fe::ManagedOpaqueDescriptor& descriptor, EngineConfig config,
                     const std::string& mode) const {
    Candidate candidate;
    candidate.config = std::move(config);
    candidate.heuristic_mode = mode;
    candidate.compute_capability = compute_capability;
    auto managed = descriptor;
    CUDNN_AUTOTUNE_CHECK_FRONTEND(
        fe::detail::get_workspace_size(managed, candidate.workspace_bytes), problem);
    const auto engine = engine_of(descriptor, problem);
    candidate.numerical_notes = notes<cudnnBackendNumericalNote_t>(
        engine->get_backend_descriptor(), CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
        CUDNN_TYPE_NUMERICAL_NOTE, problem);
    candidate.behavior_notes = behavior_notes_of(engine, problem);
    return candidate;
  }

  ConvProblem problem;
  std::optional<ConvGraph> whole;    // empty if cuDNN cannot express the problem with its bias
  std::optional<ConvGraph> unfused;  // of a problem whose epilogue is a bias alone
  HandleOfThread handle = nullptr;   // null: `gpu` describes the GPU
  std::string gpu;
  int64_t compute_capability = 0;  // of the GPU: 86 for 8.6
  std::mutex mutex;                // of what follows
  std::map<EngineConfig, fe::ManagedOpaqueDescriptor> descriptors;
  std::set<EngineConfig> listed;
};

EngineList::EngineList(const ConvProblem& problem, HandleOfThread handle)
    : impl_(std::make_unique<Impl>(problem, handle)) {}

EngineList::EngineList(const ConvProblem& problem, const std::string& device_json)
    : impl_(std::make_unique<Impl>(problem, device_json)) {}

EngineList::~EngineList() = default;

const ConvProblem& EngineList::problem() const { return impl_->problem; }

std::vector<Candidate> EngineList::query(const std::string& mode) {
  auto unfused = impl_->list(impl_->unfused, mode);
  auto whole = impl_->list(impl_->whole, mode);
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < std::max(unfused.size(), whole.size()); ++i) {
    if (i < unfused.size()) candidates.push_back(std::move(unfused[i]));
    if (i < whole.size()) candidates.push_back(std::move(whole[i]));
  }
  return candidates;
}

std::shared_ptr<ConvPlan> EngineList::build(const EngineConfig& config) {
  return impl_->build(config, impl_->descriptor(config));
}

EngineConfig EngineList::parse(const std::string& engine_text) const {
  try {
    return EngineConfig::parse(engine_text);
  } catch (const std::invalid_argument& error) {
    throw CudnnError("reading an engine config", error.what(), problem().text());
  }
}

std::shared_ptr<ConvPlan> EngineList::build(const std::string& engine_text) {
  return build(parse(engine_text));
}

std::shared_ptr<ConvPlan> EngineList::read_back(const std::string& engine_text) {
  const auto config = parse(engine_text);
  const auto kept = impl_->keeper(impl_->descriptor(config));
  return kept == nullptr ? nullptr : impl_->read_back(*kept, config);
}

Candidate EngineList::describe(const std::string& engine_text) {
  auto config = parse(engine_text);
  const auto& descriptor = impl_->descriptor(config);
  return impl_->describe(descriptor, std::move(config), "");
}

}  // namespace cudnn_autotune
