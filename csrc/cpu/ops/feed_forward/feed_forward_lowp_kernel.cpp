// Feed-forward network ("Attention Is All You Need", section 3.3) for bfloat16 and float16, over a
// block of rows whose hidden units stay in the second-level cache, packed for the second product.
// Also the row-wise part of its gradients,
//
//   dz = dropout(dy W2) act'(z),  dx = dz W1,
//
// with the inputs of the weight gradients: dz in memory, and the recomputed hidden units.
#include <type_traits>

#include "cpu/gemm/epilogue.h"
#include "cpu/ops/feed_forward/feed_forward.h"
#include "cpu/simd/activation.h"
#include "cpu/simd/philox.h"

namespace tf::TF_ISA {
namespace {

template <class T>
Index row_block(const FeedForwardArgs& args) {
  return block_rows<Product<T>>((args.k + args.f) * Product<T>::kBytes);
}

template <class T>
Index feed_forward_scratch_bytes(const FeedForwardArgs& args, Index rows) {
  using P = Product<T>;
  return (P::block_size(rows, args.k) + P::block_size(rows, args.f)) *
             static_cast<Index>(sizeof(typename P::Operand)) +
         P::buffer_size(rows) * static_cast<Index>(sizeof(float)) +
         rows * static_cast<Index>(sizeof(KeepBits));
}

// Rows [begin, end). For each panel of hidden units, from column j on, first(j) returns a function
// (i, low, high, keep) -> low, high that turns the first product's row i into hidden units, with
// the row's bits for panel_factors(); after(j) is called when all rows are done. Without y there is
// no second product.
template <class T, class First, class After>
void two_products(const FeedForwardArgs& args, Index begin, Index end, void* scratch,
                  const First& first, const After& after) {
  using P = Product<T>;
  using Operand = typename P::Operand;
  P::enter();
  const Index rows = end - begin;
  Operand* x = static_cast<Operand*>(scratch);
  Operand* hidden = x + P::block_size(rows, args.k);
  float* sums = reinterpret_cast<float*>(hidden + P::block_size(rows, args.f));
  KeepBits* keep = reinterpret_cast<KeepBits*>(sums + P::buffer_size(rows));
  const auto* w1 = static_cast<const Operand*>(args.packed1);
  const auto* w2 = static_cast<const Operand*>(args.packed2);
  P::fill(static_cast<const T*>(args.x) + begin * args.x_stride, args.x_stride, rows, args.k, x);
  for (Index j = 0; j < args.f; j += kPanel, w1 += P::panel_size(args.k)) {
    P::multiply(x, rows, args.k, w1,
                j + kPanel < args.f || w2 == nullptr ? w1 + P::panel_size(args.k) : w2, sums,
                [=, activate_hidden = first(j)](Index i, Vec low, Vec high)
                    __attribute__((always_inline)) {
                      activate_hidden(i, low, high, keep[i]);
                      P::put(P::chunk(hidden, args.f, i, j), low, high);
                    });
    after(j);
  }
  T* y = args.y == nullptr ? nullptr : static_cast<T*>(args.y) + begin * args.n;
  const T* residual = static_cast<const T*>(args.residual);
  if (residual != nullptr) residual += begin * args.residual_stride;
  for (Index j = 0; y != nullptr && j < args.n; j += kPanel, w2 += P::panel_size(args.f)) {
    P::multiply(hidden, rows, args.f, w2, w2 + P::panel_size(args.f), sums,
                [=, &args, epilogue = Epilogue<T>(args.bias2, j, args.n, kIdentity)](
                    Index i, Vec low, Vec high) __attribute__((always_inline)) {
                  epilogue.finish(low, high);
                  if (residual != nullptr)
                    epilogue.add(residual + i * args.residual_stride + j, low, high);
                  epilogue.write(y + i * args.n + j, low, high);
                });
  }
  P::leave();
}

template <class T>
void forward(const FeedForwardArgs& args, Index begin, Index end, void* scratch) {
  T* preactivation = static_cast<T*>(args.preactivation);
  if (preactivation != nullptr) preactivation += begin * args.f;
  two_products<T>(
      args, begin, end, scratch,
      [&](Index j) {
        return [=, &args, epilogue = Epilogue<T>(args.bias1, j, args.f, args.activation)](
                   Index i, Vec& low, Vec& high, KeepBits& keep) __attribute__((always_inline)) {
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
      [](Index) {});
}

// Writes rows of a panel in order, starting with an even one, as pairs.
template <class T>
class PairedRows {
  using P = Product<T>;
  using Operand = typename P::Operand;

 public:
  PairedRows(Operand* panel, Index row, float* pending)
      : panel_(panel), row_(row), pending_(pending) {}

  TF_INLINE void put(Index i, Vec low, Vec high) const {
    if (i % 2 == 0) {
      store(pending_, low);
      store(pending_ + kLanes, high);
    } else {
      P::put_pair(panel_, (row_ + i) / 2, {load(pending_), load(pending_ + kLanes)}, {low, high});
    }
  }

  // Called after `rows` rows; pads with zeros behind the last of all m rows.
  void finish(Index rows, Index m) const {
    if (rows % 2 != 0) put(rows, zero(), zero());
    if (row_ + rows < m) return;
    for (Index pair = (m + 1) / 2; 2 * pair < P::depth(m); ++pair)
      P::put_pair(panel_, pair, {zero(), zero()}, {zero(), zero()});
  }

 private:
  Operand* panel_;
  Index row_;
  float* pending_;
};

template <class T>
void backward(const FeedForwardArgs& args, Index begin, Index end, void* scratch) {
  using P = Product<T>;
  float* pending = static_cast<float*>(scratch);
  const T* z = static_cast<const T*>(args.slope_at) + begin * args.f;
  T* grad_z = args.hidden == nullptr ? nullptr : static_cast<T*>(args.hidden) + begin * args.f;
  auto* panels = static_cast<typename P::Operand*>(args.panels);
  const auto paired = [&](Index j) {
    return PairedRows<T>(panels == nullptr ? nullptr : panels + j / kPanel * P::panel_size(args.m),
                         begin, pending);
  };
  two_products<T>(
      args, begin, end, pending + kPanel,
      [&](Index j) {
        const Epilogue<T> epilogue(nullptr, j, args.f, args.activation);
        const PairedRows<T> hidden = paired(j);
        const Index have = args.f - j;
        return [=](Index i, Vec& low, Vec& high, KeepBits& keep) __attribute__((always_inline)) {
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
      [&](Index j) {
        if (panels != nullptr) paired(j).finish(end - begin, args.m);
      });
}

template <class T>
Index scratch_bytes(const FeedForwardArgs& args, Index rows) {
  return kPanel * static_cast<Index>(sizeof(float)) + feed_forward_scratch_bytes<T>(args, rows);
}

template <class T>
void rows(const FeedForwardArgs& args, Index begin, Index end, void* scratch) {
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
