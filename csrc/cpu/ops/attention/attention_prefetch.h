// Prefetching of the next key head's operands in attention kernels. For kernel files only.
#pragma once

#include "cpu/gemm/gemm.h"
#include "cpu/ops/attention/attention.h"
#include "cpu/ops/attention/attention_mask.h"

namespace tf::TF_ISA {
namespace {

// Prefetches the keys, values and queries that this thread is expected to read next into the
// second-level cache, some rows at a time.
template <class T>
class HeadPrefetcher {
 public:
  // For the key head that follows the given one. Its rows are divided among the expected number of
  // calls: `strips` times the panels of `keys`, with causal masking half as many.
  HeadPrefetcher(const AttentionArgs& args, Index b, Index key_head, Index strips, Index keys)
      : args_(args) {
    // More would evict the current working set.
    constexpr Index kMaxBytes = 256 * 1024;
    const Index next = b * args.key_heads + key_head + args.next_head;
    const Index bytes = args.keys * (args.size + args.value_size) * static_cast<Index>(sizeof(T));
    if (args.next_head == 0 || bytes > kMaxBytes || args.key_starts != nullptr ||
        next >= args.batch * args.key_heads)
      return;
    b = next / args.key_heads;
    key_head = next % args.key_heads;
    q_ = static_cast<const T*>(args.query) +
         head_offset(nullptr, args.query_stride, b, key_head * (args.heads / args.key_heads));
    k_ = static_cast<const T*>(args.key) + head_offset(nullptr, args.key_stride, b, key_head);
    v_ = static_cast<const T*>(args.value) + head_offset(nullptr, args.value_stride, b, key_head);
    keys_ = args.key_lengths == nullptr ? args.keys : max(0, min(args.keys, args.key_lengths[b]));
    rows_ = max(keys_, args.queries);
    const Index calls = max(1, strips * ((keys + kPanel - 1) / kPanel) / (args.causal ? 2 : 1));
    share_ = (rows_ + calls - 1) / calls;
  }

  TF_INLINE void prefetch_some() {
    const Index until = min(rows_, at_ + share_);
    if (at_ < until) prefetch_until(until);
  }

 private:
  [[gnu::noinline]] void prefetch_until(Index until) {
    for (; at_ < until; ++at_) {
      if (at_ < keys_) {
        fetch_row(k_ + at_ * args_.key_stride[2], args_.size);
        fetch_row(v_ + at_ * args_.value_stride[2], args_.value_size);
      }
      if (at_ < args_.queries) fetch_row(q_ + at_ * args_.query_stride[2], args_.size);
    }
  }

  const AttentionArgs& args_;
  const T *q_ = nullptr, *k_ = nullptr, *v_ = nullptr;
  Index keys_ = 0, rows_ = 0, share_ = 0, at_ = 0;
};

}  // namespace
}  // namespace tf::TF_ISA
