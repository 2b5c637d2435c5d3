// What the operators around linear maps share.
#pragma once

#include <algorithm>

#include "cpu/core/host.h"
#include "cpu/ops/linear/linear.h"

namespace tf {

// More than any machine has memory for; views that repeat elements may have more.
constexpr int64_t kMaxElements = int64_t{1} << 56;

// The weight (out, columns), and the bias, if any, are of that type.
void check_weight(const char* op, const char* name, const Tensor& weight, int64_t columns,
                  const std::optional<Tensor>& bias, ScalarType type = ScalarType::Float);

inline int64_t row_count(const Tensor& input) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < input.dim(); ++d) rows *= input.size(d);
  return rows;
}

// Where part `part` of `parts` of m rows begins, at a multiple of `unit`: of tiles, which are
// shared out evenly, or of a row or two, of which the last part gets what is over.
inline int64_t row_of_part(int64_t m, int64_t part, int64_t parts, int64_t unit) {
  if (unit > 2) return std::min(m, (m + unit - 1) / unit * part / parts * unit);
  return part == parts ? m : m * part / parts / unit * unit;
}

// A weight packed for products, and what multiplies by it.
struct Panels {
  const LinearKernels* kernels = nullptr;
  const void* data = nullptr;

  // From row `row` of W (n, k) on, which begins a panel.
  Panels from(int64_t row, int64_t k) const {
    return {kernels, static_cast<const char*>(data) + kernels->packed_bytes(row, k)};
  }
};

// Columns of a panel.
inline int64_t panel_columns() { return TF_DISPATCH(linear_kernels, )->panel; }

// The panels of a weight for products of m rows: those given, if they are a packed copy of it that
// can be read, else packed now into the calling thread's shared scratch `slot`. That they are a
// copy of what the weight is now, the caller has made sure of (Fingerprint).
Panels panels_of(const Tensor& weight, const std::optional<Tensor>& packed, int slot, int64_t m);

// The same for products by W instead of W^T.
Panels column_panels_of(const Tensor& weight, int slot, int64_t m);

// Whether a product of m rows reads the weight as it is, because packing it first would take
// longer. No packed copy is kept for so few rows, so a result does not depend on whether one is.
bool is_direct(const Tensor& weight, const std::optional<Tensor>& packed, int64_t m);

// By rows of W from `row` on, as they are.
void run_direct_linear(LinearArgs args, const Tensor& weight, int64_t row);

void run_linear(LinearArgs args, const Panels& panels);

// With the weight as it is, packed before, or packed now into shared scratch `slot`.
void run_linear(LinearArgs args, const Tensor& weight, const std::optional<Tensor>& packed,
                int slot);

// Gradients of so many rows of fp32 read everything where it lies: packing would take longer.
constexpr int64_t kSmallM = 48;
bool is_small_m_backward(const Tensor& weight, int64_t m);

// dX = dY W, dY (m, n) with rows grad_stride apart; W is packed into shared scratch `slot`.
void run_input_gradient(const void* grad, int64_t grad_stride, const Tensor& weight, int64_t m,
                        void* grad_input, int slot);

// Rows whose panels are made at a time: those of many rows would take as much memory as X.
int64_t weight_gradient_part_rows(Element type, int64_t columns);

// Shared scratch of X in pieces, which callers use for nothing else in fp32.
constexpr int kBf16x3Slot = 5;

// Room for the panels of X (m, k), which callers fill.
void* weight_gradient_panels(Element type, int64_t m, int64_t k, int slot);

// X goes into panels, in the shared scratch `slot`, unless it is there already (args.panels).
void run_weight_gradient_part(WeightGradientArgs args, int slot);

// Sums of half types: those of the bias are always needed, those of the weight for several parts.
inline int64_t sum_floats(const WeightGradientArgs& args, bool parts) {
  return args.n + (parts ? args.n * args.k : 0);
}
inline void set_sums(WeightGradientArgs& args, float* place, bool parts) {
  args.bias_sums = place;
  args.sums = parts ? place + args.n : nullptr;
}

}  // namespace tf
