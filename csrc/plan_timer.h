#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "core/conv_plan.h"
#include "core/conv_problem.h"
#include "core/gpu_clock.h"
#include "core/page_distance.h"

namespace at::cuda {
struct CUDAGraph;
}

namespace cudnn_autotune {

// Raw samples of one problem's candidates: batches of calls between two events, enqueued without
// a gap on a stream of the timer's own. What to run and what to believe is the caller's business.
class PlanTimer {
 public:
  using Operands = std::array<at::Tensor, 3>;  // x, w, y

  struct Batch {
    size_t candidate;
    int64_t calls;
    bool cold;      // rotate over the sets of operands, after a flush of the L2 cache
    bool as_graph;  // replay the calls from a CUDA graph: for kernels that outrun the host
  };
  struct Sample {
    double time_ms = 0;     // a call
    double clock_mhz = 0;   // mean SM clock; 0: not known
    double loading_ms = 0;  // of a first run by itself: what passed before the GPU could begin
    std::string error;      // why the candidate did not run; empty: it did
  };

  // `operands` holds the caller's own tensors first, then copies. `flush_bytes`: how much to write
  // before a cold batch; 0 where the operands alone fill the cache. `workspace_pages`: whether a
  // small workspace lies where it does at a call (workspace_pages.h), where there are such pages,
  // or always in that of set_workspace().
  PlanTimer(const ConvProblem& problem, std::vector<Operands> operands, int64_t flush_bytes,
            bool workspace_pages);
  ~PlanTimer();
  PlanTimer(const PlanTimer&) = delete;
  PlanTimer& operator=(const PlanTimer&) = delete;

  // Where a workspace lies can decide how fast a kernel is (see PageDistance), and which page it
  // gets at a call is chance. So calls go round as many pages, and a time is the mean over them.
  static constexpr int64_t kPlaceBytes = PageDistance::kPageBytes;
  static constexpr int64_t kPlaces = 16;

  // A candidate's number for Batch. `plan` is null for the texts of non_cudnn_paths.h.
  size_t add(const std::string& text, std::shared_ptr<ConvPlan> plan);
  // For all plans; at least the largest workspace_bytes() among those that run. A plan goes round
  // the places that are left beside its need, kPlaces of them at most.
  void set_workspace(at::Tensor workspace);

  // Runs the batches in their order and waits for the last. The GPU starts when the host has
  // enqueued `lead` of them, so that it never waits for the host; 0 for candidates that have never
  // run, whose loading may wait for the GPU. A candidate's first run should be of one call: then
  // its kernel's loading is told apart. Throws c10::Error where CUDA itself fails.
  std::vector<Sample> run(const std::vector<Batch>& batches, size_t lead);

 private:
  struct Candidate {
    std::string text;
    std::shared_ptr<ConvPlan> plan;
    int64_t next_place = 0;
    bool has_run = false;
  };
  using GraphKey = std::tuple<size_t, int64_t, bool>;

  void launch(Candidate& candidate, const Operands& operands);
  void* workspace_for(Candidate& candidate) const;
  void enqueue(const Batch& batch);
  void capture(const Batch& batch);
  void reserve(size_t batches);

  ConvProblem problem_;
  std::vector<Operands> operands_;
  int64_t flush_bytes_;
  at::Tensor flush_;
  at::Tensor workspace_;
  std::vector<c10::DataPtr> pages_;
  at::Tensor readings_;  // GpuClock::Reading, two stamps a batch
  std::vector<Candidate> candidates_;
  std::map<GraphKey, std::unique_ptr<at::cuda::CUDAGraph>> graphs_;
  std::vector<cudaEvent_t> events_;
  size_t next_operands_ = 0;
  c10::cuda::CUDAStream stream_;
  GpuClock* clock_;
};

}  // namespace cudnn_autotune
