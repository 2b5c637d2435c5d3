// Weight gradients of a linear layer for bfloat16 and float16.
#include "cpu/gemm/weight_gradient_product.h"
#include "cpu/ops/linear/linear_product.h"
#include "cpu/simd/column_sums.h"

namespace tf::TF_ISA {
namespace {

// Converts fp32 values to T.
template <class T>
void round_row(const float* from, long n, T* to) {
  for (long j = 0; j < n; j += kLanes) store_some(to + j, load_some(from + j, n - j), n - j);
}

template <class T>
void weight_gradient(const WeightGradientArgs& args, long row_begin, long row_end,
                     long column_begin, long column_end, void* scratch) {
  const long rows = row_end - row_begin, columns = column_end - column_begin;
  const WeightGradientBlock<T> block(static_cast<const T*>(args.grad), args.grad_stride, args.m,
                                     args.panels, row_begin, rows, column_begin, columns, scratch);
  const auto place = [&](long i) { return (row_begin + i) * args.k + column_begin; };
  if (args.first && args.last && block.is_one_part(args.m)) {
    auto* to = static_cast<T*>(args.grad_weight);
    block.multiply_at_once([&](long i, long j, Vec low, Vec high) __attribute__((always_inline)) {
      const long left = columns - j;
      store_some(to + place(i) + j, low, left);
      if (left > kLanes) store_some(to + place(i) + j + kLanes, high, left - kLanes);
    });
    return;
  }
  if (!args.first)
    for (long i = 0; i < rows; ++i)
      copy_row(args.sums + place(i), columns, block.sums(i), round_up(columns, kPanel));
  block.multiply(!args.first);
  for (long i = 0; i < rows; ++i) {
    if (args.last) {
      round_row(block.sums(i), columns, static_cast<T*>(args.grad_weight) + place(i));
    } else {
      copy_row(block.sums(i), columns, args.sums + place(i), columns);
    }
  }
}

template <class T>
void bias_gradient(const WeightGradientArgs& args, long begin, long end) {
  column_sums(static_cast<const T*>(args.grad) + begin, args.grad_stride, args.m, end - begin,
              !args.first, args.bias_sums + begin);
  if (args.last)
    round_row(args.bias_sums + begin, end - begin, static_cast<T*>(args.grad_bias) + begin);
}

template <class T>
long scratch_bytes(const WeightGradientArgs&) {
  return WeightGradientBlock<T>::scratch_bytes();
}

template <class T>
long panels_bytes(long m, long k) {
  return packed_bytes<T>(k, m);
}

template <class T>
void pack_x(const WeightGradientArgs& args, void* to, long begin, long end, void*) {
  pack_transposed<T>(args.x, args.x_stride, args.k, args.m, to, begin / kPackRows,
                     (end + kPackRows - 1) / kPackRows);
}

template <class T>
constexpr WeightGradientKernels kKernels{.pack_rows = kPackRows,
                                         .packed_bytes = panels_bytes<T>,
                                         .pack = pack_x<T>,
                                         .rows = WeightGradientBlock<T>::kRows,
                                         .columns = WeightGradientBlock<T>::kColumns,
                                         .scratch = scratch_bytes<T>,
                                         .block = weight_gradient<T>,
                                         .bias = bias_gradient<T>};

}  // namespace

const WeightGradientKernels* lowp_weight_gradient_kernels(Element type) {
  return type == Element::bfloat16 ? &kKernels<BFloat16> : &kKernels<Float16>;
}

}  // namespace tf::TF_ISA
