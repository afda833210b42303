#include "python_conv.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <array>
#include <optional>
#include <string_view>

#include "aten_conv.h"
#include "conv_ops.h"
#include "settings.h"

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

  // read() has made sure that the values are not negative.
  c10::SymIntArrayRef symbolic() const { return c10::fromIntArrayRefKnownNonNegative(values); }
};

// Whether a tensor is on a CUDA device and of a dtype that cuDNN convolves.
bool is_taken(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return false;
  const auto dtype = tensor.scalar_type();
  return dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat ||
         dtype == at::kDouble;
}

// PyTorch's order of arguments:
//   input, weight, bias, stride, padding, dilation, groups
//   input, weight, bias, stride, padding, output_padding, groups, dilation  (transposed)
// and after them sampling and workspace_limit.
template <size_t dims, bool transposed>
PyObject* conv(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  constexpr Py_ssize_t kArguments = transposed ? 10 : 9;
  if (count != kArguments) {
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", kArguments, count);
    return nullptr;
  }
  PyObject* const sampling = args[kArguments - 2];
  PyObject* const limit = args[kArguments - 1];
  const bool has_bias = args[2] != Py_None;
  Ints<dims> stride;
  Ints<dims> padding;
  Ints<dims> output_padding;
  Ints<dims> dilation;
  int64_t groups = 0;
  int64_t workspace_limit = -1;
  if (!THPVariable_CheckExact(args[0]) || !THPVariable_CheckExact(args[1]) ||
      (has_bias && !THPVariable_CheckExact(args[2])) || !stride.read(args[3]) ||
      !padding.read(args[4]) || (transposed && !output_padding.read(args[5])) ||
      !read_int(args[6], groups) || !dilation.read(args[transposed ? 7 : 5]) ||
      (sampling != Py_None && !PyUnicode_CheckExact(sampling)) ||
      (limit != Py_None && (!read_int(limit, workspace_limit) || workspace_limit < 0)) ||
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
  std::string_view mode;
  if (sampling != Py_None) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(sampling, &size);
    if (text == nullptr) return nullptr;
    // To the operator "" means the setting. As an argument it is an unknown mode, an error that
    // nn/functional.py raises.
    if (size == 0) Py_RETURN_NOTIMPLEMENTED;
    mode = {text, static_cast<size_t>(size)};
  }
  at::Tensor output;
  {
    const pybind11::gil_scoped_release without_gil;
    if (in_transform()) {  // the operator would come to the same, once a level of the transform
      resolve(mode, workspace_limit);  // checks them
      if constexpr (transposed) {
        output = aten_transpose(input, weight, bias, stride.symbolic(), padding.symbolic(),
                                output_padding.symbolic(), dilation.symbolic(), groups);
      } else {
        output = aten_fprop(input, weight, bias, stride.symbolic(), padding.symbolic(),
                            dilation.symbolic(), groups);
      }
    } else if constexpr (transposed) {
      output = conv_transpose_op().call(input, weight, bias, stride.symbolic(), padding.symbolic(),
                                        output_padding.symbolic(), dilation.symbolic(), groups,
                                        mode, workspace_limit);
    } else {
      output = conv_fprop_op().call(input, weight, bias, stride.symbolic(), padding.symbolic(),
                                    dilation.symbolic(), groups, mode, workspace_limit);
    }
  }
  return THPVariable_Wrap(std::move(output));
  END_HANDLE_TH_ERRORS
}

template <size_t dims, bool transposed>
PyMethodDef method(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(conv<dims, transposed>)),
          METH_FASTCALL, "See csrc/python_conv.h."};
}

}  // namespace

PyMethodDef* python_conv_methods() {
  static std::array<PyMethodDef, 7> methods{
      method<1, false>("conv1d"),
      method<2, false>("conv2d"),
      method<3, false>("conv3d"),
      method<1, true>("conv_transpose1d"),
      method<2, true>("conv_transpose2d"),
      method<3, true>("conv_transpose3d"),
      PyMethodDef{nullptr, nullptr, 0, nullptr},  // the end
  };
  return methods.data();
}

}  // namespace cudnn_autotune
