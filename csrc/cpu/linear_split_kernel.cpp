// Linear map with epilogue for fp32 in pieces.
#include "cpu/linear_split_kernel.h"

#include "cpu/linear_product.h"

namespace tf::TF_ISA {

long split_packed_bytes(long n, long k) { return packed_bytes<float>(n, k); }

void split_pack_panels(const float* weight, long stride, long n, long k, bool transposed,
                       void* packed, long begin, long end) {
  if (!transposed) return pack<float>(weight, stride, n, k, packed, begin, end);
  using P = Product<float>;
  for (long p = begin; p < end; ++p)
    P::pack_columns(weight + p * kPanel, stride, least(kPanel, n - p * kPanel), k,
                    static_cast<P::Operand*>(packed) + p * P::panel_size(k));
}

bool split_packed_matches(const float* weight, long stride, long n, long k, const void* packed) {
  return matches<float>(weight, stride, n, k, packed);
}

long split_linear_row_block(const TypedLinearArgs& args) { return row_block<float>(args.k); }

long split_linear_scratch(const TypedLinearArgs& args) { return scratch_bytes<float>(args.k); }

void split_linear_block(const TypedLinearArgs& args, long row_begin, long row_end, long panel_begin,
                        long panel_end, void* scratch) {
  block<float>(args, row_begin, row_end, panel_begin, panel_end, scratch);
}

}  // namespace tf::TF_ISA
