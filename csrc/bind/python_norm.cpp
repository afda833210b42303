#include "bind/bindings.h"

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "call/aten_conv.h"
#include "call/autocast.h"
#include "norm/norm_choices.h"
#include "norm/norm_ops.h"

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
  PyObject* check_input_dim = interned("_check_input_dim");
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

// Whether a mode sees calls of torch's functions. That of torch.set_default_device only changes
// those that make tensors of numbers.
bool is_function_mode_active() {
  using Modes = at::impl::PythonTorchFunctionTLS;
  if (!at::impl::torch_function_mode_enabled()) return false;
  static PyObject* of_default_device = nullptr;  // the GIL guards it
  if (of_default_device == nullptr) {
    py::object found = py::module_::import("torch.utils._device").attr("DeviceContext");
    of_default_device = found.release().ptr();
  }
  for (int64_t i = 0; i < Modes::stack_len(); ++i) {
    PyObject* const mode = Modes::get_stack_at(i)->ptr(getPyInterpreter());
    if (reinterpret_cast<PyObject*>(Py_TYPE(mode)) != of_default_device) return true;
  }
  return false;
}

// Whether a transform, a mode or a tracer stands between a call and its operators.
bool is_watched() {
  return in_transform() || c10::impl::TorchDispatchModeTLS::any_modes_set() ||
         is_function_mode_active() || torch::jit::tracer::isTracing();
}

// A call of a module.
struct ModuleCall {
  at::Tensor input;
  OptionalTensor weight, bias;
  OptionalTensor running_mean, running_var;
  OptionalTensor steps;  // counts the calls that update running statistics
  bool by_batch = true;  // by statistics of the batch, which update running ones that are given
  double momentum = 0;
  double eps = 0;
};

// Reads what PyTorch's module, as it is now, computes of an input. Returns false for a call that is
// left to the module's class.
bool read_call(PyObject* module, PyObject* given, ModuleCall& call) {
  if (!THPVariable_CheckExact(given) || is_watched()) return false;
  call.input = THPVariable_Unpack(given);
  const at::Tensor& input = call.input;
  if (input.layout() != at::kStrided || input.is_nested() || input.dim() < 2) return false;
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
      !read_number(entry(own, names().eps), call.eps) ||
      !read_tensor(own, parameters, names().weight, call.weight) ||
      !read_tensor(own, parameters, names().bias, call.bias) ||
      !read_tensor(own, buffers, names().running_mean, call.running_mean) ||
      !read_tensor(own, buffers, names().running_var, call.running_var)) {
    return false;
  }
  const bool updates = training && tracks;
  if (!read_number(entry(own, names().momentum), call.momentum) &&
      (updates || entry(own, names().momentum) != Py_None)) {
    return false;
  }
  if (updates && !read_tensor(own, buffers, names().steps, call.steps)) return false;
  call.by_batch = training || (!call.running_mean && !call.running_var);
  if (training && !tracks) {
    call.running_mean.reset();
    call.running_var.reset();
  }
  // An eps of 0 is an error of some versions of PyTorch, in evaluation too. One value for each
  // channel is one of all.
  if (!(call.eps > 0)) return false;
  const auto sizes = input.sizes();
  const bool is_one = sizes[0] == 1 && c10::multiply_integers(sizes.slice(2)) == 1;
  return !call.by_batch || !is_one;
}

// Knowledge about a module.
struct Known {
  int64_t serial;     // tells it from modules that had its address before
  uint64_t dims = 0;  // a bit for each number of dimensions that its inputs may have
};

// The entry of a module, as long as that is alive. The GIL guards the table, which is never
// destroyed, because modules may outlive it.
Known& known_of(PyObject* module) {
  static auto* const all = new std::unordered_map<PyObject*, Known>;
  static int64_t serials = 0;
  const auto [found, is_new] = all->try_emplace(module);
  Known& known = found->second;
  if (is_new) {
    known.serial = ++serials;
    const auto forget = [module](const py::handle& reference) {
      all->erase(module);
      reference.dec_ref();
    };
    py::weakref(module, py::cpp_function(forget)).release();
  }
  return known;
}

// Whether PyTorch's class takes an input of `dims` dimensions. Its forward raises what is wrong.
bool takes_dims(PyObject* module, PyObject* input, int64_t dims) {
  const uint64_t bit = uint64_t{1} << std::min<int64_t>(dims, 63);
  if ((known_of(module).dims & bit) != 0) return true;
  PyObject* const checked = PyObject_CallMethodOneArg(module, names().check_input_dim, input);
  if (checked == nullptr) {
    if (PyErr_ExceptionMatches(PyExc_Exception) == 0) throw python_error();
    PyErr_Clear();
    return false;
  }
  Py_DECREF(checked);
  known_of(module).dims |= bit;
  return true;
}

bool read_text(PyObject* object, std::string_view& text) {
  Py_ssize_t size = 0;
  const char* const data = PyUnicode_AsUTF8AndSize(object, &size);
  if (data != nullptr) text = {data, static_cast<size_t>(size)};
  return data != nullptr;
}

// A call by what is chosen for it: in the operators of PyTorch's function, or here with an
// activation. Returns whether the activation was computed.
bool compute(const ModuleCall& call, PyObject* module, int64_t serial, size_t activation,
             bool is_suitable, at::Tensor& output) {
  const NormCall norm{call.input,       call.weight,   call.bias, call.running_mean,
                      call.running_var, call.momentum, call.eps};
  if (is_given(call.steps)) call.steps->add_(1);
  const NormModuleScope scope({module, serial});
  if (activation != 0 && is_suitable) {
    const auto compute_both = [&] { return norm_act(norm, kNormActivations[activation]); };
    if (auto found = if_served(norm, {activation}, [] { return true; }, compute_both)) {
      output = *std::move(found);
      return true;
    }
  }
  std::optional<OwnPathGuard> own_path;
  if (activation != 0) own_path.emplace();
  // A backward by the statistics of the batch does not read running ones, so they may change before
  // it, as DistributedDataParallel changes them.
  const auto saved = [&](const OptionalTensor& running) -> OptionalTensor {
    const bool is_read = !call.by_batch || !is_given(running) || !at::GradMode::is_enabled();
    return is_read ? running : running->variable_data();
  };
  output = at::batch_norm(call.input, call.weight, call.bias, saved(call.running_mean),
                          saved(call.running_var), call.by_batch, call.momentum, call.eps,
                          at::globalContext().userEnabledCuDNN());
  return false;
}

PyObject* batch_norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  std::string_view name;
  if (!has_count(count, 5) || !read_text(args[2], name)) return nullptr;
  const auto activation = place_of_activation(name);
  PyObject* const tail = args[3];
  if (!activation || !PyTuple_CheckExact(tail)) {
    PyErr_SetString(PyExc_TypeError, "activation must be one of the norms', and tail a tuple");
    return nullptr;
  }
  ModuleCall call;
  if (!read_call(args[0], args[1], call)) Py_RETURN_NONE;
  const bool takes_all = args[4] == Py_True;
  bool is_suitable = false;
  if (*activation != 0 || !takes_all) {
    is_suitable =
        call.by_batch && suits_operator({call.input, call.weight, call.bias, call.running_mean,
                                         call.running_var, call.momentum, call.eps});
  }
  if ((!is_suitable && !takes_all) || !takes_dims(args[0], args[1], call.input.dim())) {
    Py_RETURN_NONE;
  }
  const int64_t serial = known_of(args[0]).serial;
  at::Tensor output;
  bool is_whole = false;
  {
    const py::gil_scoped_release without_gil;
    is_whole = compute(call, args[0], serial, *activation, is_suitable, output);
  }
  PyObject* result = THPVariable_Wrap(std::move(output));
  for (Py_ssize_t i = 0; !is_whole && result != nullptr && i < PyTuple_GET_SIZE(tail); ++i) {
    PyObject* const given = result;
    result = PyObject_CallOneArg(PyTuple_GET_ITEM(tail, i), given);
    Py_DECREF(given);
  }
  return result;
  END_HANDLE_TH_ERRORS
}

// A tensor that no subclass stands for, or None.
bool read_given(PyObject* given, OptionalTensor& tensor) {
  if (given == Py_None) return true;
  if (!THPVariable_CheckExact(given)) return false;
  tensor = THPVariable_Unpack(given);
  return true;
}

PyObject* group_norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (!has_count(count, 7)) return nullptr;
  PyObject* const module = args[0];
  OptionalTensor given, weight, bias;
  double eps = 0;
  const int64_t groups = PyLong_AsLongLong(args[4]);
  if (groups == -1 && PyErr_Occurred() != nullptr) return nullptr;
  if (is_watched() || !read_given(args[1], given) || !is_given(given) ||
      given->layout() != at::kStrided || given->is_nested() || !is_in_rows(*given)) {
    Py_RETURN_NONE;
  }
  if (!read_given(args[2], weight) || !read_given(args[3], bias) || !read_number(args[5], eps)) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  const NormModule owner{module, known_of(module).serial};
  std::optional<at::Tensor> found;
  {
    const py::gil_scoped_release without_gil;
    at::Tensor input = *given;
    const auto device = input.device().type();
    if (args[6] == Py_True && input.is_cuda() && at::autocast::is_autocast_enabled(device)) {
      for (at::Tensor* one :
           {&input, is_given(weight) ? &*weight : nullptr, is_given(bias) ? &*bias : nullptr}) {
        if (one != nullptr) *one = at::autocast::cached_cast(at::kFloat, *one, device);
      }
    }
    const NormCall call{input, weight, bias, no_tensor(), no_tensor(), /*momentum=*/0, eps};
    const NormModuleScope scope(owner);
    found = if_served(
        call, {0, groups}, [&] { return suits_group_operators(call, groups); },
        [&] { return group_norm_in_rows(call, groups); });
  }
  if (!found) Py_RETURN_NOTIMPLEMENTED;
  return THPVariable_Wrap(*std::move(found));
  END_HANDLE_TH_ERRORS
}

PyObject* set_norm_device(PyObject*, PyObject* name) {
  HANDLE_TH_ERRORS
  std::string_view type;
  if (!read_text(name, type)) return nullptr;
  cudnn_autotune::set_norm_device(c10::Device(std::string(type)).type());
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace

PyMethodDef* python_norm_methods() {
  static std::array<PyMethodDef, 4> methods{
      fast_method("batch_norm", batch_norm),
      fast_method("group_norm", group_norm),
      PyMethodDef{"set_norm_device", set_norm_device, METH_O, "See csrc/bind/bindings.h."},
      PyMethodDef{nullptr, nullptr, 0, nullptr},  // the end
  };
  return methods.data();
}

}  // namespace cudnn_autotune
