// Column sums and row sums; for kernel files only.
#pragma once

#include "cpu/simd/convert.h"

namespace tf::TF_ISA {
namespace {

// totals[j] = sum of rows[i][j] over i < m, plus the previous value if `accumulate`, for j <
// columns. Rows are read in memory order. Sums of 16 rows, then of 16 such sums, bound the rounding
// error: that of a running sum of n terms grows like n.
template <class T>
void column_sums(const T* rows, Index stride, Index m, Index columns, bool accumulate,
                 float* totals) {
  constexpr Index kBlock = 1024, kRun = 16, kLongRun = kRun * kRun;
  for (Index column = 0; column < columns; column += kBlock) {
    const Index count = min(kBlock, columns - column);
    float sums[3][kBlock + kLanes];
    const auto add = [&](int to, int from) {
      for (Index j = 0; j < count; j += kLanes) {
        store(sums[to] + j, load(sums[to] + j) + load(sums[from] + j));
        store(sums[from] + j, zero());
      }
    };
    copy_row(totals + column, accumulate ? count : 0, sums[0], round_up(count, kLanes));
    for (int level = 1; level < 3; ++level)
      for (Index j = 0; j < count; j += kLanes) store(sums[level] + j, zero());
    for (Index row = 0; row < m; ++row) {
      const T* from = rows + row * stride + column;
      for (Index j = 0; j < count; j += kLanes)
        store(sums[2] + j, load(sums[2] + j) + load_some(from + j, count - j));
      if (row % kRun == kRun - 1) add(1, 2);
      if (row % kLongRun == kLongRun - 1) add(0, 1);
    }
    add(1, 2);
    add(0, 1);
    copy_row(sums[0], count, totals + column, count);
  }
}

// Calls f(offset, count) for each whole vector of a row, then for the remainder.
template <class F>
TF_INLINE void each_vector(Index n, const F& f) {
  Index j = 0;
  for (; j + kLanes <= n; j += kLanes) f(j, static_cast<Index>(kLanes));
  if (j < n) f(j, n - j);
}

// Converts a row to float32 in `to`, and returns that; nullptr for no row.
template <class T>
const float* widened(const T* from, Index n, float* to) {
  if (from == nullptr) return nullptr;
  each_vector(n,
              [&](Index j, Index count) { store_some(to + j, load_some(from + j, count), count); });
  return to;
}

// kCount sums over a row of n, to which add(sums, offset, count) adds a vector. An accumulator
// takes eight terms, and their sums are added pairwise, so the error grows like log n, and small
// terms are not lost in a sum dominated by one large term.
template <int kCount, class F>
TF_INLINE void row_sums(Index n, float (&totals)[kCount], const F& add) {
  constexpr Index kStep = 4 * kLanes, kBlock = 8 * kStep;
  if (n <= kLanes) {  // saves a third of the time of a norm of such rows
    Vec only[kCount];
    TF_UNROLL for (int i = 0; i < kCount; ++i) only[i] = zero();
    add(only, 0, n);
    TF_UNROLL for (int i = 0; i < kCount; ++i) totals[i] = reduce_add(only[i]);
    return;
  }
  Vec levels[48][kCount];
  Index blocks = 0;
  for (Index begin = 0; begin < n; begin += kBlock) {
    const Index end = min(n, begin + kBlock);
    Vec sums[4][kCount];
    TF_UNROLL for (int u = 0; u < 4; ++u) TF_UNROLL for (int i = 0; i < kCount; ++i) sums[u][i] =
        zero();
    Index j = begin;
    for (; j + kStep <= end; j += kStep)
      TF_UNROLL for (int u = 0; u < 4; ++u)
          add(sums[u], j + u * kLanes, static_cast<Index>(kLanes));
    for (; j + kLanes <= end; j += kLanes) add(sums[0], j, static_cast<Index>(kLanes));
    if (j < end) add(sums[1], j, end - j);
    TF_UNROLL for (int i = 0; i < kCount; ++i) sums[0][i] =
        (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
    if (n <= kBlock) {
      TF_UNROLL for (int i = 0; i < kCount; ++i) totals[i] = reduce_add(sums[0][i]);
      return;
    }
    // levels[l] holds a sum of 2^l blocks if bit l of their number is set.
    int level = 0;
    for (; (blocks >> level & 1) != 0; ++level)
      TF_UNROLL for (int i = 0; i < kCount; ++i) sums[0][i] = levels[level][i] + sums[0][i];
    TF_UNROLL for (int i = 0; i < kCount; ++i) levels[level][i] = sums[0][i];
    ++blocks;
  }
  TF_UNROLL for (int i = 0; i < kCount; ++i) {
    Vec total = zero();
    for (int level = 0; blocks >> level != 0; ++level)
      if ((blocks >> level & 1) != 0) total = total + levels[level][i];
    totals[i] = reduce_add(total);
  }
}

// The sum of f(x - mean) along a row, of which at(offset, count) is a vector.
template <class At, class F>
TF_INLINE float sum_along(const At& at, Index n, float mean, const F& f) {
  const Vec centre = set1(mean);
  float sum[1] = {0.0f};
  row_sums(n, sum, [&](Vec* to, Index j, Index count) __attribute__((always_inline)) {
    const Vec value = f(at(j, count) - centre);
    to[0] = to[0] + (count < kLanes ? select(lanes_below(count), value, zero()) : value);
  });
  return sum[0];
}

// The sum of ((x - mean - offset) scale)^2.
template <class At>
TF_INLINE float sum_of_squares(const At& at, Index n, float mean, float scale = 1.0f,
                               float offset = 0.0f) {
  return sum_along(at, n, mean, [&](Vec d) __attribute__((always_inline)) {
    d = (d - set1(offset)) * set1(scale);
    return d * d;
  });
}

// The sum of (x - mean) scale: 0 up to the rounding error of the mean.
template <class At>
TF_INLINE float sum_of_distances(const At& at, Index n, float mean, float scale = 1.0f) {
  return sum_along(at, n, mean,
                   [&](Vec d) __attribute__((always_inline)) { return d * set1(scale); });
}

}  // namespace
}  // namespace tf::TF_ISA
