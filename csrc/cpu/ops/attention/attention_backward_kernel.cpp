// Attention backward in fp32, and what all types share.
#include "cpu/ops/attention/attention_backward_block.h"

namespace tf::TF_ISA {
namespace {

template <class T>
void typed_delta(const AttentionBackwardArgs& args, long begin, long end) {
  for (long row = begin; row < end; ++row) {
    const long t = row % args.queries, head = row / args.queries % args.heads;
    const long b = row / args.queries / args.heads;
    if (t >= query_count(args, b)) continue;
    const T* o = static_cast<const T*>(args.output) +
                 head_offset(args.query_starts, args.output_stride, b, head) +
                 t * args.output_stride[2];
    const T* g = static_cast<const T*>(args.grad) +
                 head_offset(args.query_starts, args.grad_stride, b, head) +
                 t * args.grad_stride[2];
    args.delta[row] = sum_of_products(o, g, args.value_size);
    if (args.grad_weights != nullptr) args.delta[row] += weights_delta(args, row);
  }
}

template <class T>
void typed_sum(const AttentionBackwardArgs& args, long b, long key_head, const float* part,
               long parts, long begin, long end) {
  const long queries = args.queries, n = args.size, group = args.heads / args.key_heads;
  const long part_size = group * queries * n;
  T* grad = static_cast<T*>(args.grad_query) +
            head_offset(args.query_starts, args.grad_query_stride, b, key_head * group);
  for (long row = begin; row < end; ++row) {
    const float* from = part + row * n;
    T* to = grad + row / queries * args.grad_query_stride[1] +
            row % queries * args.grad_query_stride[2];
    for (long d = 0; d < n; d += kLanes) {
      Vec sum = load_some(from + d, n - d);
      for (long i = 1; i < parts; ++i) sum = sum + load_some(from + i * part_size + d, n - d);
      store_some(to + d, sum, n - d);
    }
  }
}

Workspace workspace(const AttentionBackwardArgs& args, void* scratch) {
  return Workspace(args, static_cast<float*>(scratch));
}

constexpr AttentionBackwardKernels kKernels{
    .keys_per_tile = keys_per_tile,
    .queries_per_block = Products::query_rows,
    .scratch =
        [](const AttentionBackwardArgs& args) {
          return workspace(args, nullptr).floats * static_cast<long>(sizeof(float));
        },
    .keys =
        [](const AttentionBackwardArgs& args, long b, long key_head, long begin, long end,
           float* part, void* scratch) {
          return loop_keys<Products>(args, workspace(args, scratch), keys_per_tile(args), b,
                                     key_head, begin, end, part);
        },
    .mask =
        [](const AttentionBackwardArgs& args, long b, long h, long tile, long begin, long end,
           void* scratch) {
          return loop_mask<Products>(args, workspace(args, scratch), keys_per_tile(args), b, h,
                                     tile, begin, end);
        }};

}  // namespace

void attention_delta(const AttentionBackwardArgs& args, long begin, long end) {
  (args.type == Element::float32 ? typed_delta<float> : typed_delta<BFloat16>)(args, begin, end);
}

const AttentionBackwardKernels* attention_backward_kernels() { return &kKernels; }

void attention_backward_sum(const AttentionBackwardArgs& args, long b, long key_head,
                            const float* part, long parts, long begin, long end) {
  (args.type == Element::float32 ? typed_sum<float> : typed_sum<BFloat16>)(args, b, key_head, part,
                                                                           parts, begin, end);
}

}  // namespace tf::TF_ISA
