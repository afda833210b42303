#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <array>
#include <cstdint>
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

// The operator cudnn_autotune::group_norm: the output in the input's layout, and the mean and the
// inverse deviation of each group as one tensor of float32, (2, images, groups). That of the
// gradients, of the input, the weight and the bias, is for channels_last.
using GroupNormSignature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor& input,
                                                              const OptionalTensor& weight,
                                                              const OptionalTensor& bias,
                                                              int64_t groups, double eps);
using GroupGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using GroupNormBackwardSignature = GroupGradients(const at::Tensor& grad_output,
                                                  const at::Tensor& input,
                                                  const OptionalTensor& weight,
                                                  const at::Tensor& statistics, int64_t groups,
                                                  std::array<bool, 3> output_mask);

const c10::TypedOperatorHandle<GroupNormSignature>& group_norm_op();
const c10::TypedOperatorHandle<GroupNormBackwardSignature>& group_norm_backward_op();

// A call of a norm in training. It lives no longer than its tensors.
struct NormCall {
  const at::Tensor& input;
  const OptionalTensor &weight, &bias;
  const OptionalTensor &running_mean, &running_var;  // which the call updates
  double momentum = 0;
  double eps = 0;
};
// In place of tensors that a call does not have.
const OptionalTensor& no_tensor();

// What a call computes beside a batch norm.
struct NormKind {
  size_t activation = 0;  // behind the norm: its place in kNormActivations
  int64_t groups = 0;     // of a group norm; 0 for a batch norm
  bool by_cudnn = false;  // whether cuDNN's operator is called
};

// The activations of NORM_ACTIVATIONS of cudnn_autotune/norms/reference.py.
inline constexpr std::array<std::string_view, 11> kNormActivations{
    "identity",       "relu",      "relu6",     "sigmoid",          "silu",
    "gelu",           "gelu_tanh", "hardswish", "leaky_relu(0.01)", "leaky_relu(0.1)",
    "leaky_relu(0.2)"};
static_assert(kNormActivations.size() <= 16, "a place has four bits in keys");
// The place of an activation; nothing for one that the kernels do not have.
std::optional<size_t> place_of_activation(std::string_view activation);

// The output of a call with an activation, by the operator batch_norm_act_tracking, which updates
// running statistics and has a derivative. Throws PlanError.
at::Tensor norm_act(const NormCall& call, std::string_view activation);
// The output of a group norm in channels_last, in the layout of its input, by the operator
// group_norm, with a derivative of any order. Throws PlanError.
at::Tensor group_norm_in_rows(const NormCall& call, int64_t groups);

// The results of a call; the mask is undefined if there is none.
struct NormOutputs {
  at::Tensor output, mean, inv_std, mask;
};
// Computes a call below autograd, and updates its running statistics. Throws PlanError.
NormOutputs compute_norm(const NormCall& call, std::string_view activation);
// Computes it by the kernels, in one go. Nothing where they do not compute it. Only in builds with
// CUDA. Throws PlanError.
std::optional<NormOutputs> norm_by_kernels(const NormCall& call, std::string_view activation);

// Whether the kernels compute a tensor's dtype: float16, bfloat16 or float32.
bool has_norm_dtype(const at::Tensor& input);
// Whether values, if there are any, are a contiguous vector of an input's channels on its device.
bool is_channel_vector(const OptionalTensor& values, const at::Tensor& input);
// Whether they can be a running statistic, which is of float32.
bool suits_as_statistic(const OptionalTensor& values, const at::Tensor& input);
// Whether a tensor has the strides of a new one in its memory format, which PyTorch's results have.
bool has_plain_strides(const at::Tensor& tensor);
// Whether the operator computes a call of a batch norm.
bool suits_operator(const NormCall& call);
// Whether the input of a group norm lies in (N, *spatial, C), and in no other order.
bool is_in_rows(const at::Tensor& input);
// Whether the operators compute a group norm of such an input, and its gradients.
bool suits_group_operators(const NormCall& call, int64_t groups);
// Sets the type of device whose norms the operators may compute: CUDA, or in tests the CPU.
void set_norm_device(c10::DeviceType type);
// The kernels count elements in 32 bits, and add a few blocks' work to them.
constexpr int64_t kMostNormElements = (int64_t{1} << 31) - (int64_t{1} << 20);

constexpr int64_t kMostNormDims = 8;  // of an input that a choice is made for

// The facts of a call that a choice holds for, as _batch_norm_call of norm_choices.py says. A
// choice for a contiguous group norm holds whatever needs gradients.
class NormCallSignature {
 public:
  NormCallSignature(const NormCall& call, const NormKind& kind, int64_t serial, int16_t sampling);
  bool operator==(const NormCallSignature& other) const {
    return size_ == other.size_ &&
           std::equal(words_.begin(), words_.begin() + size_, other.words_.begin());
  }
  struct Hash {
    size_t operator()(const NormCallSignature& signature) const { return signature.hash_; }
  };

 private:
  std::array<int64_t, 3 + 2 * kMostNormDims> words_;
  uint32_t size_ = 0;
  size_t hash_ = 0;
};

// Whether the activation's derivative is computed of the output, and whether a mask of one bit a
// value is enough of it, as NORM_ACTIVATIONS of cudnn_autotune/norms/reference.py says.
bool is_derived_by_output(std::string_view activation);
bool is_derived_by_mask(std::string_view activation);

}  // namespace cudnn_autotune
