// activation(x W^T + bias) + residual on packed weights, and its gradients. Half types are summed
// up in fp32 and rounded once; fp32 goes by FMA, or on bfloat16 units by pieces (bf16_amx.h).
#pragma once

#include "cpu/core/element.h"
#include "cpu/core/isa.h"
#include "cpu/simd/dropout.h"

namespace tf {

struct LinearArgs {
  Element type;          // of all tensors here
  const void* x;         // (m, k), rows x_stride apart
  const void* packed;    // W (n, k) in panels, see LinearKernels
  const void* bias;      // (n) or nullptr: zeros
  const void* residual;  // (m, n), rows residual_stride apart, or nullptr
  void* y;               // (m, n), rows y_stride apart
  long m, k, n, x_stride, residual_stride, y_stride;
  int activation;
  void* preactivation = nullptr;  // (m, n), contiguous: x W^T + bias is kept here, or nullptr
  // In place of packed: W itself, rows weight_stride apart, or, if turned, W^T.
  const void* weight = nullptr;
  long weight_stride = 0;
  bool transposed = false;
};

// Products with weights that are packed in one way. Scratch is in bytes, and ranges are half open.
struct LinearKernels {
  bool in_fp32;                   // packed as fp32
  uint16_t layout = 0;            // tells it from others of the same size
  long panel;                     // columns of a panel
  long row_unit;                  // cut rows at multiples
  long pack_transposed_rows = 0;  // rows of W^T that pack_transposed takes at once, or 0: panels
  long (*packed_bytes)(long n, long k) = nullptr;
  // Panels [begin, end) of W (n, k), or from W^T (k, n), rows stride apart.
  void (*pack)(const void* weight, long stride, long n, long k, void* packed, long begin,
               long end) = nullptr;
  void (*pack_transposed)(const void* transposed, long stride, long n, long k, void* packed,
                          long begin, long end) = nullptr;

  // Rows and panels from `packed`; of how many rows at once, at most.
  long (*row_block)(const LinearArgs& args) = nullptr;
  long (*scratch)(const LinearArgs& args) = nullptr;
  void (*block)(const LinearArgs& args, long row_begin, long row_end, long panel_begin,
                long panel_end, void* scratch) = nullptr;

  // All rows, if they are one block of at most `deepest` columns: fill() brings them into the form
  // that products read, and then panels pass by, as often as wanted. Without `packed` each is
  // packed just before it is multiplied, which pays from min_panels a thread on.
  long max_depth = 0, min_panels = 0;
  long (*panels_scratch)(const LinearArgs& args) = nullptr;
  void (*fill)(const LinearArgs& args, void* scratch) = nullptr;
  void (*panels)(const LinearArgs& args, long begin, long end, void* scratch) = nullptr;

  // Columns of y, direct_unit of them at once, from W as it is, not turned: for 1 to
  // kMaxDirectRows rows.
  long direct_unit = 0;
  void (*direct)(const LinearArgs& args, long begin, long end) = nullptr;
};
constexpr long kMaxDirectRows = 12;

TF_KERNEL(const LinearKernels* linear_kernels())
TF_KERNEL_AMX(const LinearKernels* lowp_linear_kernels(Element type))
TF_KERNEL_BF16X3(const LinearKernels* bf16x3_linear_kernels())
// `block` of all rows, of which there are few, from panels of fp32.
TF_KERNEL_BF16X3(const LinearKernels* bf16x3_small_m_linear_kernels())

// to[j] = grad[j] * act'(z[j]) for rows [begin, end) of n columns.
struct SlopeArgs {
  Element type;
  const void* grad;  // (m, n), rows grad_stride apart
  const void* z;     // (m, n), contiguous: what the activation was applied to
  void* to;          // (m, n), contiguous
  long n, grad_stride;
  int activation;
};
TF_KERNEL(void multiply_by_slope(const SlopeArgs& args, long begin, long end))

// Some rows' part of dW = dY^T X and db = sum over rows of dY, with X = dropout(act(x)).
struct WeightGradientArgs {
  Element type;
  const void* grad = nullptr;   // dY (m, n), rows grad_stride apart
  const void* x = nullptr;      // (m, k), rows x_stride apart
  void* panels = nullptr;       // X in panels of its columns, see WeightGradientKernels
  void* grad_weight = nullptr;  // (n, k), contiguous, or nullptr: not wanted
  void* grad_bias = nullptr;    // (n) or nullptr
  long m, n, k, grad_stride, x_stride;
  bool first = true, last = true;  // no rows went before, none come after
  long row = 0;                    // of the first row among those that dropout counts
  int activation = 0;              // neither this
  Dropout dropout = {};            // nor this for half types
  // Of half types in fp32: (n, k) of the rows so far, if these are not all, and (n).
  float *sums = nullptr, *bias_sums = nullptr;
  const void* bf16x3_panels = nullptr;  // for the split kernels in place of x and panels
};

// Whether x is X.
inline bool reads_x(const WeightGradientArgs& args) {
  return args.panels == nullptr && args.activation == 0 && !args.dropout.on;
}

struct WeightGradientKernels {
  long pack_rows;  // rows that pack takes at once
  long (*packed_bytes)(long m, long k);
  // Computes such rows of X and puts them into the panels at `to`.
  void (*pack)(const WeightGradientArgs& args, void* to, long begin, long end, void* scratch);

  long rows, columns;                               // of dW that `block` should be given, at most
  long (*scratch)(const WeightGradientArgs& args);  // of pack and block
  // column_begin is a multiple of a panel's columns.
  void (*block)(const WeightGradientArgs& args, long row_begin, long row_end, long column_begin,
                long column_end, void* scratch);
  void (*bias)(const WeightGradientArgs& args, long begin, long end) = nullptr;  // elements of db
};

TF_KERNEL(const WeightGradientKernels* weight_gradient_kernels())
TF_KERNEL_AMX(const WeightGradientKernels* lowp_weight_gradient_kernels(Element type))
TF_KERNEL_BF16X3(const WeightGradientKernels* bf16x3_weight_gradient_kernels())

// Few rows of fp32, for which packing would take longer than the products: everything is read and
// written once, where it lies.
//
// Columns [begin, end) of dX = dY W; how many a call should be given a multiple of.
struct SmallMInputArgs {
  const float* grad;    // dY (m, n), rows grad_stride apart
  const float* weight;  // W (n, k), rows weight_stride apart
  float* grad_input;    // (m, k), contiguous
  long m, n, k, grad_stride, weight_stride;
};
TF_KERNEL(long small_m_columns())
TF_KERNEL(void small_m_input_gradient(const SmallMInputArgs& args, long begin, long end))

// Rows [begin, end) of dW, from X as it is.
TF_KERNEL(void small_m_weight_gradient(const WeightGradientArgs& args, long begin, long end))

// Rows [begin, end) between the two maps of a feed-forward network; scratch of f + 64 floats.
struct HiddenBackwardArgs {
  const float* z;  // (m, f): what the activation was applied to
  float* grad;     // (m, f): the gradient of what meets W2; becomes that of z
  float* hidden;   // (m, f): what meets W2, dropout(act(z)); or nullptr
  long f;
  int activation;
  Dropout dropout;
};
TF_KERNEL(void hidden_backward(const HiddenBackwardArgs& args, long begin, long end,
                               float* scratch))

}  // namespace tf
