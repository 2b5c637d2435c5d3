// Loops of the attention backward: over tiles of keys, and within each over blocks of queries. For
// kernel files only.
#pragma once

#include "cpu/ops/attention/attention.h"
#include "cpu/ops/attention/attention_mask.h"
#include "cpu/simd/philox.h"

namespace tf::TF_ISA {
namespace {

// Divides queries evenly into blocks of at most max_rows rows.
struct Cut {
  long queries, blocks;
  Cut(const AttentionBackwardArgs& args, long b, long max_rows)
      : queries(query_count(args, b)), blocks((queries + max_rows - 1) / max_rows) {}
  long first(long index) const { return queries * index / blocks; }
};

// A tile of keys of one key head.
struct KeyRange {
  long b, key_head, start, count, rows;  // the first `count` of its rows are within the key length
};

// Calls f(block_mask, count) for the blocks [begin, end) of queries of a head that attend to the
// tile, i.e. to the first `count` of its keys.
template <class F>
void each_block(const AttentionBackwardArgs& args, const KeyRange& tile, long head, long max_rows,
                long begin, long end, float* bias, const F& f) {
  const Cut cut(args, tile.b, max_rows);
  for (long index = begin; index < min(end, cut.blocks); ++index) {
    const long first = cut.first(index), rows = cut.first(index + 1) - first;
    const long stop = tile.start + tile.count;
    const long limit = args.causal ? min(stop, first + rows) : stop;
    if (limit <= tile.start) continue;
    const BlockMask block_mask{args, tile.b, head, first, rows, limit, bias};
    const long unmasked = block_mask.unmasked(tile.start, limit - tile.start);
    if (unmasked > 0) f(block_mask, unmasked);
  }
}

// The sum of W dW over a row of the given probabilities, numbered over (B, H, T).
inline float weights_delta(const AttentionBackwardArgs& args, long row) {
  const float* w = args.weights + row * args.keys;
  const float* dw = args.grad_weights + row * args.keys;
  Vec sum = zero();
  for (long s = 0; s < args.keys; s += kLanes) {
    const long here = min(kLanes, args.keys - s);
    const Vec weight = load_some(w + s, here);
    // Masked positions contribute no gradient.
    sum = sum + select(equal(weight, zero()), zero(), weight * load_some(dw + s, here));
  }
  return reduce_add(sum);
}

template <class T>
float sum_of_products(const T* x, const T* y, long n) {
  Vec sum = zero();
  for (long d = 0; d < n; d += kLanes)
    sum = fma(load_some(x + d, n - d), load_some(y + d, n - d), sum);
  return reduce_add(sum);
}

// Address of a row of one head.
template <class T>
const T* row_at(const void* tensor, const int64_t* starts, const long* stride, long b, long head,
                long row) {
  return static_cast<const T*>(tensor) + head_offset(starts, stride, b, head) + row * stride[2];
}

// The sum of P (dP of `key` - dP) over the other keys of a row, which equals dP - delta of `key`.
// `factor` is the key's dropout factor.
template <class T>
float slope_from_others(const AttentionBackwardArgs& args, long b, long head, long query, long key,
                        float factor) {
  const long key_head = head / (args.heads / args.key_heads);
  const long at = (b * args.heads + head) * args.queries + query;
  float bias[kLanes];
  const long limit = key_limit(args, b);
  const BlockMask block_mask{args, b, head, query, 1, limit, bias};
  const T* q = row_at<T>(args.query, args.query_starts, args.query_stride, b, head, query);
  const T* grad = row_at<T>(args.grad, args.query_starts, args.grad_stride, b, head, query);
  const auto slope_of = [&](long s) {
    const T* v = row_at<T>(args.value, args.key_starts, args.value_stride, b, key_head, s);
    return sum_of_products(grad, v, args.value_size);
  };
  const float own = slope_of(key) * factor;
  float sum = 0.0f;
  for (long s = 0; s < block_mask.visible(0, 0, limit); ++s) {
    const float mask = args.mask == nullptr ? 0.0f : *block_mask.mask_row(0, s, 1);
    if (s == key || mask == -kInf) continue;
    const T* k = row_at<T>(args.key, args.key_starts, args.key_stride, b, key_head, s);
    const float x = sum_of_products(q, k, args.size) * args.scale + mask - args.shift[at];
    if (x < -30.0f) continue;  // 1e-13, while all the other keys together have 1e-4
    float p[kLanes];
    store(p, exp(set1(x)));
    bool keeps = true;
    if (args.dropout.on)
      keeps =
          keep_bits(args.dropout, static_cast<uint64_t>(at), static_cast<uint64_t>(s / 8 * 8)) >>
              s % 8 &
          1;
    sum += p[0] * args.norm[at] *
           (own - (keeps ? slope_of(s) * (args.dropout.on ? args.dropout.scale : 1.0f) : 0.0f));
  }
  return sum;
}

// dP - delta of a key with almost all of a row's probability; `factor` is its dropout factor. Then
// O is almost V and delta almost dP, so their difference is rounding error. The sum of dO (V - O)
// is the same number with the difference taken first, where it is exact if O is.
template <class T>
float dominant_slope(const AttentionBackwardArgs& args, float probability, long b, long head,
                     long query, long key, float factor) {
  // Beyond this, the probability is not accurate enough to be distinguished from 1.
  constexpr float kCertain = 1.0f - 0x1p-13f;
  if (args.dominant != kDominantInFloat && probability < kCertain)
    return slope_from_others<T>(args, b, head, query, key, factor);
  const long key_head = head / (args.heads / args.key_heads);
  const T* grad = row_at<T>(args.grad, args.query_starts, args.grad_stride, b, head, query);
  const T* output = row_at<T>(args.output, args.query_starts, args.output_stride, b, head, query);
  const T* value = row_at<T>(args.value, args.key_starts, args.value_stride, b, key_head, key);
  Vec sum = zero();
  for (long d = 0; d < args.value_size; d += kLanes) {
    const long here = args.value_size - d;
    const Vec difference = load_some(value + d, here) * set1(factor) - load_some(output + d, here);
    sum = fma(load_some(grad + d, here), difference, sum);
  }
  float slope = reduce_add(sum);
  if (args.dominant != kDominantInFloat) return slope * 0.0f;  // keeps NaN
  if (args.grad_weights != nullptr) {
    const long at = (b * args.heads + head) * args.queries + query;
    slope += args.grad_weights[at * args.keys + key] * factor - weights_delta(args, at);
  }
  return slope;
}

// Destination of a block's rows of dQ, and its strides.
struct QueryRows {
  float* data;
  long head_stride, stride;
};

inline QueryRows query_rows(const AttentionBackwardArgs& args, long b, long key_head, float* part) {
  if (part != nullptr) return {part, args.queries * args.size, args.size};
  const long head = key_head * (args.heads / args.key_heads);
  return {static_cast<float*>(args.grad_query) +
              head_offset(args.query_starts, args.grad_query_stride, b, head),
          args.grad_query_stride[1], args.grad_query_stride[2]};
}

inline void clear(float* p, long n) {
  for (long j = 0; j < n; ++j) p[j] = 0.0f;
}

// Stores, or accumulates, scale times rows of n sums in rows of dQ.
inline void write_dq(const float* sums, long sum_stride, long rows, long n, float scale, float* to,
                     long stride, bool accumulate) {
  for (long i = 0; i < rows; ++i, sums += sum_stride, to += stride) {
    long d = 0;
    for (; d + kLanes <= n; d += kLanes)
      store(to + d, fma(load(sums + d), set1(scale), accumulate ? load(to + d) : zero()));
    for (; d < n; ++d) to[d] = sums[d] * scale + (accumulate ? to[d] : 0.0f);
  }
}

// See AttentionBackwardKernels::keys. Kind has a Workspace, query_rows(args), the maximum rows of a
// block, and
//
//   Tile(args, work, range)         pack(); write(), for dK and dV
//   Block(args, work, block_mask)   pass(tile, count), for P, dS, dK and dV;
//                                   accumulate_dq(tile, count, to, stride, accumulate)
//
// Returns false once pack() or pass() does: an operand is out of range of the products.
template <class Kind>
bool loop_keys(const AttentionBackwardArgs& args, const typename Kind::Workspace& work, long step,
               long b, long key_head, long begin, long end, float* part) {
  const long group = args.heads / args.key_heads, queries = query_count(args, b);
  const bool wants_query = args.grad_query != nullptr;
  const QueryRows out =
      wants_query ? query_rows(args, b, key_head, part) : QueryRows{nullptr, 0, 0};
  const long keys = min(end, key_count(args, b)), limit = key_limit(args, b);
  // Once even without keys, for dQ.
  for (long start = begin; start == begin || start < keys; start += step) {
    const long rows = max(0, min(step, keys - start));
    const KeyRange range{b, key_head, start, max(0, min(rows, limit - start)), rows};
    typename Kind::Tile tile(args, work, range);
    if (range.count > 0 && !tile.pack()) return false;
    bool did = true;
    for (long h = 0; h < group; ++h) {
      float* to = wants_query ? out.data + h * out.head_stride : nullptr;
      long written = 0;  // rows of dQ written so far
      // The first tile writes all rows, the others accumulate.
      const auto clear_to = [&](long end_row) {
        for (; written < end_row && start == begin; ++written)
          clear(to + written * out.stride, args.size);
      };
      if (range.count > 0)
        each_block(args, range, key_head * group + h, Kind::query_rows(args), 0, queries, work.bias,
                   [&](const BlockMask& block_mask, long count) {
                     if (!did) return;
                     typename Kind::Block block(args, work, block_mask);
                     did = block.pass(tile, count);
                     if (!did || !wants_query) return;
                     clear_to(block_mask.first);
                     block.accumulate_dq(tile, count, to + block_mask.first * out.stride,
                                         out.stride, start != begin);
                     written = block_mask.first + block_mask.rows;
                   });
      if (!did) return false;
      if (wants_query) clear_to(queries);
    }
    tile.write();
  }
  return true;
}

// Accumulates the gradient of a mask for one of its batch elements and heads.
struct MaskSums {
  float* first;
  long stride;     // between queries; 0 if broadcast over queries
  bool by_column;  // false if broadcast over keys

  // Adds `count` values of query `row` for the keys from `start` on.
  void add(long row, long start, const float* ds, long count) const {
    float* to = first + row * stride;
    if (by_column) {
      for (long s = 0; s < count; s += kLanes) {
        const long here = min(kLanes, count - s);
        float* place = to + start + s;
        store_some(place, load_some(place, here) + load_some(ds + s, here), here);
      }
      return;
    }
    Vec sum = zero();
    for (long s = 0; s < count; s += kLanes) sum = sum + load_some(ds + s, min(kLanes, count - s));
    *to += reduce_add(sum);
  }
};

// See AttentionBackwardKernels::mask. Kind is as for loop_keys(), and has
//
//   Mask(args, work, block_mask)    pass(tile, count, sums), which adds the block's dS to the sums
//
// Returns false once pack() or pass() does.
template <class Kind>
bool loop_mask(const AttentionBackwardArgs& args, const typename Kind::Workspace& work, long step,
               long mask_b, long mask_h, long tile, long begin, long end) {
  const long* size = args.mask_size;
  const long group = args.heads / args.key_heads;
  const MaskSums sums{args.grad_mask + (mask_b * size[1] + mask_h) * size[2] * size[3],
                      size[2] > 1 ? size[3] : 0, size[3] > 1};
  const long first_b = size[0] > 1 ? mask_b : 0, last_b = size[0] > 1 ? mask_b + 1 : args.batch;
  const long first_h = size[1] > 1 ? mask_h : 0, last_h = size[1] > 1 ? mask_h + 1 : args.heads;
  bool did = true;
  for (long b = first_b; b < last_b; ++b) {
    const long limit = key_limit(args, b);
    const long first = sums.by_column ? tile * step : 0;
    const long stop = sums.by_column ? min(limit, first + step) : limit;
    for (long start = first; start < stop; start += step) {
      const long rows = min(step, stop - start);
      for (long h = first_h; h < last_h; ++h) {
        typename Kind::Tile keys(args, work, {b, h / group, start, rows, rows});
        if (!keys.pack()) return false;
        each_block(args, keys, h, Kind::query_rows(args), begin, end, work.bias,
                   [&](const BlockMask& block_mask, long count) {
                     did =
                         did && typename Kind::Mask(args, work, block_mask).pass(keys, count, sums);
                   });
        if (!did) return false;
      }
    }
  }
  return true;
}

}  // namespace
}  // namespace tf::TF_ISA
