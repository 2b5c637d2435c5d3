// Weight gradients of a linear layer for bfloat16 and float16.
#include "cpu/gemm/weight_gradient_product.h"
#include "cpu/ops/linear/linear_product.h"

namespace tf::TF_ISA {
namespace {

template <class T>
long panels_bytes(long m, long k) {
  return packed_bytes<T>(k, m);
}

template <class T>
void pack_x(const WeightGradientArgs& args, void* to, long begin, long end, void*) {
  pack_transposed<T>(args.x, args.x_stride, args.k, args.m, to, begin / kPackRows<T>,
                     (end + kPackRows<T> - 1) / kPackRows<T>);
}

template <class T>
constexpr WeightGradientKernels kKernels{.pack_rows = kPackRows<T>,
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
