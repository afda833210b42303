#include "core/cudnn/frontend_find.h"

#include <cudnn_frontend.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <unordered_map>

#include "core/cudnn/detail/conv_graph.h"

namespace cudnn_frontend::detail {
namespace {

// The number of launches of each plan, in the search that runs on this thread. The frontend does
// not report how many samples TILL_STABLE took.
thread_local std::unordered_map<cudnnBackendDescriptor_t, int64_t> launches;
// What follows each launch in that search; may be empty.
thread_local std::function<void()> after_launch;

cudnnStatus_t counted_execute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                              cudnnBackendDescriptor_t variant_pack) {
  ++launches[plan];
  const cudnnStatus_t status = execute(handle, plan, variant_pack);
  if (after_launch) after_launch();
  return status;
}

}  // namespace
}  // namespace cudnn_frontend::detail

// Within this header, launches go through the counter above.
#define execute counted_execute
#include <cudnn_frontend_find_plan.h>
#undef execute

namespace cudnn_autotune {
namespace {

namespace fe = cudnn_frontend;

fe::executionPlans_t time_sorted(FindTechnique technique, cudnnHandle_t handle,
                                 fe::executionPlans_t plans, const fe::VariantPack& pack,
                                 uint64_t limit) {
  using Technique = fe::CudnnFindSamplingTechnique;
  switch (technique) {
    case FindTechnique::sample_once:
      return fe::time_sorted_plan<Technique::CUDNN_FIND_SAMPLE_ONCE>(handle, std::move(plans), pack,
                                                                     limit);
    case FindTechnique::median_of_three:
      return fe::time_sorted_plan<Technique::CUDNN_FIND_SAMPLE_MEDIAN_OF_THREE>(
          handle, std::move(plans), pack, limit);
    case FindTechnique::till_stable:
      break;
  }
  return fe::time_sorted_plan<Technique::CUDNN_FIND_SAMPLE_TILL_STABLE>(handle, std::move(plans),
                                                                        pack, limit);
}

// Appends what is found among the unfused plans, or among the others.
void find_among(bool is_unfused, FindTechnique technique, cudnnHandle_t handle,
                const std::vector<std::shared_ptr<ConvPlan>>& plans, const ConvPointers& pointers,
                void* workspace, int64_t benchmark_limit, FindResult& result) {
  fe::executionPlans_t candidates;
  std::unordered_map<cudnnBackendDescriptor_t, size_t> index_of;
  for (size_t i = 0; i < plans.size(); ++i) {
    if (plans[i]->config().is_unfused != is_unfused) continue;
    candidates.push_back(plans[i]->impl().plan);
    index_of[candidates.back().get_raw_desc()] = i;
  }
  if (candidates.empty()) return;
  Bindings bindings(plans[0]->problem(), pointers, is_unfused);
  const auto pack = fe::VariantPackBuilder()
                        .setDataPointers(bindings.count, bindings.addresses.data())
                        .setUids(bindings.count, bindings.uids.data())
                        .setWorkspacePointer(workspace)
                        .build();
  auto& launches = fe::detail::launches;
  launches.clear();
  const uint64_t limit = benchmark_limit > 0 ? static_cast<uint64_t>(benchmark_limit)
                                             : std::numeric_limits<uint64_t>::max();
  const auto sorted = time_sorted(technique, handle, std::move(candidates), pack, limit);
  for (const auto& plan : sorted) {
    // The first launch of each plan is a warm-up and not a sample.
    result.plans.push_back({index_of.at(plan.get_raw_desc()), plan.getExecutionTime(),
                            launches.at(plan.get_raw_desc()) - 1});
  }
  for (const auto& [plan, count] : launches) result.total_samples += count - 1;
}

}  // namespace

FindResult frontend_find(FindTechnique technique, cudnnHandle_t handle,
                         const std::vector<std::shared_ptr<ConvPlan>>& plans,
                         const ConvPointers& pointers, void* workspace, int64_t benchmark_limit,
                         const std::function<void()>& add_bias) {
  FindResult result;
  for (const bool is_unfused : {true, false}) {
    fe::detail::after_launch = is_unfused ? add_bias : nullptr;
    find_among(is_unfused, technique, handle, plans, pointers, workspace, benchmark_limit, result);
  }
  std::stable_sort(result.plans.begin(), result.plans.end(),
                   [](const auto& a, const auto& b) { return a.time_ms < b.time_ms; });
  return result;
}

}  // namespace cudnn_autotune
