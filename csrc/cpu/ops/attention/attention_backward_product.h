// Attention backward on the products of engine.h, panel by panel of keys (the formulas are in
// attention_backward_block.h). dV^T = dO^T P and dK^T = Q^T dS take P and dS as right factors, a
// panel at a time while they are in the first cache, and dQ = dS K takes all panels of the tile.
// For kernel files only.
#pragma once

#include "cpu/ops/attention/attention_backward_rows.h"

namespace tf::TF_ISA {
namespace {

// For the gradients of query, key and value. Parts are pairs of rows.
template <class T>
class BackwardBlock : BackwardRows<T, BackwardBlock<T>> {
  using Rows = BackwardRows<T, BackwardBlock<T>>;
  friend Rows;

 public:
  using Rows::Rows;

  bool pass(const BackwardTile<T>& tile, long count) {
    start_ = tile.start;
    return take(tile, count, pairs_);
  }

  // dS times the keys of the tile, into or onto rows of `to`.
  void give_query(const BackwardTile<T>&, long, float* to, long stride, bool onto) const {
    for (long j = 0; j < args.size; j += kPanel)
      P::multiply_to(work.ds_rows, work.tile_keys, rows, covered_,
                     work.key_rows + j / kPanel * work.column_panel, false, work.grad_query + j,
                     work.query_stride, [] {});
    put_query(work.grad_query, work.query_stride, rows, args.size, args.scale, to, stride, onto);
  }

 private:
  using Rows::args, Rows::work, Rows::rows, Rows::pairs_, Rows::waiting_, Rows::softened_;
  using Rows::take, Rows::differentiate, Rows::shared_mask;
  using typename Rows::P;

  // P and dS of the waiting panel's pairs of rows up to `until`. Not inlined: the tile loop would
  // have it in many places.
  [[gnu::noinline]] void soften(long until) {
    const long from = softened_;
    if (until <= from) return;
    softened_ = until;
    const float* shared = shared_mask(waiting_);
    const long column = waiting_.start - start_;
    for (long pair = from; pair < until; ++pair) {
      const long first = P::pair_row(pair, 0), second = P::pair_row(pair, 1);
      Vec p[2][2], ds[2][2];
      differentiate(waiting_, first, shared, p[0], ds[0]);
      differentiate(waiting_, second, shared, p[1], ds[1]);
      P::put_pair(work.p, pair, p[0], p[1]);
      P::put_both(P::chunk(work.ds_rows, work.tile_keys, first, column),
                  P::chunk(work.ds_rows, work.tile_keys, second, column), work.ds, pair, ds[0],
                  ds[1]);
    }
  }

  // The rest of the waiting panel, and what its keys gather from it.
  void finish_waiting() {
    if (waiting_.count == 0) return;
    soften(pairs_);
    const long column = waiting_.start - start_;
    // Panels that no row sees take part in dQ.
    for (; covered_ < column; covered_ += kPanel)
      for (long i = 0; i < rows; ++i)
        P::put(P::chunk(work.ds_rows, work.tile_keys, i, covered_), zero(), zero());
    covered_ = column + kPanel;
    bool& started = work.started[column / kPanel];
    const auto gather = [&](const void* wanted, const auto* turned, const auto* panel, long n,
                            float* sums) {
      if (wanted != nullptr)
        P::multiply_to(turned, kRows, n, rows, panel, started, sums + column, work.sum_stride,
                       [] {});
    };
    gather(args.grad_value, work.grad_turned, work.p, args.value_size, work.grad_value);
    gather(args.grad_key, work.query_turned, work.ds, args.size, work.grad_key);
    started = true;
  }

  long start_ = 0;    // of the tile
  long covered_ = 0;  // keys of it whose dS are there
};

// For the gradient of the mask. Parts are rows.
template <class T>
class BackwardMaskBlock : BackwardRows<T, BackwardMaskBlock<T>> {
  using Rows = BackwardRows<T, BackwardMaskBlock<T>>;
  friend Rows;

 public:
  using Rows::Rows;

  bool pass(const BackwardTile<T>& tile, long count, const MaskSums& sums) {
    sums_ = &sums;
    return take(tile, count, rows);
  }

 private:
  using Rows::rows, Rows::waiting_, Rows::softened_, Rows::sight;
  using Rows::take, Rows::differentiate, Rows::shared_mask;

  [[gnu::noinline]] void soften(long until) {
    const long from = softened_;
    if (until <= from) return;
    softened_ = until;
    const float* shared = shared_mask(waiting_);
    // Over the block's rows first, where they all go to one place.
    const bool together = sums_->stride == 0 && sums_->by_column;
    for (long i = from; i < until; ++i) {
      Vec p[2], ds[2];
      differentiate(waiting_, i, shared, p, ds);
      if (!together) {
        float row[kPanel];
        TF_UNROLL for (int u = 0; u < 2; ++u) store(row + u * kLanes, ds[u]);
        sums_->add(sight.first + i, waiting_.start, row, waiting_.count);
        continue;
      }
      TF_UNROLL for (int u = 0; u < 2; ++u) {
        float* sum = together_ + u * kLanes;
        store(sum, i == 0 ? ds[u] : load(sum) + ds[u]);
      }
      if (i + 1 == rows) sums_->add(sight.first, waiting_.start, together_, waiting_.count);
    }
  }

  void finish_waiting() {
    if (waiting_.count > 0) soften(rows);
  }

  const MaskSums* sums_ = nullptr;
  float together_[kPanel];
};

// For walk() and walk_mask().
template <class T>
struct TypedProducts {
  using Workspace = BackwardWorkspace<T>;
  using Tile = BackwardTile<T>;
  using Block = BackwardBlock<T>;
  using Mask = BackwardMaskBlock<T>;
  static long query_rows(const AttentionBackwardArgs&) { return kRows; }
};

// Calls f(workspace) with this thread's registers prepared.
template <class T, class F>
bool on_tiles(const AttentionBackwardArgs& args, void* scratch, const F& f) {
  const unsigned mode = flush_denormals();
  Product<T>::enter();
  const bool did = f(BackwardWorkspace<T>(args, scratch));
  Product<T>::leave();
  restore_denormals(mode);
  return did;
}

}  // namespace
}  // namespace tf::TF_ISA
