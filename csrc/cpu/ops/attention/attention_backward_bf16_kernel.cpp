// Attention backward on the GEMM engine (engine.h): packed operands, and P and dS of a block of
// queries against a tile of keys, panel by panel. Scores are computed as in
// attention_lowp_kernel.cpp, bit for bit. While the matrix unit computes the products of one panel,
// the vector unit computes P and dS of the previous one.
#include "cpu/gemm/engine.h"
#include "cpu/ops/attention/attention_backward_loop.h"
#include "cpu/ops/attention/attention_scores.h"
#include "cpu/simd/philox.h"

namespace tf::TF_ISA {
namespace {

// Probabilities below 2^kNegligible count as 0, so that their bf16x3 components do not underflow.
constexpr float kNegligible = -99.5f;
constexpr Index kPad = 16;
constexpr Index kRows = 96;  // per block of queries

// Keys per tile: fewer where heads are so wide that a tile would leave the second-level cache.
inline Index keys_per_tile(const AttentionBackwardArgs& args) {
  const Index size = args.size + args.value_size;
  return size <= 128 ? 512 : size <= 256 ? 256 : 128;
}

template <class T>
struct BackwardWorkspace {
  using P = Product<T>;
  using Operand = typename P::Operand;

  // Strides in floats: of a block's rows as read; of the sums for keys, one column per key.
  Index tile_keys, wide, sum_stride, query_stride;
  Index key_panel, value_panel, column_panel;
  // Tile: keys and values as columns, keys as rows. Block: queries and dO, and both transposed.
  // Panel: P and dS as right operands. Block: dS as left operand.
  Operand *keys, *values, *key_rows, *query, *grad, *query_transposed, *grad_transposed, *p, *ds,
      *ds_rows;
  float *scores[2], *slopes[2];  // products of a panel: Q K^T and dO V^T
  // Per row of the block; 1 / row_sum is applied to dO in fp32, to P otherwise.
  float *neg_max, *grad_norm, *p_norm, *delta, *dominant;
  float *read, *grad_key, *grad_value, *grad_query, *bias;
  KeepBits* keep;  // per row: keep bits of two panels of probabilities
  bool* started;   // per panel: whether its sums for keys are initialised
  Index bytes = 0;

  BackwardWorkspace(const AttentionBackwardArgs& args, void* scratch)
      : tile_keys(keys_per_tile(args)),
        wide(round_up(max(args.size, args.value_size), kPanel) + kPad),
        sum_stride(tile_keys + kPad),
        query_stride(round_up(args.size, kPanel) + kPad),
        key_panel(P::panel_size(args.size)),
        value_panel(P::panel_size(args.value_size)),
        column_panel(P::panel_size(tile_keys)) {
    const auto take = [&](auto*& place, Index count) {
      void* at = scratch == nullptr ? nullptr : static_cast<char*>(scratch) + bytes;
      place = static_cast<decltype(+place)>(at);
      bytes += round_up(count * static_cast<Index>(sizeof(*place)), 64);
    };
    const Index size_up = round_up(args.size, kPanel), value_up = round_up(args.value_size, kPanel);
    take(keys, tile_keys / kPanel * key_panel);
    take(values, tile_keys / kPanel * value_panel);
    take(key_rows, size_up / kPanel * column_panel);
    take(query, P::block_size(kRows, args.size));
    take(grad, P::block_size(kRows, args.value_size));
    take(query_transposed, P::block_size(size_up, kRows));
    take(grad_transposed, P::block_size(value_up, kRows));
    take(p, P::panel_size(kRows));
    take(ds, P::panel_size(kRows));
    take(ds_rows, P::block_size(kRows, tile_keys));
    for (int slot = 0; slot < 2; ++slot) {
      take(scores[slot], kRows * kPanel);
      take(slopes[slot], kRows * kPanel);
    }
    take(neg_max, kRows);
    take(grad_norm, kRows);
    take(p_norm, kRows);
    take(delta, kRows);
    take(dominant, kRows);
    take(read, kRows * wide);
    take(grad_key, size_up * sum_stride);
    take(grad_value, value_up * sum_stride);
    take(grad_query, kRows * query_stride);
    take(bias, kPanel + 16);
    take(keep, kRows);
    take(started, tile_keys / kPanel);
  }
};

// Whether any of `rows` rows of n values is out of range of the products.
template <class T>
bool any_out_of_range(const T* from, Index stride, Index rows, Index n) {
  typename Product<T>::RangeCheck check;
  for (Index i = 0; i < rows; ++i)
    for (Index j = 0; j < n; j += kLanes) check.add(load_some(from + i * stride + j, n - j));
  return check.any();
}

// A tile of keys, packed.
template <class T>
struct BackwardTile : KeyRange {
  using P = Product<T>;
  const AttentionBackwardArgs& args;
  const BackwardWorkspace<T>& work;

  BackwardTile(const AttentionBackwardArgs& call, const BackwardWorkspace<T>& place,
               const KeyRange& range)
      : KeyRange(range), args(call), work(place) {
    for (Index i = 0; i < work.tile_keys / kPanel; ++i) work.started[i] = false;
  }

  bool pack() {
    const Index k_stride = args.key_stride[2], v_stride = args.value_stride[2];
    const T* k = static_cast<const T*>(args.key) +
                 head_offset(args.key_starts, args.key_stride, b, key_head) + start * k_stride;
    const T* v = static_cast<const T*>(args.value) +
                 head_offset(args.key_starts, args.value_stride, b, key_head) + start * v_stride;
    if (any_out_of_range(k, k_stride, count, args.size) ||
        any_out_of_range(v, v_stride, count, args.value_size))
      return false;
    for (Index s = 0; s < count; s += kPanel) {
      const Index here = min(kPanel, count - s);
      P::pack_rows(k + s * k_stride, k_stride, here, args.size,
                   work.keys + s / kPanel * work.key_panel);
      P::pack_rows(v + s * v_stride, v_stride, here, args.value_size,
                   work.values + s / kPanel * work.value_panel);
    }
    if (args.grad_query != nullptr)
      for (Index j = 0; j < args.size; j += kPanel)
        P::pack_columns(k + j, k_stride, min(kPanel, args.size - j), count,
                        work.key_rows + j / kPanel * work.column_panel);
    return true;
  }

  // dK and dV.
  void write() const {
    write(work.grad_key, args.size, args.scale, args.grad_key, args.grad_key_stride);
    write(work.grad_value, args.value_size, 1.0f, args.grad_value, args.grad_value_stride);
  }

 private:
  void write(const float* sums, Index n, float scale, void* tensor, const Index* stride) const {
    if (tensor == nullptr) return;
    T* grad = static_cast<T*>(tensor) + head_offset(args.key_starts, stride, b, key_head) +
              start * stride[2];
    alignas(64) float transposed[kLanes * kLanes];
    for (Index s = 0; s < rows; s += kLanes)
      for (Index d = 0; d < n; d += kLanes) {
        const bool any = work.started[s / kPanel];
        if (any)
          transpose_block(sums + d * work.sum_stride + s, work.sum_stride, transposed, kLanes);
        for (Index i = 0; i < min(kLanes, rows - s); ++i)
          store_some(grad + (s + i) * stride[2] + d,
                     any ? load(transposed + i * kLanes) * set1(scale) : zero(), n - d);
      }
  }
};

// Attention backward on the GEMM engine, panel by panel of keys (formulas in
// attention_backward_kernel.cpp). dV^T = dO^T P and dK^T = Q^T dS take P and dS as right operands,
// a panel at a time while they are in the first-level cache; dQ = dS K takes all panels of the
// tile. With causal masking, a panel has only the rows from its first key on: blocks begin at
// multiples of kPanel, as panels do.
template <class T>
class BackwardBlock : Scores {
 public:
  BackwardBlock(const AttentionBackwardArgs& call, const BackwardWorkspace<T>& place,
                const BlockMask& mask)
      : Scores(call, mask, place.scores[0], place.scores[1] - place.scores[0]),
        args(call),
        work(place) {}

  // Processes the panels in order; returns false if the rows are out of range of the products.
  bool pass(const BackwardTile<T>& tile, Index count, const MaskSums& sums, RowsAhead& ahead) {
    if (!load_rows()) return false;
    start_ = tile.start;
    sums_ = &sums;
    const Index steps = P::steps(rows, args.size) + P::steps(rows, args.value_size);
    const Index share = (pairs_ + steps - 1) / max(1, steps);
    const Index panels = (count + kPanel - 1) / kPanel;
    for (Panel panel = panel_from(tile.start, 0); panel.count > 0;) {
      const Index index = (panel.start - tile.start) / kPanel, lead = lead_of(panel);
      ahead.fetch(panels);
      const auto meanwhile = [&]() __attribute__((always_inline)) {
        differentiate_rows(min(pairs_, done_ + share));
      };
      const auto multiply = [&](auto* block, Index size, const auto* right,
                                float* to) __attribute__((always_inline)) {
        P::multiply_to(P::chunk(block, size, lead, 0), size, rows - lead, size, right, false,
                       to + lead * kPanel, kPanel, meanwhile);
      };
      multiply(work.query, args.size, work.keys + index * work.key_panel, row_scores(panel, 0));
      multiply(work.grad, args.value_size, work.values + index * work.value_panel,
               work.slopes[panel.slot]);
      finish_pending();
      panel.draws = pending_.count == 0 || panel.start / kDraw != pending_.start / kDraw;
      pending_ = panel;
      done_ = lead / 2;
      panel = panel_from(panel.start + kPanel, 1 - panel.slot);
    }
    finish_pending();
    return true;
  }

  // dQ: dS times the keys of the tile, stored or accumulated in rows of `to`.
  void accumulate_dq(const BackwardTile<T>& tile, Index, float* to, Index stride,
                     bool accumulate) const {
    const bool diagonal = args.causal && block_mask.first < tile.start + covered_ - kPanel;
    const Index step = diagonal ? kPanel : rows;
    for (Index i = 0; i < rows; i += step) {
      const Index keys =
          diagonal ? min(covered_, block_mask.first + i + step - tile.start) : covered_;
      for (Index j = 0; j < args.size; j += kPanel)
        P::multiply_to(P::chunk(work.ds_rows, work.tile_keys, i, 0), work.tile_keys,
                       min(step, rows - i), max(0, keys),
                       work.key_rows + j / kPanel * work.column_panel, false,
                       work.grad_query + i * work.query_stride + j, work.query_stride, [] {});
    }
    write_dq(work.grad_query, work.query_stride, rows, args.size, args.scale, to, stride,
             accumulate);
  }

 private:
  using P = Product<T>;

  // The first row that sees any key of the panel.
  Index lead_of(const Panel& panel) const {
    return args.causal ? max(0, panel.start - block_mask.first) : 0;
  }

  // P and dS of the pending panel's pairs of rows up to `until`. Not inlined: it has many call
  // sites in the tile loop.
  [[gnu::noinline]] void differentiate_rows(Index until) {
    const Index from = done_;
    if (until <= from) return;
    done_ = until;
    const float* shared = shared_mask(pending_);
    const Index column = pending_.start - start_;
    for (Index pair = from; pair < until; ++pair) {
      const Index first = P::pair_row(pair, 0), second = P::pair_row(pair, 1);
      Vec p[2][2], ds[2][2];
      differentiate(pending_, first, shared, p[0], ds[0]);
      differentiate(pending_, second, shared, p[1], ds[1]);
      P::put_pair(work.p, pair, p[0], p[1]);
      P::put_both(P::chunk(work.ds_rows, work.tile_keys, first, column),
                  P::chunk(work.ds_rows, work.tile_keys, second, column), work.ds, pair, ds[0],
                  ds[1]);
      if (sums_->first != nullptr) {
        add_mask_sums(first, ds[0]);
        add_mask_sums(second, ds[1]);
      }
    }
  }

  void add_mask_sums(Index i, const Vec (&ds)[2]) {
    if (i >= rows) return;
    const bool by_block = sums_->by_block();
    if (by_block || (sums_->by_column && pending_.count == kPanel)) {
      float* to = by_block ? block_sums_ : sums_->place(block_mask.first + i, pending_.start);
      TF_UNROLL for (int u = 0; u < 2; ++u) {
        prefetch_l2(to + kPanel + u * kLanes);
        store(to + u * kLanes, load(to + u * kLanes) + ds[u]);
      }
      return;
    }
    float row[kPanel];
    TF_UNROLL for (int u = 0; u < 2; ++u) store(row + u * kLanes, ds[u]);
    sums_->add(block_mask.first + i, pending_.start, row, pending_.count);
  }

  // Completes the pending panel: accumulates dK and dV.
  void finish_pending() {
    if (pending_.count == 0) return;
    differentiate_rows(pairs_);
    if (sums_->first != nullptr && sums_->by_block()) {
      sums_->add(block_mask.first, pending_.start, block_sums_, pending_.count);
      clear(block_sums_, kPanel);
    }
    const Index column = pending_.start - start_, lead = lead_of(pending_);
    // Fully masked panels contribute zeros to dQ.
    for (; covered_ < column; covered_ += kPanel)
      for (Index i = 0; i < rows; ++i)
        P::put(P::chunk(work.ds_rows, work.tile_keys, i, covered_), zero(), zero());
    covered_ = column + kPanel;
    bool& started = work.started[column / kPanel];
    const auto add_products = [&](const void* wanted, auto* transposed, const auto* panel, Index n,
                                  float* sums) {
      if (wanted != nullptr)
        P::multiply_to(P::chunk(transposed, kRows, 0, lead), kRows, n, rows - lead,
                       panel + P::panel_size(lead), started, sums + column, work.sum_stride, [] {});
    };
    add_products(args.grad_value, work.grad_transposed, work.p, args.value_size, work.grad_value);
    add_products(args.grad_key, work.query_transposed, work.ds, args.size, work.grad_key);
    started = true;
  }

  // P (after dropout) and dS of a row of a panel.
  TF_INLINE void differentiate(const Panel& panel, Index i, const float* shared, Vec (&p)[2],
                               Vec (&ds)[2]) const {
    if (i >= rows) {
      p[0] = p[1] = ds[0] = ds[1] = zero();
      return;
    }
    const float* s = row_scores(panel, i);
    Vec x[2], mask[2];
    if (panel.unmasked) {
      TF_UNROLL for (int u = 0; u < 2; ++u) x[u] = scaled(s + u * kLanes);
    } else {
      apply_mask(panel, i, shared, mask, x);
    }
    const Vec neg_max = set1(work.neg_max[i]), norm = set1(work.p_norm[i]);
    const Vec delta = set1(work.delta[i]);
    const float* slopes = work.slopes[panel.slot] + i * kPanel;
    const Index row = row_of(i);
    Vec f[2];
    if (args.dropout.on)
      panel_factors(args.dropout, row, panel.start, panel.draws, work.keep[i], f[0], f[1]);
    TF_UNROLL for (int u = 0; u < 2; ++u) {
      const Vec y = exponent(x[u], neg_max);
      const auto none = less(y, set1(kNegligible));
      const Vec undropped = select(none, zero(), exp2(y, T{}) * norm);
      Vec slope = load_slope(panel, i, slopes, u);
      p[u] = undropped;
      if (args.dropout.on) {
        p[u] = undropped * f[u];
        slope = drop(slope, f[u]);
      }
      ds[u] = select(none, zero(), undropped * (slope - delta));
    }
    refine(panel, i, p, ds);
  }

  // Refines dS of keys that dominate a row.
  TF_INLINE void refine(const Panel& panel, Index i, const Vec (&p)[2], Vec (&ds)[2]) const {
    const Vec dominant = set1(work.dominant[i]);
    if (any(less(dominant, max(p[0], p[1])))) refine_some(panel, i, p, ds);
  }
  [[gnu::noinline]] void refine_some(const Panel& panel, Index i, const Vec (&p)[2],
                                     Vec (&ds)[2]) const {
    const float factor = args.dropout.on ? args.dropout.scale : 1.0f;
    const float norm = work.grad_norm[i];
    TF_UNROLL for (int u = 0; u < 2; ++u) {
      float weight[kLanes], slope[kLanes];
      store(weight, p[u]);
      store(slope, ds[u]);
      for (int j = 0; j < kLanes; ++j) {
        if (!(weight[j] > work.dominant[i])) continue;
        const float probability = weight[j] / factor * norm;
        slope[j] = probability * dominant_slope<T>(args, probability, block_mask.b, block_mask.head,
                                                   block_mask.first + i,
                                                   panel.start + u * kLanes + j, factor);
      }
      ds[u] = load(slope);
    }
  }

  // A vector of dP, times grad_norm.
  TF_INLINE Vec load_slope(const Panel& panel, Index i, const float* slopes, int u) const {
    const Vec slope = load(slopes + u * kLanes);
    const Index left = panel.count - u * kLanes;
    if (args.grad_weights == nullptr || left <= 0) return slope;
    const T* extra =
        static_cast<const T*>(args.grad_weights) + row_of(i) * args.keys + panel.start + u * kLanes;
    return fma(set1(work.grad_norm[i]), load_some(extra, left), slope);
  }

  const T* at(const void* tensor, const Index* strides) const {
    return row_at<T>(tensor, args.query_starts, strides, block_mask.b, block_mask.head,
                     block_mask.first);
  }

  // Packs queries and dO, and both transposed for dK and dV. In fp32 dO is divided by row_sum
  // instead of P. Reduced types would round the quotient, and dP must be exact where values are far
  // from 0, since dS is a small difference of it.
  bool load_rows() const {
    constexpr bool grad_takes_norm = sizeof(T) == sizeof(float);
    const Index row = row_of(0);
    for (Index i = 0; i < rows; ++i) {
      const float row_sum = args.row_sum[row + i], norm = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
      work.grad_norm[i] = grad_takes_norm ? norm : 1.0f;
      work.p_norm[i] = grad_takes_norm ? 1.0f : norm;
    }
    if (!load_operand(at(args.query, args.query_stride), args.query_stride[2], args.size, nullptr,
                      work.query, args.grad_key != nullptr ? work.query_transposed : nullptr) ||
        !load_operand(at(args.grad, args.grad_stride), args.grad_stride[2], args.value_size,
                      grad_takes_norm ? work.grad_norm : nullptr, work.grad,
                      args.grad_value != nullptr ? work.grad_transposed : nullptr))
      return false;
    const float factor = args.dropout.on ? args.dropout.scale : 1.0f;
    for (Index i = 0; i < rows; ++i) {
      work.neg_max[i] = -args.row_max[row + i];
      work.delta[i] = args.delta[row + i] * work.grad_norm[i];
      // Same scaling as P: with dropout, without the norm applied to dO.
      work.dominant[i] = args.dominant * factor / work.grad_norm[i];
    }
    return true;
  }

  // Packs rows of n values, multiplied by factors if given, as left operands, and transposed if
  // requested; returns false if any is out of range of the products.
  bool load_operand(const T* from, Index stride, Index n, const float* factors,
                    typename P::Operand* block, typename P::Operand* transposed) const {
    typename P::RangeCheck check;
    for (Index i = 0; i < 2 * pairs_; ++i) {
      float* row = work.read + i * work.wide;
      const Vec factor = set1(i < rows && factors != nullptr ? factors[i] : 1.0f);
      for (Index j = 0; j < n; j += kPanel, row += kPanel) {
        Vec x[2] = {zero(), zero()};
        if (i < rows) {
          TF_UNROLL for (int u = 0; u < 2; ++u) {
            const Index left = n - j - u * kLanes;
            if (left > 0) x[u] = load_some(from + i * stride + j + u * kLanes, left) * factor;
            check.add(x[u]);
          }
          P::put(P::chunk(block, n, i, j), x[0], x[1]);
        }
        store(row, x[0]);
        store(row + kLanes, x[1]);
      }
    }
    if (transposed != nullptr) transpose(n, transposed);
    return !check.any();
  }

  void transpose(Index n, typename P::Operand* block) const {
    alignas(64) float transposed[2][kLanes * kLanes];
    for (Index i = 0; i < 2 * pairs_; i += kPanel)
      for (Index j = 0; j < n; j += kLanes) {
        TF_UNROLL for (int u = 0; u < 2; ++u) transpose_block(
            work.read + (i + u * kLanes) * work.wide + j, work.wide, transposed[u], kLanes);
        for (Index d = 0; d < kLanes; ++d)
          P::put(P::chunk(block, kRows, j + d, i), load(transposed[0] + d * kLanes),
                 load(transposed[1] + d * kLanes));
      }
  }

  const AttentionBackwardArgs& args;
  const BackwardWorkspace<T>& work;
  const MaskSums* sums_ = nullptr;
  const Index pairs_ = round_up(rows, kPairDepth) / 2;
  Panel pending_{};                            // scores are computed, P and dS are not
  Index done_ = pairs_;                        // pairs of rows of pending_ that are done
  Index start_ = 0;                            // of the tile
  Index covered_ = 0;                          // keys of the tile whose dS are stored
  alignas(64) float block_sums_[kPanel] = {};  // of dS of the pending panel over the rows
};

// For loop_keys().
template <class T>
struct Bf16Products {
  using Workspace = BackwardWorkspace<T>;
  using Tile = BackwardTile<T>;
  using Block = BackwardBlock<T>;
  static constexpr Index kQueryRows = kRows, kQueryUnit = kPanel;
  static constexpr bool kByRow = false;
};

template <class T>
constexpr AttentionBackwardKernels kKernels{
    .keys_per_tile = keys_per_tile,
    .scratch =
        [](const AttentionBackwardArgs& args) { return BackwardWorkspace<T>(args, nullptr).bytes; },
    .keys =
        [](const AttentionBackwardArgs& args, Index b, Index key_head, Index begin, Index end,
           float* part, float* mask_sums, Index next, void* scratch) {
          const unsigned mode = flush_denormals();
          Product<T>::enter();
          const bool did = loop_keys<Bf16Products<T>>(args, BackwardWorkspace<T>(args, scratch),
                                                      keys_per_tile(args), b, key_head, begin, end,
                                                      part, mask_sums, next);
          Product<T>::leave();
          restore_denormals(mode);
          return did;
        }};

}  // namespace

// float with AMX only.
const AttentionBackwardKernels* bf16_attention_backward_kernels([[maybe_unused]] Element type) {
#if defined(__AMX_BF16__)
  if (type == Element::float32) return &kKernels<float>;
#endif
  return &kKernels<BFloat16>;
}

}  // namespace tf::TF_ISA
