#include "core/cudnn/conv_plan.h"

#include <utility>

#include "core/cuda/cuda_driver.h"
#include "core/cudnn/cudnn_library.h"
#include "core/problem/check.h"

namespace cudnn_autotune {

// The addresses of a launch in the form that cuDNN takes: a variant pack descriptor. If it could
// not be made, status() tells why.
class ConvPlan::VariantPack {
 public:
  VariantPack(const Bindings& bindings, const ConvPointers& pointers, void* workspace)
      : backend_(cudnn_backend()), pointers_(pointers), workspace_(workspace) {
    status_ = backend_.create(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &descriptor_);
    set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, bindings.count,
        bindings.addresses.data());
    set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, bindings.count, bindings.uids.data());
    set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
    if (status_ == CUDNN_STATUS_SUCCESS) status_ = backend_.finalize(descriptor_);
  }
  ~VariantPack() {
    if (descriptor_ != nullptr) backend_.destroy(descriptor_);
  }
  VariantPack(const VariantPack&) = delete;
  VariantPack& operator=(const VariantPack&) = delete;

  bool is_for(const ConvPointers& pointers, void* workspace) const {
    return pointers_ == pointers && workspace_ == workspace && status_ == CUDNN_STATUS_SUCCESS;
  }
  cudnnStatus_t status() const { return status_; }
  cudnnBackendDescriptor_t descriptor() const { return descriptor_; }

 private:
  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t count,
           const void* values) {
    if (status_ == CUDNN_STATUS_SUCCESS) {
      status_ = backend_.set_attribute(descriptor_, name, type, count, values);
    }
  }

  const CudnnBackend& backend_;
  ConvPointers pointers_;
  void* workspace_;
  cudnnBackendDescriptor_t descriptor_ = nullptr;
  cudnnStatus_t status_ = CUDNN_STATUS_SUCCESS;
};

Bindings::Bindings(const ConvProblem& problem, const ConvPointers& pointers, bool is_unfused) {
  const auto bind = [this](int64_t uid, void* address) {
    uids[count] = uid;
    addresses[count++] = address;
  };
  bind(kUidX, pointers.x);
  bind(kUidW, pointers.w);
  bind(kUidY, pointers.y);
  if (is_unfused) return;
  if (problem.has_bias()) bind(kUidBias, pointers.bias);
  if (problem.has_residual()) bind(kUidResidual, pointers.residual);
  if (problem.has_slope()) bind(kUidSlope, pointers.slope);
  if (problem.activation_kind == ActivationKind::hardswish) {
    // Constants are passed by addresses on the host, in the type that sums are computed in.
    static float three = 3.0f;
    static float sixth = 1.0f / 6.0f;
    static double wide_three = 3.0;
    static double wide_sixth = 1.0 / 6.0;
    const bool is_wide = problem.dtype == DataType::float64;
    bind(kUidThree, is_wide ? static_cast<void*>(&wide_three) : &three);
    bind(kUidSixth, is_wide ? static_cast<void*>(&wide_sixth) : &sixth);
  }
}

ConvPlan::ConvPlan(std::shared_ptr<const Impl> impl, cudnnBackendDescriptor_t descriptor,
                   int64_t workspace_bytes, const ConvProblem& problem, EngineConfig config,
                   bool is_read_back)
    : impl_(std::move(impl)),
      descriptor_(descriptor),
      workspace_bytes_(workspace_bytes),
      problem_(problem),
      config_(std::move(config)),
      is_read_back_(is_read_back) {}

ConvPlan::~ConvPlan() {
  const RelaxedCapture unloading;
  impl_.reset();
}

void ConvPlan::execute(cudnnHandle_t handle, const ConvPointers& pointers, void* workspace) {
  if (pack_ == nullptr || !pack_->is_for(pointers, workspace)) {
    const Bindings bindings(problem_, pointers, config_.is_unfused);
    pack_ = std::make_unique<VariantPack>(bindings, pointers, workspace);
  }
  cudnnStatus_t status = pack_->status();
  if (status == CUDNN_STATUS_SUCCESS) {
    status = cudnn_backend().execute(handle, descriptor_, pack_->descriptor());
  }
  if (status != CUDNN_STATUS_SUCCESS) {
    throw CudnnError("cudnnBackendExecute of " + config_.text(),
                     cudnn_backend().error_string(status), problem_.text());
  }
}

}  // namespace cudnn_autotune
