// Attention backward (Dao et al. 2022). With P the probabilities, M dropout's factors:
//
//   dV = (P M)^T dO,  dP = M (dO V^T + dW),  dS = P (dP - delta),  dQ = scale dS K,  dK = scale
//   dS^T Q
//
// where delta, the row sum of P dP, is the row sum of dO O + W dW. Keys are taken a tile at a time;
// all queries pass by, a block at a time: scores and dP on the register tile, P and dS from them in
// cache, then three products with P and dS as their left factor. Sums go in a fixed order.
#include "cpu/attention_backward_kernel.h"

#include "cpu/attention_mask.h"
#include "cpu/philox.h"

namespace tf::TF_ISA {
namespace {

#if defined(__AVX512F__)
constexpr long kQueryBlock = 8 * kTileRows;
#else
constexpr long kQueryBlock = 16 * kTileRows;
#endif
constexpr long kKeyTile = 256;
constexpr long kPad = 16;
constexpr long kScoreStride = kKeyTile + kPad;
// Marks a hidden place among P and dS: arithmetic takes it for 0.
constexpr float kHidden = -0.0f;
// Exponents below this count as hidden: their share of a row is below 2^-100, and products with it
// could fall below the smallest normal number, which costs hundreds of cycles on some CPUs.
constexpr float kNegligible = -69.0f;

// Keys per tile: fewer where heads are so wide that a tile would leave the second-level cache.
long keys_per_tile(const AttentionBackwardArgs& args) {
  return args.size + args.value_size <= 256 ? kKeyTile : kKeyTile / 2;
}

// A matrix as the products want it: rows turned for the left, columns in panels for the right.
struct Forms {
  float *turned, *panels;
  bool wild;  // holds NaN or inf
};

struct Workspace {
  long size_up, value_up;
  float *keys_turned, *values_turned, *keys, *query_turned, *grad_turned, *query, *grad;
  float *p, *ds, *grad_key, *grad_value, *grad_query, *bias, *factors;
  long floats = 0;

  Workspace(const AttentionBackwardArgs& args, float* scratch)
      : size_up(round_up(args.size, kPanel)), value_up(round_up(args.value_size, kPanel)) {
    const auto take = [&](long count) {
      float* place = scratch != nullptr ? scratch + floats : nullptr;
      floats += round_up(count, 16);
      return place;
    };
    const long turned_rows = kQueryBlock / kTileRows * kTurned;
    keys_turned = take(kKeyTile * args.size);
    values_turned = take(kKeyTile * args.value_size);
    keys = take(kKeyTile * size_up);
    query_turned = take(turned_rows * round_up(args.size, kLanes));
    grad_turned = take(turned_rows * round_up(args.value_size, kLanes));
    query = take(kQueryBlock * size_up);
    grad = take(kQueryBlock * value_up);
    p = take(kQueryBlock * kScoreStride);
    ds = take(kQueryBlock * kScoreStride);
    grad_key = take(kKeyTile * (size_up + kPad));
    grad_value = take(kKeyTile * (value_up + kPad));
    grad_query = take(kQueryBlock * (size_up + kPad));
    bias = take(kScoreStride);
    factors = take(kScoreStride);
    take(kPanel * most(size_up, value_up));  // room for prefetching
  }
};

// Copies rows of n values, row i times factors[i] if given, into panels of `capacity` rows; returns
// whether any is NaN or inf.
bool copy_panels(const float* from, long stride, long rows, long n, const float* factors, float* to,
                 long capacity) {
  // x - x is 0 for finite x and NaN for the others, and NaN stays in the sum.
  Vec wild = zero();
  for (long j = 0; j < n; j += kPanel) {
    float* panel = to + j * capacity;
    for (long i = 0; i < rows; ++i) {
      const Vec factor = set1(factors != nullptr ? factors[i] : 1.0f);
      TF_UNROLL for (int v = 0; v < kPanel; v += kLanes) {
        const long have = n - j - v;
        const Vec x = have > 0 ? load_some(from + i * stride + j + v, have) * factor : zero();
        store(panel + i * kPanel + v, x);
        wild = wild + (x - x);
      }
    }
  }
  return !(reduce_add(wild) == 0.0f);
}

// Panels of kQueryBlock rows as the left factor of a product.
void turn_panels(const float* panels, long rows, long n, float* to) {
  for (long j = 0; j < n; j += kPanel)
    turn_rows(panels + j * kQueryBlock, kPanel, rows, least(kPanel, n - j), to + j * kTurned,
              kTurned * round_up(n, kLanes));
}

void clear(float* p, long n) {
  for (long j = 0; j < n; ++j) p[j] = 0.0f;
}

// Sums over the queries for each key of a tile: c (m x n) gathers A^T B from blocks of k queries, A
// (k, m) with rows kScoreStride apart, B (k, n) in panels of kQueryBlock rows.
struct Gathered {
  float* sums;
  long stride;
  bool started = false;

  // The first block sees `m` of the tile's `rows` keys; nothing of the others is there yet.
  void start(long m, long rows, bool whole) {
    if (!started) clear(sums + (whole ? 0 : m) * stride, (rows - (whole ? 0 : m)) * stride);
  }

  void add(const float* a, long m, const float* b, long k, long n, long rows) {
    start(m, rows, false);
    // A strip of A stays in the first-level cache for all panels; the next is fetched meanwhile.
    each_tile(m, [&](long, long i, long count) {
      const char* ahead = reinterpret_cast<const char*>(a + i + 2 * count - 1);
      for (long j = 0; j < n; j += kPanel) {
        const float* panel = b + j * kQueryBlock;
        float* to = sums + i * stride + j;
        kTiles<Form::columns>[n - j > kLanes ? 1 : 0][count - 1](
            a + i, kScoreStride, panel, k, to, stride, {nullptr, started, false},
            {ahead, kScoreStride * static_cast<long>(sizeof(float))});
      }
    });
    started = true;
  }

  // The same one by one, leaving hidden places out: rows of B hold NaN or inf.
  void add_wild(const float* a, long m, const float* b, long k, long n, long rows) {
    start(m, rows, true);
    started = true;
    for (long i = 0; i < k; ++i)
      for (long s = 0; s < m; ++s) {
        const float x = a[i * kScoreStride + s];
        if (x == 0.0f && __builtin_signbit(x)) continue;
        for (long j = 0; j < n; ++j)
          sums[s * stride + j] +=
              x * b[j / kPanel * kPanel * kQueryBlock + i * kPanel + j % kPanel];
      }
  }

  void write(long rows, long n, float scale, float* to, long to_stride) {
    start(0, rows, true);
    for (long i = 0; i < rows; ++i) {
      long d = 0;
      for (; d + kLanes <= n; d += kLanes)
        store(to + i * to_stride + d, load(sums + i * stride + d) * set1(scale));
      for (; d < n; ++d) to[i * to_stride + d] = sums[i * stride + d] * scale;
    }
  }
};

// A tile of keys of one key head, packed.
struct KeyTile {
  const AttentionBackwardArgs& args;
  const Workspace& work;
  long b, key_head, start, count, rows;  // `count` of its rows are not hidden by length
  bool wild = false;                     // its keys hold NaN or inf
  Gathered grad_key = {work.grad_key, work.size_up + kPad};
  Gathered grad_value = {work.grad_value, work.value_up + kPad};

  void pack() {
    const float* k = args.key + head_offset(args.key_starts, args.key_stride, b, key_head) +
                     start * args.key_stride[2];
    const float* v = args.value + head_offset(args.key_starts, args.value_stride, b, key_head) +
                     start * args.value_stride[2];
    for (long s = 0; s < count; s += kPanel) {
      const long rows = least(kPanel, count - s);
      pack_rows(k + s * args.key_stride[2], args.key_stride[2], rows, args.size,
                work.keys_turned + s * args.size);
      pack_rows(v + s * args.value_stride[2], args.value_stride[2], rows, args.value_size,
                work.values_turned + s * args.value_size);
    }
    wild = copy_panels(k, args.key_stride[2], count, args.size, nullptr, work.keys, kKeyTile);
  }
};

// A block of queries of one head, and its P and dS against a tile of keys.
struct Block {
  const AttentionBackwardArgs& args;
  const Workspace& work;
  const Sight sight;
  bool wild_query = false, wild_grad = false;  // hold NaN or inf
  // As in the forward, so that scores are the same to the last bit.
  bool scaled = args.mask != nullptr || !(args.scale > 0.0f && args.scale < kInf);
  float factor = scaled ? 1.0f : args.scale;
  long row = (sight.b * args.heads + sight.head) * args.queries + sight.first;

  // dO is multiplied by norm, so that P need not be.
  void load_rows() {
    const long rows = sight.rows;
    const float* q = args.query +
                     head_offset(args.query_starts, args.query_stride, sight.b, sight.head) +
                     sight.first * args.query_stride[2];
    const float* g = args.grad +
                     head_offset(args.query_starts, args.grad_stride, sight.b, sight.head) +
                     sight.first * args.grad_stride[2];
    wild_query =
        copy_panels(q, args.query_stride[2], rows, args.size, nullptr, work.query, kQueryBlock);
    wild_grad = copy_panels(g, args.grad_stride[2], rows, args.value_size, args.norm + row,
                            work.grad, kQueryBlock);
    turn_panels(work.query, rows, args.size, work.query_turned);
    turn_panels(work.grad, rows, args.value_size, work.grad_turned);
  }

  static void scores(const float* turned, long size, long rows, const float* panels, long count,
                     float* to) {
    for (long j = 0; j < count; j += kPanel)
      panel_rows<Form::turned>(turned, kTurned * round_up(size, kLanes), rows, panels + j * size,
                               size, to + j, kScoreStride, least(kPanel, count - j),
                               {nullptr, false, false}, panels + (j + kPanel) * size);
  }

  // P M and dS for keys [start, start + count), kHidden where hidden, in work.p and work.ds.
  void differentiate(long start, long count) const {
    const long rows = sight.rows;
    scores(work.query_turned, args.size, rows, work.keys_turned, count, work.p);
    scores(work.grad_turned, args.value_size, rows, work.values_turned, count, work.ds);
    const float* shared = nullptr;
    if (args.mask != nullptr && args.mask_stride[2] == 0) shared = sight.mask_row(0, start, count);
    for (long i = 0; i < rows; ++i) {
      float* s = work.p + i * kScoreStride;
      const long seen = sight.visible(i, start, count);
      if (args.mask != nullptr) {
        sight.add_mask(s, shared != nullptr ? shared : sight.mask_row(i, start, seen), seen);
      } else if (scaled) {
        for (long j = 0; j < seen; ++j) s[j] *= args.scale;
      }
      for (long j = seen; j < round_up(count, kLanes); ++j) s[j] = -kInf;
      differentiate_row(i, start, count);
    }
  }

  void differentiate_row(long i, long start, long count) const {
    float* p = work.p + i * kScoreStride;
    float* ds = work.ds + i * kScoreStride;
    const float shift = args.shift[row + i];
    const Vec minus = set1(shift == -kInf ? 0.0f : -shift), times = set1(factor);
    const Vec norm = set1(args.norm[row + i]), delta = set1(args.delta[row + i]) * norm;
    const float* extra =
        args.grad_weights != nullptr ? args.grad_weights + (row + i) * args.keys + start : nullptr;
    if (args.dropout.on)
      dropout_factors(args.dropout, static_cast<uint64_t>(row + i), static_cast<uint64_t>(start),
                      count, work.factors);
    for (long j = 0; j < count; j += kLanes) {
      const Vec x = fma(load(p + j), times, minus);
      const auto none = less(x, set1(kNegligible));  // -inf, where hidden, is
      // Hidden ones are 0 before they are multiplied: exp() stops at the smallest normal number.
      Vec weight = select(none, zero(), exp(x)), slope = load(ds + j);
      if (extra != nullptr) slope = fma(norm, load_some(extra + j, count - j), slope);
      const Vec unmixed = weight;
      if (args.dropout.on) {
        const Vec f = load(work.factors + j);
        weight = weight * f;
        slope = drop(slope, f);
      }
      // Adding 0 turns -0 into 0: only hidden places are kHidden.
      const Vec score = fma(unmixed, slope - delta, zero());
      store(p + j, select(none, set1(kHidden), weight));
      store(ds + j, select(none, set1(kHidden), score));
    }
  }

  // dS times the keys of the tile, into or onto rows of `to`.
  void give_query(const KeyTile& tile, long count, float* to, long stride, bool onto) const {
    const long n = args.size, c_stride = work.size_up + kPad;
    if (tile.wild) {
      clear(work.grad_query, sight.rows * c_stride);
      query_wild(count);
    } else {
      for (long j = 0; j < n; j += kPanel)
        panel_rows<Form::rows>(work.ds, kScoreStride, sight.rows, work.keys + j * kKeyTile, count,
                               work.grad_query + j, c_stride, least(kPanel, n - j),
                               {nullptr, false, false}, work.keys + (j + kPanel) * kKeyTile);
    }
    const Vec scale = set1(args.scale);
    for (long i = 0; i < sight.rows; ++i) {
      const float* from = work.grad_query + i * c_stride;
      float* out = to + i * stride;
      long d = 0;
      for (; d + kLanes <= n; d += kLanes)
        store(out + d, fma(load(from + d), scale, onto ? load(out + d) : zero()));
      for (; d < n; ++d) out[d] = from[d] * args.scale + (onto ? out[d] : 0.0f);
    }
  }

  void query_wild(long count) const {
    for (long i = 0; i < sight.rows; ++i)
      for (long s = 0; s < count; ++s) {
        const float x = work.ds[i * kScoreStride + s];
        if (x == 0.0f && __builtin_signbit(x)) continue;
        for (long d = 0; d < args.size; ++d)
          work.grad_query[i * (work.size_up + kPad) + d] +=
              x * work.keys[d / kPanel * kPanel * kKeyTile + s * kPanel + d % kPanel];
      }
  }

  // What the tile's keys and values gather from this block.
  void give_keys(KeyTile& tile, long count) const {
    const auto give = [&](Gathered& sums, const float* a, const float* b, long n, bool wild) {
      if (wild) {
        sums.add_wild(a, count, b, sight.rows, n, tile.rows);
      } else {
        sums.add(a, count, b, sight.rows, n, tile.rows);
      }
    };
    if (args.grad_value != nullptr)
      give(tile.grad_value, work.p, work.grad, args.value_size, wild_grad);
    if (args.grad_key != nullptr) give(tile.grad_key, work.ds, work.query, args.size, wild_query);
  }
};

// Queries in even blocks; smaller ones where causality cuts them off.
struct Cut {
  long queries, blocks;
  Cut(const AttentionBackwardArgs& args, long b) : queries(query_count(args, b)) {
    const long most_rows = args.causal ? kQueryBlock / 2 : kQueryBlock;
    blocks = (queries + most_rows - 1) / most_rows;
  }
  long first(long index) const { return queries * index / blocks; }
};

long key_limit(const AttentionBackwardArgs& args, long b) {
  const long keys = key_count(args, b);
  return args.key_lengths == nullptr ? keys : most(0, least(keys, args.key_lengths[b]));
}

// Calls f(block, count) for the blocks [begin, end) of queries of a head that see keys of the tile.
template <class F>
void each_block(const AttentionBackwardArgs& args, const Workspace& work, const KeyTile& tile,
                long head, long begin, long end, const F& f) {
  const Cut cut(args, tile.b);
  for (long index = begin; index < least(end, cut.blocks); ++index) {
    const long first = cut.first(index), rows = cut.first(index + 1) - first;
    const long stop = tile.start + tile.count;
    const long limit = args.causal ? least(stop, first + rows) : stop;
    if (limit <= tile.start) continue;
    const Sight sight{args, tile.b, head, first, rows, limit, work.bias};
    if (sight.mask_hides_tile(tile.start, limit - tile.start)) continue;
    Block block{args, work, sight};
    block.load_rows();
    block.differentiate(tile.start, limit - tile.start);
    f(block, limit - tile.start);
  }
}

// dK and dV of the tile.
void write_tile(const AttentionBackwardArgs& args, KeyTile& tile) {
  const auto write = [&](Gathered& sums, long n, float scale, float* grad, const long* stride) {
    if (grad != nullptr)
      sums.write(tile.rows, n, scale,
                 grad + head_offset(args.key_starts, stride, tile.b, tile.key_head) +
                     tile.start * stride[2],
                 stride[2]);
  };
  write(tile.grad_key, args.size, args.scale, args.grad_key, args.grad_key_stride);
  write(tile.grad_value, args.value_size, 1.0f, args.grad_value, args.grad_value_stride);
}

// Where a block's rows of dQ are, and how far apart.
struct QueryRows {
  float* data;
  long head_stride, stride;
};

QueryRows query_rows(const AttentionBackwardArgs& args, long b, long key_head, float* part) {
  if (part != nullptr) return {part, args.queries * args.size, args.size};
  const long head = key_head * (args.heads / args.key_heads);
  return {args.grad_query + head_offset(args.query_starts, args.grad_query_stride, b, head),
          args.grad_query_stride[1], args.grad_query_stride[2]};
}

}  // namespace

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

long attention_backward_queries() { return kQueryBlock; }

long attention_backward_scratch(const AttentionBackwardArgs& args) {
  return Workspace(args, nullptr).floats;
}

void attention_backward(const AttentionBackwardArgs& args, long b, long key_head, long begin,
                        long end, float* part, float* scratch) {
  const Workspace work(args, scratch);
  const long group = args.heads / args.key_heads, queries = query_count(args, b);
  const bool wants_query = args.grad_query != nullptr;
  const QueryRows out =
      wants_query ? query_rows(args, b, key_head, part) : QueryRows{nullptr, 0, 0};
  const long keys = least(end, key_count(args, b)), limit = key_limit(args, b);
  const long step = keys_per_tile(args);
  // Once even without keys, for dQ.
  for (long start = begin; start == begin || start < keys; start += step) {
    const long rows = most(0, least(step, keys - start));
    KeyTile tile{args, work, b, key_head, start, most(0, least(rows, limit - start)), rows};
    if (tile.count > 0) tile.pack();
    for (long h = 0; h < group; ++h) {
      float* to = wants_query ? out.data + h * out.head_stride : nullptr;
      long written = 0;  // rows of dQ so far
      // The first tile writes all rows, the others add to them.
      const auto clear_to = [&](long end_row) {
        for (; written < end_row && start == begin; ++written)
          clear(to + written * out.stride, args.size);
      };
      if (tile.count > 0)
        each_block(args, work, tile, key_head * group + h, 0, queries,
                   [&](const Block& block, long count) {
                     block.give_keys(tile, count);
                     if (!wants_query) return;
                     const long first = block.sight.first;
                     clear_to(first);
                     block.give_query(tile, count, to + first * out.stride, out.stride,
                                      start != begin);
                     written = first + block.sight.rows;
                   });
      if (wants_query) clear_to(queries);
    }
    write_tile(args, tile);
  }
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

void attention_backward_mask(const AttentionBackwardArgs& args, long mask_b, long mask_h, long tile,
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
        KeyTile keys{args, work, b, h / group, start, rows, rows};
        keys.pack();
        each_block(args, work, keys, h, begin, end, [&](const Block& block, long count) {
          for (long i = 0; i < block.sight.rows; ++i) {
            const float* ds = work.ds + i * kScoreStride;
            float* to = base + (by_row ? (block.sight.first + i) * size[3] : 0);
            if (by_column) {
              // Sums over the block's rows first where they all go to one place.
              float* row = by_row ? to + start : work.grad_key;
              if (!by_row && i == 0) clear(row, count);
              for (long s = 0; s < count; ++s) row[s] += ds[s];
              if (!by_row && i + 1 == block.sight.rows)
                for (long s = 0; s < count; ++s) to[start + s] += row[s];
            } else {
              Vec sum = zero();
              for (long s = 0; s < count; s += kLanes)
                sum = sum + load_some(ds + s, least(kLanes, count - s));
              *to += reduce_add(sum);
            }
          }
        });
      }
  }
}

}  // namespace tf::TF_ISA
