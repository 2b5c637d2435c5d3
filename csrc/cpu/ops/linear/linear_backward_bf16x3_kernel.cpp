// Weight gradients of fp32 with bf16x3: X is split once, dY as it is transposed.
#include "cpu/gemm/gemm.h"
#include "cpu/gemm/weight_gradient_product.h"
#include "cpu/ops/linear/linear.h"

namespace tf::TF_ISA {
namespace {

using P = Product<float>;
using Operand = P::Operand;
using Block = WeightGradientBlock<float>;

// Address of X at a row and a column (a multiple of kPanel).
const float* x_at(const WeightGradientArgs& args, long row, long column) {
  return static_cast<const float*>(reads_x(args) ? args.x : args.panels) +
         (reads_x(args) ? row * args.x_stride + column
                        : weight_gradient_place(args.m, row, column));
}
long x_stride(const WeightGradientArgs& args) { return reads_x(args) ? args.x_stride : kPanel; }

// kPanel columns, from `column` on, of a row of the result by fp32 FMA, for values that are not
// representable as bf16x3.
void fp32_columns(const WeightGradientArgs& args, long row, long column, long width, float* sums) {
  const float* x = x_at(args, 0, column);
  const long stride = x_stride(args);
  copy_row(static_cast<float*>(args.grad_weight) + row * args.k + column, args.first ? 0 : width,
           sums, kPanel);
  for (long p = 0; p < args.m; ++p) {
    const float grad = static_cast<const float*>(args.grad)[p * args.grad_stride + row];
    for (long c = 0; c < width; ++c) sums[c] += grad * x[p * stride + c];
  }
}

long panels_bytes(long m, long k) {
  return round_up(k, kPanel) / kPanel * P::panel_size(m) * static_cast<long>(sizeof(Operand));
}

void pack_x(const WeightGradientArgs& args, void* panels, long begin, long end, void*) {
  for (long p = begin; p < end; p += kPairDepth) {
    for (long pair = 0; pair < kPairDepth / 2; ++pair) {
      auto* to = static_cast<Operand*>(panels) + P::panel_size(p);
      for (long j = 0; j < args.k; j += kPanel, to += P::panel_size(args.m))
        pack_bf16x3_pair(x_at(args, p, j), x_stride(args), min(kPanel, args.k - j),
                         min(kPairDepth, args.m - p), pair, to);
    }
  }
}

long scratch_bytes(const WeightGradientArgs&) { return Block::scratch_bytes(); }

void weight_gradient(const WeightGradientArgs& args, long row_begin, long row_end,
                     long column_begin, long column_end, void* scratch) {
  const long rows = row_end - row_begin, columns = column_end - column_begin;
  const Block block(static_cast<const float*>(args.grad), args.grad_stride, args.m,
                    args.bf16x3_panels, row_begin, rows, column_begin, columns, scratch);
  const auto row = [&](long i) {
    return static_cast<float*>(args.grad_weight) + (row_begin + i) * args.k + column_begin;
  };
  if (!args.first)
    for (long i = 0; i < rows; ++i)
      copy_row(row(i), columns, block.sums(i), round_up(columns, kPanel));
  block.multiply(!args.first);
  for (long i = 0; i < rows; ++i) {
    for (long j = 0; j < columns; j += kPanel) {
      float* sums = block.sums(i) + j;
      if (P::needs_fp32(load(sums), load(sums + kLanes)))
        fp32_columns(args, row_begin + i, column_begin + j, min(kPanel, columns - j), sums);
    }
    copy_row(block.sums(i), columns, row(i), columns);
  }
}

constexpr WeightGradientKernels kKernels{.pack_rows = kPairDepth,
                                         .packed_bytes = panels_bytes,
                                         .pack = pack_x,
                                         .rows = Block::kRows,
                                         .columns = Block::kColumns,
                                         .scratch = scratch_bytes,
                                         .block = weight_gradient};

}  // namespace

const WeightGradientKernels* bf16x3_weight_gradient_kernels() { return &kKernels; }

}  // namespace tf::TF_ISA
