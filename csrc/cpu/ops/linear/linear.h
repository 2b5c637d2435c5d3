// Linear layer, activation(x W^T + bias) + residual with packed weights, and its gradients. Reduced
// types are summed in fp32 and rounded once; fp32 uses FMA, or bf16x3 on bfloat16 units
// (bf16_amx.h).
#pragma once

#include "cpu/core/isa.h"
#include "types.h"

namespace tf {

struct LinearArgs {
  Element type;          // of all tensors
  const void* x;         // (m, k), rows x_stride apart
  const void* packed;    // W (n, k) in panels, see LinearKernels
  const void* bias;      // (n) or nullptr: zeros
  const void* residual;  // (m, n), rows residual_stride apart, or nullptr
  void* y;               // (m, n), rows y_stride apart
  Index m, k, n, x_stride, residual_stride, y_stride;
  int activation;
  void* preactivation = nullptr;  // (m, n), contiguous: receives x W^T + bias; or nullptr
  // Unpacked weight, instead of `packed`: W, or W^T if transposed, with rows weight_stride apart.
  const void* weight = nullptr;
  Index weight_stride = 0;
  bool transposed = false;
  const float* scale = nullptr;    // with 8-bit weights: (n), multiplies the columns of y
  const float* factors = nullptr;  // with 8-bit weights: (k), for columns of x; nullptr: 1
  bool multiplies = false;         // multiply by the old values of y, then add the residual
};

// Kernels for weights in one packed layout. Scratch sizes are in bytes, ranges half open.
struct LinearKernels {
  bool in_fp32;                    // packed as fp32
  bool quantizes = false;          // packed in 8 bits; x is quantised for each block
  uint16_t layout = 0;             // id, unique among layouts of the same size
  Index panel;                     // columns of a panel
  Index row_unit;                  // row ranges start at multiples
  Index pack_transposed_rows = 0;  // unit of pack_transposed: rows of W^T; 0: panels
  Index (*packed_bytes)(Index n, Index k) = nullptr;
  // Packs panels [begin, end) of W (n, k), or from W^T (k, n), with rows stride apart.
  void (*pack)(const void* weight, Index stride, Index n, Index k, void* packed, Index begin,
               Index end) = nullptr;
  void (*pack_transposed)(const void* transposed, Index stride, Index n, Index k, void* packed,
                          Index begin, Index end) = nullptr;

  // Computes a range of rows and panels from `packed`; row_block is the preferred maximum of rows.
  Index (*row_block)(const LinearArgs& args) = nullptr;
  Index (*scratch)(const LinearArgs& args) = nullptr;
  void (*block)(const LinearArgs& args, Index row_begin, Index row_end, Index panel_begin,
                Index panel_end, void* scratch) = nullptr;

  // All rows at once, for at most panels_rows() rows and k <= max_depth: fill() packs x once, then
  // panels() multiplies some panels by it. Without `packed` it packs the weight just before the
  // product: one panel in a call, or up to `together` if transposed. This pays from min_panels per
  // thread on.
  Index max_depth = 0, min_panels = 0, together = 1;
  Index (*panels_rows)(const LinearArgs& args) = nullptr;
  Index (*panels_scratch)(const LinearArgs& args) = nullptr;
  void (*fill)(const LinearArgs& args, void* scratch) = nullptr;
  void (*panels)(const LinearArgs& args, Index begin, Index end, void* scratch) = nullptr;

  // Columns of y from the unpacked weight (not transposed), in multiples of direct_unit, for 1 to
  // kMaxDirectRows rows.
  Index direct_unit = 0;
  void (*direct)(const LinearArgs& args, Index begin, Index end) = nullptr;
};
constexpr Index kMaxDirectRows = 12;

TF_KERNEL(const LinearKernels* linear_kernels())
TF_KERNEL_AMX(const LinearKernels* lowp_linear_kernels(Element type))
TF_KERNEL_BF16X3(const LinearKernels* bf16x3_linear_kernels())
// `block` for few rows (small m), from panels packed in fp32.
TF_KERNEL_BF16X3(const LinearKernels* bf16x3_small_m_linear_kernels())

// to[j] = grad[j] * act'(z[j]) for rows [begin, end) of n columns.
struct SlopeArgs {
  Element type;
  const void* grad;  // (m, n), rows grad_stride apart
  const void* z;     // (m, n), contiguous: what the activation was applied to
  void* to;          // (m, n), contiguous
  Index n, grad_stride;
  int activation;
};
TF_KERNEL(void multiply_by_slope(const SlopeArgs& args, Index begin, Index end))

// The contribution of some rows to dW = dY^T X and db = sum over rows of dY, with X =
// dropout(act(x)).
struct WeightGradientArgs {
  Element type;
  const void* grad = nullptr;   // dY (m, n), rows grad_stride apart
  const void* x = nullptr;      // (m, k), rows x_stride apart
  void* panels = nullptr;       // X in panels of its columns, see WeightGradientKernels
  void* grad_weight = nullptr;  // (n, k), contiguous, or nullptr: not wanted
  void* grad_bias = nullptr;    // (n) or nullptr
  Index m, n, k, grad_stride, x_stride;
  bool first = true, last = true;  // whether these are the first, the last rows
  Index row = 0;                   // row number of the first row for dropout
  int activation = 0;              // fp32 only
  Dropout dropout = {};            // fp32 only
  // fp32 sums for reduced types: of dW (n, k) over the rows so far, unless these are all; of db
  // (n).
  float *sums = nullptr, *bias_sums = nullptr;
  const void* bf16x3_panels = nullptr;  // X packed as bf16x3, instead of x and panels
};

// Whether X is x itself.
inline bool reads_x(const WeightGradientArgs& args) {
  return args.panels == nullptr && args.activation == 0 && !args.dropout.on;
}

struct WeightGradientKernels {
  Index pack_rows;  // row unit of pack
  Index (*packed_bytes)(Index m, Index k);
  // Computes rows of X and packs them into the panels at `to`.
  void (*pack)(const WeightGradientArgs& args, void* to, Index begin, Index end, void* scratch);

  Index rows, columns;                               // preferred maximum block of dW
  Index (*scratch)(const WeightGradientArgs& args);  // for pack and block
  // column_begin is a multiple of a panel's columns.
  void (*block)(const WeightGradientArgs& args, Index row_begin, Index row_end, Index column_begin,
                Index column_end, void* scratch);
  void (*bias)(const WeightGradientArgs& args, Index begin, Index end) = nullptr;  // of db
};

TF_KERNEL(const WeightGradientKernels* weight_gradient_kernels())
TF_KERNEL_AMX(const WeightGradientKernels* lowp_weight_gradient_kernels(Element type))
TF_KERNEL_BF16X3(const WeightGradientKernels* bf16x3_weight_gradient_kernels())

// Rows of a weight that are packed and used at a time, while they are in cache, if no packed copy
// is kept. Gradients of inputs sum over as many rows, then add up these sums: with 32,000 rows the
// error is half that of one sum.
constexpr Index kPartRows = 4096;

// Small m, where packing would take longer than the product. In fp32 operands are read and results
// written in place, once.
//
// Columns [begin, end) of dX = dY W, in multiples of small_m_columns().
struct SmallMInputArgs {
  const float* grad;    // dY (m, n), rows grad_stride apart
  const float* weight;  // W (n, k), rows weight_stride apart
  float* grad_input;    // (m, k), contiguous
  Index m, n, k, grad_stride, weight_stride;
};
TF_KERNEL(Index small_m_columns())
// Computes rows [row, row + rows) and small_m_columns() columns from `column` on of y, from the
// unpacked weight.
TF_KERNEL(void linear_strip(const LinearArgs& args, Index row, Index rows, Index column,
                            float* scratch))
TF_KERNEL(Index linear_strip_floats(Index rows))  // size of scratch
// scratch: m small_m_columns() floats.
TF_KERNEL(void small_m_input_gradient(const SmallMInputArgs& args, Index begin, Index end,
                                      float* scratch))

// Rows [begin, end) of dW, from unpacked X.
TF_KERNEL(void small_m_weight_gradient(const WeightGradientArgs& args, Index begin, Index end))

// Backward of activation and dropout between the two linear layers of a feed-forward network, for
// rows [begin, end); scratch of f + 64 floats.
struct HiddenBackwardArgs {
  Element type;
  const void* z;  // (m, f): input of the activation
  void* grad;     // (m, f): in: gradient of dropout(act(z)); out: that of z
  void* hidden;   // (m, f): receives dropout(act(z)); or nullptr
  Index f;
  int activation;
  Dropout dropout;
};
TF_KERNEL(void hidden_backward(const HiddenBackwardArgs& args, Index begin, Index end,
                               float* scratch))

}  // namespace tf
