#include "core/cudnn/detail/knob_names.h"

#include <array>
#include <charconv>
#include <cstddef>

namespace cudnn_autotune {
namespace {

// The names of cudnnBackendKnobType_t by number. The deprecated ones are here too, because engines
// 27 and 45 are still offered with KBLOCK set, which the frontend's create_execution_plan cannot
// set.
constexpr std::array<const char*, 46> kNames = {"SPLIT_K",
                                                "SWIZZLE",
                                                "TILE_SIZE",
                                                "USE_TEX",
                                                "EDGE",
                                                "KBLOCK",
                                                "LDGA",
                                                "LDGB",
                                                "CHUNK_K",
                                                "SPLIT_H",
                                                "WINO_TILE",
                                                "MULTIPLY",
                                                "SPLIT_K_BUF",
                                                "TILEK",
                                                "STAGES",
                                                "REDUCTION_MODE",
                                                "CTA_SPLIT_K_MODE",
                                                "SPLIT_K_SLC",
                                                "IDX_MODE",
                                                "SLICED",
                                                "SPLIT_RS",
                                                "SINGLEBUFFER",
                                                "LDGC",
                                                "SPECFILT",
                                                "KERNEL_CFG",
                                                "WORKSPACE",
                                                "TILE_CGA",
                                                "TILE_CGA_M",
                                                "TILE_CGA_N",
                                                "BLOCK_SIZE",
                                                "OCCUPANCY",
                                                "ARRAY_SIZE_PER_THREAD",
                                                "NUM_C_PER_BLOCK",
                                                "SPLIT_COLS",
                                                "TILE_ROWS",
                                                "TILE_COLS",
                                                "LOAD_SIZE",
                                                "CTA_COUNT",
                                                "STREAM_K",
                                                "SPLIT_P_SLC",
                                                "TILE_M",
                                                "TILE_N",
                                                "WARP_SPEC_CFG",
                                                "SWAP_AB",
                                                "INPUT_TMA_ENABLE",
                                                "OUTPUT_TMA_ENABLE"};

const std::string kNumbered = "KNOB_";

}  // namespace

std::string knob_name(cudnnBackendKnobType_t knob) {
  const auto number = static_cast<size_t>(knob);
  return number < kNames.size() ? kNames[number] : kNumbered + std::to_string(number);
}

std::optional<cudnnBackendKnobType_t> knob_by_name(const std::string& name) {
  for (size_t number = 0; number < kNames.size(); ++number) {
    if (name == kNames[number]) return static_cast<cudnnBackendKnobType_t>(number);
  }
  if (name.rfind(kNumbered, 0) != 0) return std::nullopt;
  int number = 0;
  const char* end = name.data() + name.size();
  const auto [last, error] = std::from_chars(name.data() + kNumbered.size(), end, number);
  if (error != std::errc() || last != end || number < 0) return std::nullopt;
  return static_cast<cudnnBackendKnobType_t>(number);
}

}  // namespace cudnn_autotune
