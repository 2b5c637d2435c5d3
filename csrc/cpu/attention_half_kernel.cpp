// Attention by online softmax for half types (see attention_kernel.cpp). While the matrix unit
// works out the next tile of scores and the sums of the last one, the vector unit turns this one's
// rows into probabilities: there are two buffers of each.
#include "cpu/attention_half_kernel.h"

#include "cpu/attention_mask.h"
#include "cpu/half_product.h"
#include "cpu/half_softmax.h"
#include "cpu/philox.h"

namespace tf::TF_ISA {
namespace {

constexpr long kKeyTile = 256;
constexpr long kPad = 16;
constexpr long kScoreStride = kKeyTile + kPad;

template <class T>
struct Workspace {
  using P = Product<T>;
  using Operand = typename P::Operand;
  static constexpr long kRows = P::kBlockRows;

  long sum_stride, key_panel, value_panel;
  Operand *keys, *values, *query, *weights[2];
  // Per row: largest score so far, times log2(e); sum of the probabilities relative to it; both as
  // they were before the tile at hand, and what the tile adds.
  float *peak, *total, *last_peak, *sum;
  float *scores[2], *bias, *factors, *sums;
  unsigned char* wild;  // per key tile: its values hold NaN or inf
  long bytes = 0;

  Workspace(const HalfAttentionArgs& args, void* scratch)
      : sum_stride(round_up(args.value_size, kPanel) + kPad),
        key_panel(P::panel_size(args.size)),
        value_panel(P::panel_size(round_up(args.keys, kPanel))) {
    const auto take = [&](auto*& place, long count) {
      void* at = scratch == nullptr ? nullptr : static_cast<char*>(scratch) + bytes;
      place = static_cast<decltype(+place)>(at);
      bytes += round_up(count * static_cast<long>(sizeof(*place)), 64);
    };
    const long rows = round_up(kRows, 16);
    take(keys, round_up(args.keys, kPanel) / kPanel * key_panel);
    take(values, round_up(args.value_size, kPanel) / kPanel * value_panel);
    take(query, P::block_size(rows, args.size));
    for (int slot = 0; slot < 2; ++slot) {
      take(weights[slot], P::block_size(rows, kKeyTile));
      take(scores[slot], rows * kScoreStride);
    }
    take(bias, kScoreStride);
    take(factors, kScoreStride);
    take(sums, rows * sum_stride);
    take(peak, rows);
    take(total, rows);
    take(last_peak, rows);
    take(sum, rows);
    take(wild, args.keys / kKeyTile + 1);
  }
};

// One block of queries of one head against the packed keys.
template <class T>
struct Block {
  using P = Product<T>;
  const HalfAttentionArgs& args;
  const Workspace<T>& work;
  const Sight sight;
  long rows = sight.rows;
  // The scale is applied to a score where it is read (factor), inside an fma; a mask, or a scale
  // that would not keep the order of scores, asks for it at once. The exponential is of base 2.
  bool scaled = args.mask != nullptr || !(args.scale > 0.0f && args.scale < kInf);
  float factor = scaled ? kLog2E : args.scale * kLog2E;
  // One row of the mask for all of the tile, where it has no more.
  bool shared_mask = args.mask != nullptr && args.mask_stride[2] == 0;

  struct Tile {
    long start, count;  // count 0: none
    int slot;
  };

  long row_of(long i) const {
    return (sight.b * args.heads + sight.head) * args.queries + sight.first + i;
  }

  Tile tile_from(long start, int slot) const {
    for (; start < sight.limit; start += kKeyTile) {
      const long count = least(kKeyTile, sight.limit - start);
      if (!sight.mask_hides_tile(start, count)) return {start, count, slot};
    }
    return {start, 0, slot};
  }

  template <class Meanwhile>
  void score(const Tile& tile, const Meanwhile& meanwhile) const {
    for (long j = 0; j < tile.count; j += kPanel)
      P::multiply_to(work.query, args.size, rows, args.size,
                     work.keys + (tile.start + j) / kPanel * work.key_panel, false,
                     work.scores[tile.slot] + j, kScoreStride, meanwhile);
  }

  // Scales, masks and hides a row of scores up to whole panels; tells whether any is hidden.
  bool see(float* s, long i, const Tile& tile) const {
    const long seen = sight.visible(i, tile.start, tile.count);
    if (args.mask != nullptr) {
      const float* mask = shared_mask ? work.bias : sight.mask_row(i, tile.start, seen);
      sight.add_mask(s, mask, seen);
    } else if (scaled) {
      for (long j = 0; j < seen; ++j) s[j] *= args.scale;
    }
    const long end = round_up(tile.count, kPanel);
    for (long j = seen; j < end; ++j) s[j] = -kInf;
    return seen < end || args.mask != nullptr;
  }

  void begin_tile(const Tile& tile) const {
    if (!shared_mask) return;
    const float* mask = sight.mask_row(0, tile.start, tile.count);
    if (mask != work.bias) copy_row(mask, tile.count, work.bias, tile.count);
  }

  void soften(long i, const Tile& tile) const {
    float* s = work.scores[tile.slot] + i * kScoreStride;
    const bool any_hidden = see(s, i, tile);
    const long count = round_up(tile.count, kPanel);
    const float before = work.peak[i], here = highest(s, count) * factor;
    const float peak = before > here ? before : here;
    auto* to = work.weights[tile.slot];
    if (!args.dropout.on) {
      work.sum[i] = each_power(s, count, factor, peak, any_hidden, [&](long j, Vec low, Vec high) {
        P::put(P::chunk(to, kKeyTile, i, j), low, high);
      });
    } else {
      dropout_factors(args.dropout, static_cast<uint64_t>(row_of(i)),
                      static_cast<uint64_t>(tile.start), count, work.factors);
      work.sum[i] = each_power(s, count, factor, peak, any_hidden, [&](long j, Vec low, Vec high) {
        P::put(P::chunk(to, kKeyTile, i, j), low * load(work.factors + j),
               high * load(work.factors + j + kLanes));
      });
    }
    work.last_peak[i] = before;
    work.peak[i] = peak;
  }

  // Brings sums and totals to the new peaks.
  void settle() const {
    for (long i = 0; i < rows; i += kLanes) {
      const Vec before = load(work.last_peak + i), peak = load(work.peak + i);
      // Equal peaks may both be infinite.
      const Vec keep =
          select(equal(before, peak), set1(1.0f),
                 select(equal(before, set1(-kInf)), zero(), power_of_two(before - peak)));
      store(work.total + i, fma(load(work.total + i), keep, load(work.sum + i)));
      float by[kLanes];
      store(by, keep);
      for (long r = 0; r < kLanes && i + r < rows; ++r) {
        if (by[r] == 1.0f || work.last_peak[i + r] == -kInf) continue;
        float* o = work.sums + (i + r) * work.sum_stride;
        for (long j = 0; j < args.value_size; j += kLanes) store(o + j, load(o + j) * set1(by[r]));
      }
    }
  }

  // Probabilities times values where the values hold NaN or inf: hidden ones are left out.
  void mix_wild(const Tile& tile) const {
    for (long i = 0; i < rows; ++i) {
      const long seen = sight.visible(i, tile.start, tile.count);
      const float* mask = args.mask == nullptr ? nullptr : sight.mask_row(i, tile.start, seen);
      for (long s = 0; s < seen; ++s) {
        if (mask != nullptr && mask[s] == -kInf) continue;
        const auto* chunk = P::chunk(work.weights[tile.slot], kKeyTile, i, s / kPanel * kPanel);
        const float p = P::value(chunk + s % kPanel);
        for (long j = 0; j < args.value_size; ++j)
          work.sums[i * work.sum_stride + j] +=
              p *
              P::element(work.values + j / kPanel * work.value_panel, tile.start + s, j % kPanel);
      }
    }
  }

  bool is_wild(const Tile& tile) const { return work.wild[tile.start / kKeyTile]; }

  template <class Meanwhile>
  void mix(const Tile& tile, const Meanwhile& meanwhile) const {
    for (long j = 0; j < args.value_size; j += kPanel)
      P::multiply_to(work.weights[tile.slot], kKeyTile, rows, tile.count,
                     work.values + j / kPanel * work.value_panel + tile.start * kPanel, true,
                     work.sums + j, work.sum_stride, meanwhile);
  }

  void begin() const {
    const T* query = static_cast<const T*>(args.query) +
                     head_offset(args.query_starts, args.query_stride, sight.b, sight.head) +
                     sight.first * args.query_stride[2];
    P::fill(query, args.query_stride[2], rows, args.size, work.query);
    for (long i = 0; i < round_up(rows, 16); ++i) {
      float* o = work.sums + i * work.sum_stride;
      for (long j = 0; j < args.value_size; j += kLanes) store(o + j, zero());
      work.peak[i] = -kInf;
      work.total[i] = 0.0f;
    }
  }

  void finish() const {
    T* output = static_cast<T*>(args.output) +
                head_offset(args.query_starts, args.output_stride, sight.b, sight.head) +
                sight.first * args.output_stride[2];
    for (long i = 0; i < rows; ++i) {
      const float total = work.total[i];
      const float* o = work.sums + i * work.sum_stride;
      // What was never added to is 0 already.
      const Vec by = set1(total == 0.0f ? 1.0f : 1.0f / total);
      for (long j = 0; j < args.value_size; j += kLanes)
        store_some(output + i * args.output_stride[2] + j, load(o + j) * by, args.value_size - j);
      if (args.shift == nullptr) continue;
      args.shift[row_of(i)] = work.peak[i] * kLn2;
      args.norm[row_of(i)] = total == 0.0f ? 0.0f : 1.0f / total;
    }
  }

  // The probabilities, from the peaks and sums of the first pass.
  void write_weights() const {
    for (long start = 0; start < args.keys; start += kKeyTile) {
      const long count = least(kKeyTile, args.keys - start);
      const Tile tile{start, most(0, least(count, sight.limit - start)), 0};
      const bool none = tile.count == 0 || sight.mask_hides_tile(start, tile.count);
      if (!none) {
        score(tile, [] {});
        begin_tile(tile);
      }
      for (long i = 0; i < rows; ++i) {
        T* to = static_cast<T*>(args.weights) + row_of(i) * args.keys + start;
        const bool blank = none || work.total[i] == 0.0f;
        if (!blank) write_row(i, tile, to);
        for (long j = blank ? 0 : tile.count; j < count; j += kLanes)
          store_some(to + j, zero(), count - j);
      }
    }
  }

  void write_row(long i, const Tile& tile, T* to) const {
    float* s = work.scores[0] + i * kScoreStride;
    const bool any_hidden = see(s, i, tile);
    const long count = round_up(tile.count, kPanel);
    const Vec by = set1(1.0f / work.total[i]);
    each_power(s, count, factor, work.peak[i], any_hidden, [&](long j, Vec low, Vec high) {
      store(s + j, low * by);
      store(s + j + kLanes, high * by);
    });
    if (args.dropout.on) {
      dropout_factors(args.dropout, static_cast<uint64_t>(row_of(i)),
                      static_cast<uint64_t>(tile.start), count, work.factors);
      for (long j = 0; j < count; j += kLanes) store(s + j, load(s + j) * load(work.factors + j));
    }
    for (long j = 0; j < tile.count; j += kLanes) store_some(to + j, load(s + j), tile.count - j);
  }

  void run() const {
    begin();
    Tile last{0, 0, 1}, here = tile_from(0, 0);
    if (here.count > 0) score(here, [] {});
    while (here.count > 0) {
      const Tile next = tile_from(here.start + kKeyTile, 1 - here.slot);
      const bool wild = last.count > 0 && is_wild(last);
      if (wild) mix_wild(last);
      begin_tile(here);
      const long steps = P::steps(rows, last.count) * panels(args.value_size) +
                         P::steps(rows, args.size) * panels(next.count);
      const long share = steps > 0 ? (rows + steps - 1) / steps : rows;
      long done = 0;
      const auto meanwhile = [&]() __attribute__((always_inline)) {
        for (const long until = least(rows, done + share); done < until; ++done) soften(done, here);
      };
      if (last.count > 0 && !wild) mix(last, meanwhile);
      score(next, meanwhile);
      for (; done < rows; ++done) soften(done, here);
      settle();
      last = here;
      here = next;
    }
    if (last.count > 0) is_wild(last) ? mix_wild(last) : mix(last, [] {});
    finish();
    if (args.weights != nullptr) write_weights();
  }

  static long panels(long columns) { return (columns + kPanel - 1) / kPanel; }
};

// Where a tile's values hold NaN or inf.
template <class T>
void find_wild(const HalfAttentionArgs& args, const T* value, long keys, unsigned char* wild) {
  for (long start = 0; start < keys; start += kKeyTile) {
    Vec sum = zero();
    for (long s = start; s < least(keys, start + kKeyTile); ++s) {
      const T* row = value + s * args.value_stride[2];
      for (long j = 0; j < args.value_size; j += kLanes) {
        const Vec x = load_some(row + j, args.value_size - j);
        sum = sum + (x - x);  // 0 for finite x, NaN for the others, and NaN stays
      }
    }
    wild[start / kKeyTile] = !(reduce_add(sum) == 0.0f);
  }
}

template <class T>
void pack(const HalfAttentionArgs& args, const Workspace<T>& work, long b, long head, long keys) {
  using P = Product<T>;
  const T* k =
      static_cast<const T*>(args.key) + head_offset(args.key_starts, args.key_stride, b, head);
  for (long s = 0; s < keys; s += kPanel)
    P::pack_rows(k + s * args.key_stride[2], args.key_stride[2], least(kPanel, keys - s), args.size,
                 work.keys + s / kPanel * work.key_panel);
  const T* v =
      static_cast<const T*>(args.value) + head_offset(args.key_starts, args.value_stride, b, head);
  for (long j = 0; j < args.value_size; j += kPanel)
    P::pack_columns(v + j, args.value_stride[2], least(kPanel, args.value_size - j), keys,
                    work.values + j / kPanel * work.value_panel);
  find_wild(args, v, keys, work.wild);
}

template <class T>
void attend(const HalfAttentionArgs& args, long b, long key_head, long begin, long end,
            void* scratch) {
  const Workspace<T> work(args, scratch);
  constexpr long kRows = Workspace<T>::kRows;
  const long queries = query_count(args, b);
  long limit = key_count(args, b);
  if (args.key_lengths != nullptr) limit = most(0, least(limit, args.key_lengths[b]));
  // The furthest key that a query of this range may see.
  const bool all = end - begin >= queries || begin / queries != (end - 1) / queries;
  const long last = all ? queries : (end - 1) % queries + 1;
  pack<T>(args, work, b, key_head, args.causal ? least(limit, last) : limit);
  const long group = args.heads / args.key_heads;
  Product<T>::enter();
  for (long item = begin; item < end;) {
    const long first = item % queries;
    const long left = least(queries - first, end - item);
    const long rows = least(left, kRows);
    const long seen = args.causal ? least(limit, first + rows) : limit;
    const long head = key_head * group + item / queries;
    const Block<T> block{args, work, Sight{args, b, head, first, rows, seen, work.bias}};
    block.run();
    item += rows;
  }
  Product<T>::leave();
}

}  // namespace

long half_attention_scratch(const HalfAttentionArgs& args) {
  return args.type == Element::bfloat16 ? Workspace<BFloat16>(args, nullptr).bytes
                                        : Workspace<Float16>(args, nullptr).bytes;
}

void half_attention_queries(const HalfAttentionArgs& args, long b, long key_head, long begin,
                            long end, void* scratch) {
  (args.type == Element::bfloat16 ? attend<BFloat16> : attend<Float16>)(args, b, key_head, begin,
                                                                        end, scratch);
}

}  // namespace tf::TF_ISA
