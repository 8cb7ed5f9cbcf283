// Products by the processor's matrix unit (AMX), in tiles of 16 rows times 16 outputs.
//
// A tile of weights is 16 words of 16 outputs of a panel (product.h). Rows [n, words] are also in
// tiles, [n / 16, words / 16, 16, 16], padded with zeros. A row's sums do not depend on other rows.
// The order of sums differs from product.h's, so tiles are used for any number of rows, also one.

#pragma once

#include <vector>

#include "tasks.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define HAS_AMX 1  // GCC and newer clang
#elif defined(__AMXTILE__) && defined(__AMXBF16__) && defined(__AMXINT8__)
#define HAS_AMX 1  // older clang
#endif
#if defined(HAS_AMX) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES 1
#endif

namespace {

// The operands of a product by tiles: rows and weights in pairs of bfloat16, or in fours of 8 bits;
// or (wide) float32 rows as sums of three bfloat16 parts, and weights in bfloat16.
enum class Tiles { kPairs, kFours, kWide };

constexpr int64_t kTile = 16;
constexpr int64_t kTilesAhead = 2;  // tiles of weights to prefetch: more would fill the L1 cache

// Round up to whole tiles.
constexpr int64_t in_tiles(int64_t count) { return (count + kTile - 1) / kTile * kTile; }

// Copy row r, given as consecutive words, into its tiles.
inline void into_tiles(const float* row, int64_t r, int64_t words, float* tiles) {
  float* to = tiles + r / kTile * kTile * in_tiles(words) + r % kTile * kTile;
  for (int64_t d = 0; d < words; d += kTile)
    std::memcpy(to + d * kTile, row + d, std::min(kTile, words - d) * sizeof(float));
}

// Adjacent panels, and the destination of their sums.
struct Panels {
  const float* words;  // [count, depth, 32]
  int64_t count, depth, outputs;  // outputs: total; the last panel may have fewer than 32
  float* y;                       // [n, outputs] in rows of `stride`
  int64_t stride;
};

#if defined(HAS_TILES)

// Return whether this process may use the matrix unit; Linux requires a request.
inline bool has_tiles() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool allowed = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return allowed;
}

// Compiler barrier for previous writes: GCC's tile intrinsics do not declare all their reads.
inline void settle() { asm volatile("" ::: "memory"); }

// Configure all tiles with full size, for the lifetime of the object.
class TileShapes {
  struct alignas(64) Shapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };

 public:
  TileShapes() {
    static const Shapes shapes;
    settle();
    _tile_loadconfig(&shapes);
  }
  ~TileShapes() { _tile_release(); }
};

// Load `count` of 16 numbers, followed by zeros.
inline __m512 some(const float* from, int64_t count) {
  if (count >= kTile) return _mm512_loadu_ps(from);
  return count <= 0 ? _mm512_setzero_ps()
                    : _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
}

inline __m512 widened(__m256i halves) {
  return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
}

// Divide 32 numbers into bfloat16 parts, each in 16 words of two consecutive numbers; the first
// part is the rounded numbers.
template <int kCount>
void divide(__m512 first, __m512 second, __m512i (&parts)[kCount]) {
  for (int p = 0; p < kCount; ++p) {
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    parts[p] = halves;
    first -= widened(_mm512_castsi512_si256(halves));
    second -= widened(_mm512_extracti64x4_epi64(halves, 1));
  }
}

// Write row r of numbers [D] into the tiles of its parts, which are `apart` words apart.
template <int kCount>
void divide_into_tiles(const float* row, int64_t D, int64_t r, float* tiles, int64_t apart) {
  const int64_t words = (D + 1) / 2;
  float* to = tiles + r / kTile * kTile * in_tiles(words) + r % kTile * kTile;
  for (int64_t d = 0; d < words; d += kTile) {
    __m512i parts[kCount];
    divide(some(row + 2 * d, D - 2 * d), some(row + 2 * d + kTile, D - 2 * d - kTile), parts);
    for (int p = 0; p < kCount; ++p) _mm512_storeu_si512(to + p * apart + d * kTile, parts[p]);
  }
}

#define TILE_STEP(sum, rows, weights) \
  if constexpr (kind == Tiles::kFours) \
    _tile_dpbsud(sum, rows, weights); \
  else                                \
    _tile_dpbf16ps(sum, rows, weights);

// Write `count` rows and `width` outputs of the sums [16, 32] in tiles `left` and `right`.
#define TILE_STORE(left, right, count, width, to, stride)                           \
  if ((count) >= kTile && (width) == kPanel) {                                      \
    _tile_stored(left, to, (stride) * sizeof(float));                               \
    _tile_stored(right, (to) + kTile, (stride) * sizeof(float));                    \
  } else {                                                                          \
    alignas(64) float whole[kTile * kPanel];                                        \
    _tile_stored(left, whole, kPanel * sizeof(float));                              \
    _tile_stored(right, whole + kTile, kPanel * sizeof(float));                     \
    for (int64_t r = 0; r < std::min<int64_t>(kTile, count); ++r)                   \
      std::memcpy((to) + r * (stride), whole + r * kPanel, (width) * sizeof(float)); \
  }

// A panel's words after the last whole tile, padded with zeros to a tile.
struct LastWords {
  alignas(64) float words[kTile * kPanel];
  LastWords(const float* panel, int64_t depth) {
    const int64_t rest = depth % kTile;
    std::memcpy(words, panel + (depth - rest) * kPanel, rest * kPanel * sizeof(float));
    std::memset(words + rest * kPanel, 0, (kTile - rest) * kPanel * sizeof(float));
  }
};

inline void fetch_tiles(const float* words) {
  for (int64_t d = 0; d < kTile; ++d) {
    __builtin_prefetch(words + d * kPanel);
    __builtin_prefetch(words + d * kPanel + kTile);
  }
}

// Multiply up to 32 rows by a panel: y [rows, width]. x: the rows' first part; x_part: words from
// one part to the next; last: LastWords, if the depth is not a multiple of a tile.
template <Tiles kind>
void tiles_of_rows(const float* x, int64_t x_part, int64_t rows, const float* panel, int64_t depth,
                   const float* last, float* y, int64_t width, int64_t stride) {
  constexpr int64_t kRowBytes = kTile * sizeof(float), kBetween = kPanel * sizeof(float);
  const int64_t below = kTile * in_tiles(depth);
  const bool two = rows > kTile;
  settle();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t d = 0; d < depth; d += kTile) {
    const float* from = d + kTile > depth ? last : panel + d * kPanel;
    fetch_tiles(from + kTilesAhead * kTile * kPanel);
    _tile_loadd(6, from, kBetween);
    _tile_loadd(7, from + kTile, kBetween);
    for (int part = kind == Tiles::kWide ? 2 : 0; part >= 0; --part) {
      const float* own = x + part * x_part + d * kTile;
      _tile_loadd(4, own, kRowBytes);
      TILE_STEP(0, 4, 6);
      TILE_STEP(1, 4, 7);
      if (two) {
        _tile_loadd(5, own + below, kRowBytes);
        TILE_STEP(2, 5, 6);
        TILE_STEP(3, 5, 7);
      }
    }
  }
  TILE_STORE(0, 1, rows, width, y, stride);
  if (two) {
    TILE_STORE(2, 3, rows - kTile, width, y + kTile * stride, stride);
  }
}

// Multiply rows [n] by panels: a few rows by all panels, then the next rows.
template <Tiles kind>
void tiled_panels(const float* x, int64_t n, const Panels& panels) {
  const TileShapes shapes;
  const int64_t depth = panels.depth, row = in_tiles(depth), each = depth * kPanel;
  std::vector<LastWords> last;
  last.reserve(depth % kTile ? panels.count : 0);
  for (int64_t p = 0; p < panels.count && depth % kTile; ++p)
    last.emplace_back(panels.words + p * each, depth);
  for (int64_t r = 0; r < n; r += 2 * kTile)
    for (int64_t p = 0; p < panels.count; ++p)
      tiles_of_rows<kind>(x + r * row, in_tiles(n) * row, std::min(2 * kTile, n - r),
                          panels.words + p * each, depth, last.empty() ? nullptr : last[p].words,
                          panels.y + r * panels.stride + p * kPanel,
                          std::min<int64_t>(kPanel, panels.outputs - p * kPanel), panels.stride);
}

#undef TILE_STEP

#else

inline bool has_tiles() { return false; }

template <int kCount>
void divide_into_tiles(const float*, int64_t, int64_t, float*, int64_t) {}

template <Tiles kind>
void tiled_panels(const float*, int64_t, const Panels&) {}

#endif

}  // namespace
