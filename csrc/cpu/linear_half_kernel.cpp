// Linear map with epilogue for half types.
#include "cpu/linear_half_kernel.h"

#include "cpu/linear_product.h"

namespace tf::TF_ISA {

long half_panel_columns() { return kPanel; }

long half_packed_bytes(Element type, long n, long k) {
  return type == Element::bfloat16 ? packed_bytes<BFloat16>(n, k) : packed_bytes<Float16>(n, k);
}

long half_packed_layout(Element type) {
  return kPanel + (type == Element::bfloat16 && sizeof(Product<BFloat16>::Operand) == 2 ? 1 : 0);
}

void half_pack_panels(Element type, const void* weight, long stride, long n, long k, void* packed,
                      long begin, long end) {
  (type == Element::bfloat16 ? pack<BFloat16> : pack<Float16>)(weight, stride, n, k, packed, begin,
                                                               end);
}

long half_linear_row_block(const TypedLinearArgs& args) {
  return args.type == Element::bfloat16 ? row_block<BFloat16>(args.k) : row_block<Float16>(args.k);
}

long half_linear_scratch(const TypedLinearArgs& args) {
  return args.type == Element::bfloat16 ? scratch_bytes<BFloat16>(args.k)
                                        : scratch_bytes<Float16>(args.k);
}

void half_linear_block(const TypedLinearArgs& args, long row_begin, long row_end, long panel_begin,
                       long panel_end, void* scratch) {
  (args.type == Element::bfloat16 ? block<BFloat16> : block<Float16>)(args, row_begin, row_end,
                                                                      panel_begin, panel_end,
                                                                      scratch);
}

}  // namespace tf::TF_ISA
