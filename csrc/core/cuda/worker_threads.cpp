#include "core/cuda/worker_threads.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace cudnn_autotune {

void on_worker_threads(size_t count, int threads, const std::function<void()>& enter,
                       const std::function<void(size_t)>& work) {
  std::atomic<size_t> next{0};
  const auto work_on = [&] {
    for (size_t i = next++; i < count; i = next++) work(i);
  };
  const auto most = std::min<size_t>(std::max(threads, 1), count);
  std::vector<std::thread> pool;
  pool.reserve(most);
  while (pool.size() + 1 < most) {
    try {
      pool.emplace_back([&] {
        try {
          enter();
        } catch (const std::exception&) {
          return;  // if CUDA fails, the caller's thread meets the failure too, and reports it
        }
        work_on();
      });
    } catch (const std::system_error&) {
      break;  // the system gives no more threads; those that run do the work
    }
  }
  work_on();
  for (auto& thread : pool) thread.join();
}

}  // namespace cudnn_autotune
