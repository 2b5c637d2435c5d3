// Two chained GEMMs over a block of rows whose hidden units stay in the second-level cache, packed
// for the second product. For kernel files only.
#pragma once

#include "cpu/gemm/epilogue.h"
#include "cpu/ops/feed_forward/feed_forward.h"
#include "cpu/simd/philox.h"

namespace tf::TF_ISA {
namespace {

template <class T>
long row_block(const FeedForwardArgs& args) {
  return block_rows<T>((args.k + args.f) * Product<T>::kBytes);
}

template <class T>
long feed_forward_scratch_bytes(const FeedForwardArgs& args, long rows) {
  using P = Product<T>;
  return (P::block_size(rows, args.k) + P::block_size(rows, args.f)) *
             static_cast<long>(sizeof(typename P::Operand)) +
         P::buffer_size(rows) * static_cast<long>(sizeof(float)) +
         rows * static_cast<long>(sizeof(KeepBits));
}

// Rows [begin, end). For each panel of hidden units, from column j on, first(j) returns a function
// (i, low, high, keep) -> low, high that turns the first product's row i into hidden units, with
// the row's bits for panel_factors(); after(j) is called when all rows are done. Without y there is
// no second product.
template <class T, class First, class After>
void two_products(const FeedForwardArgs& args, long begin, long end, void* scratch,
                  const First& first, const After& after) {
  using P = Product<T>;
  using Operand = typename P::Operand;
  P::enter();
  const long rows = end - begin;
  Operand* x = static_cast<Operand*>(scratch);
  Operand* hidden = x + P::block_size(rows, args.k);
  float* sums = reinterpret_cast<float*>(hidden + P::block_size(rows, args.f));
  KeepBits* keep = reinterpret_cast<KeepBits*>(sums + P::buffer_size(rows));
  const auto* w1 = static_cast<const Operand*>(args.packed1);
  const auto* w2 = static_cast<const Operand*>(args.packed2);
  P::fill(static_cast<const T*>(args.x) + begin * args.x_stride, args.x_stride, rows, args.k, x);
  for (long j = 0; j < args.f; j += kPanel, w1 += P::panel_size(args.k)) {
    const auto activate_hidden = first(j);
    P::multiply(x, rows, args.k, w1,
                j + kPanel < args.f || w2 == nullptr ? w1 + P::panel_size(args.k) : w2, sums,
                [=](long i, Vec low, Vec high) __attribute__((always_inline)) {
                  activate_hidden(i, low, high, keep[i]);
                  P::put(P::chunk(hidden, args.f, i, j), low, high);
                });
    after(j);
  }
  T* y = args.y == nullptr ? nullptr : static_cast<T*>(args.y) + begin * args.n;
  const T* residual = static_cast<const T*>(args.residual);
  if (residual != nullptr) residual += begin * args.residual_stride;
  for (long j = 0; y != nullptr && j < args.n; j += kPanel, w2 += P::panel_size(args.f)) {
    const Epilogue<T> epilogue(args.bias2, j, args.n, kIdentity);
    P::multiply(hidden, rows, args.f, w2, w2 + P::panel_size(args.f), sums,
                [=, &args](long i, Vec low, Vec high) __attribute__((always_inline)) {
                  epilogue.finish(low, high);
                  if (residual != nullptr)
                    epilogue.add(residual + i * args.residual_stride + j, low, high);
                  epilogue.write(y + i * args.n + j, low, high);
                });
  }
  P::leave();
}

}  // namespace
}  // namespace tf::TF_ISA
