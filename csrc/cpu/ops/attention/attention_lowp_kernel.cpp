// Attention on the GEMM engine (engine.h), panel by panel of keys, with one pass over the scores.
// The online softmax of attention_kernel.cpp subtracts the largest score so far and rescales its
// sums when a larger one appears. Here the largest score of a row's first visible panel is
// subtracted throughout: the exponent range is wide, and if it does not suffice, which the result
// shows, the block is recomputed with the true maximum. While the matrix unit computes one panel of
// scores, the vector unit computes the exponentials of the previous one.
#include "cpu/gemm/engine.h"
#include "cpu/ops/attention/attention.h"
#include "cpu/ops/attention/attention_mask.h"
#include "cpu/ops/attention/attention_prefetch.h"
#include "cpu/ops/attention/attention_scores.h"
#include "cpu/simd/philox.h"

namespace tf::TF_ISA {
namespace {

// Keys per group: their probabilities are stored, then multiplied by the values; groups start at
// multiples of it.
template <class T>
constexpr Index kGroupKeys = Product<T>::kIsBf16x3 ? 128 : 256;
// Whether a block is one tile of gemm.h against a group of keys at a time. A block computes all
// scores that any of its rows needs, so small blocks save work if masks differ by row. Each row
// then reads its own mask, and returned weights fit in cache. Other blocks compute one panel of
// scores while the vector unit works on the previous one.
template <class T>
bool one_tile(const AttentionArgs& args) {
  const bool rows_differ = args.causal || (args.mask != nullptr && args.mask_stride[2] != 0);
  return (rows_differ || args.weights != nullptr) && Product<T>::kBlockRows % kTileRows == 0;
}
// Panels of scores that a block keeps: all if they are returned.
template <class T>
Index slots(const AttentionArgs& args) {
  if (args.weights != nullptr) return round_up(args.keys, kPanel) / kPanel;
  return one_tile<T>(args) ? kGroupKeys<T> / kPanel : 2;
}
template <class T>
struct Workspace {
  using P = Product<T>;
  using Operand = typename P::Operand;

  Index rows = round_up(P::kBlockRows, 16), sum_stride, key_panel, value_panel, slot;
  Operand *keys, *values, *query, *weights;
  float *scores, *sums;
  // Per row, kLanes partial sums of the probabilities: rounded as in the product with the values,
  // and unrounded, for the backward and the returned probabilities.
  float *total, *exact;
  float* neg_max;  // per row: added to scores before the exponential
  float* bias;
  KeepBits* keep;            // per row: keep bits of two panels of probabilities
  bool* has_max;             // per row: whether `neg_max` is set
  bool* recomputed;          // per row: recomputed, with the slower exponents()
  bool* fp32_scores;         // per row: recomputed with fp32 scores
  unsigned char* nonfinite;  // per panel of keys: its values contain NaN or inf
  Index bytes = 0;

  Workspace(const AttentionArgs& args, void* scratch)
      : sum_stride(round_up(args.value_size, kPanel) + 16),
        key_panel(P::panel_size(args.size)),
        value_panel(P::panel_size(round_up(args.keys, kPanel))) {
    const auto take = [&](auto*& place, Index count) {
      void* at = scratch == nullptr ? nullptr : static_cast<char*>(scratch) + bytes;
      place = static_cast<decltype(+place)>(at);
      bytes += round_up(count * static_cast<Index>(sizeof(*place)), 64);
    };
    take(keys, round_up(args.keys, kPanel) / kPanel * key_panel);
    take(values, round_up(args.value_size, kPanel) / kPanel * value_panel);
    take(query, P::block_size(rows, args.size));
    take(weights, P::block_size(rows, kGroupKeys<T>));
    slot = (one_tile<T>(args) ? round_up(kTileRows, 16) : rows) * kPanel;
    take(scores, slots<T>(args) * slot);
    take(sums, rows * sum_stride);
    take(total, rows * kLanes);
    if (P::kRounds && (args.row_max != nullptr || args.weights != nullptr)) {
      take(exact, rows * kLanes);
    } else {
      exact = total;
    }
    take(neg_max, rows);
    take(bias, kPanel + 16);
    take(keep, rows);
    take(has_max, rows);
    take(recomputed, rows);
    take(fp32_scores, rows);
    take(nonfinite, args.keys / kPanel + 1);
  }
};

// Finds panels whose values contain NaN or inf or, with bf16x3, numbers that are not representable.
template <class T>
void find_nonfinite(const AttentionArgs& args, const T* value, Index keys,
                    unsigned char* nonfinite) {
  for (Index start = 0; start < keys; start += kPanel) {
    Vec sum = zero();
    for (Index s = start; s < min(keys, start + kPanel); ++s) {
      const T* row = value + s * args.value_stride[2];
      for (Index j = 0; j < args.value_size; j += kLanes) {
        const Vec x = load_some(row + j, args.value_size - j);
        sum = sum + (x - x);  // 0 for finite x, NaN for the others, and NaN stays
        if constexpr (Product<T>::kIsBf16x3)
          sum = select(Product<T>::not_representable(x), set1(kInf) - set1(kInf), sum);
      }
    }
    nonfinite[start / kPanel] = any(is_nan(sum));
  }
}

template <class T>
void pack(const AttentionArgs& args, const Workspace<T>& work, Index b, Index head, Index keys) {
  using P = Product<T>;
  const T* k =
      static_cast<const T*>(args.key) + head_offset(args.key_starts, args.key_stride, b, head);
  for (Index s = 0; s < keys; s += kPanel)
    P::pack_rows(k + s * args.key_stride[2], args.key_stride[2], min(kPanel, keys - s), args.size,
                 work.keys + s / kPanel * work.key_panel);
  const T* v =
      static_cast<const T*>(args.value) + head_offset(args.key_starts, args.value_stride, b, head);
  for (Index j = 0; j < args.value_size; j += kPanel) {
    const Index columns = min(kPanel, args.value_size - j);
    auto* panel = work.values + j / kPanel * work.value_panel;
    if constexpr (P::kIsBf16x3) {
      P::pack_representable_columns(v + j, args.value_stride[2], columns, keys, panel);
    } else {
      P::pack_columns(v + j, args.value_stride[2], columns, keys, panel);
    }
  }
  find_nonfinite(args, v, keys, work.nonfinite);
}

// Smaller scores are not used as row max: usually they stand for masked keys.
constexpr float kMinRowMax = -1e30f;
// A larger row sum means that the row max is too far off. In fp32 the rounding errors of the
// exponents grow with the distance, and dO divided by the row sum in the backward must stay normal.
// Reduced types have no such errors, but a backward in fp32 divides dO as well.
constexpr float kMaxTotal = 1e6f, kMaxLowpTotal = 0x1p64f;

// One block of queries of one head against the packed keys.
template <class T>
class Block : Scores {
 public:
  Block(const AttentionArgs& call, const Workspace<T>& place, const BlockMask& mask, Index key_head,
        HeadPrefetcher<T>& next)
      : Scores(call, mask, place.scores, place.slot),
        args(call),
        work(place),
        key_head_(key_head),
        next_(next) {}

  void run() {
    begin();
    if (!pass()) {
      find_maxima();
      clear();
      pass();
    }
    if (args.weights != nullptr) write_weights();
  }

 private:
  using P = Product<T>;
  static constexpr Index kWidth = kGroupKeys<T>, kGroup = kWidth / kPanel;

  // Column of a panel's probabilities in work.weights.
  static Index column(const Panel& panel) { return panel.start % kWidth; }

  struct Group {
    Panel panel[kGroup];
    Index count = 0;
  };

  // Sets the row max to the largest score of this panel, if it has a visible one.
  void set_row_max(Index i, const Vec (&x)[2]) {
    const float highest = reduce_max(max(x[0], max(x[1], set1(-kInf))));
    if (highest > kMinRowMax) {
      work.neg_max[i] = -highest;
      work.has_max[i] = true;
      --rows_without_max_;
    } else if (highest != -kInf) {
      low_scores_ = true;
    }
  }

  TF_INLINE void put(const Panel& panel, Index i, Vec (&e)[2]) const {
    add(i, e);
    put(panel, i, P::chunk(work.weights, kWidth, i, column(panel)), row_scores(panel, i), e);
  }
  TF_INLINE void add(Index i, const Vec (&e)[2]) const {
    // Sums the rounded probabilities, so that O is a weighted mean of the values: a key with all of
    // a row's probability gives exactly its value.
    float* total = work.total + i * kLanes;
    store(total, P::add(load(total), e[0], e[1]));
    if (P::kRounds && work.exact != work.total) {
      float* exact = work.exact + i * kLanes;
      store(exact, load(exact) + (e[0] + e[1]));
    }
  }
  // Stores weights after dropout in the chunk, and if they are returned, also in place of the
  // scores.
  TF_INLINE void put(const Panel& panel, Index i, typename P::Operand* chunk, float* s,
                     Vec (&e)[2]) const {
    if (args.dropout.on) drop_row(panel, i, e);
    if (args.weights != nullptr) TF_UNROLL for (int u = 0; u < 2; ++u) store(s + u * kLanes, e[u]);
    // Infinities are detected in their sums.
    if constexpr (P::kIsBf16x3) {
      P::put_finite(chunk, e[0], e[1]);
    } else {
      P::put(chunk, e[0], e[1]);
    }
  }

  // Kept elements are not scaled yet: see kept_factor().
  TF_INLINE void drop_row(const Panel& panel, Index i, Vec (&e)[2]) const {
    const KeepBits bits =
        panel_bits(args.dropout, row_of(i), panel.start, panel.draws, work.keep[i]);
    TF_UNROLL for (int u = 0; u < 2; ++u) e[u] = where_set(bits >> u * kLanes, e[u]);
  }
  float kept_factor() const { return args.dropout.on ? args.dropout.scale : 1.0f; }

  template <class Meanwhile>
  void score(const Panel& panel, const Meanwhile& meanwhile) const {
    P::multiply_to(work.query, args.size, rows, args.size,
                   work.keys + panel.start / kPanel * work.key_panel, false, row_scores(panel, 0),
                   kPanel, meanwhile);
    if constexpr (P::kIsBf16x3)
      if (exact_max_) score_fp32(panel);
    if (args.softcap != 0.0f) cap_scores(args, row_scores(panel, 0), rows * kPanel);
  }

  // Recomputes the rows whose queries or keys are infinite, or nearly.
  void score_fp32(const Panel& panel) const {
    for (Index i = 0; i < rows; ++i) {
      if (!work.fp32_scores[i]) continue;
      const auto query = [&](Index d) {
        return P::value(P::chunk(work.query, args.size, i, d / kPanel * kPanel), d % kPanel);
      };
      Vec low, high;
      P::fp32_row(query, args.size, work.keys + panel.start / kPanel * work.key_panel, low, high);
      float* s = row_scores(panel, i);
      store(s, low);
      store(s + kLanes, high);
    }
  }

  // Scores minus the row max as exponents of 2, -inf where the mask is. Results must not depend on
  // which rows form a block, so the arithmetic is that of exp_simple(). Without an additive mask it
  // multiplies in another order than apply_mask(), so scores of about 1e9 differ from their own
  // maximum by more than the exponent range; recomputed rows get exactly 0 for their largest score,
  // and so do all rows if the backward will recompute them.
  TF_INLINE void exponents(const Panel& panel, Index i, const Vec (&mask)[2], Vec (&x)[2]) const {
    const Vec neg_max = set1(work.neg_max[i]);
    const float* s = row_scores(panel, i);
    const bool exact = additive() || for_backward() || work.recomputed[i];
    const Vec factor = exponent_factor();
    TF_UNROLL for (int u = 0; u < 2; ++u) {
      x[u] = exact ? exponent(x[u], neg_max)
                   : select(equal(mask[u], set1(-kInf)), mask[u],
                            scaled_exponent(s + u * kLanes, factor, neg_max));
    }
  }
  // `factor` is exponent_factor(), computed before a loop: stores inside might change args.
  Vec exponent_factor() const { return set1(args.scale * kLog2E); }
  TF_INLINE static Vec scaled_exponent(const float* s, Vec factor, Vec neg_max) {
    return fma(load(s), factor, neg_max * set1(kLog2E));
  }

  // With bf16x3, the backward computes probabilities from scores in the same steps.
  bool for_backward() const { return P::kIsBf16x3 && args.row_max != nullptr; }
  bool additive() const { return args.mask != nullptr && args.mask_type != Element::boolean; }

  // How exp_simple() masks a panel, if it can: not at all, by bytes, by an additive mask, or by
  // causality and length.
  enum class Masking { none, bytes, additive, range, other };
  Masking masking(const Panel& panel) const {
    if (exact_max_ || for_backward()) return Masking::other;
    if (additive()) return panel.direct ? Masking::additive : Masking::other;
    if (panel.unmasked) return Masking::none;
    if (panel.direct) return Masking::bytes;
    return args.mask == nullptr ? Masking::range : Masking::other;
  }

  // A vector of a row's scores and mask.
  struct Place {
    const Panel& panel;
    Index row;
    int u;
    const float* scores;
    const char* mask;  // if it is read in place
    Vec factor, neg_max;
  };

  // The probabilities of adjacent panels whose row maxima are set, row by row. exponent(Place)
  // returns exponents of 2.
  template <class Exponent>
  TF_INLINE void exp_panels(const Panel* from, const Panel* to, const Exponent& exponent) const {
    const bool keeps_exact = P::kRounds && work.exact != work.total;
    const Index step = kLanes * element_bytes(args.mask_type);
    const Vec factor = exponent_factor();
    for (Index i = 0; i < rows; ++i) {
      const Vec neg_max = set1(work.neg_max[i]);
      Vec total = load(work.total + i * kLanes);
      Vec exact = keeps_exact ? load(work.exact + i * kLanes) : zero();
      float* s = row_scores(*from, i);
      const char* mask = from->direct ? block_mask.mask_at(i, from->start) : nullptr;
      auto* chunk = P::chunk(work.weights, kWidth, i, column(*from));
      for (const Panel* panel = from; panel < to; ++panel, s += work.slot, chunk += kPanel) {
        Vec e[2];
        TF_UNROLL for (int u = 0; u < 2; ++u, mask += step) e[u] =
            exp2(exponent(Place{*panel, i, u, s + u * kLanes, mask, factor, neg_max}), T{});
        total = P::add(total, e[0], e[1]);
        if (keeps_exact) exact = exact + (e[0] + e[1]);
        put(*panel, i, chunk, s, e);
      }
      store(work.total + i * kLanes, total);
      if (keeps_exact) store(work.exact + i * kLanes, exact);
    }
  }
  void exp_simple(const Panel* from, const Panel* to) const {
    const auto unmasked = [&](const Place& at) __attribute__((always_inline)) {
      return scaled_exponent(at.scores, at.factor, at.neg_max);
    };
    const auto by_bytes = [&](const Place& at) __attribute__((always_inline)) {
      const auto* bytes = reinterpret_cast<const uint8_t*>(at.mask);
      return select(bytes_nonzero(bytes), unmasked(at), set1(-kInf));
    };
    const auto in_range = [&](const Place& at) __attribute__((always_inline)) {
      return select(this->in_range(at.panel, at.row, at.u), unmasked(at), set1(-kInf));
    };
    switch (masking(*from)) {
      case Masking::none:
        return exp_panels(from, to, unmasked);
      case Masking::bytes:
        return exp_panels(from, to, by_bytes);
      case Masking::additive:
        return dispatch_element(args.mask_type, [&](auto type) {
          exp_panels(from, to, [&](const Place& at) __attribute__((always_inline)) {
            const Vec add = load(reinterpret_cast<const decltype(type)*>(at.mask));
            return exponent(masked(at.scores, add), at.neg_max);
          });
        });
      default:
        return exp_panels(from, to, in_range);
    }
  }

  // The probabilities of a group whose scores are computed.
  void exp_group(const Group& group) {
    const Panel* end = group.panel + group.count;
    for (const Panel *from = group.panel, *to; from < end; from = to) {
      to = from + 1;
      if (rows_without_max_ > 0) set_maxima(*from);
      const Masking how = masking(*from);
      if (how == Masking::other) {
        pending_ = *from;
        done_ = 0;
        exp_rows(rows);
        continue;
      }
      while (to < end && rows_without_max_ == 0 && to->start == to[-1].start + kPanel &&
             masking(*to) == how)
        ++to;
      exp_simple(from, to);
    }
  }

  // Sets the row maxima that are not set, from this panel.
  void set_maxima(const Panel& panel) {
    const float* shared = shared_mask(panel);
    for (Index i = 0; i < rows; ++i) {
      if (work.has_max[i]) continue;
      Vec x[2], mask[2];
      apply_mask(panel, i, shared, mask, x);
      set_row_max(i, x);
    }
  }

  // Computes the probabilities of rows up to `until` of the pending panel. Not inlined: it has many
  // call sites in the tile loop.
  [[gnu::noinline]] void exp_rows(Index until) {
    const Index from = done_;
    if (until <= from) return;
    done_ = until;
    if (rows_without_max_ == 0 && masking(pending_) == Masking::none) {
      const float* s = row_scores(pending_, from);
      const Vec factor = exponent_factor();
      for (Index i = from; i < until; ++i, s += kPanel) {
        Vec e[2];
        TF_UNROLL for (int u = 0; u < 2; ++u) e[u] =
            exp2(scaled_exponent(s + u * kLanes, factor, set1(work.neg_max[i])), T{});
        put(pending_, i, e);
      }
      return;
    }
    const float* shared = shared_mask(pending_);
    for (Index i = from; i < until; ++i) {
      Vec x[2], mask[2];
      apply_mask(pending_, i, shared, mask, x);
      if (!work.has_max[i]) set_row_max(i, x);
      exponents(pending_, i, mask, x);
      TF_UNROLL for (int u = 0; u < 2; ++u) x[u] = exp2(x[u], T{});
      put(pending_, i, x);
    }
  }

  // Calls f(row, key, probability) for the keys of a panel that are visible to a row.
  template <class F>
  void each_visible(const Panel& panel, const F& f) const {
    for (Index i = 0; i < rows; ++i) {
      const Index visible = block_mask.visible(i, panel.start, panel.count);
      const float* mask =
          args.mask == nullptr ? nullptr : block_mask.mask_row(i, panel.start, visible);
      const auto* chunk = P::chunk(work.weights, kWidth, i, column(panel));
      for (Index s = 0; s < visible; ++s)
        if (mask == nullptr || mask[s] != -kInf) f(i, panel.start + s, P::value(chunk, s));
    }
  }

  // P V of panels whose values contain NaN or inf: masked keys are skipped. With bf16x3, only the
  // values that were packed as 0 are missing.
  void accumulate_pv_nonfinite(const Panel& panel) const {
    const T* value = static_cast<const T*>(args.value) +
                     head_offset(args.key_starts, args.value_stride, block_mask.b, key_head_);
    each_visible(panel, [&](Index i, Index key, float p) {
      float* sums = work.sums + i * work.sum_stride;
      for (Index j = 0; j < args.value_size; ++j) {
        if constexpr (P::kIsBf16x3) {
          const float v = value[key * args.value_stride[2] + j];
          if (P::not_representable(v)) sums[j] = fma(p, v, sums[j]);
        } else {
          const float v = P::element(work.values + j / kPanel * work.value_panel, key, j % kPanel);
          sums[j] = fma(p, v, sums[j]);
        }
      }
    });
  }

  // Accumulates P V of adjacent panels.
  void accumulate_pv_adjacent(const Panel& first, const Panel& last) const {
    const Index keys = last.start + last.count - first.start;
    for (Index j = 0; j < args.value_size; j += kPanel)
      P::multiply_to(P::chunk(work.weights, kWidth, 0, column(first)), kWidth, rows, keys,
                     work.values + j / kPanel * work.value_panel + P::panel_size(first.start), true,
                     work.sums + j, work.sum_stride, [] {});
  }

  bool is_nonfinite(const Panel& panel) const { return work.nonfinite[panel.start / kPanel]; }

  void accumulate_pv(const Group& group) const {
    const Panel* end = group.panel + group.count;
    if (P::kIsBf16x3) {
      if (group.count > 0) accumulate_pv_adjacent(group.panel[0], end[-1]);
      for (const Panel* panel = group.panel; panel < end; ++panel)
        if (is_nonfinite(*panel)) accumulate_pv_nonfinite(*panel);
      return;
    }
    for (const Panel *from = group.panel, *to; from < end; from = to) {
      to = from + 1;
      if (is_nonfinite(*from)) {
        accumulate_pv_nonfinite(*from);
        continue;
      }
      while (to < end && to->start == to[-1].start + kPanel && !is_nonfinite(*to)) ++to;
      accumulate_pv_adjacent(*from, to[-1]);
    }
  }

  // With bf16x3, each group is summed separately, so its fully masked panels are included: sums
  // must not depend on which rows form a block.
  void add_to(Group& group, const Panel& panel) const {
    if (P::kIsBf16x3 && group.count > 0)
      for (Index start = group.panel[group.count - 1].start + kPanel; start < panel.start;
           start += kPanel)
        for (Index i = 0; i < rows; ++i)
          P::put(P::chunk(work.weights, kWidth, i, start % kWidth), zero(), zero());
    group.panel[group.count++] = panel;
  }

  void clear() {
    for (Index i = 0; i < round_up(rows, 16); ++i) {
      for (Index j = 0; j < args.value_size; j += kLanes)
        store(work.sums + i * work.sum_stride + j, zero());
      store(work.total + i * kLanes, zero());
      store(work.exact + i * kLanes, zero());
    }
  }

  void begin() {
    const T* query = row_at<T>(args.query, args.query_starts, args.query_stride, block_mask.b,
                               block_mask.head, block_mask.first);
    P::fill(query, args.query_stride[2], rows, args.size, work.query);
    clear();
    for (Index i = 0; i < rows; ++i) {
      work.neg_max[i] = 0.0f;
      work.has_max[i] = work.recomputed[i] = work.fp32_scores[i] = false;
    }
    rows_without_max_ = rows;
  }

  // Calls f(row, scores) with all scores of the rows without a row max.
  template <class F>
  void each_row_without_max(const F& f) const {
    for (Panel panel = panel_from(0, 0); panel.count > 0;
         panel = panel_from(panel.start + kPanel, 0)) {
      score(panel, [] {});
      const float* shared = shared_mask(panel);
      for (Index i = 0; i < rows; ++i) {
        if (work.has_max[i]) continue;
        Vec x[2], mask[2];
        apply_mask(panel, i, shared, mask, x);
        f(i, x);
      }
    }
  }

  // Computes the true row max of every row whose first one did not suffice.
  void find_maxima() {
    for (Index i = 0; i < rows; ++i) {
      work.recomputed[i] = !work.has_max[i];
      work.fp32_scores[i] = work.recomputed[i] && !for_backward();
      if (!work.has_max[i]) work.neg_max[i] = kInf;
    }
    // The backward uses bf16x3 scores, so as many rows as possible keep them.
    if (for_backward())
      each_row_without_max([&](Index i, const Vec(&x)[2]) {
        TF_UNROLL for (int u = 0; u < 2; ++u) work.fp32_scores[i] |=
            any(is_nan(x[u])) || any(equal(x[u], set1(kInf)));
      });
    exact_max_ = true;
    each_row_without_max([&](Index i, const Vec(&x)[2]) {
      const float highest = reduce_max(max(x[0], max(x[1], set1(-kInf))));
      if (-highest < work.neg_max[i]) work.neg_max[i] = -highest;
    });
    for (Index i = 0; i < rows; ++i) {
      if (work.neg_max[i] == kInf) work.neg_max[i] = 0.0f;
      work.has_max[i] = true;
    }
    rows_without_max_ = 0;
  }

  // The slot of a panel's scores: its own if they are returned.
  int slot_of(const Panel& panel, Index otherwise) const {
    return static_cast<int>(args.weights != nullptr ? panel.start / kPanel : otherwise);
  }

  // Processes the whole block; returns false if a row max did not suffice.
  bool pass() {
    if (one_tile<T>(args)) return pass_groups();
    const Index steps = P::steps(rows, args.size);
    const Index share = steps > 0 ? (rows + steps - 1) / steps : 0;
    Group group;  // including the pending panel
    pending_.count = 0;
    done_ = rows;
    for (Panel panel = panel_from(0, 0); panel.count > 0;) {
      panel.slot = slot_of(panel, panel.slot);
      next_.prefetch_some();
      score(panel, [&]() __attribute__((always_inline)) { exp_rows(min(rows, done_ + share)); });
      exp_rows(rows);
      if (group.count > 0 && panel.start / kWidth != group.panel[0].start / kWidth) {
        accumulate_pv(group);
        group.count = 0;
      }
      add_to(group, panel);
      panel.draws = pending_.count == 0 || panel.start / kDraw != pending_.start / kDraw;
      pending_ = panel;
      done_ = 0;
      panel = panel_from(panel.start + kPanel, 1 - panel.slot % 2);
    }
    exp_rows(rows);
    accumulate_pv(group);
    return finish();
  }

  // The same group by group, for blocks of one tile.
  bool pass_groups() {
    Group group;
    for (Panel panel = panel_from(0, 0), last{}; panel.count > 0;) {
      panel.slot = slot_of(panel, group.count);
      next_.prefetch_some();
      block_mask.prefetch(panel.start);
      score(panel, [] {});
      panel.draws = last.count == 0 || panel.start / kDraw != last.start / kDraw;
      last = panel;
      group.panel[group.count++] = panel;
      panel = panel_from(panel.start + kPanel, 0);
      if (panel.count == 0 || panel.start / kWidth != last.start / kWidth) {
        exp_group(group);
        accumulate_pv(group);
        group.count = 0;
      }
    }
    return finish();
  }

  bool finish() {
    T* output = row_at<T>(args.output, args.query_starts, args.output_stride, block_mask.b,
                          block_mask.head, block_mask.first);
    bool did = true;
    for (Index i = 0; i < rows; ++i) {
      const float total = reduce_add(load(work.total + i * kLanes));
      const float* o = work.sums + i * work.sum_stride;
      Vec nonfinite = set1(total - total);  // NaN if any result is not finite
      // Sums of fully masked rows are 0 already.
      const Vec by = set1(total == 0.0f ? 1.0f : kept_factor() / total);
      for (Index j = 0; j < args.value_size; j += kLanes) {
        const Vec x = load(o + j);
        nonfinite = nonfinite + (x - x);
        store_some(output + i * args.output_stride[2] + j, x * by, args.value_size - j);
      }
      // Recompute rows with very low scores only, and rows whose row max was too far off or not
      // reached: the row max itself contributes 1 to the sum.
      const bool far = any(is_nan(nonfinite)) ||
                       total > (P::kIsBf16x3 ? kMaxTotal : kMaxLowpTotal) ||
                       (work.has_max[i] && total < 0.5f);
      if (!exact_max_ && (far || (!work.has_max[i] && low_scores_))) {
        work.has_max[i] = did = false;
        continue;
      }
      if (args.row_max == nullptr) continue;
      args.row_max[row_of(i)] = total == 0.0f ? 0.0f : -work.neg_max[i];
      args.row_sum[row_of(i)] = reduce_add(load(work.exact + i * kLanes));
    }
    return did;
  }

  // Writes the probabilities, which stand in place of the scores, once row sums are known.
  void write_weights() {
    for (Index i = 0; i < rows; ++i) {
      const float total = reduce_add(load(work.exact + i * kLanes));
      work.exact[i * kLanes] = total == 0.0f ? 0.0f : kept_factor() / total;
    }
    T* first = static_cast<T*>(args.weights) + row_of(0) * args.keys;
    for (Index start = 0; start < args.keys; start += kPanel) {
      Panel panel = start < block_mask.limit ? panel_from(start, 0) : Panel{};
      const bool visible = panel.count > 0 && panel.start == start;
      panel.slot = static_cast<int>(start / kPanel);
      for (Index i = 0; i < rows; ++i) {
        const Vec by = set1(work.exact[i * kLanes]);
        for (Index u = 0; u < kPanel; u += kLanes)
          if (start + u < args.keys)
            store_some(first + i * args.keys + start + u,
                       visible ? load(row_scores(panel, i) + u) * by : zero(),
                       args.keys - start - u);
      }
    }
  }

  const AttentionArgs& args;
  const Workspace<T>& work;
  const Index key_head_;
  HeadPrefetcher<T>& next_;
  bool exact_max_ = false;      // row maxima are exact
  Panel pending_{};             // scores are computed, probabilities are not
  Index done_ = 0;              // rows of pending_ that are done
  Index rows_without_max_ = 0;  // rows without a row max
  bool low_scores_ = false;     // a row had scores below kMinRowMax only
};

// Queries of the heads that share a key head, block by block.
template <class T>
void attend(const AttentionArgs& call, Index b, Index key_head, Index begin, Index end,
            void* scratch) {
  AttentionArgs args = call;
  const Index limit = see_keys<T>(args, b, key_head, static_cast<char*>(scratch));
  const Workspace<T> work(args, static_cast<char*>(scratch) + round_up(seen_bytes(call), kLine));
  const Index queries = query_count(args, b);
  // The last key that a query of this range may attend to.
  const bool all = end - begin >= queries || begin / queries != (end - 1) / queries;
  const Index last = all ? queries : (end - 1) % queries + 1;
  pack<T>(args, work, b, key_head, args.causal ? min(limit, last) : limit);
  const Index group = args.heads / args.key_heads;
  const Index block_rows = one_tile<T>(args) ? kTileRows : Product<T>::kBlockRows;
  const Index blocks = (end - begin + block_rows - 1) / block_rows;
  HeadPrefetcher<T> next(call, b, key_head, blocks, limit);
  const unsigned mode = flush_denormals();
  Product<T>::enter();
  for (Index item = begin; item < end;) {
    const Index first = item % queries;
    const Index left = min(queries - first, end - item),
                parts = (left + block_rows - 1) / block_rows;
    // Divided evenly if blocks consist of tiles of gemm.h, since tiles of one or two rows sum in
    // another order.
    const Index rows =
        block_rows % kTileRows == 0 ? (left + parts - 1) / parts : min(left, block_rows);
    const Index visible = args.causal ? min(limit, first + rows) : limit;
    const Index head = key_head * group + item / queries;
    Block<T>(args, work, BlockMask{args, b, head, first, rows, visible, work.bias}, key_head, next)
        .run();
    item += rows;
  }
  Product<T>::leave();
  restore_denormals(mode);
}

template <class T>
constexpr AttentionKernels kAttentionKernels{.scratch =
                                                 [](const AttentionArgs& args) {
                                                   return Workspace<T>(args, nullptr).bytes +
                                                          round_up(seen_bytes(args), kLine);
                                                 },
                                             .queries = attend<T>};

}  // namespace

const AttentionKernels* lowp_attention_kernels(Element type) {
#if defined(__AMX_BF16__)
  if (type == Element::float32) return &kAttentionKernels<float>;
#endif
  return type == Element::bfloat16 ? &kAttentionKernels<BFloat16> : &kAttentionKernels<Float16>;
}

}  // namespace tf::TF_ISA
