// Linear layer with epilogue for fp32 with bf16x3.
#include "cpu/ops/linear/linear_product.h"

namespace tf::TF_ISA {
namespace {

using P = Product<float>;
using Operand = P::Operand;

void pack_transposed_panels(const void* transposed, Index stride, Index n, Index k, void* packed,
                            Index begin, Index end) {
  for (Index p = begin; p < end; ++p)
    P::pack_columns(static_cast<const float*>(transposed) + p * kPanel, stride,
                    min(kPanel, n - p * kPanel), k,
                    static_cast<Operand*>(packed) + p * P::panel_size(k));
}

// For small m, reading the weights is most of the work. So they stay in fp32, 4 bytes each instead
// of 6, and are split into bf16x3 as they are read: a chunk of a panel while the tiles multiply the
// previous chunk.
//
// Depth of a chunk. The components of two chunks fit in the first-level cache beside the rows.
constexpr Index kChunk = 64;
constexpr Index kChunkSize = kSplitComponents * kPanel * kChunk;
// Depth of a running sum. It is rounded 6 times per 32 products, less often than by 128
// multiply-adds.
constexpr Index kSum = 512;
// While a block of rows of a panel is split, the first half of the next is prefetched; hardware
// prefetches the second half. Prefetching both would keep loads waiting for a line fill buffer.
constexpr Index kAhead = 16 * kPanel;

// A chunk of a panel; `done` of its pairs of rows (see pack_bf16x3_pair()) are split already.
struct Chunk {
  const float* from;
  Index depth, units, done = 0;
  Operand* to;

  Chunk(const float* panel, Index k, Index p, Operand* place)
      : from(panel + p * kPanel),
        depth(min(kChunk, k - p)),
        units(pair_depth(depth) / 2),
        to(place) {}

  TF_INLINE void split_to(Index until) {
    for (; done < until; ++done) {
      constexpr Index kBlock = kPanel * kPairDepth;
      const Index p = done / 16 * kPairDepth + done % 16;
      const float* row = from + p * kPanel;
      Operand* pair = to + done / 16 * kSplitComponents * kBlock + done % 16 * 2 * kPanel;
      TF_UNROLL for (Index j = 0; j < kPanel; j += kLanes) {
        prefetch_l1(row + 16 * kPanel + j + kAhead);
        __m512i low[kSplitComponents], high[kSplitComponents];
        split_bf16x3_finite(p < depth ? load(row + j) : zero(), low);
        split_bf16x3_finite(p + 16 < depth ? load(row + 16 * kPanel + j) : zero(), high);
        TF_UNROLL for (int i = 0; i < kSplitComponents; ++i)
            store_pairs(pair + i * kBlock + 2 * j, low[i], high[i]);
      }
    }
  }
};

// Adds the products of a chunk. Incomplete running sums stay in the tiles if one pair of tiles
// holds all rows, else in `sums`; complete ones are added to `total`.
template <bool kTwo>
TF_INLINE void multiply_chunk(const Operand* a, Index k, Index p, const Operand* b, bool alone,
                              float* sums, float* total, const auto& meanwhile) {
  const Index done = min(p + kChunk, k);
  if (p % kSum == 0) {
    P::clear_sums<kTwo>();
  } else if (!alone) {
    P::load_sums<kTwo>(sums, kPanel);
  }
  P::add_products<kTwo>(a, pair_depth(k), b, pair_depth(done - p) / kPairDepth, meanwhile);
  if (done % kSum == 0 || done == k) {
    if (p < kSum) {
      P::store_sums<kTwo>(total, kPanel);
    } else {
      P::add_sums<kTwo>(total, kPanel);
    }
  } else if (!alone) {
    P::store_sums<kTwo>(sums, kPanel);
  }
}

Index small_m_scratch(const LinearArgs& args) {
  return (P::block_size(args.m, args.k) + 2 * kChunkSize) * static_cast<Index>(sizeof(Operand)) +
         2 * P::buffer_size(args.m) * static_cast<Index>(sizeof(float));
}

void small_m_block(const LinearArgs& args, Index, Index, Index panel_begin, Index panel_end,
                   void* scratch) {
  const auto* packed = static_cast<const float*>(args.packed);
  const Index k = args.k, depth = pair_depth(k);
  auto* a = static_cast<Operand*>(scratch);
  Operand* components[2] = {a + P::block_size(args.m, k),
                            a + P::block_size(args.m, k) + kChunkSize};
  float* sums = reinterpret_cast<float*>(components[1] + kChunkSize);
  float* total = sums + P::buffer_size(args.m);
  P::enter();
  P::fill(static_cast<const float*>(args.x), args.x_stride, args.m, k, a);
  const RowEpilogue<float> row_epilogue(args, 0);
  const Index row_pairs = (args.m + P::kPair - 1) / P::kPair;
  int which = 0;
  Chunk next(packed + panel_begin * kPanel * k, k, 0, components[0]);
  next.split_to(next.units);
  for (Index panel = panel_begin; panel < panel_end; ++panel) {
    const float* weights = packed + panel * kPanel * k;
    for (Index p = 0; p < k; p += kChunk) {
      const Operand* b = components[which];
      which ^= 1;
      if (p + kChunk < k) {
        next = Chunk(weights, k, p + kChunk, components[which]);
      } else if (panel + 1 < panel_end) {
        next = Chunk(weights + kPanel * k, k, 0, components[which]);
      } else {
        next.units = 0;
      }
      // Share of the next chunk per call, in 1/1024.
      const Index calls = row_pairs * (pair_depth(min(kChunk, k - p)) / kPairDepth) * P::kTerms;
      const Index share = (next.units * 1024 + calls - 1) / calls;
      Index until = 0;
      compiler_barrier();
      for (Index pair = 0; pair < row_pairs; ++pair) {
        const auto meanwhile = [&](Index) __attribute__((always_inline)) {
          until += share;
          next.split_to(min(until / 1024, next.units));
        };
        const Operand* rows = a + (pair * P::kPair * depth + p * P::kTile) * kSplitComponents;
        const Index place = pair * P::kPair * kPanel;
        if (args.m - pair * P::kPair > P::kTile) {
          multiply_chunk<true>(rows, k, p, b, row_pairs == 1, sums + place, total + place,
                               meanwhile);
        } else {
          multiply_chunk<false>(rows, k, p, b, row_pairs == 1, sums + place, total + place,
                                meanwhile);
        }
      }
      next.split_to(next.units);
    }
    compiler_barrier();
    const Epilogue<float> epilogue = row_epilogue.of_panel(panel);
    for (Index i = 0; i < args.m; ++i) {
      Vec low = load(total + i * kPanel), high = load(total + i * kPanel + kLanes);
      if (P::needs_fp32(low, high))
        FloatProduct<float>::fp32_row([&](Index p) { return row_epilogue.x(i, p); }, k, weights,
                                      low, high);
      row_epilogue.finish_checked(epilogue, i, panel, low, high);
    }
  }
  P::leave();
}

constexpr LinearKernels kKernels{.in_fp32 = false,
                                 .layout = kPanel + 2,
                                 .panel = kPanel,
                                 .row_unit = P::kPair,
                                 .packed_bytes = packed_bytes<PackedProduct<float>>,
                                 .pack = pack<float>,
                                 .pack_transposed = pack_transposed_panels,
                                 .row_block = row_block<PackedProduct<float>>,
                                 .scratch = scratch_bytes<float>,
                                 .block = block<float>};

constexpr LinearKernels kSmallMKernels{.in_fp32 = true,
                                       .panel = kPanel,
                                       .row_unit = P::kPair,
                                       .scratch = small_m_scratch,
                                       .block = small_m_block};

}  // namespace

const LinearKernels* bf16x3_linear_kernels() { return &kKernels; }
const LinearKernels* bf16x3_small_m_linear_kernels() { return &kSmallMKernels; }

}  // namespace tf::TF_ISA
