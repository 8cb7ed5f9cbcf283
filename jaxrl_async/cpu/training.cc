// Kernels of an update on CPUs, in addition to XLA's products, as XLA FFI handlers.
//
// flash, flash_back   causal attention within the segments of packed rows, or within trees of
//                     shared prefixes, and its gradient
// multiply            products of matrices by the matrix unit, if the CPU has one (parts.h)
// choose, choose_back log-prob of each row's target and entropy of its logits, and their gradient
//
// Results do not depend on the number of threads: one task computes each sum, in a fixed order.

#include <cfloat>
#include <vector>

#include "parts.h"
#include "tasks.h"

namespace {

// ---- products of blocks

// A strided matrix: element (row, column) at data[row * row_step + column * column_step].
struct Left {
  const float* data;
  int64_t row_step, column_step;
  const float* at(int64_t row, int64_t column) const {
    return data + row * row_step + column * column_step;
  }
};

// Set y [R, 32] to the product of x [R, depth] and a panel [depth, 32]; unless `fresh`, add it.
template <int R>
void block(Left x, const float* panel, int64_t depth, float* y, int64_t y_step, bool fresh) {
  Lanes sums[R][kParts];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < kParts; ++p)
      sums[r][p] = fresh ? Lanes{} : load(y + r * y_step + p * kLanes);
  for (int64_t d = 0; d < depth; ++d) {
    Lanes right[kParts];
    for (int p = 0; p < kParts; ++p) right[p] = load(panel + d * kPanel + p * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const float left = *x.at(r, d);
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) sums[r][p] += left * right[p];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < kParts; ++p) store(y + r * y_step + p * kLanes, sums[r][p]);
}

template <int R = kRows>
void block_of(int rows, Left x, const float* panel, int64_t depth, float* y, int64_t y_step,
              bool fresh) {
  if constexpr (R > 0) {
    if (rows == R) return block<R>(x, panel, depth, y, y_step, fresh);
    block_of<R - 1>(rows, x, panel, depth, y, y_step, fresh);
  }
}

// Set or add to y [rows, panels * 32] the product of x [rows, depth] and panels `panel_step` apart.
void multiply(Left x, int64_t rows, const float* panels, int64_t panel_step, int64_t count,
              int64_t depth, float* y, int64_t y_step, bool fresh) {
  for (int64_t p = 0; p < count; ++p)
    for (int64_t r = 0; r < rows; r += kRows) {
      const Left part{x.at(r, 0), x.row_step, x.column_step};
      block_of(static_cast<int>(std::min<int64_t>(kRows, rows - r)), part, panels + p * panel_step,
               depth, y + r * y_step + p * kPanel, y_step, fresh);
    }
}

int64_t whole_panels(int64_t n) { return (n + kPanel - 1) / kPanel; }

// Copy x [count, width], rows `step` apart, into panels of its columns: [panels, count, 32].
void lay_rows(const float* x, int64_t step, int64_t count, int64_t width,
              std::vector<float>& panels) {
  panels.assign(whole_panels(width) * kPanel * count, 0.0f);
  for (int64_t t = 0; t < count; ++t)
    for (int64_t d = 0; d < width; d += kPanel)
      std::memcpy(panels.data() + (d / kPanel * count + t) * kPanel, x + t * step + d,
                  std::min<int64_t>(kPanel, width - d) * sizeof(float));
}

// Copy x [count, width], rows `step` apart, into panels of its rows: [panels, width, 32].
void lay_columns(const float* x, int64_t step, int64_t count, int64_t width,
                 std::vector<float>& panels) {
  panels.assign(whole_panels(count) * kPanel * width, 0.0f);
  for (int64_t t = 0; t < count; ++t) {
    float* to = panels.data() + t / kPanel * kPanel * width + t % kPanel;
    for (int64_t d = 0; d < width; ++d) to[d * kPanel] = x[t * step + d];
  }
}

// ---- attention

constexpr int64_t kQueries = kPanel;  // queries of a block; its last panel of keys is their own
constexpr float kUnseen = -FLT_MAX;   // score of a key that is not visible to a query

struct Heads {
  int64_t B, T, H, N, K, window;
  float scale, cap;

  int64_t query(int64_t b, int64_t t, int64_t h) const { return ((b * T + t) * H + h) * K; }
  int64_t key(int64_t b, int64_t t, int64_t n) const { return ((b * T + t) * N + n) * K; }
  int64_t number(int64_t b, int64_t t, int64_t h) const { return (b * H + h) * T + t; }
};

// Consecutive tokens of a row that see no other tokens: a segment, or contexts that share a prefix.
struct Run {
  int64_t row, begin, length;
};

// The visibility of tokens [B, T]: the index in the row up to which (exclusive) a token is visible,
// and its position, for windows.
struct Extents {
  std::vector<int32_t> until, positions;
  std::vector<Run> runs;
  double squares = 0;

  void add(int64_t row, int64_t begin, int64_t end) {
    runs.push_back({row, begin, end - begin});
    squares += static_cast<double>(end - begin) * (end - begin);
  }
};

// Read segments [B, T]; 0 is padding and in no run.
Extents of_segments(const int32_t* segments, const Heads& s) {
  Extents found;
  found.until.resize(s.B * s.T), found.positions.resize(s.B * s.T);
  for (int64_t b = 0; b < s.B; ++b)
    for (int64_t t = 0, end; t < s.T; t = end) {
      const int64_t at = b * s.T;
      for (end = t; end < s.T && segments[at + end] == segments[at + t]; ++end) {}
      for (int64_t i = t; i < end; ++i) found.positions[at + i] = static_cast<int32_t>(i);
      std::fill_n(found.until.begin() + at + t, end - t, static_cast<int32_t>(end));
      if (segments[at + t] > 0) found.add(b, t, end);
    }
  return found;
}

// Read the ends of the tokens' visibility and their positions [B, T, columns], or only the ends.
// Every token sees itself, and no token of another run.
Extents of_tree(const int32_t* extent, int64_t columns, const Heads& s) {
  Extents found;
  found.until.resize(s.B * s.T), found.positions.resize(s.B * s.T);
  for (int64_t b = 0; b < s.B; ++b)
    for (int64_t t = 0, end; t < s.T; t = end) {
      const auto bounded = [&](int64_t index, int64_t most) {
        return std::clamp<int64_t>(extent[(b * s.T + index) * columns], index + 1, most);
      };
      end = bounded(t, s.T);
      if (end == t + 1)  // padding: adjacent tokens that see only themselves share a block
        while (end < s.T && end - t < kQueries && bounded(end, s.T) == end + 1) ++end;
      for (int64_t i = t; i < end; ++i) {
        const int64_t at = b * s.T + i;
        found.until[at] = static_cast<int32_t>(bounded(i, end));
        found.positions[at] = columns > 1 ? extent[at * columns + 1] : static_cast<int32_t>(i);
      }
      found.add(b, t, end);
    }
  return found;
}

// Contiguous keys in whole panels, and the first column of their scores.
struct Span {
  int64_t first_key, keys, column;
};

// A block of queries of a run, from a whole panel on; `width` keys are visible to any of them.
struct Block {
  int64_t begin, rows, width;
  std::vector<Span> spans;

  // End of the scores up to a query's own token.
  int64_t end(int64_t row) const { return width - kPanel + row + 1; }
};

// The visibility of a run's tokens; indices are relative to the run.
class Sight {
 public:
  // Read the next run. It is padded to a whole panel with keys that no query sees.
  void read(const Extents& all, const Run& run, const Heads& s) {
    const int64_t from = run.row * s.T + run.begin;
    length_ = run.length, window_ = s.window;
    until_.assign(whole_panels(run.length) * kPanel, 0), positions_.assign(until_.size(), 0);
    latest_.assign(whole_panels(run.length), 0), farthest_.assign(latest_.size(), INT32_MIN);
    for (int64_t t = 0; t < run.length; ++t) {
      until_[t] = all.until[from + t] - static_cast<int32_t>(run.begin);
      positions_[t] = all.positions[from + t];
      latest_[t / kPanel] = std::max(latest_[t / kPanel], until_[t]);
      farthest_[t / kPanel] = std::max(farthest_[t / kPanel], positions_[t]);
    }
  }

  // Find the keys of the block of queries at `begin`.
  void find(int64_t begin, Block& block) const {
    block.begin = begin, block.rows = std::min(kQueries, length_ - begin), block.width = 0;
    block.spans.clear();
    const auto first = positions_.begin() + begin;
    const int64_t least = window_ ? *std::min_element(first, first + block.rows) - window_ : 0;
    for (int64_t key = 0; key <= begin; key += kPanel) {
      const int64_t panel = key / kPanel;
      if (latest_[panel] <= begin || (window_ && farthest_[panel] <= least)) continue;
      if (block.spans.empty() || block.spans.back().first_key + block.spans.back().keys != key)
        block.spans.push_back({key, 0, block.width});
      block.spans.back().keys += kPanel;
      block.width += kPanel;
    }
  }

  // Scale the scores of a query's keys and bound them if the model has a cap; scores of keys that
  // it does not see become kUnseen.
  void scale(float* __restrict scores, const Block& block, int64_t row, const Heads& s) const {
    const int64_t end = block.end(row);
    if (s.cap == 0.0f)
      for (int64_t t = 0; t < end; ++t) scores[t] *= s.scale;
    else
      for (int64_t t = 0; t < end; ++t)
        scores[t] = s.cap * std::tanh(scores[t] * s.scale / s.cap);
    const int32_t index = static_cast<int32_t>(block.begin + row);
    const int32_t before = window_ ? positions_[index] - static_cast<int32_t>(window_) : INT32_MIN;
    for (const Span& span : block.spans) {
      const int32_t* until = until_.data() + span.first_key;
      const int32_t* position = positions_.data() + span.first_key;
      float* of_span = scores + span.column;
      for (int64_t t = 0; t < std::min(span.keys, end - span.column); ++t)
        of_span[t] = (until[t] > index) & (position[t] > before) ? of_span[t] : kUnseen;
    }
  }

 private:
  int64_t length_, window_;
  std::vector<int32_t> until_, positions_;   // [whole panels]
  std::vector<int32_t> latest_, farthest_;  // per panel: maximum of until and position
};

inline float weight_of(float score, float log_sum) {
  return score == kUnseen ? 0.0f : exponential(score - log_sum);
}

float largest_of(const float* x, int64_t count, float least) {
  float part[kLanes];
  std::fill(part, part + kLanes, least);
  int64_t t = 0;
  for (; t + kLanes <= count; t += kLanes)
    for (int l = 0; l < kLanes; ++l) part[l] = part[l] < x[t + l] ? x[t + l] : part[l];
  for (; t < count; ++t) part[0] = std::max(part[0], x[t]);
  return *std::max_element(part, part + kLanes);
}

float sum_of(const float* x, int64_t count) {
  float part[kLanes]{};
  int64_t t = 0;
  for (; t + kLanes <= count; t += kLanes)
    for (int l = 0; l < kLanes; ++l) part[l] += x[t + l];
  float sum = 0.0f;
  for (; t < count; ++t) sum += x[t];
  for (int l = 0; l < kLanes; ++l) sum += part[l];
  return sum;
}

float dot_of(const float* x, const float* y, int64_t count) {
  float part[kLanes]{};
  int64_t t = 0;
  for (; t + kLanes <= count; t += kLanes)
    for (int l = 0; l < kLanes; ++l) part[l] += x[t + l] * y[t + l];
  float sum = 0.0f;
  for (; t < count; ++t) sum += x[t] * y[t];
  for (int l = 0; l < kLanes; ++l) sum += part[l];
  return sum;
}

bool fits(ffi::Span<const int64_t> q, ffi::Span<const int64_t> k, ffi::Span<const int64_t> v,
          ffi::Span<const int64_t> extent, bool in_tree, bool window) {
  const bool has_positions = in_tree && extent.size() == 3 && extent[2] == 2;
  return q[0] == k[0] && q[1] == k[1] && q[3] == k[3] && k[2] > 0 && q[2] % k[2] == 0 &&
         std::equal(k.begin(), k.end(), v.begin(), v.end()) &&
         (has_positions || (extent.size() == 2 && !(in_tree && window))) && extent[0] == q[0] && extent[1] == q[1];
}

Extents extents_of(ffi::Buffer<ffi::S32>& extent, bool in_tree, const Heads& s) {
  const int64_t columns = extent.dimensions().size() == 3 ? 2 : 1;
  return in_tree ? of_tree(extent.typed_data(), columns, s) : of_segments(extent.typed_data(), s);
}

// Arguments: queries [B, T, H, K], keys and values [B, T, N, K], segments [B, T] (0: padding, gets
// zeros), sinks [H] or [0]. in_tree: the ends of the tokens' visibility [B, T] in place of
// segments, or these and the positions [B, T, 2]. Results: [B, T, H, K], and the log of each
// query's sum [B, H, T].
ffi::Error flash(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k,
                 ffi::Buffer<ffi::F32> v, ffi::Buffer<ffi::S32> extent,
                 ffi::Buffer<ffi::F32> sinks, ffi::ResultBuffer<ffi::F32> out,
                 ffi::ResultBuffer<ffi::F32> sums, int64_t window, float scale, float cap,
                 bool in_tree) {
  const auto qs = q.dimensions(), ks = k.dimensions();
  const int64_t logits = sinks.element_count();
  if (!fits(qs, ks, v.dimensions(), extent.dimensions(), in_tree, window != 0) ||
      (logits && logits != qs[2]))
    return ffi::Error::InvalidArgument("flash: shapes do not fit");
  const Heads s{qs[0], qs[1], qs[2], ks[2], qs[3], window, scale, cap};
  const Extents extents = extents_of(extent, in_tree, s);
  const std::vector<Run>& runs = extents.runs;
  std::fill_n(out->typed_data(), q.element_count(), 0.0f);
  std::fill_n(sums->typed_data(), sums->element_count(), 0.0f);
  const int64_t panels = whole_panels(s.K), group = s.H / s.N;
  const double work = extents.squares * s.H * s.K;
  each(pool, static_cast<int64_t>(runs.size()) * s.H, work, [&](int64_t task) {
    const Run run = runs[task / s.H];
    const int64_t h = task % s.H, L = run.length, ld = whole_panels(L) * kPanel;
    const int64_t from = s.key(run.row, run.begin, h / group);
    thread_local std::vector<float> keys, values, scores, sum;
    thread_local Sight sight;
    thread_local Block block;
    lay_columns(k.typed_data() + from, s.N * s.K, L, s.K, keys);
    lay_rows(v.typed_data() + from, s.N * s.K, L, s.K, values);
    scores.resize(kQueries * ld);
    sum.resize(kQueries * panels * kPanel);
    sight.read(extents, run, s);
    for (int64_t i = 0; i < L; i += kQueries) {
      sight.find(i, block);
      const int64_t offset = s.query(run.row, run.begin + i, h);
      for (const Span& at : block.spans)
        multiply({q.typed_data() + offset, s.H * s.K, 1}, block.rows,
                 keys.data() + at.first_key * s.K, kPanel * s.K, at.keys / kPanel, s.K,
                 scores.data() + at.column, ld, true);
      float shares[kQueries];
      for (int64_t r = 0; r < block.rows; ++r) {
        float* row = scores.data() + r * ld;
        const int64_t end = block.end(r);
        sight.scale(row, block, r, s);
        const float sink = sinks.element_count() ? sinks.typed_data()[h] : kUnseen;
        const float most = largest_of(row, end, sink);
        for (int64_t t = 0; t < end; ++t) row[t] = weight_of(row[t], most);
        float total = sum_of(row, end);
        if (sinks.element_count()) total += exponential(sink - most);
        std::fill(row + end, row + block.width, 0.0f);
        sums->typed_data()[s.number(run.row, run.begin + i + r, h)] = most + std::log(total);
        shares[r] = 1.0f / total;
      }
      for (const Span& at : block.spans)
        multiply({scores.data() + at.column, ld, 1}, block.rows,
                 values.data() + at.first_key * kPanel, L * kPanel, panels,
                 std::min(at.keys, L - at.first_key), sum.data(), panels * kPanel, !at.column);
      for (int64_t r = 0; r < block.rows; ++r) {
        float* to = out->typed_data() + offset + r * s.H * s.K;
        const float* row = sum.data() + r * panels * kPanel;
        for (int64_t d = 0; d < s.K; ++d) to[d] = row[d] * shares[r];
      }
    }
  });
  return ffi::Error::Success();
}

// Convert the scores of a query's keys to their weights, and the gradient of the weights to the
// gradient of the scores; 0 after its own token.
void score_gradient(float* __restrict scores, float* __restrict grads, const Sight& sight,
                    const Block& block, int64_t row, float log_sum, float expected,
                    const Heads& s) {
  const int64_t end = block.end(row);
  sight.scale(scores, block, row, s);
  if (s.cap == 0.0f) {
    for (int64_t t = 0; t < end; ++t) {
      const float weight = weight_of(scores[t], log_sum);
      grads[t] = weight * (grads[t] - expected) * s.scale;
      scores[t] = weight;
    }
  } else {
    for (int64_t t = 0; t < end; ++t) {
      const float weight = weight_of(scores[t], log_sum);
      const float bent = weight == 0.0f ? 0.0f : scores[t] / s.cap;
      grads[t] = weight * (grads[t] - expected) * s.scale * (1.0f - bent * bent);
      scores[t] = weight;
    }
  }
  for (float* x : {scores, grads}) std::fill(x + end, x + block.width, 0.0f);
}

// Arguments: the arguments of flash without the sinks, its results, and the gradient of the first
// result. Results: the gradients of queries, keys and values.
ffi::Error flash_back(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k,
                      ffi::Buffer<ffi::F32> v, ffi::Buffer<ffi::S32> extent,
                      ffi::Buffer<ffi::F32> out, ffi::Buffer<ffi::F32> sums,
                      ffi::Buffer<ffi::F32> grad, ffi::ResultBuffer<ffi::F32> dq,
                      ffi::ResultBuffer<ffi::F32> dk, ffi::ResultBuffer<ffi::F32> dv,
                      int64_t window, float scale, float cap, bool in_tree) {
  const auto qs = q.dimensions(), ks = k.dimensions();
  if (!fits(qs, ks, v.dimensions(), extent.dimensions(), in_tree, window != 0))
    return ffi::Error::InvalidArgument("flash_back: shapes do not fit");
  const Heads s{qs[0], qs[1], qs[2], ks[2], qs[3], window, scale, cap};
  const Extents extents = extents_of(extent, in_tree, s);
  const std::vector<Run>& runs = extents.runs;
  std::fill_n(dq->typed_data(), q.element_count(), 0.0f);
  std::fill_n(dk->typed_data(), k.element_count(), 0.0f);
  std::fill_n(dv->typed_data(), k.element_count(), 0.0f);
  const int64_t panels = whole_panels(s.K), width = panels * kPanel, group = s.H / s.N;
  const double work = 2.5 * extents.squares * s.H * s.K;
  each(pool, static_cast<int64_t>(runs.size()) * s.N, work, [&](int64_t task) {
    const Run run = runs[task / s.N];
    const int64_t n = task % s.N, L = run.length, ld = whole_panels(L) * kPanel;
    const int64_t from = s.key(run.row, run.begin, n);
    thread_local std::vector<float> keys, turned_keys, turned_values, queries, above, scores, grads,
        sum, of_keys, of_values;
    thread_local Sight sight;
    thread_local Block block;
    lay_rows(k.typed_data() + from, s.N * s.K, L, s.K, keys);
    lay_columns(k.typed_data() + from, s.N * s.K, L, s.K, turned_keys);
    lay_columns(v.typed_data() + from, s.N * s.K, L, s.K, turned_values);
    scores.resize(kQueries * ld), grads.resize(kQueries * ld), sum.resize(kQueries * width);
    of_keys.assign(L * width, 0.0f), of_values.assign(L * width, 0.0f);
    sight.read(extents, run, s);
    for (int64_t i = 0; i < L; i += kQueries) {
      sight.find(i, block);
      for (int64_t h = n * group; h < (n + 1) * group; ++h) {
        const int64_t offset = s.query(run.row, run.begin + i, h), step = s.H * s.K;
        const float *q_at = q.typed_data() + offset, *grad_at = grad.typed_data() + offset;
        lay_rows(q_at, step, block.rows, s.K, queries);
        lay_rows(grad_at, step, block.rows, s.K, above);
        for (const Span& at : block.spans) {
          multiply({q_at, step, 1}, block.rows, turned_keys.data() + at.first_key * s.K,
                   kPanel * s.K, at.keys / kPanel, s.K, scores.data() + at.column, ld, true);
          multiply({grad_at, step, 1}, block.rows, turned_values.data() + at.first_key * s.K,
                   kPanel * s.K, at.keys / kPanel, s.K, grads.data() + at.column, ld, true);
        }
        for (int64_t r = 0; r < block.rows; ++r)
          score_gradient(scores.data() + r * ld, grads.data() + r * ld, sight, block, r,
                         sums.typed_data()[s.number(run.row, run.begin + i + r, h)],
                         dot_of(grad_at + r * step, out.typed_data() + offset + r * step, s.K), s);
        for (const Span& at : block.spans) {
          const int64_t seen = std::min(at.keys, L - at.first_key), to = at.first_key * width;
          multiply({grads.data() + at.column, ld, 1}, block.rows,
                   keys.data() + at.first_key * kPanel, L * kPanel, panels, seen, sum.data(), width,
                   !at.column);
          multiply({grads.data() + at.column, 1, ld}, seen, queries.data(), block.rows * kPanel,
                   panels, block.rows, of_keys.data() + to, width, false);
          multiply({scores.data() + at.column, 1, ld}, seen, above.data(), block.rows * kPanel,
                   panels, block.rows, of_values.data() + to, width, false);
        }
        for (int64_t r = 0; r < block.rows; ++r)
          std::memcpy(dq->typed_data() + offset + r * step, sum.data() + r * width,
                      s.K * sizeof(float));
      }
    }
    for (int64_t t = 0; t < L; ++t) {
      std::memcpy(dk->typed_data() + from + t * s.N * s.K, of_keys.data() + t * width,
                  s.K * sizeof(float));
      std::memcpy(dv->typed_data() + from + t * s.N * s.K, of_values.data() + t * width,
                  s.K * sizeof(float));
    }
  });
  return ffi::Error::Success();
}

// ---- log-probs

constexpr int64_t kTogether = 8;  // rows per task
constexpr float kLeast = -87.0f;  // minimum of a logit relative to the largest, for masked logits

// Arguments: logits [n, V], targets [n]. Results: the log-prob of each target [n], NaN if the
// target is out of range; the entropy of its distribution [n]; and the largest logit and the log of
// the sum of exp(logit - largest) [n, 2], separately, since their sum would be rounded.
ffi::Error choose(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::S32> targets,
                  ffi::ResultBuffer<ffi::F32> logprobs, ffi::ResultBuffer<ffi::F32> entropies,
                  ffi::ResultBuffer<ffi::F32> sums) {
  const int64_t n = logits.dimensions()[0], V = logits.dimensions()[1];
  each(pool, (n + kTogether - 1) / kTogether, 8.0 * n * V, [&](int64_t task) {
    thread_local std::vector<float> odds;
    odds.resize(V);
    for (int64_t i = task * kTogether; i < std::min(n, (task + 1) * kTogether); ++i) {
      const float* row = logits.typed_data() + i * V;
      const float most = largest_of(row, V, -FLT_MAX);
      for (int64_t t = 0; t < V; ++t) odds[t] = exponential(row[t] - most);
      const float total = sum_of(odds.data(), V), log_total = std::log(total);
      for (int64_t t = 0; t < V; ++t) odds[t] *= std::max(row[t] - most, kLeast);
      const int64_t target = targets.typed_data()[i];
      logprobs->typed_data()[i] = 0 <= target && target < V ? row[target] - most - log_total : NAN;
      entropies->typed_data()[i] = log_total - sum_of(odds.data(), V) / total;
      sums->typed_data()[2 * i] = most;
      sums->typed_data()[2 * i + 1] = log_total;
    }
  });
  return ffi::Error::Success();
}

// Arguments: logits and targets, entropies and sums from choose, and the gradients of log-probs and
// entropies [n]. Result: the gradient of the logits [n, V].
ffi::Error choose_back(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> logits,
                       ffi::Buffer<ffi::S32> targets, ffi::Buffer<ffi::F32> entropies,
                       ffi::Buffer<ffi::F32> sums, ffi::Buffer<ffi::F32> of_logprobs,
                       ffi::Buffer<ffi::F32> of_entropies, ffi::ResultBuffer<ffi::F32> grad) {
  const int64_t n = logits.dimensions()[0], V = logits.dimensions()[1];
  each(pool, (n + kTogether - 1) / kTogether, 8.0 * n * V, [&](int64_t task) {
    for (int64_t i = task * kTogether; i < std::min(n, (task + 1) * kTogether); ++i) {
      const float* __restrict row = logits.typed_data() + i * V;
      float* __restrict to = grad->typed_data() + i * V;
      const float most = sums.typed_data()[2 * i], log_total = sums.typed_data()[2 * i + 1];
      const float entropy = entropies.typed_data()[i];
      const float first = of_logprobs.typed_data()[i], second = of_entropies.typed_data()[i];
      if (second == 0.0f) {
        for (int64_t t = 0; t < V; ++t) to[t] = -first * exponential(row[t] - most - log_total);
      } else {
        for (int64_t t = 0; t < V; ++t) {
          const float log = std::max(row[t] - most - log_total, kLeast);
          to[t] = -exponential(log) * (first + second * (log + entropy));
        }
      }
      const int64_t target = targets.typed_data()[i];
      if (0 <= target && target < V) to[target] += first;
    }
  });
  return ffi::Error::Success();
}

using Floats = ffi::Buffer<ffi::F32>;
using Whole = ffi::Buffer<ffi::S32>;

}  // namespace

extern "C" int jaxrl_async_multiplies_in_parts() { return has_tiles(); }

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrl_async_multiply, multiply_floats,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Attr<bool>("transpose_a")
                                  .Attr<bool>("transpose_b"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrl_async_flash, flash,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Whole>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Attr<int64_t>("window")
                                  .Attr<float>("scale")
                                  .Attr<float>("cap")
                                  .Attr<bool>("in_tree"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrl_async_flash_back, flash_back,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Whole>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Attr<int64_t>("window")
                                  .Attr<float>("scale")
                                  .Attr<float>("cap")
                                  .Attr<bool>("in_tree"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrl_async_choose, choose,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Whole>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrl_async_choose_back, choose_back,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Whole>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>());
