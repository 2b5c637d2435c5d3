// Feed-forward network ("Attention Is All You Need", section 3.3) in fp32, by FMA or bf16x3, over a
// block of rows: a slice of the hidden units is computed, activated and multiplied into the result
// while it is in the second-level cache. Also used by training and the backward.
#include "cpu/gemm/epilogue.h"
#include "cpu/ops/feed_forward/feed_forward.h"
#include "cpu/simd/activation.h"
#include "cpu/simd/philox.h"

namespace tf::TF_ISA {
namespace {

using P = Product<float>;
using Operand = P::Operand;

// Hidden units per slice: whole K blocks of the products, so that sums do not depend on whether
// this kernel or two linear layers compute them.
constexpr Index kSlice = 512;
static_assert(kSlice % P::kKBlock == 0);
constexpr Index kPad = 16;  // avoids cache set conflicts between rows of y

struct Workspace {
  Operand *x, *hidden;
  float *y, *sums, *units;
  KeepBits* keep;  // per row: keep bits of two panels of hidden units
  Index y_stride, bytes = 0;

  Workspace(const FeedForwardArgs& args, Index rows, void* scratch)
      : y_stride(round_up(args.n, kPanel) + kPad) {
    const auto take = [&](auto*& place, Index count) {
      void* at = scratch == nullptr ? nullptr : static_cast<char*>(scratch) + bytes;
      place = static_cast<decltype(+place)>(at);
      bytes += round_up(count * static_cast<Index>(sizeof(*place)), 64);
    };
    take(x, P::block_size(rows, args.k));
    take(hidden, P::block_size(rows, kSlice));
    take(y, round_up(rows, 16) * y_stride);
    take(sums, P::buffer_size(rows));
    take(units, round_up(args.f, kPanel));
    take(keep, rows);
  }
};

// Turns kPanel columns of a row of x W1^T, from `unit` on, into hidden units, and stores what
// training and the backward need.
template <bool kTraining>
TF_INLINE void activate_hidden(const FeedForwardArgs& args, const Epilogue<float>& epilogue,
                               Index row, Index unit, KeepBits& keep, Vec& low, Vec& high) {
  if constexpr (!kTraining) return epilogue.finish(low, high);
  const Index place = row * args.f + unit, count = min(kPanel, args.f - unit);
  const auto write = [&](void* to) __attribute__((always_inline)) {
    auto* at = static_cast<float*>(to);
    // Prefetches the destination of the next panel: hardware does not predict stores one row apart.
    prefetch_l2(at + place + kPanel);
    store_some(at + place, low, count);
    if (count > kLanes) store_some(at + place + kLanes, high, count - kLanes);
  };
  epilogue.add_bias(low, high);
  if (args.preactivation != nullptr) write(args.preactivation);
  Vec factors[2] = {zero(), zero()};
  if (args.dropout.on)
    panel_factors(args.dropout, args.row + row, unit, unit % kDraw == 0, keep, factors[0],
                  factors[1]);
  const auto dropped = [&](Vec x, int u) __attribute__((always_inline)) {
    return args.dropout.on ? drop(x, factors[u]) : x;
  };
  if (args.slope_at == nullptr) {
    low = dropped(activate(low, args.activation), 0);
    high = dropped(activate(high, args.activation), 1);
  } else {
    const float* at = static_cast<const float*>(args.slope_at) + place;
    prefetch_l2(at + kPanel);
    prefetch_l2(at + kPanel + kLanes);
    Vec h[2] = {load_some(at, count),
                count > kLanes ? load_some(at + kLanes, count - kLanes) : zero()};
    low = activation_backward(dropped(low, 0), h[0], args.activation);
    high = activation_backward(dropped(high, 1), h[1], args.activation);
    if (args.panels != nullptr) {
      float* to = static_cast<float*>(args.panels) + weight_gradient_place(args.m, row, unit);
      store(to, dropped(h[0], 0));
      store(to + kLanes, dropped(h[1], 1));
    }
  }
  if (args.hidden != nullptr) write(args.hidden);
}

// A row of the result by fp32 FMA, for values that are not representable as bf16x3.
template <bool kTraining>
void fp32_rows(const FeedForwardArgs& args, Index row, float* units, KeepBits& keep, float* y) {
  const auto* w1 = static_cast<const Operand*>(args.packed1);
  const auto* w2 = static_cast<const Operand*>(args.packed2);
  const float* x = static_cast<const float*>(args.x) + row * args.x_stride;
  Vec low, high;
  for (Index j = 0; j < args.f; j += kPanel, w1 += P::panel_size(args.k)) {
    P::fp32_row([&](Index p) { return x[p]; }, args.k, w1, low, high);
    activate_hidden<kTraining>(args, Epilogue<float>(args.bias1, j, args.f, args.activation), row,
                               j, keep, low, high);
    store(units + j, low);
    store(units + j + kLanes, high);
  }
  for (Index j = 0; j < args.n; j += kPanel, w2 += P::panel_size(args.f)) {
    P::fp32_row([&](Index p) { return units[p]; }, args.f, w2, low, high);
    store(y + j, low);
    store(y + j + kLanes, high);
  }
}

template <bool kTraining>
void block(const FeedForwardArgs& args, Index begin, Index end, void* scratch) {
  const auto* w1 = static_cast<const Operand*>(args.packed1);
  const auto* w2 = static_cast<const Operand*>(args.packed2);
  const Index rows = end - begin;
  const Workspace work(args, rows, scratch);
  const float* x = static_cast<const float*>(args.x) + begin * args.x_stride;
  P::enter();
  P::fill(x, args.x_stride, rows, args.k, work.x);
  // Once even without hidden units: the product then clears y.
  for (Index f = 0; f == 0 || f < args.f; f += kSlice) {
    const Index units = min(kSlice, args.f - f);
    const Operand* w2_slice = w2 + P::panel_size(f);
    for (Index j = 0; j < units; j += kPanel) {
      const Operand* panel = w1 + (f + j) / kPanel * P::panel_size(args.k);
      const Operand* next = j + kPanel < units ? panel + P::panel_size(args.k) : w2_slice;
      P::multiply(
          work.x, rows, args.k, panel, next, work.sums,
          [=, &args, epilogue = Epilogue<float>(args.bias1, f + j, args.f, args.activation)](
              Index i, Vec low, Vec high) __attribute__((always_inline)) {
            // Saved values must be right; otherwise the check of the result is enough.
            if (kTraining && P::needs_fp32(low, high))
              P::fp32_row([&](Index p) { return x[i * args.x_stride + p]; }, args.k, panel, low,
                          high);
            activate_hidden<kTraining>(args, epilogue, begin + i, f + j, work.keep[i], low, high);
            // Split exactly as a linear layer splits its rows.
            P::put(P::chunk(work.hidden, kSlice, i, j), low, high);
          });
    }
    if (args.y == nullptr) continue;
    const Index bytes = P::panel_size(units) * static_cast<Index>(sizeof(Operand));
    for (Index j = 0; j < args.n; j += kPanel) {
      const Operand* panel = w2_slice;
      w2_slice += P::panel_size(args.f);
      FetchAhead fetch(w2_slice, bytes, P::steps(rows, units));
      P::multiply_to(
          work.hidden, kSlice, rows, units, panel, f > 0, work.y + j, work.y_stride,
          [&]() __attribute__((always_inline)) { fetch(); }, w2_slice);
    }
  }
  P::leave();
  for (Index i = 0; i < rows && args.y != nullptr; ++i) {
    float* sums = work.y + i * work.y_stride;
    for (Index j = 0; j < args.n; j += kPanel) {
      if (!P::needs_fp32(load(sums + j), load(sums + j + kLanes))) continue;
      fp32_rows<kTraining>(args, begin + i, work.units, work.keep[i], sums);
      break;
    }
    const auto* residual = static_cast<const float*>(args.residual);
    if (residual != nullptr) residual += (begin + i) * args.residual_stride;
    float* y = static_cast<float*>(args.y) + (begin + i) * args.n;
    for (Index j = 0; j < args.n; j += kPanel) {
      const Epilogue<float> epilogue(args.bias2, j, args.n, kIdentity);
      Vec low = load(sums + j), high = load(sums + j + kLanes);
      epilogue.finish(low, high);
      if (residual != nullptr) epilogue.add(residual + j, low, high);
      epilogue.write(y + j, low, high);
    }
  }
}

Index row_block(const FeedForwardArgs& args) {
  // y is read once per slice, like the weights, so it is not counted.
  return block_rows<P>((args.k + kSlice) * P::kBytes * 4 / 5);
}

Index scratch_bytes(const FeedForwardArgs& args, Index rows) {
  return Workspace(args, rows, nullptr).bytes;
}

void all_rows(const FeedForwardArgs& args, Index begin, Index end, void* scratch) {
  (trains(args) ? block<true> : block<false>)(args, begin, end, scratch);
}

#if defined(__AMX_BF16__)
constexpr Index kRowUnit = P::kPair;
#else
constexpr Index kRowUnit = 1;
#endif
constexpr FeedForwardKernels kKernels{
    .row_unit = kRowUnit, .row_block = row_block, .scratch = scratch_bytes, .rows = all_rows};

}  // namespace

#if defined(__AMX_BF16__)
const FeedForwardKernels* bf16x3_feed_forward_kernels() { return &kKernels; }
#else
const FeedForwardKernels* feed_forward_kernels() { return &kKernels; }

void feed_forward_hidden(const FeedForwardArgs& args, float* hidden, Index begin, Index end) {
  for (Index i = begin; i < end; ++i) {
    KeepBits keep = 0;
    for (Index j = 0; j < args.f; j += kPanel) {
      float* at = hidden + i * args.f + j;
      const Index count = args.f - j;
      Vec low = load_some(at, count);
      Vec high = count > kLanes ? load_some(at + kLanes, count - kLanes) : zero();
      const Epilogue<float> epilogue(nullptr, j, args.f, args.activation);
      activate_hidden<true>(args, epilogue, i, j, keep, low, high);
      epilogue.write(at, low, high);
    }
  }
}
#endif

}  // namespace tf::TF_ISA
