// Products of float32 matrices by the matrix unit (AMX), which multiplies bfloat16. Each number is
// the sum of three bfloat16 parts, and a product is the sum of six products of parts. The omitted
// products are below the last bit of float32 (Henry et al. 2019, arXiv:1904.06376, "bfloat16x3"),
// except for numbers below 1e-33, whose last parts vanish. A number that is not finite, or rounds
// to infinity (above 3.39e38), makes its row or output NaN.
//
// Left [M, K] and right [K, N] are divided into parts once, in the order in which tiles read them:
//
//   left   [M / 32, K / 32, 3 parts, 2, 16 rows, 16 words]     a word: two consecutive
//   right  [N / 32, K / 32, 3 parts, 16 words, 32 outputs]     inputs along K
//
// padded with zeros. Each sum is computed by one task, in a fixed order.

#pragma once

#include <mutex>
#include <vector>

#include "tiles.h"

namespace {

constexpr int64_t kStep = 2 * kTile;  // inputs of a tile, and rows or outputs of a block

#if defined(HAS_TILES)

constexpr int64_t kLongStretch = 32;  // steps that are summed before the sums are stored
constexpr int64_t kStepWords = 3 * kTile * kStep;  // words per step of a block, left or right
constexpr int64_t kNearWords = 3 << 16;  // words of the rows that a task keeps in the L2 cache
constexpr int64_t kDividedWords = 1 << 24;  // words of panels divided at a time: 64 MiB
constexpr int64_t kStrip = 4;  // panels divided per task

// A matrix in memory, or its transpose: element (i, j) at data[i * stride + j], or at
// data[j * stride + i].
struct Matrix {
  const float* data;
  int64_t rows, columns, stride;
  bool transposed;
};

typedef __m512i Parts[3];

// Interleave the first 16 halves with the last 16.
inline __m512i zipped(__m512i halves) {
  alignas(64) static constexpr uint16_t kOrder[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), halves);
}

// Transpose 16 x 16 words.
inline void transpose(__m512i (&w)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(w[i], w[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(w[i], w[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      w[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      w[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int i = 0; i < 4; ++i) {
    const __m512i a = _mm512_shuffle_i32x4(w[i], w[i + 4], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(w[i + 8], w[i + 12], 0x88);
    const __m512i c = _mm512_shuffle_i32x4(w[i], w[i + 4], 0xdd);
    const __m512i d = _mm512_shuffle_i32x4(w[i + 8], w[i + 12], 0xdd);
    t[i] = _mm512_shuffle_i32x4(a, b, 0x88);
    t[i + 8] = _mm512_shuffle_i32x4(a, b, 0xdd);
    t[i + 4] = _mm512_shuffle_i32x4(c, d, 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
  for (int i = 0; i < 16; ++i) w[i] = t[i];
}

// Divide 32 consecutive numbers in memory, from (i, j) on; 0 outside the matrix.
inline void divide_along(const Matrix& m, int64_t i, int64_t j, Parts& parts) {
  const float* from = m.data + i * m.stride + j;
  const bool is_there = i < m.rows;
  divide(some(from, is_there ? m.columns - j : 0),
         some(from + kTile, is_there ? m.columns - j - kTile : 0), parts);
}

// Divide 16 numbers of row i in memory and the numbers below them in row i + 1 into words of both.
inline void divide_across(const Matrix& m, int64_t i, int64_t j, Parts& parts) {
  const float* from = m.data + i * m.stride + j;
  divide(some(from, i < m.rows ? m.columns - j : 0),
         some(from + m.stride, i + 1 < m.rows ? m.columns - j : 0), parts);
  for (int p = 0; p < 3; ++p) parts[p] = zipped(parts[p]);
}

// Write 16 rows (or outputs) from `first` on, and 32 inputs from `k` on, as three tiles
// `between` words apart: rows of words, or (`turned`) words of rows. along: the inputs of a row are
// consecutive in memory.
inline void divide_tile(const Matrix& m, int64_t first, int64_t k, bool along, bool turned,
                        float* to, int64_t between, int64_t row_words) {
  __m512i tiles[3][16];
  for (int64_t i = 0; i < kTile; ++i) {
    Parts parts;
    along ? divide_along(m, first + i, k, parts) : divide_across(m, k + 2 * i, first, parts);
    for (int p = 0; p < 3; ++p) tiles[p][i] = parts[p];
  }
  for (int p = 0; p < 3; ++p) {
    if (turned == along) transpose(tiles[p]);
    for (int64_t i = 0; i < kTile; ++i)
      _mm512_storeu_si512(to + p * between + i * row_words, tiles[p][i]);
  }
}

// Divide 32 rows of the left matrix, inputs from k on for `steps` steps.
inline void divide_left(const Matrix& m, int64_t row, int64_t k, int64_t steps, float* to) {
  for (int64_t s = 0; s < steps; ++s, to += kStepWords)
    for (int64_t half = 0; half < 2; ++half)
      divide_tile(m, row + half * kTile, k + s * kStep, !m.transposed, false,
                  to + half * kTile * kTile, 2 * kTile * kTile, kTile);
}

// Divide `count` panels of the right matrix from `first` on, each of `steps` steps. In memory its
// inputs are rows, unless it is transposed.
inline void divide_right(const Matrix& m, int64_t first, int64_t count, int64_t k, int64_t steps,
                         float* to) {
  for (int64_t s = 0; s < steps; ++s)
    for (int64_t half = 0; half < 2 * count; ++half) {
      const int64_t panel = half / 2, beside = half % 2 * kTile;
      divide_tile(m, (first + panel) * kStep + beside, k + s * kStep, m.transposed, true,
                  to + (panel * steps + s) * kStepWords + beside, kTile * kPanel, kPanel);
    }
}

// Set y [rows, width] to the product of a left and a right block; unless `fresh`, add it.
inline void block_of_parts(const float* left, const float* right, int64_t steps, float* y,
                           int64_t rows, int64_t width, int64_t stride, bool fresh) {
  constexpr int64_t kRowBytes = kTile * sizeof(float), kBetween = kPanel * sizeof(float);
  constexpr int64_t kLeftPart = 2 * kTile * kTile, kRightPart = kTile * kPanel;
  alignas(64) float sums[kStep * kPanel];
  const bool direct = rows >= kStep && width == kPanel;
  float* to = direct ? y : sums;
  const int64_t apart = direct ? stride : kPanel, bytes = apart * sizeof(float);
  for (int64_t r = 0; r < rows && !fresh && !direct; ++r)
    std::memcpy(sums + r * kPanel, y + r * stride, width * sizeof(float));
  settle();
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, to, bytes);
    _tile_loadd(1, to + kTile, bytes);
    _tile_loadd(2, to + kTile * apart, bytes);
    _tile_loadd(3, to + kTile * apart + kTile, bytes);
  }
#define ROWS_OF(part)                                     \
  _tile_loadd(4, left + (part) * kLeftPart, kRowBytes);   \
  _tile_loadd(5, left + (part) * kLeftPart + kTile * kTile, kRowBytes);
#define OUTPUTS_OF(part)                                  \
  _tile_loadd(6, right + (part) * kRightPart, kBetween);  \
  _tile_loadd(7, right + (part) * kRightPart + kTile, kBetween);
#define ADD                \
  _tile_dpbf16ps(0, 4, 6); \
  _tile_dpbf16ps(1, 4, 7); \
  _tile_dpbf16ps(2, 5, 6); \
  _tile_dpbf16ps(3, 5, 7);
  for (int64_t s = 0; s < steps; ++s, left += kStepWords, right += kStepWords) {
    ROWS_OF(0) OUTPUTS_OF(2) ADD
    OUTPUTS_OF(1) ADD
    ROWS_OF(1) ADD
    OUTPUTS_OF(0) ADD
    ROWS_OF(2) ADD
    ROWS_OF(0) ADD
  }
#undef ROWS_OF
#undef OUTPUTS_OF
#undef ADD
  _tile_stored(0, to, bytes);
  _tile_stored(1, to + kTile, bytes);
  _tile_stored(2, to + kTile * apart, bytes);
  _tile_stored(3, to + kTile * apart + kTile, bytes);
  for (int64_t r = 0; r < rows && !direct; ++r)
    std::memcpy(y + r * stride, sums + r * kPanel, width * sizeof(float));
}

constexpr int64_t parts_of(int64_t count, int64_t each) { return (count + each - 1) / each; }

// Memory for the lifetime of the object, from a pool shared by all calls and threads. The pool
// grows to the maximum of concurrent use.
class Borrowed {
 public:
  explicit Borrowed(int64_t words) {
    {
      const std::lock_guard<std::mutex> lock(mutex());
      if (!idle().empty()) {
        memory_ = std::move(idle().back());
        idle().pop_back();
      }
    }
    if (static_cast<int64_t>(memory_.size()) < words) memory_ = std::vector<float>(words);
  }
  ~Borrowed() {
    const std::lock_guard<std::mutex> lock(mutex());
    idle().push_back(std::move(memory_));
  }
  Borrowed(const Borrowed&) = delete;
  float* words() { return memory_.data(); }

 private:
  static std::mutex& mutex() {
    static std::mutex* one = new std::mutex;  // never destroyed: threads may run during exit
    return *one;
  }
  static std::vector<std::vector<float>>& idle() {
    static auto* all = new std::vector<std::vector<float>>;
    return *all;
  }
  std::vector<float> memory_;
};

// Write left [M, K] times right [K, N] to y [M, N]. For each stretch of inputs, many panels of the
// right matrix are divided. A task then divides some rows of the left matrix, which stay in its
// cache, and multiplies them by one panel after the other.
void multiply_in_parts(ffi::ThreadPool& pool, const Matrix& left, const Matrix& right, int64_t M,
                       int64_t K, int64_t N, float* y) {
  const int64_t blocks = parts_of(M, kStep), panels = parts_of(N, kStep);
  const int64_t steps = parts_of(K, kStep);
  if (!steps) std::fill(y, y + M * N, 0.0f);
  const int64_t longest = std::max<int64_t>(1, std::min(kLongStretch, steps)) * kStepWords;
  const int64_t together = std::min(panels, kDividedWords / longest);
  Borrowed memory(together * longest);
  float* divided = memory.words();
  for (int64_t s = 0; s < steps; s += kLongStretch)
    for (int64_t g = 0; g < panels; g += together) {
      const int64_t stretch = std::min(kLongStretch, steps - s), words = stretch * kStepWords;
      const int64_t group = std::min(together, panels - g);
      const double inputs = static_cast<double>(stretch * kStep);
      each(pool, parts_of(group, kStrip), 4 * inputs * group * kStep, [&](int64_t i) {
        const int64_t first = i * kStrip, count = std::min(kStrip, group - first);
        divide_right(right, g + first, count, s * kStep, stretch, divided + first * words);
      });
      const int64_t most = std::max<int64_t>(1, kNearWords / words);
      const int64_t threads = std::max<int64_t>(1, pool.num_threads());
      const int64_t share = std::clamp<int64_t>(blocks / (4 * threads), 1, most);
      const double work = inputs * M * group * kStep / kTile;
      each(pool, parts_of(blocks, share), work, [&](int64_t i) {
        const int64_t first = i * share, count = std::min(share, blocks - first);
        thread_local std::vector<float> near;
        if (static_cast<int64_t>(near.size()) < count * words) near.resize(count * words);
        for (int64_t b = 0; b < count; ++b)
          divide_left(left, (first + b) * kStep, s * kStep, stretch, near.data() + b * words);
        const TileShapes shapes;
        for (int64_t p = 0; p < group; ++p)
          for (int64_t b = 0; b < count; ++b) {
            const int64_t row = (first + b) * kStep, output = (g + p) * kStep;
            block_of_parts(near.data() + b * words, divided + p * words, stretch,
                           y + row * N + output, std::min(kStep, M - row),
                           std::min(kStep, N - output), N, s == 0);
          }
      });
    }
}

// Arguments: a [M, K] (or [K, M] with transpose_a), b [K, N] (or [N, K] with transpose_b).
// Result: [M, N].
ffi::Error multiply_floats(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> a, ffi::Buffer<ffi::F32> b,
                           ffi::ResultBuffer<ffi::F32> y, bool transpose_a, bool transpose_b) {
  const auto of_a = a.dimensions(), of_b = b.dimensions(), of_y = y->dimensions();
  const int64_t M = of_a[transpose_a], K = of_a[!transpose_a], N = of_b[!transpose_b];
  if (of_b[transpose_b] != K || of_y[0] != M || of_y[1] != N)
    return ffi::Error::InvalidArgument("multiply: shapes do not fit");
  if (!has_tiles()) return ffi::Error::InvalidArgument("multiply: there is no matrix unit");
  const Matrix left{a.typed_data(), of_a[0], of_a[1], of_a[1], transpose_a};
  const Matrix right{b.typed_data(), of_b[0], of_b[1], of_b[1], transpose_b};
  multiply_in_parts(pool, left, right, M, K, N, y->typed_data());
  return ffi::Error::Success();
}

#else

ffi::Error multiply_floats(ffi::ThreadPool, ffi::Buffer<ffi::F32>, ffi::Buffer<ffi::F32>,
                           ffi::ResultBuffer<ffi::F32>, bool, bool) {
  return ffi::Error::InvalidArgument("multiply: there is no matrix unit");
}

#endif

}  // namespace
