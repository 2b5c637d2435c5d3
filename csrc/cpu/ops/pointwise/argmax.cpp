// Operator argmax over rows of logits. PyTorch's is not vectorised along long rows.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "cpu/core/box.h"
#include "cpu/core/host.h"
#include "cpu/ops/pointwise/pointwise.h"

namespace tf {
namespace {

Tensor argmax(Tensor input) {
  const char* op = "argmax";
  const ScalarType type = input.scalar_type();
  STD_TORCH_CHECK(input.is_cpu() && (type == ScalarType::Float || is_reduced_float(input)), op,
                  ": input must be float32, bfloat16 or float16, and on the CPU");
  STD_TORCH_CHECK(input.dim() == 2 && input.size(1) > 0, op,
                  ": input must be (rows, columns) with at least one column");
  const int64_t rows = input.size(0), columns = input.size(1);
  Tensor result = torch::stable::new_empty(input, {&rows, 1}, ScalarType::Long);
  const Rows x = as_rows(input);
  const ArgmaxArgs args{element_of(input), x.data, columns, x.stride,
                        static_cast<int64_t*>(result.mutable_data_ptr())};
  torch::stable::parallel_for(
      0, rows, std::max<int64_t>(1, 32768 / columns),
      [&](int64_t begin, int64_t end) { TF_DISPATCH(argmax_rows, args, begin, end); });
  return result;
}

}  // namespace
}  // namespace tf

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) { m.impl("argmax.cpu", TF_BOX(&tf::argmax)); }
