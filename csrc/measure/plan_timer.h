#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "core/cuda/page_distance.h"
#include "core/cuda/timing_kernels.h"
#include "plan/operands.h"
#include "plan/plan.h"

namespace at::cuda {
struct CUDAGraph;
}

namespace cudnn_autotune {

// What is locked while something is measured on a device: the searches of several threads take
// turns, so that they neither disturb each other's times nor meet on the stream and the flag that
// all timers of the device share. Locks are taken in this order: the tuning mutex
// (core/choices/choice_table.h), this one, the GIL. So a thread that waits for this one must not
// hold the GIL, and what is measured must not tune. It is recursive because what is measured may be
// a function in Python that measures.
std::recursive_mutex& measuring_mutex(c10::DeviceIndex device);

// Measures the candidates of one problem. It runs batches of calls between two CUDA events, without
// a gap, on a stream that nothing else uses, and returns the raw times. The caller decides what to
// run and what to believe. A timer may be used by one thread at a time, several timers by several
// threads.
class PlanTimer {
 public:
  struct Batch {
    size_t candidate;
    int64_t calls;
    bool cold;      // flush the L2 cache first, and use another set of operands in each call
    bool as_graph;  // replay the calls from a CUDA graph, for kernels shorter than their launch
  };
  struct Sample {
    double time_ms = 0;     // of one call
    double clock_mhz = 0;   // mean clock of the multiprocessors; 0: unknown
    double loading_ms = 0;  // of a candidate's first run: the time before the GPU could begin
    std::string error;      // why the candidate did not run; empty if it ran
  };

  // `operands`: one or more sets; the caller's own tensors first, then copies of them.
  // `flush_bytes`: how much memory to write before a cold batch; 0 if the operands fill the cache.
  // `workspace_pages`: whether a workspace of at most one page is placed as in a call
  // (workspace_pages.h), if this GPU has such pages; else it is in the memory of set_workspace().
  PlanTimer(std::vector<Operands> operands, int64_t flush_bytes, bool workspace_pages);
  ~PlanTimer();
  PlanTimer(const PlanTimer&) = delete;
  PlanTimer& operator=(const PlanTimer&) = delete;

  // The address of a workspace can decide how fast a kernel is (see PageDistance), and which page a
  // call gets is chance. So successive calls use kPlaces places in turn, and a time is their mean.
  static constexpr int64_t kPlaceBytes = PageDistance::kPageBytes;
  static constexpr int64_t kPlaces = 16;

  // Adds a candidate, and returns its number for Batch.
  size_t add(std::shared_ptr<Plan> plan);
  // Sets the memory for the workspaces of all plans: bytes, at least the largest workspace_bytes()
  // of the plans that run. A plan uses as many places in turn as fit beside its need, kPlaces at
  // most. Throws c10::ValueError for another kind of tensor.
  void set_workspace(at::Tensor workspace);

  // Runs the batches in their order, and waits for the last one. The GPU starts when the host has
  // enqueued `lead` of them, so that it never waits for the host. `lead` must be 0 for candidates
  // that have never run, because loading a kernel may wait for the GPU. The first run of a
  // candidate should be one call, so that the loading of its kernel can be measured apart. Throws
  // c10::Error where CUDA itself fails, and c10::ValueError for a batch that cannot be: of a plan
  // whose workspace does not fit, for example. Holds measuring_mutex() until all has run.
  std::vector<Sample> run(const std::vector<Batch>& batches, size_t lead);

 private:
  struct Candidate {
    std::shared_ptr<Plan> plan;
    int64_t next_place = 0;
    bool has_run = false;
  };
  using GraphKey = std::tuple<size_t, int64_t, bool>;

  bool uses_page(const Plan& plan) const;  // as its workspace
  void* workspace_for(Candidate& candidate) const;
  void enqueue(const Batch& batch);
  void capture(const Batch& batch);
  void reserve(size_t batches);

  std::vector<Operands> operands_;
  int64_t flush_bytes_;
  at::Tensor flush_;
  at::Tensor workspace_;
  std::vector<c10::DataPtr> pages_;
  at::Tensor readings_;  // of TimingKernels, two for each batch
  std::vector<Candidate> candidates_;
  std::map<GraphKey, std::unique_ptr<at::cuda::CUDAGraph>> graphs_;
  std::vector<cudaEvent_t> events_;
  size_t next_operands_ = 0;
  c10::cuda::CUDAStream stream_;
  TimingKernels* kernels_;
};

}  // namespace cudnn_autotune
