// Sharing attention out between threads.
#pragma once

#include <algorithm>

#include "cpu/attention_kernel.h"
#include "cpu/host.h"

namespace tf {

inline void run_attention(const AttentionArgs& args) {
  // An item is some queries of the heads that share a key head. Each packs its keys again, so an
  // item is all of them unless that leaves threads idle.
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t groups = args.batch * args.key_heads, heads = args.heads / args.key_heads;
  const int64_t wanted = groups >= 4 * threads || threads == 1 ? 1 : 4 * threads / groups + 1;
  const int64_t chunks = std::max<int64_t>(1, std::min(wanted, heads * args.queries / 256));
  const int64_t scratch = TF_DISPATCH(attention_scratch, args);
  for_each_item(groups * chunks, [&](int64_t item) {
    // The last chunks of a causal group are the longest; they go first.
    const int64_t group = item / chunks, chunk = chunks - 1 - item % chunks;
    const int64_t rows = heads * query_count(args, group / args.key_heads);
    const int64_t begin = rows * chunk / chunks, end = rows * (chunk + 1) / chunks;
    if (begin == end) return;
    TF_DISPATCH(attention_queries, args, group / args.key_heads, group % args.key_heads, begin, end,
                kernel_scratch().floats(scratch));
    kernel_scratch().trim();
  });
}

}  // namespace tf
