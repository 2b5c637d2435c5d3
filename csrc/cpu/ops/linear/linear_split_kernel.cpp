// Linear map with epilogue for fp32 in pieces.
#include "cpu/ops/linear/linear_product.h"

namespace tf::TF_ISA {
namespace {

using P = Product<float>;
using Operand = P::Operand;

// Long rows leave room for few of them, past which the weights would have to come too often. So
// they are cut into slabs, whose products gather in a block of the result.
constexpr long kSlab = P::kChain;
constexpr long kSlabRows = 256, kSlabColumns = 512;
constexpr long kSumStride = kSlabColumns + 16;  // off the powers of two

bool in_slabs(long k) { return k > 2 * kSlab; }

long slab_scratch_bytes() {
  return P::block_size(kSlabRows, kSlab) * static_cast<long>(sizeof(Operand)) +
         kSlabRows * kSumStride * static_cast<long>(sizeof(float));
}

// Rows [row, row + rows) of panels [panel_begin, panel_end), at most kSlabRows and kSlabColumns.
void slab_block(const LinearArgs& args, long row, long rows, long panel_begin, long panel_end,
                void* scratch) {
  auto* a = static_cast<Operand*>(scratch);
  float* sums = reinterpret_cast<float*>(a + P::block_size(kSlabRows, kSlab));
  const auto* packed = static_cast<const Operand*>(args.packed);
  const float* x = static_cast<const float*>(args.x) + row * args.x_stride;
  const long size = P::panel_size(args.k);
  for (long p = 0; p < args.k; p += kSlab) {
    const long depth = least(kSlab, args.k - p);
    P::fill(x + p, args.x_stride, rows, depth, a);
    const long bytes = P::panel_size(depth) * static_cast<long>(sizeof(Operand));
    for (long j = panel_begin; j < panel_end; ++j) {
      const Operand* panel = packed + j * size + P::panel_size(p);
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

void slab_blocks(const LinearArgs& args, long row_begin, long row_end, long panel_begin,
                 long panel_end, void* scratch) {
  P::enter();
  const long count = (row_end - row_begin + kSlabRows - 1) / kSlabRows;
  for (long item = 0, row = row_begin; item < count; ++item) {
    const long rows = (row_end - row + count - item - 1) / (count - item);
    for (long p = panel_begin; p < panel_end; p += kSlabColumns / kPanel)
      slab_block(args, row, rows, p, least(panel_end, p + kSlabColumns / kPanel), scratch);
    row += rows;
  }
  P::leave();
}

void pack_turned_panels(const void* turned, long stride, long n, long k, void* packed, long begin,
                        long end) {
  for (long p = begin; p < end; ++p)
    P::pack_columns(static_cast<const float*>(turned) + p * kPanel, stride,
                    least(kPanel, n - p * kPanel), k,
                    static_cast<Operand*>(packed) + p * P::panel_size(k));
}

long split_row_block(const LinearArgs& args) {
  return in_slabs(args.k) ? kSlabRows : row_block<float>(args);
}

long split_scratch(const LinearArgs& args) {
  return in_slabs(args.k) ? slab_scratch_bytes() : scratch_bytes<float>(args);
}

void split_block(const LinearArgs& args, long row_begin, long row_end, long panel_begin,
                 long panel_end, void* scratch) {
  (in_slabs(args.k) ? slab_blocks : block<float>)(args, row_begin, row_end, panel_begin, panel_end,
                                                  scratch);
}

// For few rows reading the weights is most of the work. So they stay in fp32, 4 bytes each instead
// of 6, and are split into pieces as they pass by: a chunk of a panel while the tiles multiply the
// one before it.
//
// Depth of a chunk. The pieces of two stay in the first-level cache beside rows passing by.
constexpr long kChunk = 64;
constexpr long kChunkSize = kSplitPieces * kPanel * kChunk;
// Depth of a running sum. It is rounded 6 times for 32 products: less than 128 multiply-adds are.
constexpr long kSum = 512;
// Of each block of rows of a panel, while the one before it is split, the first half is fetched;
// the second the processor foresees by itself. Fetching both keeps loads waiting for a free line
// buffer.
constexpr long kAhead = 16 * kPanel * sizeof(float);

// A chunk of a panel, of which `done` of its pairs of rows (see split_pair()) are split already.
struct Chunk {
  const float* from;
  long depth, units, done = 0;
  Operand* to;

  Chunk(const float* panel, long k, long p, Operand* place)
      : from(panel + p * kPanel),
        depth(least(kChunk, k - p)),
        units(pair_depth(depth) / 2),
        to(place) {}

  TF_INLINE void split_to(long until) {
    for (; done < until; ++done) {
      constexpr long kBlock = kPanel * kPairDepth;
      const long p = done / 16 * kPairDepth + done % 16;
      const float* row = from + p * kPanel;
      Operand* pair = to + done / 16 * kSplitPieces * kBlock + done % 16 * 2 * kPanel;
      TF_UNROLL for (long j = 0; j < kPanel; j += kLanes) {
        _mm_prefetch(reinterpret_cast<const char*>(row + 16 * kPanel + j) + kAhead, _MM_HINT_T0);
        __m512i low[kSplitPieces], high[kSplitPieces];
        split_finite(p < depth ? load(row + j) : zero(), low);
        split_finite(p + 16 < depth ? load(row + 16 * kPanel + j) : zero(), high);
        TF_UNROLL for (int i = 0; i < kSplitPieces; ++i)
            _mm512_storeu_si512(pair + i * kBlock + 2 * j, tf::TF_ISA::pairs(low[i], high[i]));
      }
    }
  }
};

// A row of C by fp32 FMA, for what the pieces cannot do.
void plain_row(const RowEnds<float>& ends, long i, const float* panel, long k, Vec& low,
               Vec& high) {
  low = high = zero();
  for (long p = 0; p < k; ++p) {
    const Vec x = set1(ends.x(i, p));
    low = fma(x, load(panel + p * kPanel), low);
    high = fma(x, load(panel + p * kPanel + kLanes), high);
  }
}

// Adds the products of a chunk. Running sums that are not at their end stay in the tiles if one
// pair of tiles has all rows, else in `sums`; those that are go to `total`.
template <bool kTwo>
TF_INLINE void multiply_chunk(const Operand* a, long k, long p, const Operand* b, bool alone,
                              float* sums, float* total, const auto& meanwhile) {
  const long done = least(p + kChunk, k);
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

long few_scratch(const LinearArgs& args) {
  return (P::block_size(args.m, args.k) + 2 * kChunkSize) * static_cast<long>(sizeof(Operand)) +
         2 * P::buffer_size(args.m) * static_cast<long>(sizeof(float));
}

void few_block(const LinearArgs& args, long, long, long panel_begin, long panel_end,
               void* scratch) {
  const auto* packed = static_cast<const float*>(args.packed);
  const long k = args.k, depth = pair_depth(k);
  auto* a = static_cast<Operand*>(scratch);
  Operand* pieces[2] = {a + P::block_size(args.m, k), a + P::block_size(args.m, k) + kChunkSize};
  float* sums = reinterpret_cast<float*>(pieces[1] + kChunkSize);
  float* total = sums + P::buffer_size(args.m);
  P::enter();
  P::fill(static_cast<const float*>(args.x), args.x_stride, args.m, k, a);
  const RowEnds<float> row_ends(args, 0);
  const long row_pairs = (args.m + P::kPair - 1) / P::kPair;
  int which = 0;
  Chunk next(packed + panel_begin * kPanel * k, k, 0, pieces[0]);
  next.split_to(next.units);
  for (long panel = panel_begin; panel < panel_end; ++panel) {
    const float* weights = packed + panel * kPanel * k;
    for (long p = 0; p < k; p += kChunk) {
      const Operand* b = pieces[which];
      which ^= 1;
      if (p + kChunk < k) {
        next = Chunk(weights, k, p + kChunk, pieces[which]);
      } else if (panel + 1 < panel_end) {
        next = Chunk(weights + kPanel * k, k, 0, pieces[which]);
      } else {
        next.units = 0;
      }
      // A share of the next chunk for each call.
      const long calls = row_pairs * (pair_depth(least(kChunk, k - p)) / kPairDepth) * P::kTerms;
      const long share = (next.units * 1024 + calls - 1) / calls;
      long until = 0;
      order_memory();
      for (long pair = 0; pair < row_pairs; ++pair) {
        const auto meanwhile = [&](long) __attribute__((always_inline)) {
          until += share;
          next.split_to(least(until / 1024, next.units));
        };
        const Operand* rows = a + (pair * P::kPair * depth + p * P::kTile) * kSplitPieces;
        const long place = pair * P::kPair * kPanel;
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
    order_memory();
    const Ends<float> ends = row_ends.of_panel(panel);
    for (long i = 0; i < args.m; ++i) {
      Vec low = load(total + i * kPanel), high = load(total + i * kPanel + kLanes);
      if (P::is_odd(low, high)) plain_row(row_ends, i, weights, k, low, high);
      row_ends.finish_sound(ends, i, panel, low, high);
    }
  }
  P::leave();
}

constexpr LinearKernels kKernels{.in_floats = false,
                                 .layout = kPanel + 2,
                                 .panel = kPanel,
                                 .row_unit = P::kPair,
                                 .packed_bytes = packed_bytes<float>,
                                 .pack = pack<float>,
                                 .pack_turned = pack_turned_panels,
                                 .row_block = split_row_block,
                                 .scratch = split_scratch,
                                 .block = split_block};

constexpr LinearKernels kFewKernels{.in_floats = true,
                                    .panel = kPanel,
                                    .row_unit = P::kPair,
                                    .scratch = few_scratch,
                                    .block = few_block};

}  // namespace

const LinearKernels* split_linear_kernels() { return &kKernels; }
const LinearKernels* few_split_linear_kernels() { return &kFewKernels; }

}  // namespace tf::TF_ISA
