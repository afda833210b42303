#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/cuda_driver.h"

namespace cudnn_autotune {

// How a batch norm is computed, by kernels that cudnn_autotune/engines/norms/plan.py chooses.

struct NormLaunch {
  std::string cubin;
  std::string function;
  uint32_t blocks;
  uint32_t threads;
  int shared_bytes;  // dynamic
};

// How a tensor is divided among blocks (cudnn_autotune/engines/norms/tile.cuh).
struct NormDivision {
  int32_t slabs, parts, tile;
};

// The workspace's parts, in bytes, in their order.
struct NormWorkspace {
  int64_t sums, totals;
};

// Launches that are loaded for a device. To launch them takes no Python. Safe to call from several
// threads.
class NormPlan {
 public:
  // Loads the kernels for the current device. `pointers` is how many tensors a kernel takes, with
  // the parts of the workspace and the counters; `takes_eps` tells whether it takes epsilon.
  // `cooperative` tells whether all blocks of a launch must be on the GPU together. Throws
  // PlanError.
  NormPlan(const std::vector<NormLaunch>& launches, const NormDivision& division,
           const NormWorkspace& workspace, size_t counters, bool cooperative, size_t pointers,
           bool takes_eps);

  // Enqueues the launches on the current stream. `tensors` are the kernels' arguments before the
  // workspace; `sizes` are the images, the channels and the product of the spatial sizes. Throws
  // PlanError, and c10::OutOfMemoryError.
  void launch(c10::ArrayRef<void*> tensors, const std::array<int32_t, 3>& sizes, float eps) const;

 private:
  // The counters by which blocks of one launch meet. Each launch finds them as the one before left
  // them, so launches that may overlap have their own: those of a stream, and each captured one.
  // They are never freed.
  uint64_t* counters(cudaStream_t stream) const;

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
  size_t counters_;
  bool cooperative_;
  size_t pointers_;
  bool takes_eps_;
  mutable std::mutex mutex_;
  mutable std::unordered_map<cudaStream_t, uint64_t*> counters_of_;
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
  std::string activation;
  bool residual = false;
  bool by_output = false;
  bool second = false;
  bool grad_residual = false;
  bool grad_input = true;
  bool mask = false;
  int64_t groups = 0;
  int form = 0;  // of norm_form()

  bool operator==(const NormKey& other) const;
};

// Chooses a plan; null if no kernel computes the problem. Throws what Python raises, as PlanError.
using NormPlanner = std::function<std::shared_ptr<NormPlan>(const NormKey& key)>;
void set_norm_planner(NormPlanner planner);

// The plan for a key, which is chosen once and kept as long as the process lives, because a CUDA
// graph may have captured it. Null if PyTorch computes the problem. The key's device is current.
std::shared_ptr<NormPlan> norm_plan(const NormKey& key);

// The form of the plans of a call, by its place in FORMS of plan.py, from 1 on: the one that is set
// for its thread, else the one that is set for all threads. 0 stands for the form that was adopted
// for the key, else for the first one.
int norm_form();
void set_norm_form(int form);
// With `adopts` the plans of this thread's calls become those of all later calls without a form.
void set_norm_form_of_thread(int form, bool adopts);

}  // namespace cudnn_autotune
