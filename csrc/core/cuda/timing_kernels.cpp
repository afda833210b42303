#include "core/cuda/timing_kernels.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

#include "core/cuda/cuda_driver.h"

namespace cudnn_autotune {
namespace {

constexpr const char* kPtx = R"(
.visible .entry stamp(.param .u64 readings, .param .u32 count)
{
  .reg .pred %p<2>;
  .reg .u32 %r<4>;
  .reg .u64 %rd<6>;
  ld.param.u64 %rd1, [readings];
  ld.param.u32 %r2, [count];
  mov.u32 %r1, %smid;
  setp.ge.u32 %p1, %r1, %r2;
  @%p1 bra DONE;
  mul.wide.u32 %rd2, %r1, 16;
  add.u64 %rd1, %rd1, %rd2;
  mov.u64 %rd3, %clock64;
  mov.u64 %rd4, %globaltimer;
  st.u64 [%rd1], %rd3;
  st.u64 [%rd1+8], %rd4;
DONE:
  ret;
}

.visible .entry block_stream(.param .u64 released, .param .u64 most_ns)
{
  .reg .pred %p<3>;
  .reg .u32 %r<2>;
  .reg .u64 %rd<6>;
  ld.param.u64 %rd1, [released];
  ld.param.u64 %rd2, [most_ns];
  mov.u64 %rd3, %globaltimer;
AGAIN:
  ld.volatile.u32 %r1, [%rd1];
  setp.ne.u32 %p1, %r1, 0;
  @%p1 bra DONE;
  mov.u64 %rd4, %globaltimer;
  sub.u64 %rd5, %rd4, %rd3;
  setp.lt.u64 %p2, %rd5, %rd2;
  @%p2 bra AGAIN;
DONE:
  ret;
}
)";

// Shorter spans are not used, because the wall clock may tick in microseconds.
constexpr uint64_t kLeastNs = 100'000;

}  // namespace

TimingKernels* TimingKernels::of_current_device() {
  static std::mutex mutex;
  static std::map<int, TimingKernels*> known;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return nullptr;
  const std::lock_guard lock(mutex);
  const auto found = known.find(device);
  if (found != known.end()) return found->second;
  TimingKernels*& entry = known[device] = nullptr;
  std::unique_ptr<TimingKernels> kernels(new TimingKernels);
  int count = 0;
  void* released = nullptr;
  const CUmodule module = load_ptx(kPtx);
  const CUfunction stamp = kernel_of(module, "stamp");
  const CUfunction block = kernel_of(module, "block_stream");
  if (stamp != nullptr && block != nullptr &&
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess &&
      cudaHostAlloc(&released, 2 * sizeof(uint32_t), cudaHostAllocPortable) == cudaSuccess) {
    kernels->multiprocessors_ = static_cast<size_t>(count);
    kernels->stamp_kernel_ = stamp;
    kernels->block_kernel_ = block;
    kernels->released_ = static_cast<uint32_t*>(released);
    kernels->released_[1] = 0;
    entry = kernels.release();
  }
  return entry;
}

void TimingKernels::stamp(cudaStream_t stream, Reading* readings) const {
  auto count = static_cast<uint32_t>(multiprocessors_);
  void* arguments[] = {&readings, &count};
  // There is one block for each multiprocessor. Most get one, and those that get one in both stamps
  // count.
  launch(static_cast<CUfunction>(stamp_kernel_), count, stream, arguments);
}

void TimingKernels::block(cudaStream_t stream, uint64_t most_ns) const {
  __atomic_store_n(released_, 0u, __ATOMIC_SEQ_CST);
  uint32_t* released = released_;
  void* arguments[] = {&released, &most_ns};
  launch(static_cast<CUfunction>(block_kernel_), 1, stream, arguments);
}

void TimingKernels::unblock() const { __atomic_store_n(released_, 1u, __ATOMIC_SEQ_CST); }

void TimingKernels::delay(cudaStream_t stream, uint64_t ns) const {
  uint32_t* never_set = released_ + 1;
  void* arguments[] = {&never_set, &ns};
  launch(static_cast<CUfunction>(block_kernel_), 1, stream, arguments);
}

std::optional<double> TimingKernels::mhz(const Reading* begin, const Reading* end, size_t count) {
  std::vector<double> rates;
  for (size_t i = 0; i < count; ++i) {
    if (begin[i].ns == 0 || end[i].ns < begin[i].ns + kLeastNs) continue;
    const auto cycles = static_cast<double>(end[i].cycles - begin[i].cycles);
    rates.push_back(cycles / static_cast<double>(end[i].ns - begin[i].ns) * 1e3);
  }
  if (rates.empty()) return std::nullopt;
  const auto middle = rates.begin() + static_cast<std::ptrdiff_t>(rates.size() / 2);
  std::nth_element(rates.begin(), middle, rates.end());
  return *middle;
}

}  // namespace cudnn_autotune
