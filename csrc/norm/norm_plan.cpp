#include "norm/norm_plan.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "call/torch_bridge.h"
#include "core/cuda/graph_lifetime.h"
#include "core/problem/check.h"

namespace cudnn_autotune {
namespace {

constexpr int kFirstForm = 1;      // of FORMS of plan.py, which is expected to be the fastest
constexpr int64_t kAligned = 256;  // where each part of the workspace begins, in bytes

int64_t rounded(int64_t bytes) { return (bytes + kAligned - 1) / kAligned * kAligned; }

struct KeyHash {
  size_t operator()(const NormKey& key) const {
    uint64_t hash = 0;
    for (const uint64_t word : key.words()) {
      hash = (hash ^ word) * 0x9e3779b97f4a7c15U;
      hash ^= hash >> 32U;
    }
    return static_cast<size_t>(hash);
  }
};

// The plans that are known; those without a form are among those of one. Never destroyed, because
// calls may come while the process exits.
struct KnownPlans {
  std::mutex mutex;
  std::unordered_map<NormKey, std::shared_ptr<NormPlan>, KeyHash> known;

  // Drops the plans of forms, which are asked for while they are measured, and all if those are
  // few.
  void make_room() {
    if (known.size() < kMostNormPlans) return;
    for (auto one = known.begin(); one != known.end();) {
      one = one->first.form != 0 ? known.erase(one) : std::next(one);
    }
    if (known.size() > kMostNormPlans / 2) known.clear();
  }

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

// Slabs, parts and number of counters: launches that have these in common can use the same counters
// one after the other. Each finds them as the one before left them.
using CountersKey = std::tuple<int32_t, int32_t, size_t>;
CountersKey key_of(const NormDivision& division, size_t count) {
  return {division.slabs, division.parts, count};
}

// What the launches of a stream use, one after the other. It is never freed.
struct StreamMemory {
  static constexpr int64_t kBytes = 1 << 20;

  // Held while the launches of a norm are enqueued: all of them use the workspace.
  std::mutex mutex;
  std::map<CountersKey, uint64_t*> counters;
  void* workspace = nullptr;  // kBytes; null before the first launch, or if memory is short

  static StreamMemory& of(cudaStream_t stream) {
    using Key = std::pair<c10::DeviceIndex, cudaStream_t>;
    static std::mutex mutex_of_all;
    static auto* const all = new std::map<Key, StreamMemory>();
    const std::lock_guard lock(mutex_of_all);
    return (*all)[{c10::cuda::current_device(), stream}];
  }
  // The workspace, unless it is too small.
  void* workspace_of(int64_t bytes) {
    if (bytes > kBytes) return nullptr;
    if (workspace == nullptr) {
      const RelaxedCapture relaxed;
      if (!went_well(cudaMalloc(&workspace, kBytes))) workspace = nullptr;
    }
    return workspace;
  }
  uint64_t* counters_of(const NormDivision& division, size_t count) {
    uint64_t*& found = counters[key_of(division, count)];
    if (found == nullptr) found = new_counters(count);
    return found;
  }
};

c10::DataPtr allocated(int64_t bytes) {
  return c10::cuda::CUDACachingAllocator::get()->allocate(static_cast<size_t>(bytes));
}

// Counters for one captured launch, which has them alone: a graph may be replayed beside anything.
// Those of a destroyed graph serve again, as its last replay left them.
uint64_t* counters_of_capture(cudaStream_t stream, const NormDivision& division, size_t count) {
  struct Returned {
    std::mutex mutex;
    std::map<std::pair<c10::DeviceIndex, CountersKey>, std::vector<uint64_t*>> all;
  };
  static auto* const returned = new Returned();
  const std::pair key(c10::cuda::current_device(), key_of(division, count));
  uint64_t* counters = nullptr;
  {
    const std::lock_guard lock(returned->mutex);
    auto& free = returned->all[key];
    if (!free.empty()) {
      counters = free.back();
      free.pop_back();
    }
  }
  if (counters == nullptr) counters = new_counters(count);
  keep_for_graph(stream, std::shared_ptr<uint64_t>(counters, [key](uint64_t* unused) {
                   const std::lock_guard lock(returned->mutex);
                   returned->all[key].push_back(unused);
                 }));
  return counters;
}

}  // namespace

NormPlan::NormPlan(const std::vector<NormLaunch>& launches, const NormDivision& division,
                   const NormWorkspace& workspace, size_t counters, size_t pointers, size_t floats)
    : division_(division),
      workspace_(workspace),
      counters_(counters),
      pointers_(pointers),
      floats_(floats) {
  std::vector<size_t> sizes(pointers, sizeof(void*));
  sizes.insert(sizes.end(), 6, sizeof(int32_t));
  sizes.insert(sizes.end(), floats, sizeof(float));
  for (const NormLaunch& one : launches) {
    launches_.push_back({load_kernel(one.cubin, one.function, one.shared_bytes, sizes),
                         one.function, one.blocks, one.threads, one.shared_bytes});
  }
}

int64_t NormPlan::workspace_bytes() const { return rounded(workspace_.sums) + workspace_.totals; }

void NormPlan::launch(c10::ArrayRef<void*> tensors, const std::array<int32_t, 3>& sizes,
                      c10::ArrayRef<float> floats) const {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  release_of_destroyed_graphs();
  if (is_capturing()) {
    keep_for_graph(stream, shared_from_this());
    const c10::DataPtr workspace = allocated(workspace_bytes());
    uint64_t* const counters =
        counters_ == 0 ? nullptr : counters_of_capture(stream, division_, counters_);
    return enqueue(tensors, sizes, floats, workspace.get(), counters, stream);
  }
  StreamMemory& memory = StreamMemory::of(stream);
  const std::lock_guard lock(memory.mutex);
  void* workspace = memory.workspace_of(workspace_bytes());
  c10::DataPtr own;
  if (workspace == nullptr) {
    own = allocated(workspace_bytes());
    workspace = own.get();
  }
  uint64_t* const counters = counters_ == 0 ? nullptr : memory.counters_of(division_, counters_);
  enqueue(tensors, sizes, floats, workspace, counters, stream);
}

void NormPlan::enqueue(c10::ArrayRef<void*> tensors, const std::array<int32_t, 3>& sizes,
                       c10::ArrayRef<float> floats, void* workspace, uint64_t* counters,
                       cudaStream_t stream) const {
  auto* const begin = static_cast<char*>(workspace);
  c10::SmallVector<void*, 16> pointers(tensors.begin(), tensors.end());
  pointers.push_back(begin);
  // A forward has no totals.
  if (pointers.size() + 2 == pointers_) pointers.push_back(begin + rounded(workspace_.sums));
  pointers.push_back(counters);
  if (pointers.size() != pointers_ || floats.size() != floats_) {
    throw PlanError("a norm's kernel takes other arguments");
  }
  std::array<int32_t, 6> numbers{sizes[0],        sizes[1],        sizes[2],
                                 division_.slabs, division_.parts, division_.tile};
  c10::SmallVector<void*, 24> arguments;
  for (void*& pointer : pointers) arguments.push_back(&pointer);
  for (int32_t& number : numbers) arguments.push_back(&number);
  for (const float& number : floats) arguments.push_back(const_cast<float*>(&number));
  const CudaDriver& driver = cuda_driver();
  for (const Loaded& one : launches_) {
    const CUresult status = driver.launch(one.kernel.function, one.blocks, 1, 1, one.threads, 1, 1,
                                          one.shared_bytes, stream, arguments.data(), nullptr);
    if (status != CUDA_SUCCESS) check_driver(status, "launching " + one.name);
  }
}

std::array<uint64_t, 5> NormKey::words() const {
  uint64_t packed = 0;
  const auto pack = [&](uint64_t value, int bits) { packed = packed << bits | value; };
  pack(static_cast<uint8_t>(device), 8);
  pack(static_cast<uint8_t>(dtype), 8);
  pack(static_cast<uint8_t>(parameters), 8);
  pack(static_cast<uint8_t>(alignment), 8);
  pack(activation, 4);
  pack(static_cast<uint64_t>(form), 4);
  for (const bool flag :
       {is_backward, planes, residual, by_output, second, grad_residual, grad_input, mask}) {
    pack(static_cast<uint64_t>(flag), 1);
  }
  return {static_cast<uint64_t>(batch), static_cast<uint64_t>(channels),
          static_cast<uint64_t>(spatial), static_cast<uint64_t>(groups), packed};
}

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
      const auto plan = found->second;
      if (adopts) plans.known.insert_or_assign(any_form, plan);
      return plan;
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
  plans.make_room();
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
