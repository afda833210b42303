"""What captured graphs use lives as long as they do.

CUDA here is a few functions that own user objects; tests/gpu/test_plan_cache.py has the real one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import csrc_programs

PROGRAM = r"""
#include <cuda_runtime_api.h>

#include <atomic>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "core/cuda/graph_lifetime.h"

using namespace cudnn_autotune;

// A stream is the address of what it captures.
struct Captured {
  unsigned long long id = 0;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
  std::vector<cudaUserObject_t> owned;
};
struct Object {
  void* context;
  cudaHostFn_t destroy;
};
std::atomic<int> objects{0};
bool creates = true, retains = true;

cudaStream_t stream_of(Captured& captured) { return reinterpret_cast<cudaStream_t>(&captured); }
void destroy(Captured& captured) {
  for (cudaUserObject_t one : captured.owned) cudaUserObjectRelease(one, 1);
  captured.owned.clear();
}

extern "C" {
cudaError_t cudaFree(void*) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t answer(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                   cudaGraph_t* graph) {
  const auto* captured = reinterpret_cast<Captured*>(stream);
  *status = captured->status;
  *id = captured->id;
  *graph = reinterpret_cast<cudaGraph_t>(stream);
  return cudaSuccess;
}
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  return answer(stream, status, id, graph);
}
#else
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t**, size_t*) {
  return answer(stream, status, id, graph);
}
#endif
cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* context, cudaHostFn_t destroy,
                                 unsigned, unsigned) {
  if (!creates) return cudaErrorNotSupported;
  ++objects;
  *object = reinterpret_cast<cudaUserObject_t>(new Object{context, destroy});
  return cudaSuccess;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned) {
  const std::unique_ptr<Object> last(reinterpret_cast<Object*>(object));
  --objects;
  last->destroy(last->context);
  return cudaSuccess;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned,
                                      unsigned) {
  if (!retains) return cudaErrorNotSupported;
  reinterpret_cast<Captured*>(graph)->owned.push_back(object);
  return cudaSuccess;
}
}

int main() {
  // One user object for each capture, whatever it uses and how often.
  const auto plan = std::make_shared<int>(1), other = std::make_shared<int>(2);
  std::weak_ptr<int> only_captured;
  Captured first{1}, second{2};
  {
    const auto dropped = std::make_shared<int>(3);
    only_captured = dropped;
    for (int i = 0; i < 10; ++i) {
      for (const auto& used : {plan, other, dropped}) keep_for_graph(stream_of(first), used);
      keep_for_graph(stream_of(second), plan);
    }
  }
  REQUIRE(capture_of(stream_of(first)) == 1ULL);
  REQUIRE(objects == 2 && kept_for_graphs() == 4 && plan.use_count() == 3);

  // A destroyed graph lets go at the next call, and of its own only.
  destroy(first);
  REQUIRE(objects == 1 && !only_captured.expired());
  release_of_destroyed_graphs();
  REQUIRE(only_captured.expired() && kept_for_graphs() == 1);
  REQUIRE(plan.use_count() == 2 && other.use_count() == 1);
  destroy(second);
  release_of_destroyed_graphs();
  REQUIRE(objects == 0 && kept_for_graphs() == 0 && plan.use_count() == 1);

  // A broken capture keeps nothing.
  Captured broken{3, cudaStreamCaptureStatusInvalidated};
  keep_for_graph(stream_of(broken), plan);
  REQUIRE(!capture_of(stream_of(broken)) && objects == 0 && plan.use_count() == 1);

  // What is destroyed may keep and release on its own.
  Captured outer{4}, inner{5};
  keep_for_graph(stream_of(outer), std::shared_ptr<int>(new int, [&](int* last) {
    delete last;
    keep_for_graph(stream_of(inner), plan);
    release_of_destroyed_graphs();
  }));
  destroy(outer);
  release_of_destroyed_graphs();
  REQUIRE(kept_for_graphs() == 1);
  destroy(inner);
  release_of_destroyed_graphs();
  REQUIRE(kept_for_graphs() == 0);

  // Threads that capture, destroy and release.
  std::vector<std::thread> threads;
  for (unsigned long long thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (unsigned long long i = 0; i < 2000; ++i) {
        Captured one{100 + 10000 * thread + i};
        const auto own = std::make_shared<int>(0);
        keep_for_graph(stream_of(one), plan);
        keep_for_graph(stream_of(one), own);
        REQUIRE(own.use_count() == 2);
        release_of_destroyed_graphs();
        REQUIRE(own.use_count() == 2);
        destroy(one);
        release_of_destroyed_graphs();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  release_of_destroyed_graphs();
  REQUIRE(objects == 0 && kept_for_graphs() == 0 && plan.use_count() == 1);

  // Where CUDA refuses, nothing is let go of.
  Captured refused{6};
  for (bool* part : {&creates, &retains}) {
    *part = false;
    keep_for_graph(stream_of(refused), plan);
    keep_for_graph(stream_of(refused), plan);
    *part = true;
  }
  release_of_destroyed_graphs();
  REQUIRE(objects == 0 && kept_for_graphs() == 1 && plan.use_count() == 2);
  keep_for_graph(stream_of(refused), other);
  destroy(refused);
  release_of_destroyed_graphs();
  REQUIRE(kept_for_graphs() == 1 && plan.use_count() == 2 && other.use_count() == 1);
}
"""


@pytest.mark.slow
@pytest.mark.search
@csrc_programs.needs_compiler
def test_what_graphs_use_lives_as_long_as_they_do(tmp_path: Path) -> None:
    csrc_programs.run(tmp_path, PROGRAM, ("cuda/cuda_driver.cpp", "cuda/graph_lifetime.cpp"))
