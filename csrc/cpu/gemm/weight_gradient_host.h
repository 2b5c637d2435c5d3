// How a weight's gradient dW (n, k) = dY^T X is cut, whatever its type.
#pragma once

#include <algorithm>

#include "cpu/core/host.h"

namespace tf {

// Rows of X whose panels are made at a time: those of many rows would take as much memory as X. A
// multiple of the rows that are summed up at a time, so that cutting hardly reaches the result.
inline int64_t weight_gradient_part(int64_t elements, int64_t columns) {
  constexpr int64_t kMultiple = 512;
  return std::max(kMultiple, elements / std::max<int64_t>(1, columns) / kMultiple * kMultiple);
}

// f(row_begin, row_end, column_begin, column_end) for blocks of dW of so many rows and columns at
// most, which begin at multiples of `width` columns. How it is cut does not reach the result.
template <class F>
void for_each_weight_block(int64_t n, int64_t k, int64_t width, int64_t most_rows,
                           int64_t most_columns, const F& f) {
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t panels = (k + width - 1) / width;
  const int64_t columns = (k + most_columns - 1) / most_columns;
  int64_t rows = (n + most_rows - 1) / most_rows;
  // As many items as threads, or a multiple.
  while (rows * columns % threads != 0 && n / (rows + 1) >= 32) ++rows;
  for_each_item(rows * columns, [&](int64_t item) {
    const int64_t row = item / columns, column = item % columns;
    f(n * row / rows, n * (row + 1) / rows, panels * column / columns * width,
      std::min(k, panels * (column + 1) / columns * width));
  });
}

}  // namespace tf
