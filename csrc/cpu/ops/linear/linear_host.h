// Helpers of the operators that contain linear layers.
#pragma once

#include <algorithm>

#include "cpu/core/host.h"
#include "cpu/ops/linear/linear.h"

namespace tf {

// More than fits in any memory; expanded views may have more elements.
constexpr int64_t kMaxElements = int64_t{1} << 56;

// Checks shape and dtype of the weight (out, columns) and of the optional bias.
void check_weight(const char* op, const char* name, const Tensor& weight, int64_t columns,
                  const std::optional<Tensor>& bias, ScalarType type = ScalarType::Float);

inline int64_t row_count(const Tensor& input) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < input.dim(); ++d) rows *= input.size(d);
  return rows;
}

// First of m rows in part `part` of `parts`, a multiple of `unit`: tiles are divided evenly;
// with units of one or two rows the last part gets the remainder.
inline int64_t row_of_part(int64_t m, int64_t part, int64_t parts, int64_t unit) {
  if (unit > 2) return std::min(m, (m + unit - 1) / unit * part / parts * unit);
  return part == parts ? m : m * part / parts / unit * unit;
}

// A packed weight and the kernels for its layout.
struct Panels {
  const LinearKernels* kernels = nullptr;
  const void* data = nullptr;

  // Panels from row `row` of W (n, k) on, which must start a panel.
  Panels from(int64_t row, int64_t k) const {
    return {kernels, static_cast<const char*>(data) + kernels->packed_bytes(row, k)};
  }
};

// A matrix, of a tensor or in memory that the caller keeps.
struct Matrix {
  // In memory, columns adjacent.
  Matrix(Element type, const void* data, int64_t rows, int64_t columns, int64_t stride)
      : type(type), data(data), rows(rows), columns(columns), stride(stride) {}
  Matrix(const Tensor& tensor)
      : type(element_of(tensor)),
        data(tensor.const_data_ptr()),
        rows(tensor.size(0)),
        columns(tensor.size(1)),
        stride(tensor.stride(0)),
        is_adjacent(columns <= 1 || tensor.stride(1) == 1),
        owner(tensor) {}

  int64_t numel() const { return rows * columns; }
  // The matrix itself, or a copy with adjacent columns.
  Matrix adjacent() const { return is_adjacent ? *this : Matrix(as_contiguous(*owner)); }
  // Rows [begin, begin + count).
  Matrix part(int64_t begin, int64_t count) const {
    if (!is_adjacent) {
      Tensor whole = *owner;
      return torch::stable::narrow(whole, 0, begin, count);
    }
    return {type, offset_ptr(data, type, begin * stride), count, columns, stride};
  }

  Element type;
  const void* data;
  int64_t rows, columns, stride;  // between rows, in elements
  bool is_adjacent = true;        // columns
  std::optional<Tensor> owner;    // none if the caller keeps the memory
};

// Number of columns of a panel.
inline int64_t panel_columns() { return TF_DISPATCH(linear_kernels, )->panel; }

// Panels of a weight for products of m rows: the given packed copy if its layout is usable, else
// packed now into shared scratch `slot` of the calling thread. The caller has verified that the
// copy is up to date (Fingerprint).
Panels panels_of(const Matrix& weight, const std::optional<Tensor>& packed, int slot, int64_t m);

// Packs W (n, k) into shared scratch `slot`; if transposed, W^T, given W (k, n).
Panels pack_now(const LinearKernels& kernels, const Matrix& weight, bool transposed, int slot);

// A packed copy that the caller keeps.
Tensor pack_copy(const LinearKernels& kernels, const Tensor& weight);
// The panels of a packed copy, or nullptr if its layout is not that of the kernels.
const void* panels_in(const LinearKernels& kernels, const Matrix& weight, const Tensor& packed);

// A packed copy of an int8 weight for the kernels of ops/int8_linear; its panels, or nullptr if the
// instruction set in use has another layout.
Tensor pack_int8_weight(const Tensor& weight);
const void* int8_panels_of(const Tensor& weight, const std::optional<Tensor>& packed);
void check_int8_weight(const char* op, const char* name, const Tensor& weight);
// Validates the factors of the input's columns, one for each column of the weight `name`.
void check_int8_factors(const char* op, const char* name, const std::optional<Tensor>& factors,
                        int64_t columns);

// Panels for products with W instead of W^T, packed now.
Panels column_panels_of(const Matrix& weight, int slot, int64_t m);

// The layout of the panels that panels_of() returns.
const LinearKernels* kernels_of(const Matrix& weight, const std::optional<Tensor>& packed,
                                int64_t m);

// Whether a product of m rows reads the unpacked weight, because packing it would take longer. It
// does so beside a packed copy, too: results do not depend on one.
bool is_direct(const Matrix& weight, int64_t m);

// Uses the rows of unpacked W from `row` on.
void run_direct_linear(LinearArgs args, const Matrix& weight, int64_t row);

void run_linear(LinearArgs args, const Panels& panels);

// Reads the weight unpacked, uses its packed copy, or packs it into shared scratch `slot`.
void run_linear(LinearArgs args, const Matrix& weight, const std::optional<Tensor>& packed,
                int slot);

// Whether products with an unpacked weight pack one strip of it at a time.
bool reads_strips(Element type, int64_t m);
// Whether input gradients for a weight (n, k) use unpacked operands: packing would take longer.
bool is_direct_backward(Element type, int64_t m, int64_t n, int64_t k);

// dX = dY W, dY (m, n) with rows grad_stride apart; W is packed into shared scratch `slot`.
void run_input_gradient(const void* grad, int64_t grad_stride, const Matrix& weight, int64_t m,
                        void* grad_input, int slot);

// Rows of X packed at a time: panels of all rows would take as much memory as X.
int64_t weight_gradient_part_rows(Element type, int64_t columns);

// Shared scratch for X as bf16x3; in fp32, callers must not use it otherwise.
constexpr int kBf16x3Slot = 5;

// Buffer for the panels of X (m, k), filled by the caller.
void* weight_gradient_panels(Element type, int64_t m, int64_t k, int slot);

// Packs X into panels in shared scratch `slot`, unless args.panels is given.
void run_weight_gradient_part(WeightGradientArgs args, int slot);

// fp32 sums for reduced types: always those of the bias; those of the weight for several parts.
inline int64_t sum_floats(const WeightGradientArgs& args, bool parts) {
  return args.n + (parts ? args.n * args.k : 0);
}
inline void set_sums(WeightGradientArgs& args, float* place, bool parts) {
  args.bias_sums = place;
  args.sums = parts ? place + args.n : nullptr;
}

}  // namespace tf
