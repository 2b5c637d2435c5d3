// Epilogue (bias, activation, residual) of linear layers on the GEMM engine; for kernel files only.
#pragma once

#include <type_traits>

#include "cpu/gemm/engine.h"
#include "cpu/simd/activation.h"

namespace tf::TF_ISA {
namespace {

// The product of two floats, rounded: otherwise compilers contract it with an addition.
TF_INLINE Vec rounded_product(Vec a, Vec b) {
  Vec product = a * b;
#if defined(__aarch64__)
  asm("" : "+w"(product));
#elif defined(__AVX512F__)
  asm("" : "+v"(product));
#else
  asm("" : "+x"(product));
#endif
  return product;
}

// Epilogue of kPanel columns of a linear layer with n outputs, from `column` on. scale (n): factors
// of the columns of 8-bit weights, or nullptr. kKnown: the activation, if it is known when
// compiled.
template <class T, int kKnown = -1>
class Epilogue {
 public:
  TF_INLINE Epilogue(const void* bias, Index column, Index n, int activation,
                     const float* scale = nullptr)
      : count_(min(kPanel, n - column)),
        min_(set1(activation == kRelu ? 0.0f : -kInf)),
        activation_(std::is_same_v<T, BFloat16> ? coarse(activation) : activation) {
    if (scale != nullptr) {
      scale_low_ = read(scale + column, 0);
      scale_high_ = read(scale + column, kLanes);
    }
    if (bias == nullptr) return;
    low_ = read(static_cast<const T*>(bias) + column, 0);
    high_ = read(static_cast<const T*>(bias) + column, kLanes);
  }

  // Scales exact sums of a row with the scale `row`.
  TF_INLINE void dequantize(float row, Vec& low, Vec& high) const {
    low = rounded_product(rounded_product(low, scale_low_), set1(row));
    high = rounded_product(rounded_product(high, scale_high_), set1(row));
  }

  // Adds the bias and applies the activation.
  TF_INLINE void finish(Vec& low, Vec& high) const {
    add_bias(low, high);
    activate(low, high);
  }
  TF_INLINE void add_bias(Vec& low, Vec& high) const {
    low = low + low_;
    high = high + high_;
  }
  TF_INLINE void activate(Vec& low, Vec& high) const {
    // This operand order propagates NaN.
    low = max(min_, low);
    high = max(min_, high);
    const int activation = kKnown < 0 ? activation_ : kKnown;
    if (activation > kRelu) {
      low = tf::TF_ISA::activate(low, activation);
      high = tf::TF_ISA::activate(high, activation);
    }
  }
  template <class By>
  TF_INLINE void multiply(const By* row, Vec& low, Vec& high) const {
    low = low * read(row, 0);
    high = high * read(row, kLanes);
  }
  TF_INLINE void add(const T* row, Vec& low, Vec& high) const {
    low = low + read(row, 0);
    high = high + read(row, kLanes);
  }
  template <class To>
  TF_INLINE void write(To* row, Vec low, Vec high) const {
    // Prefetches the destination of the next panel: hardware does not predict stores one row apart.
    // Rows of fp32 span two lines, and prefetching both delays AMX's products.
    if constexpr (!Product<T>::kIsBf16x3) {
      prefetch_l2(row + kPanel);
      if constexpr (kPanel * sizeof(To) > kLine) prefetch_l2(row + kPanel + kLanes);
    }
    if (count_ == kPanel) {
      store(row, low);
      store(row + kLanes, high);
    } else {
      store_some(row, low, count_);
      if (count_ > kLanes) store_n(row + kLanes, high, count_ - kLanes);
    }
  }

 private:
  template <class From>
  TF_INLINE Vec read(const From* row, Index from) const {
    return count_ > from ? load_some(row + from, count_ - from) : zero();
  }

  Index count_;
  Vec min_, low_ = zero(), high_ = zero(), scale_low_ = zero(), scale_high_ = zero();
  int activation_;
};

// Calls run(constant) with a coarse activation, or with kRelu for kIdentity as well: both only take
// the maximum with min_.
template <class Run>
void with_coarse_activation(int activation, const Run& run) {
  switch (coarse(activation)) {
    case kCoarse | kGelu:
      return run(std::integral_constant<int, kCoarse | kGelu>());
    case kCoarse | kGeluTanh:
      return run(std::integral_constant<int, kCoarse | kGeluTanh>());
    case kCoarse | kSilu:
      return run(std::integral_constant<int, kCoarse | kSilu>());
    default:
      return run(std::integral_constant<int, kRelu>());
  }
}

}  // namespace
}  // namespace tf::TF_ISA
