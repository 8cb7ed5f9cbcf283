// The sampler's attention, for one token per row and for new tokens of some sequences.

#pragma once

#include <cfloat>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "tasks.h"

namespace {

struct Shape {
  int64_t H, N, K, G, window;
  float scale, cap;
};

constexpr int kQueries = 4;  // queries that share loaded keys and values
constexpr int64_t kFewRows = 8;  // for fewer rows, heads are divided among threads

// Prefetch the content of two registers.
inline void fetch(const float* p) {
  __builtin_prefetch(p);
  __builtin_prefetch(p + kLanes);
}

// Scores of Q queries [K] with columns of keys [K, ld]; out has room for whole lanes of columns.
// next: numbers of the same shape that are read next, to prefetch.
template <int Q>
void scores_of(const float* const* q, const float* keys, int64_t ld, int64_t columns, int64_t K,
               float* const* out, const float* next) {
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
      fetch(next + d * ld + t);
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
    for (int64_t d = 0; d < K; ++d) {
      fetch(next + d * ld + t);
      for (int h = 0; h < Q; ++h) sums[h] += q[h][d] * load(keys + d * ld + t);
    }
    for (int h = 0; h < Q; ++h) store(out[h] + t, sums[h]);
  }
}

// Add values [count, K], rows ld apart, to out [K] of Q queries by their weights [count]; next: see
// scores_of.
template <int Q>
void values_of(const float* const* weights, const float* values, int64_t ld, int64_t count,
               int64_t K, float* const* out, const float* next) {
  int64_t k = 0;
  const auto some = [&](auto parts) {
    constexpr int P = decltype(parts)::value;  // registers of K
    Lanes sums[Q][P];
    for (int h = 0; h < Q; ++h)
      for (int p = 0; p < P; ++p) sums[h][p] = load(out[h] + k + p * kLanes);
    for (int64_t t = 0; t < count; ++t) {
      const float* from = values + t * ld + k;
      for (int p = 0; p < P; p += 2) fetch(next + t * ld + k + p * kLanes);
      for (int h = 0; h < Q; ++h)
        for (int p = 0; p < P; ++p) sums[h][p] += weights[h][t] * load(from + p * kLanes);
    }
    for (int h = 0; h < Q; ++h)
      for (int p = 0; p < P; ++p) store(out[h] + k + p * kLanes, sums[h][p]);
    k += P * kLanes;
  };
  while (k + 4 * kLanes <= K) some(std::integral_constant<int, 4>{});
  while (k + 2 * kLanes <= K) some(std::integral_constant<int, 2>{});
  for (int h = 0; h < Q; ++h)
    for (int64_t t = 0; t < count; ++t)
      for (int64_t i = k; i < K; ++i) out[h][i] += weights[h][t] * values[t * ld + i];
}

// Call go with a constant from 1 to kQueries.
template <int Q = kQueries, typename Go>
void by_number(int count, const Go& go) {
  if constexpr (Q > 0) {
    if (count == Q) return go(std::integral_constant<int, Q>{});
    by_number<Q - 1>(count, go);
  }
}

// Convert scores [count] to unnormalised weights, in place; return 1 / their sum.
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

// Keys [K, key_ld] and values [count, K], rows value_ld apart, for positions from `first` on.
struct Segment {
  const float *keys, *values;
  int64_t key_ld, value_ld, first, count;
};

// A query at a position; its output is written to `out`.
struct Query {
  const float* q;
  int64_t position;
  const float* sink;
  float* out;
};

int64_t seen_from(int64_t position, const Shape& s) {
  return s.window ? std::max<int64_t>(0, position + 1 - s.window) : 0;
}

// Queries of one KV head, at most kQueries; its keys and values are at `offset` in a segment.
struct Group {
  Query queries[kQueries];
  int count;
  int64_t offset;
};

// Attend with groups of queries of one sequence to segments of ascending positions, one segment
// after the other, in memory order.
void attend_together(const std::vector<Group>& groups, const std::vector<Segment>& segments,
                     const Shape& s) {
  thread_local std::vector<float> scores, shares;
  const int64_t base = segments.front().first, many = static_cast<int64_t>(groups.size());
  const int64_t total = segments.back().first + segments.back().count - base;
  const int64_t stride = (total + 3 * kLanes) / kLanes * kLanes;
  scores.resize(std::max<int64_t>(scores.size(), many * kQueries * stride));
  shares.resize(many * kQueries);
  const auto row = [&](int64_t g, int i) { return scores.data() + (g * kQueries + i) * stride; };
  const Segment *const begin = segments.data(), *const end = begin + segments.size();
  for (const Segment* segment = begin; segment < end; ++segment)
    for (int64_t g = 0; g < many; ++g) {
      const Group& group = groups[g];
      const float *q[kQueries], *keys = segment->keys + group.offset;
      float* at[kQueries];
      for (int i = 0; i < group.count; ++i) {
        q[i] = group.queries[i].q;
        at[i] = row(g, i) + segment->first - base;
      }
      const float* next = g + 1 < many          ? segment->keys + groups[g + 1].offset
                          : segment + 1 < end ? segment[1].keys + groups[0].offset
                                              : begin->values + groups[0].offset;
      by_number(group.count, [&](auto tag) {
        scores_of<decltype(tag)::value>(q, keys, segment->key_ld, segment->count, s.K, at, next);
      });
    }
  for (int64_t g = 0; g < many; ++g)
    for (int i = 0; i < groups[g].count; ++i) {
      const Query& query = groups[g].queries[i];
      float* weights = row(g, i);
      const int64_t from = std::max<int64_t>(0, seen_from(query.position, s) - base);
      const int64_t until = query.position + 1 - base;
      std::fill(weights, weights + from, 0.0f);
      std::fill(weights + until, weights + std::max(until, total), 0.0f);
      shares[g * kQueries + i] = weigh(weights + from, until - from, s, query.sink);
      std::fill(query.out, query.out + s.K, 0.0f);
    }
  for (const Segment* segment = begin; segment < end; ++segment)
    for (int64_t g = 0; g < many; ++g) {
      const Group& group = groups[g];
      const float *weights[kQueries], *values = segment->values + group.offset;
      float* out[kQueries];
      for (int i = 0; i < group.count; ++i) {
        out[i] = group.queries[i].out;
        weights[i] = row(g, i) + segment->first - base;
      }
      const float* next = g + 1 < many          ? segment->values + groups[g + 1].offset
                          : segment + 1 < end ? segment[1].values + groups[0].offset
                                              : values;
      by_number(group.count, [&](auto tag) {
        values_of<decltype(tag)::value>(weights, values, segment->value_ld, segment->count, s.K,
                                        out, next);
      });
    }
  for (int64_t g = 0; g < many; ++g)
    for (int i = 0; i < groups[g].count; ++i)
      for (int64_t k = 0; k < s.K; ++k) groups[g].queries[i].out[k] *= shares[g * kQueries + i];
}

// Add the pages of a KV head that hold the positions [begin, end) to segments.
void add_pages(const float* keys, const float* values, const int32_t* table, int64_t head,
               int64_t begin, int64_t end, const Shape& s, std::vector<Segment>& segments) {
  for (int64_t i = begin / s.G; i * s.G < end; ++i) {
    const int64_t offset = (table[i] * s.N + head) * s.K * s.G, first = i * s.G;
    segments.push_back(
        {keys + offset, values + offset, s.G, s.K, first, std::min(s.G, end - first)});
  }
}

// Pages of keys [P, N, K, G] and values [P, N, G, K], and the tables of the rows [R, W].
struct Pages {
  float *keys, *values;
  const int32_t* tables;
  int64_t W, P;
};

// A row's new queries [H, K], key and value [N, K], output and position.
struct NewToken {
  const float *q, *k, *v;
  float* out;
  int64_t position;
};

// Write keys and values of KV heads [first, last) of a token of row r into its page, and attend to
// the row's pages with the queries of those heads.
void attend_row(const NewToken& token, int64_t r, int64_t first, int64_t last, const Pages& pages,
                const float* sinks, const Shape& s) {
  const int64_t g = s.H / s.N, position = token.position;
  const int32_t* table = pages.tables + r * pages.W;
  if (position < 0 || position / s.G >= pages.W || table[position / s.G] >= pages.P) {
    std::fill(token.out + first * g * s.K, token.out + last * g * s.K, 0.0f);
    return;
  }
  thread_local std::vector<Segment> segments;
  thread_local std::vector<Group> groups;
  segments.clear();
  groups.clear();
  const int64_t column = position % s.G;
  for (int64_t head = first; head < last; ++head) {
    const int64_t offset = (table[position / s.G] * s.N + head) * s.K * s.G;
    for (int64_t d = 0; d < s.K; ++d)
      pages.keys[offset + d * s.G + column] = token.k[head * s.K + d];
    std::memcpy(pages.values + offset + column * s.K, token.v + head * s.K, s.K * sizeof(float));
    for (int64_t h = head * g; h < (head + 1) * g; h += kQueries) {
      Group group;
      group.count = static_cast<int>(std::min<int64_t>(kQueries, (head + 1) * g - h));
      group.offset = (head - first) * s.K * s.G;
      for (int i = 0; i < group.count; ++i)
        group.queries[i] = {token.q + (h + i) * s.K, position, sinks ? sinks + h + i : nullptr,
                            token.out + (h + i) * s.K};
      groups.push_back(group);
    }
  }
  add_pages(pages.keys, pages.values, table, first, seen_from(position, s), position + 1, s,
            segments);
  attend_together(groups, segments, s);
}

// Arguments: queries [R, H, K], new keys and values [R, N, K], pages [P, N, K, G] and [P, N, G, K],
// tables [R, W], positions [R] (-1: the row has ended, it writes nothing and gets zeros), sinks [H]
// or [0]. Results: [R, H, K], and the pages, in the arguments' memory.
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
  if (key_pages != keys.typed_data()) {  // XLA has not aliased arguments and results
    std::memcpy(key_pages, keys.typed_data(), keys.size_bytes());
    std::memcpy(value_pages, values.typed_data(), values.size_bytes());
  }
  const Pages pages{key_pages, value_pages, tables.typed_data(), W, P};
  const float* logits = sinks.element_count() ? sinks.typed_data() : nullptr;
  int64_t longest = 0;
  for (int64_t r = 0; r < R; ++r) longest = std::max<int64_t>(longest, positions.typed_data()[r]);
  const int64_t parts = R < kFewRows ? s.N : 1;  // number of parts of the heads
  each(pool, R * parts, 2.0 * R * s.H * s.K * (longest + 1), [&](int64_t task) {
    const int64_t r = task / parts, first = task % parts * (s.N / parts);
    const NewToken token{q.typed_data() + r * s.H * s.K, k.typed_data() + r * s.N * s.K,
                         v.typed_data() + r * s.N * s.K, out->typed_data() + r * s.H * s.K,
                         positions.typed_data()[r]};
    attend_row(token, r, first, first + s.N / parts, pages, logits, s);
  });
  return ffi::Error::Success();
}

// Arguments: queries [n, H, K], keys and values [n, N, K] of new tokens; pages [P, N, K, G] and
// [P, N, G, K] of earlier tokens; tables [B, W]; for each sequence the index of its first new token
// [B], its number of tokens in pages [B] and of new tokens [B]; sinks [H] or [0]. Result: [n, H, K]
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
    const int64_t seen = seen_from(start + task.first, s);  // for the first token of the tile
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
    thread_local std::vector<Group> one(1);
    Group& group = one.front();
    group.count = 0;
    for (int64_t i = task.first; i < until; ++i)
      for (int64_t h = head * g; h < (head + 1) * g; ++h) {
        const int64_t offset = ((begin + i) * s.H + h) * s.K;
        group.queries[group.count++] = {q.typed_data() + offset, start + i,
                                        sinks.element_count() ? sinks.typed_data() + h : nullptr,
                                        out->typed_data() + offset};
        if (group.count == kQueries || (i + 1 == until && h + 1 == (head + 1) * g)) {
          segments.back().count = i + 1 - from;  // up to the last query's own token
          attend_together(one, segments, s);
          group.count = 0;
        }
      }
  });
  return ffi::Error::Success();
}

}  // namespace
