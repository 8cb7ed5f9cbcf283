// The sampler's products and its attention on CPUs, as XLA's foreign functions.
//
// product   x [n, D] times packed weights [ceil(E / 32), D, 32] -> [n, E], of the rows in use
// rotate    rotary positions of queries or keys
// attend    one token a row: write its key and value into its page, attend to the row's pages
//
// A row's result does not depend on the other rows of a call: sums run in one order.

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 12;  // 24 of 32 registers hold sums
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kLanes = 8, kRows = 3;  // 12 of 16
#else
#error "needs AVX2 and FMA, without which XLA's own products are faster"
#endif
constexpr int kPanel = 32;  // outputs of a panel of packed weights
constexpr int kParts = kPanel / kLanes;
constexpr int64_t kDepth = 1024;    // inputs that a panel sums before it goes back to memory
constexpr double kLittle = 1 << 18;  // multiplications that another thread is woken for

typedef float Lanes __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

inline Lanes load(const float* p) { return *reinterpret_cast<const Lanes*>(p); }
inline void store(float* p, Lanes v) { *reinterpret_cast<Lanes*>(p) = v; }

// ---- tasks on XLA's threads

// Run task(0) to task(count - 1); the caller takes part, and returns when all are done.
template <typename Task>
void each(ffi::ThreadPool& pool, int64_t count, double work, const Task& task) {
  const int64_t threads = std::min<int64_t>(
      {count, std::max<int64_t>(1, pool.num_threads()), 1 + static_cast<int64_t>(work / kLittle)});
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto shared = std::make_shared<Shared>();
  const Task* work_of = &task;  // read only while tasks are left, so while the caller waits
  auto take = [shared, count, work_of] {
    for (int64_t i; (i = shared->next.fetch_add(1)) < count;) {
      (*work_of)(i);
      shared->done.fetch_add(1);
    }
  };
  for (int64_t i = 1; i < threads; ++i) pool.Schedule(decltype(take)(take));
  take();
  while (shared->done.load() < count) std::this_thread::yield();
}

// ---- product

// Add inputs [depth] of rows [R] times panels [P, depth, 32] to y [R, P * 32]. Panels of few rows go
// together, for sums enough to hide the latency of additions.
template <int R, int P>
void tile(const float* x, int64_t x_stride, const float* panels, int64_t panel_stride,
          int64_t depth, float* y, int64_t y_stride, bool first) {
  constexpr int kAll = P * kParts;
  Lanes sums[R][kAll];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < kAll; ++p)
      sums[r][p] = first ? Lanes{} : load(y + r * y_stride + p * kLanes);
  for (int64_t d = 0; d < depth; ++d) {
    Lanes weights[kAll];
    for (int p = 0; p < kAll; ++p)
      weights[p] = load(panels + p / kParts * panel_stride + d * kPanel + p % kParts * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int p = 0; p < kAll; ++p) sums[r][p] += x[r * x_stride + d] * weights[p];
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < kAll; ++p) store(y + r * y_stride + p * kLanes, sums[r][p]);
}

template <int P, int R = P == 1 ? kRows : 2>
void tile_of(int rows, const float* x, int64_t x_stride, const float* panels, int64_t panel_stride,
             int64_t depth, float* y, int64_t y_stride, bool first) {
  if constexpr (R > 0) {
    if (rows == R)
      return tile<R, P>(x, x_stride, panels, panel_stride, depth, y, y_stride, first);
    tile_of<P, R - 1>(rows, x, x_stride, panels, panel_stride, depth, y, y_stride, first);
  }
}

// Multiply all rows with P panels; `width` of their outputs exist: all, unless P is 1.
template <int P>
void panel_product(const float* x, int64_t n, int64_t D, const float* panels, float* y, int64_t E,
                   int width) {
  float last[kRows * kPanel];
  for (int64_t r = 0; r < n; r += kRows) {
    const int rows = static_cast<int>(std::min<int64_t>(kRows, n - r));
    const bool whole = width == P * kPanel;
    float* out = whole ? y + r * E : last;
    for (int64_t d = 0; d < D; d += kDepth)
      tile_of<P>(rows, x + r * D + d, D, panels + d * kPanel, D * kPanel, std::min(kDepth, D - d),
                 out, whole ? E : kPanel, d == 0);
    for (int i = 0; i < rows && !whole; ++i)
      std::memcpy(y + (r + i) * E, last + i * kPanel, width * sizeof(float));
  }
}

// Multiply all rows [n, D] with all panels.
void whole_product(ffi::ThreadPool& pool, const float* x, int64_t n, int64_t D, const float* w,
                   float* y, int64_t E) {
  const int64_t panels = (E + kPanel - 1) / kPanel, together = n <= 2 ? 4 : 1;
  each(pool, (panels + together - 1) / together, static_cast<double>(n) * D * E, [&](int64_t i) {
    const int64_t first = i * together, left = E - first * kPanel;
    if (together == 4 && left >= 4 * kPanel)
      return panel_product<4>(x, n, D, w + first * D * kPanel, y + first * kPanel, E, 4 * kPanel);
    for (int64_t p = first; p < std::min(first + together, panels); ++p)
      panel_product<1>(x, n, D, w + p * D * kPanel, y + p * kPanel, E,
                       static_cast<int>(std::min<int64_t>(kPanel, E - p * kPanel)));
  });
}

// Arguments: x [n, D], packed weights, used [n] or [0]: rows that are computed; the others are 0.
ffi::Error product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> weight,
                   ffi::Buffer<ffi::PRED> used, ffi::ResultBuffer<ffi::F32> y) {
  const int64_t n = x.dimensions()[0], D = x.dimensions()[1], E = y->dimensions()[1];
  if (weight.dimensions()[1] != D || (E + kPanel - 1) / kPanel != weight.dimensions()[0])
    return ffi::Error::InvalidArgument("product: shapes do not fit");
  const float *from = x.typed_data(), *w = weight.typed_data();
  float* to = y->typed_data();
  const bool* is_used = used.element_count() ? used.typed_data() : nullptr;
  const int64_t count = is_used ? std::count(is_used, is_used + n, true) : n;
  const bool leads = !is_used || std::find(is_used, is_used + n, false) - is_used == count;
  if (leads) {  // the used rows are the first ones
    whole_product(pool, from, count, D, w, to, E);
    std::fill(to + count * E, to + n * E, 0.0f);
    return ffi::Error::Success();
  }
  thread_local std::vector<float> inputs, outputs;
  inputs.resize(count * D);
  outputs.resize(count * E);
  for (int64_t r = 0, i = 0; r < n; ++r)
    if (is_used[r]) std::memcpy(inputs.data() + i++ * D, from + r * D, D * sizeof(float));
  whole_product(pool, inputs.data(), count, D, w, outputs.data(), E);
  for (int64_t r = 0, i = 0; r < n; ++r) {
    if (is_used[r])
      std::memcpy(to + r * E, outputs.data() + i++ * E, E * sizeof(float));
    else
      std::fill(to + r * E, to + (r + 1) * E, 0.0f);
  }
  return ffi::Error::Success();
}

// ---- attention

// e**x for x <= 0, to about 1e-7 of it: 2**n times a polynomial on [-ln 2 / 2, ln 2 / 2].
inline float exponential(float x) {
  x = std::max(x, -87.0f);
  const float n = std::nearbyint(x * 1.44269504088896341f);
  float r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

struct Shape {
  int64_t H, N, K, G, window;
  float scale, cap;
};

// Scores of G queries against the tokens of a page: queries [g, K], keys [K, G] -> [g, stride].
void page_scores(const float* q, const float* keys, int g, const Shape& s, float* scores,
                 int64_t stride) {
  if (s.G % kLanes == 0) {
    for (int h = 0; h < g; ++h)
      for (int64_t t = 0; t < s.G; t += 2 * kLanes) {
        const bool both = t + 2 * kLanes <= s.G;
        Lanes a{}, b{};
        for (int64_t d = 0; d < s.K; ++d) {
          const float one = q[h * s.K + d];
          a += one * load(keys + d * s.G + t);
          if (both) b += one * load(keys + d * s.G + t + kLanes);
        }
        store(scores + h * stride + t, a);
        if (both) store(scores + h * stride + t + kLanes, b);
      }
    return;
  }
  for (int h = 0; h < g; ++h) {
    float* out = scores + h * stride;
    std::fill(out, out + s.G, 0.0f);
    for (int64_t d = 0; d < s.K; ++d)
      for (int64_t t = 0; t < s.G; ++t) out[t] += q[h * s.K + d] * keys[d * s.G + t];
  }
}

// Add the values [count, K] of some tokens by their weights [g, stride] to out [g, K].
void page_values(const float* weights, int64_t stride, const float* values, int64_t count, int g,
                 int64_t K, float* out) {
  constexpr int kWide = 4;
  int64_t k = 0;
  for (; k + kWide * kLanes <= K; k += kWide * kLanes)
    for (int h = 0; h < g; ++h) {
      Lanes sums[kWide];
      for (int p = 0; p < kWide; ++p) sums[p] = load(out + h * K + k + p * kLanes);
      for (int64_t t = 0; t < count; ++t)
        for (int p = 0; p < kWide; ++p)
          sums[p] += weights[h * stride + t] * load(values + t * K + k + p * kLanes);
      for (int p = 0; p < kWide; ++p) store(out + h * K + k + p * kLanes, sums[p]);
    }
  for (int h = 0; h < g; ++h)
    for (int64_t t = 0; t < count; ++t)
      for (int64_t i = k; i < K; ++i) out[h * K + i] += weights[h * stride + t] * values[t * K + i];
}

// Turn scores [count] into weights, in place, and return what divides their sum.
float weigh(float* scores, int64_t count, const Shape& s, const float* sink) {
  float largest = sink ? *sink : -FLT_MAX;
  if (s.cap != 0.0f) {
    for (int64_t t = 0; t < count; ++t) scores[t] = s.cap * std::tanh(scores[t] * s.scale / s.cap);
  } else {
    for (int64_t t = 0; t < count; ++t) scores[t] *= s.scale;
  }
  float part[kLanes];
  std::fill(part, part + kLanes, largest);
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t t = 0; t < whole; t += kLanes)
    for (int l = 0; l < kLanes; ++l) part[l] = part[l] < scores[t + l] ? scores[t + l] : part[l];
  for (int64_t t = whole; t < count; ++t) part[0] = std::max(part[0], scores[t]);
  largest = *std::max_element(part, part + kLanes);
  for (int64_t t = 0; t < count; ++t) scores[t] = exponential(scores[t] - largest);
  std::fill(part, part + kLanes, 0.0f);
  for (int64_t t = 0; t < whole; t += kLanes)
    for (int l = 0; l < kLanes; ++l) part[l] += scores[t + l];
  float sum = sink ? exponential(*sink - largest) : 0.0f;
  for (int l = 0; l < kLanes; ++l) sum += part[l];
  for (int64_t t = whole; t < count; ++t) sum += scores[t];
  return 1.0f / sum;
}

// Attend with the queries [g, K] of one KV head of a row to its tokens at [begin, position].
void attend_head(const float* q, const float* keys, const float* values, const int32_t* table,
                 int64_t head, int64_t position, const float* sinks, const Shape& s, float* out) {
  const int g = static_cast<int>(s.H / s.N);
  const int64_t begin = s.window ? std::max<int64_t>(0, position + 1 - s.window) : 0;
  const int64_t first = begin / s.G, last = position / s.G;
  const int64_t stride = (last - first + 1) * s.G, page = s.N * s.K * s.G;
  thread_local std::vector<float> scores;
  if (static_cast<int64_t>(scores.size()) < g * stride) scores.resize(g * stride);
  for (int64_t i = first; i <= last; ++i)
    page_scores(q, keys + table[i] * page + head * s.K * s.G, g, s,
                scores.data() + (i - first) * s.G, stride);
  const int64_t skipped = begin - first * s.G, count = position + 1 - begin;
  float shares[64];
  for (int h = 0; h < g; ++h)
    shares[h] =
        weigh(scores.data() + h * stride + skipped, count, s, sinks ? sinks + h : nullptr);
  std::fill(out, out + g * s.K, 0.0f);
  for (int64_t i = first; i <= last; ++i) {
    const int64_t from = std::max(begin, i * s.G), until = std::min(position + 1, (i + 1) * s.G);
    page_values(scores.data() + from - first * s.G, stride,
                values + table[i] * page + (head * s.G + from - i * s.G) * s.K, until - from, g,
                s.K, out);
  }
  for (int h = 0; h < g; ++h)
    for (int64_t k = 0; k < s.K; ++k) out[h * s.K + k] *= shares[h];
}

// Arguments: queries [R, H, K], new keys and values [R, N, K], pages [P, N, K, G] and [P, N, G, K],
// tables [R, W], positions [R] (-1: the row has ended, it writes nothing and gets zeros), sinks [H]
// or [0]. Results: [R, H, K], and the pages, which are the arguments' own memory.
ffi::Error attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k,
                  ffi::Buffer<ffi::F32> v, ffi::Buffer<ffi::F32> keys,
                  ffi::Buffer<ffi::F32> values, ffi::Buffer<ffi::S32> tables,
                  ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::F32> sinks,
                  ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::F32> new_keys,
                  ffi::ResultBuffer<ffi::F32> new_values, int64_t window, float scale, float cap) {
  const auto qs = q.dimensions(), ks = keys.dimensions();
  const int64_t R = qs[0], W = tables.dimensions()[1], P = ks[0];
  const Shape s{qs[1], ks[1], ks[2], ks[3], window, scale, cap};
  if (qs[2] != s.K || s.H % s.N || s.H / s.N > 64)
    return ffi::Error::InvalidArgument("attend: shapes do not fit");
  float *key_pages = new_keys->typed_data(), *value_pages = new_values->typed_data();
  if (key_pages != keys.typed_data()) {  // XLA has not given one memory to both
    std::memcpy(key_pages, keys.typed_data(), keys.size_bytes());
    std::memcpy(value_pages, values.typed_data(), values.size_bytes());
  }
  const bool has_sinks = sinks.element_count() > 0;
  const int64_t g = s.H / s.N;
  int64_t longest = 0;
  for (int64_t r = 0; r < R; ++r) longest = std::max<int64_t>(longest, positions.typed_data()[r]);
  each(pool, R * s.N, 2.0 * R * s.H * s.K * (longest + 1), [&](int64_t task) {
    const int64_t r = task / s.N, head = task % s.N, position = positions.typed_data()[r];
    const int32_t* table = tables.typed_data() + r * W;
    float* to = out->typed_data() + (r * s.H + head * g) * s.K;
    if (position < 0 || position / s.G >= W || table[position / s.G] >= P) {
      std::fill(to, to + g * s.K, 0.0f);
      return;
    }
    const int64_t page = table[position / s.G], column = position % s.G;
    float* key = key_pages + (page * s.N + head) * s.K * s.G + column;
    const int64_t from = (r * s.N + head) * s.K;
    for (int64_t d = 0; d < s.K; ++d) key[d * s.G] = k.typed_data()[from + d];
    std::memcpy(value_pages + ((page * s.N + head) * s.G + column) * s.K, v.typed_data() + from,
                s.K * sizeof(float));
    attend_head(q.typed_data() + (r * s.H + head * g) * s.K, key_pages, value_pages, table, head,
                position, has_sinks ? sinks.typed_data() + head * g : nullptr, s, to);
  });
  return ffi::Error::Success();
}

// ---- rotary positions

// Rotate pairs (i, i + T) of the first 2 T components of x [n, heads, K] by cos and sin [n, T].
ffi::Error rotate(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                  ffi::ResultBuffer<ffi::F32> y) {
  const auto shape = x.dimensions();
  const int64_t n = shape[0], heads = shape[1], K = shape[2], T = cos.dimensions()[1];
  if (2 * T > K || cos.dimensions()[0] != n)
    return ffi::Error::InvalidArgument("rotate: shapes do not fit");
  for (int64_t i = 0; i < n; ++i) {
    const float *c = cos.typed_data() + i * T, *s = sin.typed_data() + i * T;
    for (int64_t h = 0; h < heads; ++h) {
      const float* from = x.typed_data() + (i * heads + h) * K;
      float* to = y->typed_data() + (i * heads + h) * K;
      for (int64_t t = 0; t < T; ++t) {
        const float a = from[t], b = from[t + T];
        to[t] = a * c[t] - b * s[t];
        to[t + T] = b * c[t] + a * s[t];
      }
      for (int64_t t = 2 * T; t < K; ++t) to[t] = from[t];
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrl_async_rotate, rotate,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrl_async_product, product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrl_async_attend, attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("window")
                                  .Attr<float>("scale")
                                  .Attr<float>("cap"));
