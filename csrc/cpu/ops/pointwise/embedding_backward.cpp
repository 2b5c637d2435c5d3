// Operator embedding_backward: the gradient of an embedding table from that of the looked-up rows.
// Nearly all of a vocabulary's table is zeros, and page faults cost more than writing them.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>

#include "cpu/core/box.h"
#include "cpu/core/host.h"

namespace tf {
namespace {

// Each item clears a range of rows of the table, then adds the gradients of its tokens in order, so
// the result does not depend on the number of threads.
Tensor embedding_backward(Tensor grad, Tensor tokens, int64_t rows, int64_t padding) {
  const char* op = "embedding_backward";
  check_float(op, "grad", grad);
  STD_TORCH_CHECK(tokens.is_cpu() && tokens.scalar_type() == ScalarType::Long, op,
                  ": tokens must be int64 and on the CPU");
  STD_TORCH_CHECK(grad.dim() == tokens.dim() + 1, op,
                  ": grad must have one dimension more than tokens");
  for (int64_t d = 0; d < tokens.dim(); ++d)
    STD_TORCH_CHECK(grad.size(d) == tokens.size(d), op, ": grad must have a row for each token");
  const int64_t width = grad.size(grad.dim() - 1), count = tokens.numel();
  tokens = as_contiguous(tokens);
  const auto* places = static_cast<const int64_t*>(tokens.const_data_ptr());
  for (int64_t i = 0; i < count; ++i)
    STD_TORCH_CHECK(places[i] >= 0 && places[i] < rows, op, ": token ", places[i],
                    " is not in [0, ", rows, ")");
  const Rows from = as_rows(grad);
  const auto* values = static_cast<const float*>(from.data);
  Tensor result = empty_tensor(grad, {rows, width});
  auto* table = static_cast<float*>(result.mutable_data_ptr());
  if (width == 0) return result;
  constexpr int64_t kBytes = int64_t{1} << 20;  // of an item
  const int64_t row_bytes = width * static_cast<int64_t>(sizeof(float));
  const int64_t items = std::max<int64_t>(1, std::min<int64_t>(64, rows * row_bytes / kBytes));
  for_each_item(items, [&](int64_t item) {
    const int64_t begin = rows * item / items, end = rows * (item + 1) / items;
    std::memset(table + begin * width, 0, static_cast<size_t>((end - begin) * row_bytes));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = places[i];
      if (row < begin || row >= end || row == padding) continue;
      float* to = table + row * width;
      const float* x = values + i * from.stride;
      for (int64_t j = 0; j < width; ++j) to[j] += x[j];
    }
  });
  return result;
}

}  // namespace
}  // namespace tf

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("embedding_backward.cpu", TF_BOX(&tf::embedding_backward));
}
