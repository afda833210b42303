#include "bind/bindings.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/convolution.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

#include "call/aten_conv.h"
#include "call/autocast.h"
#include "call/call_policy.h"

namespace cudnn_autotune {
namespace {

bool read_int(PyObject* object, int64_t& value) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}

// An argument that is an int for all spatial dimensions, or a tuple with one for each; none is
// negative.
template <size_t dims>
struct Ints {
  std::array<int64_t, dims> values;

  // Returns false for an argument that is neither.
  bool read(PyObject* object) {
    if (read_int(object, values[0])) {
      values.fill(values[0]);
      return values[0] >= 0;
    }
    if (!PyTuple_CheckExact(object) || PyTuple_GET_SIZE(object) != static_cast<Py_ssize_t>(dims)) {
      return false;
    }
    for (size_t i = 0; i < dims; ++i) {
      PyObject* const item = PyTuple_GET_ITEM(object, static_cast<Py_ssize_t>(i));
      if (!read_int(item, values[i]) || values[i] < 0) return false;
    }
    return true;
  }
};

// Whether a tensor is on a CUDA device and of a dtype that cuDNN convolves.
bool is_taken(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return false;
  const auto dtype = tensor.scalar_type();
  return dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat ||
         dtype == at::kDouble;
}

// The mode and the limit of a call.
struct PolicyArguments {
  std::string_view sampling;
  int64_t workspace_limit = -1;

  // Returns false for what functional.py has to refuse. "" is an unknown mode there.
  bool read(PyObject* mode, PyObject* limit) {
    if (mode != Py_None) {
      Py_ssize_t size = 0;
      const char* text =
          PyUnicode_CheckExact(mode) ? PyUnicode_AsUTF8AndSize(mode, &size) : nullptr;
      if (text == nullptr || size == 0) {
        PyErr_Clear();
        return false;
      }
      sampling = {text, static_cast<size_t>(size)};
    }
    return limit == Py_None || (read_int(limit, workspace_limit) && workspace_limit >= 0);
  }
};

// The argument `padding`: an int or a tuple of one for each dimension; of a convolution that is not
// transposed also a tuple of twice as many, or "same".
template <size_t dims>
struct Padding {
  std::array<int64_t, 2 * dims> sides{};  // before each dimension, then after each
  bool is_same = false;                   // the sides depend on the weight: see set_same()

  bool read(PyObject* object, bool transposed) {
    is_same = !transposed && PyUnicode_CheckExact(object) &&
              PyUnicode_CompareWithASCIIString(object, "same") == 0;
    if (is_same) return true;
    Ints<dims> both{};
    if (both.read(object)) {
      std::copy_n(both.values.begin(), dims, sides.begin());
      std::copy_n(both.values.begin(), dims, sides.begin() + dims);
      return true;
    }
    Ints<2 * dims> each{};
    if (transposed || !each.read(object)) return false;
    sides = each.values;
    return true;
  }
  // PyTorch puts the odd one of an uneven number behind.
  void set_same(const at::Tensor& weight, const Ints<dims>& dilation) {
    for (size_t d = 0; d < dims; ++d) {
      const int64_t both = dilation.values[d] * (weight.size(static_cast<int64_t>(2 + d)) - 1);
      sides[d] = both / 2;
      sides[dims + d] = both - both / 2;
    }
  }
  at::IntArrayRef before() const { return {sides.data(), dims}; }
  bool is_uneven() const {
    return !std::equal(sides.begin(), sides.begin() + dims, sides.begin() + dims);
  }
};

// Whether nothing stands between a call and the kernel: no gradient is recorded, and nothing casts,
// transforms or watches.
bool is_bare(const at::Tensor& input, const at::Tensor& weight,
             const std::optional<at::Tensor>& bias) {
  const auto is_differentiated = [](const at::Tensor& tensor) {
    return (at::GradMode::is_enabled() && tensor.requires_grad()) ||
           tensor._fw_grad(/*level=*/0).defined();
  };
  return !at::autocast::is_autocast_enabled(at::kCUDA) && !in_transform() &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set() && !is_differentiated(input) &&
         !is_differentiated(weight) && !(bias && is_differentiated(*bias));
}

// The operator `conv_fprop`, which a build without CUDA has no kernel of.
at::Tensor convolve(const at::Tensor& input, const at::Tensor& weight,
                    const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, int64_t groups,
                    const PolicyArguments& policy) {
  using Signature = at::Tensor(
      const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, c10::SymIntArrayRef,
      c10::SymIntArrayRef, c10::SymIntArrayRef, c10::SymInt, std::string_view, int64_t);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cudnn_autotune::conv_fprop", "")
                             .typed<Signature>();
  return op.call(input, weight, bias, stride, padding, dilation, groups, policy.sampling,
                 policy.workspace_limit);
}

// PyTorch's order of arguments:
//   input, weight, bias, stride, padding, dilation, groups
//   input, weight, bias, stride, padding, output_padding, groups, dilation  (transposed)
// and after them sampling and workspace_limit.
template <size_t dims, bool transposed>
PyObject* conv(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  constexpr Py_ssize_t kArguments = transposed ? 10 : 9;
  if (!has_count(count, kArguments)) return nullptr;
  const bool has_bias = args[2] != Py_None;
  Ints<dims> stride{};
  Padding<dims> padding;
  Ints<dims> output_padding{};
  Ints<dims> dilation{};
  int64_t groups = 0;
  PolicyArguments policy;
  if (!THPVariable_CheckExact(args[0]) || !THPVariable_CheckExact(args[1]) ||
      (has_bias && !THPVariable_CheckExact(args[2])) || !stride.read(args[3]) ||
      !padding.read(args[4], transposed) || (transposed && !output_padding.read(args[5])) ||
      !read_int(args[6], groups) || !dilation.read(args[transposed ? 7 : 5]) ||
      !policy.read(args[kArguments - 2], args[kArguments - 1]) ||
      at::impl::torch_function_mode_enabled() || torch::jit::tracer::isTracing()) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  const at::Tensor& input = THPVariable_Unpack(args[0]);
  const at::Tensor& weight = THPVariable_Unpack(args[1]);
  if (!is_taken(input) || input.dim() != 2 + dims || weight.dim() != 2 + dims) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  std::optional<at::Tensor> bias;
  if (has_bias) bias = THPVariable_Unpack(args[2]);
  // torch.nn.functional refuses it in other words than the operator below.
  if (has_bias && bias->scalar_type() != input.scalar_type() &&
      !at::autocast::is_autocast_enabled(at::kCUDA)) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  if (padding.is_same) {
    padding.set_same(weight, dilation);
    // PyTorch refuses strides.
    if (std::any_of(stride.values.begin(), stride.values.end(),
                    [](int64_t value) { return value != 1; })) {
      Py_RETURN_NOTIMPLEMENTED;
    }
  }
  // PyTorch pads the input first, and so does this package where a gradient is recorded: the
  // operator has none.
  const bool pads_unevenly = padding.is_uneven();
  if (pads_unevenly && !is_bare(input, weight, bias)) Py_RETURN_NOTIMPLEMENTED;
  at::Tensor output;
  {
    const pybind11::gil_scoped_release without_gil;
    if (pads_unevenly) {
      output = convolve(input, weight, bias, c10::fromIntArrayRefKnownNonNegative(stride.values),
                        c10::fromIntArrayRefKnownNonNegative(padding.sides),
                        c10::fromIntArrayRefKnownNonNegative(dilation.values), groups, policy);
    } else {
      const PolicyScope scope(policy.sampling, policy.workspace_limit);
      output = at::convolution(input, weight, bias, stride.values, padding.before(),
                               dilation.values, transposed, output_padding.values, groups);
    }
  }
  return THPVariable_Wrap(std::move(output));
  END_HANDLE_TH_ERRORS
}

PyObject* enter_policy(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  PolicyArguments policy;
  if (count != 2 || !policy.read(args[0], args[1])) Py_RETURN_FALSE;
  PolicyScope::enter(policy.sampling, policy.workspace_limit);
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

PyObject* leave_policy(PyObject*, PyObject*) {
  PolicyScope::leave();
  Py_RETURN_NONE;
}

}  // namespace

PyMethodDef* python_conv_methods() {
  static std::array<PyMethodDef, 9> methods{
      fast_method("conv1d", conv<1, false>),
      fast_method("conv2d", conv<2, false>),
      fast_method("conv3d", conv<3, false>),
      fast_method("conv_transpose1d", conv<1, true>),
      fast_method("conv_transpose2d", conv<2, true>),
      fast_method("conv_transpose3d", conv<3, true>),
      fast_method("enter_policy", enter_policy),
      PyMethodDef{"leave_policy", leave_policy, METH_NOARGS, "See csrc/bind/bindings.h."},
      PyMethodDef{nullptr, nullptr, 0, nullptr},  // the end
  };
  return methods.data();
}

}  // namespace cudnn_autotune
