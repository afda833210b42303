#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <optional>

namespace cudnn_autotune {

// What a captured CUDA graph uses lives as long as the graph, its copies and what is instantiated
// from them: plans, whose kernels may be unloaded with them, and memory that no other launch may
// use. All functions are safe to call from several threads.

// A number for the capture that a stream is in, unique in the process. None if the stream is not
// captured, or if its capture is broken and will give no graph.
std::optional<unsigned long long> capture_of(cudaStream_t stream);

// Keeps an object for the graph that the stream is being captured into, and does nothing if that
// capture is broken. Where CUDA does not take part, the object is kept until the process ends.
void keep_for_graph(cudaStream_t stream, std::shared_ptr<const void> used);

// Lets go of what only destroyed graphs used. The last owner of an object destroys it, on this
// thread. So the caller holds no lock that a destructor takes. It costs next to nothing if no graph
// was destroyed.
void release_of_destroyed_graphs();

// The number of objects that are kept, each counted once for every capture.
size_t kept_for_graphs();

}  // namespace cudnn_autotune
