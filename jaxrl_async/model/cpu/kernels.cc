// The sampler's products and its attention on CPUs, as XLA's foreign functions.
//
// product     x [n, D] times packed weights [ceil(E / 32), D, 32] -> [n, E], of the rows in use
// rotate      rotary positions of queries or keys
// attend      one token a row: write its key and value into its page, attend to the row's pages
// attend_new  new tokens of some sequences: attend to the sequence's pages, and among themselves
//
// A row's result does not depend on the other rows of a call: sums run in one order.

#include <cfloat>
#include <type_traits>
#include <vector>

#include "lanes.h"

namespace {

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

struct Shape {
  int64_t H, N, K, G, window;
  float scale, cap;
};

constexpr int kQueries = 4;  // that share what is loaded of keys and values

// Scores of Q queries [K] against columns of keys [K, ld]; out has room for whole lanes of columns.
template <int Q>
void scores_of(const float* const* q, const float* keys, int64_t ld, int64_t columns, int64_t K,
               float* const* out) {
  if (ld % kLanes) {
    for (int h = 0; h < Q; ++h) {
      std::fill(out[h], out[h] + columns, 0.0f);
      for (int64_t d = 0; d < K; ++d)
        for (int64_t t = 0; t < columns; ++t) out[h][t] += q[h][d] * keys[d * ld + t];
    }
    return;
  }
  int64_t t = 0;
  for (; t + kLanes < columns; t += 2 * kLanes) {
    Lanes sums[Q][2]{};
    for (int64_t d = 0; d < K; ++d) {
      const Lanes first = load(keys + d * ld + t), second = load(keys + d * ld + t + kLanes);
      for (int h = 0; h < Q; ++h) {
        sums[h][0] += q[h][d] * first;
        sums[h][1] += q[h][d] * second;
      }
    }
    for (int h = 0; h < Q; ++h) {
      store(out[h] + t, sums[h][0]);
      store(out[h] + t + kLanes, sums[h][1]);
    }
  }
  if (t < columns) {
    Lanes sums[Q]{};
    for (int64_t d = 0; d < K; ++d)
      for (int h = 0; h < Q; ++h) sums[h] += q[h][d] * load(keys + d * ld + t);
    for (int h = 0; h < Q; ++h) store(out[h] + t, sums[h]);
  }
}

// Add values [count, K], rows ld apart, to out [K] of Q queries by their weights [count].
template <int Q>
void values_of(const float* const* weights, const float* values, int64_t ld, int64_t count,
               int64_t K, float* const* out) {
  int64_t k = 0;
  for (; k + 2 * kLanes <= K; k += 2 * kLanes) {
    Lanes sums[Q][2];
    for (int h = 0; h < Q; ++h)
      for (int p = 0; p < 2; ++p) sums[h][p] = load(out[h] + k + p * kLanes);
    for (int64_t t = 0; t < count; ++t) {
      const Lanes first = load(values + t * ld + k), second = load(values + t * ld + k + kLanes);
      for (int h = 0; h < Q; ++h) {
        sums[h][0] += weights[h][t] * first;
        sums[h][1] += weights[h][t] * second;
      }
    }
    for (int h = 0; h < Q; ++h)
      for (int p = 0; p < 2; ++p) store(out[h] + k + p * kLanes, sums[h][p]);
  }
  for (int h = 0; h < Q; ++h)
    for (int64_t t = 0; t < count; ++t)
      for (int64_t i = k; i < K; ++i) out[h][i] += weights[h][t] * values[t * ld + i];
}

// Call go with a number from 1 to kQueries as a constant.
template <int Q = kQueries, typename Go>
void by_number(int count, const Go& go) {
  if constexpr (Q > 0) {
    if (count == Q) return go(std::integral_constant<int, Q>{});
    by_number<Q - 1>(count, go);
  }
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

// Keys [K, key_ld] and values [count, K], rows value_ld apart, of the positions from `first` on.
struct Segment {
  const float *keys, *values;
  int64_t key_ld, value_ld, first, count;
};

// A query at a position: what it attends to goes to `out`.
struct Query {
  const float* q;
  int64_t position;
  const float* sink;
  float* out;
};

int64_t seen_from(int64_t position, const Shape& s) {
  return s.window ? std::max<int64_t>(0, position + 1 - s.window) : 0;
}

// Attend with some queries of one KV head, at most kQueries, to segments of ascending positions.
void attend_together(const Query* queries, int count, const std::vector<Segment>& segments,
                     const Shape& s) {
  thread_local std::vector<float> scores;
  const int64_t base = segments.front().first;
  const int64_t total = segments.back().first + segments.back().count - base;
  const int64_t stride = (total + 3 * kLanes) / kLanes * kLanes;
  if (static_cast<int64_t>(scores.size()) < kQueries * stride) scores.resize(kQueries * stride);
  const float *q[kQueries], *weights[kQueries];
  float *at[kQueries], *out[kQueries], shares[kQueries];
  for (int i = 0; i < count; ++i) q[i] = queries[i].q, out[i] = queries[i].out;
  for (const Segment& segment : segments) {
    for (int i = 0; i < count; ++i) at[i] = scores.data() + i * stride + segment.first - base;
    const auto go = [&](auto tag) {
      scores_of<decltype(tag)::value>(q, segment.keys, segment.key_ld, segment.count, s.K, at);
    };
    by_number(count, go);
  }
  for (int i = 0; i < count; ++i) {
    float* row = scores.data() + i * stride;
    const int64_t position = queries[i].position;
    const int64_t from = std::max<int64_t>(0, seen_from(position, s) - base);
    const int64_t until = position + 1 - base;
    std::fill(row, row + from, 0.0f);
    std::fill(row + until, row + std::max(until, total), 0.0f);
    shares[i] = weigh(row + from, until - from, s, queries[i].sink);
    std::fill(out[i], out[i] + s.K, 0.0f);
  }
  for (const Segment& segment : segments) {
    for (int i = 0; i < count; ++i) weights[i] = scores.data() + i * stride + segment.first - base;
    const auto go = [&](auto tag) {
      values_of<decltype(tag)::value>(weights, segment.values, segment.value_ld, segment.count,
                                      s.K, out);
    };
    by_number(count, go);
  }
  for (int i = 0; i < count; ++i)
    for (int64_t k = 0; k < s.K; ++k) out[i][k] *= shares[i];
}

// Add the pages of a KV head that hold the positions [begin, end) to segments.
void add_pages(const float* keys, const float* values, const int32_t* table, int64_t head,
               int64_t begin, int64_t end, const Shape& s, std::vector<Segment>& segments) {
  for (int64_t i = begin / s.G; i * s.G < end; ++i) {
    const int64_t place = (table[i] * s.N + head) * s.K * s.G, first = i * s.G;
    segments.push_back(
        {keys + place, values + place, s.G, s.K, first, std::min(s.G, end - first)});
  }
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
  if (qs[2] != s.K || s.H % s.N)
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
    thread_local std::vector<Segment> segments;
    segments.clear();
    add_pages(key_pages, value_pages, table, head, seen_from(position, s), position + 1, s,
              segments);
    for (int64_t h = 0; h < g; h += kQueries) {
      Query queries[kQueries];
      const int some = static_cast<int>(std::min<int64_t>(kQueries, g - h));
      for (int i = 0; i < some; ++i) {
        const int64_t number = head * g + h + i;
        queries[i] = {q.typed_data() + (r * s.H + number) * s.K, position,
                      has_sinks ? sinks.typed_data() + number : nullptr, to + (h + i) * s.K};
      }
      attend_together(queries, some, segments, s);
    }
  });
  return ffi::Error::Success();
}

// Arguments: queries [n, H, K], keys and values [n, N, K] of new tokens; pages [P, N, K, G] and
// [P, N, G, K] of what is before them; tables [B, W]; of each sequence where in n its tokens begin
// [B], how many are in pages [B], and how many are new [B]; sinks [H] or [0]. Result: [n, H, K].
ffi::Error attend_new(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k,
                      ffi::Buffer<ffi::F32> v, ffi::Buffer<ffi::F32> keys,
                      ffi::Buffer<ffi::F32> values, ffi::Buffer<ffi::S32> tables,
                      ffi::Buffer<ffi::S32> begins, ffi::Buffer<ffi::S32> starts,
                      ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::F32> sinks,
                      ffi::ResultBuffer<ffi::F32> out, int64_t window, float scale, float cap) {
  const auto qs = q.dimensions(), ks = keys.dimensions();
  const int64_t n = qs[0], B = tables.dimensions()[0], W = tables.dimensions()[1];
  const Shape s{qs[1], ks[1], ks[2], ks[3], window, scale, cap};
  if (qs[2] != s.K || s.H % s.N)
    return ffi::Error::InvalidArgument("attend_new: shapes do not fit");
  constexpr int64_t kTile = 32;  // tokens of a task
  struct Task {
    int64_t sequence, first;
  };
  std::vector<Task> tasks;
  double work = 0;
  for (int64_t b = 0; b < B; ++b) {
    const int64_t begin = begins.typed_data()[b], count = lengths.typed_data()[b];
    const int64_t start = starts.typed_data()[b];
    if (begin < 0 || count < 0 || begin + count > n || start < 0 || start > W * s.G)
      return ffi::Error::InvalidArgument("attend_new: a sequence does not fit");
    for (int64_t i = 0; i < count; i += kTile) tasks.push_back({b, i});
    work += 2.0 * count * (start + count) * s.H * s.K;
  }
  std::fill(out->typed_data(), out->typed_data() + n * s.H * s.K, 0.0f);
  const int64_t g = s.H / s.N;
  each(pool, static_cast<int64_t>(tasks.size()) * s.N, work, [&](int64_t number) {
    const Task task = tasks[number / s.N];
    const int64_t head = number % s.N, b = task.sequence;
    const int64_t begin = begins.typed_data()[b], start = starts.typed_data()[b];
    const int64_t until = std::min<int64_t>(task.first + kTile, lengths.typed_data()[b]);
    const int64_t seen = seen_from(start + task.first, s);  // of the first token of the tile
    const int64_t from = std::max<int64_t>(0, seen - start), count = until - from;
    const int64_t ld = (count + kLanes - 1) / kLanes * kLanes;
    thread_local std::vector<float> turned;  // [K, ld] keys of the new tokens
    turned.assign(s.K * ld, 0.0f);
    for (int64_t t = 0; t < count; ++t) {
      const float* key = k.typed_data() + ((begin + from + t) * s.N + head) * s.K;
      for (int64_t d = 0; d < s.K; ++d) turned[d * ld + t] = key[d];
    }
    thread_local std::vector<Segment> segments;
    segments.clear();
    if (seen < start)
      add_pages(keys.typed_data(), values.typed_data(), tables.typed_data() + b * W, head, seen,
                start, s, segments);
    segments.push_back({turned.data(), v.typed_data() + ((begin + from) * s.N + head) * s.K, ld,
                        s.N * s.K, start + from, count});
    Query queries[kQueries];
    int some = 0;
    for (int64_t i = task.first; i < until; ++i)
      for (int64_t h = head * g; h < (head + 1) * g; ++h) {
        const int64_t place = ((begin + i) * s.H + h) * s.K;
        queries[some++] = {q.typed_data() + place, start + i,
                           sinks.element_count() ? sinks.typed_data() + h : nullptr,
                           out->typed_data() + place};
        if (some == kQueries || (i + 1 == until && h + 1 == (head + 1) * g)) {
          segments.back().count = i + 1 - from;  // the last of them sees no further
          attend_together(queries, some, segments, s);
          some = 0;
        }
      }
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrl_async_attend_new, attend_new,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("window")
                                  .Attr<float>("scale")
                                  .Attr<float>("cap"));
