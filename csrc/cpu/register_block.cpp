// Whole sub-layers in one call, for inference: attention or feed-forward with its projections, the
// residual connection and the norm. What lies between is kept in this thread's scratch, so a call
// costs one dispatch and no fresh pages but its result's.
#include <torch/csrc/stable/library.h>

#include "cpu/block_host.h"

namespace tf {
namespace {

int64_t largest_gap(const std::vector<int64_t>& starts, int64_t rows) {
  int64_t largest = 0;
  for (size_t i = 0; i + 1 < starts.size(); ++i) {
    STD_TORCH_CHECK(starts[i] >= 0 && starts[i] <= starts[i + 1],
                    "attention_block: starts must not fall");
    largest = std::max(largest, starts[i + 1] - starts[i]);
  }
  STD_TORCH_CHECK(starts.back() <= rows, "attention_block: starts reach beyond the rows");
  return largest;
}

Tensor attention_block(Tensor input, std::optional<Tensor> memory, Tensor in_weight,
                       std::optional<Tensor> in_packed, std::optional<Tensor> in_bias,
                       Tensor out_weight, std::optional<Tensor> out_packed,
                       std::optional<Tensor> out_bias, std::optional<Tensor> norm_weight,
                       std::optional<Tensor> norm_bias, double eps, bool norm_first, int64_t heads,
                       bool batch_first, std::optional<Tensor> mask,
                       std::optional<Tensor> key_lengths, bool is_causal,
                       std::optional<Tensor> query_starts, std::optional<Tensor> key_starts) {
  const char* op = "attention_block";
  check_block_input(op, input);
  const bool ragged = query_starts.has_value();
  const int64_t dims = ragged ? 2 : 3;
  STD_TORCH_CHECK(input.dim() == dims, op, ": input must have ", dims, " dimensions");
  const Tensor x = as_contiguous(input);
  const int64_t width = x.size(dims - 1);
  STD_TORCH_CHECK(heads > 0 && width % heads == 0, op, ": the heads must divide the width");
  const Map in(op, "in_weight", in_weight, in_packed, in_bias, x, 3 * width, width);
  const Map out(op, "out_weight", out_weight, out_packed, out_bias, x, width, width);
  const Norm norm(op, norm_weight, norm_bias, eps, x, width);
  Tensor source = x;
  if (memory) {
    check_type(op, "memory", *memory, x.scalar_type(), "input");
    STD_TORCH_CHECK(memory->dim() == dims && memory->size(dims - 1) == width, op,
                    ": memory must be as input");
    const int64_t panel =
        is_half(x) ? TF_DISPATCH(half_panel_columns, ) : TF_DISPATCH(panel_columns, );
    STD_TORCH_CHECK(width % panel == 0, op,
                    ": with memory the width must be a multiple of a panel");
    source = as_contiguous(*memory);
  }
  STD_TORCH_CHECK(ragged == key_starts.has_value(), op, ": starts come in pairs");

  TypedAttentionArgs args{};
  std::vector<int64_t> q_starts, k_starts, lengths;
  if (ragged) {
    STD_TORCH_CHECK(query_starts->numel() == key_starts->numel() && query_starts->numel() > 0, op,
                    ": starts come in pairs");
    q_starts = to_int64("query_starts", query_starts, query_starts->numel());
    k_starts = to_int64("key_starts", key_starts, key_starts->numel());
    args.query_starts = q_starts.data();
    args.key_starts = k_starts.data();
    args.batch = static_cast<int64_t>(q_starts.size()) - 1;
    args.queries = largest_gap(q_starts, x.size(0));
    args.keys = largest_gap(k_starts, source.size(0));
  } else {
    const int64_t batch_dim = batch_first ? 0 : 1;
    STD_TORCH_CHECK(x.size(batch_dim) == source.size(batch_dim), op, ": the batches differ");
    args.batch = x.size(batch_dim);
    args.queries = x.size(1 - batch_dim);
    args.keys = source.size(1 - batch_dim);
  }
  args.heads = args.key_heads = heads;
  args.size = args.value_size = width / heads;
  args.scale = 1.0f / __builtin_sqrtf(static_cast<float>(args.size));
  args.causal = is_causal;
  set_mask(args, mask, {args.batch, heads, args.queries, args.keys}, x.scalar_type());
  lengths = to_int64("key_lengths", key_lengths, args.batch);
  if (key_lengths) args.key_lengths = lengths.data();
  Tensor output = fresh_like(x);
  const int64_t rows = row_count(x), key_rows = row_count(source);
  if (rows == 0) return output;

  const auto element = static_cast<int64_t>(x.element_size());
  void* y = output.mutable_data_ptr();
  run_sublayer(x, norm, norm_first, x.const_data_ptr(), y, rows, width,
               [&](const void* from, const void* residual) {
                 // Queries, keys and values side by side; with memory the queries in a block of
                 // their own.
                 char* projected = shared_bytes(
                     kProjectedSlot,
                     (memory ? rows * width + key_rows * 2 * width : rows * 3 * width) * element);
                 const char* keys;
                 int64_t query_row, key_row;
                 if (memory) {
                   query_row = width;
                   key_row = 2 * width;
                   char* kv = projected + rows * width * element;
                   const ReadyMap ready(in, std::max(rows, key_rows), 0);
                   ready.run_part(from, rows, nullptr, projected, 0, width);
                   ready.run_part(source.const_data_ptr(), key_rows, nullptr, kv, width, 2 * width);
                   keys = kv;
                 } else {
                   query_row = key_row = 3 * width;
                   ReadyMap(in, rows, 0).run(from, rows, nullptr, projected);
                   keys = projected + width * element;
                 }
                 void* attended = shared_bytes(kAttendedSlot, rows * width * element);
                 args.type = element_of(x);
                 args.query = projected;
                 args.key = keys;
                 args.value = keys + width * element;
                 args.output = attended;
                 const auto strides = [&](long* stride, int64_t row, int64_t length) {
                   stride[0] = batch_first ? length * row : row;
                   stride[1] = args.size;
                   stride[2] = batch_first || ragged ? row : args.batch * row;
                 };
                 strides(args.query_stride, query_row, args.queries);
                 strides(args.key_stride, key_row, args.keys);
                 strides(args.value_stride, key_row, args.keys);
                 strides(args.output_stride, width, args.queries);
                 args.query_stride[3] = args.key_stride[3] = args.value_stride[3] = 1;
                 run_any_attention(args);
                 ReadyMap(out, rows, 1).run(attended, rows, residual, y);
               });
  trim_shared_scratch();
  return output;
}

Tensor feed_forward_block(Tensor input, Tensor weight1, std::optional<Tensor> packed1,
                          std::optional<Tensor> bias1, Tensor weight2,
                          std::optional<Tensor> packed2, std::optional<Tensor> bias2,
                          std::optional<Tensor> norm_weight, std::optional<Tensor> norm_bias,
                          double eps, bool norm_first, int64_t activation) {
  const char* op = "feed_forward_block";
  check_block_input(op, input);
  STD_TORCH_CHECK(input.dim() >= 1, op, ": input must have a dimension");
  const Tensor x = as_contiguous(input);
  const int64_t width = x.size(x.dim() - 1), hidden = weight1.dim() == 2 ? weight1.size(0) : 0;
  const Map first(op, "weight1", weight1, packed1, bias1, x, hidden, width);
  const Map second(op, "weight2", weight2, packed2, bias2, x, width, hidden);
  const Norm norm(op, norm_weight, norm_bias, eps, x, width);
  Tensor output = fresh_like(x);
  const int64_t rows = row_count(x);
  if (rows * width == 0) return output;
  void* y = output.mutable_data_ptr();
  run_sublayer(x, norm, norm_first, x.const_data_ptr(), y, rows, width,
               [&](const void* from, const void* residual) {
                 run_feed_forward(first, second, static_cast<int>(activation), from, rows, residual,
                                  y);
               });
  trim_shared_scratch();
  return output;
}

}  // namespace
}  // namespace tf

STABLE_TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  m.def(
      "cpu_attention_block(Tensor input, Tensor? memory, Tensor in_weight, Tensor? in_packed, "
      "Tensor? in_bias, Tensor out_weight, Tensor? out_packed, Tensor? out_bias, "
      "Tensor? norm_weight, Tensor? norm_bias, float eps, bool norm_first, int heads, "
      "bool batch_first, Tensor? mask, Tensor? key_lengths, bool is_causal, Tensor? query_starts, "
      "Tensor? key_starts) -> Tensor");
  m.def(
      "cpu_feed_forward_block(Tensor input, Tensor weight1, Tensor? packed1, Tensor? bias1, "
      "Tensor weight2, Tensor? packed2, Tensor? bias2, Tensor? norm_weight, Tensor? norm_bias, "
      "float eps, bool norm_first, int activation) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("cpu_attention_block", TORCH_BOX(&tf::attention_block));
  m.impl("cpu_feed_forward_block", TORCH_BOX(&tf::feed_forward_block));
}
