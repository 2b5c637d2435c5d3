// Attention by online softmax (Milakov and Gimelshein 2018; Dao et al. 2022) in fp32. Keys are
// transposed and values copied into panels once per call; then each block of queries loops over
// tiles of keys: scores in the register tiles of gemm.h, softmax by rows in cache, probabilities
// times values in the same register tiles. Not on the GEMM engine (attention_lowp_kernel.cpp):
// there the backward was measured to take 2 to 14 % longer, and the forward 2 to 11 % with few
// queries.
#include "cpu/ops/attention/attention.h"
#include "cpu/ops/attention/attention_mask.h"
#include "cpu/simd/philox.h"

namespace tf::TF_ISA {
namespace {

#if defined(__AVX512F__)
constexpr long kQueryBlock = 4 * kTileRows;
#else
constexpr long kQueryBlock = 8 * kTileRows;
#endif
constexpr long kKeyTile = 256;
constexpr long kPad = 16;
constexpr long kScoreStride = kKeyTile + kPad;

struct Workspace {
  long query_stride, value_columns, sum_stride, keys_up;
  float *keys, *values, *query, *scores, *bias, *sums, *row_max, *row_sum;
  unsigned char* nonfinite;  // per key tile: its values contain NaN or inf
  long floats = 0;

  Workspace(const AttentionArgs& args, float* scratch)
      : query_stride(kPackedRows * round_up(args.size, kLanes)),
        value_columns(round_up(args.value_size, kPanel)),
        sum_stride(value_columns + kPad),
        keys_up(round_up(args.keys, kPanel)) {
    const auto take = [&](long count) {
      float* place = scratch != nullptr ? scratch + floats : nullptr;
      floats += round_up(count, 16);
      return place;
    };
    keys = take(keys_up * args.size);
    values = take(keys_up * value_columns);
    query = take(kQueryBlock / kTileRows * query_stride);
    scores = take(kQueryBlock * kScoreStride);
    bias = take(kScoreStride);
    sums = take(kQueryBlock * sum_stride);
    row_max = take(kQueryBlock);
    row_sum = take(kQueryBlock);
    nonfinite = reinterpret_cast<unsigned char*>(take(args.keys / kKeyTile + 1));
  }
};

// One block of queries of one head against the packed keys.
struct Block {
  const AttentionArgs& args;
  const Workspace& work;
  const BlockMask block_mask;
  long b = block_mask.b, head = block_mask.head, first = block_mask.first, rows = block_mask.rows;
  // The scale is applied when a score is read (factor); with a mask, or a scale that does not
  // preserve the order of scores, it is applied at once.
  bool scaled = args.mask != nullptr || !(args.scale > 0.0f && args.scale < kInf);
  float factor = scaled ? 1.0f : args.scale;

  // Computes the scores of the tile: scores + mask, -inf where masked, padded to whole panels.
  void score_tile(long start, long count) const {
    for (long j = 0; j < count; j += kPanel)
      panel_rows<Form::packed>(work.query, work.query_stride, rows,
                               work.keys + (start + j) * args.size, args.size, work.scores + j,
                               kScoreStride, min(kPanel, count - j), false,
                               work.keys + (start + j + kPanel) * args.size);
    const float* shared = block_mask.shared_row(start, count);
    for (long i = 0; i < rows; ++i)
      block_mask.mask_scores(work.scores + i * kScoreStride, i, start, count,
                             round_up(count, kPanel), shared, scaled);
  }

  // Turns a row of scores into unnormalised probabilities exp(factor * s - row_max), 0 where
  // masked; returns their sum. The product is rounded before row_max, which is such a product, is
  // subtracted: within one fma, large scores would exceed their own maximum.
  float exponentiate(float* s, long count, float row_max) const {
    const Vec neg_max = set1(row_max == -kInf ? 0.0f : -row_max), times = set1(factor);
    Vec sum[2] = {zero(), zero()};
    for (long j = 0; j < count; j += 2 * kLanes) {
      TF_UNROLL for (int u = 0; u < 2; ++u) {
        const Vec e = exp(fma(load(s + j + u * kLanes), times, zero()) + neg_max);
        sum[u] = sum[u] + e;
        store(s + j + u * kLanes, e);
      }
    }
    return reduce_add(sum[0] + sum[1]);
  }

  // `clean`: no non-finite values have been accumulated so far.
  void softmax_row(long i, long count, bool clean) const {
    float* s = work.scores + i * kScoreStride;
    Vec highest[2] = {set1(-kInf), set1(-kInf)};
    for (long j = 0; j < count; j += 2 * kLanes) {  // rows are padded to whole panels
      highest[0] = max(load(s + j), highest[0]);
      highest[1] = max(load(s + j + kLanes), highest[1]);
    }
    const float before = work.row_max[i];
    const float here = reduce_max(max(highest[0], highest[1])) * factor;
    const float row_max = before > here ? before : here;
    const float sum = exponentiate(s, count, row_max);
    float rescale = 1.0f;
    if (row_max != before && before != -kInf) {
      float one[kLanes];
      store(one, exp(set1(before - row_max)));
      rescale = one[0];
      float* o = work.sums + i * work.sum_stride;
      // Sums that are rescaled to 0 may have overflowed.
      const bool drop = rescale == 0.0f && clean;
      for (long j = 0; j < args.value_size; j += kLanes)
        store(o + j, drop ? zero() : load(o + j) * set1(rescale));
    }
    work.row_sum[i] = work.row_sum[i] * rescale + sum;
    work.row_max[i] = row_max;
  }

  long row(long i) const { return (b * args.heads + head) * args.queries + first + i; }

  // Applies dropout to the probabilities of the row.
  void drop_row(long i, long start, long count) const {
    float* s = work.scores + i * kScoreStride;
    dropout_factors(args.dropout, static_cast<uint64_t>(row(i)), static_cast<uint64_t>(start),
                    count, work.bias);
    for (long j = 0; j < count; j += kLanes) store(s + j, load(s + j) * load(work.bias + j));
  }

  // P V where values contain NaN or inf: element by element, skipping masked keys.
  void accumulate_pv_nonfinite(long start, long count) const {
    for (long i = 0; i < rows; ++i) {
      const float* p = work.scores + i * kScoreStride;
      float* o = work.sums + i * work.sum_stride;
      const long visible = block_mask.visible(i, start, count);
      const float* mask = args.mask == nullptr ? nullptr : block_mask.mask_row(i, start, visible);
      for (long s = 0; s < visible; ++s) {
        if (mask != nullptr && mask[s] == -kInf) continue;
        for (long j = 0; j < args.value_size; j += kPanel) {
          const float* v = work.values + j * work.keys_up + (start + s) * kPanel;
          for (long c = 0; c < min(kPanel, args.value_size - j); ++c)
            o[j + c] = fma(p[s], v[c], o[j + c]);
        }
      }
    }
  }

  void accumulate_pv(long start, long count) const {
    if (work.nonfinite[start / kKeyTile]) return accumulate_pv_nonfinite(start, count);
    for (long j = 0; j < args.value_size; j += kPanel)
      panel_rows<Form::rows>(work.scores, kScoreStride, rows,
                             work.values + j * work.keys_up + start * kPanel, count, work.sums + j,
                             work.sum_stride, min(kPanel, args.value_size - j), true,
                             work.values + (j + kPanel) * work.keys_up + start * kPanel);
  }

  static void scale_row(const float* from, long n, float by, float* to) {
    long j = 0;
    for (; j + kLanes <= n; j += kLanes) store(to + j, load(from + j) * set1(by));
    for (; j < n; ++j) to[j] = from[j] * by;
  }

  float* output_row(long i) const {
    return static_cast<float*>(args.output) +
           head_offset(args.query_starts, args.output_stride, b, head) +
           (first + i) * args.output_stride[2];
  }

  void begin() const {
    const float* q = static_cast<const float*>(args.query) +
                     head_offset(args.query_starts, args.query_stride, b, head) +
                     first * args.query_stride[2];
    if (args.query_stride[3] == 1) {
      pack_a(q, args.query_stride[2], rows, args.size, work.query, work.query_stride);
    } else {
      each_tile(rows, [&](long t, long i, long count) {
        for (long d = 0; d < args.size; ++d)
          for (long r = 0; r < count; ++r)
            work.query[t * work.query_stride + d * kPackedRows + r] =
                q[(i + r) * args.query_stride[2] + d * args.query_stride[3]];
      });
    }
    for (long i = 0; i < rows; ++i) {
      float* o = work.sums + i * work.sum_stride;
      for (long j = 0; j < work.value_columns; j += kLanes) store(o + j, zero());
      const float* out = output_row(i);
      for (long d = 0; d < args.value_size; d += 16)
        _mm_prefetch(reinterpret_cast<const char*>(out + d), _MM_HINT_T1);
      work.row_max[i] = -kInf;
      work.row_sum[i] = 0.0f;
    }
  }

  void finish() const {
    for (long i = 0; i < rows; ++i) {
      const float row_sum = work.row_sum[i];
      const float* o = work.sums + i * work.sum_stride;
      float* out = output_row(i);
      // Sums of fully masked rows are 0 already.
      scale_row(o, args.value_size, row_sum == 0.0f ? 1.0f : 1.0f / row_sum, out);
      if (args.shift == nullptr) continue;
      args.shift[row(i)] = work.row_max[i];
      args.norm[row(i)] = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
    }
  }

  // Writes the probabilities, from the row maxima and sums of the first pass.
  void write_weights() const {
    for (long start = 0; start < args.keys; start += kKeyTile) {
      const long count = min(kKeyTile, args.keys - start);
      const long visible = max(0, min(count, block_mask.limit - start));
      const bool none = visible == 0 || block_mask.fully_masked(start, visible);
      if (!none) score_tile(start, visible);
      for (long i = 0; i < rows; ++i) {
        float* to = static_cast<float*>(args.weights) + row(i) * args.keys + start;
        const bool blank = none || work.row_sum[i] == 0.0f;
        if (!blank) {
          float* s = work.scores + i * kScoreStride;
          exponentiate(s, visible, work.row_max[i]);
          if (args.dropout.on) drop_row(i, start, visible);
          for (long j = 0; j < visible; ++j) to[j] = s[j] / work.row_sum[i];
        }
        for (long j = blank ? 0 : visible; j < count; ++j) to[j] = 0.0f;
      }
    }
  }

  void run() const {
    begin();
    bool clean = true;
    for (long tile = 0; tile < block_mask.limit; tile += kKeyTile) {
      long start = tile;
      const long end = tile + block_mask.unmasked(tile, min(kKeyTile, block_mask.limit - tile));
      if (end == tile) continue;
      while (block_mask.fully_masked(start, kPanel)) start += kPanel;  // padding on the left
      const long count = end - start;
      score_tile(start, count);
      for (long i = 0; i < rows; ++i) {
        softmax_row(i, count, clean);
        if (args.dropout.on) drop_row(i, start, count);
      }
      accumulate_pv(start, count);
      clean = clean && !work.nonfinite[start / kKeyTile];
    }
    finish();
    if (args.weights != nullptr) write_weights();
  }
};

// Packs keys; channels need not be adjacent.
void pack_keys(const AttentionArgs& args, const Workspace& work, long b, long head, long limit) {
  const float* k =
      static_cast<const float*>(args.key) + head_offset(args.key_starts, args.key_stride, b, head);
  for (long s = 0; s < limit; s += kPanel) {
    const long count = min(kPanel, limit - s);
    float* panel = work.keys + s * args.size;
    if (args.key_stride[3] == 1) {
      pack_rows(k + s * args.key_stride[2], args.key_stride[2], count, args.size, panel);
    } else {
      for (long d = 0; d < args.size; ++d)
        for (long j = 0; j < kPanel; ++j)
          panel[d * kPanel + j] =
              j < count ? k[(s + j) * args.key_stride[2] + d * args.key_stride[3]] : 0.0f;
    }
  }
}

void pack_values(const AttentionArgs& args, const Workspace& work, long b, long head, long limit) {
  const float* v = static_cast<const float*>(args.value) +
                   head_offset(args.key_starts, args.value_stride, b, head);
  for (long s = 0; s < limit; ++s) {
    const float* row = v + s * args.value_stride[2];
    // x - x is 0 for finite x and NaN otherwise, and NaN propagates through the sum.
    Vec nonfinite = zero();
    float nonfinite_rest = 0.0f;
    for (long j = 0; j < args.value_size; j += kPanel) {
      const long columns = min(kPanel, args.value_size - j);
      float* to = work.values + j * work.keys_up + s * kPanel;
      if (columns == kPanel && args.value_stride[3] == 1) {
        const Vec x = load(row + j), y = load(row + j + kLanes);
        store(to, x);
        store(to + kLanes, y);
        nonfinite = nonfinite + ((x - x) + (y - y));
      } else {
        for (long c = 0; c < kPanel; ++c) {
          const float x = c < columns ? row[(j + c) * args.value_stride[3]] : 0.0f;
          to[c] = x;
          nonfinite_rest += x - x;
        }
      }
    }
    const float sum = reduce_add(nonfinite) + nonfinite_rest;
    unsigned char& flag = work.nonfinite[s / kKeyTile];
    if (s % kKeyTile == 0) flag = 0;
    flag |= !(sum == 0.0f);
  }
}

void attend(const AttentionArgs& args, long b, long key_head, long begin, long end, void* scratch) {
  const Workspace work(args, static_cast<float*>(scratch));
  const long queries = query_count(args, b);
  const long limit = key_limit(args, b);
  // The last key that a query of this range may attend to.
  const bool all = end - begin >= queries || begin / queries != (end - 1) / queries;
  const long last = all ? queries : (end - 1) % queries + 1;
  const long packed = args.causal ? min(limit, last) : limit;
  pack_keys(args, work, b, key_head, packed);
  pack_values(args, work, b, key_head, packed);
  const long group = args.heads / args.key_heads;
  for (long item = begin; item < end;) {
    const long first = item % queries;
    const long left = min(queries - first, end - item);
    const long blocks = (left + kQueryBlock - 1) / kQueryBlock;
    const long rows = (left + blocks - 1) / blocks;
    const long visible = args.causal ? min(limit, first + rows) : limit;
    const long head = key_head * group + item / queries;
    const Block block{args, work, BlockMask{args, b, head, first, rows, visible, work.bias}};
    block.run();
    item += rows;
  }
}

constexpr AttentionKernels kKernels{.scratch =
                                        [](const AttentionArgs& args) {
                                          return Workspace(args, nullptr).floats *
                                                 static_cast<long>(sizeof(float));
                                        },
                                    .queries = attend};

}  // namespace

const AttentionKernels* attention_kernels() { return &kKernels; }

}  // namespace tf::TF_ISA
