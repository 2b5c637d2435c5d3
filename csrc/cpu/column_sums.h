// Sums over rows; for kernel files only.
#pragma once

#include "cpu/gemm.h"
#include "cpu/half.h"

namespace tf::TF_ISA {
namespace {

// totals[j] = the sum of rows[i][j] over i < m, added to what is there if `onto`, for j < columns.
// Rows pass by as they lie in memory. Sums of 16 rows are summed up by 16 before they meet the
// total: a running sum of n terms errs like n.
template <class T>
void column_sums(const T* rows, long stride, long m, long columns, bool onto, float* totals) {
  constexpr long kBlock = 1024, kFew = 16, kMany = kFew * kFew;
  for (long column = 0; column < columns; column += kBlock) {
    const long count = least(kBlock, columns - column);
    float sums[3][kBlock + kLanes];
    const auto add = [&](int to, int from) {
      for (long j = 0; j < count; j += kLanes) {
        store(sums[to] + j, load(sums[to] + j) + load(sums[from] + j));
        store(sums[from] + j, zero());
      }
    };
    copy_row(totals + column, onto ? count : 0, sums[0], round_up(count, kLanes));
    for (int level = 1; level < 3; ++level)
      for (long j = 0; j < count; j += kLanes) store(sums[level] + j, zero());
    for (long row = 0; row < m; ++row) {
      const T* from = rows + row * stride + column;
      for (long j = 0; j < count; j += kLanes)
        store(sums[2] + j, load(sums[2] + j) + load_some(from + j, count - j));
      if (row % kFew == kFew - 1) add(1, 2);
      if (row % kMany == kMany - 1) add(0, 1);
    }
    add(1, 2);
    add(0, 1);
    copy_row(sums[0], count, totals + column, count);
  }
}

}  // namespace
}  // namespace tf::TF_ISA
