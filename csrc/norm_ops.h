#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

namespace cudnn_autotune {

// The operators of cudnn_autotune/norms/operators.py, which has their schemas. Tensors that
// are not asked for are undefined.

using OptionalTensor = std::optional<at::Tensor>;

// The output, the mean, the inverse standard deviation, the unbiased variance, and the mask.
using NormResults = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
// The gradients of the input, the weight, the bias and the residual.
using NormGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

inline bool is_given(const OptionalTensor& tensor) { return tensor && tensor->defined(); }

using NormSignature = NormResults(const at::Tensor& input, const OptionalTensor& weight,
                                  const OptionalTensor& bias, const OptionalTensor& residual,
                                  std::string_view activation, double eps);
using NormBackwardSignature = NormGradients(
    const at::Tensor& grad_output, const OptionalTensor& grad_output_2, const at::Tensor& input,
    const OptionalTensor& output, const OptionalTensor& weight, const OptionalTensor& bias,
    const OptionalTensor& residual, const at::Tensor& mean, const at::Tensor& inv_std,
    std::string_view activation, std::array<bool, 4> output_mask);

const c10::TypedOperatorHandle<NormSignature>& norm_op();
const c10::TypedOperatorHandle<NormBackwardSignature>& norm_backward_op();

// A call of a batch norm module.
struct NormCall {
  at::Tensor input;
  OptionalTensor weight, bias;
  OptionalTensor running_mean, running_var;
  OptionalTensor steps;  // counts the calls that update running statistics
  bool by_batch = true;  // by statistics of the batch, which update running ones that are given
  double momentum = 0;
  double eps = 0;
};

// The output by the operator with an activation, and by PyTorch's function without one. The
// operator takes statistics of the batch, and both running ones or none. As in PyTorch's module the
// step is counted before, and running statistics are updated before anything is saved for the
// backward: a hook on saved tensors may throw.
at::Tensor norm_by_operator(const NormCall& call, std::string_view activation);
at::Tensor norm_by_pytorch(const NormCall& call);

// The results of a call of a module; the mask is undefined if there is none.
struct NormOutputs {
  at::Tensor output, mean, inv_std, mask;
};
// Computes a call by the kernels, which update its running statistics too. Nothing where they do
// not compute it. Only in builds with CUDA. Throws PlanError.
std::optional<NormOutputs> norm_by_kernels(const NormCall& call, const OptionalTensor& residual,
                                           std::string_view activation);
// Updates the running statistics of a call, if it has any, below autograd.
void update_running(const NormCall& call, const at::Tensor& mean, const at::Tensor& unbiased_var);

// Whether the kernels compute a tensor's dtype: float16, bfloat16 or float32.
bool has_norm_dtype(const at::Tensor& input);
// Whether values, if there are any, are a contiguous vector of an input's channels on its device.
bool is_channel_vector(const OptionalTensor& values, const at::Tensor& input);
// Whether they can be a running statistic, which is of float32.
bool suits_as_statistic(const OptionalTensor& values, const at::Tensor& input);
// Whether a tensor has the strides of a new one in its memory format, which PyTorch's results have.
bool has_plain_strides(const at::Tensor& tensor);
// Whether the operator computes a call.
bool suits_operator(const NormCall& call);
// Sets the type of device whose norms the operator may compute: CUDA, or in tests the CPU.
void set_norm_device(c10::DeviceType type);
// The kernels count elements in 32 bits, and add a few blocks' work to them.
constexpr int64_t kMostNormElements = (int64_t{1} << 31) - (int64_t{1} << 20);

// The properties of a call that a choice holds for, as _signature_of of norm_choices.py says.
struct NormCallSignature {
  // Without `by_gradients` it does not matter what needs gradients.
  NormCallSignature(const NormCall& call, std::string_view activation, bool by_gradients = true);
  bool operator==(const NormCallSignature& other) const {
    return numbers == other.numbers && activation == other.activation;
  }
  struct Hash {
    size_t operator()(const NormCallSignature& signature) const;
  };

  c10::SmallVector<int64_t, 20> numbers;
  std::string activation;
};

// Whether the activation's derivative is computed of the output, and whether a mask of one bit a
// value is enough of it, as NORM_ACTIVATIONS of cudnn_autotune/norms/reference.py says.
bool is_derived_by_output(std::string_view activation);
bool is_derived_by_mask(std::string_view activation);

// What computes calls that the kernels do not take, and refuses bad ones. Only in builds with CUDA.
void set_norm_fallback(std::function<NormSignature> forward,
                       std::function<NormBackwardSignature> backward);

}  // namespace cudnn_autotune
