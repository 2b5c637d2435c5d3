// Attention by online softmax (Milakov and Gimelshein 2018; Dao et al. 2022) in fp32. Keys are
// transposed and values copied into panels once per call; then each block of queries loops over
// tiles of keys: scores in the register tiles of gemm.h, softmax by rows in cache, probabilities
// times values in the same register tiles. Not on the GEMM engine (attention_lowp_kernel.cpp):
// there the backward was measured to take 2 to 14 % longer, and the forward 2 to 11 % with few
// queries.
#include "cpu/ops/attention/attention.h"
#include "cpu/ops/attention/attention_prefetch.h"
#include "cpu/ops/attention/attention_scores.h"
#include "cpu/simd/philox.h"

namespace tf::TF_ISA {
namespace {

// A block of queries consists of strips: the rows of a register tile. A tile of keys is applied
// strip by strip, so scores stay in the first-level cache from one product to the other, and each
// strip has its own causal and mask limits.
constexpr Index kStrips = kBlockTiles, kQueryBlock = kStrips * kTileRows;
constexpr Index kKeyTile = 256;
constexpr Index kPad = 16;

struct Workspace {
  Index query_stride, value_columns, sum_stride, score_stride, keys_up;
  float *keys, *values, *query, *scores, *bias, *shared, *sums, *row_max, *row_sum, *tile_max;
  unsigned char* nonfinite;  // per key tile: its values contain NaN or inf
  Index floats = 0;

  Workspace(const AttentionArgs& args, float* scratch)
      : query_stride(kPackedRows * round_up(args.size, kLanes)),
        value_columns(round_up(args.value_size, kPanel)),
        sum_stride(value_columns + kPad),
        // The scores of all tiles are kept if they are returned.
        score_stride((args.weights == nullptr ? kKeyTile : round_up(args.keys, kPanel)) + kPad),
        keys_up(round_up(args.keys, kPanel)) {
    const auto take = [&](Index count) {
      float* place = scratch != nullptr ? scratch + floats : nullptr;
      floats += round_up(count, 16);
      return place;
    };
    const Index tiles = args.keys / kKeyTile + 1;
    keys = take(keys_up * args.size);
    values = take(keys_up * value_columns);
    query = take(kStrips * query_stride);
    scores = take(kTileRows * score_stride);
    bias = take(kKeyTile + kPad);
    shared = take(kKeyTile + kPad);
    sums = take(kQueryBlock * sum_stride);
    row_max = take(kStrips * kPackedRows);
    row_sum = take(kQueryBlock * kLanes);
    tile_max = take(args.weights == nullptr ? 0 : tiles * kPackedRows);
    nonfinite = reinterpret_cast<unsigned char*>(take(tiles));
  }
};

// Rows [first, first + mask.rows) of a block, with their own limit to the keys.
struct Strip {
  Index index, first;
  BlockMask mask;
  // In the workspace: rows of sums, row maxima, and kLanes partial sums of each row.
  float *sums, *row_max, *row_sum;
  bool& started;  // its sums hold anything
};

// Keys [start, start + count) of a tile.
struct Keys {
  Index start, count;
  const float* shared;  // their mask if it is the same for all rows, or nullptr
  bool masked;          // the mask tensor changes scores

  void skip(Index n) {
    start += n;
    count -= n;
    if (shared != nullptr) shared += n;
  }
};

// One block of queries of one head against the packed keys.
struct Block {
  const AttentionArgs& args;
  const Workspace& work;
  const BlockMask block_mask;
  HeadPrefetcher<float>& next_head;
  Index b = block_mask.b, head = block_mask.head, first = block_mask.first, rows = block_mask.rows;
  // The scale is applied when a score is read (factor); with an additive mask, or a scale that does
  // not preserve the order of scores, it is applied at once.
  bool additive = args.mask != nullptr && args.mask_type != Element::boolean;
  bool scaled = additive || !(args.scale > 0.0f && args.scale < kInf);
  float factor = scaled ? 1.0f : args.scale;
  bool started[kStrips] = {};

  template <class F>
  void each_strip(const F& f) {
    each_tile(rows, [&](Index t, Index i, Index count) {
      const Index limit = args.causal ? min(block_mask.limit, first + i + count) : block_mask.limit;
      f(Strip{t, i, BlockMask{args, b, head, first + i, count, limit, work.bias},
              work.sums + i * work.sum_stride, work.row_max + t * kPackedRows,
              work.row_sum + i * kLanes, started[t]});
    });
  }

  // Replaces the first n scores of a row by masked(j, score, valid lanes) and those up to `padded`
  // by -inf; returns the largest.
  template <class Masked>
  TF_INLINE static float masked_max(float* s, Index n, Index padded, const Masked& masked) {
    Vec highest[2] = {set1(-kInf), set1(-kInf)};
    Index j = 0;
    for (; j + kPanel <= n; j += kPanel) TF_UNROLL for (int u = 0; u < 2; ++u) {
        const Vec x = masked(j + u * kLanes, load(s + j + u * kLanes), kLanes);
        store(s + j + u * kLanes, x);
        highest[u] = max(x, highest[u]);
      }
    for (; j < padded; j += kLanes) {
      Vec x = set1(-kInf);
      if (j < n)
        x = select(less(load(kLaneNumbers), set1(static_cast<float>(n - j))),
                   masked(j, load(s + j), min(kLanes, n - j)), x);
      store(s + j, x);
      highest[0] = max(x, highest[0]);
    }
    return reduce_max(max(highest[0], highest[1]));
  }

  // Masks a row of scores, -inf where masked and up to whole panels; returns the largest.
  float mask_scores(const Strip& strip, float* s, Index i, const Keys& keys) const {
    const BlockMask& mask = strip.mask;
    const Index n = mask.visible(i, keys.start, keys.count), padded = round_up(keys.count, kPanel);
    const Vec scale = set1(args.scale), lowest = set1(-kInf);
    if (!keys.masked) {
      if (scaled) return masked_max(s, n, padded, [&](Index, Vec x, Index) { return x * scale; });
      return masked_max(s, n, padded, [&](Index, Vec x, Index) { return x; });
    }
    if (!scaled && keys.shared == nullptr && args.mask_stride[3] == 1) {
      const auto* bytes = reinterpret_cast<const uint8_t*>(mask.mask_at(i, keys.start));
      return masked_max(s, n, padded, [&](Index j, Vec x, Index valid) {
        if (valid == kLanes) return select(bytes_nonzero(bytes + j), x, lowest);
        const float* rest = mask.mask_row(i, keys.start + j, valid);
        return select(equal(load_some(rest, valid), lowest), lowest, x);
      });
    }
    const float* add = keys.shared != nullptr ? keys.shared : mask.mask_row(i, keys.start, n);
    if (scaled)
      return masked_max(s, n, padded, [&](Index j, Vec x, Index valid) {
        const Vec m = load_some(add + j, valid);
        return select(equal(m, lowest), m, fma(x, scale, m));
      });
    return masked_max(s, n, padded, [&](Index j, Vec x, Index valid) {
      return select(equal(load_some(add + j, valid), lowest), lowest, x);
    });
  }

  // Turns a row of scores into unnormalised probabilities exp(factor * s - row_max), 0 where
  // masked; returns partial sums. The product is rounded before row_max, which is such a product,
  // is subtracted: within one fma, large scores would exceed their own maximum.
  TF_INLINE Vec exponentiate(float* s, Index count, float row_max) const {
    const Vec neg_max = set1(row_max == -kInf ? 0.0f : -row_max), times = set1(factor);
    Vec sum[2] = {zero(), zero()};
    for (Index j = 0; j < count; j += 2 * kLanes) {
      TF_UNROLL for (int u = 0; u < 2; ++u) {
        const Vec e = softmax_exp(fma(load(s + j + u * kLanes), times, zero()) + neg_max);
        sum[u] = sum[u] + e;
        store(s + j + u * kLanes, e);
      }
    }
    return sum[0] + sum[1];
  }

  // Softmax of a strip's scores. `clean`: no non-finite values have been accumulated so far.
  void softmax(const Strip& strip, float* scores, const Keys& keys, bool clean) const {
    const Index n = strip.mask.rows;
    float highest[kPackedRows] = {}, rescale[kPackedRows];
    if (args.softcap != 0.0f)
      for (Index i = 0; i < n; ++i) cap_scores(args, scores + i * work.score_stride, keys.count);
    for (Index i = 0; i < n; ++i)
      highest[i] = mask_scores(strip, scores + i * work.score_stride, i, keys);
    for (Index i = 0; i < kPackedRows; i += kLanes) {
      const Vec before = load(strip.row_max + i);
      const Vec row_max = max(before, load(highest + i) * set1(factor));
      const Vec by = softmax_exp(before - row_max);
      store(strip.row_max + i, row_max);
      store(rescale + i, select(equal(before, row_max), set1(1.0f),
                                select(equal(before, set1(-kInf)), set1(1.0f), by)));
    }
    for (Index i = 0; i < n; ++i) {
      const Vec sum = exponentiate(scores + i * work.score_stride, keys.count, strip.row_max[i]);
      float* total = strip.row_sum + i * kLanes;
      store(total, fma(load(total), set1(rescale[i]), sum));
      if (rescale[i] == 1.0f) continue;
      float* o = strip.sums + i * work.sum_stride;
      // Sums that are rescaled to 0 may have overflowed.
      const bool drop = rescale[i] == 0.0f && clean;
      for (Index j = 0; j < args.value_size; j += kLanes)
        store(o + j, drop ? zero() : load(o + j) * set1(rescale[i]));
    }
  }

  Index row(Index i) const { return (b * args.heads + head) * args.queries + first + i; }

  // Applies dropout to the probabilities of the row.
  void drop_row(float* s, Index i, Index start, Index count) const {
    dropout_factors(args.dropout, static_cast<uint64_t>(row(i)), static_cast<uint64_t>(start),
                    count, work.bias);
    for (Index j = 0; j < count; j += kLanes) store(s + j, load(s + j) * load(work.bias + j));
  }

  void clear(const Strip& strip) const {
    for (Index i = 0; i < strip.mask.rows; ++i)
      for (Index j = 0; j < work.value_columns; j += kLanes)
        store(strip.sums + i * work.sum_stride + j, zero());
  }

  // P V where values contain NaN or inf: element by element, skipping masked keys.
  void accumulate_pv_nonfinite(const Strip& strip, const float* scores, const Keys& keys) const {
    if (!strip.started) clear(strip);
    for (Index i = 0; i < strip.mask.rows; ++i) {
      const float* p = scores + i * work.score_stride;
      float* o = strip.sums + i * work.sum_stride;
      const Index visible = strip.mask.visible(i, keys.start, keys.count);
      const float* mask =
          args.mask == nullptr ? nullptr : strip.mask.mask_row(i, keys.start, visible);
      for (Index s = 0; s < visible; ++s) {
        if (mask != nullptr && mask[s] == -kInf) continue;
        for (Index j = 0; j < args.value_size; j += kPanel) {
          const float* v = work.values + j * work.keys_up + (keys.start + s) * kPanel;
          for (Index c = 0; c < min(kPanel, args.value_size - j); ++c)
            o[j + c] = fma(p[s], v[c], o[j + c]);
        }
      }
    }
  }

  void accumulate_pv(const Strip& strip, const float* scores, const Keys& keys) const {
    if (work.nonfinite[keys.start / kKeyTile]) return accumulate_pv_nonfinite(strip, scores, keys);
    for (Index j = 0; j < args.value_size; j += kPanel) {
      const float* panel = work.values + j * work.keys_up + keys.start * kPanel;
      panel_rows<Form::rows>(scores, work.score_stride, strip.mask.rows, panel, keys.count,
                             strip.sums + j, work.sum_stride, min(kPanel, args.value_size - j),
                             strip.started, panel + kPanel * work.keys_up);
    }
  }

  // Applies the part of a tile of keys that a strip sees.
  void apply(const Strip& strip, const Keys& tile, bool clean) const {
    const BlockMask& mask = strip.mask;
    float* scores = work.scores + (args.weights == nullptr ? 0 : tile.start);
    Keys keys = tile;
    keys.count = mask.unmasked(tile.start, max(0, min(tile.count, mask.limit - tile.start)));
    if (keys.count > 0) {
      // Skips masked keys on the left. If sums along k are divided into blocks, whole blocks are
      // skipped: the order of additions must not depend on which rows form a strip.
      constexpr Index kStep = kKBlock < kKeyTile ? kKBlock : kPanel;
      while (mask.fully_masked(keys.start, kStep)) keys.skip(kStep);
    }
    if (args.weights != nullptr) {
      const Index before = keys.start - tile.start, end = before + keys.count;
      for (Index i = 0; i < mask.rows; ++i) {
        float* s = scores + i * work.score_stride;
        for (Index j = 0; j < before; ++j) s[j] = 0.0f;
        for (Index j = end; j < tile.count; ++j) s[j] = 0.0f;
      }
      scores += before;
    }
    if (keys.count > 0) {
      if (!strip.started) prefetch_output(strip);
      for (Index j = 0; j < keys.count; j += kPanel) {
        next_head.prefetch_some();
        mask.prefetch(keys.start + j);
        const float* panel = work.keys + (keys.start + j) * args.size;
        panel_rows<Form::packed>(work.query + strip.index * work.query_stride, work.query_stride,
                                 mask.rows, panel, args.size, scores + j, work.score_stride,
                                 min(kPanel, keys.count - j), false, panel + kPanel * args.size);
      }
      softmax(strip, scores, keys, clean);
      if (args.dropout.on)
        for (Index i = 0; i < mask.rows; ++i)
          drop_row(scores + i * work.score_stride, strip.first + i, keys.start, keys.count);
      accumulate_pv(strip, scores, keys);
      strip.started = true;
    }
    if (args.weights != nullptr)
      for (Index i = 0; i < kPackedRows; i += kLanes)
        store(work.tile_max + tile.start / kKeyTile * kPackedRows + i, load(strip.row_max + i));
  }

  float* output_row(Index i) const {
    return row_at<float>(args.output, args.query_starts, args.output_stride, b, head, first + i);
  }

  void prefetch_output(const Strip& strip) const {
    for (Index i = 0; i < strip.mask.rows; ++i)
      fetch_row(output_row(strip.first + i), args.value_size);
  }

  void begin(Index next) const {
    const auto* q = row_at<float>(args.query, args.query_starts, args.query_stride, b, head, first);
    if (args.query_stride[3] == 1) {
      pack_a(q, args.query_stride[2], rows, args.size, work.query, work.query_stride);
    } else {
      each_tile(rows, [&](Index t, Index i, Index count) {
        for (Index d = 0; d < args.size; ++d)
          for (Index r = 0; r < count; ++r)
            work.query[t * work.query_stride + d * kPackedRows + r] =
                q[(i + r) * args.query_stride[2] + d * args.query_stride[3]];
      });
    }
    for (Index i = rows; i < rows + next; ++i) fetch_row(q + i * args.query_stride[2], args.size);
    for (Index i = 0; i < rows; ++i) store(work.row_sum + i * kLanes, zero());
    for (Index i = 0; i < kStrips * kPackedRows; ++i) work.row_max[i] = -kInf;
  }

  // to[j] = f(from[j])
  template <class F>
  TF_INLINE static void transform_row(const float* from, Index n, float* to, const F& f) {
    for (Index j = 0; j < n; j += kLanes) store_some(to + j, f(load_some(from + j, n - j)), n - j);
  }

  void finish(const Strip& strip) const {
    if (!strip.started) clear(strip);
    for (Index i = 0; i < strip.mask.rows; ++i) {
      const float total = reduce_add(load(strip.row_sum + i * kLanes));
      // Sums of fully masked rows are 0 already.
      const float row_sum = total == 0.0f ? 1.0f : total, norm = 1.0f / row_sum;
      transform_row(strip.sums + i * work.sum_stride, args.value_size, output_row(strip.first + i),
                    [&](Vec x) { return x * set1(norm); });
      if (args.weights != nullptr) write_weights(strip, i, row_sum);
      if (args.row_max == nullptr) continue;
      args.row_max[row(strip.first + i)] = total == 0.0f ? 0.0f : strip.row_max[i];
      args.row_sum[row(strip.first + i)] = total;
    }
  }

  // Writes the probabilities of a row. Those of a tile were computed with the row max up to that
  // tile.
  void write_weights(const Strip& strip, Index i, float row_sum) const {
    const float* from = work.scores + i * work.score_stride;
    float* to = static_cast<float*>(args.weights) + row(strip.first + i) * args.keys;
    for (Index tile = 0; tile < args.keys; tile += kKeyTile) {
      const float then = work.tile_max[tile / kKeyTile * kPackedRows + i];
      float by[kLanes];
      store(by, softmax_exp(set1(then == strip.row_max[i] ? 0.0f : then - strip.row_max[i])));
      transform_row(from + tile, min(kKeyTile, args.keys - tile), to + tile,
                    [&](Vec x) { return x * set1(by[0]) / set1(row_sum); });
    }
  }

  // Whether the mask of n keys, the same for all rows, changes any score.
  static bool adds(const float* mask, Index n) {
    for (Index j = 0; j < n; ++j)
      if (mask[j] != 0.0f) return true;
    return false;
  }

  // `next`: rows of the following block.
  void run(Index next) {
    begin(next);
    bool clean = true;
    const Index end = args.weights != nullptr ? args.keys : block_mask.limit;
    for (Index tile = 0; tile < end; tile += kKeyTile) {
      Keys keys{tile, min(kKeyTile, end - tile), nullptr, args.mask != nullptr};
      const Index width = min(keys.count, block_mask.limit - tile);
      if (keys.masked && args.mask_stride[2] == 0 && width > 0) {
        const BlockMask mask{args, b, head, first, rows, block_mask.limit, work.shared};
        keys.shared = mask.mask_row(0, tile, width);
        keys.masked = additive || adds(keys.shared, width);
      }
      each_strip([&](const Strip& strip) { apply(strip, keys, clean); });
      clean = clean && !work.nonfinite[tile / kKeyTile];
    }
    each_strip([&](const Strip& strip) { finish(strip); });
  }
};

// Packs keys; channels need not be adjacent.
void pack_keys(const AttentionArgs& args, const Workspace& work, Index b, Index head, Index limit) {
  const float* k =
      static_cast<const float*>(args.key) + head_offset(args.key_starts, args.key_stride, b, head);
  for (Index s = 0; s < limit; s += kPanel) {
    const Index count = min(kPanel, limit - s);
    float* panel = work.keys + s * args.size;
    for (Index j = s + kPanel; j < min(limit, s + 2 * kPanel); ++j)
      fetch_row(k + j * args.key_stride[2], args.size);
    if (args.key_stride[3] == 1) {
      pack_rows(k + s * args.key_stride[2], args.key_stride[2], count, args.size, panel);
    } else {
      for (Index d = 0; d < args.size; ++d)
        for (Index j = 0; j < kPanel; ++j)
          panel[d * kPanel + j] =
              j < count ? k[(s + j) * args.key_stride[2] + d * args.key_stride[3]] : 0.0f;
    }
  }
}

void pack_values(const AttentionArgs& args, const Workspace& work, Index b, Index head,
                 Index limit) {
  const float* v = static_cast<const float*>(args.value) +
                   head_offset(args.key_starts, args.value_stride, b, head);
  for (Index tile = 0; tile < limit; tile += kKeyTile) {
    // x - x is 0 for finite x and NaN otherwise, and NaN propagates through the sum.
    Vec nonfinite = zero();
    for (Index s = tile; s < min(limit, tile + kKeyTile); ++s) {
      const float* row = v + s * args.value_stride[2];
      if (s + kPanel < limit) fetch_row(row + kPanel * args.value_stride[2], args.value_size);
      for (Index j = 0; j < args.value_size; j += kPanel) {
        const Index columns = min(kPanel, args.value_size - j);
        float* to = work.values + j * work.keys_up + s * kPanel;
        if (columns < kPanel || args.value_stride[3] != 1)
          for (Index c = 0; c < kPanel; ++c)
            to[c] = c < columns ? row[(j + c) * args.value_stride[3]] : 0.0f;
        const float* from = columns < kPanel || args.value_stride[3] != 1 ? to : row + j;
        const Vec x = load(from), y = load(from + kLanes);
        store(to, x);
        store(to + kLanes, y);
        nonfinite = nonfinite + ((x - x) + (y - y));
      }
    }
    work.nonfinite[tile / kKeyTile] = any(is_nan(nonfinite));
  }
}

void attend(const AttentionArgs& call, Index b, Index key_head, Index begin, Index end,
            void* scratch) {
  AttentionArgs args = call;
  const Index limit = see_keys<float>(args, b, key_head, static_cast<char*>(scratch));
  const Workspace work(args, static_cast<float*>(scratch) + round_up(seen_bytes(call), kLine) / 4);
  const Index queries = query_count(args, b);
  // The last key that a query of this range may attend to.
  const bool all = end - begin >= queries || begin / queries != (end - 1) / queries;
  const Index last = all ? queries : (end - 1) % queries + 1;
  const Index packed = args.causal ? min(limit, last) : limit;
  pack_keys(args, work, b, key_head, packed);
  pack_values(args, work, b, key_head, packed);
  const Index group = args.heads / args.key_heads;
  HeadPrefetcher<float> next_head(call, b, key_head, (end - begin + kTileRows - 1) / kTileRows,
                                  limit);
  for (Index item = begin; item < end;) {
    const Index first = item % queries;
    const Index left = min(queries - first, end - item);
    // Strips of equal size.
    const Index strips = (left + kTileRows - 1) / kTileRows;
    const Index here = min(args.weights == nullptr ? kStrips : 1, strips);
    const Index rows = (left * here + strips - 1) / strips;
    const Index visible = args.causal ? min(limit, first + rows) : limit;
    const Index head = key_head * group + item / queries;
    Block block{args, work, BlockMask{args, b, head, first, rows, visible, work.bias}, next_head};
    block.run(min(left - rows, kQueryBlock));
    item += rows;
  }
}

constexpr AttentionKernels kKernels{.scratch =
                                        [](const AttentionArgs& args) {
                                          return Workspace(args, nullptr).floats * 4 +
                                                 round_up(seen_bytes(args), kLine);
                                        },
                                    .queries = attend};

}  // namespace

const AttentionKernels* attention_kernels() { return &kKernels; }

}  // namespace tf::TF_ISA
