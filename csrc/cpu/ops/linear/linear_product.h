// Linear layer with epilogue on the GEMM engine (engine.h). A block of rows is packed once and
// stays in the second-level cache; the weights are streamed in panels, and each row of a result is
// finished in registers. For kernel files only.
#pragma once

#include "cpu/gemm/epilogue.h"
#include "cpu/ops/linear/linear.h"

namespace tf::TF_ISA {
namespace {

template <class T>
long row_block(const LinearArgs& args) {
  return block_rows<T>(args.k * Product<T>::kBytes);
}

template <class T>
void pack(const void* weight, long stride, long n, long k, void* packed, long begin, long end) {
  using P = Product<T>;
  auto* panels = static_cast<typename P::Operand*>(packed);
  for (long p = begin; p < end; ++p) {
    const long row = p * kPanel;
    P::pack_rows(static_cast<const T*>(weight) + row * stride, stride, min(kPanel, n - row), k,
                 panels + p * P::panel_size(k));
  }
}

// Rows of W^T packed at a time.
constexpr long kPackRows = 32;
template <class T>
void pack_transposed(const void* transposed, long stride, long n, long k, void* packed, long begin,
                     long end) {
  using P = Product<T>;
  for (long block = begin; block < end; ++block) {
    const long p = block * kPackRows, depth = min(kPackRows, k - p);
    const T* rows = static_cast<const T*>(transposed) + p * stride;
    auto* panel = static_cast<typename P::Operand*>(packed) + P::panel_size(p);
    for (long j = 0; j < n; j += kPanel, panel += P::panel_size(k))
      P::pack_columns(rows + j, stride, min(kPanel, n - j), depth, panel);
  }
}

// Epilogue of the rows from `row` on.
template <class T>
class RowEpilogue {
  using P = Product<T>;

 public:
  RowEpilogue(const LinearArgs& call, long row)
      : args_(call),
        x_(static_cast<const T*>(call.x) + row * call.x_stride),
        y_(static_cast<T*>(call.y) + row * call.y_stride),
        residual_(static_cast<const T*>(call.residual)),
        preactivation_(static_cast<T*>(call.preactivation)) {
    if (residual_ != nullptr) residual_ += row * call.residual_stride;
    if (preactivation_ != nullptr) preactivation_ += row * call.n;
  }

  Epilogue<T> of_panel(long p) const {
    return Epilogue<T>(args_.bias, p * kPanel, args_.n, args_.activation);
  }

  TF_INLINE void finish(const Epilogue<T>& epilogue, long i, long p, Vec low, Vec high) const {
    if constexpr (P::kIsBf16x3) {
      if (P::needs_fp32(low, high))
        P::fp32_row(
            [&](long k) { return x(i, k); }, args_.k,
            static_cast<const typename P::Operand*>(args_.packed) + p * P::panel_size(args_.k), low,
            high);
    }
    finish_checked(epilogue, i, p, low, high);
  }

  // The same for sums that need no fp32 recomputation.
  TF_INLINE void finish_checked(const Epilogue<T>& epilogue, long i, long p, Vec low,
                                Vec high) const {
    const long column = p * kPanel;
    epilogue.add_bias(low, high);
    if (preactivation_ != nullptr) epilogue.write(preactivation_ + i * args_.n + column, low, high);
    epilogue.activate(low, high);
    if (residual_ != nullptr)
      epilogue.add(residual_ + i * args_.residual_stride + column, low, high);
    epilogue.write(y_ + i * args_.y_stride + column, low, high);
  }

  float x(long i, long k) const { return load_one(x_ + i * args_.x_stride + k); }

 private:
  const LinearArgs& args_;
  const T* x_;
  T* y_;
  const T* residual_;
  T* preactivation_;
};

template <class T>
void block(const LinearArgs& args, long row_begin, long row_end, long panel_begin, long panel_end,
           void* scratch) {
  using P = Product<T>;
  P::enter();
  const auto* packed = static_cast<const typename P::Operand*>(args.packed);
  const long max_rows = row_block<T>(args);
  auto* a = static_cast<typename P::Operand*>(scratch);
  float* sums = reinterpret_cast<float*>(a + P::block_size(max_rows, args.k));
  const long count = (row_end - row_begin + max_rows - 1) / max_rows;
  for (long item = 0, row = row_begin; item < count; ++item) {
    const long rows = (row_end - row + count - item - 1) / (count - item);
    P::fill(static_cast<const T*>(args.x) + row * args.x_stride, args.x_stride, rows, args.k, a);
    const RowEpilogue<T> row_epilogue(args, row);
    for (long p = panel_begin; p < panel_end; ++p) {
      const auto* panel = packed + p * P::panel_size(args.k);
      const Epilogue<T> epilogue = row_epilogue.of_panel(p);
      P::multiply(a, rows, args.k, panel, panel + P::panel_size(args.k), sums,
                  [=](long i, Vec low, Vec high) __attribute__((always_inline)) {
                    row_epilogue.finish(epilogue, i, p, low, high);
                  });
    }
    row += rows;
  }
  P::leave();
}

template <class T>
long scratch_bytes(const LinearArgs& args) {
  using P = Product<T>;
  const long rows = row_block<T>(args);
  return P::block_size(rows, args.k) * static_cast<long>(sizeof(typename P::Operand)) +
         P::buffer_size(rows) * static_cast<long>(sizeof(float));
}

template <class T>
long packed_bytes(long n, long k) {
  using P = Product<T>;
  return round_up(n, kPanel) / kPanel * P::panel_size(k) *
         static_cast<long>(sizeof(typename P::Operand));
}

}  // namespace
}  // namespace tf::TF_ISA
