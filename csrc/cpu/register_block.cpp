// Whole sub-layers in one call, for inference: attention or feed-forward with its projections, the
// residual connection and the norm. What lies between is kept in this thread's scratch, so a call
// costs one dispatch and no fresh pages but its result's.
#include <torch/csrc/stable/library.h>

#include "cpu/attention_host.h"
#include "cpu/block_host.h"
#include "cpu/feed_forward_host.h"

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
  check_float(op, "input", input);
  const bool ragged = query_starts.has_value();
  const int64_t dims = ragged ? 2 : 3;
  STD_TORCH_CHECK(input.dim() == dims, op, ": input must have ", dims, " dimensions");
  const Tensor x = as_contiguous(input);
  const int64_t width = x.size(dims - 1);
  STD_TORCH_CHECK(heads > 0 && width % heads == 0, op, ": the heads must divide the width");
  check_weight(op, "in_weight", in_weight, width, in_bias);
  check_weight(op, "out_weight", out_weight, width, out_bias);
  STD_TORCH_CHECK(in_weight.size(0) == 3 * width && out_weight.size(0) == width, op,
                  ": the projections do not fit");
  Tensor source = x;
  if (memory) {
    check_float(op, "memory", *memory);
    STD_TORCH_CHECK(memory->dim() == dims && memory->size(dims - 1) == width, op,
                    ": memory must be as input");
    STD_TORCH_CHECK(width % TF_DISPATCH(panel_columns, ) == 0, op,
                    ": with memory the width must be a multiple of a panel");
    source = as_contiguous(*memory);
  }
  STD_TORCH_CHECK(ragged == key_starts.has_value(), op, ": starts come in pairs");

  AttentionArgs args{};
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
  const Norm norm(norm_weight, norm_bias, eps, width);
  Tensor output = fresh_like(x);
  const int64_t rows = row_count(x), key_rows = row_count(source);
  if (rows == 0) return output;

  const float* from = data_of(x);
  if (norm_first) {
    float* normed = shared_scratch(kNormedSlot).floats(rows * width);
    norm.run(from, normed, rows, width);
    from = normed;
  }
  const Panels in_panels = panels_of(in_weight, in_packed, 0, rows);
  const std::optional<Tensor> in_b = as_contiguous(in_bias), out_b = as_contiguous(out_bias);
  // Queries, keys and values side by side; with memory the queries in a block of their own.
  float* projected = shared_scratch(kProjectedSlot)
                         .floats(memory ? rows * width + key_rows * 2 * width : rows * 3 * width);
  const float* keys;
  int64_t query_row, key_row;
  if (memory) {
    query_row = width;
    key_row = 2 * width;
    float* kv = projected + rows * width;
    const float* b = optional_data(in_b);
    run_linear({from, nullptr, b, nullptr, projected, rows, width, width, width, 0, width, 0},
               in_panels);
    run_linear({data_of(source), nullptr, b == nullptr ? nullptr : b + width, nullptr, kv, key_rows,
                width, 2 * width, width, 0, 2 * width, 0},
               in_panels.from(width, width));
    keys = kv;
  } else {
    query_row = key_row = 3 * width;
    run_linear({from, nullptr, optional_data(in_b), nullptr, projected, rows, width, 3 * width,
                width, 0, 3 * width, 0},
               in_panels);
    keys = projected + width;
  }
  float* attended = shared_scratch(kAttendedSlot).floats(rows * width);
  args.query = projected;
  args.key = keys;
  args.value = keys + width;
  args.output = attended;
  args.heads = args.key_heads = heads;
  args.size = args.value_size = width / heads;
  args.scale = 1.0f / __builtin_sqrtf(static_cast<float>(args.size));
  args.causal = is_causal;
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
  set_mask(args, mask, {args.batch, heads, args.queries, args.keys});
  lengths = to_int64("key_lengths", key_lengths, args.batch);
  if (key_lengths) args.key_lengths = lengths.data();
  run_attention(args);

  float* y = data_of(output);
  run_linear({attended, nullptr, optional_data(out_b), data_of(x), y, rows, width, width, width,
              width, width, 0},
             panels_of(out_weight, out_packed, 1, rows));
  if (!norm_first) norm.run(y, y, rows, width);
  trim_shared_scratch();
  return output;
}

Tensor feed_forward_block(Tensor input, Tensor weight1, std::optional<Tensor> packed1,
                          std::optional<Tensor> bias1, Tensor weight2,
                          std::optional<Tensor> packed2, std::optional<Tensor> bias2,
                          std::optional<Tensor> norm_weight, std::optional<Tensor> norm_bias,
                          double eps, bool norm_first, int64_t activation) {
  const char* op = "feed_forward_block";
  check_float(op, "input", input);
  STD_TORCH_CHECK(input.dim() >= 1, op, ": input must have a dimension");
  const Tensor x = as_contiguous(input);
  const int64_t width = x.size(x.dim() - 1), hidden = weight1.size(0);
  check_weight(op, "weight1", weight1, width, bias1);
  check_weight(op, "weight2", weight2, hidden, bias2);
  STD_TORCH_CHECK(weight2.size(0) == width, op, ": weight2 must give input's width");
  const Norm norm(norm_weight, norm_bias, eps, width);
  Tensor output = fresh_like(x);
  const int64_t rows = row_count(x);
  if (rows * width == 0) return output;
  const float* from = data_of(x);
  if (norm_first) {
    float* normed = shared_scratch(kNormedSlot).floats(rows * width);
    norm.run(from, normed, rows, width);
    from = normed;
  }
  const std::optional<Tensor> b1 = as_contiguous(bias1), b2 = as_contiguous(bias2);
  float* y = data_of(output);
  if (is_direct(weight1, packed1, rows) && is_direct(weight2, packed2, rows)) {
    float* inner = shared_scratch(kHiddenSlot).floats(rows * hidden);
    run_linear({from, nullptr, optional_data(b1), nullptr, inner, rows, width, hidden, width, 0,
                hidden, static_cast<int>(activation)},
               weight1, packed1, 0);
    run_linear({inner, nullptr, optional_data(b2), data_of(x), y, rows, hidden, width, hidden,
                width, width, 0},
               weight2, packed2, 1);
    if (!norm_first) norm.run(y, y, rows, width);
    return output;
  }
  FeedForwardArgs args{};
  args.x = from;
  args.bias1 = optional_data(b1);
  args.bias2 = optional_data(b2);
  args.y = y;
  args.m = rows;
  args.k = args.n = args.x_stride = args.residual_stride = width;
  args.f = hidden;
  args.activation = static_cast<int>(activation);
  args.residual = data_of(x);
  const Panels panels1 = panels_of(weight1, packed1, 0, rows);
  const Panels panels2 = panels_of(weight2, packed2, 1, rows);
  run_feed_forward(args, panels1, panels2, kHiddenSlot);
  if (!norm_first) norm.run(y, y, rows, width);
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
