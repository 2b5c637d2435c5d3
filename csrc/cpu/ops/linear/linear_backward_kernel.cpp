// Weight gradients of a linear layer in fp32.
#include "cpu/gemm/weight_gradient_product.h"
#include "cpu/simd/activation_slope.h"
#include "cpu/simd/philox.h"

namespace tf::TF_ISA {
namespace {

template <class T>
void slope_rows(const SlopeArgs& args, long begin, long end) {
  const long n = args.n;
  for (long i = begin; i < end; ++i) {
    const T* grad = static_cast<const T*>(args.grad) + i * args.grad_stride;
    const T* z = static_cast<const T*>(args.z) + i * n;
    T* to = static_cast<T*>(args.to) + i * n;
    for (long j = 0; j < n; j += kLanes) {
      Vec x = load_some(z + j, n - j);
      const Vec y = activation_backward(load_some(grad + j, n - j), x, args.activation);
      store_some(to + j, y, n - j);
    }
  }
}

long panels_bytes(long m, long k) {
  return round_up(k, kPanel) * m * static_cast<long>(sizeof(float));
}

void pack_x(const WeightGradientArgs& args, void* panels, long begin, long end, void* scratch) {
  float* factors = static_cast<float*>(scratch);
  for (long i = begin; i < end; ++i) {
    const float* from = static_cast<const float*>(args.x) + i * args.x_stride;
    if (args.dropout.on)
      dropout_factors(args.dropout, static_cast<uint64_t>(args.row + i), 0, args.k, factors);
    for (long j = 0; j < args.k; j += kPanel) {
      float* to = static_cast<float*>(panels) + weight_gradient_place(args.m, i, j);
      TF_UNROLL for (int v = 0; v < kPanel; v += kLanes) {
        const long have = args.k - j - v;
        Vec x = have > 0 ? load_some(from + j + v, have) : zero();
        if (args.activation != kIdentity) x = activate(x, args.activation);
        if (args.dropout.on) x = drop(x, load(factors + j + v));
        store(to + v, x);
      }
    }
  }
}

long pack_scratch_bytes(const WeightGradientArgs& args) {
  return max(scratch_bytes<float>(args),
             args.dropout.on ? (args.k + kPanel) * static_cast<long>(sizeof(float)) : 0);
}

constexpr WeightGradientKernels kKernels{.pack_rows = 1,
                                         .packed_bytes = panels_bytes,
                                         .pack = pack_x,
                                         .rows = WeightGradientBlock<float>::kRows,
                                         .columns = WeightGradientBlock<float>::kColumns,
                                         .scratch = pack_scratch_bytes,
                                         .block = weight_gradient<float>,
                                         .bias = bias_gradient<float>};

}  // namespace

const WeightGradientKernels* weight_gradient_kernels() { return &kKernels; }

void multiply_by_slope(const SlopeArgs& args, long begin, long end) {
  dispatch_element(args.type, [&](auto type) { slope_rows<decltype(type)>(args, begin, end); });
}

}  // namespace tf::TF_ISA
