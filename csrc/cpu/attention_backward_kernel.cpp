#include "cpu/attention_backward_kernel.h"

#include "cpu/attention_backward_block.h"

namespace tf::TF_ISA {

void attention_delta(const AttentionBackwardArgs& args, long begin, long end) {
  for (long row = begin; row < end; ++row) {
    const long t = row % args.queries, head = row / args.queries % args.heads;
    const long b = row / args.queries / args.heads;
    if (t >= query_count(args, b)) continue;
    const float* o = args.output + head_offset(args.query_starts, args.output_stride, b, head) +
                     t * args.output_stride[2];
    const float* g = args.grad + head_offset(args.query_starts, args.grad_stride, b, head) +
                     t * args.grad_stride[2];
    Vec sum = zero();
    long d = 0;
    for (; d + kLanes <= args.value_size; d += kLanes) sum = fma(load(o + d), load(g + d), sum);
    if (d < args.value_size) {
      const long rest = args.value_size - d;
      sum = fma(load_n(o + d, rest), load_n(g + d, rest), sum);
    }
    if (args.grad_weights != nullptr) {
      const float* w = args.weights + row * args.keys;
      const float* dw = args.grad_weights + row * args.keys;
      for (long s = 0; s < args.keys; s += kLanes) {
        const long here = least(kLanes, args.keys - s);
        const Vec weight = load_some(w + s, here);
        // Hidden places have no say, whatever gradient they are given.
        sum = sum + select(equal(weight, zero()), zero(), weight * load_some(dw + s, here));
      }
    }
    args.delta[row] = reduce_add(sum);
  }
}

long attention_backward_keys(const AttentionBackwardArgs& args) { return keys_per_tile(args); }

long attention_backward_scratch(const AttentionBackwardArgs& args) {
  return Workspace(args, nullptr).floats;
}

void attention_backward(const AttentionBackwardArgs& args, long b, long key_head, long begin,
                        long end, float* part, float* scratch) {
  walk<Products>(args, Workspace(args, scratch), keys_per_tile(args), b, key_head, begin, end,
                 part);
}

void attention_backward_sum(const AttentionBackwardArgs& args, long b, long key_head,
                            const float* part, long parts, long begin, long end) {
  const long queries = args.queries, n = args.size;
  const long part_size = args.heads / args.key_heads * queries * n;
  const QueryRows out = query_rows(args, b, key_head, nullptr);
  for (long row = begin; row < end; ++row) {
    const float* from = part + row * n;
    float* to = out.data + row / queries * out.head_stride + row % queries * out.stride;
    for (long d = 0; d < n; d += kLanes) {
      const long here = least(kLanes, n - d);
      Vec sum = load_some(from + d, here);
      for (long i = 1; i < parts; ++i) sum = sum + load_some(from + i * part_size + d, here);
      store_some(to + d, sum, here);
    }
  }
}

}  // namespace tf::TF_ISA
