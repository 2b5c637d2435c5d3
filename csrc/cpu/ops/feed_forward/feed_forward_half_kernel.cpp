// Feed-forward network ("Attention Is All You Need", section 3.3) for half types, over a block of
// rows whose hidden units stay in the second-level cache, in the form that the second product
// wants.
#include "cpu/ops/feed_forward/feed_forward_half_kernel.h"

#include <type_traits>

#include "cpu/ops/feed_forward/feed_forward_product.h"

namespace tf::TF_ISA {
namespace {

template <class T>
void block(const HalfFeedForwardArgs& args, long begin, long end, void* scratch) {
  T* kept = static_cast<T*>(args.preactivation);
  if (kept != nullptr) kept += begin * args.f;
  two_products<T>(
      args, begin, end, scratch,
      [&](long j) {
        const Ends<T> ends(args.bias1, j, args.f, args.activation);
        return [=](long i, Vec& low, Vec& high, KeepBits& keep) __attribute__((always_inline)) {
          ends.start(low, high);
          if (kept != nullptr) ends.write(kept + i * args.f + j, low, high);
          ends.activate(low, high);
          if (args.dropout.on) {
            Vec factors[2];
            panel_factors(args.dropout, args.row + begin + i, j, j % kDraw == 0, keep, factors[0],
                          factors[1]);
            low = drop(low, factors[0]);
            high = drop(high, factors[1]);
          }
          // As two linear maps pass them on: how rows are cut must not reach the result.
          if constexpr (!std::is_same_v<typename Product<T>::Operand, T>) {
            low = rounded(low, T{});
            high = rounded(high, T{});
          }
        };
      },
      [](long) {});
}

}  // namespace

long half_feed_forward_row_block(const HalfFeedForwardArgs& args) {
  return (args.type == Element::bfloat16 ? feed_forward_row_block<BFloat16>
                                         : feed_forward_row_block<Float16>)(args);
}

long half_feed_forward_scratch(const HalfFeedForwardArgs& args, long rows) {
  return (args.type == Element::bfloat16 ? feed_forward_scratch_bytes<BFloat16>
                                         : feed_forward_scratch_bytes<Float16>)(args, rows);
}

void half_feed_forward_rows(const HalfFeedForwardArgs& args, long begin, long end, void* scratch) {
  (args.type == Element::bfloat16 ? block<BFloat16> : block<Float16>)(args, begin, end, scratch);
}

}  // namespace tf::TF_ISA
