#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <utility>

#include "call/conv_layout.h"
#include "core/problem/check.h"
#include "norm/norm_ops.h"
#include "norm/norm_plan.h"

namespace cudnn_autotune {
namespace {

// Bytes of a vector, for each of which a mask has a byte (cudnn_autotune/norms/tile.cuh).
constexpr int64_t kMaskedBytes = 16;

// The key of what Python registered for all backends: it computes calls that the kernels do not
// take, and refuses bad ones.
constexpr c10::DispatchKeySet kByPyTorch(c10::DispatchKey::CPU);

// A call's input in the layout in which it is computed, and its sizes.
struct NormInput {
  // With `in_rows` it is computed in (N, *spatial, C), the layout that has a mask.
  explicit NormInput(const at::Tensor& given, bool in_rows = false) : tensor(given) {
    if (in_rows && !is_dense(given, true)) {
      tensor = given.movedim(1, -1).contiguous().movedim(-1, 1);
    } else if (!is_dense(given, false) && !is_dense(given, true)) {
      tensor = given.contiguous(given.suggest_memory_format());
    }
    batch = tensor.size(0);
    channels = tensor.size(1);
    for (int64_t dim = 2; dim < tensor.dim(); ++dim) spatial *= tensor.size(dim);
    planes = !in_rows && spatial > 1 && is_dense(tensor, false);
  }

  // The bytes of a mask, as mask_size of cudnn_autotune/norms/reference.py says; 0 if there
  // is none.
  int64_t mask_size() const {
    const int64_t numbers = kMaskedBytes / static_cast<int64_t>(tensor.element_size());
    return planes || channels % numbers != 0 ? 0 : tensor.numel() / numbers;
  }
  // From now on all tensors are aligned to the vectors of a mask.
  void align() {
    is_aligned = true;
    tensor = in_layout(tensor);
  }
  // A tensor of the same shape, brought into this layout.
  at::Tensor in_layout(const at::Tensor& other) const {
    const auto address = reinterpret_cast<uintptr_t>(other.data_ptr());
    if (is_dense(other, !planes) && !(is_aligned && address % kMaskedBytes != 0)) return other;
    return empty().copy_(other);
  }
  // It is not made by at::empty, which fills it under deterministic algorithms.
  at::Tensor empty() const {
    return at::Tensor(at::detail::empty_strided_cuda(tensor.sizes(), tensor.strides(),
                                                     tensor.options().memory_format(std::nullopt)));
  }
  at::Tensor empty_vector(at::ScalarType dtype, int64_t size) const {
    return at::Tensor(
        at::detail::empty_cuda({size}, tensor.options().dtype(dtype).memory_format(std::nullopt)));
  }
  at::Tensor empty_vector(at::ScalarType dtype) const { return empty_vector(dtype, channels); }
  std::array<int32_t, 3> sizes() const {
    return {static_cast<int32_t>(batch), static_cast<int32_t>(channels),
            static_cast<int32_t>(spatial)};
  }

  at::Tensor tensor;
  int64_t batch, channels, spatial = 1;
  bool planes, is_aligned = false;
};

bool is_like(const at::Tensor& tensor, const at::Tensor& input) {
  return tensor.sizes() == input.sizes() && tensor.scalar_type() == input.scalar_type() &&
         tensor.device() == input.device();
}
bool is_like(const OptionalTensor& tensor, const at::Tensor& input) {
  return !is_given(tensor) || is_like(*tensor, input);
}

bool is_parameter(const OptionalTensor& values, const at::Tensor& input) {
  return !is_given(values) ||
         (values->dim() == 1 && values->size(0) == input.size(1) &&
          values->device() == input.device() &&
          (values->scalar_type() == input.scalar_type() || values->scalar_type() == at::kFloat));
}

// Whether the kernels may take a call: it is right, and nothing about it is odd.
bool suits_kernels(const at::Tensor& input, const OptionalTensor& weight,
                   const OptionalTensor& bias, const OptionalTensor& residual) {
  if (!has_norm_dtype(input) || input.dim() < 2 || input.dim() > 5 || input.numel() == 0 ||
      input.numel() >= kMostNormElements || input.numel() == input.size(1)) {
    return false;
  }
  return is_parameter(weight, input) && is_parameter(bias, input) && is_like(residual, input) &&
         !(is_given(weight) && is_given(bias) && weight->scalar_type() != bias->scalar_type());
}

// Tensors in the order in which a kernel takes them.
class Pointers {
 public:
  explicit Pointers(std::initializer_list<const at::Tensor*> tensors) {
    for (const at::Tensor* tensor : tensors) add(*tensor);
  }
  // A power of two up to 16 that the addresses of all tensors are multiples of, but for vectors,
  // whose numbers are read one by one.
  int alignment() const { return static_cast<int>((bits_ | 16) & -(bits_ | 16)); }
  c10::ArrayRef<void*> all() const { return all_; }

  void add(const at::Tensor& tensor) {
    void* const address = tensor.defined() ? tensor.data_ptr() : nullptr;
    all_.push_back(address);
    const bool is_vector = tensor.defined() && tensor.dim() == 1;
    if (!is_vector) bits_ |= reinterpret_cast<uintptr_t>(address);
  }
  void add_vector(void* address) { all_.push_back(address); }

 private:
  c10::SmallVector<void*, 16> all_;
  uintptr_t bits_ = 0;
};

at::Tensor dense_vector(const OptionalTensor& values) {
  return is_given(values) ? values->contiguous() : at::Tensor();
}

at::ScalarType parameters_of(const OptionalTensor& weight, const OptionalTensor& bias) {
  if (is_given(weight)) return weight->scalar_type();
  return is_given(bias) ? bias->scalar_type() : at::kFloat;
}

const at::Tensor& tensor_or_none(const OptionalTensor& tensor) {
  static const auto* const none = new at::Tensor();
  return is_given(tensor) ? *tensor : *none;
}

// Computes a norm by the kernels, and the unbiased variance if it is given. Nothing where they do
// not compute it.
std::optional<NormOutputs> computed(const NormCall& call, const OptionalTensor& residual,
                                    std::string_view activation, at::Tensor* unbiased_var) {
  const auto place = place_of_activation(activation);
  if (!place || !suits_kernels(call.input, call.weight, call.bias, residual)) return std::nullopt;
  const c10::cuda::CUDAGuard device(call.input.device());
  NormInput x(call.input);
  const int64_t mask_size =
      is_given(residual) && is_derived_by_mask(activation) ? x.mask_size() : 0;
  if (mask_size > 0) x.align();
  const at::Tensor scale = dense_vector(call.weight), shift = dense_vector(call.bias);
  const at::Tensor addend = is_given(residual) ? x.in_layout(*residual) : at::Tensor();
  const at::Tensor none;
  NormOutputs results{x.empty(), x.empty_vector(at::kFloat), x.empty_vector(at::kFloat),
                      mask_size > 0 ? x.empty_vector(at::kByte, mask_size) : at::Tensor()};
  if (unbiased_var != nullptr) *unbiased_var = x.empty_vector(at::kFloat);
  const Pointers pointers({&x.tensor, &scale, &shift, &addend, &results.output, &results.mean,
                           &results.inv_std, unbiased_var != nullptr ? unbiased_var : &none,
                           &results.mask, &tensor_or_none(call.running_mean),
                           &tensor_or_none(call.running_var)});
  NormKey key{call.input.device().index(),
              /*is_backward=*/false,
              call.input.scalar_type(),
              parameters_of(call.weight, call.bias),
              x.batch,
              x.channels,
              x.spatial,
              x.planes,
              pointers.alignment(),
              *place};
  key.residual = addend.defined();
  key.mask = mask_size > 0;
  key.form = norm_form();
  const auto plan = norm_plan(key);
  if (plan == nullptr) return std::nullopt;
  plan->launch(pointers.all(), x.sizes(),
               {static_cast<float>(call.eps), static_cast<float>(call.momentum)});
  return results;
}

NormResults batch_norm_act(const at::Tensor& input, const OptionalTensor& weight,
                           const OptionalTensor& bias, const OptionalTensor& residual,
                           std::string_view activation, double eps) {
  const NormCall call{input, weight, bias, no_tensor(), no_tensor(), /*momentum=*/0, eps};
  at::Tensor unbiased_var;
  const auto found = computed(call, residual, activation, &unbiased_var);
  if (!found) {
    return norm_op().redispatch(kByPyTorch, input, weight, bias, residual, activation, eps);
  }
  const at::Tensor mask =
      found->mask.defined() ? found->mask : NormInput(found->output).empty_vector(at::kByte, 0);
  return {found->output, found->mean, found->inv_std, unbiased_var, mask};
}

NormGradients batch_norm_act_backward(const at::Tensor& grad_output,
                                      const OptionalTensor& grad_output_2, const at::Tensor& input,
                                      const OptionalTensor& output, const OptionalTensor& weight,
                                      const OptionalTensor& bias, const OptionalTensor& residual,
                                      const at::Tensor& mean, const at::Tensor& inv_std,
                                      std::string_view activation,
                                      std::array<bool, 4> output_mask) {
  const auto by_pytorch = [&] {
    return norm_backward_op().redispatch(kByPyTorch, grad_output, grad_output_2, input, output,
                                         weight, bias, residual, mean, inv_std, activation,
                                         output_mask);
  };
  const auto is_statistic = [&](const at::Tensor& values) {
    return is_parameter(values, input) && values.scalar_type() == at::kFloat;
  };
  const bool by_mask = is_given(output) && output->scalar_type() == at::kByte;
  const auto place = place_of_activation(activation);
  if (!place || !suits_kernels(input, weight, bias, residual) || !is_like(grad_output, input) ||
      !is_like(grad_output_2, input) || !(by_mask || is_like(output, input)) ||
      !is_statistic(mean) || !is_statistic(inv_std)) {
    return by_pytorch();
  }
  const c10::cuda::CUDAGuard device(input.device());
  NormInput x(input, /*in_rows=*/by_mask);
  if (by_mask) {
    if (!is_derived_by_mask(activation) || x.mask_size() == 0 || output->dim() != 1 ||
        output->size(0) != x.mask_size() || output->device() != input.device()) {
      return by_pytorch();
    }
    x.align();
  }
  const auto in_layout = [&](const OptionalTensor& tensor) {
    return is_given(tensor) ? x.in_layout(*tensor) : at::Tensor();
  };
  const bool by_output = is_given(output) && !by_mask && is_derived_by_output(activation);
  const bool by_residual = is_given(residual) && !by_output && !by_mask && activation != "identity";
  const at::ScalarType parameters = parameters_of(weight, bias);
  const at::Tensor dy = x.in_layout(grad_output), dy_2 = in_layout(grad_output_2),
                   value = by_mask       ? output->contiguous()
                           : by_output   ? in_layout(output)
                           : by_residual ? in_layout(residual)
                                         : at::Tensor(),
                   scale = dense_vector(weight), shift = dense_vector(bias),
                   means = mean.contiguous(), deviations = inv_std.contiguous();
  const at::Tensor dx = output_mask[0] ? x.empty() : at::Tensor(),
                   dweight = output_mask[1] ? x.empty_vector(parameters) : at::Tensor(),
                   dbias = output_mask[2] ? x.empty_vector(parameters) : at::Tensor(),
                   dz = output_mask[3] ? x.empty() : at::Tensor();
  const Pointers pointers({&dy, &dy_2, &x.tensor, &value, &scale, &shift, &means, &deviations, &dx,
                           &dweight, &dbias, &dz});
  NormKey key{input.device().index(),
              /*is_backward=*/true,
              input.scalar_type(),
              parameters,
              x.batch,
              x.channels,
              x.spatial,
              x.planes,
              pointers.alignment(),
              *place};
  key.residual = by_residual;
  key.by_output = by_output;
  key.second = dy_2.defined();
  key.grad_residual = dz.defined();
  key.grad_input = dx.defined();
  key.mask = by_mask;
  key.form = norm_form();
  const auto plan = norm_plan(key);
  if (plan == nullptr) return by_pytorch();
  plan->launch(pointers.all(), x.sizes(), {});
  const auto in_inputs_layout = [&](const at::Tensor& tensor) {
    const bool is_other = by_mask && tensor.defined() && !is_dense(input, true);
    return is_other ? tensor.contiguous(input.suggest_memory_format()) : tensor;
  };
  return {in_inputs_layout(dx), dweight, dbias, in_inputs_layout(dz)};
}

std::tuple<at::Tensor, at::Tensor> group_norm(const at::Tensor& input, const OptionalTensor& weight,
                                              const OptionalTensor& bias, int64_t groups,
                                              double eps) {
  const auto is_vector_of_channels = [&](const OptionalTensor& values) {
    return is_parameter(values, input) && (!is_given(values) || values->is_contiguous());
  };
  const bool in_rows = is_in_rows(input);
  TORCH_CHECK(input.dim() >= 2 && input.numel() > 0 && (input.is_contiguous() || in_rows),
              "group_norm: input must be contiguous or in channels_last, (N, C, *spatial) and not "
              "empty");
  TORCH_CHECK(groups > 0 && input.size(1) % groups == 0,
              "group_norm: groups must divide the channels, ", input.size(1), ", got ", groups);
  TORCH_CHECK(is_vector_of_channels(weight) && is_vector_of_channels(bias),
              "group_norm: weight and bias must be contiguous vectors of the channels");
  const c10::cuda::CUDAGuard device(input.device());
  const int64_t images = input.size(0), channels = input.size(1),
                spatial = input.numel() / (images * channels);
  const auto empty = [&](at::IntArrayRef size, at::ScalarType dtype) {
    return at::Tensor(
        at::detail::empty_cuda(size, input.options().dtype(dtype).memory_format(std::nullopt)));
  };
  const at::Tensor scale = weight.value_or(at::Tensor()), shift = bias.value_or(at::Tensor()),
                   output = at::Tensor(at::detail::empty_strided_cuda(
                       input.sizes(), dense_strides(input.sizes(), in_rows),
                       input.options().memory_format(std::nullopt))),
                   statistics = empty({2, images, groups}, at::kFloat), none;
  auto* const mean = statistics.data_ptr<float>();
  Pointers pointers({&input, &scale, &shift, &none, &output});
  for (float* const vector : {mean, mean + images * groups}) pointers.add_vector(vector);
  for (int i = 0; i < 4; ++i) pointers.add_vector(nullptr);  // no other results
  NormKey key{input.device().index(),
              /*is_backward=*/false,
              input.scalar_type(),
              parameters_of(weight, bias),
              /*batch=*/in_rows ? images : channels / groups,
              /*channels=*/in_rows ? channels : images * groups,
              spatial,
              /*planes=*/!in_rows,
              pointers.alignment(),
              /*activation=*/0};
  key.groups = groups;
  key.form = norm_form();
  const auto plan = input.numel() < kMostNormElements ? norm_plan(key) : nullptr;
  if (plan == nullptr) throw PlanError("no kernel computes this group norm");
  plan->launch(pointers.all(),
               {static_cast<int32_t>(key.batch), static_cast<int32_t>(key.channels),
                static_cast<int32_t>(spatial)},
               {static_cast<float>(eps), /*momentum=*/0.0f});
  return {output, statistics};
}

GroupGradients group_norm_backward(const at::Tensor& grad_output, const at::Tensor& input,
                                   const OptionalTensor& weight, const at::Tensor& statistics,
                                   int64_t groups, std::array<bool, 3> output_mask) {
  const auto by_pytorch = [&] {
    return group_norm_backward_op().redispatch(kByPyTorch, grad_output, input, weight, statistics,
                                               groups, output_mask);
  };
  if (!has_norm_dtype(input) || !is_in_rows(input) || input.numel() >= kMostNormElements ||
      !is_like(grad_output, input) || !is_parameter(weight, input) || groups <= 0 ||
      input.size(1) % groups != 0 || statistics.scalar_type() != at::kFloat ||
      statistics.sizes() != at::IntArrayRef({2, input.size(0), groups}) ||
      statistics.device() != input.device()) {
    return by_pytorch();
  }
  const c10::cuda::CUDAGuard device(input.device());
  const NormInput x(input, /*in_rows=*/true);
  const at::ScalarType parameters = parameters_of(weight, no_tensor());
  const bool of_parameters = output_mask[1] || output_mask[2];
  // Of each image and channel: those of weight and bias.
  const at::Tensor sums =
      of_parameters
          ? x.empty_vector(at::kFloat, 2 * x.batch * x.channels).view({2, x.batch, x.channels})
          : at::Tensor();
  const auto part_of_sums = [&](size_t i) {
    return output_mask[i] ? sums.select(0, static_cast<int64_t>(i) - 1) : at::Tensor();
  };
  const at::Tensor dy = x.in_layout(grad_output), scale = dense_vector(weight),
                   found = statistics.contiguous(), none,
                   dx = output_mask[0] ? x.empty() : at::Tensor();
  auto* const mean = found.data_ptr<float>();
  Pointers pointers({&dy, &none, &x.tensor, &none, &scale, &none});
  pointers.add_vector(mean);
  pointers.add_vector(mean + x.batch * groups);
  pointers.add(dx);
  for (const size_t i : {1, 2}) {
    const at::Tensor part = part_of_sums(i);
    pointers.add_vector(part.defined() ? part.data_ptr() : nullptr);
  }
  pointers.add(none);
  NormKey key{
      input.device().index(),
      /*is_backward=*/true,   input.scalar_type(),  parameters, x.batch, x.channels, x.spatial,
      /*planes=*/false,       pointers.alignment(),
      /*activation=*/0};
  key.grad_input = dx.defined();
  key.groups = groups;
  key.form = norm_form();
  const auto plan = norm_plan(key);
  if (plan == nullptr) return by_pytorch();
  plan->launch(pointers.all(), x.sizes(), {});
  if (!of_parameters) return {dx, at::Tensor(), at::Tensor()};
  const at::Tensor of_channels =
      (x.batch == 1 ? sums.squeeze(1) : sums.sum(at::IntArrayRef{1})).to(parameters);
  const auto gradient = [&](size_t i) {
    return output_mask[i] ? of_channels.select(0, static_cast<int64_t>(i) - 1) : at::Tensor();
  };
  return {dx, gradient(1), gradient(2)};
}

}  // namespace

std::optional<NormOutputs> norm_by_kernels(const NormCall& call, std::string_view activation) {
  if (!call.input.is_cuda() || !suits_as_statistic(call.running_mean, call.input) ||
      !suits_as_statistic(call.running_var, call.input)) {
    return std::nullopt;
  }
  return computed(call, /*residual=*/no_tensor(), activation, /*unbiased_var=*/nullptr);
}

}  // namespace cudnn_autotune

TORCH_LIBRARY_IMPL(cudnn_autotune, CUDA, m) {
  m.impl("batch_norm_act", cudnn_autotune::batch_norm_act);
  m.impl("batch_norm_act_backward", cudnn_autotune::batch_norm_act_backward);
  m.impl("group_norm", cudnn_autotune::group_norm);
  m.impl("group_norm_backward", cudnn_autotune::group_norm_backward);
}
