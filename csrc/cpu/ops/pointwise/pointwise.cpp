// Operators argmax, dropout and embedding_backward.
#include "cpu/ops/pointwise/pointwise.h"

#include <algorithm>
#include <cstring>

#include "cpu/core/host.h"

namespace tf {
namespace {

// Argmax of rows of logits. PyTorch's is not vectorised along long rows.
Tensor argmax(Tensor input) {
  const char* op = "argmax";
  checked_float_type(op, "input", input);
  STD_TORCH_CHECK(input.dim() == 2 && input.size(1) > 0, op,
                  ": input must be (rows, columns) with at least one column");
  const int64_t rows = input.size(0), columns = input.size(1);
  Tensor result = torch::stable::new_empty(input, {&rows, 1}, ScalarType::Long);
  const Rows x = as_rows(input);
  const ArgmaxArgs args{element_of(input), x.data, columns, x.stride,
                        static_cast<int64_t*>(result.mutable_data_ptr())};
  parallel_for(0, rows, std::max<int64_t>(1, 32768 / columns),
               [&](int64_t begin, int64_t end) { TF_DISPATCH(argmax_rows, args, begin, end); });
  return result;
}

Tensor dropout(Tensor input, double p, std::optional<Tensor> seed) {
  checked_float_type("dropout", "input", input);
  const Tensor x = as_contiguous(input);
  Tensor output = empty_tensor_like(x);
  const int64_t n = x.dim() > 0 ? x.size(x.dim() - 1) : 1;
  if (x.numel() == 0) return output;
  const DropoutArgs args{element_of(x), x.const_data_ptr(), output.mutable_data_ptr(), n,
                         make_dropout("dropout", p, seed)};
  const int64_t scratch = TF_DISPATCH(dropout_scratch, args);
  if (!args.dropout.on) return torch::stable::clone(x);
  parallel_for(0, x.numel() / n, std::max<int64_t>(1, 8192 / n), [&](int64_t begin, int64_t end) {
    TF_DISPATCH(dropout_rows, args, begin, end, kernel_scratch().floats(scratch));
  });
  return output;
}

// The gradient of an embedding table, from the gradient of the looked-up rows. Nearly all of a
// vocabulary's table is zeros, and page faults cost more than writing them. Each item clears a
// range of rows of the table, then adds the gradients of its tokens in order, so the result does
// not depend on the number of threads.
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
  m.impl("argmax.cpu", TF_BOX(&tf::argmax));
  m.impl("dropout.cpu", TF_BOX(&tf::dropout));
  m.impl("embedding_backward.cpu", TF_BOX(&tf::embedding_backward));
}
