// Products of rows and packed weights in float32, bfloat16 or 8 bits.
//
// A panel holds 32 outputs. `kInputs` inputs of an output are packed into a word of 32 bits:
//
//   float32    [P, D, 32]            bfloat16   [P, ceil(D / 2), 32] words of two inputs
//   8 bits     [P, ceil(D / 4), 32] words of four inputs, each increased by 128
//
// Rows are in float32, and weights are widened once for all rows of a tile. With `rounds`, rows are
// rounded to the weights' type. The products then use the processor's dot products of pairs
// (AVX512_BF16) or of fours (AVX512_VNNI), or tiles (AMX, tiles.h); without them, the rounded
// numbers are widened.

#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "tasks.h"
#include "tiles.h"

namespace {

constexpr int64_t kDepth = 1024;  // words of inputs that a panel sums before it stores the sums
constexpr int64_t kAhead = 64;  // words of inputs to prefetch
constexpr int64_t kFewTiled = 64;  // maximum rows for kFewPanels panels at a time
constexpr int64_t kFewPanels = 4, kManyPanels = 16;
constexpr int64_t kWidened = 32;  // words of inputs widened at a time

typedef uint32_t Words __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

// ---- operations on words of kLanes outputs: part<j> extracts the weights for the j-th of the
// kInputs row values of a word, and step adds their product to a sum

struct Single {
  typedef Lanes Numbers;  // sums or words of kLanes outputs
  static Lanes get(const float* p) { return load(p); }
  static void put(float* p, Lanes numbers) { store(p, numbers); }
  static constexpr int kInputs = 1;
  template <int j>
  static Lanes part(Lanes words) { return words; }
  static Lanes step(Lanes sum, const float* x, Lanes weights) { return sum + *x * weights; }
};

struct WidePairs : Single {
  static constexpr int kInputs = 2;
  template <int j>
  static Lanes part(Lanes words) {
    return (Lanes)(j ? (Words)words & 0xffff0000u : (Words)words << 16);
  }
};

struct WideFours : Single {
  static constexpr int kInputs = 4;
  template <int j>
  static Lanes part(Lanes words) {
    const Words byte = j == 3 ? (Words)words >> 24 : (Words)words >> 8 * j & 255u;
    return __builtin_convertvector((Ints)byte - 128, Lanes);
  }
};

#if defined(__AVX512BF16__)
constexpr bool kHasPairs = true;
struct Pairs : Single {
  static Lanes step(Lanes sum, const float* x, Lanes weights) {
    return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(*x), (__m512bh)weights);
  }
};
#else
constexpr bool kHasPairs = false;
typedef Single Pairs;
#endif

#if defined(__AVX512VNNI__)
constexpr bool kHasFours = true;
struct Fours {
  typedef Ints Numbers;
  static Ints get(const float* p) { return *reinterpret_cast<const Ints*>(p); }
  static void put(float* p, Ints numbers) { *reinterpret_cast<Ints*>(p) = numbers; }
  static constexpr int kInputs = 1;
  template <int j>
  static Ints part(Ints words) { return words; }
  static Ints step(Ints sum, const float* x, Ints weights) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(four));
  }
};
#else
constexpr bool kHasFours = false;
typedef Single Fours;
#endif

// ---- tiles

// Call go with the constants 0 to N - 1.
template <int N, int i = 0, typename Go>
inline void each_of(const Go& go) {
  if constexpr (i < N) {
    go(std::integral_constant<int, i>{});
    each_of<N, i + 1>(go);
  }
}

// Add rows [R, depth * kInputs] times V vectors of each panel [P, depth, 32] to y. For few rows,
// several panels are processed together, for enough sums to hide the latency of additions.
template <typename Op, int R, int P, int V>
void tile(const float* x, int64_t x_stride, const float* panels, int64_t panel_stride,
          int64_t depth, float* y, int64_t y_stride, bool first) {
  constexpr int kAll = P * V;
  typedef typename Op::Numbers Numbers;
  Numbers sums[R][kAll];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < kAll; ++p)
      sums[r][p] = first ? Numbers{} : Op::get(y + r * y_stride + p * kLanes);
  for (int64_t d = 0; d < depth; ++d) {
    Numbers words[kAll];
    for (int p = 0; p < kAll; ++p)
      words[p] = Op::get(panels + p / V * panel_stride + d * kPanel + p % V * kLanes);
    for (int p = 0; p < kAll * kLanes / 16; ++p)
      __builtin_prefetch(panels + p / 2 * panel_stride + (d + kAhead) * kPanel + p % 2 * 16);
    each_of<Op::kInputs>([&](auto input) __attribute__((always_inline)) {
      constexpr int j = decltype(input)::value;
      Numbers weights[kAll];
      for (int p = 0; p < kAll; ++p) weights[p] = Op::template part<j>(words[p]);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int p = 0; p < kAll; ++p)
          sums[r][p] = Op::step(sums[r][p], x + r * x_stride + d * Op::kInputs + j, weights[p]);
    });
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < kAll; ++p) Op::put(y + r * y_stride + p * kLanes, sums[r][p]);
}

template <typename Op, int P, int V, int R = P == 1 ? kRows * kParts / V : 2>
void tile_of(int rows, const float* x, int64_t x_stride, const float* panels, int64_t panel_stride,
             int64_t depth, float* y, int64_t y_stride, bool first) {
  if constexpr (R > 0) {
    if (rows == R)
      return tile<Op, R, P, V>(x, x_stride, panels, panel_stride, depth, y, y_stride, first);
    tile_of<Op, P, V, R - 1>(rows, x, x_stride, panels, panel_stride, depth, y, y_stride, first);
  }
}

// Add all rows [n, depth * kInputs] times P panels to y [n, P * 32]. For many rows, panels of more
// than two vectors (short registers) are processed in halves, for twice the rows per tile.
template <typename Op, int P>
void all_rows(const float* x, int64_t n, int64_t x_stride, const float* panels,
              int64_t panel_stride, int64_t depth, float* y, int64_t y_stride, bool first) {
  const auto by = [&](auto vectors) {
    constexpr int V = decltype(vectors)::value, kMost = kRows * kParts / V;
    for (int64_t o = 0; o < kPanel; o += V * kLanes)
      for (int64_t r = 0; r < n; r += kMost)
        tile_of<Op, P, V>(static_cast<int>(std::min<int64_t>(kMost, n - r)), x + r * x_stride,
                          x_stride, panels + o, panel_stride, depth, y + r * y_stride + o,
                          y_stride, first);
  };
  constexpr int kMany = (P == 1 && kParts > 2) ? kParts / 2 : kParts;
  if (n <= kRows) return by(std::integral_constant<int, kParts>{});
  by(std::integral_constant<int, kMany>{});
}

// ---- bits

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Widen words [count, 32] of 8 bits to [count * 4, 32] float32.
void widen(const float* words, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i, words += kPanel, to += 4 * kPanel)
    for (int o = 0; o < kPanel; o += kLanes)
      each_of<4>([&](auto input) {
        constexpr int j = decltype(input)::value;
        store(to + j * kPanel + o, WideFours::part<j>(load(words + o)));
      });
}

// ---- the product

enum class How {
  kSingle, kPairs, kFours, kWidePairs, kWideFours, kTilePairs, kTileFours, kTileWide,
};

constexpr bool is_tiled(How how) { return how >= How::kTilePairs; }

// The rows of a product: numbers or words [n, stride], scales [n], and the excess [n] of the sums
// due to the 128 added to 8-bit weights.
struct Rows {
  const float* x;
  int64_t n, stride;
  const float* scales;
  const int32_t* excess;
};

struct Weights {
  const float* panels;  // words
  int64_t words;        // per output
  const float* scales;  // [E], or nullptr
  How how;
};

// Multiply all rows by P panels: y [n, P * 32].
template <int P>
void panel_product(const Rows& rows, const Weights& w, const float* panels, float* y,
                   int64_t stride) {
  const int64_t between = w.words * kPanel;
  const auto whole = [&](auto op) {
    typedef decltype(op) Op;
    for (int64_t d = 0; d < w.words; d += kDepth)
      all_rows<Op, P>(rows.x + d * Op::kInputs, rows.n, rows.stride, panels + d * kPanel, between,
                      std::min(kDepth, w.words - d), y, stride, d == 0);
  };
  switch (w.how) {
    case How::kSingle: return whole(Single{});
    case How::kPairs: return whole(Pairs{});
    case How::kFours: return whole(Fours{});
    case How::kWidePairs: return whole(WidePairs{});
    default: break;
  }
  if (rows.n <= kRows) return whole(WideFours{});
  alignas(64) float wide[P * kWidened * 4 * kPanel];  // once for all rows
  for (int64_t d = 0; d < w.words; d += kWidened) {
    const int64_t depth = std::min(kWidened, w.words - d);
    for (int p = 0; p < P; ++p)
      widen(panels + p * between + d * kPanel, depth, wide + p * kWidened * 4 * kPanel);
    all_rows<Single, P>(rows.x + d * 4, rows.n, rows.stride, wide, kWidened * 4 * kPanel,
                        depth * 4, y, stride, d == 0);
  }
}

// Convert sums of outputs [n, count] to results, in place.
void finish(const Rows& rows, const Weights& w, int64_t first, int64_t count, float* y,
            int64_t stride) {
  if (!w.scales) return;
  for (int64_t r = 0; r < rows.n; ++r) {
    float* to = y + r * stride;
    const float scale = rows.scales ? rows.scales[r] : 1.0f;
    if (w.how == How::kFours || w.how == How::kTileFours)
      for (int64_t e = 0; e < count; ++e)
        to[e] = static_cast<float>(static_cast<int32_t>(bits_of(to[e])) - rows.excess[r]);
    for (int64_t e = 0; e < count; ++e) to[e] *= scale * w.scales[first + e];
  }
}

// Multiply all rows by all panels: y [n, E].
void whole_product(ffi::ThreadPool& pool, const Rows& rows, const Weights& w, float* y,
                   int64_t E) {
  const int64_t panels = (E + kPanel - 1) / kPanel;
  const int64_t together = rows.n <= 2 ? 4 : 1;
  const double work = static_cast<double>(rows.n) * w.words * E;
  each(pool, (panels + together - 1) / together, work, [&](int64_t i) {
    const int64_t first = i * together, left = E - first * kPanel;
    const float* from = w.panels + first * w.words * kPanel;
    if (together == 4 && left >= 4 * kPanel) {
      panel_product<4>(rows, w, from, y + first * kPanel, E);
      return finish(rows, w, first * kPanel, 4 * kPanel, y + first * kPanel, E);
    }
    thread_local std::vector<float> last;  // results of a partial panel
    for (int64_t p = first; p < std::min(first + together, panels);
         ++p, from += w.words * kPanel) {
      const int64_t e = p * kPanel, width = std::min<int64_t>(kPanel, E - e);
      const bool whole = width == kPanel;
      if (!whole) last.resize(rows.n * kPanel);
      float* to = whole ? y + e : last.data();
      const int64_t stride = whole ? E : kPanel;
      panel_product<1>(rows, w, from, to, stride);
      finish(rows, w, e, width, to, stride);
      for (int64_t r = 0; r < rows.n && !whole; ++r)
        std::memcpy(y + r * E + e, to + r * kPanel, width * sizeof(float));
    }
  });
}

// The same product by tiles. Many rows use many panels at a time, to read the rows less often.
void tiled_product(ffi::ThreadPool& pool, const Rows& rows, const Weights& w, float* y,
                   int64_t E) {
  const int64_t panels = (E + kPanel - 1) / kPanel, share = panels / (2 * pool.num_threads() + 1);
  const int64_t together =
      rows.n <= kFewTiled ? kFewPanels : std::clamp(share, kFewPanels, kManyPanels);
  const double work = static_cast<double>(in_tiles(rows.n)) / kTile * w.words * E;
  each(pool, (panels + together - 1) / together, work, [&](int64_t i) {
    const int64_t first = i * together, count = std::min(together, panels - first);
    const int64_t e = first * kPanel, outputs = std::min(count * kPanel, E - e);
    const Panels those{w.panels + first * w.words * kPanel, count, w.words, outputs, y + e, E};
    if (w.how == How::kTileFours) tiled_panels<Tiles::kFours>(rows.x, rows.n, those);
    if (w.how == How::kTilePairs) tiled_panels<Tiles::kPairs>(rows.x, rows.n, those);
    if (w.how == How::kTileWide) tiled_panels<Tiles::kWide>(rows.x, rows.n, those);
    finish(rows, w, e, outputs, y + e, E);
  });
}

// ---- rounding of rows

inline uint32_t half_of(float x) {  // the nearest bfloat16, ties to even
  const uint32_t bits = bits_of(x);
  return std::isnan(x) ? bits >> 16 | 64 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Rounded rows, with their scales and the excess of their sums.
struct Rounded {
  std::vector<float> words, scales;
  std::vector<int32_t> excess;
};

// Round a row [D] to bfloat16: one number per word, or pairs.
void round_to_halves(const float* from, int64_t D, bool in_pairs, float* to) {
  if (!in_pairs) {
    for (int64_t d = 0; d < D; ++d) to[d] = of_bits(half_of(from[d]) << 16);
    return;
  }
  int64_t d = 0;
#if defined(__AVX512BF16__)
  for (; d + kLanes <= D / 2; d += kLanes)
    store(to + d, (Lanes)_mm512_cvtne2ps_pbh((__m512)load(from + 2 * d + kLanes),
                                             (__m512)load(from + 2 * d)));
#endif
  for (; d < D / 2; ++d)
    to[d] = of_bits(half_of(from[2 * d]) | half_of(from[2 * d + 1]) << 16);
  if (D % 2) to[D / 2] = of_bits(half_of(from[D - 1]));
}

// Return the maximum of |x| [D], or NaN if any x is not finite.
inline float largest_of(const float* x, int64_t D) {
  Ints most[2]{};  // the bits of absolute values are ordered like the values, with NaN last
  int64_t d = 0;
  for (; d + 2 * kLanes <= D; d += 2 * kLanes)
    for (int p = 0; p < 2; ++p) {
      const Ints bits = (Ints)load(x + d + p * kLanes) & 0x7fffffff;
      most[p] = bits > most[p] ? bits : most[p];
    }
  int32_t all = 0;
  for (int l = 0; l < kLanes; ++l) all = std::max({all, most[0][l], most[1][l]});
  for (; d < D; ++d) all = std::max(all, static_cast<int32_t>(bits_of(x[d]) & 0x7fffffffu));
  const float largest = of_bits(static_cast<uint32_t>(all));
  return std::isfinite(largest) ? largest : NAN;
}

// Round a row [D] to 8 bits, scaled by its maximum, one number per word or in fours. If any number
// is not finite, the scale is NaN.
void round_to_bytes(const float* from, int64_t D, bool in_fours, float* to, float& scale,
                    int32_t& excess) {
  const float largest = largest_of(from, D);
  scale = std::isnan(largest) ? largest : std::max(largest, 1e-30f) / 127.0f;
  excess = 0;
  if (std::isnan(largest)) return;
  const float inverse = 1.0f / scale;
  int32_t sum = 0;
  if (in_fours) {
    int8_t* bytes = reinterpret_cast<int8_t*>(to);
    for (int64_t d = 0; d < D; ++d) {
      const int32_t whole = static_cast<int32_t>(std::nearbyint(from[d] * inverse));
      sum += whole;
      bytes[d] = static_cast<int8_t>(whole);
    }
  } else {
    for (int64_t d = 0; d < D; ++d) to[d] = std::nearbyint(from[d] * inverse);
  }
  excess = 128 * sum;
}

// ---- the call

constexpr int64_t kLongest = 1 << 16;  // maximum inputs whose 8-bit sum fits into 32 bits

// Return the method for multiplying weights of a type.
How how_of(ffi::DataType type, bool rounds, int64_t D) {
  if (type == ffi::DataType::F32) return How::kSingle;
  if (type == ffi::DataType::BF16) {
    if (!rounds) return has_tiles() ? How::kTileWide : How::kWidePairs;
    return has_tiles() ? How::kTilePairs : kHasPairs ? How::kPairs : How::kWidePairs;
  }
  if (!rounds || D > kLongest) return How::kWideFours;
  return has_tiles() ? How::kTileFours : kHasFours ? How::kFours : How::kWideFours;
}

// Arguments: x [n, D]; packed weights; scales [E] for 8-bit weights; used [n] or [0]: the rows to
// compute, others are 0. rounds: rows are rounded to the weights' type.
ffi::Error product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer weight,
                   ffi::Buffer<ffi::F32> scales, ffi::Buffer<ffi::PRED> used,
                   ffi::ResultBuffer<ffi::F32> y, bool rounds) {
  const int64_t n = x.dimensions()[0], D = x.dimensions()[1], E = y->dimensions()[1];
  const ffi::DataType type = weight.element_type();
  const int64_t per = type == ffi::DataType::F32 ? 1 : type == ffi::DataType::BF16 ? 2 : 4;
  const auto panels = weight.dimensions();
  if (per == 4 && type != ffi::DataType::U8)
    return ffi::Error::InvalidArgument("product: weights of this type are not known");
  const int64_t words = (D + per - 1) / per;
  if (panels[1] != words || panels[2] != kPanel * per ||
      panels[0] != (E + kPanel - 1) / kPanel ||
      static_cast<int64_t>(scales.element_count()) != (per == 4 ? E : 0))
    return ffi::Error::InvalidArgument("product: shapes do not fit");
  Weights w{static_cast<const float*>(weight.untyped_data()), words,
            per == 4 ? scales.typed_data() : nullptr, how_of(type, rounds, D)};
  const float* from = x.typed_data();
  float* to = y->typed_data();
  const bool* is_used = used.element_count() ? used.typed_data() : nullptr;
  const int64_t count = is_used ? std::count(is_used, is_used + n, true) : n;
  const bool leads = !is_used || std::find(is_used, is_used + n, false) - is_used == count;
  thread_local std::vector<float> inputs, outputs;
  thread_local Rounded rounded;
  if (!leads) {
    inputs.resize(count * D);
    outputs.resize(count * E);
    for (int64_t r = 0, i = 0; r < n; ++r)
      if (is_used[r]) std::memcpy(inputs.data() + i++ * D, from + r * D, D * sizeof(float));
    from = inputs.data();
  }
  Rows rows{from, count, D, nullptr, nullptr};
  if (w.how == How::kTilePairs || w.how == How::kTileWide) {
    const bool wide = w.how == How::kTileWide;
    const int64_t part = in_tiles(count) * in_tiles(words);
    rounded.words.resize(part * (wide ? 3 : 1));  // values after the last row do not matter
    Rounded& out = rounded;  // of this thread
    each(pool, count, static_cast<double>(count) * D * 4, [&](int64_t r) {
      (wide ? divide_into_tiles<3> : divide_into_tiles<1>)(from + r * D, D, r, out.words.data(),
                                                           part);
    });
    rows = {out.words.data(), count, 0, nullptr, nullptr};
  } else if (rounds && per == 2) {
    const bool in_pairs = w.how == How::kPairs;
    const int64_t stride = in_pairs ? w.words : 2 * w.words;
    rounded.words.assign(count * stride, 0.0f);
    Rounded& out = rounded;  // of this thread
    each(pool, count, static_cast<double>(count) * D * 4, [&](int64_t r) {
      round_to_halves(from + r * D, D, in_pairs, out.words.data() + r * stride);
    });
    rows = {out.words.data(), count, stride, nullptr, nullptr};
  } else if (rounds && per == 4) {
    const bool in_fours = w.how != How::kWideFours, tiled = w.how == How::kTileFours;
    const int64_t stride = tiled ? in_tiles(w.words) : in_fours ? w.words : 4 * w.words;
    rounded.words.assign((tiled ? in_tiles(count) : count) * stride, 0.0f);
    rounded.scales.resize(count);
    rounded.excess.resize(count);
    Rounded& out = rounded;  // of this thread
    each(pool, count, static_cast<double>(count) * D * 4, [&](int64_t r) {
      thread_local std::vector<float> row;
      if (tiled) row.assign(w.words, 0.0f);
      float* words = tiled ? row.data() : out.words.data() + r * stride;
      round_to_bytes(from + r * D, D, in_fours, words, out.scales[r], out.excess[r]);
      if (tiled) into_tiles(words, r, w.words, out.words.data());
    });
    rows = {out.words.data(), count, stride, out.scales.data(), out.excess.data()};
  } else if (D % per) {  // pad the last word's inputs with 0
    rounded.words.assign(count * per * w.words, 0.0f);
    for (int64_t r = 0; r < count; ++r)
      std::memcpy(rounded.words.data() + r * per * w.words, from + r * D, D * sizeof(float));
    rows = {rounded.words.data(), count, per * w.words, nullptr, nullptr};
  }
  float* results = leads ? to : outputs.data();
  (is_tiled(w.how) ? tiled_product : whole_product)(pool, rows, w, results, E);
  if (leads) {  // the used rows come first
    std::fill(to + count * E, to + n * E, 0.0f);
    return ffi::Error::Success();
  }
  for (int64_t r = 0, i = 0; r < n; ++r) {
    if (is_used[r])
      std::memcpy(to + r * E, outputs.data() + i++ * E, E * sizeof(float));
    else
      std::fill(to + r * E, to + (r + 1) * E, 0.0f);
  }
  return ffi::Error::Success();
}

}  // namespace
