// Gradients of a linear map for half types.
#include "cpu/ops/linear/linear_backward_half_kernel.h"

#include "cpu/gemm/weight_gradient_product.h"
#include "cpu/simd/column_sums.h"

namespace tf::TF_ISA {
namespace {

constexpr long kPackRows = 32;

// fp32 values as T.
template <class T>
void round_row(const float* from, long n, T* to) {
  for (long j = 0; j < n; j += kLanes) store_some(to + j, load_some(from + j, n - j), n - j);
}

template <class T>
void pack_columns(const void* matrix, long stride, long m, long k, void* panels, long begin,
                  long end) {
  using P = Product<T>;
  for (long block = begin; block < end; ++block) {
    const long p = block * kPackRows, depth = least(kPackRows, m - p);
    const T* rows = static_cast<const T*>(matrix) + p * stride;
    auto* panel = static_cast<typename P::Operand*>(panels) + P::panel_size(p);
    for (long j = 0; j < k; j += kPanel, panel += P::panel_size(m))
      P::pack_columns(rows + j, stride, least(kPanel, k - j), depth, panel);
  }
}

template <class T>
void weight_gradient(const HalfWeightGradientArgs& args, long row_begin, long row_end,
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
void bias_gradient(const HalfWeightGradientArgs& args, long begin, long end) {
  column_sums(static_cast<const T*>(args.grad) + begin, args.grad_stride, args.m, end - begin,
              !args.first, args.bias_sums + begin);
  if (args.last)
    round_row(args.bias_sums + begin, end - begin, static_cast<T*>(args.grad_bias) + begin);
}

}  // namespace

long half_pack_rows() { return kPackRows; }

void half_pack_columns(Element type, const void* matrix, long stride, long m, long k, void* panels,
                       long begin, long end) {
  (type == Element::bfloat16 ? pack_columns<BFloat16> : pack_columns<Float16>)(matrix, stride, m, k,
                                                                               panels, begin, end);
}

long half_weight_gradient_rows() { return WeightGradientBlock<BFloat16>::kRows; }
long half_weight_gradient_columns() { return WeightGradientBlock<BFloat16>::kColumns; }

long half_weight_gradient_scratch(Element type) {
  return type == Element::bfloat16 ? WeightGradientBlock<BFloat16>::scratch_bytes()
                                   : WeightGradientBlock<Float16>::scratch_bytes();
}

void half_weight_gradient(const HalfWeightGradientArgs& args, long row_begin, long row_end,
                          long column_begin, long column_end, void* scratch) {
  (args.type == Element::bfloat16
       ? weight_gradient<BFloat16>
       : weight_gradient<Float16>)(args, row_begin, row_end, column_begin, column_end, scratch);
}

void half_bias_gradient(const HalfWeightGradientArgs& args, long begin, long end) {
  (args.type == Element::bfloat16 ? bias_gradient<BFloat16> : bias_gradient<Float16>)(args, begin,
                                                                                      end);
}

}  // namespace tf::TF_ISA
