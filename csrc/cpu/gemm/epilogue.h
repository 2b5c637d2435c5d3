// What the linear maps of half types share: how many rows to take at once, and how a row of a
// result is finished. For kernel files only.
#pragma once

#include "cpu/gemm/engine.h"
#include "cpu/simd/activation.h"

namespace tf::TF_ISA {
namespace {

// Rows of a block whose operands take that many bytes a row: they have to stay in the second-level
// cache beside the weights passing by.
template <class T>
long block_rows(long row_bytes) {
  // Narrow operands mean fast products: those need tall blocks, lest the weights pass by too often.
  constexpr bool kNarrow = sizeof(typename Product<T>::Operand) < sizeof(float);
  constexpr long kMaxRows = kNarrow ? 256 : 8 * kTileRows, kUnit = kNarrow ? 32 : kTileRows;
  constexpr long kBudget = (kNarrow ? 1280 : 768) * 1024;
  return max(kUnit, min(kMaxRows, kBudget / max(1, row_bytes) / kUnit * kUnit));
}

// The end of kPanel columns of a linear map, from `column` on, of n.
template <class T>
class Epilogue {
 public:
  TF_INLINE Epilogue(const void* bias, long column, long n, int activation)
      : count_(min(kPanel, n - column)),
        min_(set1(activation == kRelu ? 0.0f : -kInf)),
        activation_(activation) {
    if (bias == nullptr) return;
    low_ = read(static_cast<const T*>(bias) + column, 0);
    high_ = read(static_cast<const T*>(bias) + column, kLanes);
  }

  // Bias and activation.
  TF_INLINE void finish(Vec& low, Vec& high) const {
    add_bias(low, high);
    activate(low, high);
  }
  TF_INLINE void add_bias(Vec& low, Vec& high) const {
    low = low + low_;
    high = high + high_;
  }
  TF_INLINE void activate(Vec& low, Vec& high) const {
    // In this order NaN comes through.
    low = max(min_, low);
    high = max(min_, high);
    if (activation_ > kRelu) {
      low = tf::TF_ISA::activate(low, activation_);
      high = tf::TF_ISA::activate(high, activation_);
    }
  }
  TF_INLINE void add(const T* row, Vec& low, Vec& high) const {
    low = low + read(row, 0);
    high = high + read(row, kLanes);
  }
  TF_INLINE void write(T* row, Vec low, Vec high) const {
    // Where the next panel will write: stores a row apart are nothing that hardware foresees. Wider
    // rows are two lines, and fetching both gets into the way of the tiles.
    if constexpr (sizeof(T) < sizeof(float))
      _mm_prefetch(reinterpret_cast<const char*>(row + kPanel), _MM_HINT_T1);
    if (count_ == kPanel) {
      store(row, low);
      store(row + kLanes, high);
    } else {
      store_some(row, low, count_);
      if (count_ > kLanes) store_n(row + kLanes, high, count_ - kLanes);
    }
  }

 private:
  TF_INLINE Vec read(const T* row, long from) const {
    return count_ > from ? load_some(row + from, count_ - from) : zero();
  }

  long count_;
  Vec min_, low_ = zero(), high_ = zero();
  int activation_;
};

}  // namespace
}  // namespace tf::TF_ISA
