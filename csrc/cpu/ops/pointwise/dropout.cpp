// Operator dropout.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "cpu/core/box.h"
#include "cpu/core/host.h"
#include "cpu/ops/pointwise/dropout_host.h"
#include "cpu/ops/pointwise/pointwise.h"

namespace tf {
namespace {

Tensor dropout(Tensor input, double p, std::optional<Tensor> seed) {
  STD_TORCH_CHECK(
      input.is_cpu() && (input.scalar_type() == ScalarType::Float || is_reduced_float(input)),
      "dropout: input must be float32, bfloat16 or float16, and on the CPU");
  const Tensor x = as_contiguous(input);
  Tensor output = empty_tensor_like(x);
  const int64_t n = x.dim() > 0 ? x.size(x.dim() - 1) : 1;
  if (x.numel() == 0) return output;
  const DropoutArgs args{element_of(x), x.const_data_ptr(), output.mutable_data_ptr(), n,
                         make_dropout("dropout", p, seed)};
  const int64_t scratch = TF_DISPATCH(dropout_scratch, args);
  if (!args.dropout.on) return torch::stable::clone(x);
  torch::stable::parallel_for(
      0, x.numel() / n, std::max<int64_t>(1, 8192 / n), [&](int64_t begin, int64_t end) {
        TF_DISPATCH(dropout_rows, args, begin, end, kernel_scratch().floats(scratch));
      });
  return output;
}

}  // namespace
}  // namespace tf

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) { m.impl("dropout.cpu", TF_BOX(&tf::dropout)); }
