// Attention backward on the fp32 tiles of gemm.h (Dao et al. 2022): a tile of keys against a block
// of queries. With P the probabilities and M the dropout factors:
//
//   dV = (P M)^T dO,  dP = M (dO V^T + dW),  dS = P (dP - delta),  dQ = scale dS K,
//   dK = scale dS^T Q
//
// where delta, the row sum of P dP, is the row sum of dO O + W dW. Scores and dP are computed in
// register tiles, P and dS from them in cache, then three products have P and dS as left operands.
// The order of summation is fixed.
#include "cpu/ops/attention/attention_backward_loop.h"
#include "cpu/simd/philox.h"

namespace tf::TF_ISA {
namespace {

constexpr Index kQueryBlock = 2 * kBlockTiles * kTileRows;
constexpr Index kKeyTile = 256;
constexpr Index kPad = 16;
constexpr Index kScoreStride = kKeyTile + kPad;
// Marks masked elements of P and dS; -0 in arithmetic.
constexpr float kMasked = -0.0f;
// Exponents below this count as masked: their share of a row is below 2^-100, and products with it
// could be denormal, which costs hundreds of cycles on some CPUs.
constexpr float kNegligible = -69.0f;

// Keys per tile: fewer where heads are so wide that a tile would leave the second-level cache.
Index keys_per_tile(const AttentionBackwardArgs& args) {
  return args.size + args.value_size <= 256 ? kKeyTile : kKeyTile / 2;
}

struct Workspace {
  Index size_up, value_up;
  float *keys_transposed, *values_transposed, *keys, *query_packed, *grad_packed, *query, *grad;
  float *p, *ds, *grad_key, *grad_value, *grad_query, *bias, *factors, *norm;
  Index floats = 0;

  Workspace(const AttentionBackwardArgs& args, float* scratch)
      : size_up(round_up(args.size, kPanel)), value_up(round_up(args.value_size, kPanel)) {
    const auto take = [&](Index count) {
      float* place = scratch != nullptr ? scratch + floats : nullptr;
      floats += round_up(count, 16);
      return place;
    };
    const Index packed_rows = kQueryBlock / kTileRows * kPackedRows;
    keys_transposed = take(kKeyTile * args.size);
    values_transposed = take(kKeyTile * args.value_size);
    keys = take(kKeyTile * size_up);
    query_packed = take(packed_rows * round_up(args.size, kLanes));
    grad_packed = take(packed_rows * round_up(args.value_size, kLanes));
    query = take(kQueryBlock * size_up);
    grad = take(kQueryBlock * value_up);
    p = take(kQueryBlock * kScoreStride);
    ds = take(kQueryBlock * kScoreStride);
    grad_key = take(kKeyTile * (size_up + kPad));
    grad_value = take(kKeyTile * (value_up + kPad));
    grad_query = take(kQueryBlock * (size_up + kPad));
    bias = take(kScoreStride);
    factors = take(kScoreStride);
    norm = take(kQueryBlock);
    take(kPanel * max(size_up, value_up));  // room for prefetching
  }
};

// Copies rows of n values, row i multiplied by factors[i] if given, into panels of `capacity` rows;
// returns whether any is NaN or inf.
bool copy_panels(const float* from, Index stride, Index rows, Index n, const float* factors,
                 float* to, Index capacity) {
  // x - x is 0 for finite x and NaN otherwise, and NaN propagates through the sum.
  Vec nonfinite = zero();
  for (Index j = 0; j < n; j += kPanel) {
    float* panel = to + j * capacity;
    for (Index i = 0; i < rows; ++i) {
      const Vec factor = set1(factors != nullptr ? factors[i] : 1.0f);
      TF_UNROLL for (int v = 0; v < kPanel; v += kLanes) {
        const Index have = n - j - v;
        const Vec x = have > 0 ? load_some(from + i * stride + j + v, have) * factor : zero();
        store(panel + i * kPanel + v, x);
        nonfinite = nonfinite + (x - x);
      }
    }
  }
  return !(reduce_add(nonfinite) == 0.0f);
}

// Packs panels of kQueryBlock rows as left operand.
void pack_a_panels(const float* panels, Index rows, Index n, float* to) {
  for (Index j = 0; j < n; j += kPanel)
    pack_a(panels + j * kQueryBlock, kPanel, rows, min(kPanel, n - j), to + j * kPackedRows,
           kPackedRows * round_up(n, kLanes));
}

// Sums over queries for each key of a tile: c (m x n) accumulates A^T B over blocks of k queries, A
// (k, m) with rows kScoreStride apart, B (k, n) in panels of kQueryBlock rows.
struct KeySums {
  float* sums;
  Index stride;
  bool started = false;

  // Clears the sums of keys that the first block, of `m` of the tile's `rows` keys, does not write.
  void start(Index m, Index rows, bool whole) {
    if (!started) clear(sums + (whole ? 0 : m) * stride, (rows - (whole ? 0 : m)) * stride);
  }

  // Key i is visible from row `lead` + i of the block on.
  void add(const float* a, Index m, const float* b, Index k, Index n, Index rows, Index lead) {
    start(m, rows, false);
    // A strip of A stays in the first-level cache for all panels; the next one is prefetched.
    each_tile(m, [&](Index, Index i, Index count) {
      const Index skip = min(k, max(0, lead + i));
      const float* from = a + i + skip * kScoreStride;
      const char* ahead = reinterpret_cast<const char*>(from + 2 * count - 1);
      for (Index j = 0; j < n; j += kPanel) {
        const float* panel = b + j * kQueryBlock + skip * kPanel;
        float* to = sums + i * stride + j;
        kTiles<Form::columns>[n - j > kLanes ? 1 : 0][count - 1](
            from, kScoreStride, panel, k - skip, to, stride, started,
            {ahead, kScoreStride * static_cast<Index>(sizeof(float))});
      }
    });
    started = true;
  }

  // The same element by element, skipping masked ones: rows of B contain NaN or inf.
  void add_nonfinite(const float* a, Index m, const float* b, Index k, Index n, Index rows,
                     Index lead) {
    start(m, rows, true);
    started = true;
    for (Index i = 0; i < k; ++i)
      for (Index s = 0; s < min(m, i - lead + 1); ++s) {
        const float x = a[i * kScoreStride + s];
        if (x == 0.0f && __builtin_signbit(x)) continue;
        for (Index j = 0; j < n; ++j)
          sums[s * stride + j] +=
              x * b[j / kPanel * kPanel * kQueryBlock + i * kPanel + j % kPanel];
      }
  }

  void write(Index rows, Index n, float scale, float* to, Index to_stride) {
    start(0, rows, true);
    for (Index i = 0; i < rows; ++i) {
      Index d = 0;
      for (; d + kLanes <= n; d += kLanes)
        store(to + i * to_stride + d, load(sums + i * stride + d) * set1(scale));
      for (; d < n; ++d) to[i * to_stride + d] = sums[i * stride + d] * scale;
    }
  }
};

// A tile of keys, packed.
struct KeyTile : KeyRange {
  const AttentionBackwardArgs& args;
  const Workspace& work;
  bool nonfinite = false;  // its keys contain NaN or inf
  KeySums grad_key = {work.grad_key, work.size_up + kPad};
  KeySums grad_value = {work.grad_value, work.value_up + kPad};

  KeyTile(const AttentionBackwardArgs& call, const Workspace& place, const KeyRange& range)
      : KeyRange(range), args(call), work(place) {}

  bool pack() {
    const auto* k = row_at<float>(args.key, args.key_starts, args.key_stride, b, key_head, start);
    const auto* v =
        row_at<float>(args.value, args.key_starts, args.value_stride, b, key_head, start);
    for (Index s = 0; s < count; s += kPanel) {
      const Index rows = min(kPanel, count - s);
      pack_rows(k + s * args.key_stride[2], args.key_stride[2], rows, args.size,
                work.keys_transposed + s * args.size);
      pack_rows(v + s * args.value_stride[2], args.value_stride[2], rows, args.value_size,
                work.values_transposed + s * args.value_size);
    }
    nonfinite = copy_panels(k, args.key_stride[2], count, args.size, nullptr, work.keys, kKeyTile);
    return true;
  }

  // dK and dV.
  void write() {
    const auto put = [&](KeySums& sums, Index n, float scale, void* grad, const Index* stride) {
      if (grad != nullptr)
        sums.write(rows, n, scale, row_at<float>(grad, args.key_starts, stride, b, key_head, start),
                   stride[2]);
    };
    put(grad_key, args.size, args.scale, args.grad_key, args.grad_key_stride);
    put(grad_value, args.value_size, 1.0f, args.grad_value, args.grad_value_stride);
  }
};

// A block of queries of one head, and its P and dS against a tile of keys.
struct Block {
  const AttentionBackwardArgs& args;
  const Workspace& work;
  const BlockMask block_mask;
  bool nonfinite_query = false, nonfinite_grad = false;  // contain NaN or inf
  // As in the forward, so that scores are bit-identical.
  bool scaled = args.mask != nullptr || !(args.scale > 0.0f && args.scale < kInf);
  float factor = scaled ? 1.0f : args.scale;
  Index row = (block_mask.b * args.heads + block_mask.head) * args.queries + block_mask.first;

  Block(const AttentionBackwardArgs& call, const Workspace& place, const BlockMask& mask)
      : args(call), work(place), block_mask(mask) {}

  bool pass(KeyTile& tile, Index count, const MaskSums& sums, RowsAhead& ahead) {
    load_rows();
    differentiate(tile.start, count, ahead);
    if (sums.first != nullptr) add_mask_sums(tile.start, count, sums);
    accumulate_dk_dv(tile, count);
    return true;
  }

  // dO is multiplied by norm, 1 / row_sum, instead of P.
  void load_rows() {
    const Index rows = block_mask.rows;
    for (Index i = 0; i < rows; i += kLanes) {
      const Vec row_sum = load_some(args.row_sum + row + i, rows - i);
      store(work.norm + i, select(equal(row_sum, zero()), zero(), set1(1.0f) / row_sum));
    }
    const Index b = block_mask.b, head = block_mask.head, first = block_mask.first;
    const auto* q = row_at<float>(args.query, args.query_starts, args.query_stride, b, head, first);
    const auto* g = row_at<float>(args.grad, args.query_starts, args.grad_stride, b, head, first);
    nonfinite_query =
        copy_panels(q, args.query_stride[2], rows, args.size, nullptr, work.query, kQueryBlock);
    nonfinite_grad = copy_panels(g, args.grad_stride[2], rows, args.value_size, work.norm,
                                 work.grad, kQueryBlock);
    pack_a_panels(work.query, rows, args.size, work.query_packed);
    pack_a_panels(work.grad, rows, args.value_size, work.grad_packed);
  }

  // Products of the block's rows and a tile of keys, except for register tiles behind the diagonal.
  void scores(const float* packed, Index size, const float* panels, Index start, Index count,
              float* to, RowsAhead& ahead) const {
    const Index rows = block_mask.rows, stride = kPackedRows * round_up(size, kLanes);
    for (Index j = 0; j < count; j += kPanel) {
      ahead.fetch((count + kPanel - 1) / kPanel * 2);
      Index tile = 0, row = 0;
      if (args.causal)
        each_tile(rows, [&](Index t, Index i, Index here) {
          if (block_mask.visible(i + here - 1, start + j, 1) == 0) tile = t + 1, row = i + here;
        });
      // The remaining rows divide into the same tiles.
      panel_rows<Form::packed>(packed + tile * stride, stride, rows - row, panels + j * size, size,
                               to + row * kScoreStride + j, kScoreStride, min(kPanel, count - j),
                               false, panels + (j + kPanel) * size);
    }
  }

  // P M and dS for keys [start, start + count), kMasked where masked, in work.p and work.ds. With
  // causal masking, a row is complete up to the last key that any row of its register tile sees.
  void differentiate(Index start, Index count, RowsAhead& ahead) const {
    const Index rows = block_mask.rows;
    scores(work.query_packed, args.size, work.keys_transposed, start, count, work.p, ahead);
    scores(work.grad_packed, args.value_size, work.values_transposed, start, count, work.ds, ahead);
    const float* shared = block_mask.shared_row(start, count);
    for (Index i = 0; i < rows; ++i) {
      const Index here =
          args.causal ? min(count, block_mask.visible(i, start, count) + kTileRows) : count;
      block_mask.mask_scores(work.p + i * kScoreStride, i, start, here, round_up(here, kLanes),
                             shared, scaled);
      differentiate_row(i, start, here);
    }
  }

  void add_mask_sums(Index start, Index count, const MaskSums& sums) const {
    const Index rows = block_mask.rows;
    if (!sums.by_block()) {
      for (Index i = 0; i < rows; ++i)
        sums.add(block_mask.first + i, start, work.ds + i * kScoreStride,
                 block_mask.visible(i, start, count));
      return;
    }
    clear(work.factors, count);
    for (Index i = 0; i < rows; ++i)
      for (Index s = 0, end = block_mask.visible(i, start, count); s < end; ++s)
        work.factors[s] += work.ds[i * kScoreStride + s];
    sums.add(block_mask.first, start, work.factors, count);
  }

  void differentiate_row(Index i, Index start, Index count) const {
    float* p = work.p + i * kScoreStride;
    float* ds = work.ds + i * kScoreStride;
    const Vec neg_max = set1(-args.row_max[row + i]), times = set1(factor);
    const Vec norm = set1(work.norm[i]), delta = set1(args.delta[row + i]) * norm;
    const float* extra =
        args.grad_weights == nullptr
            ? nullptr
            : static_cast<const float*>(args.grad_weights) + (row + i) * args.keys + start;
    if (args.dropout.on)
      dropout_factors(args.dropout, static_cast<uint64_t>(row + i), static_cast<uint64_t>(start),
                      count, work.factors);
    for (Index j = 0; j < count; j += kLanes) {
      const Vec x = fma(load(p + j), times, zero()) + neg_max;
      const auto none = less(x, set1(kNegligible));  // true for -inf (masked)
      Vec weight = select(none, zero(), exp(x)), slope = load(ds + j);
      if (extra != nullptr) slope = fma(norm, load_some(extra + j, count - j), slope);
      const Vec undropped = weight;
      if (args.dropout.on) {
        const Vec f = load(work.factors + j);
        weight = weight * f;
        slope = drop(slope, f);
      }
      // Adding 0 turns -0 into 0: only masked elements are kMasked.
      const Vec score = fma(undropped, slope - delta, zero());
      store(p + j, select(none, set1(kMasked), weight));
      store(ds + j, select(none, set1(kMasked), score));
    }
    // norm is an upper bound of the probabilities if row_max is the maximum, as in fp32.
    if (work.norm[i] > 0.5f || args.dominant != kDominantInFloat) refine_row(i, start, count);
  }

  // Refines dS of keys that dominate a row.
  void refine_row(Index i, Index start, Index count) const {
    const float* p = work.p + i * kScoreStride;
    const float norm = work.norm[i], factor = args.dropout.on ? args.dropout.scale : 1.0f;
    const float dominant = args.dominant * factor / norm;
    for (Index j = 0; j < count; ++j) {
      if (j % kLanes == 0 && !any(less(set1(dominant), load(p + j)))) {
        j += kLanes - 1;
      } else if (p[j] > dominant) {
        const float probability = p[j] / factor * norm;
        work.ds[i * kScoreStride + j] =
            probability * dominant_slope<float>(args, probability, block_mask.b, block_mask.head,
                                                block_mask.first + i, start + j, factor);
      }
    }
  }

  // dQ: dS times the keys of the tile, stored or accumulated in rows of `to`.
  void accumulate_dq(const KeyTile& tile, Index count, float* to, Index stride,
                     bool accumulate) const {
    const Index n = args.size, c_stride = work.size_up + kPad;
    if (tile.nonfinite) {
      clear(work.grad_query, block_mask.rows * c_stride);
      query_nonfinite(tile.start, count);
    } else if (args.causal && block_mask.visible(0, tile.start, count) < count) {
      // On the diagonal, each register tile has as many keys as its last row sees.
      each_tile(block_mask.rows, [&](Index, Index i, Index rows) {
        dq_rows(i, rows, block_mask.visible(i + rows - 1, tile.start, count));
      });
    } else {
      dq_rows(0, block_mask.rows, count);
    }
    write_dq(work.grad_query, c_stride, block_mask.rows, n, args.scale, to, stride, accumulate);
  }

  // dQ / scale of rows [i, i + rows) for the first `count` keys of the tile.
  void dq_rows(Index i, Index rows, Index count) const {
    const Index n = args.size, c_stride = work.size_up + kPad;
    for (Index j = 0; j < n; j += kPanel)
      panel_rows<Form::rows>(work.ds + i * kScoreStride, kScoreStride, rows,
                             work.keys + j * kKeyTile, count, work.grad_query + i * c_stride + j,
                             c_stride, min(kPanel, n - j), false,
                             work.keys + (j + kPanel) * kKeyTile);
  }

  void query_nonfinite(Index start, Index count) const {
    for (Index i = 0; i < block_mask.rows; ++i)
      for (Index s = 0; s < block_mask.visible(i, start, count); ++s) {
        const float x = work.ds[i * kScoreStride + s];
        if (x == 0.0f && __builtin_signbit(x)) continue;
        for (Index d = 0; d < args.size; ++d)
          work.grad_query[i * (work.size_up + kPad) + d] +=
              x * work.keys[d / kPanel * kPanel * kKeyTile + s * kPanel + d % kPanel];
      }
  }

  // Accumulates dK and dV of the tile over this block.
  void accumulate_dk_dv(KeyTile& tile, Index count) const {
    const Index lead = args.causal ? tile.start - block_mask.first : -count;
    const auto add = [&](KeySums& sums, const float* a, const float* b, Index n, bool nonfinite) {
      if (nonfinite) {
        sums.add_nonfinite(a, count, b, block_mask.rows, n, tile.rows, lead);
      } else {
        sums.add(a, count, b, block_mask.rows, n, tile.rows, lead);
      }
    };
    if (args.grad_value != nullptr)
      add(tile.grad_value, work.p, work.grad, args.value_size, nonfinite_grad);
    if (args.grad_key != nullptr)
      add(tile.grad_key, work.ds, work.query, args.size, nonfinite_query);
  }
};

// For loop_keys().
struct Products {
  using Workspace = TF_ISA::Workspace;
  using Tile = KeyTile;
  using Block = TF_ISA::Block;
  static constexpr Index kQueryRows = kQueryBlock, kQueryUnit = 1;
  static constexpr bool kByRow = true;
};

template <class T>
void typed_delta(const AttentionBackwardArgs& args, Index begin, Index end) {
  for (Index row = begin; row < end; ++row) {
    const Index t = row % args.queries, head = row / args.queries % args.heads;
    const Index b = row / args.queries / args.heads;
    if (t >= query_count(args, b)) continue;
    const T* o = row_at<T>(args.output, args.query_starts, args.output_stride, b, head, t);
    const T* g = row_at<T>(args.grad, args.query_starts, args.grad_stride, b, head, t);
    args.delta[row] = sum_of_products(o, g, args.value_size);
    if (args.grad_weights != nullptr) args.delta[row] += weights_delta<T>(args, row);
  }
}

template <class T>
void typed_sum(const AttentionBackwardArgs& args, Index b, Index key_head, const float* part,
               Index parts, Index begin, Index end) {
  const Index queries = args.queries, n = args.size, group = args.heads / args.key_heads;
  const Index part_size = group * queries * n;
  T* grad = static_cast<T*>(args.grad_query) +
            head_offset(args.query_starts, args.grad_query_stride, b, key_head * group);
  for (Index row = begin; row < end; ++row) {
    const float* from = part + row * n;
    T* to = grad + row / queries * args.grad_query_stride[1] +
            row % queries * args.grad_query_stride[2];
    for (Index d = 0; d < n; d += kLanes) {
      Vec sum = load_some(from + d, n - d);
      for (Index i = 1; i < parts; ++i) sum = sum + load_some(from + i * part_size + d, n - d);
      store_some(to + d, sum, n - d);
    }
  }
}

Workspace workspace(const AttentionBackwardArgs& args, void* scratch) {
  return Workspace(args, static_cast<float*>(scratch));
}

constexpr AttentionBackwardKernels kKernels{
    .keys_per_tile = keys_per_tile,
    .scratch =
        [](const AttentionBackwardArgs& args) {
          return workspace(args, nullptr).floats * static_cast<Index>(sizeof(float));
        },
    .keys =
        [](const AttentionBackwardArgs& args, Index b, Index key_head, Index begin, Index end,
           float* part, float* mask_sums, Index next, void* scratch) {
          return loop_keys<Products>(args, workspace(args, scratch), keys_per_tile(args), b,
                                     key_head, begin, end, part, mask_sums, next);
        }};

}  // namespace

void attention_delta(const AttentionBackwardArgs& args, Index begin, Index end) {
  (args.type == Element::float32 ? typed_delta<float> : typed_delta<BFloat16>)(args, begin, end);
}

const AttentionBackwardKernels* attention_backward_kernels() { return &kKernels; }

void attention_backward_sum(const AttentionBackwardArgs& args, Index b, Index key_head,
                            const float* part, Index parts, Index begin, Index end) {
  (args.type == Element::float32 ? typed_sum<float> : typed_sum<BFloat16>)(args, b, key_head, part,
                                                                           parts, begin, end);
}

}  // namespace tf::TF_ISA
