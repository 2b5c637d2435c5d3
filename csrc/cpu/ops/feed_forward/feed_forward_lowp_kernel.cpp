// Feed-forward network ("Attention Is All You Need", section 3.3) for bfloat16 and float16, over a
// block of rows whose hidden units stay in the second-level cache, packed for the second product.
// Also the row-wise part of its gradients,
//
//   dz = dropout(dy W2) act'(z),  dx = dz W1,
//
// with the inputs of the weight gradients: dz in memory, and the recomputed hidden units.
#include <type_traits>

#include "cpu/ops/feed_forward/feed_forward_product.h"
#include "cpu/simd/activation_slope.h"

namespace tf::TF_ISA {
namespace {

template <class T>
void forward(const FeedForwardArgs& args, long begin, long end, void* scratch) {
  T* preactivation = static_cast<T*>(args.preactivation);
  if (preactivation != nullptr) preactivation += begin * args.f;
  two_products<T>(
      args, begin, end, scratch,
      [&](long j) {
        const Epilogue<T> epilogue(args.bias1, j, args.f, args.activation);
        return [=](long i, Vec& low, Vec& high, KeepBits& keep) __attribute__((always_inline)) {
          epilogue.add_bias(low, high);
          if (preactivation != nullptr) epilogue.write(preactivation + i * args.f + j, low, high);
          epilogue.activate(low, high);
          if (args.dropout.on) {
            Vec factors[2];
            panel_factors(args.dropout, args.row + begin + i, j, j % kDraw == 0, keep, factors[0],
                          factors[1]);
            low = drop(low, factors[0]);
            high = drop(high, factors[1]);
          }
          // Rounded as between two linear layers: the partition of rows must not affect the result.
          if constexpr (!std::is_same_v<typename Product<T>::Operand, T>) {
            low = rounded(low, T{});
            high = rounded(high, T{});
          }
        };
      },
      [](long) {});
}

// Writes rows of a panel in order, starting with an even one, as pairs.
template <class T>
class PairedRows {
  using P = Product<T>;
  using Operand = typename P::Operand;

 public:
  PairedRows(Operand* panel, long row, float* pending)
      : panel_(panel), row_(row), pending_(pending) {}

  TF_INLINE void put(long i, Vec low, Vec high) const {
    if (i % 2 == 0) {
      store(pending_, low);
      store(pending_ + kLanes, high);
    } else {
      P::put_pair(panel_, (row_ + i) / 2, {load(pending_), load(pending_ + kLanes)}, {low, high});
    }
  }

  // Called after `rows` rows; pads with zeros behind the last of all m rows.
  void finish(long rows, long m) const {
    if (rows % 2 != 0) put(rows, zero(), zero());
    if (row_ + rows < m) return;
    for (long pair = (m + 1) / 2; 2 * pair < P::depth(m); ++pair)
      P::put_pair(panel_, pair, {zero(), zero()}, {zero(), zero()});
  }

 private:
  Operand* panel_;
  long row_;
  float* pending_;
};

template <class T>
void backward(const FeedForwardArgs& args, long begin, long end, void* scratch) {
  using P = Product<T>;
  float* pending = static_cast<float*>(scratch);
  const T* z = static_cast<const T*>(args.slope_at) + begin * args.f;
  T* grad_z = args.hidden == nullptr ? nullptr : static_cast<T*>(args.hidden) + begin * args.f;
  auto* panels = static_cast<typename P::Operand*>(args.panels);
  const auto paired = [&](long j) {
    return PairedRows<T>(panels == nullptr ? nullptr : panels + j / kPanel * P::panel_size(args.m),
                         begin, pending);
  };
  two_products<T>(
      args, begin, end, pending + kPanel,
      [&](long j) {
        const Epilogue<T> epilogue(nullptr, j, args.f, args.activation);
        const PairedRows<T> hidden = paired(j);
        const long have = args.f - j;
        return [=](long i, Vec& low, Vec& high, KeepBits& keep) __attribute__((always_inline)) {
          const T* from = z + i * args.f + j;
          Vec h_low = load_some(from, have);
          Vec h_high = have > kLanes ? load_some(from + kLanes, have - kLanes) : zero();
          Vec factors[2];
          if (args.dropout.on) {
            panel_factors(args.dropout, args.row + begin + i, j, j % kDraw == 0, keep, factors[0],
                          factors[1]);
            low = drop(low, factors[0]);
            high = drop(high, factors[1]);
          }
          low = activation_backward(low, h_low, args.activation);
          high = activation_backward(high, h_high, args.activation);
          if (grad_z != nullptr) epilogue.write(grad_z + i * args.f + j, low, high);
          if (panels == nullptr) return;
          if (args.dropout.on) {
            h_low = drop(h_low, factors[0]);
            h_high = drop(h_high, factors[1]);
          }
          hidden.put(i, h_low, h_high);
        };
      },
      [&](long j) {
        if (panels != nullptr) paired(j).finish(end - begin, args.m);
      });
}

template <class T>
long scratch_bytes(const FeedForwardArgs& args, long rows) {
  return kPanel * static_cast<long>(sizeof(float)) + feed_forward_scratch_bytes<T>(args, rows);
}

template <class T>
void rows(const FeedForwardArgs& args, long begin, long end, void* scratch) {
  (args.slope_at == nullptr ? forward<T> : backward<T>)(args, begin, end, scratch);
}

// row_unit 2: panels hold rows in pairs.
template <class T>
constexpr FeedForwardKernels kKernels{
    .row_unit = 2, .row_block = row_block<T>, .scratch = scratch_bytes<T>, .rows = rows<T>};

}  // namespace

const FeedForwardKernels* lowp_feed_forward_kernels(Element type) {
  return type == Element::bfloat16 ? &kKernels<BFloat16> : &kKernels<Float16>;
}

}  // namespace tf::TF_ISA
