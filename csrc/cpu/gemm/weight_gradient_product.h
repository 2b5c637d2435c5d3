// dW = dY^T X on the GEMM engine (engine.h): the fp32 sums of a block of dW stay in the
// second-level cache while all rows of dY and X are read, kDepth at a time. dY is transposed as it
// is packed. For kernel files only.
#pragma once

#include "cpu/gemm/engine.h"
#include "cpu/gemm/interleave.h"

namespace tf::TF_ISA {
namespace {

template <class T>
class WeightGradientBlock {
  using P = Product<T>;
  using Operand = typename P::Operand;

 public:
  // Maximum size of the block of dW.
  static constexpr long kRows = 256, kColumns = 512;

  static long scratch_bytes() {
    return P::block_size(kRows, kDepth) * static_cast<long>(sizeof(Operand)) +
           kRows * kSumStride * static_cast<long>(sizeof(float));
  }

  // grad: dY (m, n), rows grad_stride apart. panels: X in panels of its columns. The block is
  // `rows` rows from `row` on and `columns` columns from `column` (a multiple of kPanel) on.
  WeightGradientBlock(const T* grad, long grad_stride, long m, const void* panels, long row,
                      long rows, long column, long columns, void* scratch)
      : grad_(grad + row),
        grad_stride_(grad_stride),
        m_(m),
        rows_(rows),
        columns_(columns),
        panels_(static_cast<const Operand*>(panels) + column / kPanel * P::panel_size(m)),
        packed_grad_(static_cast<Operand*>(scratch)),
        sums_(reinterpret_cast<float*>(packed_grad_ + P::block_size(kRows, kDepth))) {}

  // kColumns floats: the sums of the block, followed by padding.
  float* sums(long row) const { return sums_ + row * kSumStride; }

  // Whether all rows fit in one step, as multiply_at_once() requires.
  static bool is_one_part(long m) { return m <= kDepth; }

  // Calls sink(i, j, low, high) with row i and the kPanel columns from j on of dY^T X; the last
  // ones may lie beyond the block.
  template <class Sink>
  void multiply_at_once(const Sink& sink) const {
    P::enter();
    take_grad(0, m_, m_);
    for (long j = 0; j < columns_; j += kPanel) {
      const Operand* panel = panels_ + j / kPanel * P::panel_size(m_);
      P::multiply(packed_grad_, rows_, m_, panel, panel + P::panel_size(m_), sums_,
                  [&](long i, Vec low, Vec high)
                      __attribute__((always_inline)) { sink(i, j, low, high); });
    }
    P::leave();
  }

  // sums = dY^T X, or sums += dY^T X.
  void multiply(bool accumulate) const {
    P::enter();
    for (long p = 0; p < m_; p += kDepth) {
      const long depth = min(kDepth, m_ - p);
      take_grad(p, depth, kDepth);
      multiply_part(p, depth, accumulate || p > 0);
    }
    P::leave();
  }

 private:
  static constexpr long kDepth = P::kKBlock;
  static constexpr long kSumStride = kColumns + 16;  // not a power of two

  // Packs rows [p, p + depth) of dY transposed, in a block of depth `block_depth`.
  void take_grad(long p, long depth, long block_depth) const {
    constexpr long kTransposeRows = 16, kTransposeDepth = 32;
    for (long u = 0; u < depth; u += kTransposeDepth)
      for (long i = 0; i < rows_; i += kTransposeRows)
        P::fill_transposed(grad_ + (p + u) * grad_stride_ + i, grad_stride_,
                           min(kTransposeDepth, depth - u), min(kTransposeRows, rows_ - i),
                           packed_grad_, block_depth, i, u);
  }

  void multiply_part(long p, long depth, bool accumulate) const {
    const long size = P::panel_size(m_), calls = P::steps(rows_, depth);
    const long bytes = P::panel_size(depth) * static_cast<long>(sizeof(Operand));
    for (long j = 0; j < columns_; j += kPanel) {
      const Operand* panel = panels_ + j / kPanel * size + P::panel_size(p);
      FetchAhead fetch(panel + size, bytes, calls);
      P::multiply_to(packed_grad_, kDepth, rows_, depth, panel, accumulate, sums_ + j, kSumStride,
                     [&]() __attribute__((always_inline)) { fetch(); });
    }
  }

  const T* grad_;
  long grad_stride_, m_, rows_, columns_;
  const Operand* panels_;
  Operand* packed_grad_;
  float* sums_;
};

}  // namespace
}  // namespace tf::TF_ISA
