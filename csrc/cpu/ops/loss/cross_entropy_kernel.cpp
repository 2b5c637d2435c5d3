// Cross entropy: each block of a row of logits is read twice, the second time from cache.
#include <cmath>

#include "cpu/ops/loss/cross_entropy.h"
#include "cpu/simd/convert.h"

namespace tf::TF_ISA {
namespace {

constexpr int kSums = 4;
constexpr long kStep = kSums * kLanes;
// Block of logits whose maximum is computed before their exponentials.
constexpr long kBlock = 4096;

// Calls f(accumulator, logits) for all n logits, padded with `fill`.
template <class T, class F>
TF_INLINE void each(const T* x, long n, float fill, const F& f) {
  long j = 0;
  for (; j + kStep <= n; j += kStep)
    TF_UNROLL for (int u = 0; u < kSums; ++u) f(u, load(x + j + u * kLanes));
  for (; j + kLanes <= n; j += kLanes) f(0, load(x + j));
  if (j == n) return;
  float rest[kLanes];
  for (long i = 0; i < kLanes; ++i) rest[i] = j + i < n ? load_one(x + j + i) : fill;
  f(0, load(rest));
}

TF_INLINE float add_up(const Vec (&sums)[kSums]) {
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <class T>
void scan_row(const CrossEntropyArgs& args, long row) {
  const T* x = static_cast<const T*>(args.logits) + row * args.stride;
  const bool first = args.first == 0;
  float row_max = first ? -kInf : args.row_max[row], sum = first ? 0.0f : args.sum[row];
  float shifted_sum = first ? 0.0f : args.shifted_sum[row];
  for (long begin = 0; begin < args.columns; begin += kBlock) {
    const long n = args.columns - begin < kBlock ? args.columns - begin : kBlock;
    Vec maxima[kSums];
    TF_UNROLL for (int u = 0; u < kSums; ++u) maxima[u] = set1(-kInf);
    each(x + begin, n, -kInf,
         [&](int u, Vec y) __attribute__((always_inline)) { maxima[u] = max(y, maxima[u]); });
    const float here = reduce_max(max(max(maxima[0], maxima[1]), max(maxima[2], maxima[3])));
    if (here > row_max) {
      if (row_max != -kInf) sum *= std::exp(row_max - here);
      const long before = args.first + begin;
      if (before > 0) shifted_sum -= static_cast<float>(before) * (here - row_max);
      row_max = here;
    }
    // If all are -inf they contribute nothing; NaN, which the maximum ignores, does.
    const float top = row_max == -kInf ? 0.0f : row_max;
    Vec exponentials[kSums], distances[kSums];
    TF_UNROLL for (int u = 0; u < kSums; ++u) exponentials[u] = distances[u] = zero();
    const auto add = [&](int u, Vec y) __attribute__((always_inline)) {
      const Vec distance = y - set1(top);
      exponentials[u] = exponentials[u] + exp(distance);
      distances[u] = distances[u] + distance;
    };
    const long whole = n / kLanes * kLanes;
    each(x + begin, whole, 0.0f, add);
    sum += add_up(exponentials);
    shifted_sum += add_up(distances);
    for (long j = begin + whole; j < begin + n; ++j) {
      const float distance = load_one(x + j) - top;
      sum += distance < kMinExponent ? 0.0f : std::exp(distance);
      shifted_sum += distance;
    }
  }
  args.row_max[row] = row_max;
  args.sum[row] = sum;
  args.shifted_sum[row] = shifted_sum;
  const int64_t place = args.target[row] - args.first;
  if (place >= 0 && place < args.columns) args.target_logit[row] = load_one(x + place);
}

template <class T>
void gradient_of_row(const CrossEntropyGradientArgs& args, long row) {
  const CrossEntropyArgs& call = args.call;
  const T* x = static_cast<const T*>(call.logits) + row * call.stride;
  T* to = static_cast<T*>(args.gradient) + row * args.gradient_stride;
  const long n = call.columns;
  if (call.target[row] == call.ignored) {
    for (long j = 0; j < n; j += kLanes) store_some(to + j, zero(), n - j);
    return;
  }
  const float scale = args.scale[row];
  // Subtracted one after the other: their sum would round away a small log beside a large logit.
  const Vec row_max = set1(args.row_max[row]), log = set1(args.log[row]), by = set1(scale);
  const Vec even = set1(-scale * call.smoothing / static_cast<float>(call.classes));
  const int64_t place = call.target[row] - call.first;
  const bool has = place >= 0 && place < n;
  const float logit = has ? load_one(x + place) : 0.0f;  // before it is overwritten
  for (long j = 0; j < n; j += kLanes)
    store_some(to + j, fma(exp((load_some(x + j, n - j) - row_max) - log), by, even), n - j);
  if (!has) return;
  // In double: if the target is almost certain, the result is a small difference from 1.
  const double s = call.smoothing;
  const double p = std::exp(static_cast<double>(logit) - args.row_max[row] - args.log[row]);
  const double y = scale * (p - (1.0 - s) - s / static_cast<double>(call.classes));
  store_some(to + place, set1(static_cast<float>(y)), 1);
}

}  // namespace

void cross_entropy_rows(const CrossEntropyArgs& args, long begin, long end) {
  for (long row = begin; row < end; ++row) {
    if (args.target[row] == args.ignored) continue;
    dispatch_element(args.type, [&](auto type) { scan_row<decltype(type)>(args, row); });
  }
}

void cross_entropy_gradient_rows(const CrossEntropyGradientArgs& args, long begin, long end) {
  for (long row = begin; row < end; ++row) {
    dispatch_element(args.call.type,
                     [&](auto type) { gradient_of_row<decltype(type)>(args, row); });
  }
}

}  // namespace tf::TF_ISA
