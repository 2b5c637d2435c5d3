// Weight gradients of fp32 with bf16x3: X is split once, dY as it is transposed.
#include "cpu/gemm/weight_gradient_product.h"

namespace tf::TF_ISA {
namespace {

using P = Product<float>;
using Operand = P::Operand;

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

constexpr WeightGradientKernels kKernels{.pack_rows = kPairDepth,
                                         .packed_bytes = panels_bytes,
                                         .pack = pack_x,
                                         .rows = WeightGradientBlock<float>::kRows,
                                         .columns = WeightGradientBlock<float>::kColumns,
                                         .scratch = scratch_bytes<float>,
                                         .block = weight_gradient<float>};

}  // namespace

const WeightGradientKernels* bf16x3_weight_gradient_kernels() { return &kKernels; }

}  // namespace tf::TF_ISA
