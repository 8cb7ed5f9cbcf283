// Sums of products by the processor's matrix unit (AMX), in tiles of 16 rows times 16 outputs.
//
// A tile of weights is 16 words of 16 outputs of a panel as product.h has them. Rows [n, words] are
// in tiles, too, [n / 16, words / 16, 16, 16], zeros where there is no row or word. A tile's sums do not depend on other rows, and all rows are multiplied so, one
// alone, too: sums of words have an order of their own here.

#pragma once

#include "tasks.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES 1
#endif

namespace {

constexpr int64_t kTile = 16;
constexpr int64_t kTilesAhead = 2;  // of weights that are fetched ahead: more fill the nearest cache

// Round up to whole tiles.
constexpr int64_t in_tiles(int64_t count) { return (count + kTile - 1) / kTile * kTile; }

// Put row r, its words as they follow one another, into its tiles.
inline void into_tiles(const float* row, int64_t r, int64_t words, float* tiles) {
  float* to = tiles + r / kTile * kTile * in_tiles(words) + r % kTile * kTile;
  for (int64_t d = 0; d < words; d += kTile)
    std::memcpy(to + d * kTile, row + d, std::min(kTile, words - d) * sizeof(float));
}

#if defined(HAS_TILES)

// Return whether this process may use the matrix unit; Linux wants to be asked.
inline bool has_tiles() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool allowed = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return allowed;
}

// All tiles whole, for as long as the object lives.
class TileShapes {
 public:
  TileShapes() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shapes;
    _tile_loadconfig(&shapes);
  }
  ~TileShapes() { _tile_release(); }
};

#define TILE_STEP(sum, rows, weights) \
  if constexpr (kBytes)               \
    _tile_dpbsud(sum, rows, weights); \
  else                                \
    _tile_dpbf16ps(sum, rows, weights);

// Write up to 16 rows of the sums [16, 32] of tiles `left` and `right`.
#define TILE_STORE(left, right, count, to, stride)                             \
  if ((count) >= kTile) {                                                      \
    _tile_stored(left, to, (stride) * sizeof(float));                          \
    _tile_stored(right, (to) + kTile, (stride) * sizeof(float));               \
  } else {                                                                     \
    alignas(64) float whole[kTile * kPanel];                                   \
    _tile_stored(left, whole, kPanel * sizeof(float));                         \
    _tile_stored(right, whole + kTile, kPanel * sizeof(float));                \
    for (int64_t r = 0; r < (count); ++r)                                      \
      std::memcpy((to) + r * (stride), whole + r * kPanel, kPanel * sizeof(float)); \
  }

inline void fetch_tiles(const float* words) {
  for (int64_t d = 0; d < kTile; ++d) {
    __builtin_prefetch(words + d * kPanel);
    __builtin_prefetch(words + d * kPanel + kTile);
  }
}

// A panel's words beyond the last whole tile, with zeros up to one.
struct LastWords {
  alignas(64) float words[kTile * kPanel];
  void take(const float* panel, int64_t count) {
    const int64_t rest = count % kTile;
    if (!rest) return;
    std::memcpy(words, panel + (count - rest) * kPanel, rest * kPanel * sizeof(float));
    std::memset(words + rest * kPanel, 0, (kTile - rest) * kPanel * sizeof(float));
  }
};

// Multiply up to 32 rows with a panel to y [rows, 32].
template <bool kBytes>
void tiles_of_rows(const float* x, int64_t rows, const float* panel, int64_t words,
                   const float* last, float* y, int64_t y_stride) {
  constexpr int64_t kRowBytes = kTile * sizeof(float), kBetween = kPanel * sizeof(float);
  const float* below = x + kTile * in_tiles(words);
  const bool two = rows > kTile;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t d = 0; d < words; d += kTile) {
    const bool is_last = d + kTile > words;
    const float* from = is_last ? last : panel + d * kPanel;
    fetch_tiles(from + kTilesAhead * kTile * kPanel);
    _tile_loadd(4, x + d * kTile, kRowBytes);
    _tile_loadd(6, from, kBetween);
    _tile_loadd(7, from + kTile, kBetween);
    TILE_STEP(0, 4, 6);
    TILE_STEP(1, 4, 7);
    if (two) {
      _tile_loadd(5, below + d * kTile, kRowBytes);
      TILE_STEP(2, 5, 6);
      TILE_STEP(3, 5, 7);
    }
  }
  TILE_STORE(0, 1, rows, y, y_stride);
  if (two) {
    TILE_STORE(2, 3, rows - kTile, y + kTile * y_stride, y_stride);
  }
}

// Multiply all rows with P panels to y [n, P * 32]: a few rows with all panels, then the next.
template <bool kBytes, int P>
void tiled_panels(const float* x, int64_t n, const float* panels, int64_t words, float* y,
                  int64_t y_stride) {
  const TileShapes shapes;
  LastWords last[P];
  for (int p = 0; p < P; ++p) last[p].take(panels + p * words * kPanel, words);
  for (int64_t r = 0; r < n; r += 2 * kTile)
    for (int p = 0; p < P; ++p)
      tiles_of_rows<kBytes>(x + r * in_tiles(words), std::min(2 * kTile, n - r),
                            panels + p * words * kPanel, words, last[p].words,
                            y + r * y_stride + p * kPanel, y_stride);
}

#undef TILE_STEP
#undef TILE_STORE

#else

inline bool has_tiles() { return false; }

template <bool kBytes, int P>
void tiled_panels(const float*, int64_t, const float*, int64_t, float*, int64_t) {}

#endif

}  // namespace
