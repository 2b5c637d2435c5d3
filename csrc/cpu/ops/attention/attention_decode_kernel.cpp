// Attention of few queries, as in decoding. A whole row of scores fits in cache, so the softmax is
// not online: scores, row max, exponentials, weighted sum of values.
#include "cpu/gemm/gemm.h"
#include "cpu/ops/attention/attention_scores.h"

namespace tf::TF_ISA {
namespace {

constexpr Index kTile = 128;      // keys per tile
constexpr float kMasked = -1.0f;  // replaces the probability of a masked key
constexpr int kColumns = 4;       // vectors of a value row held in registers

template <class T>
struct Row {
  const AttentionArgs& args;
  const BlockMask block_mask;
  float* scores;  // round_up(S, kLanes)
  float* query;   // D, padded with zeros to whole vectors
  float* sums;    // Dv, likewise
  Index last;     // end of the visible keys
  const T* next;  // first key of the head that is read next

  const T* at(const void* place, const int64_t* starts, const Index* stride, Index head) const {
    return static_cast<const T*>(place) + head_offset(starts, stride, block_mask.b, head);
  }

  // Scores of a tile of keys. Rows that are read later are prefetched: runs of keys are short and
  // far apart, so the hardware prefetcher hardly helps.
  void score(const T* key, const T* value, Index start, Index count) const {
    const Index stride = args.key_stride[2], whole = args.size / kLanes * kLanes;
    const T* k = key + start * stride;
    for (Index s = 0; s < count; ++s, k += stride) {
      Vec sum[2] = {zero(), zero()};
      Index d = 0;
      for (; d + 2 * kLanes <= whole; d += 2 * kLanes)
        TF_UNROLL for (int u = 0; u < 2; ++u) sum[u] =
            fma(load(query + d + u * kLanes), load(k + d + u * kLanes), sum[u]);
      if (d < whole) {
        sum[0] = fma(load(query + d), load(k + d), sum[0]);
        d += kLanes;
      }
      if (d < args.size) sum[1] = fma(load(query + d), load_n(k + d, args.size - d), sum[1]);
      scores[start + s] = reduce_add(sum[0] + sum[1]);
      fetch_row(value + (start + s) * args.value_stride[2], args.value_size);
    }
  }

  // Caps, scales and masks a tile; returns its largest score.
  float scale_and_mask(Index start, Index count) const {
    float* s = scores + start;
    if (args.softcap != 0.0f) cap_scores(args, s, count);
    if (args.mask != nullptr) {
      block_mask.add_mask(s, block_mask.mask_row(0, start, count), count);
    } else {
      for (Index j = 0; j < count; ++j) s[j] *= args.scale;
    }
    Vec highest = set1(-kInf);
    for (Index j = 0; j < count; j += kLanes) highest = max(load_to(s + j, count - j), highest);
    return reduce_max(highest);
  }

  // Up to kLanes scores; the other lanes are -inf.
  static Vec load_to(const float* s, Index left) {
    if (left >= kLanes) return load(s);
    return select(less(load(kLaneNumbers), set1(static_cast<float>(left))), load_n(s, left),
                  set1(-kInf));
  }

  // Turns scores into unnormalised probabilities, kMasked where masked; returns their sum.
  float exponentiate(float row_max) const {
    const Vec neg_max = set1(-row_max);
    Vec sum = zero();
    for (Index j = 0; j < last; j += kLanes) {
      const Vec x = load_to(scores + j, last - j);
      const Mask masked = equal(x, set1(-kInf));
      const Vec e = exp(x + neg_max);
      sum = sum + select(masked, zero(), e);
      store_some(scores + j, select(masked, set1(kMasked), e), last - j);
    }
    return reduce_add(sum);
  }

  // Accumulates P V of a tile for kVecs vectors of a value row.
  template <int kVecs>
  void accumulate_pv(const T* value, Index start, Index count, Index column) const {
    Vec sum[kVecs];
    TF_UNROLL for (int u = 0; u < kVecs; ++u) sum[u] = zero();
    const Index stride = args.value_stride[2];
    const T* v = value + start * stride + column;
    const Index left = args.value_size - column;
    if (left >= kVecs * kLanes) {
      for (Index s = 0; s < count; ++s, v += stride) {
        const float p = scores[start + s];
        if (p < 0.0f) continue;  // NaN is not skipped
        TF_UNROLL for (int u = 0; u < kVecs; ++u) sum[u] =
            fma(set1(p), load(v + u * kLanes), sum[u]);
        if (column == 0) fetch_row(next + (start + s) * args.key_stride[2], args.size);
      }
    } else {
      for (Index s = 0; s < count; ++s, v += stride) {
        const float p = scores[start + s];
        if (p < 0.0f) continue;
        TF_UNROLL for (int u = 0; u < kVecs; ++u) if (u * kLanes < left) sum[u] =
            fma(set1(p), load_some(v + u * kLanes, left - u * kLanes), sum[u]);
      }
    }
    TF_UNROLL for (int u = 0; u < kVecs; ++u)
        store(sums + column + u * kLanes, load(sums + column + u * kLanes) + sum[u]);
  }

  void run() const {
    const Index head = block_mask.head, group = args.heads / args.key_heads;
    const T* q = at(args.query, args.query_starts, args.query_stride, head) +
                 block_mask.first * args.query_stride[2];
    for (Index d = 0; d < args.size; d += kLanes) store(query + d, load_some(q + d, args.size - d));
    const T* key = at(args.key, args.key_starts, args.key_stride, head / group);
    const T* value = at(args.value, args.key_starts, args.value_stride, head / group);
    float row_max = -kInf;
    for (Index start = 0; start < last; start += kTile) {
      const Index count = min(kTile, last - start);
      if (block_mask.fully_masked(start, count)) {
        for (Index j = 0; j < count; ++j) scores[start + j] = -kInf;
        continue;
      }
      score(key, value, start, count);
      const float here = scale_and_mask(start, count);
      row_max = here > row_max ? here : row_max;
    }
    // A sum of NaN scores only must stay NaN.
    const float row_sum = exponentiate(row_max == -kInf ? 0.0f : row_max);
    for (Index j = 0; j < args.value_size; j += kLanes) store(sums + j, zero());
    for (Index start = 0; start < last; start += kTile) {
      const Index count = min(kTile, last - start);
      for (Index j = 0; j < args.value_size; j += kColumns * kLanes) {
        switch ((min(args.value_size - j, kColumns * kLanes) + kLanes - 1) / kLanes) {
          case 1:
            accumulate_pv<1>(value, start, count, j);
            break;
          case 2:
            accumulate_pv<2>(value, start, count, j);
            break;
          case 3:
            accumulate_pv<3>(value, start, count, j);
            break;
          default:
            accumulate_pv<kColumns>(value, start, count, j);
        }
      }
    }
    finish(row_sum == 0.0f ? 0.0f : 1.0f / row_sum);
  }

  void finish(float norm) const {
    T* out = row_at<T>(args.output, args.query_starts, args.output_stride, block_mask.b,
                       block_mask.head, block_mask.first);
    // Sums of fully masked rows are 0 already.
    const Vec by = set1(norm == 0.0f ? 1.0f : norm);
    for (Index j = 0; j < args.value_size; j += kLanes)
      store_some(out + j, load(sums + j) * by, args.value_size - j);
    if (args.weights == nullptr) return;
    const Index row =
        (block_mask.b * args.heads + block_mask.head) * args.queries + block_mask.first;
    T* weights = static_cast<T*>(args.weights) + row * args.keys;
    for (Index j = 0; j < args.keys; j += kLanes) {
      Vec p = j < last ? load_to(scores + j, last - j) : set1(kMasked);
      p = select(less(p, zero()), zero(), p * set1(norm));
      store_some(weights + j, p, args.keys - j);
    }
  }
};

template <class T>
void attend(const AttentionArgs& args, Index b, Index key_head, float* scratch) {
  float* query = scratch;
  float* sums = query + round_up(args.size, kLanes);
  float* bias = sums + round_up(args.value_size, kColumns * kLanes);
  float* scores = bias + kTile;
  const Index group = args.heads / args.key_heads, queries = query_count(args, b);
  const Index limit = key_limit(args, b);
  const Index last_head = (key_head + 1) * group - 1;
  for (Index head = key_head * group; head <= last_head; ++head) {
    for (Index t = 0; t < queries; ++t) {
      const Index last = args.causal ? min(limit, t + 1) : limit;
      // Further queries find the keys in cache; after the last one the next key head follows.
      const bool same = head < last_head || t + 1 < queries;
      const bool last_key_head = key_head + 1 == args.key_heads;
      const Index next_b = !same && last_key_head && b + 1 < args.batch ? b + 1 : b;
      const Index next_head = same ? key_head : last_key_head ? 0 : key_head + 1;
      const T* next = static_cast<const T*>(args.key) +
                      head_offset(args.key_starts, args.key_stride, next_b, next_head);
      Row<T>{args, BlockMask{args, b, head, t, 1, last, bias}, scores, query, sums, last, next}
          .run();
    }
  }
}

}  // namespace

Index decode_attention_scratch(const AttentionArgs& args) {
  return (round_up(args.size, kLanes) + round_up(args.value_size, kColumns * kLanes) + kTile +
          round_up(args.keys, kLanes)) *
         static_cast<Index>(sizeof(float));
}

void decode_attention_queries(const AttentionArgs& args, Index b, Index key_head, void* scratch) {
  dispatch_element(args.type, [&](auto type) {
    attend<decltype(type)>(args, b, key_head, static_cast<float*>(scratch));
  });
}

}  // namespace tf::TF_ISA
