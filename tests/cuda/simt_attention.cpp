// Launches attention on sizes that are no multiples of any tile, as simt_main.cpp does for other
// kernels. A separate file, because attention takes long to compile.
#include <cstdio>

#include "cuda/attention.cuh"
#include "cuda/attention_backward.cuh"
#include "cuda/attention_decode.cuh"
#include "simt_memory.h"

namespace {

using namespace tf::cuda;

// Two heads share their keys. If there are more keys than queries, causality masks the last keys,
// which are NaN.
template <class T, int kHead>
void attention(int queries, int keys, int size) {
  const size_t rows = 2 * queries, scores = rows * keys;
  const Array<T> query(rows * size), grad(rows * size), grad_weights(scores), mask(scores);
  Array<T> key(keys * size), value(keys * size);
  for (int i = queries * size; i < keys * size; ++i) assign(key[i], NAN), assign(value[i], NAN);
  const auto view = [&](const Array<T>& data, int heads, int length) {
    const int64_t head = int64_t{length} * size;
    return HeadsView{data, heads * head, head, size, 1, size, size * sizeof(T) % 16 == 0};
  };
  const int64_t seed = 7;
  std::unique_ptr<int[]> length(new int[1]{keys - 1});
  Array<float> row_max(rows, false), row_sum(rows, false), delta(rows, false);
  AttentionArgs args{};
  args.type = kType<T>;
  args.query = view(query, 2, queries);
  args.key = view(key, 1, keys), args.value = view(value, 1, keys);
  args.mask_type = sizeof(T) == 4 ? MaskType::float32 : MaskType::like_query;
  args.mask = mask;
  args.mask_head = int64_t{queries} * keys * sizeof(T), args.mask_row = keys * sizeof(T);
  args.mask_column = sizeof(T);
  args.lengths = length.get();
  args.batch = 1, args.heads = 2, args.group = 2, args.queries = queries, args.keys = keys;
  args.causal = queries < keys;
  args.scaled = true, args.scale = 0.3f, args.exponent = 1.44269504f;
  args.dropout = {true, &seed, 1u << 14, 4.0f / 3.0f};
  args.row_max = row_max, args.row_sum = row_sum;
  Array<T> output(rows * size, false), weights(scores, false);
  launch_attention_as<T, kHead>({args, view(output, 2, queries), weights}, nullptr);
  output.check("output");
  weights.check("weights");
  row_max.check("row_max");
  row_sum.check("row_sum");
  Array<T> of_query(rows * size, false), of_key(keys * size, false), of_value(keys * size, false);
  Array<T> of_scores(scores, false);
  launch_attention_backward_as<T, kHead>(
      {args, view(grad, 2, queries), grad_weights, view(of_query, 2, queries),
       view(of_key, 1, keys), view(of_value, 1, keys), delta, of_scores, false},
      nullptr);
  of_query.check("grad_query");
  of_key.check("grad_key");
  of_value.check("grad_value");
  of_scores.check("grad_scores");
}

// Decoding: one query of two sequences of different lengths, and `heads` that share keys, with one
// split of the keys or several that are merged. Masked keys and values are NaN.
template <class T, int kHead>
void decoding(int keys, int size, int splits, int heads = 1) {
  const Array<T> query(2 * heads * size);
  Array<T> key(2 * keys * size), value(2 * keys * size);
  for (int i = (2 * keys - 1) * size; i < 2 * keys * size; ++i)
    assign(key[i], NAN), assign(value[i], NAN);
  const std::unique_ptr<int64_t[]> lengths(new int64_t[2]{keys, keys - 1});
  const auto view = [&](const Array<T>& data, int heads, int length) {
    const int64_t head = int64_t{length} * size;
    return HeadsView{data, heads * head, head, size, 1, size, size * sizeof(T) % 16 == 0};
  };
  const size_t rows = 2 * heads;
  Array<T> output(rows * size, false);
  Array<float> row_max(rows, false), row_sum(rows, false), sums(rows * splits * size, false),
      maxima(rows * splits, false), totals(rows * splits, false);
  AttentionArgs args{};
  args.type = kType<T>;
  args.query = view(query, heads, 1);
  args.key = view(key, 1, keys), args.value = view(value, 1, keys);
  args.lengths = lengths.get(), args.length_stride = 1, args.long_lengths = true;
  args.batch = 2, args.heads = args.group = heads, args.queries = 1, args.keys = keys;
  args.scale = 0.3f, args.exponent = 0.4f;
  args.row_max = row_max, args.row_sum = row_sum;
  launch_attention_decode_as<T, kHead>(
      {{args, view(output, heads, 1), nullptr}, splits, sums, maxima, totals}, nullptr);
  output.check("output");
  row_max.check("row_max");
  row_sum.check("row_sum");
}

}  // namespace

int main() {
  simt::no_bank_conflicts = true;
  attention<bf16, 32>(20, 70, 24);  // two tiles of keys, in chunks of 16 bytes
  attention<bf16, 32>(66, 17, 31);  // two blocks of queries
  attention<bf16, 32>(3, 65, 24);   // a fully masked block of keys
  attention<float, 64>(18, 40, 35);
  decoding<bf16, 32>(70, 24, 3);
  decoding<bf16, 32>(70, 24, 2, 5);  // four heads in one block, one in the next
  decoding<float, 64>(7, 35, 1);
  std::puts("done");
}
