// Argmax: a row is read for its maximum, then from a near cache up to the place that has it.
#include "cpu/ops/pointwise/pointwise.h"
#include "cpu/simd/half.h"

namespace tf::TF_ISA {
namespace {

// The first place from which on found() holds for one of the lanes, and there for an element.
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
  Vec most[kChains], wrong[kChains];
  TF_UNROLL for (int u = 0; u < kChains; ++u) most[u] = set1(-kInf), wrong[u] = zero();
  const auto look = [&](int u, Vec y) __attribute__((always_inline)) {
    most[u] = max(y, most[u]);  // in this order NaN is passed over
    wrong[u] = select(not_a_number(y), y, wrong[u]);
  };
  long j = 0;
  for (; j + kChains * kLanes <= n; j += kChains * kLanes)
    TF_UNROLL for (int u = 0; u < kChains; ++u) look(u, load(x + j + u * kLanes));
  for (; j + kLanes <= n; j += kLanes) look(0, load(x + j));
  for (; j < n; ++j) look(0, set1(load_one(x + j)));
  bool none = true;
  TF_UNROLL for (int u = 0; u < kChains; ++u) none = none && !any(not_a_number(wrong[u]));
  if (!none)
    return first_place(x, n, [](Vec y) { return not_a_number(y); }, [](float y) { return y != y; });
  const float peak = reduce_max(max(max(most[0], most[1]), max(most[2], most[3])));
  return first_place(
      x, n, [&](Vec y) { return equal(y, set1(peak)); }, [&](float y) { return y == peak; });
}

template <class T>
void rows_of(const ArgmaxArgs& args, long begin, long end) {
  for (long row = begin; row < end; ++row)
    args.place[row] = largest(static_cast<const T*>(args.x) + row * args.stride, args.columns);
}

}  // namespace

void argmax_rows(const ArgmaxArgs& args, long begin, long end) {
  by_element(args.type, [&](auto type) { rows_of<decltype(type)>(args, begin, end); });
}

}  // namespace tf::TF_ISA
