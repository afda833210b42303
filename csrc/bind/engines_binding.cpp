#include "bind/bindings.h"

#include <c10/cuda/CUDAException.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "call/torch_bridge.h"
#include "core/cudnn/cudnn_library.h"
#include "core/cudnn/engine_list.h"
#include "core/cudnn/errata.h"
#include "core/problem/check.h"
#include "plan/build_plan.h"

namespace py = pybind11;
using py::literals::operator""_a;

namespace cudnn_autotune {
namespace {

// Makes a problem from the fields of Python's ConvProblem, which has checked them. Throws
// std::invalid_argument (Python's ValueError) for lists that do not fit into one.
ConvProblem make_problem(const std::string& op, const std::vector<int64_t>& input_shape,
                         const std::vector<int64_t>& weight_shape,
                         const std::vector<int32_t>& stride, const std::vector<int32_t>& padding,
                         const std::vector<int32_t>& dilation, int32_t groups,
                         const std::string& dtype, const std::string& layout, bool deterministic,
                         bool allow_tf32, bool allow_reduced_precision,
                         const std::string& depthwise_kernel,
                         const std::tuple<int, int, int>& alignment, bool bias, bool residual,
                         const std::string& activation,
                         const std::optional<std::pair<int32_t, int32_t>>& pixel_strides) {
  const size_t n = stride.size();
  if (n < 1 || n > kMaxSpatialDims || input_shape.size() != n + 2 || weight_shape.size() != n + 2 ||
      padding.size() != 2 * n || dilation.size() != n) {
    throw std::invalid_argument("ConvProblem: the lists' lengths do not fit together");
  }
  ConvProblem problem;
  std::copy(input_shape.begin(), input_shape.end(), problem.x.begin());
  std::copy(weight_shape.begin(), weight_shape.end(), problem.w.begin());
  std::copy(stride.begin(), stride.end(), problem.stride.begin());
  std::copy(padding.begin(), padding.begin() + n, problem.pre_padding.begin());
  std::copy(padding.begin() + n, padding.end(), problem.post_padding.begin());
  std::copy(dilation.begin(), dilation.end(), problem.dilation.begin());
  problem.groups = groups;
  problem.spatial_dims = static_cast<uint8_t>(n);
  problem.op = by_name<ConvOp>("op", op, kOpNames);
  problem.dtype = by_name<DataType>("dtype", dtype, kDataTypeNames);
  problem.layout = by_name<Layout>("memory_format", layout, kLayoutNames);
  problem.deterministic = deterministic;
  problem.allow_lower_precision = allow_tf32 && allow_reduced_precision;
  problem.depthwise_kernel =
      by_name<DepthwiseKernel>("depthwise_kernel", depthwise_kernel, kDepthwiseKernelNames);
  problem.x_alignment = static_cast<uint8_t>(std::get<0>(alignment));
  problem.w_alignment = static_cast<uint8_t>(std::get<1>(alignment));
  problem.y_alignment = static_cast<uint8_t>(std::get<2>(alignment));
  problem.addends = (bias ? ConvProblem::kBias : 0) | (residual ? ConvProblem::kResidual : 0);
  problem.set_activation(parse_activation(activation));
  if (pixel_strides) std::tie(problem.x_pixel_stride, problem.y_pixel_stride) = *pixel_strides;
  return problem;
}

// The arguments of make_problem() by name.
py::dict fields_of(const ConvProblem& p) {
  const auto list = [&p](const auto& values) {
    return std::vector<int>(values.begin(), values.begin() + p.spatial_dims);
  };
  auto padding = list(p.pre_padding);
  const auto after = list(p.post_padding);
  padding.insert(padding.end(), after.begin(), after.end());
  const auto pixel_strides =
      p.has_slices() ? std::make_optional(std::make_pair(p.x_pixel_stride, p.y_pixel_stride))
                     : std::nullopt;
  return py::dict("op"_a = name(p.op), "input_shape"_a = p.input_shape(),
                  "weight_shape"_a = p.weight_shape(), "stride"_a = list(p.stride),
                  "padding"_a = padding, "dilation"_a = list(p.dilation), "groups"_a = p.groups,
                  "dtype"_a = name(p.dtype), "memory_format"_a = name(p.layout),
                  "deterministic"_a = p.deterministic != 0, "allow_tf32"_a = p.allow_tf32(),
                  "allow_reduced_precision"_a = p.allow_reduced_precision(),
                  "depthwise_kernel"_a = name(p.depthwise_kernel),
                  "alignment"_a = py::make_tuple(p.x_alignment, p.w_alignment, p.y_alignment),
                  "bias"_a = p.has_bias(), "residual"_a = p.has_residual(),
                  "activation"_a = p.activation().name(), "pixel_strides"_a = pixel_strides);
}

void bind_problem(py::module_& m) {
  py::class_<ConvProblem>(m, "ConvProblem")
      .def(py::init(&make_problem), py::kw_only(), py::arg("op"), py::arg("input_shape"),
           py::arg("weight_shape"), py::arg("stride"), py::arg("padding"), py::arg("dilation"),
           py::arg("groups"), py::arg("dtype"), py::arg("memory_format"), py::arg("deterministic"),
           py::arg("allow_tf32"), py::arg("allow_reduced_precision"), py::arg("depthwise_kernel"),
           py::arg("alignment"), py::arg("bias") = false, py::arg("residual") = false,
           py::arg("activation") = "", py::arg("pixel_strides") = py::none())
      .def("fields", &fields_of)
      .def_property_readonly("text", &ConvProblem::text);
  m.def("depthwise_kernel", [] { return name(depthwise_kernel()); });
  m.def("problem_key", [](const ConvProblem& p) {
    return py::bytes(reinterpret_cast<const char*>(&p), sizeof(p));
  });
}

// Lets this thread allocate, load kernels and wait while another thread captures a graph. In CUDA's
// default mode such calls fail, and break that thread's capture.
void allow_capture_elsewhere() {
  auto mode = cudaStreamCaptureModeRelaxed;
  C10_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
}

// An EngineList, and the CUDA device of its handle. nullopt: it describes a GPU by a property
// file.
struct EnginesOfGpu {
  std::unique_ptr<EngineList> list;
  std::optional<c10::DeviceIndex> device;

  OnDevice on_device() const { return OnDevice(device); }
  std::vector<Candidate> query(const std::string& mode) const {
    const auto guard = on_device();
    return list->query(mode);
  }
  Candidate describe(const std::string& text) const {
    const auto guard = on_device();
    return list->describe(text);
  }
  // The device must be current. Throws PlanError.
  std::shared_ptr<Plan> build(const std::string& text) const {
    if (is_engine(text)) return std::make_shared<EnginePlan>(list->build(text));
    return build_plan(list->problem(), text, device);
  }
  std::shared_ptr<Plan> build_one(const std::string& text) const {
    const auto guard = on_device();
    return build(text);
  }
  // Null if nothing is kept. Throws PlanError.
  std::shared_ptr<Plan> read_back(const std::string& text) const {
    const auto guard = on_device();
    auto engine = is_engine(text) ? list->read_back(text) : nullptr;
    return engine == nullptr ? nullptr : std::make_shared<EnginePlan>(std::move(engine));
  }
  // Prepares a thread that only builds plans and then ends: its device and capture mode stay set.
  void enter() const {
    if (!device) return;
    c10::cuda::set_device(*device);
    allow_capture_elsewhere();
  }
};

std::unique_ptr<EnginesOfGpu> engines_on_device(const ConvProblem& problem, int device) {
  const auto index = static_cast<c10::DeviceIndex>(device);
  const OnDevice guard(index);
  return std::make_unique<EnginesOfGpu>(
      EnginesOfGpu{std::make_unique<EngineList>(problem, &current_handle), index});
}

std::unique_ptr<EnginesOfGpu> engines_by_properties(const ConvProblem& problem,
                                                    const std::string& json) {
  return std::make_unique<EnginesOfGpu>(
      EnginesOfGpu{std::make_unique<EngineList>(problem, json), std::nullopt});
}

// Calls work(0) to work(count - 1), on the caller's thread and on up to `threads` - 1 more. Each
// new thread calls `enter` first, and does no work if that throws. `work` must not throw.
template <typename Enter, typename Work>
void on_worker_threads(size_t count, int threads, const Enter& enter, const Work& work) {
  std::atomic<size_t> next{0};
  const auto work_on = [&] {
    for (size_t i = next++; i < count; i = next++) work(i);
  };
  const auto most = std::min<size_t>(std::max(threads, 1), count);
  std::vector<std::thread> pool;
  pool.reserve(most);
  while (pool.size() + 1 < most) {
    try {
      pool.emplace_back([&] {
        try {
          enter();
        } catch (const std::exception&) {
          return;  // if CUDA fails, the caller's thread meets the failure too, and reports it
        }
        work_on();
      });
    } catch (const std::system_error&) {
      break;  // the system gives no more threads; those that run do the work
    }
  }
  work_on();
  for (auto& thread : pool) thread.join();
}

using Built = std::pair<std::shared_ptr<Plan>, std::string>;  // null and why, if it did not build

std::vector<Built> build_many(const EnginesOfGpu& engines, const std::vector<std::string>& texts,
                              int threads) {
  std::vector<Built> built(texts.size());
  std::vector<std::exception_ptr> interrupts(texts.size());
  const auto guard = engines.on_device();
  const auto build = [&](size_t i) {
    try {
      built[i].first = engines.build(texts[i]);
    } catch (const py::error_already_set&) {
      interrupts[i] = std::current_exception();
    } catch (const std::exception& error) {
      built[i].second = error.what();
    }
  };
  on_worker_threads(texts.size(), threads, [&engines] { engines.enter(); }, build);
  for (const auto& interrupt : interrupts) {
    if (interrupt) std::rethrow_exception(interrupt);
  }
  return built;
}

using WithoutGilCall = py::call_guard<py::gil_scoped_release>;

void bind_engine_list(py::module_& m) {
  py::class_<Candidate>(m, "Candidate")
      .def_property_readonly("engine", [](const Candidate& c) { return c.config.engine; })
      .def_property_readonly("knobs", [](const Candidate& c) { return c.config.knobs; })
      .def_property_readonly("text", [](const Candidate& c) { return c.config.text(); })
      .def_readonly("workspace_bytes", &Candidate::workspace_bytes)
      .def_readonly("numerical_notes", &Candidate::numerical_notes)
      .def_readonly("behavior_notes", &Candidate::behavior_notes)
      .def_readonly("compute_capability", &Candidate::compute_capability)
      .def_readonly("heuristic_mode", &Candidate::heuristic_mode);
  m.def("is_allowed", &is_allowed, py::arg("candidate"), py::arg("problem"),
        py::arg("workspace_limit"));
  m.def(
      "is_known_wrong",
      [](const std::string& text, const ConvProblem& problem, int64_t cudnn_version,
         int64_t compute_capability) {
        return is_known_wrong(EngineConfig::parse(text), problem, cudnn_version,
                              compute_capability);
      },
      py::arg("engine_text"), py::arg("problem"), py::arg("cudnn_version"),
      py::arg("compute_capability") = 0);

  py::class_<EnginesOfGpu>(m, "EngineList")
      .def_static("on_device", &engines_on_device, py::arg("problem"), py::arg("device"),
                  WithoutGilCall())
      .def_static("by_properties", &engines_by_properties, py::arg("problem"), py::arg("json"),
                  WithoutGilCall())
      .def("query", &EnginesOfGpu::query, py::arg("heuristic_mode"), WithoutGilCall())
      .def("build", &EnginesOfGpu::build_one, py::arg("text"), WithoutGilCall())
      .def("read_back", &EnginesOfGpu::read_back, py::arg("text"), WithoutGilCall())
      .def("describe", &EnginesOfGpu::describe, py::arg("engine_text"), WithoutGilCall())
      .def("build_many", &build_many, py::arg("texts"), py::arg("threads"), WithoutGilCall());

  m.def("canonical_engine_text",
        [](const std::string& text) { return EngineConfig::parse(text).text(); });
  m.def("parse_engine_text", [](const std::string& text) {
    const auto config = EngineConfig::parse(text);
    return std::make_pair(config.engine, config.knobs);
  });
  m.def("engine_text", [](int64_t engine, const std::map<std::string, int64_t>& knobs) {
    return EngineConfig::parse(EngineConfig{engine, knobs}.text()).text();
  });
}

}  // namespace

void bind_engines(py::module_& m) {
  bind_cudnn_library();
  m.def("cudnn_runtime_version", &cudnn_runtime_version);
  m.def("cudnn_frontend_version", &cudnn_frontend_version);
  bind_problem(m);
  bind_engine_list(m);
}

}  // namespace cudnn_autotune
