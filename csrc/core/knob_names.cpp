#include "core/knob_names.h"

#include <cudnn_frontend/knobs.h>

#include "core/knob_types.h"

namespace cudnn_autotune {
namespace {

using cudnn_frontend::KnobType_t;

struct NamedKnob {
  KnobType_t type;
  const char* name;
};

#define KNOB(NAME) {KnobType_t::NAME, #NAME}
constexpr NamedKnob kKnobs[] = {
    KNOB(SWIZZLE),        KNOB(TILE_SIZE),
    KNOB(EDGE),           KNOB(MULTIPLY),
    KNOB(SPLIT_K_BUF),    KNOB(TILEK),
    KNOB(STAGES),         KNOB(REDUCTION_MODE),
    KNOB(SPLIT_K_SLC),    KNOB(IDX_MODE),
    KNOB(SPECFILT),       KNOB(KERNEL_CFG),
    KNOB(WORKSPACE),      KNOB(TILE_CGA_M),
    KNOB(TILE_CGA_N),     KNOB(BLOCK_SIZE),
    KNOB(OCCUPANCY),      KNOB(ARRAY_SIZE_PER_THREAD),
    KNOB(SPLIT_COLS),     KNOB(TILE_ROWS),
    KNOB(TILE_COLS),      KNOB(LOAD_SIZE),
    KNOB(CTA_COUNT),      KNOB(STREAM_K),
    KNOB(SPLIT_P_SLC),    KNOB(TILE_M),
    KNOB(TILE_N),         KNOB(WARP_SPEC_CFG),
    KNOB(SWAP_AB),        KNOB(INPUT_TMA_ENABLE),
    KNOB(OUTPUT_TMA_ENABLE), KNOB(TILE_CGA),
};
#undef KNOB

}  // namespace

std::string knob_name(cudnnBackendKnobType_t backend_knob) {
  const KnobType_t type = cudnn_frontend::convert_from_backend_knob_type(backend_knob);
  for (const NamedKnob& knob : kKnobs) {
    if (knob.type == type) return knob.name;
  }
  return "";
}

KnobType_t knob_type(const std::string& name) {
  for (const NamedKnob& knob : kKnobs) {
    if (name == knob.name) return knob.type;
  }
  return KnobType_t::NOT_SET;
}

bool is_knob_name(const std::string& name) { return knob_type(name) != KnobType_t::NOT_SET; }

}  // namespace cudnn_autotune
