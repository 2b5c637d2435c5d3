// Feed-forward network ("Attention Is All You Need", section 3.3) for half types, over a block of
// rows whose hidden units stay in the second-level cache, in the form that the second product
// wants.
#include "cpu/feed_forward_half_kernel.h"

#include "cpu/half_rows.h"
#include "cpu/philox.h"

namespace tf::TF_ISA {
namespace {

template <class T>
long row_block(const HalfFeedForwardArgs& args) {
  return block_rows<T>((args.k + args.f) * Product<T>::kBytes);
}

template <class T>
long scratch_bytes(const HalfFeedForwardArgs& args, long rows) {
  using P = Product<T>;
  return (P::block_size(rows, args.k) + P::block_size(rows, args.f)) *
             static_cast<long>(sizeof(typename P::Operand)) +
         P::buffer_size(rows) * static_cast<long>(sizeof(float));
}

template <class T>
void block(const HalfFeedForwardArgs& args, long begin, long end, void* scratch) {
  using P = Product<T>;
  using Operand = typename P::Operand;
  P::enter();
  const long rows = end - begin;
  Operand* x = static_cast<Operand*>(scratch);
  Operand* hidden = x + P::block_size(rows, args.k);
  float* sums = reinterpret_cast<float*>(hidden + P::block_size(rows, args.f));
  const auto* w1 = static_cast<const Operand*>(args.packed1);
  const auto* w2 = static_cast<const Operand*>(args.packed2);
  P::fill(static_cast<const T*>(args.x) + begin * args.x_stride, args.x_stride, rows, args.k, x);
  for (long j = 0; j < args.f; j += kPanel, w1 += P::panel_size(args.k)) {
    const Ends<T> ends(args.bias1, j, args.f, args.activation);
    P::multiply(x, rows, args.k, w1, j + kPanel < args.f ? w1 + P::panel_size(args.k) : w2, sums,
                [=](long i, Vec low, Vec high) __attribute__((always_inline)) {
                  ends.finish(low, high);
                  if (args.dropout.on) {
                    float factors[kPanel];
                    dropout_factors(args.dropout, static_cast<uint64_t>(begin + i),
                                    static_cast<uint64_t>(j), kPanel, factors);
                    low = drop(low, load(factors));
                    high = drop(high, load(factors + kLanes));
                  }
                  P::put(P::chunk(hidden, args.f, i, j), low, high);
                });
  }
  T* y = static_cast<T*>(args.y) + begin * args.n;
  for (long j = 0; j < args.n; j += kPanel, w2 += P::panel_size(args.f)) {
    const Ends<T> ends(args.bias2, j, args.n, kIdentity);
    P::multiply(hidden, rows, args.f, w2, w2 + P::panel_size(args.f), sums,
                [=](long i, Vec low, Vec high) __attribute__((always_inline)) {
                  ends.finish(low, high);
                  ends.write(y + i * args.n + j, low, high);
                });
  }
  P::leave();
}

}  // namespace

long half_feed_forward_row_block(const HalfFeedForwardArgs& args) {
  return (args.type == Element::bfloat16 ? row_block<BFloat16> : row_block<Float16>)(args);
}

long half_feed_forward_scratch(const HalfFeedForwardArgs& args, long rows) {
  return (args.type == Element::bfloat16 ? scratch_bytes<BFloat16> : scratch_bytes<Float16>)(args,
                                                                                             rows);
}

void half_feed_forward_rows(const HalfFeedForwardArgs& args, long begin, long end, void* scratch) {
  (args.type == Element::bfloat16 ? block<BFloat16> : block<Float16>)(args, begin, end, scratch);
}

}  // namespace tf::TF_ISA
