// The layer norm of The Annotated Transformer: (x - mean) / (std + eps), std the unbiased one.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "cpu/core/box.h"
#include "cpu/core/host.h"
#include "cpu/ops/norm/layer_norm_kernel.h"

namespace tf {
namespace {

std::tuple<Tensor, Tensor, Tensor> annotated_layer_norm(Tensor input, Tensor weight, Tensor bias,
                                                        double eps) {
  const char* op = "annotated_layer_norm";
  const int64_t n = weight.numel();
  check_float(op, "input", input);
  STD_TORCH_CHECK(n > 1, op, ": rows need at least 2 elements for an unbiased std");
  STD_TORCH_CHECK(input.dim() > 0 && input.size(input.dim() - 1) == n, op,
                  ": input's rows must have ", n, " elements");
  for (auto [name, tensor] : {std::pair("weight", &weight), std::pair("bias", &bias)}) {
    check_float(op, name, *tensor);
    STD_TORCH_CHECK(tensor->numel() == n, op, ": ", name, " must have ", n, " elements");
  }
  const Rows x = as_rows(input);
  Tensor output = fresh_like(input);
  const int64_t rows = input.numel() / n;
  Tensor mean = fresh_statistics(input, n), rstd = fresh_statistics(input, n);
  if (rows == 0) return {output, mean, rstd};
  const Tensor w = as_contiguous(weight), b = as_contiguous(bias);
  LayerNormArgs args{};
  args.x = x.data;
  args.weight = static_cast<const float*>(w.const_data_ptr());
  args.bias = static_cast<const float*>(b.const_data_ptr());
  args.y = static_cast<float*>(output.mutable_data_ptr());
  args.mean = static_cast<float*>(mean.mutable_data_ptr());
  args.rstd = static_cast<float*>(rstd.mutable_data_ptr());
  args.n = args.dropout_columns = n;
  args.x_stride = x.stride;
  args.eps = static_cast<float>(eps);
  args.annotated = true;
  const int64_t scratch = TF_DISPATCH(layer_norm_scratch, args);
  torch::stable::parallel_for(
      0, rows, std::max<int64_t>(1, 16384 / n), [&](int64_t begin, int64_t end) {
        TF_DISPATCH(layer_norm_rows, args, begin, end, kernel_scratch().floats(scratch));
      });
  return {output, mean, rstd};
}

}  // namespace
}  // namespace tf

STABLE_TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  m.def(
      "cpu_annotated_layer_norm(Tensor input, Tensor weight, Tensor bias, float eps) -> "
      "(Tensor output, Tensor mean, Tensor rstd)");
}

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("cpu_annotated_layer_norm", TF_BOX(&tf::annotated_layer_norm));
}
