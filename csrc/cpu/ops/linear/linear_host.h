// What the operators around linear maps share.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/core/host.h"
#include "cpu/gemm/split_host.h"
#include "cpu/ops/linear/linear_kernel.h"

namespace tf {

// More than any machine has memory for; views that repeat elements may have more.
constexpr int64_t kMostElements = int64_t{1} << 56;

inline void check_weight(const char* op, const char* name, const Tensor& weight, int64_t columns,
                         const std::optional<Tensor>& bias, ScalarType type = ScalarType::Float) {
  check_type(op, name, weight, type, "input");
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(1) == columns, op, ": ", name, " must be (out, ",
                  columns, ")");
  // So that sizes which are rounded up to whole panels are numbers, too.
  STD_TORCH_CHECK(weight.numel() <= kMostElements, op, ": ", name, " is too large");
  if (bias) {
    check_type(op, "bias", *bias, type, "input");
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), op,
                    ": bias must have one value per row of ", name);
  }
}

// Floats behind the panels of a packed weight: room for prefetching, and at the very end the width
// of a panel, which tells whether the instruction set in use can read it.
constexpr int64_t kPackedTail = 64;

inline void pack(const Tensor& weight, float* place) {
  const Rows w = as_rows(weight);
  const int64_t width = TF_DISPATCH(panel_columns, );
  const int64_t panels = (weight.size(0) + width - 1) / width;
  torch::stable::parallel_for(
      0, panels, std::max<int64_t>(1, 32768 / (width * std::max<int64_t>(1, w.columns))),
      [&](int64_t begin, int64_t end) {
        TF_DISPATCH(pack_panels, w.data, w.stride, weight.size(0), w.columns, place, begin, end);
      });
}

// A weight packed for products: in panels of fp32, or of pieces (split_host.h).
struct Panels {
  const float* whole = nullptr;
  const void* pieces = nullptr;

  // From row `row` of W (n, k) on, which begins a panel.
  Panels from(int64_t row, int64_t k) const {
    Panels rest;
    if (whole != nullptr) rest.whole = whole + row * k;
#ifdef TF_HAVE_AMX
    if (pieces != nullptr)
      rest.pieces = static_cast<const char*>(pieces) + pieces::split_packed_bytes(row, k);
#endif
    return rest;
  }
};

// A packed copy is a tensor of floats, or, in pieces, of bfloat16; its type and size, and the width
// of a panel at its end, tell whether the instruction set in use can read it. That it is a copy of
// what the weight is now, the caller has made sure of (Fingerprint).
inline Panels given_panels(const Tensor& weight, const Tensor& packed) {
  const int64_t n = weight.size(0), k = weight.size(1);
  Panels panels;
  if (!packed.is_cpu() || !packed.is_contiguous()) return panels;
  const int64_t size = packed.numel();
  if (packed.scalar_type() == ScalarType::Float &&
      size == TF_DISPATCH(packed_size, n, k) + kPackedTail) {
    const float* data = static_cast<const float*>(packed.const_data_ptr());
    if (data[size - 1] == static_cast<float>(TF_DISPATCH(panel_columns, ))) panels.whole = data;
  }
#ifdef TF_HAVE_AMX
  if (packed.scalar_type() == ScalarType::BFloat16 && current_isa() == Isa::amx &&
      size == pieces::split_packed_bytes(n, k) / 2 + kPackedTail)
    panels.pieces = packed.const_data_ptr();
#endif
  return panels;
}

// The panels of a weight for products of m rows: those given, if they are a packed copy of it that
// can be read, else packed now into the calling thread's shared scratch.
inline Panels panels_of(const Tensor& weight, const std::optional<Tensor>& packed, int slot,
                        int64_t m) {
  Panels panels = packed ? given_panels(weight, *packed) : Panels{};
  if (panels.whole != nullptr || panels.pieces != nullptr) return panels;
  const int64_t n = weight.size(0), k = weight.size(1);
#ifdef TF_HAVE_AMX
  if (packs_pieces(m)) {
    char* place =
        bytes_of(shared_scratch(slot), pieces::split_packed_bytes(n, k) + 2 * kPackedTail);
    pieces::pack(as_rows(weight), n, k, false, place);
    panels.pieces = place;
    return panels;
  }
#endif
  float* place = shared_scratch(slot).floats(TF_DISPATCH(packed_size, n, k) + kPackedTail);
  pack(weight, place);
  panels.whole = place;
  return panels;
}

// Packed copies to keep, for given_panels().
inline Tensor pack_whole(const Tensor& weight) {
  const int64_t size = TF_DISPATCH(packed_size, weight.size(0), weight.size(1)) + kPackedTail;
  Tensor packed = fresh_weight(weight, size);
  float* place = static_cast<float*>(packed.mutable_data_ptr());
  if (weight.numel() > 0) pack(weight, place);
  for (int64_t i = size - kPackedTail; i < size; ++i) place[i] = 0.0f;
  place[size - 1] = static_cast<float>(TF_DISPATCH(panel_columns, ));
  return packed;
}

inline Tensor pack_pieces([[maybe_unused]] const Tensor& weight) {
#ifdef TF_HAVE_AMX
  const int64_t n = weight.size(0), k = weight.size(1);
  const int64_t size = pieces::split_packed_bytes(n, k) / 2 + kPackedTail;
  Tensor packed = fresh_weight(weight, size, true);
  auto* place = static_cast<uint16_t*>(packed.mutable_data_ptr());
  if (weight.numel() > 0) pieces::pack(as_rows(weight), n, k, false, place);
  std::fill(place + size - kPackedTail, place + size, uint16_t{0});
  return packed;
#else
  STD_TORCH_CHECK(false, "pack_weight: not built for products by pieces");
#endif
}

// Whether a product of m rows reads the weight as it is, because packing it first would take
// longer. No packed copy is kept for so few rows, so a result does not depend on whether one is.
inline bool is_direct(const Tensor& weight, const std::optional<Tensor>& packed, int64_t m) {
  return !packed && m <= direct_rows(Element::float32, weight.numel()) &&
         (weight.size(1) <= 1 || weight.stride(1) == 1);
}

// Splits rows between threads where there are many, else panels.
inline void run_linear(const LinearArgs& args) {
  if (args.m == 0) return;
  const int64_t width = TF_DISPATCH(panel_columns, );
  const int64_t panels = (args.n + width - 1) / width;
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t scratch = TF_DISPATCH(linear_scratch, args);
  const bool many = args.m >= 56 * threads;
  if (!many && TF_DISPATCH(linear_is_one_block, args)) {
    for_each_after(
        panels, [&] { TF_DISPATCH(linear_turn, args, kernel_scratch().floats(scratch)); },
        [&](int64_t panel) {
          TF_DISPATCH(linear_panels, args, panel, panel + 1, kernel_scratch().floats(scratch));
        });
    return;
  }
  constexpr int64_t kRows = 112;
  int64_t row_items = (args.m + kRows - 1) / kRows;
  row_items = (row_items + threads - 1) / threads * threads;
  const int64_t column_items =
      many ? 1 : std::min<int64_t>(panels, std::max<int64_t>(1, 2 * threads));
  if (column_items > 1 || args.m < kRows) row_items = std::max<int64_t>(1, args.m / kRows);
  for_each_item(row_items * column_items, [&](int64_t item) {
    const int64_t row = item / column_items, column = item % column_items;
    TF_DISPATCH(linear_block, args, args.m * row / row_items, args.m * (row + 1) / row_items,
                panels * column / column_items, panels * (column + 1) / column_items,
                kernel_scratch().floats(scratch));
  });
}

// By a weight that is packed for this call only, panel by panel, for which all rows are one block.
inline void run_packing_linear(LinearArgs args, const Tensor& weight) {
  const Rows w = as_rows(weight);
  args.weight = w.data;
  args.weight_stride = w.stride;
  const int64_t width = TF_DISPATCH(panel_columns, );
  const int64_t scratch = TF_DISPATCH(linear_packing_scratch, args);
  for_each_after((args.n + width - 1) / width,
                 [&] { TF_DISPATCH(linear_turn, args, kernel_scratch().floats(scratch)); },
                 [&](int64_t panel) {
                   TF_DISPATCH(linear_packing, args, panel, panel + 1,
                               kernel_scratch().floats(scratch));
                 });
}

// By rows of W from `row` on, as they are.
inline void run_direct_linear(LinearArgs args, const Tensor& weight, int64_t row) {
  args.weight = static_cast<const float*>(weight.const_data_ptr()) + row * weight.stride(0);
  args.weight_stride = weight.stride(0);
  const int64_t grain = std::max<int64_t>(16, 32768 / std::max<int64_t>(1, args.k));
  torch::stable::parallel_for(0, args.n, grain, [&](int64_t begin, int64_t end) {
    TF_DISPATCH(linear_direct, args, begin, end);
  });
}

inline void run_linear(LinearArgs args, const Panels& panels) {
#ifdef TF_HAVE_AMX
  if (panels.pieces != nullptr) return pieces::run_linear(pieces::typed(args, panels.pieces));
  constexpr int64_t kDeepest = 16384;  // each thread keeps all rows, split
  if (splits_panels(args.m) && args.k > 0 && args.k <= kDeepest)
    return pieces::run_few_linear(pieces::typed(args, panels.whole));
#endif
  args.packed = panels.whole;
  run_linear(args);
}

// The same with the weight as it is, packed before, or packed now into shared scratch `slot`.
inline void run_linear(LinearArgs args, const Tensor& weight, const std::optional<Tensor>& packed,
                       int slot) {
  if (args.m == 0) return;
  if (is_direct(weight, packed, args.m)) return run_direct_linear(args, weight, 0);
  const bool by_pieces = packs_pieces(args.m) || splits_panels(args.m);
  if (!packed && !by_pieces && args.k > 0 && TF_DISPATCH(linear_is_one_block, args))
    return run_packing_linear(args, weight);
  // Other weights that are packed for this call only are packed a part at a time where they are
  // large.
  constexpr int64_t kMost = 4096;
  const bool parts = !packed && by_pieces && args.preactivation == nullptr;
  const int64_t n = args.n, step = parts ? kMost : n;
  for (int64_t begin = 0; begin < n; begin += step) {
    LinearArgs part = args;
    part.n = std::min(step, n - begin);
    part.y += begin;
    if (args.bias != nullptr) part.bias += begin;
    if (args.residual != nullptr) part.residual += begin;
    Tensor rows = weight;
    if (part.n < n) rows = torch::stable::narrow(rows, 0, begin, part.n);
    run_linear(part, panels_of(rows, packed, slot, args.m));
  }
}

inline int64_t row_count(const Tensor& input) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < input.dim(); ++d) rows *= input.size(d);
  return rows;
}

}  // namespace tf
