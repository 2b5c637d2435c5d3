// Operators of the linear layer and the feed-forward network with 8-bit products.
#include "cpu/ops/int8_linear/int8_linear.h"

#include "cpu/core/host.h"
#include "cpu/ops/feed_forward/feed_forward_host.h"

namespace tf {
namespace {

const LinearKernels& kernels_in_use(Element type = Element::float32) {
  return *TF_DISPATCH(int8_linear_kernels, type, type, type);
}

// Returns the panels of the packed copy if it has the layout of the instruction set in use. Else
// packs the weight into shared scratch `slot`.
const void* int8_panels(const Tensor& weight, const std::optional<Tensor>& packed, int slot) {
  if (const void* panels = int8_panels_of(weight, packed)) return panels;
  return pack_now(kernels_in_use(), weight, false, slot).data;
}

void check_parameters(const char* op, const char* name, const Tensor& input, const Tensor& weight,
                      const Tensor& scale, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& factors, int64_t columns) {
  check_int8_weight(op, name, weight);
  STD_TORCH_CHECK(weight.size(1) == columns, op, ": ", name, " must be (out, ", columns, ")");
  STD_TORCH_CHECK(scale.is_cpu() && scale.scalar_type() == ScalarType::Float && scale.dim() == 1 &&
                      scale.size(0) == weight.size(0),
                  op, ": the scale must have one float32 value per row of ", name);
  check_int8_factors(op, name, factors, columns);
  if (!bias) return;
  check_type(op, "bias", *bias, input.scalar_type(), "input");
  STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), op,
                  ": bias must have one value per row of ", name);
}

void check_input(const char* op, const Tensor& input) {
  checked_float_type(op, "input", input);
  STD_TORCH_CHECK(input.dim() >= 1, op, ": input must have a dimension");
}

Tensor int8_linear(Tensor input, Tensor weight, Tensor scale, std::optional<Tensor> packed,
                   std::optional<Tensor> bias, std::optional<Tensor> residual,
                   std::optional<Tensor> factors, int64_t activation) {
  const char* op = "int8_linear";
  check_input(op, input);
  check_parameters(op, "weight", input, weight, scale, bias, factors, input.size(input.dim() - 1));
  const int64_t m = row_count(input), n = weight.size(0), k = weight.size(1);
  Tensor output = empty_rows(input, n);
  if (residual) {
    check_type(op, "residual", *residual, input.scalar_type(), "input");
    STD_TORCH_CHECK(residual->sizes().equals(output.sizes()), op,
                    ": residual must have the shape of the result");
  }
  if (m * n == 0) return output;
  const Rows x = as_rows(input);
  const Rows r = residual ? as_rows(*residual) : Rows{input, nullptr, 0};
  const std::optional<Tensor> b = as_contiguous(bias), c = as_contiguous(factors);
  const Tensor s = as_contiguous(scale);
  const Element type = element_of(input);
  run_linear({.type = type,
              .x = x.data,
              .packed = nullptr,
              .bias = data_of(b),
              .residual = r.data,
              .y = output.mutable_data_ptr(),
              .m = m,
              .k = k,
              .n = n,
              .x_stride = x.stride,
              .residual_stride = r.stride,
              .y_stride = n,
              .activation = checked_activation(op, activation),
              .scale = floats_of(s),
              .factors = floats_of(c)},
             {&kernels_in_use(type), int8_panels(weight, packed, 0)});
  trim_shared_scratch();
  return output;
}

Tensor int8_feed_forward(Tensor input, Tensor weight1, Tensor scale1, std::optional<Tensor> packed1,
                         std::optional<Tensor> bias1, Tensor weight2, Tensor scale2,
                         std::optional<Tensor> packed2, std::optional<Tensor> bias2,
                         std::optional<Tensor> factors1, std::optional<Tensor> factors2,
                         int64_t activation) {
  const char* op = "int8_feed_forward";
  check_input(op, input);
  check_parameters(op, "weight1", input, weight1, scale1, bias1, factors1,
                   input.size(input.dim() - 1));
  check_parameters(op, "weight2", input, weight2, scale2, bias2, factors2, weight1.size(0));
  const int64_t m = row_count(input), k = weight1.size(1), f = weight1.size(0), n = weight2.size(0);
  Tensor output = empty_rows(input, n);
  if (m * n == 0) return output;
  const Rows x = as_rows(input);
  const std::optional<Tensor> b1 = as_contiguous(bias1), b2 = as_contiguous(bias2);
  const std::optional<Tensor> c1 = as_contiguous(factors1), c2 = as_contiguous(factors2);
  const Tensor s1 = as_contiguous(scale1), s2 = as_contiguous(scale2);
  const Element type = element_of(input);
  run_int8_feed_forward({.type = type,
                         .x = x.data,
                         .packed1 = int8_panels(weight1, packed1, 0),
                         .bias1 = data_of(b1),
                         .packed2 = int8_panels(weight2, packed2, 1),
                         .bias2 = data_of(b2),
                         .y = output.mutable_data_ptr(),
                         .m = m,
                         .k = k,
                         .f = f,
                         .n = n,
                         .x_stride = x.stride,
                         .activation = checked_activation(op, activation),
                         .scale1 = floats_of(s1),
                         .scale2 = floats_of(s2),
                         .factors1 = floats_of(c1),
                         .factors2 = floats_of(c2)},
                        2);
  trim_shared_scratch();
  return output;
}

}  // namespace

void check_int8_weight(const char* op, const char* name, const Tensor& weight) {
  STD_TORCH_CHECK(weight.is_cpu() && weight.scalar_type() == ScalarType::Char && weight.dim() == 2,
                  op, ": ", name, " must be an int8 matrix on the CPU");
  STD_TORCH_CHECK(weight.numel() <= kMaxElements, op, ": ", name, " is too large");
  STD_TORCH_CHECK(weight.size(1) <= kMaxInt8Depth, op, ": ", name, " must have at most ",
                  kMaxInt8Depth, " columns");
}

void check_int8_factors(const char* op, const char* name, const std::optional<Tensor>& factors,
                        int64_t columns) {
  STD_TORCH_CHECK(!factors || (factors->is_cpu() && factors->scalar_type() == ScalarType::Float &&
                               factors->dim() == 1 && factors->size(0) == columns),
                  op, ": the factors must have one float32 value per column of ", name);
}

const void* int8_panels_of(const Tensor& weight, const std::optional<Tensor>& packed) {
  if (!packed || packed->scalar_type() != ScalarType::Char) return nullptr;
  return panels_in(kernels_in_use(), weight, *packed);
}

Tensor pack_int8_weight(const Tensor& weight) {
  check_int8_weight("pack_weight", "weight", weight);
  return pack_copy(kernels_in_use(), weight);
}

}  // namespace tf

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("int8_linear_packed.cpu", TF_BOX(&tf::int8_linear));
  m.impl("int8_feed_forward_packed.cpu", TF_BOX(&tf::int8_feed_forward));
}
