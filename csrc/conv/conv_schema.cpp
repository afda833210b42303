#include <torch/library.h>

// The operators stand below autograd. They take and return plain tensors, and only
// conv_fused_into_ changes an argument. Their fake kernels are in cudnn_autotune/compile/fake.py.
TORCH_LIBRARY(cudnn_autotune, m) {
  m.def(
      "conv_fprop(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, "
      "SymInt[] dilation, SymInt groups, str sampling=\"\", int workspace_limit=-1) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "conv_transpose(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] "
      "padding, "
      "SymInt[] output_padding, SymInt[] dilation, SymInt groups, str sampling=\"\", "
      "int workspace_limit=-1) -> Tensor",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order});
  m.def(
      "conv_dgrad(Tensor grad_output, Tensor weight, SymInt[] input_size, SymInt[] stride, "
      "SymInt[] padding, SymInt[] dilation, SymInt groups, str sampling=\"\", "
      "int workspace_limit=-1) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "conv_wgrad(Tensor grad_output, Tensor input, SymInt[] weight_size, SymInt[] stride, "
      "SymInt[] padding, SymInt[] dilation, SymInt groups, str sampling=\"\", "
      "int workspace_limit=-1) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "conv_fused(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, SymInt[] stride, "
      "SymInt[] padding, SymInt[] dilation, SymInt groups, str activation=\"\", "
      "str sampling=\"\", int workspace_limit=-1, Tensor? slope=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  // It writes the result of conv_fused into a tensor, which may be a slice of channels.
  m.def(
      "conv_fused_into_(Tensor(a!) output, Tensor input, Tensor weight, Tensor? bias, "
      "Tensor? residual, SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups, "
      "str activation=\"\", str sampling=\"\", int workspace_limit=-1, Tensor? slope=None) -> ()",
      {at::Tag::pt2_compliant_tag});
  // Image n of the input is convolved with the n-th part of the weight, as with groups that are the
  // images of a batch.
  m.def(
      "conv_each_image(Tensor input, Tensor weight, SymInt[] stride, SymInt[] padding, "
      "SymInt[] dilation, str sampling=\"\", int workspace_limit=-1) -> Tensor",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order});
}
