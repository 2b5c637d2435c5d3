#include "cpu/ops/pointwise/pointwise.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/philox.h"

namespace tf::TF_ISA {
namespace {

// Argmax takes one pass for the maximum, then a search for its position, mostly from cache.
//
// First position at which one(x) holds; lanes() tests a vector at a time.
template <class T, class Lanes, class One>
TF_INLINE Index first_place(const T* x, Index n, const Lanes& lanes, const One& one) {
  Index j = 0;
  while (j + kLanes <= n && !any(lanes(load(x + j)))) j += kLanes;
  while (j < n && !one(load_one(x + j))) ++j;
  return j;
}

template <class T>
Index largest(const T* x, Index n) {
  constexpr int kChains = 4;
  Vec maxima[kChains], nans[kChains];
  TF_UNROLL for (int u = 0; u < kChains; ++u) maxima[u] = set1(-kInf), nans[u] = zero();
  const auto scan = [&](int u, Vec y) __attribute__((always_inline)) {
    maxima[u] = max(y, maxima[u]);  // this operand order ignores NaN
    nans[u] = select(is_nan(y), y, nans[u]);
  };
  Index j = 0;
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
void argmax_rows_of(const ArgmaxArgs& args, Index begin, Index end) {
  for (Index row = begin; row < end; ++row)
    args.place[row] = largest(static_cast<const T*>(args.x) + row * args.stride, args.columns);
}

template <class T>
void dropout_rows_of(const DropoutArgs& args, Index begin, Index end, float* factors) {
  for (Index row = begin; row < end; ++row) {
    dropout_factors(args.dropout, static_cast<uint64_t>(row), 0, args.n, factors);
    const T* x = static_cast<const T*>(args.x) + row * args.n;
    T* y = static_cast<T*>(args.y) + row * args.n;
    for (Index j = 0; j < args.n; j += kLanes)
      store_some(y + j, drop(load_some(x + j, args.n - j), load(factors + j)), args.n - j);
  }
}

template <class T, class Table>
void rotate_rows_of(const RotationArgs& args, Index begin, Index end) {
  const Index half = args.rotated / 2;
  for (Index row = begin; row < end; ++row) {
    T* x = static_cast<T*>(args.x) + row * args.x_stride;
    const Index place = row % args.positions * args.rotated;
    const Table* cos = static_cast<const Table*>(args.cos) + place;
    const Table* sin = static_cast<const Table*>(args.sin) + place;
    for (Index h = 0; h < args.heads; ++h, x += args.size) {
      for (Index j = 0; j < half; j += kLanes) {
        const auto read = [&](const auto* from)
                              __attribute__((always_inline)) { return load_some(from, half - j); };
        const Vec a = read(x + j), b = read(x + half + j);
        store_some(x + j, a * read(cos + j) - b * read(sin + j), half - j);
        store_some(x + half + j, b * read(cos + half + j) + a * read(sin + half + j), half - j);
      }
    }
  }
}

}  // namespace

void argmax_rows(const ArgmaxArgs& args, Index begin, Index end) {
  dispatch_element(args.type, [&](auto type) { argmax_rows_of<decltype(type)>(args, begin, end); });
}

void rotate_rows(const RotationArgs& args, Index begin, Index end) {
  dispatch_element(args.type, [&](auto type) {
    using T = decltype(type);
    (args.table_type == args.type ? rotate_rows_of<T, T> : rotate_rows_of<T, float>)(args, begin,
                                                                                     end);
  });
}

Index dropout_scratch(const DropoutArgs& args) {
  return (args.n + 2 * kLanes - 1) / (2 * kLanes) * 2 * kLanes;
}

void dropout_rows(const DropoutArgs& args, Index begin, Index end, float* scratch) {
  dispatch_element(args.type,
                   [&](auto type) { dropout_rows_of<decltype(type)>(args, begin, end, scratch); });
}

}  // namespace tf::TF_ISA
