#include "core/cuda/page_distance.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "core/cuda/cuda_driver.h"

namespace cudnn_autotune {
namespace {

// For each page: one atomic addition that fetches the address translation, then the time of four
// atomic additions that depend on one another. That time is measured three times, and the shortest
// counts, because other work on the GPU only adds to it. The comparisons with all ones, which no
// word ever is, make the clock wait until a value has arrived.
constexpr const char* kDistancePtx = R"(
.visible .entry distance(.param .u64 pages, .param .u32 count, .param .u64 cycles, .param .u32 from)
{
  .reg .pred %p<2>;
  .reg .u32 %r<8>;
  .reg .u64 %rd<6>;
  ld.param.u64 %rd1, [pages];
  ld.param.u32 %r1, [count];
  ld.param.u64 %rd2, [cycles];
  ld.param.u32 %r2, [from];
  cvta.to.global.u64 %rd1, %rd1;
  cvta.to.global.u64 %rd2, %rd2;
  mov.u32 %r3, %smid;
  setp.ne.u32 %p1, %r3, %r2;
  @%p1 bra DONE;
  mul.wide.u32 %rd3, %r1, 4;
  add.u64 %rd3, %rd2, %rd3;
  atom.global.cas.b32 %r3, [%rd3], 0, 1;
  setp.ne.u32 %p1, %r3, 0;
  @%p1 bra DONE;
NEXT:
  atom.global.add.u32 %r3, [%rd1], 1;
  setp.eq.u32 %p1, %r3, 0xffffffff;
  @%p1 bra DONE;
  mov.u32 %r6, 0xffffffff;
  mov.u32 %r7, 3;
PASS:
  mov.u64 %rd4, %clock64;
  mov.u32 %r4, 4;
AGAIN:
  shr.u32 %r5, %r3, 31;
  add.u32 %r5, %r5, 1;
  atom.global.add.u32 %r3, [%rd1], %r5;
  setp.eq.u32 %p1, %r3, 0xffffffff;
  @%p1 bra DONE;
  sub.u32 %r4, %r4, 1;
  setp.ne.u32 %p1, %r4, 0;
  @%p1 bra AGAIN;
  mov.u64 %rd5, %clock64;
  sub.u64 %rd5, %rd5, %rd4;
  cvt.u32.u64 %r5, %rd5;
  min.u32 %r6, %r6, %r5;
  sub.u32 %r7, %r7, 1;
  setp.ne.u32 %p1, %r7, 0;
  @%p1 bra PASS;
  st.global.u32 [%rd2], %r6;
  add.u64 %rd1, %rd1, 4096;
  add.u64 %rd2, %rd2, 4;
  sub.u32 %r1, %r1, 1;
  setp.ne.u32 %p1, %r1, 0;
  @%p1 bra NEXT;
DONE:
  ret;
}
)";
static_assert(PageDistance::kPageBytes == 4096);

// The number of blocks for each multiprocessor. One is enough on an idle GPU.
constexpr uint32_t kBlocks = 4;
// The least ratio of the latencies of the nearest far page and the farthest near one. An H200
// has 1.5.
constexpr double kLeastGap = 1.2;
// The smaller group has at least one of this number of pages.
constexpr size_t kLeastShare = 8;

}  // namespace

const PageDistance* PageDistance::of_current_device() {
  static std::mutex mutex;
  static std::map<int, PageDistance*> known;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return nullptr;
  const std::lock_guard lock(mutex);
  const auto found = known.find(device);
  if (found != known.end()) return found->second;
  int count = 0;
  const CUfunction kernel = kernel_of(load_ptx(kDistancePtx), "distance");
  if (kernel == nullptr ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    return nullptr;  // not recorded in `known`, because memory may only be short at the moment
  }
  auto* distance = new PageDistance;
  distance->multiprocessors_ = static_cast<uint32_t>(count);
  distance->kernel_ = kernel;
  return known[device] = distance;
}

void PageDistance::measure(cudaStream_t stream, void* pages, uint32_t count,
                           uint32_t* cycles) const {
  uint32_t from = multiprocessors_ - 1;
  void* arguments[] = {&pages, &count, &cycles, &from};
  launch(static_cast<CUfunction>(kernel_), kBlocks * multiprocessors_, stream, arguments);
}

std::vector<size_t> PageDistance::far(const std::vector<uint32_t>& cycles) {
  std::vector<uint32_t> sorted = cycles;
  std::sort(sorted.begin(), sorted.end());
  const size_t least = std::max<size_t>(1, sorted.size() / kLeastShare);
  if (sorted.size() < 2 * least || sorted.front() == 0) return {};
  // Finds the widest relative gap that leaves enough pages on both sides.
  double widest = 0;
  uint32_t limit = 0;
  for (size_t i = least; i + least <= sorted.size(); ++i) {
    const double gap = static_cast<double>(sorted[i]) / static_cast<double>(sorted[i - 1]);
    if (gap > widest) {
      widest = gap;
      limit = sorted[i];
    }
  }
  if (widest < kLeastGap) return {};
  std::vector<size_t> found;
  for (size_t i = 0; i < cycles.size(); ++i) {
    if (cycles[i] >= limit) found.push_back(i);
  }
  return found;
}

}  // namespace cudnn_autotune
