// What the backward operators around linear maps share.
#pragma once

#include "cpu/gemm/weight_gradient_host.h"
#include "cpu/ops/linear/linear_backward_few_kernel.h"
#include "cpu/ops/linear/linear_backward_kernel.h"
#include "cpu/ops/linear/linear_backward_split_kernel.h"
#include "cpu/ops/linear/linear_host.h"

namespace tf {

// W (n, k) in panels of its columns, so that run_linear() multiplies m rows by W instead of W^T,
// in shared scratch `slot`. With room for prefetching behind.
constexpr int64_t kColumnPackedTail = 1024;

inline Panels column_panels_of(const Tensor& weight, int slot, int64_t m) {
  const Rows w = as_rows(weight);
  const int64_t width = TF_DISPATCH(panel_columns, ), n = weight.size(0), k = weight.size(1);
  Panels panels;
#ifdef TF_HAVE_AMX
  if (packs_pieces(m)) {
    char* place =
        bytes_of(shared_scratch(slot), pieces::split_packed_bytes(k, n) + 4 * kColumnPackedTail);
    pieces::pack(w, k, n, true, place);
    panels.pieces = place;
    return panels;
  }
#endif
  float* place =
      shared_scratch(slot).floats(TF_DISPATCH(column_packed_size, n, k) + kColumnPackedTail);
  const int64_t grain = std::max<int64_t>(1, 32768 / (width * std::max<int64_t>(1, n)));
  torch::stable::parallel_for(0, (k + width - 1) / width, grain, [&](int64_t begin, int64_t end) {
    TF_DISPATCH(pack_column_panels, w.data, w.stride, n, k, place, begin, end);
  });
  panels.whole = place;
  return panels;
}

// Gradients of so many rows read everything where it lies: packing would take longer.
constexpr int64_t kFewRows = 48;

inline bool is_few_backward(const Tensor& weight, int64_t m) {
  return m <= kFewRows && (weight.size(1) <= 1 || weight.stride(1) == 1);
}

inline void run_few_input_gradient(const FewInputArgs& args) {
  const int64_t width = TF_DISPATCH(few_columns, );
  const int64_t grain = std::max<int64_t>(1, 32768 / (width * std::max<int64_t>(1, args.n)));
  torch::stable::parallel_for(
      0, (args.k + width - 1) / width, grain, [&](int64_t begin, int64_t end) {
        TF_DISPATCH(few_input_gradient, args, begin * width, std::min(args.k, end * width));
      });
}

// dX = dY W, dY (m, n) with rows grad_stride apart. W's rows are packed a part at a time where they
// are many, as a vocabulary's are: the parts' products are added up, and no part leaves the cache
// before it was used.
inline void run_input_gradient(const float* grad, int64_t grad_stride, const Tensor& weight,
                               int64_t m, float* grad_input, int slot) {
  constexpr int64_t kMost = 4096;
  const int64_t n = weight.size(0), k = weight.size(1);
  if (is_few_backward(weight, m)) {
    run_few_input_gradient({grad, static_cast<const float*>(weight.const_data_ptr()), grad_input, m,
                            n, k, grad_stride, weight.stride(0)});
    return;
  }
  const int64_t step = packs_pieces(m) ? kMost : n;
  for (int64_t begin = 0; begin < n; begin += step) {
    const int64_t depth = std::min(step, n - begin);
    Tensor part = weight;
    if (depth < n) part = torch::stable::narrow(part, 0, begin, depth);
    run_linear({grad + begin, nullptr, nullptr, begin > 0 ? grad_input : nullptr, grad_input, m,
                depth, k, grad_stride, k, k, 0},
               column_panels_of(part, slot, m));
  }
}

inline int64_t weight_gradient_part_rows(int64_t columns) {
  return weight_gradient_part(int64_t{4} << 20, columns);
}

// Shared scratch of X in pieces, which callers use for nothing else.
constexpr int kPiecesSlot = 5;

// One part of the rows: X into panels, in the shared scratch `slot`, unless it is there already
// (args.panels); then dW in blocks.
inline void run_weight_gradient_part(WeightGradientArgs args, int slot) {
  if (args.grad_bias != nullptr) {
    const int64_t grain = std::max<int64_t>(64, 32768 / std::max<int64_t>(1, args.m));
    torch::stable::parallel_for(0, args.n, grain, [&](int64_t begin, int64_t end) {
      TF_DISPATCH(bias_gradient, args, begin, end);
    });
  }
  if (args.grad_weight == nullptr || args.k == 0) return;
  if (args.m <= kFewRows && args.panels == nullptr && !args.accumulate && reads_x(args)) {
    const int64_t grain = std::max<int64_t>(6, 32768 / args.k);
    torch::stable::parallel_for(0, args.n, grain, [&](int64_t begin, int64_t end) {
      TF_DISPATCH(few_weight_gradient, args, begin, end);
    });
    return;
  }
  const bool by_pieces = goes_by_pieces(std::min(args.m, args.n));
  int64_t most_rows = TF_DISPATCH(weight_gradient_rows, );
  int64_t most_columns = TF_DISPATCH(weight_gradient_columns, );
  int64_t scratch = TF_DISPATCH(weight_gradient_scratch, args);
#ifdef TF_HAVE_AMX
  if (by_pieces) {
    most_rows = amx::split_weight_gradient_rows();
    most_columns = amx::split_weight_gradient_columns();
    scratch = std::max<int64_t>(scratch, amx::split_weight_gradient_scratch() / 4);
  }
#endif
  if (args.panels == nullptr && !(by_pieces && reads_x(args))) {
    args.panels = shared_scratch(slot).floats(TF_DISPATCH(weight_gradient_panels, args.m, args.k));
    const int64_t grain = std::max<int64_t>(1, 16384 / args.k);
    torch::stable::parallel_for(0, args.m, grain, [&](int64_t begin, int64_t end) {
      TF_DISPATCH(pack_x, args, begin, end, kernel_scratch().floats(scratch));
    });
  }
#ifdef TF_HAVE_AMX
  if (by_pieces) {
    void* place =
        bytes_of(shared_scratch(kPiecesSlot), amx::split_weight_gradient_x_bytes(args.m, args.k));
    const int64_t blocks = (args.m + kSplitBlock - 1) / kSplitBlock;
    torch::stable::parallel_for(
        0, blocks, std::max<int64_t>(1, 16384 / (kSplitBlock * args.k)),
        [&](int64_t begin, int64_t end) { amx::split_weight_gradient_x(args, place, begin, end); });
    args.pieces = place;
  }
#endif
  const int64_t width = TF_DISPATCH(panel_columns, );
  const auto block = [&](int64_t begin, int64_t end, int64_t from, int64_t to) {
#ifdef TF_HAVE_AMX
    if (by_pieces) {
      amx::split_weight_gradient(args, begin, end, from, to, kernel_scratch().floats(scratch));
      return;
    }
#endif
    TF_DISPATCH(weight_gradient_block, args, begin, end, from, to,
                kernel_scratch().floats(scratch));
  };
  for_each_weight_block(args.n, args.k, width, most_rows, most_columns, block);
}

// `slot`: the shared scratch for the panels.
inline void run_weight_gradient(const WeightGradientArgs& whole, int slot) {
  const int64_t most = weight_gradient_part_rows(whole.k);
  for (int64_t begin = 0; begin < whole.m; begin += most) {
    WeightGradientArgs part = whole;
    part.m = std::min<int64_t>(most, whole.m - begin);
    part.grad += begin * whole.grad_stride;
    part.x += begin * whole.x_stride;
    part.row = begin;
    part.accumulate = begin > 0;
    run_weight_gradient_part(part, slot);
  }
}

}  // namespace tf
