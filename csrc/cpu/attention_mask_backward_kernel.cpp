#include "cpu/attention_mask_backward_kernel.h"

#include "cpu/attention_backward_block.h"

namespace tf::TF_ISA {

long attention_mask_backward_keys(const AttentionBackwardArgs& args) { return keys_per_tile(args); }

long attention_mask_backward_queries(const AttentionBackwardArgs& args) {
  return Products::query_rows(args);
}

long attention_mask_backward_scratch(const AttentionBackwardArgs& args) {
  return Workspace(args, nullptr).floats;
}

void attention_mask_backward(const AttentionBackwardArgs& args, long mask_b, long mask_h, long tile,
                             long begin, long end, float* scratch) {
  const Workspace work(args, scratch);
  const long* size = args.mask_size;
  const long step = keys_per_tile(args), group = args.heads / args.key_heads;
  float* base = args.grad_mask + (mask_b * size[1] + mask_h) * size[2] * size[3];
  const bool by_row = size[2] > 1, by_column = size[3] > 1;
  const long first_b = size[0] > 1 ? mask_b : 0, last_b = size[0] > 1 ? mask_b + 1 : args.batch;
  const long first_h = size[1] > 1 ? mask_h : 0, last_h = size[1] > 1 ? mask_h + 1 : args.heads;
  for (long b = first_b; b < last_b; ++b) {
    const long limit = key_limit(args, b);
    const long first = by_column ? tile * step : 0;
    const long stop = by_column ? least(limit, first + step) : limit;
    for (long h = first_h; h < last_h; ++h)
      for (long start = first; start < stop; start += step) {
        const long rows = least(step, stop - start);
        const KeyRange range{b, h / group, start, rows, rows};
        KeyTile(args, work, range).pack();
        const auto add = [&](const Sight& sight, long count) {
          Block block(args, work, sight);
          block.load_rows();
          block.differentiate(start, count);
          for (long i = 0; i < sight.rows; ++i) {
            const float* ds = work.ds + i * kScoreStride;
            float* to = base + (by_row ? (sight.first + i) * size[3] : 0);
            if (by_column) {
              // Sums over the block's rows first where they all go to one place.
              float* row = by_row ? to + start : work.grad_key;
              if (!by_row && i == 0) clear(row, count);
              for (long s = 0; s < count; ++s) row[s] += ds[s];
              if (!by_row && i + 1 == sight.rows)
                for (long s = 0; s < count; ++s) to[start + s] += row[s];
            } else {
              Vec sum = zero();
              for (long s = 0; s < count; s += kLanes)
                sum = sum + load_some(ds + s, least(kLanes, count - s));
              *to += reduce_add(sum);
            }
          }
        };
        each_block(args, range, h, Products::query_rows(args), begin, end, work.bias, add);
      }
  }
}

}  // namespace tf::TF_ISA
