#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/cuda/cuda_driver.h"

namespace cudnn_autotune {

// How a batch norm is computed, by kernels that cudnn_autotune/norms/plan.py chooses.

struct NormLaunch {
  std::string cubin;
  std::string function;
  uint32_t blocks;
  uint32_t threads;
  int shared_bytes;  // dynamic
};

// How a tensor is divided among blocks (cudnn_autotune/norms/tile.cuh).
struct NormDivision {
  int32_t slabs, parts, tile;
};

// The workspace's parts, in bytes, in their order.
struct NormWorkspace {
  int64_t sums, totals;
};

// Launches that are loaded for a device. To launch them takes no Python. Safe to call from several
// threads.
class NormPlan : public std::enable_shared_from_this<NormPlan> {
 public:
  // Loads the kernels for the current device. `pointers` is how many tensors a kernel takes, with
  // the parts of the workspace and the counters, and `floats` how many numbers it takes last.
  // Throws PlanError.
  NormPlan(const std::vector<NormLaunch>& launches, const NormDivision& division,
           const NormWorkspace& workspace, size_t counters, size_t pointers, size_t floats);

  // Enqueues the launches on the current stream. `tensors` are the kernels' arguments before the
  // workspace; `sizes` are the images, the channels and the product of the spatial sizes. A plan
  // that is captured is kept as long as the graph. Throws PlanError, and
  // c10::OutOfMemoryError.
  void launch(c10::ArrayRef<void*> tensors, const std::array<int32_t, 3>& sizes,
              c10::ArrayRef<float> floats) const;

 private:
  int64_t workspace_bytes() const;
  void enqueue(c10::ArrayRef<void*> tensors, const std::array<int32_t, 3>& sizes,
               c10::ArrayRef<float> floats, void* workspace, uint64_t* counters,
               cudaStream_t stream) const;

  struct Loaded {
    LoadedKernel kernel;
    std::string name;
    uint32_t blocks;
    uint32_t threads;
    int shared_bytes;
  };

  std::vector<Loaded> launches_;
  NormDivision division_;
  NormWorkspace workspace_;
  size_t counters_, pointers_, floats_;
};

// What a plan depends on. The names are those of NormProblem in plan.py.
struct NormKey {
  c10::DeviceIndex device;
  bool is_backward;
  at::ScalarType dtype;
  at::ScalarType parameters;
  int64_t batch, channels, spatial;
  bool planes;
  int alignment;
  size_t activation;  // its place in kNormActivations
  bool residual = false;
  bool by_output = false;
  bool second = false;
  bool grad_residual = false;
  bool grad_input = true;
  bool mask = false;
  int64_t groups = 0;
  int form = 0;  // of norm_form()

  // All of it.
  std::array<uint64_t, 5> words() const;
  bool operator==(const NormKey& other) const { return words() == other.words(); }
};

// Chooses a plan; null if no kernel computes the problem. Throws what Python raises, as PlanError.
using NormPlanner = std::function<std::shared_ptr<NormPlan>(const NormKey& key)>;
void set_norm_planner(NormPlanner planner);

// The plan for a key, which is chosen once. A process whose sizes keep changing starts anew with
// kMostNormPlans. Null if PyTorch computes the problem. The key's device is current.
constexpr size_t kMostNormPlans = 1U << 12U;
std::shared_ptr<NormPlan> norm_plan(const NormKey& key);

// The form of the plans of a call, by its place in FORMS of plan.py, from 1 on: the one that is set
// for its thread, else the one that is set for all threads. 0 stands for the form that was adopted
// for the key, else for the first one.
int norm_form();
void set_norm_form(int form);
// With `adopts` the plans of this thread's calls become those of all later calls without a form.
void set_norm_form_of_thread(int form, bool adopts);

}  // namespace cudnn_autotune
