// What the operators around linear maps share.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/host.h"
#include "cpu/linear_kernel.h"

namespace tf {

inline void check_weight(const char* op, const char* name, const Tensor& weight, int64_t columns,
                  const std::optional<Tensor>& bias) {
  check_float(op, name, weight);
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(1) == columns, op, ": ", name, " must be (out, ",
                  columns, ")");
  if (bias) {
    check_float(op, "bias", *bias);
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), op,
                    ": bias must have one value per row of ", name);
  }
}

inline std::optional<Tensor> contiguous(const std::optional<Tensor>& tensor) {
  if (!tensor) return std::nullopt;
  return torch::stable::contiguous(*tensor);
}

// Splits rows between threads where there are many, else panels.
inline void run_linear(const LinearArgs& args) {
  const int64_t width = TF_DISPATCH(panel_columns, );
  const int64_t panels = (args.n + width - 1) / width;
  const int64_t threads = torch::stable::get_num_threads();
  constexpr int64_t kRows = 112;
  int64_t row_items = (args.m + kRows - 1) / kRows;
  row_items = (row_items + threads - 1) / threads * threads;
  const int64_t column_items =
      args.m >= 56 * threads ? 1 : std::min<int64_t>(panels, std::max<int64_t>(1, 2 * threads));
  if (column_items > 1 || args.m < kRows) row_items = std::max<int64_t>(1, args.m / kRows);
  const int64_t scratch = TF_DISPATCH(linear_scratch, args);
  for_each_item(row_items * column_items, [&](int64_t item) {
    const int64_t row = item / column_items, column = item % column_items;
    TF_DISPATCH(linear_block, args, args.m * row / row_items, args.m * (row + 1) / row_items,
                panels * column / column_items, panels * (column + 1) / column_items,
                kernel_scratch().floats(scratch));
  });
}

inline Tensor result_rows(const Tensor& input, int64_t columns) {
  std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
  sizes.back() = columns;
  Tensor result = torch::stable::new_empty(
      input, torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size()));
  prefer_huge_pages(result);
  return result;
}

inline int64_t row_count(const Tensor& input) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < input.dim(); ++d) rows *= input.size(d);
  return rows;
}

}  // namespace tf
