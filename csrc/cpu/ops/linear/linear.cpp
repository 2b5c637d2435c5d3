// Operators of the linear layer, and weight packing.
#include "cpu/ops/linear/linear.h"

#include <tuple>

#include "cpu/core/host.h"
#include "cpu/ops/linear/linear_host.h"
#include "kernel_table.h"

namespace tf {

void check_weight(const char* op, const char* name, const Tensor& weight, int64_t columns,
                  const std::optional<Tensor>& bias, ScalarType type) {
  check_type(op, name, weight, type, "input");
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(1) == columns, op, ": ", name, " must be (out, ",
                  columns, ")");
  // So that sizes rounded up to whole panels do not overflow.
  STD_TORCH_CHECK(weight.numel() <= kMaxElements, op, ": ", name, " is too large");
  if (bias) {
    check_type(op, "bias", *bias, type, "input");
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), op,
                    ": bias must have one value per row of ", name);
  }
}

namespace {

constexpr int64_t kPrefetchBytes = 4096;  // padding behind panels in scratch, for prefetching

// Packs W (n, k) into panels; if transposed, W^T, given W (k, n).
void pack(const LinearKernels& kernels, const Matrix& weight, bool transposed, void* place) {
  const Matrix w = weight.adjacent();
  const int64_t n = transposed ? w.columns : w.rows, k = transposed ? w.rows : w.columns;
  const auto run = transposed ? kernels.pack_transposed : kernels.pack;
  const bool by_rows = transposed && kernels.pack_transposed_rows > 0;
  const int64_t unit = by_rows ? kernels.pack_transposed_rows : kernels.panel;
  const int64_t along = by_rows ? k : n, across = by_rows ? n : k;
  parallel_for(0, (along + unit - 1) / unit,
               std::max<int64_t>(1, 32768 / (unit * std::max<int64_t>(1, across))),
               [&](int64_t begin, int64_t end) { run(w.data, w.stride, n, k, place, begin, end); });
}

// Elements behind the panels of a packed copy: padding for prefetching, with the layout id in the
// last two bytes.
constexpr int64_t kPackedTail = 64;

const uint16_t* layout_of(const Tensor& packed) {
  const int64_t bytes = packed.numel() * static_cast<int64_t>(packed.element_size());
  return static_cast<const uint16_t*>(packed.const_data_ptr()) + bytes / 2 - 1;
}

}  // namespace

Panels pack_now(const LinearKernels& kernels, const Matrix& weight, bool transposed, int slot) {
  const int64_t bytes = transposed ? kernels.packed_bytes(weight.columns, weight.rows)
                                   : kernels.packed_bytes(weight.rows, weight.columns);
  void* place = bytes_of(shared_scratch(slot), bytes + kPrefetchBytes);
  pack(kernels, weight, transposed, place);
  return {&kernels, place};
}

const void* panels_in(const LinearKernels& kernels, const Matrix& weight, const Tensor& packed) {
  const int64_t bytes = kernels.packed_bytes(weight.rows, weight.columns);
  const bool fits =
      packed.is_cpu() && packed.is_contiguous() &&
      packed.numel() == bytes / static_cast<int64_t>(packed.element_size()) + kPackedTail;
  return fits && *layout_of(packed) == kernels.layout ? packed.const_data_ptr() : nullptr;
}

Tensor pack_copy(const LinearKernels& kernels, const Tensor& weight) {
  const bool bf16x3 = weight.scalar_type() == ScalarType::Float && !kernels.in_fp32;
  const int64_t element = bf16x3 ? 2 : static_cast<int64_t>(weight.element_size());
  const int64_t bytes = kernels.packed_bytes(weight.size(0), weight.size(1));
  Tensor packed = empty_packed_weight(weight, bytes / element + kPackedTail, bf16x3);
  char* place = static_cast<char*>(packed.mutable_data_ptr());
  pack(kernels, weight, false, place);
  std::memset(place + bytes, 0, static_cast<size_t>(kPackedTail * element));
  *const_cast<uint16_t*>(layout_of(packed)) = kernels.layout;
  return packed;
}

namespace {

// Whether strips of unpacked operands have kernels: they need 32 registers. Limits were measured.
bool has_strips(Element type) {
  const Isa isa = current_isa();
  return type == Element::float32 && isa != Isa::amx && isa_extends(isa, Isa::avx512);
}

// Whether a gradient of m rows reads operands in place; `is_small`: also with more than 128 rows.
bool in_place(Element type, int64_t m, bool is_small) {
  return (type == Element::float32 && m <= 48) || (has_strips(type) && (m <= 128 || is_small));
}

// Returns the kernels for products of m rows.
const LinearKernels& kernels_for(Element type, [[maybe_unused]] int64_t m) {
  if (type != Element::float32)
    return *TF_DISPATCH_TO(product_isa(type), lowp_linear_kernels, type);
#if TF_HAVE_AMX
  if (packs_bf16x3(m)) return *amx::bf16x3_linear_kernels();
#endif
  return *TF_DISPATCH(linear_kernels, );
}

// A packed copy has the weight's dtype, or bfloat16 for bf16x3 of fp32. The dtype, the size and the
// layout id determine whether the instruction set in use can read it.
Panels given_panels(const Matrix& weight, const Tensor& packed) {
  const LinearKernels* kernels = nullptr;
  const bool same_size = static_cast<Index>(packed.element_size()) == element_bytes(weight.type);
  if (same_size && element_of(packed) == weight.type) kernels = &kernels_for(weight.type, 0);
#if TF_HAVE_AMX
  else if (weight.type == Element::float32 && packed.scalar_type() == ScalarType::BFloat16 &&
           current_isa() == Isa::amx)
    kernels = amx::bf16x3_linear_kernels();
#endif
  const void* panels = kernels != nullptr ? panels_in(*kernels, weight, packed) : nullptr;
  return panels != nullptr ? Panels{kernels, panels} : Panels{};
}

// Packs a weight for products of `rows` rows.
Tensor pack_weight(Tensor weight, int64_t rows) {
  if (weight.scalar_type() == ScalarType::Char) return pack_int8_weight(weight);
  checked_float_type("pack_weight", "weight", weight);
  STD_TORCH_CHECK(weight.dim() == 2, "pack_weight: weight must be a matrix");
  return pack_copy(kernels_for(element_of(weight), rows), weight);
}

// Whether each thread multiplies all rows by some panels at a time.
bool runs_by_panel(const LinearKernels& kernels, const LinearArgs& args) {
  return args.k > 0 && args.k <= kernels.max_depth &&
         args.n >= kernels.min_panels * kernels.panel * torch::stable::get_num_threads() &&
         args.m <= kernels.panels_rows(args);
}

// The strategy of a product, and the sizes of its items.
struct LinearPlan {
  enum Strategy {
    direct,    // reads the unpacked weight once, for few rows
    strips,    // packs one strip of the weight at a time, for more rows
    by_panel,  // each thread multiplies all rows by some panels at a time
    blocks,    // each item is a block of rows times some panels
    parts,     // packs the weight, a part of its rows at a time; each part has a plan of its own
  } strategy;
  const LinearKernels* kernels;
  int64_t row_items = 1, column_items = 1;  // for `blocks`
  int64_t part = 0;                         // for `parts`: rows of the weight in each
};

// With panels in the layout of `kernels`: divides among threads the rows if there are many, else
// the panels. The thresholds were measured.
LinearPlan choose_linear(const LinearArgs& args, const LinearKernels& kernels) {
  LinearPlan plan{LinearPlan::blocks, &kernels};
  const int64_t count = (args.n + kernels.panel - 1) / kernels.panel;
  const int64_t threads = torch::stable::get_num_threads();
  if (!kernels.in_fp32) {
    const int64_t max_rows = kernels.row_block(args);
    plan.row_items = (args.m + max_rows - 1) / max_rows;
    if (args.m >= 64 * threads) {
      plan.row_items = (plan.row_items + threads - 1) / threads * threads;
    } else if (kernels.quantizes && runs_by_panel(kernels, args)) {
      plan.strategy = LinearPlan::by_panel;  // each thread quantises x once
    } else {
      plan.column_items = std::min<int64_t>(count, 2 * threads);
    }
    return plan;
  }
  constexpr int64_t kMaxDepth = 16384;  // each thread holds all rows as bf16x3
  if (splits_panels(args.m) && args.k > 0 && args.k <= kMaxDepth) {
#if TF_HAVE_AMX
    plan.kernels = amx::bf16x3_small_m_linear_kernels();
#endif
    // Each item splits x into bf16x3, so there are more items than threads only if they are long.
    constexpr int64_t kPanels = 32;
    plan.column_items = std::min(count, std::max(threads, std::min(4 * threads, count / kPanels)));
    return plan;
  }
  constexpr int64_t kRows = 112;
  const bool large_m = args.m >= 56 * threads;
  if (!large_m && runs_by_panel(kernels, args)) plan.strategy = LinearPlan::by_panel;
  if (!large_m) plan.column_items = std::min<int64_t>(count, std::max<int64_t>(1, 2 * threads));
  if (plan.column_items > 1 || args.m < kRows) {
    plan.row_items = std::max<int64_t>(1, args.m / kRows);
  } else {
    plan.row_items = ((args.m + kRows - 1) / kRows + threads - 1) / threads * threads;
  }
  return plan;
}

// The plan for products with an unpacked weight, or with an existing packed copy.
LinearPlan choose_linear(const LinearArgs& args, const Matrix& weight,
                         const std::optional<Tensor>& packed) {
  const LinearKernels& kernels = kernels_for(args.type, args.m);
  if (is_direct(weight, args.m)) return {LinearPlan::direct, &kernels};
  if (packed) return {.strategy = LinearPlan::parts, .kernels = &kernels, .part = args.n};
  if (weight.is_adjacent && args.k > 0 && args.n >= TF_DISPATCH(small_m_columns, ) &&
      reads_strips(args.type, args.m))
    return {LinearPlan::strips, &kernels};
  const bool bf16x3 =
      args.type == Element::float32 && (packs_bf16x3(args.m) || splits_panels(args.m));
  if (!bf16x3 && runs_by_panel(kernels, args)) return {LinearPlan::by_panel, &kernels};
  return {.strategy = LinearPlan::parts,
          .kernels = &kernels,
          .part = bf16x3 && args.preactivation == nullptr ? kPartRows : args.n};
}

// The plan for products with unpacked W instead of W^T. `parts` divide the sum over the rows of W.
LinearPlan choose_input_gradient(const LinearArgs& args, const Matrix& weight) {
  const LinearKernels& kernels = kernels_for(args.type, args.m);
  if (weight.is_adjacent && is_direct_backward(weight.type, args.m, weight.rows, weight.columns))
    return {LinearPlan::direct, &kernels};
  if (!kernels.in_fp32 && runs_by_panel(kernels, args)) return {LinearPlan::by_panel, &kernels};
  return {.strategy = LinearPlan::parts,
          .kernels = &kernels,
          .part = args.type == Element::float32 ? kPartRows : args.k};
}

// Divides the panels into items of one size, as many for each thread.
void run_panels(const LinearKernels& kernels, const LinearArgs& args) {
  const int64_t scratch = kernels.panels_scratch(args), threads = torch::stable::get_num_threads();
  const auto place = [&] { return bytes_of(kernel_scratch(), scratch); };
  const int64_t together = args.packed == nullptr && args.transposed ? kernels.together : 1;
  const int64_t count = (args.n + kernels.panel - 1) / kernels.panel;
  const int64_t least = (count + together * threads - 1) / (together * threads) * threads;
  const int64_t items = std::min(count, least);
  for_each_item_with_init(
      items, [&] { kernels.fill(args, place()); },
      [&](int64_t item) {
        kernels.panels(args, count * item / items, count * (item + 1) / items, place());
      });
}

// The same with a weight that is packed for this call only.
void run_panels(const LinearKernels& kernels, LinearArgs args, const Matrix& weight) {
  const Matrix w = weight.adjacent();
  args.weight = w.data;
  args.weight_stride = w.stride;
  run_panels(kernels, args);
}

}  // namespace

Panels panels_of(const Matrix& weight, const std::optional<Tensor>& packed, int slot, int64_t m) {
  const Panels panels = packed ? given_panels(weight, *packed) : Panels{};
  return panels.data != nullptr ? panels
                                : pack_now(kernels_for(weight.type, m), weight, false, slot);
}

Panels column_panels_of(const Matrix& weight, int slot, int64_t m) {
  return pack_now(kernels_for(weight.type, m), weight, true, slot);
}

const LinearKernels* kernels_of(const Matrix& weight, const std::optional<Tensor>& packed,
                                int64_t m) {
  const Panels panels = packed ? given_panels(weight, *packed) : Panels{};
  return panels.kernels != nullptr ? panels.kernels : &kernels_for(weight.type, m);
}

bool is_direct(const Matrix& weight, int64_t m) {
  return m <= direct_rows(weight.type, weight.numel()) && weight.is_adjacent;
}

void run_direct_linear(LinearArgs args, const Matrix& weight, int64_t row) {
  const LinearKernels& kernels = kernels_for(args.type, 0);
  args.weight_stride = weight.stride;
  args.weight = offset_ptr(weight.data, args.type, row * args.weight_stride);
  const int64_t unit = kernels.direct_unit;
  const int64_t grain = std::max<int64_t>(16 / unit, 32768 / (unit * std::max<int64_t>(1, args.k)));
  parallel_for(0, (args.n + unit - 1) / unit, std::max<int64_t>(1, grain),
               [&](int64_t begin, int64_t end) {
                 kernels.direct(args, begin * unit, std::min<int64_t>(args.n, end * unit));
               });
}

namespace {

// The time to multiply m rows by one weight, in multiply-adds of a large product. Below 8 rows the
// time to read the weight dominates.
int64_t cost_of_weight(int64_t m) { return std::max<int64_t>(8, m); }

constexpr int64_t kLeastCost = 1 << 19;  // least work of a thread: starting one takes as long

// Calls f(row, rows, column) for blocks of rows of each strip of small_m_columns() columns of a
// product (m, k) x (k, n).
template <class F>
void for_each_strip(int64_t m, int64_t n, int64_t k, const F& f) {
  constexpr int64_t kMostRows = 512, kFewRows = 48;
  const int64_t width = TF_DISPATCH(small_m_columns, );
  const int64_t strips = (n + width - 1) / width;
  // At least two items for each thread, but blocks have some 48 rows or more.
  const int64_t wanted = (2 * torch::stable::get_num_threads() - 1) / std::max<int64_t>(1, strips);
  const int64_t blocks = std::max<int64_t>(
      {1, (m + kMostRows - 1) / kMostRows, std::min(wanted + 1, (m + kFewRows - 1) / kFewRows)});
  const int64_t cost = width * std::max<int64_t>(1, k) * cost_of_weight(m / blocks);
  parallel_for(0, strips * blocks, std::max<int64_t>(1, kLeastCost / cost),
               [&](int64_t begin, int64_t end) {
                 for (int64_t item = begin; item < end; ++item) {
                   const int64_t block = item / strips, row = m * block / blocks;
                   f(row, m * (block + 1) / blocks - row, item % strips * width);
                 }
               });
}

void run_strips(LinearArgs args, const Matrix& weight) {
  args.weight = weight.data;
  args.weight_stride = weight.stride;
  for_each_strip(args.m, args.n, args.k, [&](int64_t row, int64_t rows, int64_t column) {
    TF_DISPATCH(linear_strip, args, row, rows, column,
                kernel_scratch().floats(TF_DISPATCH(linear_strip_floats, rows)));
  });
}

}  // namespace

void run_linear(LinearArgs args, const Panels& panels) {
  if (args.m == 0) return;
  args.packed = panels.data;
  const LinearPlan plan = choose_linear(args, *panels.kernels);
  const LinearKernels& kernels = *plan.kernels;
  if (plan.strategy == LinearPlan::by_panel) return run_panels(kernels, args);
  const int64_t count = (args.n + kernels.panel - 1) / kernels.panel;
  const int64_t scratch = kernels.scratch(args);
  for_each_item(plan.row_items * plan.column_items, [&](int64_t item) {
    const int64_t row = item / plan.column_items, column = item % plan.column_items;
    const int64_t begin = row_of_part(args.m, row, plan.row_items, kernels.row_unit);
    const int64_t end = row_of_part(args.m, row + 1, plan.row_items, kernels.row_unit);
    if (begin == end) return;
    kernels.block(args, begin, end, count * column / plan.column_items,
                  count * (column + 1) / plan.column_items, bytes_of(kernel_scratch(), scratch));
  });
}

void run_linear(LinearArgs args, const Matrix& weight, const std::optional<Tensor>& packed,
                int slot) {
  if (args.m == 0) return;
  const LinearPlan plan = choose_linear(args, weight, packed);
  if (plan.strategy == LinearPlan::direct) return run_direct_linear(args, weight, 0);
  if (plan.strategy == LinearPlan::strips) return run_strips(args, weight);
  if (plan.strategy == LinearPlan::by_panel) return run_panels(*plan.kernels, args, weight);
  const int64_t n = args.n;
  for (int64_t begin = 0; begin < n; begin += plan.part) {
    LinearArgs part = args;
    part.n = std::min(plan.part, n - begin);
    part.y = offset_ptr(part.y, part.type, begin);
    part.bias = offset_ptr(part.bias, part.type, begin);
    part.residual = offset_ptr(part.residual, part.type, begin);
    run_linear(part, panels_of(weight.part(begin, part.n), packed, slot, args.m));
  }
}

bool reads_strips(Element type, int64_t m) { return m <= 512 && has_strips(type); }

bool is_direct_backward(Element type, int64_t m, int64_t n, int64_t k) {
  return in_place(type, m, m * n * k <= (m <= 256 ? 1 << 28 : 1 << 27));
}

namespace {

void run_small_m_input_gradient(const SmallMInputArgs& args) {
  for_each_strip(args.m, args.k, args.n, [&](int64_t row, int64_t rows, int64_t column) {
    SmallMInputArgs part = args;
    part.grad += row * args.grad_stride;
    part.grad_input += row * args.k;
    part.m = rows;
    const int64_t width = TF_DISPATCH(small_m_columns, );
    TF_DISPATCH(small_m_input_gradient, part, column, std::min<int64_t>(args.k, column + width),
                kernel_scratch().floats(rows, width));
  });
}

}  // namespace

void run_input_gradient(const void* grad, int64_t grad_stride, const Matrix& weight, int64_t m,
                        void* grad_input, int slot) {
  const int64_t n = weight.rows, k = weight.columns;
  const Element type = weight.type;
  LinearArgs args{type, grad, nullptr, nullptr, nullptr, grad_input, m, n, k, grad_stride, k, k, 0};
  args.transposed = true;
  const LinearPlan plan = choose_input_gradient(args, weight);
  if (plan.strategy == LinearPlan::direct)
    return run_small_m_input_gradient(
        {static_cast<const float*>(grad), static_cast<const float*>(weight.data),
         static_cast<float*>(grad_input), m, n, k, grad_stride, weight.stride});
  if (plan.strategy == LinearPlan::by_panel) return run_panels(*plan.kernels, args, weight);
  // The products of the parts are added up.
  for (int64_t begin = 0; begin < n; begin += plan.part) {
    args.k = std::min(plan.part, n - begin);
    args.x = offset_ptr(grad, type, begin);
    if (begin > 0) args.residual = grad_input;
    run_linear(args, column_panels_of(weight.part(begin, args.k), slot, m));
  }
}

namespace {

// A multiple of the K block, so that splitting into parts hardly affects the result.
constexpr int64_t kPartMultiple = 512;

const WeightGradientKernels* weight_gradient_kernels_for(Element type) {
  return type == Element::float32
             ? TF_DISPATCH(weight_gradient_kernels, )
             : TF_DISPATCH_TO(product_isa(type), lowp_weight_gradient_kernels, type);
}

void* room_for(const WeightGradientKernels& kernels, int64_t m, int64_t k, int slot) {
  return bytes_of(shared_scratch(slot), kernels.packed_bytes(m, k) + kPrefetchBytes);
}

// Calls f(row_begin, row_end, column_begin, column_end) for blocks of dW that start at multiples of
// `width` columns. The partition does not affect the result.
template <class F>
void for_each_weight_block(const WeightGradientKernels& kernels, int64_t n, int64_t k,
                           int64_t width, const F& f) {
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t panels = (k + width - 1) / width;
  const int64_t columns = (k + kernels.columns - 1) / kernels.columns;
  int64_t rows = (n + kernels.rows - 1) / kernels.rows;
  // A multiple of the number of threads.
  while (rows * columns % threads != 0 && n / (rows + 1) >= 32) ++rows;
  for_each_item(rows * columns, [&](int64_t item) {
    const int64_t row = item / columns, column = item % columns;
    f(n * row / rows, n * (row + 1) / rows, panels * column / columns * width,
      std::min(k, panels * (column + 1) / columns * width));
  });
}

}  // namespace

int64_t weight_gradient_part_rows(Element type, int64_t columns) {
  const int64_t elements = int64_t{type == Element::float32 ? 4 : 8} << 20;
  const int64_t rows = elements / std::max<int64_t>(1, columns);
  return std::max(kPartMultiple, rows / kPartMultiple * kPartMultiple);
}

void* weight_gradient_panels(Element type, int64_t m, int64_t k, int slot) {
  return room_for(*weight_gradient_kernels_for(type), m, k, slot);
}

void run_weight_gradient_part(WeightGradientArgs args, int slot) {
  const bool in_fp32 = args.type == Element::float32;
  const WeightGradientKernels* kernels = weight_gradient_kernels_for(args.type);
  if (in_fp32) {  // the results are sums themselves
    args.sums = static_cast<float*>(args.grad_weight);
    args.bias_sums = static_cast<float*>(args.grad_bias);
  }
  if (args.grad_bias != nullptr) {
    const int64_t grain = std::max<int64_t>(64, 32768 / std::max<int64_t>(1, args.m));
    parallel_for(0, args.n, grain,
                 [&](int64_t begin, int64_t end) { kernels->bias(args, begin, end); });
  }
  if (args.grad_weight == nullptr || args.k == 0) return;
  if (args.first && reads_x(args) && in_place(args.type, args.m, args.m <= 512 && args.n <= 768)) {
    const int64_t grain = std::max<int64_t>(6, kLeastCost / (args.k * cost_of_weight(args.m)));
    parallel_for(0, args.n, grain, [&](int64_t begin, int64_t end) {
      TF_DISPATCH(small_m_weight_gradient, args, begin, end);
    });
    return;
  }
  const auto scratch = [&] { return bytes_of(kernel_scratch(), kernels->scratch(args)); };
  const auto pack = [&](int to) {
    void* panels = room_for(*kernels, args.m, args.k, to);
    const int64_t unit = kernels->pack_rows;
    parallel_for(0, (args.m + unit - 1) / unit, std::max<int64_t>(1, 16384 / (unit * args.k)),
                 [&](int64_t begin, int64_t end) {
                   kernels->pack(args, panels, begin * unit, std::min<int64_t>(args.m, end * unit),
                                 scratch());
                 });
    return panels;
  };
  const bool bf16x3 = in_fp32 && uses_bf16x3(std::min(args.m, args.n));
  if (args.panels == nullptr && !(bf16x3 && reads_x(args))) args.panels = pack(slot);
#if TF_HAVE_AMX
  if (bf16x3) {
    kernels = amx::bf16x3_weight_gradient_kernels();
    args.bf16x3_panels = pack(kBf16x3Slot);
  }
#endif
  for_each_weight_block(*kernels, args.n, args.k, panel_columns(),
                        [&](auto... block) { kernels->block(args, block..., scratch()); });
}

namespace {

Tensor linear_impl(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& packed,
                   const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                   int64_t activation, void* preactivation) {
  const char* op = "linear";
  const ScalarType type = checked_float_type(op, "input", input);
  STD_TORCH_CHECK(input.dim() >= 1, "linear: input must have a dimension");
  check_weight(op, "weight", weight, input.size(input.dim() - 1), bias, type);
  Tensor output = empty_rows(input, weight.size(0));
  const int64_t m = row_count(input), n = weight.size(0), k = weight.size(1);
  if (residual) {
    check_type(op, "residual", *residual, type, "input");
    STD_TORCH_CHECK(residual->sizes().equals(output.sizes()),
                    "linear: residual must have the shape of the result");
  }
  if (m * n == 0) return output;
  const Rows x = as_rows(input);
  const Rows r = residual ? as_rows(*residual) : Rows{input, nullptr, 0};
  const std::optional<Tensor> b = as_contiguous(bias);
  run_linear({element_of(input), x.data, nullptr, data_of(b), r.data, output.mutable_data_ptr(), m,
              k, n, x.stride, r.stride, n, checked_activation(op, activation), preactivation},
             weight, packed, 0);
  trim_shared_scratch();
  return output;
}

Tensor linear(Tensor input, Tensor weight, std::optional<Tensor> packed, std::optional<Tensor> bias,
              std::optional<Tensor> residual, int64_t activation) {
  return linear_impl(input, weight, packed, bias, residual, activation, nullptr);
}

std::tuple<Tensor, Tensor> linear_training(Tensor input, Tensor weight, std::optional<Tensor> bias,
                                           std::optional<Tensor> residual, int64_t activation,
                                           bool keep) {
  STD_TORCH_CHECK(input.dim() >= 1, "linear: input must have a dimension");
  Tensor preactivation = keep ? empty_rows(input, weight.size(0)) : empty_tensor(input, {0});
  Tensor output = linear_impl(input, weight, std::nullopt, bias, residual, activation,
                              data_if(keep, preactivation));
  return {output, preactivation};
}

// Computes the gradients of weight and bias, a part of the rows at a time.
void run_weight_gradient(const WeightGradientArgs& whole) {
  const int64_t max_rows = weight_gradient_part_rows(whole.type, whole.k);
  WeightGradientArgs part = whole;
  const bool parts = max_rows < whole.m;
  if (whole.type != Element::float32)
    set_sums(part, shared_scratch(3).floats(sum_floats(whole, parts)), parts);
  for (int64_t begin = 0; begin < whole.m; begin += max_rows) {
    part.m = std::min<int64_t>(max_rows, whole.m - begin);
    part.grad = offset_ptr(whole.grad, whole.type, begin * whole.grad_stride);
    part.x = offset_ptr(whole.x, whole.type, begin * whole.x_stride);
    part.row = begin;
    part.first = begin == 0;
    part.last = begin + part.m == whole.m;
    run_weight_gradient_part(part, 0);
  }
}

}  // namespace

void run_linear(const LinearArgs& args) {
  run_linear(args, Matrix{args.type, args.weight, args.n, args.k, args.weight_stride}, std::nullopt,
             0);
  trim_shared_scratch();
}

void run_linear_backward(LinearBackwardArgs args) {
  const Matrix weight{args.type, args.weight, args.n, args.k, args.weight_stride};
  if (args.activation != 0) {  // continues with the gradient of the activation's input
    void* to = bytes_of(shared_scratch(1), args.m * args.n * element_bytes(args.type));
    const SlopeArgs slope{args.type, args.grad,        args.preactivation, to,
                          args.n,    args.grad_stride, args.activation};
    parallel_for(0, args.m, std::max<int64_t>(1, 16384 / args.n), [&](int64_t begin, int64_t end) {
      TF_DISPATCH(multiply_by_slope, slope, begin, end);
    });
    args.grad = to;
    args.grad_stride = args.n;
  }
  if (args.grad_input != nullptr && args.k > 0)
    run_input_gradient(args.grad, args.grad_stride, weight, args.m, args.grad_input, 0);
  if (args.grad_weight != nullptr || args.grad_bias != nullptr)
    run_weight_gradient({.type = args.type,
                         .grad = args.grad,
                         .x = args.x,
                         .grad_weight = args.grad_weight,
                         .grad_bias = args.grad_bias,
                         .m = args.m,
                         .n = args.n,
                         .k = args.k,
                         .grad_stride = args.grad_stride,
                         .x_stride = args.x_stride});
  trim_shared_scratch();
}

namespace {

// Gradients of input, weight and bias; empty where not wanted.
std::tuple<Tensor, Tensor, Tensor> linear_backward(Tensor grad, Tensor input, Tensor weight,
                                                   std::optional<Tensor> preactivation,
                                                   int64_t activation, bool want_input,
                                                   bool want_weight, bool want_bias) {
  const char* op = "linear_backward";
  const ScalarType type = checked_float_type(op, "input", input);
  check_type(op, "grad", grad, type, "input");
  STD_TORCH_CHECK(input.dim() >= 1 && grad.dim() == input.dim(), op,
                  ": grad and input must have the same number of dimensions, at least one");
  check_weight(op, "weight", weight, input.size(input.dim() - 1), std::nullopt, type);
  const int64_t m = row_count(input), n = weight.size(0), k = weight.size(1);
  STD_TORCH_CHECK(row_count(grad) == m && grad.size(grad.dim() - 1) == n, op,
                  ": grad must have the shape of the result");
  Tensor grad_input = want_input ? empty_rows(input, k) : empty_tensor(input, {0});
  Tensor grad_weight = want_weight ? empty_tensor(weight, {n, k}) : empty_tensor(weight, {0});
  Tensor grad_bias = empty_tensor(weight, {want_bias ? n : 0});
  if (m == 0 || n == 0) {
    for (Tensor* tensor : {&grad_input, &grad_weight, &grad_bias}) torch::stable::zero_(*tensor);
    return {grad_input, grad_weight, grad_bias};
  }
  const Rows dy = as_rows(grad), x = as_rows(input);
  const Matrix w = want_input ? Matrix(weight).adjacent() : weight;
  std::optional<Tensor> z;
  if (activation != 0) {
    STD_TORCH_CHECK(preactivation.has_value(), op, ": an activation needs preactivation");
    check_type(op, "preactivation", *preactivation, type, "input");
    STD_TORCH_CHECK(preactivation->sizes().equals(grad.sizes()), op,
                    ": preactivation must have the shape of grad");
    z = as_contiguous(*preactivation);
  }
  run_linear_backward({.type = element_of(input),
                       .grad = dy.data,
                       .x = x.data,
                       .weight = w.data,
                       .preactivation = data_of(z),
                       .grad_input = data_if(want_input, grad_input),
                       .grad_weight = data_if(want_weight, grad_weight),
                       .grad_bias = data_if(want_bias, grad_bias),
                       .m = m,
                       .n = n,
                       .k = k,
                       .grad_stride = dy.stride,
                       .x_stride = x.stride,
                       .weight_stride = w.stride,
                       .activation = checked_activation(op, activation)});
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace
}  // namespace tf

STABLE_TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  m.def("pack_weight.cpu(Tensor weight, int rows) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("pack_weight.cpu", TF_BOX(&tf::pack_weight));
  m.impl("linear_packed.cpu", TF_BOX(&tf::linear));
  m.impl("linear_training.cpu", TF_BOX(&tf::linear_training));
  m.impl("linear_backward.cpu", TF_BOX(&tf::linear_backward));
}
