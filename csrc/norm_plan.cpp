#include "norm_plan.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/SmallVector.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "torch_bridge.h"

namespace cudnn_autotune {
namespace {

constexpr int kFirstForm = 1;      // of FORMS of plan.py, which is expected to be the fastest
constexpr int64_t kAligned = 256;  // where each part of the workspace begins, in bytes

int64_t rounded(int64_t bytes) { return (bytes + kAligned - 1) / kAligned * kAligned; }

auto fields(const NormKey& key) {
  return std::tie(key.device, key.is_backward, key.dtype, key.parameters, key.batch, key.channels,
                  key.spatial, key.planes, key.alignment, key.activation, key.residual,
                  key.by_output, key.second, key.grad_residual, key.grad_input, key.mask,
                  key.groups, key.form);
}

struct KeyHash {
  size_t operator()(const NormKey& key) const {
    return c10::get_hash(key.batch, key.channels, key.spatial, key.is_backward, key.residual,
                         key.by_output, key.second, key.device, key.activation, key.groups);
  }
};

// The plans that are known. Those of a form are kept as long as the process lives; those without
// one are among them. Never destroyed, because calls may come while the process exits.
struct KnownPlans {
  std::mutex mutex;
  std::unordered_map<NormKey, std::shared_ptr<NormPlan>, KeyHash> known;

  static KnownPlans& instance() {
    static auto* plans = new KnownPlans();
    return *plans;
  }
};

NormPlanner& planner() {
  static auto* chooses = new NormPlanner();
  return *chooses;
}

std::atomic<int> form_of_plans{0};
thread_local int form_of_thread = 0;
thread_local bool adopts_form_of_thread = false;

constexpr size_t kChunk = 8192;  // counters that are allocated together

// Counters that are zero, of the current device, as long as the process lives. Also while streams
// are captured, since the memory is none of a graph's.
uint64_t* new_counters(size_t count) {
  struct Chunk {
    uint64_t* next = nullptr;
    size_t left = 0;
  };
  static std::mutex mutex;
  static auto* chunks = new std::unordered_map<c10::DeviceIndex, Chunk>();
  const std::lock_guard lock(mutex);
  Chunk& chunk = (*chunks)[c10::cuda::current_device()];
  if (chunk.left < count) {
    const RelaxedCapture relaxed;
    const size_t size = std::max(count, kChunk);
    void* memory = nullptr;
    cudaStream_t stream = nullptr;
    C10_CUDA_CHECK(cudaMalloc(&memory, size * sizeof(uint64_t)));
    C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    C10_CUDA_CHECK(cudaMemsetAsync(memory, 0, size * sizeof(uint64_t), stream));
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    C10_CUDA_CHECK(cudaStreamDestroy(stream));
    chunk = {static_cast<uint64_t*>(memory), size};
  }
  uint64_t* const found = chunk.next;
  chunk.next += count;
  chunk.left -= count;
  return found;
}

}  // namespace

NormPlan::NormPlan(const std::vector<NormLaunch>& launches, const NormDivision& division,
                   const NormWorkspace& workspace, size_t counters, bool cooperative,
                   size_t pointers, bool takes_eps)
    : division_(division),
      workspace_(workspace),
      counters_(counters),
      cooperative_(cooperative),
      pointers_(pointers),
      takes_eps_(takes_eps) {
  std::vector<size_t> sizes(pointers, sizeof(void*));
  sizes.insert(sizes.end(), 6, sizeof(int32_t));
  if (takes_eps) sizes.push_back(sizeof(float));
  if (cooperative && cuda_driver().launch_cooperative == nullptr) {
    throw PlanError("the driver has no cooperative launches");
  }
  for (const NormLaunch& one : launches) {
    launches_.push_back({load_kernel(one.cubin, one.function, one.shared_bytes, sizes),
                         one.function, one.blocks, one.threads, one.shared_bytes});
  }
}

uint64_t* NormPlan::counters(cudaStream_t stream) const {
  if (is_capturing()) return new_counters(counters_);
  const std::lock_guard lock(mutex_);
  uint64_t*& found = counters_of_[stream];
  if (found == nullptr) found = new_counters(counters_);
  return found;
}

void NormPlan::launch(c10::ArrayRef<void*> tensors, const std::array<int32_t, 3>& sizes,
                      float eps) const {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  const int64_t totals_at = rounded(workspace_.sums);
  const c10::DataPtr workspace = c10::cuda::CUDACachingAllocator::get()->allocate(
      static_cast<size_t>(totals_at + workspace_.totals));
  auto* const begin = static_cast<char*>(workspace.get());
  c10::SmallVector<void*, 16> pointers(tensors.begin(), tensors.end());
  pointers.push_back(begin);
  // A forward has no totals.
  if (pointers.size() + 2 == pointers_) pointers.push_back(begin + totals_at);
  pointers.push_back(counters_ == 0 ? nullptr : counters(stream));
  if (pointers.size() != pointers_) throw PlanError("a norm's kernel takes other tensors");
  std::array<int32_t, 6> numbers{sizes[0],        sizes[1],        sizes[2],
                                 division_.slabs, division_.parts, division_.tile};
  c10::SmallVector<void*, 24> arguments;
  for (void*& pointer : pointers) arguments.push_back(&pointer);
  for (int32_t& number : numbers) arguments.push_back(&number);
  if (takes_eps_) arguments.push_back(&eps);
  const CudaDriver& driver = cuda_driver();
  for (const Loaded& one : launches_) {
    const CUfunction function = one.kernel.function;
    const CUresult status =
        cooperative_ ? driver.launch_cooperative(function, one.blocks, 1, 1, one.threads, 1, 1,
                                                 one.shared_bytes, stream, arguments.data())
                     : driver.launch(function, one.blocks, 1, 1, one.threads, 1, 1,
                                     one.shared_bytes, stream, arguments.data(), nullptr);
    if (status != CUDA_SUCCESS) check_driver(status, "launching " + one.name);
  }
}

bool NormKey::operator==(const NormKey& other) const { return fields(*this) == fields(other); }

void set_norm_planner(NormPlanner chooses) { planner() = std::move(chooses); }

std::shared_ptr<NormPlan> norm_plan(const NormKey& key) {
  KnownPlans& plans = KnownPlans::instance();
  NormKey any_form = key;
  any_form.form = 0;
  const bool adopts = key.form != 0 && adopts_form_of_thread;
  {
    const std::lock_guard lock(plans.mutex);
    const auto found = plans.known.find(key);
    if (found != plans.known.end()) {
      if (adopts) plans.known.insert_or_assign(any_form, found->second);
      return found->second;
    }
  }
  if (!planner()) return nullptr;
  std::shared_ptr<NormPlan> plan;
  if (key.form == 0) {
    NormKey first = key;
    first.form = kFirstForm;
    plan = norm_plan(first);
  } else {
    // Without the lock: Python takes the GIL, which another thread may hold that waits for the
    // lock.
    const OnDevice guard(key.device);
    plan = planner()(key);
  }
  const std::lock_guard lock(plans.mutex);
  plan = plans.known.try_emplace(key, std::move(plan)).first->second;
  if (adopts) plans.known.insert_or_assign(any_form, plan);
  return plan;
}

int norm_form() {
  return form_of_thread != 0 ? form_of_thread : form_of_plans.load(std::memory_order_relaxed);
}
void set_norm_form(int form) { form_of_plans.store(form, std::memory_order_relaxed); }
void set_norm_form_of_thread(int form, bool adopts) {
  form_of_thread = form;
  adopts_form_of_thread = adopts;
}

}  // namespace cudnn_autotune
