#pragma once

#include <algorithm>
#include <cstdint>

namespace cudnn_autotune {

// What the kernel of cudnn_autotune/compile/weights/fold.cu takes, which has the same structures
// and explains them.

constexpr int kFoldThreads = 288;
constexpr int kNumbersOfTile = 16 * kFoldThreads;
// Scales of a tile's rows, its numbers, and a word behind each 8 channels, whose windows have two
// numbers or more.
constexpr int kFoldSharedBytes =
    static_cast<int>(sizeof(float)) * (kFoldThreads + kNumbersOfTile + kNumbersOfTile / 16);
constexpr int kVectors = 5;

enum class FoldOrder : unsigned char { kept, to_channels_last, to_contiguous };

struct FoldItem {
  const void* weight;
  void* folded_weight;
  int rows, channels, window;
  int channel_parts, window_parts;
  int first_block;
  unsigned short tile_rows, tile_channels, tile_window;
  FoldOrder order;
  unsigned char folded;
};
struct Folded {
  const void* vectors[kVectors];
  void* bias;
  float eps;
  int kinds;
};
constexpr int kMostItems = 84;
constexpr int kMostFolded = 72;
constexpr int kHints = 60;
struct FoldTable {
  union {
    FoldItem items[kMostItems];
    Folded folded[kMostFolded];
  };
  unsigned char first_items[kHints];
  short count, shift;
};
static_assert(sizeof(FoldTable) <= 4096, "all GPUs take arguments of this size");

inline int parts(int whole, int part) {
  return static_cast<int>((static_cast<int64_t>(whole) + part - 1) / part);
}

// A weight keeps its order, and whatever is folded into it.
inline void keep_order(FoldItem& item, bool is_folded) {
  item.order = FoldOrder::kept;
  item.channels *= item.window;
  item.window = 1;
  if (is_folded) return;
  item.channels *= item.rows;
  item.rows = 1;
}

// Divides a weight of fewer than 2^31 numbers into tiles. If it keeps its order, its window is 1.
inline void choose_tiles(FoldItem& item) {
  // A sector of DRAM holds 16 numbers of a half type; 64 of them are as much as a warp writes at
  // once.
  constexpr int kFewChannels = 16, kManyChannels = 64;
  const int length = item.channels * item.window;
  int rows = 1, channels = item.channels, window = item.window;
  if (length <= kNumbersOfTile) {
    rows = std::min({item.rows, kFoldThreads, kNumbersOfTile / length});
  } else if (const int most = kNumbersOfTile / window; most >= kFewChannels) {
    const int each = parts(channels, parts(channels, most / kFewChannels * kFewChannels));
    channels = parts(each, kFewChannels) * kFewChannels;
  } else {
    channels = std::min(channels, kManyChannels);
    window = parts(window, parts(window, kNumbersOfTile / channels));
  }
  item.channel_parts = parts(item.channels, channels);
  item.window_parts = parts(item.window, window);
  item.tile_rows = static_cast<unsigned short>(rows);
  item.tile_channels = static_cast<unsigned short>(channels);
  item.tile_window = static_cast<unsigned short>(window);
}

inline int blocks_of(const FoldItem& item) {
  return parts(item.rows, item.tile_rows) * item.channel_parts * item.window_parts;
}

// The weights of one launch.
struct FoldLaunch {
  FoldTable table{};
  int folded = 0;
  int blocks = 0;

  // Adds a weight and what is folded into it, if anything. Returns whether there was room.
  bool add(FoldItem item, const Folded* what) {
    const int folded_then = folded + (what != nullptr ? 1 : 0);
    if ((table.count + 1) * sizeof(FoldItem) + folded_then * sizeof(Folded) >
        sizeof(table.folded)) {
      return false;
    }
    if (what != nullptr) table.folded[kMostFolded - folded_then] = *what;
    item.folded = static_cast<unsigned char>(what != nullptr ? folded_then : 0);
    folded = folded_then;
    choose_tiles(item);
    item.first_block = blocks;
    blocks += blocks_of(item);
    table.items[table.count++] = item;
    return true;
  }

  // After the last weight: tells the blocks where to look for their weight.
  void finish() {
    while ((blocks - 1) >> table.shift >= kHints) ++table.shift;
    int place = 0;
    for (int hint = 0; hint <= (blocks - 1) >> table.shift; ++hint) {
      const int block = hint << table.shift;
      while (place + 1 < table.count && block >= table.items[place + 1].first_block) ++place;
      table.first_items[hint] = static_cast<unsigned char>(place);
    }
  }
};

}  // namespace cudnn_autotune
