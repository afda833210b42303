#include "plan/recipe_plan.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <tuple>
#include <utility>

#include "call/aten_conv.h"
#include "call/torch_bridge.h"
#include "core/cuda/cuda_driver.h"
#include "core/cudnn/conv_plan.h"
#include "core/cudnn/engine_list.h"
#include "core/problem/check.h"

namespace cudnn_autotune {
namespace {

int64_t rounded_up(int64_t bytes) {
  return (bytes + kWorkspaceAligned - 1) / kWorkspaceAligned * kWorkspaceAligned;
}

void encode_tensor_map(CUtensorMap* encoded, const TensorMap& map, void* address) {
  if (cuda_driver().encode_tensor_map == nullptr) {
    throw PlanError("the driver has no tensor maps");
  }
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
  if (map.swizzle_bytes == 32) swizzle = CU_TENSOR_MAP_SWIZZLE_32B;
  if (map.swizzle_bytes == 64) swizzle = CU_TENSOR_MAP_SWIZZLE_64B;
  if (map.swizzle_bytes == 128) swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  constexpr std::array<uint32_t, 5> kEveryElement{1, 1, 1, 1, 1};
  constexpr std::array kTypes{CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                              CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                              CU_TENSOR_MAP_DATA_TYPE_FLOAT64};  // by DataType
  const CUresult status = cuda_driver().encode_tensor_map(
      encoded, kTypes.at(static_cast<size_t>(map.element)), map.shape.size(), address,
      map.shape.data(), map.strides.data(), map.box.data(), kEveryElement.data(),
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) check_driver(status, "encoding a tensor map");
}

}  // namespace

// Where the buffers of one launch are.
struct RecipePlan::Memory {
  const Operands& operands;
  std::array<void*, 7> buffers;  // by Buffer
  int64_t own_bytes;
  void* engine_workspace;

  void* at(const Address& address) const {
    return static_cast<char*>(buffers[static_cast<size_t>(address.buffer)]) + address.offset;
  }
};

class RecipePlan::Step {
 public:
  virtual ~Step() = default;
  virtual void run(const Memory& memory) = 0;
};

class RecipePlan::KernelStep final : public Step {
 public:
  explicit KernelStep(const KernelLaunch& launch)
      : name_(launch.function), values_(launch.arguments.size()) {
    std::vector<size_t> sizes;
    for (size_t i = 0; i < values_.size(); ++i) {
      pointers_.push_back(&values_[i]);
      std::visit(
          [&](const auto& value) {
            using Value = std::decay_t<decltype(value)>;
            if constexpr (std::is_same_v<Value, Address>) {
              addresses_.emplace_back(i, value);
              sizes.push_back(sizeof(void*));
            } else if constexpr (std::is_same_v<Value, TensorMap>) {
              maps_.emplace_back(value);
              pointers_.back() = &maps_.back().encoded;
              sizes.push_back(sizeof(CUtensorMap));
            } else {
              std::memcpy(&values_[i], &value, sizeof(value));
              sizes.push_back(sizeof(value));
            }
          },
          launch.arguments[i]);
    }
    kernel_ = load_kernel(launch.cubin, name_, launch.shared_bytes, sizes);
    const auto& [x, y, z] = launch.cluster;
    std::tie(config_.gridDimX, config_.gridDimY, config_.gridDimZ) = std::tuple_cat(launch.grid);
    std::tie(config_.blockDimX, config_.blockDimY, config_.blockDimZ) =
        std::tuple_cat(launch.block);
    config_.sharedMemBytes = launch.shared_bytes;
    if (x * y * z == 1) return;  // older GPUs have no clusters
    cluster_.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    cluster_.value.clusterDim = {x, y, z};
    config_.attrs = &cluster_;
    config_.numAttrs = 1;
  }

  void run(const Memory& memory) override {
    for (const auto& [i, address] : addresses_) {
      values_[i] = reinterpret_cast<uint64_t>(memory.at(address));
    }
    for (EncodedMap& map : maps_) {
      encode_tensor_map(&map.encoded, map.described, memory.at(map.described.address));
    }
    config_.hStream = c10::cuda::getCurrentCUDAStream().stream();
    const CUresult status =
        cuda_driver().launch_ex(&config_, kernel_.function, pointers_.data(), nullptr);
    if (status != CUDA_SUCCESS) check_driver(status, "launching " + name_);
  }

 private:
  struct EncodedMap {
    explicit EncodedMap(const TensorMap& map) : described(map) {}

    CUtensorMap encoded{};
    TensorMap described;
  };

  std::string name_;
  LoadedKernel kernel_;
  CUlaunchConfig config_{};
  CUlaunchAttribute cluster_{};   // what config_ points at, if there is a cluster
  std::vector<uint64_t> values_;  // each argument in its first bytes
  std::deque<EncodedMap> maps_;   // they stay where they are
  std::vector<void*> pointers_;   // to the values and maps
  std::vector<std::pair<size_t, Address>> addresses_;
};

class RecipePlan::EngineStep final : public Step {
 public:
  explicit EngineStep(const EngineLaunch& launch) : launch_(launch) {
    engine_ = EngineList(launch.problem, &current_handle).build(launch.engine_text);
    if (engine_->config().is_unfused) {
      throw PlanError(launch.engine_text + " leaves the bias to PyTorch, which a recipe cannot");
    }
  }

  int64_t workspace_bytes() const { return engine_->workspace_bytes(); }

  void run(const Memory& memory) override {
    const ConvPointers pointers{memory.at(launch_.x), memory.at(launch_.w), memory.at(launch_.y),
                                launch_.bias ? memory.at(*launch_.bias) : nullptr,
                                launch_.residual ? memory.at(*launch_.residual) : nullptr};
    engine_->execute(current_handle(), pointers, memory.engine_workspace);
  }

 private:
  EngineLaunch launch_;
  std::shared_ptr<ConvPlan> engine_;
};

class RecipePlan::FunctionStep final : public Step {
 public:
  explicit FunctionStep(FunctionLaunch launch) : launch_(std::move(launch)) {}

  void run(const Memory& memory) override {
    const at::NoGradGuard no_grad;
    // A convolution of the function's own might be this very problem.
    const OwnPathGuard own_path;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto options = memory.operands.x.options().dtype(at::kByte).memory_format(std::nullopt);
    void* own = memory.buffers[static_cast<size_t>(Buffer::workspace)];
    launch_.function(memory.operands, memory.own_bytes == 0
                                          ? at::empty({0}, options)
                                          : at::from_blob(own, {memory.own_bytes}, options));
  }

 private:
  FunctionLaunch launch_;
};

std::shared_ptr<RecipePlan> RecipePlan::build(const ConvProblem& problem, const std::string& text,
                                              const std::vector<Launch>& launches,
                                              int64_t workspace_bytes, c10::DeviceIndex device) {
  std::vector<std::unique_ptr<Step>> steps;
  int64_t engine_bytes = 0;  // the engines run one after the other, and share theirs
  try {
    const OnDevice guard(device);
    for (const Launch& launch : launches) {
      if (const auto* kernel = std::get_if<KernelLaunch>(&launch)) {
        steps.push_back(std::make_unique<KernelStep>(*kernel));
      } else if (const auto* engine = std::get_if<EngineLaunch>(&launch)) {
        auto step = std::make_unique<EngineStep>(*engine);
        engine_bytes = std::max(engine_bytes, step->workspace_bytes());
        steps.push_back(std::move(step));
      } else {
        steps.push_back(std::make_unique<FunctionStep>(std::get<FunctionLaunch>(launch)));
      }
    }
  } catch (const PlanError& error) {
    throw PlanError(text + ": " + error.what());
  }
  return std::shared_ptr<RecipePlan>(
      new RecipePlan(problem, text, workspace_bytes, engine_bytes, std::move(steps)));
}

RecipePlan::RecipePlan(const ConvProblem& problem, const std::string& text, int64_t own_bytes,
                       int64_t engine_bytes, std::vector<std::unique_ptr<Step>> steps)
    : Plan(problem, text, engine_bytes > 0 ? rounded_up(own_bytes) + engine_bytes : own_bytes),
      own_bytes_(own_bytes),
      engines_at_(rounded_up(own_bytes)),
      steps_(std::move(steps)) {}

RecipePlan::~RecipePlan() = default;

at::Tensor RecipePlan::launch(const Operands& operands, void* workspace) {
  const auto [x, w, y, bias, residual, slope] = operands.pointers();
  const Memory memory{operands,
                      {x, w, y, bias, residual, slope, workspace},
                      own_bytes_,
                      static_cast<char*>(workspace) + engines_at_};
  try {
    for (const auto& step : steps_) step->run(memory);
  } catch (const PlanError& error) {
    throw PlanError(text() + ": " + error.what());
  }
  return {};
}

}  // namespace cudnn_autotune
