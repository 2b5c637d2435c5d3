// Argmax: one pass for the maximum, then a search for its position, mostly from cache.
#include "cpu/ops/pointwise/pointwise.h"
#include "cpu/simd/convert.h"

namespace tf::TF_ISA {
namespace {

// First position at which one(x) holds; lanes() tests a vector at a time.
template <class T, class Lanes, class One>
TF_INLINE long first_place(const T* x, long n, const Lanes& lanes, const One& one) {
  long j = 0;
  while (j + kLanes <= n && !any(lanes(load(x + j)))) j += kLanes;
  while (j < n && !one(load_one(x + j))) ++j;
  return j;
}

template <class T>
long largest(const T* x, long n) {
  constexpr int kChains = 4;
  Vec maxima[kChains], nans[kChains];
  TF_UNROLL for (int u = 0; u < kChains; ++u) maxima[u] = set1(-kInf), nans[u] = zero();
  const auto scan = [&](int u, Vec y) __attribute__((always_inline)) {
    maxima[u] = max(y, maxima[u]);  // this operand order ignores NaN
    nans[u] = select(is_nan(y), y, nans[u]);
  };
  long j = 0;
  for (; j + kChains * kLanes <= n; j += kChains * kLanes)
    TF_UNROLL for (int u = 0; u < kChains; ++u) scan(u, load(x + j + u * kLanes));
  for (; j + kLanes <= n; j += kLanes) scan(0, load(x + j));
  for (; j < n; ++j) scan(0, set1(load_one(x + j)));
  bool none = true;
  TF_UNROLL for (int u = 0; u < kChains; ++u) none = none && !any(is_nan(nans[u]));
  if (!none)
    return first_place(x, n, [](Vec y) { return is_nan(y); }, [](float y) { return y != y; });
  const float row_max = reduce_max(max(max(maxima[0], maxima[1]), max(maxima[2], maxima[3])));
  return first_place(
      x, n, [&](Vec y) { return equal(y, set1(row_max)); }, [&](float y) { return y == row_max; });
}

template <class T>
void rows_of(const ArgmaxArgs& args, long begin, long end) {
  for (long row = begin; row < end; ++row)
    args.place[row] = largest(static_cast<const T*>(args.x) + row * args.stride, args.columns);
}

}  // namespace

void argmax_rows(const ArgmaxArgs& args, long begin, long end) {
  dispatch_element(args.type, [&](auto type) { rows_of<decltype(type)>(args, begin, end); });
}

}  // namespace tf::TF_ISA
