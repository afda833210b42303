"""Which cubins stay loaded: those that plans use, and a bounded number of others.

The driver here only counts; tests/gpu/test_timers_beside.py has a real one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import csrc_programs

DRIVER = r"""
#include <cuda.h>
#include <cstdint>

extern "C" {
int loads = 0, unloads = 0;
CUresult cuLibraryLoadData(CUlibrary* library, const void*, CUjit_option*, void**, unsigned,
                           CUlibraryOption*, void**, unsigned) {
  *library = reinterpret_cast<CUlibrary>(static_cast<intptr_t>(++loads));
  return CUDA_SUCCESS;
}
CUresult cuLibraryUnload(CUlibrary) { return ++unloads, CUDA_SUCCESS; }
CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char*) {
  *kernel = reinterpret_cast<CUkernel>(library);
  return CUDA_SUCCESS;
}
CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  *function = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute, CUfunction) {
  return *value = 1 << 20, CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
}
"""

PROGRAM = r"""
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "core/cuda/cuda_driver.h"

using namespace cudnn_autotune;

extern "C" cudaError_t cudaFree(void*) { return cudaSuccess; }

LoadedKernel load(int number) { return load_kernel("cubin " + std::to_string(number), "k", 0, {}); }

int main() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  REQUIRE(driver != nullptr);
  const int& loads = *static_cast<int*>(dlsym(driver, "loads"));
  const int& unloads = *static_cast<int*>(dlsym(driver, "unloads"));
  constexpr int kMost = static_cast<int>(kMostUnusedCubins);

  // One cubin is loaded once, as long as something uses it, and for a while after it.
  const LoadedKernel kept = load(0);
  REQUIRE(load(0).function == kept.function && loads == 1);
  load(1);
  load(1);
  REQUIRE(loads == 2 && unloads == 0 && loaded_cubins() == 2);

  // A walk through many sizes, whose last plans a cache keeps.
  std::deque<LoadedKernel> cache;
  for (int size = 2; size < 5000; ++size) {
    cache.push_back(load(size));
    if (cache.size() > 10) cache.pop_front();
    REQUIRE(loaded_cubins() <= 1 + 10 + kMost + 1);
  }
  REQUIRE(loads == 5000);
  REQUIRE(unloads == loads - static_cast<int>(loaded_cubins()));
  REQUIRE(unloads >= 5000 - 1 - 10 - kMost - 1);
  REQUIRE(load(0).function == kept.function && loads == 5000);
  REQUIRE(load(4999).function == cache.back().function && loads == 5000);
  load(4985);  // dropped a moment ago
  REQUIRE(loads == 5000);
  load(7);  // dropped long ago
  REQUIRE(loads == 5001);

  // Many threads at once.
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([] {
      for (int i = 0; i < 3000; ++i) {
        const LoadedKernel one = load(10000 + i % 700), two = load(10000 + (i * 7) % 700);
        REQUIRE(one.function != nullptr && two.function != nullptr);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  cache.clear();
  REQUIRE(static_cast<int>(loaded_cubins()) <= 1 + kMost);
  REQUIRE(loads - unloads == static_cast<int>(loaded_cubins()));
}
"""


@pytest.mark.slow
@pytest.mark.search
@csrc_programs.needs_compiler
def test_what_stays_loaded(tmp_path: Path) -> None:
    csrc_programs.run(tmp_path, PROGRAM, ("cuda/cuda_driver.cpp",), DRIVER)
