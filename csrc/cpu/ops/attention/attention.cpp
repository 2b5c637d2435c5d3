// Operators attention and attention_training.
#include "cpu/ops/attention/attention.h"

#include <tuple>
#include <vector>

#include "cpu/core/host.h"
#include "cpu/ops/attention/attention_host.h"

namespace tf {
namespace {

// Number of items that the queries of the heads sharing a key head are divided into. Each item
// packs the keys again, so there is only one unless threads would be idle.
int64_t chunks_of(const AttentionShape& args) {
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t groups = args.batch * args.key_heads, heads = args.heads / args.key_heads;
  const int64_t wanted = groups >= 4 * threads || threads == 1 ? 1 : 4 * threads / groups + 1;
  return std::max<int64_t>(1, std::min(wanted, heads * args.queries / 256));
}

// See AttentionArgs: threads process adjacent groups.
int64_t next_head(const AttentionShape& args) {
  return chunks_of(args) == 1 ? torch::stable::get_num_threads() : 0;
}

// Calls run(batch element, key head, begin, end) in parallel, covering all queries.
template <class Run>
void each_attention_item(const AttentionShape& args, const Run& run) {
  const int64_t groups = args.batch * args.key_heads, heads = args.heads / args.key_heads;
  const int64_t chunks = chunks_of(args);
  for_each_item(groups * chunks, [&](int64_t item) {
    // With causal masking the last chunks are the longest; they are scheduled first.
    const int64_t group = item / chunks, chunk = chunks - 1 - item % chunks;
    const int64_t queries = query_count(args, group / args.key_heads), rows = heads * queries;
    // One or two rows of a head would sum in another order, so none are split off: the number of
    // chunks depends on that of threads.
    const auto cut = [&](int64_t chunk) {
      const int64_t at = rows * chunk / chunks, after = queries == 0 ? 0 : at % queries;
      return after < 3 ? at - after : queries - after < 3 ? at + queries - after : at;
    };
    const int64_t begin = cut(chunk), end = cut(chunk + 1);
    if (begin < end) run(group / args.key_heads, group % args.key_heads, begin, end);
    kernel_scratch().trim();
  });
}

// Runs the decoding kernel if it applies: few queries per key head.
bool run_decode_attention(const AttentionArgs& args) {
  // Measured; reduced types cost more per query, each of which converts the keys again.
  const int64_t max_queries = args.type == Element::float32 ? 4 : 2;
  // The backward recomputes the scores, and large ones must match the forward bit for bit.
  const bool saves_statistics = args.row_max != nullptr;
  if (batch_invariant() || args.heads / args.key_heads * args.queries > max_queries ||
      args.dropout.on || saves_statistics || args.query_stride[3] != 1 || args.key_stride[3] != 1 ||
      args.value_stride[3] != 1)
    return false;
  const int64_t scratch = TF_DISPATCH(decode_attention_scratch, args);
  // Waking a thread takes as long as reading this many elements.
  constexpr int64_t kGrain = 16384;
  const int64_t each = (args.size + args.value_size) * args.keys * args.heads / args.key_heads;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, each));
  const int64_t groups = args.batch * args.key_heads;
  parallel_for(0, groups, grain, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group)
      TF_DISPATCH(decode_attention_queries, args, group / args.key_heads, group % args.key_heads,
                  bytes_of(kernel_scratch(), scratch));
    kernel_scratch().trim();
  });
  return true;
}

}  // namespace

void run_attention(AttentionArgs args) {
  args.next_head = next_head(args);
  if (run_decode_attention(args)) return;
  const bool lowp =
      args.type != Element::float32 || uses_bf16x3(kBf16x3RowsPerQuery * args.queries);
  const AttentionKernels& kernels =
      lowp ? *TF_DISPATCH_TO(product_isa(args.type), lowp_attention_kernels, args.type)
           : *TF_DISPATCH(attention_kernels, );
  const int64_t scratch = kernels.scratch(args);
  each_attention_item(args, [&](auto... item) {
    kernels.queries(args, item..., bytes_of(kernel_scratch(), scratch));
  });
}

namespace {

// The output's memory, as reference.empty_output() lays it out: like the query where PyTorch's
// fused kernel would run, which returns empty_like(query).
Tensor empty_output(const Tensor& query, const Tensor& key, const Tensor& value, bool contiguous) {
  const int64_t b = query.size(0), h = query.size(1), t = query.size(2), d = value.size(3);
  const bool unit_strides = query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1;
  if (contiguous || !unit_strides || query.numel() == 0 || key.size(2) == 0)
    return empty_tensor(query, {b, h, t, d});
  if (query.size(3) == d) return torch::stable::empty_like(query);
  if (query.stride(1) < query.stride(2))
    return torch::stable::transpose(empty_tensor(query, {b, t, h, d}), 1, 2);
  return empty_tensor(query, {b, h, t, d});
}

struct Attended {
  Tensor output, weights;
  std::optional<Tensor> row_max, row_sum;  // saved for the backward
};

Attended attend(Tensor query, Tensor key, Tensor value, const std::optional<Tensor>& mask,
                const std::optional<Tensor>& key_lengths, bool is_causal, double scale,
                double dropout_p, const std::optional<Tensor>& seed, bool need_weights,
                bool contiguous, bool keep, const PackedSequences& packed, double softcap = 0.0) {
  const char* op = "attention";
  const ScalarType type = checked_float_type(op, "query", query);
  check_type(op, "key", key, type, "query");
  check_type(op, "value", value, type, "query");
  STD_TORCH_CHECK(query.dim() == 4 && key.dim() == 4 && value.dim() == 4,
                  "attention: query, key and value must be (B, H, length, size)");
  const int64_t batch = query.size(0), heads = query.size(1), queries = query.size(2),
                size = query.size(3), keys = key.size(2), key_heads = key.size(1);
  STD_TORCH_CHECK(key.size(0) == batch && value.size(0) == batch && key.size(3) == size &&
                      value.size(2) == keys && value.size(1) == key_heads,
                  "attention: the shapes of query, key and value do not fit");
  STD_TORCH_CHECK(heads == key_heads || (key_heads > 0 && heads % key_heads == 0),
                  "attention: the number of query heads must be a multiple of that of key heads");
  Tensor output = empty_output(query, key, value, contiguous);
  if (is_reduced_float(query) || uses_bf16x3(kBf16x3RowsPerQuery * queries)) {
    query = with_unit_stride(query);
    key = with_unit_stride(key);
    value = with_unit_stride(value);
  }
  AttentionArgs args{};
  Lengths lengths;
  set_shape(args, query, key, value, mask, key_lengths, is_causal, scale, packed, lengths);
  if (softcap != 0.0) {
    args.softcap = static_cast<float>(softcap);
    args.softcap_scale = static_cast<float>(scale / softcap);
    args.scale = 1.0f;
  }
  std::optional<Tensor> row_max, row_sum;
  if (keep) {
    row_max = empty_float_tensor(query, {args.batch, heads, args.queries});
    row_sum = empty_float_tensor(query, {args.batch, heads, args.queries});
  }
  if (packed) {
    STD_TORCH_CHECK(!need_weights, "attention: packed sequences have no weights");
    for (Tensor* rows : {&*row_max, &*row_sum}) torch::stable::zero_(*rows);
  }
  if (!lengths.cover) torch::stable::zero_(output);
  Tensor weights =
      need_weights ? empty_tensor(query, {batch, heads, queries, keys}) : empty_tensor(query, {0});
  args.type = element_of(query);
  args.query = query.const_data_ptr();
  args.key = key.const_data_ptr();
  args.value = value.const_data_ptr();
  args.output = output.mutable_data_ptr();
  args.row_max = mutable_floats(row_max);
  args.row_sum = mutable_floats(row_sum);
  args.weights = data_if(need_weights, weights);
  set_strides(args.output_stride, output);
  args.dropout = make_dropout(op, dropout_p, seed);
  if (args.batch * heads * args.queries > 0) run_attention(args);
  return {output, weights, row_max, row_sum};
}

std::tuple<Tensor, Tensor> attention(Tensor query, Tensor key, Tensor value,
                                     std::optional<Tensor> mask, std::optional<Tensor> key_lengths,
                                     bool is_causal, double scale, double dropout_p,
                                     std::optional<Tensor> seed, bool need_weights, bool contiguous,
                                     double softcap) {
  const Attended found =
      attend(query, key, value, mask, key_lengths, is_causal, scale, dropout_p, seed, need_weights,
             contiguous, false, {std::nullopt, -1, -1}, softcap);
  return {found.output, found.weights};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_training(
    Tensor query, Tensor key, Tensor value, std::optional<Tensor> mask,
    std::optional<Tensor> key_lengths, bool is_causal, double scale, double dropout_p,
    std::optional<Tensor> seed, bool need_weights, std::optional<Tensor> query_lengths,
    int64_t longest_queries, int64_t longest_keys, bool contiguous) {
  const Attended found =
      attend(query, key, value, mask, key_lengths, is_causal, scale, dropout_p, seed, need_weights,
             contiguous, true, {query_lengths, longest_queries, longest_keys});
  return {found.output, found.weights, *found.row_max, *found.row_sum};
}

}  // namespace
}  // namespace tf

STABLE_TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("attention.cpu", TF_BOX(&tf::attention));
  m.impl("attention_training.cpu", TF_BOX(&tf::attention_training));
}
