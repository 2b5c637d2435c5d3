// Linear map with epilogue for fp32 in pieces.
#include "cpu/ops/linear/linear_split_kernel.h"

#include "cpu/ops/linear/linear_product.h"

namespace tf::TF_ISA {
namespace {

// Long rows leave room for few of them, past which the weights would have to come too often. So
// they are cut into slabs, whose products gather in a block of the result.
constexpr long kSlab = Product<float>::kChain;
constexpr long kSlabRows = 256, kSlabColumns = 512;
constexpr long kSumStride = kSlabColumns + 16;  // off the powers of two

bool in_slabs(long k) { return k > 2 * kSlab; }

long slab_scratch_bytes() {
  using P = Product<float>;
  return P::block_size(kSlabRows, kSlab) * static_cast<long>(sizeof(P::Operand)) +
         kSlabRows * kSumStride * static_cast<long>(sizeof(float));
}

// Rows [row, row + rows) of panels [panel_begin, panel_end), at most kSlabRows and kSlabColumns.
void slab_block(const TypedLinearArgs& args, long row, long rows, long panel_begin, long panel_end,
                void* scratch) {
  using P = Product<float>;
  auto* a = static_cast<P::Operand*>(scratch);
  float* sums = reinterpret_cast<float*>(a + P::block_size(kSlabRows, kSlab));
  const auto* packed = static_cast<const P::Operand*>(args.packed);
  const float* x = static_cast<const float*>(args.x) + row * args.x_stride;
  const long size = P::panel_size(args.k);
  for (long p = 0; p < args.k; p += kSlab) {
    const long depth = least(kSlab, args.k - p);
    P::fill(x + p, args.x_stride, rows, depth, a);
    const long bytes = P::panel_size(depth) * static_cast<long>(sizeof(P::Operand));
    for (long j = panel_begin; j < panel_end; ++j) {
      const P::Operand* panel = packed + j * size + P::panel_size(p);
      FetchAhead fetch(panel + size, bytes, P::steps(rows, depth));
      P::multiply_to(a, depth, rows, depth, panel, p > 0, sums + (j - panel_begin) * kPanel,
                     kSumStride, [&]() __attribute__((always_inline)) { fetch(); });
    }
  }
  const RowEnds<float> ends(args, row);
  for (long j = panel_begin; j < panel_end; ++j) {
    const Ends<float> of_panel = ends.of_panel(j);
    for (long i = 0; i < rows; ++i) {
      const float* from = sums + i * kSumStride + (j - panel_begin) * kPanel;
      ends.finish(of_panel, i, j, load(from), load(from + kLanes));
    }
  }
}

void slab_blocks(const TypedLinearArgs& args, long row_begin, long row_end, long panel_begin,
                 long panel_end, void* scratch) {
  Product<float>::enter();
  const long count = (row_end - row_begin + kSlabRows - 1) / kSlabRows;
  for (long item = 0, row = row_begin; item < count; ++item) {
    const long rows = (row_end - row + count - item - 1) / (count - item);
    for (long p = panel_begin; p < panel_end; p += kSlabColumns / kPanel)
      slab_block(args, row, rows, p, least(panel_end, p + kSlabColumns / kPanel), scratch);
    row += rows;
  }
  Product<float>::leave();
}

}  // namespace

long split_packed_bytes(long n, long k) { return packed_bytes<float>(n, k); }

void split_pack_panels(const float* weight, long stride, long n, long k, bool transposed,
                       void* packed, long begin, long end) {
  if (!transposed) return pack<float>(weight, stride, n, k, packed, begin, end);
  using P = Product<float>;
  for (long p = begin; p < end; ++p)
    P::pack_columns(weight + p * kPanel, stride, least(kPanel, n - p * kPanel), k,
                    static_cast<P::Operand*>(packed) + p * P::panel_size(k));
}

long split_linear_row_block(const TypedLinearArgs& args) {
  return in_slabs(args.k) ? kSlabRows : row_block<float>(args.k);
}

long split_linear_scratch(const TypedLinearArgs& args) {
  return in_slabs(args.k) ? slab_scratch_bytes() : scratch_bytes<float>(args.k);
}

void split_linear_block(const TypedLinearArgs& args, long row_begin, long row_end, long panel_begin,
                        long panel_end, void* scratch) {
  (in_slabs(args.k) ? slab_blocks : block<float>)(args, row_begin, row_end, panel_begin, panel_end,
                                                  scratch);
}

}  // namespace tf::TF_ISA
