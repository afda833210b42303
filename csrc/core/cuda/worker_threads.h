#pragma once

#include <cstddef>
#include <functional>

namespace cudnn_autotune {

// Calls work(0) to work(count - 1), on the caller's thread and on up to `threads` - 1 more. Each
// new thread calls `enter` first, and does no work if that throws. `work` must not throw.
void on_worker_threads(size_t count, int threads, const std::function<void()>& enter,
                       const std::function<void(size_t)>& work);

}  // namespace cudnn_autotune
