#include "cpu/ops/pointwise/pointwise.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/philox.h"

namespace tf::TF_ISA {
namespace {

template <class T>
void rows_of(const DropoutArgs& args, long begin, long end, float* factors) {
  for (long row = begin; row < end; ++row) {
    dropout_factors(args.dropout, static_cast<uint64_t>(row), 0, args.n, factors);
    const T* x = static_cast<const T*>(args.x) + row * args.n;
    T* y = static_cast<T*>(args.y) + row * args.n;
    for (long j = 0; j < args.n; j += kLanes)
      store_some(y + j, drop(load_some(x + j, args.n - j), load(factors + j)), args.n - j);
  }
}

}  // namespace

long dropout_scratch(const DropoutArgs& args) {
  return (args.n + 2 * kLanes - 1) / (2 * kLanes) * 2 * kLanes;
}

void dropout_rows(const DropoutArgs& args, long begin, long end, float* scratch) {
  dispatch_element(args.type,
                   [&](auto type) { rows_of<decltype(type)>(args, begin, end, scratch); });
}

}  // namespace tf::TF_ISA
