#include "core/cudnn/detail/conv_graph.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/cudnn/detail/knob_names.h"
#include "core/problem/check.h"

namespace cudnn_autotune {
namespace {

namespace fe = cudnn_frontend;

using Dims = std::vector<int64_t>;

fe::DataType_t data_type(DataType dtype) {
  switch (dtype) {
    case DataType::float16:
      return fe::DataType_t::HALF;
    case DataType::bfloat16:
      return fe::DataType_t::BFLOAT16;
    case DataType::float32:
      return fe::DataType_t::FLOAT;
    case DataType::float64:
      return fe::DataType_t::DOUBLE;
  }
  return fe::DataType_t::NOT_SET;
}

// cuDNN's convolutions have at least two spatial dimensions. A 1-d problem gets a height of 1.
Dims with_unit_height(Dims dims, size_t at, int64_t value) {
  dims.insert(dims.begin() + static_cast<std::ptrdiff_t>(at), value);
  return dims;
}

Dims tensor_dims(const ConvProblem& problem, Dims dims) {
  return problem.spatial_dims == 1 ? with_unit_height(std::move(dims), 2, 1) : dims;
}

template <typename Values>
Dims spatial(const ConvProblem& problem, const Values& values, int64_t unit) {
  Dims dims(values.begin(), values.begin() + problem.spatial_dims);
  return problem.spatial_dims == 1 ? with_unit_height(std::move(dims), 0, unit) : dims;
}

// The strides of a tensor that is dense, or would be if it had `pixel_stride` channels.
Dims strides_of(Dims dims, Layout layout, int64_t pixel_stride) {
  if (pixel_stride != 0) dims[1] = pixel_stride;
  Dims order;  // the dimensions, from the smallest stride to the largest
  for (size_t d = dims.size() - 1; d >= 2; --d) order.push_back(static_cast<int64_t>(d));
  order.insert(layout == Layout::channels_last ? order.begin() : order.end(), 1);
  order.push_back(0);
  Dims strides(dims.size());
  int64_t stride = 1;
  for (const int64_t d : order) {
    strides[d] = stride;
    stride *= std::max<int64_t>(dims[d], 1);
  }
  return strides;
}

fe::graph::Tensor_attributes tensor(const ConvProblem& problem, const char* name, int64_t uid,
                                    Dims shape, int64_t alignment, int64_t pixel_stride = 0) {
  const Dims dims = tensor_dims(problem, std::move(shape));
  return fe::graph::Tensor_attributes()
      .set_name(name)
      .set_uid(uid)
      .set_dim(dims)
      .set_stride(strides_of(dims, problem.layout, pixel_stride))
      .set_alignment(alignment)
      .set_data_type(data_type(problem.dtype));
}

template <typename Attributes>
Attributes convolution(const ConvProblem& problem) {
  return Attributes()
      .set_pre_padding(spatial(problem, problem.pre_padding, 0))
      .set_post_padding(spatial(problem, problem.post_padding, 0))
      .set_stride(spatial(problem, problem.stride, 1))
      .set_dilation(spatial(problem, problem.dilation, 1));
}

std::shared_ptr<ConvPlan> make_conv_plan(cudnn_frontend::ExecutionPlan plan,
                                         const ConvProblem& problem, const EngineConfig& config,
                                         bool is_read_back) {
  auto impl = std::make_shared<ConvPlan::Impl>(ConvPlan::Impl{std::move(plan)});
  const auto descriptor = impl->plan.get_raw_desc();
  const int64_t workspace_bytes = impl->plan.getWorkspaceSize();
  return std::make_shared<ConvPlan>(std::move(impl), descriptor, workspace_bytes, problem, config,
                                    is_read_back);
}

}  // namespace

std::string ConvPlan::serialized() const {
  try {
    return impl_->plan.getJsonRepresentation();
  } catch (const cudnn_frontend::cudnnException& exception) {
    throw CudnnError("serializing a plan of " + config_.text(), exception.what(), problem_.text());
  }
}

DevicePropertiesPtr parse_device_properties(const std::string& json) {
  auto properties = std::make_shared<fe::DeviceProperties>();
  const auto error = properties->deserialize(std::vector<uint8_t>(json.begin(), json.end()));
  if (error.is_bad()) {
    throw std::invalid_argument("device: cuDNN does not take this description of a GPU: " +
                                error.err_msg);
  }
  return properties;
}

ConvGraph::ConvGraph(const ConvProblem& problem, cudnnHandle_t handle, DevicePropertiesPtr device,
                     bool is_unfused)
    : problem_(problem) {
  const bool is_double = problem.dtype == DataType::float64;
  set_io_data_type(data_type(problem.dtype));
  set_intermediate_data_type(is_double ? fe::DataType_t::DOUBLE : fe::DataType_t::FLOAT);
  set_compute_data_type(is_double ? fe::DataType_t::DOUBLE : fe::DataType_t::FLOAT);
  if (device) set_device_properties(device);

  using fe::graph::Tensor_attributes;
  const Tensor_attributes x = cudnn_autotune::tensor(problem, "x", kUidX, problem.input_shape(),
                                                     problem.x_alignment, problem.x_pixel_stride);
  const Tensor_attributes w =
      cudnn_autotune::tensor(problem, "w", kUidW, problem.weight_shape(), problem.w_alignment);
  const Tensor_attributes y = cudnn_autotune::tensor(problem, "y", kUidY, problem.output_shape(),
                                                     problem.y_alignment, problem.y_pixel_stride);
  // The frontend makes the output tensor itself. This gives it the attributes of ours.
  const auto set_output = [](const std::shared_ptr<Tensor_attributes>& output,
                             const Tensor_attributes& like) {
    output->set_output(true)
        .set_uid(like.get_uid())
        .set_dim(like.get_dim())
        .set_stride(like.get_stride())
        .set_alignment(like.get_alignment())
        .set_data_type(like.get_data_type());
  };
  switch (problem.op) {
    case ConvOp::fprop: {
      const auto result = conv_fprop(Graph::tensor(x), Graph::tensor(w),
                                     convolution<fe::graph::Conv_fprop_attributes>(problem));
      set_output(is_unfused ? result : add_epilogue(result), y);
      break;
    }
    case ConvOp::dgrad:
      set_output(conv_dgrad(Graph::tensor(y), Graph::tensor(w),
                            convolution<fe::graph::Conv_dgrad_attributes>(problem)),
                 x);
      break;
    case ConvOp::wgrad:
      set_output(conv_wgrad(Graph::tensor(y), Graph::tensor(x),
                            convolution<fe::graph::Conv_wgrad_attributes>(problem)),
                 w);
      break;
  }
  CUDNN_AUTOTUNE_CHECK_FRONTEND(validate(), problem_);
  CUDNN_AUTOTUNE_CHECK_FRONTEND(build_operation_graph(handle), problem_);
}

// The order (residual, bias, activation) is that of cuDNN's ConvolutionBiasActivation, for which it
// has precompiled engines.
ConvGraph::Tensor ConvGraph::add_epilogue(Tensor result) {
  if (problem_.has_residual()) {
    const Dims shape = problem_.output_shape();
    const auto residual = cudnn_autotune::tensor(problem_, "residual", kUidResidual, shape, 32);
    result = add_pointwise(fe::PointwiseMode_t::ADD, result, Graph::tensor(residual));
  }
  if (problem_.has_bias()) {
    result = add_pointwise(fe::PointwiseMode_t::ADD, result, add_per_channel("bias", kUidBias));
  }
  return add_activation(result);
}

ConvGraph::Tensor ConvGraph::add_per_channel(const char* name, int64_t uid) {
  Dims shape(problem_.dims(), 1);
  shape[1] = problem_.w[0];
  return Graph::tensor(cudnn_autotune::tensor(problem_, name, uid, shape, 32));
}

ConvGraph::Tensor ConvGraph::add_pointwise(fe::PointwiseMode_t mode, const Tensor& a,
                                           const Tensor& b) {
  auto attributes = fe::graph::Pointwise_attributes().set_mode(mode);
  return b == nullptr ? pointwise(a, attributes) : pointwise(a, b, attributes);
}

// min(max(input, 0), 6)
ConvGraph::Tensor ConvGraph::add_relu6(const Tensor& input) {
  return pointwise(input, fe::graph::Pointwise_attributes()
                              .set_mode(fe::PointwiseMode_t::RELU_FWD)
                              .set_relu_lower_clip(0.0f)
                              .set_relu_upper_clip(6.0f));
}

ConvGraph::Tensor ConvGraph::add_activation(const Tensor& input) {
  using Mode = fe::PointwiseMode_t;
  const Activation activation = problem_.activation();
  const auto parameter = static_cast<float>(activation.parameter);
  if (problem_.dtype == DataType::float64 && parameter != activation.parameter) {
    throw CudnnError("adding " + activation.name(), "the frontend takes a float32",
                     problem_.text());
  }
  switch (activation.kind) {
    case ActivationKind::none:
      return input;
    case ActivationKind::relu:
      return add_pointwise(Mode::RELU_FWD, input);
    case ActivationKind::silu:
      return add_pointwise(Mode::SWISH_FWD, input);
    case ActivationKind::gelu:
      return add_pointwise(Mode::GELU_FWD, input);
    case ActivationKind::gelu_tanh:
      return add_pointwise(Mode::GELU_APPROX_TANH_FWD, input);
    case ActivationKind::sigmoid:
      return add_pointwise(Mode::SIGMOID_FWD, input);
    case ActivationKind::tanh:
      return add_pointwise(Mode::TANH_FWD, input);
    case ActivationKind::elu:
      return pointwise(
          input,
          fe::graph::Pointwise_attributes().set_mode(Mode::ELU_FWD).set_elu_alpha(parameter));
    case ActivationKind::leaky_relu:
      return pointwise(input, fe::graph::Pointwise_attributes()
                                  .set_mode(Mode::RELU_FWD)
                                  .set_relu_lower_clip_slope(parameter));
    case ActivationKind::relu6:
      // By one operation it is a clipped ReLU, for which 9.24 lists two engines; in two it is any
      // pointwise operation, for which those are listed that compute SiLU.
      return add_relu6(add_pointwise(Mode::RELU_FWD, input));
    case ActivationKind::mish:
      return add_pointwise(Mode::MUL, input,
                           add_pointwise(Mode::TANH_FWD, add_pointwise(Mode::SOFTPLUS_FWD, input)));
    case ActivationKind::prelu: {
      // max(input, 0) - slope * max(-input, 0)
      const auto below = add_pointwise(Mode::RELU_FWD, add_pointwise(Mode::NEG, input));
      const auto sloped = add_pointwise(Mode::MUL, below, add_per_channel("slope", kUidSlope));
      return add_pointwise(Mode::SUB, add_pointwise(Mode::RELU_FWD, input), sloped);
    }
    case ActivationKind::hardswish:
      break;
  }
  const auto constant = [&](const char* name, int64_t uid, double value) {
    auto attributes = problem_.dtype == DataType::float64
                          ? fe::graph::Tensor_attributes(value)
                          : fe::graph::Tensor_attributes(static_cast<float>(value));
    return Graph::tensor(attributes.set_name(name).set_uid(uid));
  };
  const auto shifted = add_pointwise(Mode::ADD, input, constant("three", kUidThree, 3.0));
  return add_pointwise(Mode::MUL, add_pointwise(Mode::MUL, input, add_relu6(shifted)),
                       constant("sixth", kUidSixth, 1.0 / 6.0));
}

fe::EngineConfigList ConvGraph::query(fe::HeurMode_t mode) const {
  fe::EngineConfigList configs;
  const auto everything = [](cudnnBackendDescriptor_t) { return false; };
  // The status is ignored: a mode that has no config for a problem returns an error and no config.
  fe::get_heuristics_list({mode}, *operation_graph, everything, configs, true, -1,
                          device_properties);
  return configs;
}

// Does what Graph::create_execution_plan(engine, knobs) does, but with the backend's knobs, of
// which the frontend knows only some.
fe::ManagedOpaqueDescriptor ConvGraph::descriptor(const EngineConfig& config) const {
  const auto check = [&](const char* call, const fe::error_t& error) {
    if (error.is_bad()) {
      throw CudnnError(call + (" of " + config.text()), error.err_msg, problem_.text());
    }
  };
  const auto check_status = [&](const char* call, cudnnStatus_t status) {
    if (status != CUDNN_STATUS_SUCCESS) {
      throw CudnnError(call + (" of " + config.text()), fe::detail::get_error_string(status),
                       problem_.text());
    }
  };
  fe::detail::backend_descriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  check("creating the engine",
        fe::detail::create_engine(engine, config.engine, operation_graph->get_raw_desc(),
                                  device_properties));
  std::vector<fe::detail::backend_descriptor> choices;
  for (const auto& [name, value] : config.knobs) {
    const auto knob = knob_by_name(name);
    if (!knob) throw std::invalid_argument("engine_text: '" + name + "' is not a knob");
    auto& choice = choices.emplace_back(CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
    check_status("setting a knob",
                 fe::detail::set_attribute(choice.get_ptr(), CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE,
                                           CUDNN_TYPE_KNOB_TYPE, 1, &*knob));
    check_status("setting a knob",
                 fe::detail::set_attribute(choice.get_ptr(), CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE,
                                           CUDNN_TYPE_INT64, 1, &value));
    check_status("setting a knob", fe::detail::finalize(choice.get_ptr()));
  }
  auto descriptor = fe::make_shared_backend_pointer(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
  check("creating the engine config",
        fe::detail::create_engine_config(descriptor, engine, choices));
  return descriptor;
}

std::shared_ptr<ConvPlan> ConvGraph::build(const EngineConfig& config,
                                           const fe::ManagedOpaqueDescriptor& descriptor) const {
  try {
    return make_conv_plan(
        fe::ExecutionPlanBuilder().setEngineConfig(descriptor, operation_graph->getTag()).build(),
        problem_, config, /*is_read_back=*/false);
  } catch (const fe::cudnnException& exception) {
    throw CudnnError("building a plan of " + config.text(), exception.what(), problem_.text());
  }
}

std::shared_ptr<ConvPlan> ConvGraph::read_back(const EngineConfig& config,
                                               const std::string& serialized,
                                               cudnnHandle_t handle) const {
  try {
    fe::ExecutionPlanBuilder builder;
    if (handle != nullptr) {
      builder.setHandle(handle);
    } else {
      builder.setDeviceProperties(device_properties);
    }
    return make_conv_plan(builder.loadFromJson(serialized), problem_, config,
                          /*is_read_back=*/true);
  } catch (const fe::cudnnException& exception) {
    throw CudnnError("reading back a plan of " + config.text(), exception.what(), problem_.text());
  }
}

}  // namespace cudnn_autotune
