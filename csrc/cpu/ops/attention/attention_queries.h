// Queries of the heads that share a key head, block by block (attention_product.h). For kernel
// files only.
#pragma once

#include "cpu/ops/attention/attention_product.h"

namespace tf::TF_ISA {
namespace {

template <class T>
void attend(const AttentionArgs& args, long b, long key_head, long begin, long end, void* scratch) {
  const Workspace<T> work(args, scratch);
  const long queries = query_count(args, b);
  long limit = key_count(args, b);
  if (args.key_lengths != nullptr) limit = most(0, least(limit, args.key_lengths[b]));
  // The furthest key that a query of this range may see.
  const bool all = end - begin >= queries || begin / queries != (end - 1) / queries;
  const long last = all ? queries : (end - 1) % queries + 1;
  pack<T>(args, work, b, key_head, args.causal ? least(limit, last) : limit);
  const long group = args.heads / args.key_heads;
  constexpr long kBlockRows = Product<T>::kBlockRows;
  const long blocks = (end - begin + kBlockRows - 1) / kBlockRows;
  NextKeys<T> next(args, b, key_head, blocks * ((limit + kPanel - 1) / kPanel));
  const unsigned mode = flush_denormals();
  Product<T>::enter();
  for (long item = begin; item < end;) {
    const long first = item % queries;
    const long left = least(queries - first, end - item),
               parts = (left + kBlockRows - 1) / kBlockRows;
    // Evenly where blocks are made of tiles of gemm.h, of which those of one or two rows add up in
    // an order of their own.
    const long rows =
        kBlockRows % kTileRows == 0 ? (left + parts - 1) / parts : least(left, kBlockRows);
    const long seen = args.causal ? least(limit, first + rows) : limit;
    const long head = key_head * group + item / queries;
    Block<T>(args, work, Sight{args, b, head, first, rows, seen, work.bias}, key_head, next).run();
    item += rows;
  }
  Product<T>::leave();
  restore_denormals(mode);
}

}  // namespace
}  // namespace tf::TF_ISA
