// Shared parts of the kernels: vector registers, tasks on XLA's threads, the exponential.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>

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
constexpr double kLittle = 1 << 18;  // multiplications per additional thread

typedef float Lanes __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

inline Lanes load(const float* p) { return *reinterpret_cast<const Lanes*>(p); }
inline void store(float* p, Lanes v) { *reinterpret_cast<Lanes*>(p) = v; }

// Run task(0) to task(count - 1); the caller participates, and returns when all are done.
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
  const Task* work_of = &task;  // read only while tasks remain, which is while the caller waits
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

// e**x for x <= 0, with relative error 1e-7: 2**n times a polynomial on [-ln 2 / 2, ln 2 / 2].
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

}  // namespace
