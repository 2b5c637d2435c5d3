// Backward of the norms. With h = (s - c) r, g = dy weight, and means over a row:
//
//   ds = r (g - mean(g) - h mean(g h)),   dweight = sum over rows of dy h,   dbias = that of dy
//
// without mean(g) where no mean is subtracted, and with sum(g h) / sqrt(m sum(h h)) instead of
// mean(g h) where eps is added outside the root; m = terms_of(kind, n).
//
// Each row is read from memory once. Each block of rows accumulates its partial dweight and dbias,
// and a second pass sums them; blocks do not depend on the number of threads, so neither do
// results.
#include "cpu/ops/layer_norm/layer_norm.h"
#include "cpu/simd/column_sums.h"
#include "cpu/simd/philox.h"

namespace tf::TF_ISA {
namespace {

// Rows summed before they are added to the block's partial sum: short sums are more accurate.
constexpr Index kRowChain = 32;
// In standard deviations of a row: up to a mean of this size, its rounding error is about a unit in
// the last place of the results.
constexpr float kFar = 2.0f;
constexpr Index kWide = 2 * kLanes;  // granularity of dropout_factors()

template <class T>
struct Row {
  const LayerNormBackwardArgs& args;
  const T *grad, *source;
  const float* weight;
  float mean, rstd;

  Row(const LayerNormBackwardArgs& a, Index row)
      : args(a),
        grad(static_cast<const T*>(a.grad) + row * a.grad_stride),
        source(static_cast<const T*>(a.source) + row * a.source_stride),
        weight(static_cast<const float*>(a.weight)),
        mean(a.mean[row]),
        rstd(a.rstd[row]) {}

  TF_INLINE Vec operator()(Index j, Index count) const { return load_some(source + j, count); }
  TF_INLINE Vec normal(Index j, Index count) const {
    return (load_some(source + j, count) - set1(mean)) * set1(rstd);
  }
  // h - off. Uses fma(), so that the bits are the same in all loops.
  TF_INLINE Vec normal(Index j, Index count, float off) const {
    return fma(load_some(source + j, count) - set1(mean), set1(rstd), set1(-off));
  }
  TF_INLINE Vec weighted(Vec dy, Index j, Index count) const {
    return weight == nullptr ? dy : dy * load_some(weight + j, count);
  }
};

// 1 / sqrt(terms sum(h h)); 0 for a constant row, as in PyTorch's std.
template <class T>
float share_outside(const Row<T>& in, Index n, Index terms) {
  const float square = sum_of_squares(in, n, in.mean, in.rstd) * static_cast<float>(terms);
  return square == 0.0f ? 0.0f : 1.0f / __builtin_sqrtf(square);
}

// mean(h), which is 0 up to the rounding error of the row's mean: 0 unless that is far from 0.
template <class T>
float mean_of_normal(const Row<T>& in, Index n) {
  if (__builtin_fabsf(in.mean) * in.rstd <= kFar) return 0.0f;
  return sum_of_distances(in, n, in.mean, in.rstd) / static_cast<float>(n);
}

// Sums of dweight and dbias, each padded to whole vectors: a masked load behind a masked store of
// nearby memory waits until the store has left for the cache.
struct Sums {
  float* data;
  Index stride;

  Sums(float* memory, Index n) : data(memory), stride(round_up(n, kLanes)) {}

  TF_INLINE void add(Index j, Vec dy, Vec h) const {
    store(data + j, fma(dy, h, load(data + j)));
    store(data + stride + j, load(data + stride + j) + dy);
  }
  void clear() const {
    for (Index j = 0; j < 2 * stride; ++j) data[j] = 0.0f;
  }
  void move_into(float* share, Index n) const {
    for (Index which = 0; which < 2; ++which)
      each_vector(n, [&](Index j, Index count) {
        float* to = share + which * n + j;
        store_some(to, load_some(to, count) + load(data + which * stride + j), count);
      });
    clear();
  }
};

// Computes ds of a row; also adds its share of dweight and dbias to `chain` if they are wanted.
template <class T>
void source_gradient(const LayerNormBackwardArgs& args, Index row, float* factors,
                     const Sums& chain) {
  const Index n = args.n;
  const Row<T> in(args, row);
  float sums[2];  // of g, and of g h
  row_sums(n, sums, [&](Vec* to, Index j, Index count) __attribute__((always_inline)) {
    const Vec g = in.weighted(load_some(in.grad + j, count), j, count);
    to[0] = to[0] + g;
    to[1] = fma(g, in.normal(j, count), to[1]);  // g is 0 in the lanes beyond the row
  });
  const float inverse = 1.0f / static_cast<float>(n);
  const float share =
      eps_is_under_root(args.kind) ? inverse : share_outside(in, n, terms_of(args.kind, n));
  float mean_g = subtracts_mean(args.kind) ? sums[0] * inverse : 0.0f, mean_gh = sums[1] * share;
  // The rounding error of a mean far from 0 offsets all of h, and ds with it.
  const float off = mean_of_normal(in, n);
  mean_gh -= off * sums[0] * share;
  mean_g -= off * mean_gh;
  const bool drops = args.grad_input != nullptr && args.dropout.on;
  if (drops) row_dropout_factors(args.dropout, row, n, args.dropout_columns, factors);
  const auto row_of = [&](void* tensor) {
    return tensor == nullptr ? nullptr : static_cast<T*>(tensor) + row * n;
  };
  T *to_source = row_of(args.grad_source), *to_input = row_of(args.grad_input);
  const T* extra = args.grad_sum == nullptr
                       ? nullptr
                       : static_cast<const T*>(args.grad_sum) + row * args.grad_sum_stride;
  each_vector(n, [&](Index j, Index count) {
    const Vec dy = load_some(in.grad + j, count), h = in.normal(j, count);
    Vec d = (in.weighted(dy, j, count) - set1(mean_g) - h * set1(mean_gh)) * set1(in.rstd);
    if (args.partial != nullptr) chain.add(j, dy, in.normal(j, count, off));
    if (extra != nullptr) d = d + load_some(extra + j, count);
    if (to_source != nullptr) store_some(to_source + j, d, count);
    if (drops) d = drop(d, load_some(factors + j, count));
    if (to_input != nullptr) store_some(to_input + j, d, count);
  });
}

template <class T>
void run_block(LayerNormBackwardArgs args, Index block, float* scratch) {
  const Index n = args.n;
  const Sums chain(scratch, n);
  float *factors = scratch + 2 * chain.stride, *weight = factors + n + kWide;
  if (args.weight_type != Element::float32)
    args.weight = widened(static_cast<const T*>(args.weight), n, weight);
  float* share = args.partial != nullptr ? args.partial + block * 2 * n : nullptr;
  if (share != nullptr) {
    chain.clear();
    for (Index j = 0; j < 2 * n; ++j) share[j] = 0.0f;
  }
  const Index begin = args.rows * block / args.blocks;
  const Index end = args.rows * (block + 1) / args.blocks;
  const bool source = args.grad_source != nullptr || args.grad_input != nullptr;
  for (Index row = begin; row < end; ++row) {
    if (source) source_gradient<T>(args, row, factors, chain);
    if (share == nullptr) continue;
    if (!source) {
      const Row<T> in(args, row);
      const float off = mean_of_normal(in, n);
      each_vector(n, [&](Index j, Index count) {
        chain.add(j, load_some(in.grad + j, count), in.normal(j, count, off));
      });
    }
    if ((row - begin) % kRowChain == kRowChain - 1) chain.move_into(share, n);
  }
  if (share != nullptr) chain.move_into(share, n);
}

}  // namespace

Index layer_norm_backward_scratch(const LayerNormBackwardArgs& args) {
  return 4 * round_up(args.n, kLanes) + kWide;
}

void layer_norm_backward_block(const LayerNormBackwardArgs& args, Index block, float* scratch) {
  dispatch_element(args.type, [&](auto type) { run_block<decltype(type)>(args, block, scratch); });
}

void layer_norm_backward_sum(const LayerNormBackwardArgs& args, int which, void* total, Index begin,
                             Index end) {
  dispatch_element(args.weight_type, [&](auto type) {
    auto* to = static_cast<decltype(type)*>(total) + begin;
    each_vector(end - begin, [&](Index j, Index count) {
      Vec sum = zero();
      for (Index block = 0; block < args.blocks; ++block)
        sum = sum + load_some(args.partial + (block * 2 + which) * args.n + begin + j, count);
      store_some(to + j, sum, count);
    });
  });
}

}  // namespace tf::TF_ISA
