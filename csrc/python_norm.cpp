#include "python_norm.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "aten_conv.h"
#include "norm_ops.h"

namespace cudnn_autotune {
namespace {

namespace py = pybind11;

// Names of a module's attributes, as Python's dictionaries have them.
struct AttributeNames {
  static PyObject* interned(const char* name) { return PyUnicode_InternFromString(name); }

  PyObject* training = interned("training");
  PyObject* track_running_stats = interned("track_running_stats");
  PyObject* momentum = interned("momentum");
  PyObject* eps = interned("eps");
  PyObject* parameters = interned("_parameters");
  PyObject* buffers = interned("_buffers");
  PyObject* weight = interned("weight");
  PyObject* bias = interned("bias");
  PyObject* running_mean = interned("running_mean");
  PyObject* running_var = interned("running_var");
  PyObject* steps = interned("num_batches_tracked");
};

const AttributeNames& names() {
  static const auto* const found = new AttributeNames;
  return *found;
}

// An entry of a dictionary, which keeps it alive; null if there is none.
PyObject* entry(PyObject* dictionary, PyObject* name) {
  PyObject* const found = PyDict_GetItemWithError(dictionary, name);
  if (found == nullptr && PyErr_Occurred() != nullptr) throw python_error();
  return found;
}

// The readers return false for what only PyTorch's class makes sense of.

bool read_bool(PyObject* object, bool& value) {
  value = object == Py_True;
  return value || object == Py_False;
}

bool read_number(PyObject* object, double& value) {
  if (object == nullptr) return false;
  if (PyFloat_CheckExact(object)) {
    value = PyFloat_AS_DOUBLE(object);
    return true;
  }
  if (!PyLong_CheckExact(object)) return false;
  value = PyLong_AsDouble(object);
  if (PyErr_Occurred() == nullptr) return true;
  PyErr_Clear();
  return false;
}

// A parameter or a buffer. An attribute of the same name would stand before it.
bool read_tensor(PyObject* own, PyObject* dictionary, PyObject* name, OptionalTensor& tensor) {
  PyObject* const found = entry(dictionary, name);
  if (found == nullptr || entry(own, name) != nullptr) return false;
  if (found == Py_None) return true;
  if (!THPVariable_CheckExact(found)) return false;
  tensor = THPVariable_Unpack(found);
  return true;
}

// Dictionaries of PyTorch's own kinds: those of others may do something when they are read.
bool is_plain_dictionary(PyObject* object) {
  return object != nullptr && (PyDict_CheckExact(object) || PyODict_CheckExact(object));
}

c10::DeviceType served_device = c10::kCUDA;

bool is_served(const at::Tensor& input) {
  if (input.device().type() != served_device || input.layout() != at::kStrided ||
      input.is_nested()) {
    return false;
  }
  const auto dtype = input.scalar_type();
  if (dtype != at::kHalf && dtype != at::kBFloat16 && dtype != at::kFloat) return false;
  // One value for each channel is PyTorch's error.
  return input.dim() >= 2 && input.dim() <= 5 && input.numel() > input.size(1);
}

// Whether a transform, a mode or a tracer stands between a call and its operators.
bool is_watched() {
  return in_transform() || c10::impl::TorchDispatchModeTLS::any_modes_set() ||
         at::impl::torch_function_mode_enabled() || torch::jit::tracer::isTracing();
}

bool has_tangent(const OptionalTensor& tensor) {
  return is_given(tensor) && tensor->_fw_grad(/*level=*/0).defined();
}

// Fits the channels of an input, and can be written to by each of its numbers.
bool is_vector(const OptionalTensor& values, const at::Tensor& input) {
  return !is_given(values) ||
         (values->device() == input.device() && values->layout() == at::kStrided &&
          values->dim() == 1 && values->size(0) == input.size(1) && values->is_contiguous());
}

bool are_parameters(const OptionalTensor& weight, const OptionalTensor& bias,
                    const at::Tensor& input) {
  const auto has_dtype = [&](const OptionalTensor& values) {
    return !is_given(values) || values->scalar_type() == at::kFloat ||
           values->scalar_type() == input.scalar_type();
  };
  return is_vector(weight, input) && is_vector(bias, input) && has_dtype(weight) &&
         has_dtype(bias) &&
         !(is_given(weight) && is_given(bias) && weight->scalar_type() != bias->scalar_type());
}

bool are_statistics(const OptionalTensor& mean, const OptionalTensor& var,
                    const at::Tensor& input) {
  const auto is_float = [](const OptionalTensor& values) {
    return !is_given(values) || values->scalar_type() == at::kFloat;
  };
  return is_given(mean) == is_given(var) && is_vector(mean, input) && is_vector(var, input) &&
         is_float(mean) && is_float(var);
}

// Reads what a module, as it is now, computes of an input. Returns false for a call that is left to
// the module's class.
bool read_call(PyObject* module, PyObject* given, TrainedNorm& norm) {
  if (!THPVariable_CheckExact(given)) return false;
  norm.input = THPVariable_Unpack(given);
  if (!is_served(norm.input) || is_watched()) return false;
  const auto attributes =
      py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
  PyObject* const own = attributes.ptr();
  if (own == nullptr) throw python_error();
  PyObject* const parameters = entry(own, names().parameters);
  PyObject* const buffers = entry(own, names().buffers);
  bool training = false, tracks = false;
  if (!is_plain_dictionary(parameters) || !is_plain_dictionary(buffers) ||
      !read_bool(entry(own, names().training), training) ||
      !read_bool(entry(own, names().track_running_stats), tracks) ||
      !read_number(entry(own, names().eps), norm.eps) || !(norm.eps > 0) ||
      !read_tensor(own, parameters, names().weight, norm.weight) ||
      !read_tensor(own, parameters, names().bias, norm.bias) ||
      !read_tensor(own, buffers, names().running_mean, norm.running_mean) ||
      !read_tensor(own, buffers, names().running_var, norm.running_var)) {
    return false;
  }
  const bool has_momentum = read_number(entry(own, names().momentum), norm.momentum);
  if (training && tracks) {
    if (!norm.running_mean || !norm.running_var || !has_momentum ||
        !read_tensor(own, buffers, names().steps, norm.steps)) {
      return false;
    }
  } else {
    if (!training && (norm.running_mean || norm.running_var)) return false;  // frozen
    if (!has_momentum && entry(own, names().momentum) != Py_None) return false;
    norm.running_mean.reset();
    norm.running_var.reset();
  }
  return are_parameters(norm.weight, norm.bias, norm.input) &&
         are_statistics(norm.running_mean, norm.running_var, norm.input) &&
         !has_tangent(norm.input) && !has_tangent(norm.weight) && !has_tangent(norm.bias);
}

// What a choice holds for, as signature_of of norm_choices.py says.
struct Signature {
  c10::SmallVector<int64_t, 12> numbers;
  std::string activation;

  Signature(const TrainedNorm& norm, std::string_view activation) : activation(activation) {
    const auto dtype = [](const OptionalTensor& values) {
      return is_given(values) ? static_cast<int64_t>(values->scalar_type()) : -1;
    };
    const auto needs_gradient = [](const OptionalTensor& tensor) {
      return static_cast<int64_t>(is_given(tensor) && tensor->requires_grad());
    };
    const bool is_recorded = at::GradMode::is_enabled();
    numbers = {static_cast<int64_t>(norm.input.scalar_type()),
               norm.input.get_device(),
               dtype(norm.weight),
               dtype(norm.bias),
               static_cast<int64_t>(is_given(norm.running_mean)),
               is_recorded ? 4 * needs_gradient(norm.input) + 2 * needs_gradient(norm.weight) +
                                 needs_gradient(norm.bias)
                           : -1};
    for (const int64_t size : norm.input.sizes()) numbers.push_back(size);
    for (const int64_t stride : norm.input.strides()) numbers.push_back(stride);
  }
  bool operator==(const Signature& other) const {
    return numbers == other.numbers && activation == other.activation;
  }
};

struct SignatureHash {
  size_t operator()(const Signature& signature) const {
    size_t hash = std::hash<std::string_view>()(signature.activation);
    for (const int64_t number : signature.numbers) {
      hash = (hash ^ static_cast<size_t>(number)) * 0x9e3779b97f4a7c15U;
      hash ^= hash >> 32U;
    }
    return hash;
  }
};

// Whether the operator computes calls of a module. A module whose sizes keep changing starts anew
// with this many.
constexpr size_t kMostChoices = 512;
using Choices = std::unordered_map<Signature, bool, SignatureHash>;

// The choices of modules that are alive. The GIL guards them. Never destroyed, because modules may
// outlive it.
std::unordered_map<PyObject*, Choices>& all_choices() {
  static auto* const all = new std::unordered_map<PyObject*, Choices>;
  return *all;
}

Choices& choices_of(PyObject* module) {
  const auto [found, is_new] = all_choices().try_emplace(module);
  if (is_new) {
    const auto forget = [module](const py::handle& reference) {
      all_choices().erase(module);
      reference.dec_ref();
    };
    py::weakref(module, py::cpp_function(forget)).release();
  }
  return found->second;
}

bool read_text(PyObject* object, std::string_view& text) {
  Py_ssize_t size = 0;
  const char* const data = PyUnicode_AsUTF8AndSize(object, &size);
  if (data != nullptr) text = {data, static_cast<size_t>(size)};
  return data != nullptr;
}

bool has_count(Py_ssize_t count, Py_ssize_t expected) {
  if (count != expected) {
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, count);
  }
  return count == expected;
}

PyObject* train_norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  std::string_view activation;
  if (!has_count(count, 4) || !read_text(args[2], activation)) return nullptr;
  PyObject* const tail = args[3];
  if (!PyTuple_CheckExact(tail)) {
    PyErr_SetString(PyExc_TypeError, "tail must be a tuple");
    return nullptr;
  }
  TrainedNorm norm;
  if (!read_call(args[0], args[1], norm)) Py_RETURN_NONE;
  const auto of_module = all_choices().find(args[0]);
  if (of_module == all_choices().end()) Py_RETURN_NOTIMPLEMENTED;
  const auto found = of_module->second.find(Signature(norm, activation));
  if (found == of_module->second.end()) Py_RETURN_NOTIMPLEMENTED;
  const bool by_operator = found->second;
  at::Tensor output;
  {
    const py::gil_scoped_release without_gil;
    output = by_operator ? train_by_operator(norm, activation) : train_by_pytorch(norm);
  }
  PyObject* result = THPVariable_Wrap(std::move(output));
  for (Py_ssize_t i = 0; !by_operator && result != nullptr && i < PyTuple_GET_SIZE(tail); ++i) {
    PyObject* const given = result;
    result = PyObject_CallOneArg(PyTuple_GET_ITEM(tail, i), given);
    Py_DECREF(given);
  }
  return result;
  END_HANDLE_TH_ERRORS
}

PyObject* choose_norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  std::string_view activation;
  if (!has_count(count, 4) || !read_text(args[2], activation)) return nullptr;
  const int by_operator = PyObject_IsTrue(args[3]);
  if (by_operator < 0) return nullptr;
  TrainedNorm norm;
  if (read_call(args[0], args[1], norm)) {
    Choices& choices = choices_of(args[0]);
    if (choices.size() >= kMostChoices) choices.clear();
    choices.insert_or_assign(Signature(norm, activation), by_operator == 1);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* forget_norms(PyObject*, PyObject*) {
  for (auto& [module, choices] : all_choices())
    choices.clear();  // the entries have weak references
  Py_RETURN_NONE;
}

PyObject* set_norm_device(PyObject*, PyObject* name) {
  HANDLE_TH_ERRORS
  std::string_view type;
  if (!read_text(name, type)) return nullptr;
  served_device = c10::Device(std::string(type)).type();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace

PyMethodDef* python_norm_methods() {
  using Fast = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
  constexpr const char* kSeeHeader = "See csrc/python_norm.h.";
  const auto fast = [](const char* name, Fast function) {
    const auto any = reinterpret_cast<void (*)()>(function);
    return PyMethodDef{name, reinterpret_cast<PyCFunction>(any), METH_FASTCALL, kSeeHeader};
  };
  static std::array<PyMethodDef, 5> methods{
      fast("train_norm", train_norm),
      fast("choose_norm", choose_norm),
      PyMethodDef{"forget_norms", forget_norms, METH_NOARGS, kSeeHeader},
      PyMethodDef{"set_norm_device", set_norm_device, METH_O, kSeeHeader},
      PyMethodDef{nullptr, nullptr, 0, nullptr},  // the end
  };
  return methods.data();
}

}  // namespace cudnn_autotune
