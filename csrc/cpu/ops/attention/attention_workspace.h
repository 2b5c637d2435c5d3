// Where attention on the products of engine.h keeps what it works on, and the packing of keys
// and values. For kernel files only.
#pragma once

#include "cpu/gemm/engine.h"
#include "cpu/ops/attention/attention.h"
#include "cpu/ops/attention/attention_mask.h"
#include "cpu/simd/philox.h"

namespace tf::TF_ISA {
namespace {

// Keys whose probabilities are kept, then multiplied into the sums; groups begin at multiples of
// it.
template <class T>
constexpr long kGroupKeys = Product<T>::kSplit ? 128 : 256;
template <class T>
struct Workspace {
  using P = Product<T>;
  using Operand = typename P::Operand;

  long rows = round_up(P::kBlockRows, 16), sum_stride, key_panel, value_panel;
  Operand *keys, *values, *query, *weights;
  float *scores[2], *sums;
  // Per row, kLanes partial sums of the probabilities: as rounded to multiply the values, and as
  // they were before, for the backward and the returned probabilities.
  float *total, *exact;
  float* minus;  // per row: what is added to scores before the exponential
  float* bias;
  KeepBits* keep;       // per row: which of two panels of probabilities dropout keeps
  bool* known;          // per row: whether `minus` is set
  bool* plain;          // per row: done again, with the slower exponents()
  bool* broken;         // per row: done again, without pieces
  unsigned char* wild;  // per panel of keys: its values hold NaN or inf
  long bytes = 0;

  Workspace(const AttentionArgs& args, void* scratch)
      : sum_stride(round_up(args.value_size, kPanel) + 16),
        key_panel(P::panel_size(args.size)),
        value_panel(P::panel_size(round_up(args.keys, kPanel))) {
    const auto take = [&](auto*& place, long count) {
      void* at = scratch == nullptr ? nullptr : static_cast<char*>(scratch) + bytes;
      place = static_cast<decltype(+place)>(at);
      bytes += round_up(count * static_cast<long>(sizeof(*place)), 64);
    };
    take(keys, round_up(args.keys, kPanel) / kPanel * key_panel);
    take(values, round_up(args.value_size, kPanel) / kPanel * value_panel);
    take(query, P::block_size(rows, args.size));
    take(weights, P::block_size(rows, kGroupKeys<T>));
    take(scores[0], rows * kPanel);
    take(scores[1], rows * kPanel);
    take(sums, rows * sum_stride);
    take(total, rows * kLanes);
    if (P::kRounds && (args.shift != nullptr || args.weights != nullptr)) {
      take(exact, rows * kLanes);
    } else {
      exact = total;
    }
    take(minus, rows);
    take(bias, kPanel + 16);
    take(keep, rows);
    take(known, rows);
    take(plain, rows);
    take(broken, rows);
    take(wild, args.keys / kPanel + 1);
  }
};

// Where a panel's values hold NaN or inf or, in pieces, any number without.
template <class T>
void find_wild(const AttentionArgs& args, const T* value, long keys, unsigned char* wild) {
  for (long start = 0; start < keys; start += kPanel) {
    Vec sum = zero();
    for (long s = start; s < least(keys, start + kPanel); ++s) {
      const T* row = value + s * args.value_stride[2];
      for (long j = 0; j < args.value_size; j += kLanes) {
        const Vec x = load_some(row + j, args.value_size - j);
        sum = sum + (x - x);  // 0 for finite x, NaN for the others, and NaN stays
        if constexpr (Product<T>::kSplit)
          sum = select(Product<T>::is_lost(x), set1(kInf) - set1(kInf), sum);
      }
    }
    wild[start / kPanel] = any(not_a_number(sum));
  }
}

template <class T>
void pack(const AttentionArgs& args, const Workspace<T>& work, long b, long head, long keys) {
  using P = Product<T>;
  const T* k =
      static_cast<const T*>(args.key) + head_offset(args.key_starts, args.key_stride, b, head);
  for (long s = 0; s < keys; s += kPanel)
    P::pack_rows(k + s * args.key_stride[2], args.key_stride[2], least(kPanel, keys - s), args.size,
                 work.keys + s / kPanel * work.key_panel);
  const T* v =
      static_cast<const T*>(args.value) + head_offset(args.key_starts, args.value_stride, b, head);
  for (long j = 0; j < args.value_size; j += kPanel) {
    const long columns = least(kPanel, args.value_size - j);
    auto* panel = work.values + j / kPanel * work.value_panel;
    if constexpr (P::kSplit) {
      P::pack_clean_columns(v + j, args.value_stride[2], columns, keys, panel);
    } else {
      P::pack_columns(v + j, args.value_stride[2], columns, keys, panel);
    }
  }
  find_wild(args, v, keys, work.wild);
}

}  // namespace
}  // namespace tf::TF_ISA
