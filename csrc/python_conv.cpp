#include "python_conv.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <array>
#include <optional>
#include <string_view>

#include "conv_ops.h"

namespace cudnn_autotune {
namespace {

constexpr Py_ssize_t kArguments = 9;
constexpr Py_ssize_t kSpatialDims = 2;

// An argument that is an int for both spatial dimensions, or a tuple of two ints; none is negative.
struct Ints {
  std::array<int64_t, kSpatialDims> values;

  // Returns false for an argument that is neither.
  bool read(PyObject* object) {
    if (read_int(object, values[0])) {
      values[1] = values[0];
      return values[0] >= 0;
    }
    if (!PyTuple_CheckExact(object) || PyTuple_GET_SIZE(object) != kSpatialDims) return false;
    for (Py_ssize_t i = 0; i < kSpatialDims; ++i) {
      if (!read_int(PyTuple_GET_ITEM(object, i), values[i]) || values[i] < 0) return false;
    }
    return true;
  }

  static bool read_int(PyObject* object, int64_t& value) {
    if (!PyLong_CheckExact(object)) return false;
    int overflow = 0;
    value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow == 0;
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

PyObject* conv2d(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != kArguments) {
    PyErr_SetString(PyExc_TypeError, "_C.conv2d takes 9 arguments");
    return nullptr;
  }
  PyObject* const sampling = args[7];
  PyObject* const limit = args[8];
  const bool has_bias = args[2] != Py_None;
  Ints stride;
  Ints padding;
  Ints dilation;
  int64_t groups = 0;
  int64_t workspace_limit = -1;
  if (!THPVariable_CheckExact(args[0]) || !THPVariable_CheckExact(args[1]) ||
      (has_bias && !THPVariable_CheckExact(args[2])) || !stride.read(args[3]) ||
      !padding.read(args[4]) || !dilation.read(args[5]) || !Ints::read_int(args[6], groups) ||
      (sampling != Py_None && !PyUnicode_CheckExact(sampling)) ||
      (limit != Py_None && (!Ints::read_int(limit, workspace_limit) || workspace_limit < 0)) ||
      at::impl::torch_function_mode_enabled() || torch::jit::tracer::isTracing()) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  const at::Tensor& input = THPVariable_Unpack(args[0]);
  const at::Tensor& weight = THPVariable_Unpack(args[1]);
  if (!is_taken(input) || input.dim() != 2 + kSpatialDims || weight.dim() != 2 + kSpatialDims) {
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
    output = conv_fprop_op().call(input, weight, bias, stride.symbolic(), padding.symbolic(),
                                  dilation.symbolic(), groups, mode, workspace_limit);
  }
  return THPVariable_Wrap(std::move(output));
  END_HANDLE_TH_ERRORS
}

}  // namespace

PyMethodDef python_conv_method() {
  return {"conv2d", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(conv2d)),
          METH_FASTCALL, "See csrc/python_conv.h."};
}

}  // namespace cudnn_autotune
