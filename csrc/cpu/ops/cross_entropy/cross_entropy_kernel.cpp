// Cross entropy. A long row whose classes are adjacent is read by itself: each block twice, the
// second time from cache. Other rows are read into tiles, in which vectors hold one class of
// kLanes rows, so that a row costs no horizontal sums.
#include <cmath>

#include "cpu/gemm/gemm.h"
#include "cpu/ops/cross_entropy/cross_entropy.h"
#include "cpu/simd/convert.h"

namespace tf::TF_ISA {
namespace {

constexpr int kSums = 4;
constexpr Index kStep = kSums * kLanes;
// Block of logits whose maximum is computed before their exponentials.
constexpr Index kBlock = 4096;
// A tile of 16 KB has half of the first-level cache.
constexpr Index kBlockRows = 64, kTileClasses = 64;
// Classes from which a row by itself was measured to take less time: loss, gradient.
constexpr Index kLongRow = 128, kLongGradientRow = 64;

// Running state per row of a block of up to kBlockRows rows; see CrossEntropyArgs.
struct State {
  float row_max[kBlockRows], sum[kBlockRows], shifted_sum[kBlockRows], target_logit[kBlockRows];
};

// Calls f(state, rows' values of it) for each member.
template <class F>
TF_INLINE void each_member(const CrossEntropyArgs& args, State& state, const F& f) {
  f(state.row_max, args.row_max);
  f(state.sum, args.sum);
  f(state.shifted_sum, args.shifted_sum);
  f(state.target_logit, args.target_logit);
}

// Calls f(row, count) for blocks of up to kBlockRows rows of one group.
template <class F>
TF_INLINE void each_block(const CrossEntropyArgs& args, Index begin, Index end, const F& f) {
  for (Index row = begin; row < end;) {
    const Index in_group = args.group_rows - row % args.group_rows;
    const Index count = min(kBlockRows, min(in_group, end - row));
    f(row, count);
    row += count;
  }
}

TF_INLINE Index place_of(const CrossEntropyArgs& args, const LogitsLayout& layout, Index row) {
  return row / args.group_rows * layout.group + row % args.group_rows * layout.row;
}

// Calls f(accumulator, logits) for all whole vectors of n logits.
template <class T, class F>
TF_INLINE void each_whole(const T* x, Index n, const F& f) {
  Index j = 0;
  for (; j + kStep <= n; j += kStep)
    TF_UNROLL for (int u = 0; u < kSums; ++u) f(u, load(x + j + u * kLanes));
  for (; j + kLanes <= n; j += kLanes) f(0, load(x + j));
}

TF_INLINE float add_up(const Vec (&sums)[kSums]) {
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// `i`: the row's place in the state.
template <class T>
void scan_row(const CrossEntropyArgs& args, const T* x, Index row, State& state, Index i) {
  float row_max = state.row_max[i], sum = state.sum[i], shifted_sum = state.shifted_sum[i];
  for (Index begin = 0; begin < args.columns; begin += kBlock) {
    const Index n = min(kBlock, args.columns - begin);
    const Index whole = n / kLanes * kLanes;
    const T* block = x + begin;
    const Mask in_rest = lanes_below(n - whole);
    const Vec rest = load_n(block + whole, n - whole);
    Vec maxima[kSums];
    TF_UNROLL for (int u = 0; u < kSums; ++u) maxima[u] = set1(-kInf);
    each_whole(block, n,
               [&](int u, Vec y) __attribute__((always_inline)) { maxima[u] = max(y, maxima[u]); });
    maxima[1] = max(select(in_rest, rest, set1(-kInf)), maxima[1]);
    const float here = reduce_max(max(max(maxima[0], maxima[1]), max(maxima[2], maxima[3])));
    if (here > row_max) {
      if (row_max != -kInf) sum *= std::exp(row_max - here);
      const Index before = args.first + begin;
      if (before > 0) shifted_sum -= static_cast<float>(before) * (here - row_max);
      row_max = here;
    }
    // If all are -inf they contribute nothing; NaN, which the maximum ignores, does.
    const float top = row_max == -kInf ? 0.0f : row_max;
    Vec exponentials[kSums], distances[kSums];
    TF_UNROLL for (int u = 0; u < kSums; ++u) exponentials[u] = distances[u] = zero();
    each_whole(block, n, [&](int u, Vec y) __attribute__((always_inline)) {
      const Vec distance = y - set1(top);
      exponentials[u] = exponentials[u] + exp(distance);
      distances[u] = distances[u] + distance;
    });
    const Vec distance = select(in_rest, rest - set1(top), zero());
    exponentials[1] = exponentials[1] + select(in_rest, exp(distance), zero());
    distances[1] = distances[1] + distance;
    sum += add_up(exponentials);
    shifted_sum += add_up(distances);
  }
  state.row_max[i] = row_max;
  state.sum[i] = sum;
  state.shifted_sum[i] = shifted_sum;
  const int64_t place = args.target[row] - args.first;
  if (place >= 0 && place < args.columns) state.target_logit[i] = load_one(x + place);
}

// Tiles are (kTileClasses, kBlockRows).

// Reads n classes of `count` rows. Lanes up to the next whole vector of rows are 0.
template <class T>
TF_INLINE void read_tile(const T* from, const LogitsLayout& layout, Index count, Index n,
                         float* tile) {
  if (layout.column != 1) {
    for (Index c = 0; c < n; ++c)
      for (Index i = 0; i < count; i += kLanes)
        store(tile + c * kBlockRows + i, load_some(from + c * layout.column + i, count - i));
    return;
  }
  for (Index i = 0; i < count; i += kLanes)
    for (Index c = 0; c < n; c += kLanes) {
      float block[kLanes * kLanes];
      for (Index r = 0; r < kLanes; ++r)
        store(block + r * kLanes,
              i + r < count ? load_some(from + (i + r) * layout.row + c, n - c) : zero());
      transpose_block(block, kLanes, tile + c * kBlockRows + i, kBlockRows);
    }
}

template <class T>
TF_INLINE void write_tile(const float* tile, const LogitsLayout& layout, Index count, Index n,
                          T* to) {
  if (layout.column != 1) {
    for (Index c = 0; c < n; ++c)
      for (Index i = 0; i < count; i += kLanes)
        store_some(to + c * layout.column + i, load(tile + c * kBlockRows + i), count - i);
    return;
  }
  for (Index i = 0; i < count; i += kLanes)
    for (Index c = 0; c < n; c += kLanes) {
      float block[kLanes * kLanes];
      transpose_block(tile + c * kBlockRows + i, kBlockRows, block, kLanes);
      for (Index r = 0; r < kLanes && i + r < count; ++r)
        store_some(to + (i + r) * layout.row + c, load(block + r * kLanes), n - c);
    }
}

// Calls f(first row, first class, classes, tile) for the tiles of a block of rows.
template <class T, class F>
TF_INLINE void each_tile_of(const CrossEntropyArgs& args, Index row, Index count, const F& f) {
  float tile[kTileClasses * kBlockRows];
  const T* x = static_cast<const T*>(args.logits) + place_of(args, args.layout, row);
  for (Index begin = 0; begin < args.columns; begin += kTileClasses) {
    const Index n = min(kTileClasses, args.columns - begin);
    read_tile(x + begin * args.layout.column, args.layout, count, n, tile);
    f(begin, n, tile);
  }
}

template <class T>
void scan_tiles(const CrossEntropyArgs& args, Index row, Index count, State& state) {
  each_tile_of<T>(args, row, count, [&](Index begin, Index n, const float* tile) {
    const Index before = args.first + begin;
    for (Index i = 0; i < count; i += kLanes) {
      const Vec old = load(state.row_max + i);
      Vec row_max = old;
      for (Index c = 0; c < n; ++c) row_max = max(load(tile + c * kBlockRows + i), row_max);
      const Vec top = select(equal(row_max, set1(-kInf)), zero(), row_max);
      Vec sum = zero(), distances = zero();
      for (Index c = 0; c < n; ++c) {
        const Vec distance = load(tile + c * kBlockRows + i) - top;
        sum = sum + exp(distance);
        distances = distances + distance;
      }
      if (before > 0) {
        sum = fma(load(state.sum + i), exp(old - top), sum);
        const Vec grown = select(equal(row_max, old), zero(), row_max - old);
        const Vec shifted = load(state.shifted_sum + i) - set1(static_cast<float>(before)) * grown;
        distances = distances + shifted;
      }
      store(state.row_max + i, row_max);
      store(state.sum + i, sum);
      store(state.shifted_sum + i, distances);
    }
    for (Index i = 0; i < count; ++i) {
      const int64_t place = args.target[row + i] - before;
      if (place >= 0 && place < n) state.target_logit[i] = tile[place * kBlockRows + i];
    }
  });
}

// 1 for the rows of a block that count, else 0.
TF_INLINE void count_rows(const CrossEntropyArgs& args, Index row, Index count, float* counted) {
  for (Index i = 0; i < count; ++i) counted[i] = args.target[row + i] != args.ignored ? 1.0f : 0.0f;
}

void finish(const CrossEntropyArgs& args, Index row, Index count, const State& state) {
  float counted[kBlockRows] = {}, row_maxima[kBlockRows], logs[kBlockRows];
  count_rows(args, row, count, counted);
  const Vec s = set1(args.smoothing), classes = set1(static_cast<float>(args.classes));
  for (Index i = 0; i < count; i += kLanes) {
    const Mask counts = less(zero(), load(counted + i));
    const Vec row_max = load(state.row_max + i);
    const Vec log_sum =
        select(equal(row_max, set1(-kInf)), set1(__builtin_nanf("")), log(load(state.sum + i)));
    Vec loss = log_sum + (row_max - load(state.target_logit + i));
    if (args.smoothing != 0.0f)
      loss = (set1(1.0f) - s) * loss + s * (log_sum - load(state.shifted_sum + i) / classes);
    store_some(args.losses + row + i, select(counts, loss, zero()), count - i);
    store(row_maxima + i, select(counts, row_max, zero()));
    store(logs + i, select(counts, log_sum, zero()));
  }
  float* statistics = args.statistics + 2 * row;
  for (Index i = 0; i < count; ++i) {
    statistics[2 * i] = row_maxima[i];
    statistics[2 * i + 1] = logs[i];
  }
}

template <class T>
void gradient_of_row(const CrossEntropyGradientArgs& args, Index row) {
  const CrossEntropyArgs& call = args.call;
  const T* x = static_cast<const T*>(call.logits) + place_of(call, call.layout, row);
  T* to = static_cast<T*>(args.gradient) + place_of(call, args.layout, row);
  const Index n = call.columns;
  if (call.target[row] == call.ignored) {
    for (Index j = 0; j < n; j += kLanes) store_some(to + j, zero(), n - j);
    return;
  }
  const float scale = args.scale[row * args.scale_stride], *statistics = call.statistics + 2 * row;
  // Subtracted one after the other: their sum would round away a small log beside a large logit.
  const Vec row_max = set1(statistics[0]), log = set1(statistics[1]), by = set1(scale);
  const Vec even = set1(-scale * call.smoothing / static_cast<float>(call.classes));
  const int64_t place = call.target[row] - call.first;
  const bool has = place >= 0 && place < n;
  const float logit = has ? load_one(x + place) : 0.0f;  // before it is overwritten
  for (Index j = 0; j < n; j += kLanes)
    store_some(to + j, fma(exp((load_some(x + j, n - j) - row_max) - log), by, even), n - j);
  if (!has) return;
  // In double: if the target is almost certain, the result is a small difference from 1.
  const double s = call.smoothing;
  const double p = std::exp(static_cast<double>(logit) - statistics[0] - statistics[1]);
  const double y = scale * (p - (1.0 - s) - s / static_cast<double>(call.classes));
  store_some(to + place, set1(static_cast<float>(y)), 1);
}

template <class T>
void gradient_of_tiles(const CrossEntropyGradientArgs& args, Index row, Index count) {
  const CrossEntropyArgs& call = args.call;
  float counted[kBlockRows] = {}, row_max[kBlockRows] = {}, log[kBlockRows] = {};
  float scale[kBlockRows] = {};
  count_rows(call, row, count, counted);
  for (Index i = 0; i < count; ++i) {
    row_max[i] = call.statistics[2 * (row + i)];
    log[i] = call.statistics[2 * (row + i) + 1];
    scale[i] = args.scale[(row + i) * args.scale_stride];
  }
  const float share = call.smoothing / static_cast<float>(call.classes);
  T* to = static_cast<T*>(args.gradient) + place_of(call, args.layout, row);
  each_tile_of<T>(call, row, count, [&](Index begin, Index n, float* tile) {
    const int64_t* target = call.target + row;
    const Index before = call.first + begin;
    float at_target[kBlockRows] = {};
    for (Index i = 0; i < count; ++i) {
      const int64_t place = target[i] - before;
      if (place >= 0 && place < n) at_target[i] = tile[place * kBlockRows + i];
    }
    for (Index i = 0; i < count; i += kLanes) {
      const Mask counts = less(zero(), load(counted + i));
      const Vec by = load(scale + i), even = set1(-share) * by;
      const auto log_p = [&](Vec x) __attribute__((always_inline)) {
        return (x - load(row_max + i)) - load(log + i);
      };
      // For p near 1, expm1 avoids the cancellation in p - 1. Below 1/2 p itself is used: with much
      // smoothing the difference may be close to 0, and p - 1 would have rounded p.
      const Vec log_of_target = log_p(load(at_target + i));
      const Vec off = select(less(log_of_target, set1(-0.69f)),
                             exp(log_of_target) - set1((1.0f - call.smoothing) + share),
                             expm1(log_of_target) + set1(call.smoothing - share));
      store(at_target + i, off * by);
      for (Index c = 0; c < n; ++c) {
        float* x = tile + c * kBlockRows + i;
        store(x, select(counts, fma(exp(log_p(load(x))), by, even), zero()));
      }
    }
    for (Index i = 0; i < count; ++i) {
      const int64_t place = target[i] - before;
      if (place >= 0 && place < n && target[i] != call.ignored)
        tile[place * kBlockRows + i] = at_target[i];
    }
    write_tile(tile, args.layout, count, n, to + begin * args.layout.column);
  });
}

}  // namespace

void cross_entropy_rows(const CrossEntropyArgs& args, Index begin, Index end) {
  each_block(args, begin, end, [&](Index row, Index count) {
    State state;
    for (Index i = 0; i < kBlockRows; i += kLanes) {
      store(state.row_max + i, set1(-kInf));
      store(state.sum + i, zero());
      store(state.shifted_sum + i, zero());
      store(state.target_logit + i, zero());
    }
    if (args.first > 0)
      each_member(args, state, [&](float* own, const float* all) {
        for (Index i = 0; i < count; ++i) own[i] = all[row + i];
      });
    dispatch_element(args.type, [&](auto type) {
      using T = decltype(type);
      if (args.layout.column != 1 || args.columns < kLongRow)
        return scan_tiles<T>(args, row, count, state);
      for (Index i = 0; i < count; ++i) {
        if (args.target[row + i] == args.ignored) continue;
        const T* x = static_cast<const T*>(args.logits) + place_of(args, args.layout, row + i);
        scan_row(args, x, row + i, state, i);
      }
    });
    if (args.first + args.columns == args.classes) return finish(args, row, count, state);
    each_member(args, state, [&](const float* own, float* all) {
      for (Index i = 0; i < count; ++i) all[row + i] = own[i];
    });
  });
}

void cross_entropy_gradient_rows(const CrossEntropyGradientArgs& args, Index begin, Index end) {
  dispatch_element(args.call.type, [&](auto type) {
    using T = decltype(type);
    if (args.call.layout.column == 1 && args.call.columns >= kLongGradientRow) {
      for (Index row = begin; row < end; ++row) gradient_of_row<T>(args, row);
    } else {
      each_block(args.call, begin, end,
                 [&](Index row, Index count) { gradient_of_tiles<T>(args, row, count); });
    }
  });
}

}  // namespace tf::TF_ISA
