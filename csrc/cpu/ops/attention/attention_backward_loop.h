// Loops of the attention backward: over tiles of keys, and within each over blocks of queries. For
// kernel files only.
#pragma once

#include "cpu/ops/attention/attention.h"
#include "cpu/ops/attention/attention_mask.h"
#include "cpu/simd/philox.h"

namespace tf::TF_ISA {
namespace {

// Divides queries evenly into blocks of at most max_rows rows. Blocks begin at multiples of `unit`,
// which divides max_rows.
struct Cut {
  Index queries, blocks, unit;
  Cut(const AttentionBackwardArgs& args, Index b, Index max_rows, Index unit_rows)
      : queries(query_count(args, b)),
        blocks((queries + max_rows - 1) / max_rows),
        unit(unit_rows) {}
  Index first(Index index) const { return min(queries, round_up(queries * index / blocks, unit)); }
};

// A tile of keys of one key head.
struct KeyRange {
  Index b, key_head, start, count, rows;  // the first `count` of its rows are within the key length
};

// Calls f(block_mask, count) for the blocks of queries of a head that attend to the tile, i.e. to
// the first `count` of its keys.
template <class F>
void each_block(const AttentionBackwardArgs& args, const KeyRange& tile, Index head, const Cut& cut,
                float* bias, const F& f) {
  for (Index index = 0; index < cut.blocks; ++index) {
    const Index first = cut.first(index), rows = cut.first(index + 1) - first;
    const Index stop = tile.start + tile.count;
    const Index limit = args.causal ? min(stop, first + rows) : stop;
    if (rows == 0 || limit <= tile.start) continue;
    const BlockMask block_mask{args, tile.b, head, first, rows, limit, bias};
    const Index unmasked = block_mask.unmasked(tile.start, limit - tile.start);
    if (unmasked > 0) f(block_mask, unmasked);
  }
}

// The sum of W dW over a row of the given probabilities, numbered over (B, H, T).
template <class T>
float weights_delta(const AttentionBackwardArgs& args, Index row) {
  const T* w = static_cast<const T*>(args.weights) + row * args.keys;
  const T* dw = static_cast<const T*>(args.grad_weights) + row * args.keys;
  Vec sum = zero();
  for (Index s = 0; s < args.keys; s += kLanes) {
    const Index here = min(kLanes, args.keys - s);
    const Vec weight = load_some(w + s, here);
    // Masked positions contribute no gradient.
    sum = sum + select(equal(weight, zero()), zero(), weight * load_some(dw + s, here));
  }
  return reduce_add(sum);
}

// The gradient of the returned probability of a row, numbered over (B, H, T), and a key.
template <class T>
float grad_weight(const AttentionBackwardArgs& args, Index row, Index key) {
  if (args.grad_weights == nullptr) return 0.0f;
  return load_one(static_cast<const T*>(args.grad_weights) + row * args.keys + key);
}

template <class T>
float sum_of_products(const T* x, const T* y, Index n) {
  Vec sum = zero();
  for (Index d = 0; d < n; d += kLanes)
    sum = fma(load_some(x + d, n - d), load_some(y + d, n - d), sum);
  return reduce_add(sum);
}

// The sum of P (dP of `key` - dP) over the other keys of a row, which equals dP - delta of `key`.
// `factor` is the key's dropout factor.
template <class T>
float slope_from_others(const AttentionBackwardArgs& args, Index b, Index head, Index query,
                        Index key, float factor) {
  const Index key_head = head / (args.heads / args.key_heads);
  const Index at = (b * args.heads + head) * args.queries + query;
  float bias[kLanes];
  const Index limit = key_limit(args, b);
  const BlockMask block_mask{args, b, head, query, 1, limit, bias};
  const T* q = row_at<T>(args.query, args.query_starts, args.query_stride, b, head, query);
  const T* grad = row_at<T>(args.grad, args.query_starts, args.grad_stride, b, head, query);
  const auto slope_of = [&](Index s) {
    const T* v = row_at<T>(args.value, args.key_starts, args.value_stride, b, key_head, s);
    return sum_of_products(grad, v, args.value_size) + grad_weight<T>(args, at, s);
  };
  const float own = slope_of(key) * factor;
  float sum = 0.0f;
  for (Index s = 0; s < block_mask.visible(0, 0, limit); ++s) {
    const float mask = args.mask == nullptr ? 0.0f : *block_mask.mask_row(0, s, 1);
    if (s == key || mask == -kInf) continue;
    const T* k = row_at<T>(args.key, args.key_starts, args.key_stride, b, key_head, s);
    const float x = sum_of_products(q, k, args.size) * args.scale + mask - args.row_max[at];
    if (x < -30.0f) continue;  // 1e-13, while all the other keys together have 1e-4
    float p[kLanes];
    store(p, exp(set1(x)));
    bool keeps = true;
    if (args.dropout.on)
      keeps =
          keep_bits(args.dropout, static_cast<uint64_t>(at), static_cast<uint64_t>(s / 8 * 8)) >>
              s % 8 &
          1;
    sum += p[0] / args.row_sum[at] *
           (own - (keeps ? slope_of(s) * (args.dropout.on ? args.dropout.scale : 1.0f) : 0.0f));
  }
  return sum;
}

// dP - delta of a key with almost all of a row's probability; `factor` is its dropout factor. Then
// O is almost V and delta almost dP, so their difference is rounding error. The sum of dO (V - O)
// is the same number with the difference taken first, where it is exact if O is.
template <class T>
float dominant_slope(const AttentionBackwardArgs& args, float probability, Index b, Index head,
                     Index query, Index key, float factor) {
  // Beyond this, the probability is not accurate enough to be distinguished from 1.
  constexpr float kCertain = 1.0f - 0x1p-13f;
  if (args.dominant != kDominantInFloat && probability < kCertain)
    return slope_from_others<T>(args, b, head, query, key, factor);
  const Index key_head = head / (args.heads / args.key_heads);
  const T* grad = row_at<T>(args.grad, args.query_starts, args.grad_stride, b, head, query);
  const T* output = row_at<T>(args.output, args.query_starts, args.output_stride, b, head, query);
  const T* value = row_at<T>(args.value, args.key_starts, args.value_stride, b, key_head, key);
  Vec sum = zero();
  for (Index d = 0; d < args.value_size; d += kLanes) {
    const Index here = args.value_size - d;
    const Vec difference = load_some(value + d, here) * set1(factor) - load_some(output + d, here);
    sum = fma(load_some(grad + d, here), difference, sum);
  }
  float slope = reduce_add(sum);
  if (args.dominant != kDominantInFloat) return slope * 0.0f;  // keeps NaN
  if (args.grad_weights != nullptr) {
    const Index at = (b * args.heads + head) * args.queries + query;
    slope += grad_weight<T>(args, at, key) * factor - weights_delta<T>(args, at);
  }
  return slope;
}

// Destination of a block's rows of dQ, and its strides.
struct QueryRows {
  float* data;
  Index head_stride, stride;
};

inline QueryRows query_rows(const AttentionBackwardArgs& args, Index b, Index key_head,
                            float* part) {
  if (part != nullptr) return {part, args.queries * args.size, args.size};
  const Index head = key_head * (args.heads / args.key_heads);
  return {static_cast<float*>(args.grad_query) +
              head_offset(args.query_starts, args.grad_query_stride, b, head),
          args.grad_query_stride[1], args.grad_query_stride[2]};
}

inline void clear(float* p, Index n) {
  for (Index j = 0; j < n; ++j) p[j] = 0.0f;
}

// Stores, or accumulates, scale times rows of n sums in rows of dQ.
inline void write_dq(const float* sums, Index sum_stride, Index rows, Index n, float scale,
                     float* to, Index stride, bool accumulate) {
  for (Index i = 0; i < rows; ++i, sums += sum_stride, to += stride) {
    Index d = 0;
    for (; d + kLanes <= n; d += kLanes)
      store(to + d, fma(load(sums + d), set1(scale), accumulate ? load(to + d) : zero()));
    for (; d < n; ++d) to[d] = sums[d] * scale + (accumulate ? to[d] : 0.0f);
  }
}

// Sums for the gradient of a mask, for one batch element and head.
struct MaskSums {
  float* first;    // nullptr if not wanted
  Index stride;    // between queries; 0 if broadcast over queries
  bool by_column;  // false if broadcast over keys

  MaskSums(const AttentionBackwardArgs& args, float* sums, Index b, Index head)
      : first(sums), stride(0), by_column(args.mask_size[3] > 1) {
    if (sums == nullptr) return;
    const Index* size = args.mask_size;
    first += ((size[0] > 1 ? b : 0) * size[1] + (size[1] > 1 ? head : 0)) * size[2] * size[3];
    stride = size[2] > 1 ? size[3] : 0;
  }

  // All rows of a block have the same destination: they are summed first.
  bool by_block() const { return stride == 0 && by_column; }

  float* place(Index row, Index start) const {
    return first + row * stride + (by_column ? start : 0);
  }

  // Adds `count` values of query `row` for the keys from `start` on.
  void add(Index row, Index start, const float* ds, Index count) const {
    float* to = place(row, start);
    if (by_column) {
      for (Index s = 0; s < count; s += kLanes) {
        const Index here = min(kLanes, count - s);
        store_some(to + s, load_some(to + s, here) + load_some(ds + s, here), here);
      }
      return;
    }
    Vec sum = zero();
    for (Index s = 0; s < count; s += kLanes) sum = sum + load_some(ds + s, min(kLanes, count - s));
    *to += reduce_add(sum);
  }
};

// Rows to prefetch into the second-level cache, a few at a time between products: the hardware does
// not predict rows that are a stride of several lines apart.
class RowsAhead {
 public:
  void add(const void* row, Index stride, Index n, Index rows, Index element_bytes) {
    if (row == nullptr || rows <= 0) return;
    ranges_[count_++] = {static_cast<const char*>(row), stride * element_bytes, n * element_bytes,
                         rows};
    total_ += rows;
  }
  // Prefetches one of `shares` shares.
  TF_INLINE void fetch(Index shares) {
    for (Index left = (total_ + shares - 1) / shares; left > 0 && at_ < count_; --left) {
      Range& range = ranges_[at_];
      for (Index byte = 0; byte < range.bytes; byte += kLine) prefetch_l2(range.row + byte);
      range.row += range.stride;
      if (--range.rows == 0) ++at_;
    }
  }

 private:
  struct Range {
    const char* row;
    Index stride, bytes, rows;
  };
  Range ranges_[12];
  Index count_ = 0, at_ = 0, total_ = 0;
};

// The rows that a block of queries writes, and those that are read next: by this block, of masks
// and grad_weights (`by_row`), then by the following block, key head or pair. Measured with T =
// 128: 8 % less time in fp32, 17 % in bfloat16.
inline RowsAhead rows_ahead(const AttentionBackwardArgs& args, const KeyRange& tile,
                            const BlockMask& block, const QueryRows& out, const MaskSums& sums,
                            bool by_row, Index begin, Index step, Index keys, Index next) {
  RowsAhead ahead;
  const Index group = args.heads / args.key_heads, bytes = element_bytes(args.type);
  const auto add = [&](const void* tensor, const int64_t* starts, const Index* stride, Index b,
                       Index head, Index row, Index n, Index rows) {
    if (tensor != nullptr)
      ahead.add(static_cast<const char*>(tensor) +
                    (head_offset(starts, stride, b, head) + row * stride[2]) * bytes,
                stride[2], n, rows, bytes);
  };
  const auto add_queries = [&](Index b, Index head, Index row, Index rows) {
    rows = min(rows, query_count(args, b) - row);
    add(args.query, args.query_starts, args.query_stride, b, head, row, args.size, rows);
    add(args.grad, args.query_starts, args.grad_stride, b, head, row, args.value_size, rows);
    return rows > 0;
  };
  const auto add_keys = [&](const void* key, const Index* key_stride, const void* value,
                            const Index* value_stride, Index b, Index head, Index row, Index rows) {
    add(key, args.key_starts, key_stride, b, head, row, args.size, rows);
    add(value, args.key_starts, value_stride, b, head, row, args.value_size, rows);
  };
  if (out.data != nullptr)
    ahead.add(out.data + block.head % group * out.head_stride + block.first * out.stride,
              out.stride, args.size, block.rows, sizeof(float));
  if (by_row) {
    if (args.mask != nullptr && args.mask_stride[2] != 0 && args.mask_stride[3] == 1)
      ahead.add(block.mask_at(0, tile.start), args.mask_stride[2], tile.count, block.rows,
                element_bytes(args.mask_type));
    if (sums.first != nullptr && sums.stride != 0 && sums.by_column)
      ahead.add(sums.place(block.first, tile.start), sums.stride, tile.count, block.rows,
                sizeof(float));
    if (args.grad_weights != nullptr) {
      const Index row = (block.b * args.heads + block.head) * args.queries + block.first;
      ahead.add(
          static_cast<const char*>(args.grad_weights) + (row * args.keys + tile.start) * bytes,
          args.keys, tile.count, block.rows, bytes);
    }
  }
  if (add_queries(block.b, block.head, block.first + block.rows, block.rows)) return ahead;
  if (block.head + 1 < (tile.key_head + 1) * group) {
    add_queries(block.b, block.head + 1, 0, block.rows);
    return ahead;
  }
  add_keys(args.grad_key, args.grad_key_stride, args.grad_value, args.grad_value_stride, tile.b,
           tile.key_head, tile.start, tile.rows);
  const bool same = tile.start + step < keys;
  if (!same && next < 0) return ahead;
  const Index b = same ? tile.b : next / args.key_heads;
  const Index key_head = same ? tile.key_head : next % args.key_heads;
  add_keys(args.key, args.key_stride, args.value, args.value_stride, b, key_head,
           same ? tile.start + step : begin, min(step, keys - begin));
  add_queries(b, key_head * group, 0, block.rows);
  if (!same)
    add(args.output, args.query_starts, args.output_stride, b, key_head * group, 0, args.value_size,
        block.rows);
  return ahead;
}

// See AttentionBackwardKernels::keys. Kind has a Workspace, kQueryRows, the maximum rows of a
// block, kQueryUnit, of which their first rows are multiples, kByRow, true if masks are read by
// whole rows of a tile, and
//
//   Tile(args, work, range)         pack(); write(), for dK and dV
//   Block(args, work, block_mask)   pass(tile, count, sums, ahead), for P, dS, dK, dV and the sums
//                                   for the mask, while it prefetches `ahead`;
//                                   accumulate_dq(tile, count, to, stride, accumulate)
//
// Returns false once pack() or pass() does: an operand is out of range of the products.
template <class Kind>
bool loop_keys(const AttentionBackwardArgs& args, const typename Kind::Workspace& work, Index step,
               Index b, Index key_head, Index begin, Index end, float* part, float* mask_sums,
               Index next) {
  const Index group = args.heads / args.key_heads, queries = query_count(args, b);
  const bool wants_query = args.grad_query != nullptr;
  const QueryRows out =
      wants_query ? query_rows(args, b, key_head, part) : QueryRows{nullptr, 0, 0};
  const Index keys = min(end, key_count(args, b)), limit = key_limit(args, b);
  const Cut cut(args, b, Kind::kQueryRows, Kind::kQueryUnit);
  // Runs at least once, because dQ must be written even if there are no keys.
  for (Index start = begin; start == begin || start < keys; start += step) {
    const Index rows = max(0, min(step, keys - start));
    const KeyRange range{b, key_head, start, max(0, min(rows, limit - start)), rows};
    typename Kind::Tile tile(args, work, range);
    if (range.count > 0 && !tile.pack()) return false;
    bool did = true;
    for (Index h = 0; h < group; ++h) {
      float* to = wants_query ? out.data + h * out.head_stride : nullptr;
      Index written = 0;  // rows of dQ written so far
      // The first tile writes all rows, the others accumulate.
      const auto clear_to = [&](Index end_row) {
        for (; written < end_row && start == begin; ++written)
          clear(to + written * out.stride, args.size);
      };
      const Index head = key_head * group + h;
      const MaskSums sums(args, mask_sums, b, head);
      if (range.count > 0)
        each_block(args, range, head, cut, work.bias,
                   [&](const BlockMask& block_mask, Index count) {
                     if (!did) return;
                     typename Kind::Block block(args, work, block_mask);
                     RowsAhead ahead = rows_ahead(args, range, block_mask, out, sums, Kind::kByRow,
                                                  begin, step, keys, next);
                     did = block.pass(tile, count, sums, ahead);
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

}  // namespace
}  // namespace tf::TF_ISA
