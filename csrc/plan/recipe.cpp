#include "plan/recipe.h"

#include "call/torch_bridge.h"
#include "core/problem/check.h"

namespace cudnn_autotune {
namespace {

constexpr uint64_t kMostClusterBlocks = 8;  // what every GPU that has clusters allows

const char* name(Buffer buffer) { return kBufferNames.at(static_cast<size_t>(buffer)); }

// What the address is a multiple of, as far as the problem says: a power of two, in bytes.
int64_t alignment_of(const Address& address, const ConvProblem& problem) {
  int64_t known = kMostAligned;  // what an epilogue adds
  if (address.buffer == Buffer::x) known = problem.x_alignment;
  if (address.buffer == Buffer::w) known = problem.w_alignment;
  if (address.buffer == Buffer::y) known = problem.y_alignment;
  if (address.buffer == Buffer::workspace) known = kWorkspaceAligned;
  const int64_t either = known | address.offset;
  return either & -either;
}

class LaunchCheck {
 public:
  LaunchCheck(const ConvProblem& problem, int64_t workspace_bytes)
      : problem_(problem), workspace_bytes_(workspace_bytes) {}

  void operator()(const KernelLaunch& kernel) const {
    uint64_t blocks = 1;
    for (size_t i = 0; i < 3; ++i) {
      blocks *= kernel.cluster[i];
      if (blocks == 0 || blocks > kMostClusterBlocks || kernel.grid[i] % kernel.cluster[i] != 0) {
        throw PlanError(kernel.function + ": cluster must have 1 to " +
                        std::to_string(kMostClusterBlocks) +
                        " blocks and divide grid in each dimension");
      }
    }
    for (const auto& argument : kernel.arguments) {
      if (const auto* address = std::get_if<Address>(&argument)) check(*address);
      if (const auto* map = std::get_if<TensorMap>(&argument)) check(*map, kernel.function);
    }
  }

  void operator()(const EngineLaunch& engine) const {
    const ConvProblem& inner = engine.problem;
    check(engine.x, inner.x_alignment, engine.engine_text);
    check(engine.w, inner.w_alignment, engine.engine_text);
    check(engine.y, inner.y_alignment, engine.engine_text);
    if (inner.has_bias() != engine.bias.has_value() ||
        inner.has_residual() != engine.residual.has_value() || inner.has_slope()) {
      throw PlanError(engine.engine_text + " lacks a tensor of its epilogue, or is given one more");
    }
    if (engine.bias) check(*engine.bias, kMostAligned, engine.engine_text);
    if (engine.residual) check(*engine.residual, kMostAligned, engine.engine_text);
  }

  void operator()(const FunctionLaunch& /*function*/) const {}

 private:
  int64_t bytes_of(Buffer buffer) const {
    std::vector<int64_t> shape;
    switch (buffer) {
      case Buffer::x:
        shape = problem_.input_shape();
        break;
      case Buffer::w:
        shape = problem_.weight_shape();
        break;
      case Buffer::y:
        shape = problem_.output_shape();
        break;
      case Buffer::bias:
        if (!problem_.has_bias()) return 0;
        shape = {problem_.weight_shape()[0]};
        break;
      case Buffer::residual:
        if (!problem_.has_residual()) return 0;
        shape = problem_.output_shape();
        break;
      case Buffer::slope:
        if (!problem_.has_slope()) return 0;
        shape = {problem_.weight_shape()[0]};
        break;
      case Buffer::workspace:
        return workspace_bytes_;
    }
    return problem_.bytes_of(shape);
  }

  void check(const Address& address) const {
    const int64_t bytes = bytes_of(address.buffer);
    if (address.offset >= 0 && address.offset < bytes) return;
    throw PlanError("offset " + std::to_string(address.offset) + " is outside of " +
                    name(address.buffer) + ", which has " + std::to_string(bytes) + " bytes");
  }

  void check(const Address& address, int64_t alignment, const std::string& engine) const {
    check(address);
    if (alignment_of(address, problem_) >= alignment) return;
    throw PlanError("offset " + std::to_string(address.offset) + " in " + name(address.buffer) +
                    " is not known to be a multiple of the " + std::to_string(alignment) +
                    " bytes that " + engine + " asks for");
  }

  // The limits of cuTensorMapEncodeTiled, and that the tensor is in its buffer.
  void check(const TensorMap& map, const std::string& kernel) const {
    const auto require = [&kernel](bool is_met, const char* what) {
      if (!is_met) throw PlanError(kernel + ": of a tensor map, " + what);
    };
    const size_t dims = map.shape.size();
    require(dims >= 1 && dims <= 5, "shape must have 1 to 5 dimensions");
    require(map.strides.size() == dims - 1, "strides must have a dimension less than shape");
    require(map.box.size() == dims, "box must have as many dimensions as shape");
    require(map.swizzle_bytes == 0 || map.swizzle_bytes == 32 || map.swizzle_bytes == 64 ||
                map.swizzle_bytes == 128,
            "swizzle_bytes must be 0, 32, 64 or 128");
    constexpr std::array<int64_t, 4> kElementBytes{2, 2, 4, 8};  // by DataType
    const int64_t element = kElementBytes.at(static_cast<size_t>(map.element));
    int64_t bytes = element;
    for (size_t i = 0; i < dims; ++i) {
      constexpr uint64_t kMostShape = uint64_t{1} << 32, kMostStride = uint64_t{1} << 40;
      const uint64_t stride = i == 0 ? element : map.strides[i - 1];
      require(map.shape[i] >= 1 && map.shape[i] <= kMostShape, "shape must be 1 to 2**32");
      require(map.box[i] >= 1 && map.box[i] <= 256, "box must be 1 to 256");
      require(i == 0 || (stride % 16 == 0 && stride < kMostStride),
              "strides must be multiples of 16 bytes below 2**40");
      const int64_t room = bytes_of(map.address.buffer) - map.address.offset - bytes;
      require(room >= 0 && (stride == 0 || (map.shape[i] - 1) <= room / stride),
              "the tensor must lie in its buffer");
      bytes += static_cast<int64_t>((map.shape[i] - 1) * stride);
    }
    const int64_t row = map.box[0] * element;
    require(row % 16 == 0, "box must have rows of a multiple of 16 bytes");
    require(map.swizzle_bytes == 0 || row <= map.swizzle_bytes,
            "box must have rows of at most swizzle_bytes");
    check(map.address, 16, kernel);
  }

  const ConvProblem& problem_;
  int64_t workspace_bytes_;
};

}  // namespace

void check_launches(const std::vector<Launch>& launches, const ConvProblem& problem,
                    int64_t workspace_bytes) {
  for (const Launch& launch : launches) std::visit(LaunchCheck(problem, workspace_bytes), launch);
}

}  // namespace cudnn_autotune
