// What the operators for bfloat16 and float16 share around their kernels: checks, views as rows,
// panels of weights, threads.
#pragma once

#include "cpu/gemm/half_ops.h"
#include "cpu/ops/linear/linear_half_kernel.h"
#include "cpu/ops/linear/linear_host.h"

namespace tf::half {

inline void check_like(const char* op, const char* name, const Tensor& tensor,
                       const Tensor& input) {
  check_type(op, name, tensor, input.scalar_type(), "input");
}

// Rows of 16-bit elements.
struct HalfRows {
  Tensor owner;
  const void* data;
  int64_t stride;
};

inline HalfRows half_rows(const Tensor& tensor) {
  const Rows rows = as_rows(tensor);
  return {rows.owner, rows.data, rows.stride};
}

inline const void* data_of(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

inline void* data_of(Tensor* tensor) {
  return tensor == nullptr ? nullptr : tensor->mutable_data_ptr();
}

inline int64_t packed_bytes(const Tensor& weight) {
  return TF_DISPATCH(half_packed_bytes, element_of(weight), weight.size(0), weight.size(1));
}

inline uint16_t packed_layout(const Tensor& weight) {
  return static_cast<uint16_t>(TF_DISPATCH(half_packed_layout, element_of(weight)));
}

inline void pack(const Tensor& weight, void* place) {
  const HalfRows w = half_rows(weight);
  const int64_t n = weight.size(0), k = weight.size(1), width = TF_DISPATCH(half_panel_columns, );
  torch::stable::parallel_for(0, (n + width - 1) / width,
                              std::max<int64_t>(1, 32768 / (width * std::max<int64_t>(1, k))),
                              [&](int64_t begin, int64_t end) {
                                TF_DISPATCH(half_pack_panels, element_of(weight), w.data, w.stride,
                                            n, k, place, begin, end);
                              });
}

// The panels of a weight: those given, if they are a packed copy of it that this instruction set
// reads, else packed now into the calling thread's shared scratch.
inline const void* panels_of(const Tensor& weight, const std::optional<Tensor>& packed, int slot) {
  const int64_t bytes = packed_bytes(weight);
  if (packed && packed->is_cpu() && packed->scalar_type() == weight.scalar_type() &&
      packed->is_contiguous() && packed->numel() == bytes / 2 + kPackedTail) {
    const auto* data = static_cast<const uint16_t*>(packed->const_data_ptr());
    if (data[packed->numel() - 1] == packed_layout(weight)) return data;
  }
  void* place = bytes_of(shared_scratch(slot), bytes + 2 * kPackedTail);
  pack(weight, place);
  return place;
}

// Splits rows between threads where there are many, else panels.
inline void run_linear(const TypedLinearArgs& args) {
  const int64_t width = TF_DISPATCH(half_panel_columns, );
  const int64_t panels = (args.n + width - 1) / width;
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t most = TF_DISPATCH(half_linear_row_block, args);
  int64_t row_items = (args.m + most - 1) / most, column_items = 1;
  if (args.m >= 64 * threads) {
    row_items = (row_items + threads - 1) / threads * threads;
  } else {
    column_items = std::min<int64_t>(panels, 2 * threads);
  }
  const int64_t scratch = TF_DISPATCH(half_linear_scratch, args);
  for_each_item(row_items * column_items, [&](int64_t item) {
    const int64_t row = item / column_items, column = item % column_items;
    TF_DISPATCH(half_linear_block, args, args.m * row / row_items, args.m * (row + 1) / row_items,
                panels * column / column_items, panels * (column + 1) / column_items,
                bytes_of(kernel_scratch(), scratch));
  });
}

// Whether a product of m rows reads the weight as it is.
inline bool is_direct(const Tensor& weight, const std::optional<Tensor>& packed, int64_t m) {
  return !packed && m <= direct_rows(element_of(weight), weight.numel()) &&
         (weight.size(1) <= 1 || weight.stride(1) == 1);
}

// By rows of W from `row` on, as they are.
inline void run_direct_linear(TypedLinearArgs args, const Tensor& weight, int64_t row) {
  const int64_t width = TF_DISPATCH(half_panel_columns, ), stride = weight.stride(0);
  args.weight = static_cast<const uint16_t*>(weight.const_data_ptr()) + row * stride;
  args.weight_stride = stride;
  const int64_t grain = std::max<int64_t>(1, 32768 / (width * std::max<int64_t>(1, args.k)));
  torch::stable::parallel_for(
      0, (args.n + width - 1) / width, grain,
      [&](int64_t begin, int64_t end) { TF_DISPATCH(half_linear_direct, args, begin, end); });
}

// Whether a weight that is packed for this call only is packed panel by panel by those who multiply
// by them: each thread needs all rows then, and a panel has to stay in its cache.
inline bool packs_by_panel(const TypedLinearArgs& args) {
  constexpr int64_t kMostDepth = 4096, kLeastPanels = 4;
  const int64_t width = TF_DISPATCH(half_panel_columns, );
  return args.m > 0 && args.k > 0 && args.k <= kMostDepth &&
         args.n >= kLeastPanels * width * torch::stable::get_num_threads() &&
         args.m <= TF_DISPATCH(half_linear_row_block, args);
}

inline void run_packing_linear(const TypedLinearArgs& args) {
  const int64_t width = TF_DISPATCH(half_panel_columns, );
  const int64_t scratch = TF_DISPATCH(half_linear_packing_scratch, args);
  for_each_after((args.n + width - 1) / width,
                 [&] { TF_DISPATCH(half_linear_fill, args, bytes_of(kernel_scratch(), scratch)); },
                 [&](int64_t panel) {
                   TF_DISPATCH(half_linear_packing, args, panel, panel + 1,
                               bytes_of(kernel_scratch(), scratch));
                 });
}

// With the weight as it is, packed before, or packed now into shared scratch `slot`.
inline void run_linear(TypedLinearArgs args, const Tensor& weight,
                       const std::optional<Tensor>& packed, int slot) {
  if (is_direct(weight, packed, args.m)) return run_direct_linear(args, weight, 0);
  if (!packed && packs_by_panel(args)) {
    const HalfRows rows = half_rows(weight);
    args.weight = rows.data;
    args.weight_stride = rows.stride;
    return run_packing_linear(args);
  }
  args.packed = panels_of(weight, packed, slot);
  run_linear(args);
}

// Calls f(begin, end) for blocks of m rows, at most `tall` high but for one row, as many as threads
// or a multiple; begin is even.
template <class F>
void for_each_row_block(int64_t m, int64_t tall, const F& f) {
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t blocks = ((m + tall - 1) / tall + threads - 1) / threads * threads;
  const auto row_of = [&](int64_t block) {
    return block == blocks ? m : m * block / blocks / 2 * 2;
  };
  for_each_item(blocks, [&](int64_t block) {
    if (row_of(block) < row_of(block + 1)) f(row_of(block), row_of(block + 1));
  });
}

}  // namespace tf::half
