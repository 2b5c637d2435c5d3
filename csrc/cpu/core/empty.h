// Tensors: uninitialised ones for what the operators give back, and contiguous ones.
#pragma once

#include <sys/mman.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <optional>

namespace tf {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// From now on whether fresh tensors start as NaN (integers as -1), for tests; tells whether they
// did.
bool fill_empty(bool fill);

// Contiguous, of like's dtype or float32; large ones in kept memory.
Tensor empty_tensor(const Tensor& like, IntHeaderOnlyArrayRef sizes, bool in_float = false);

inline Tensor empty_tensor(const Tensor& like, std::initializer_list<int64_t> sizes) {
  return empty_tensor(like, IntHeaderOnlyArrayRef(sizes.begin(), sizes.size()));
}
inline Tensor empty_float_tensor(const Tensor& like, std::initializer_list<int64_t> sizes) {
  return empty_tensor(like, IntHeaderOnlyArrayRef(sizes.begin(), sizes.size()), true);
}
inline Tensor empty_tensor_like(const Tensor& like) { return empty_tensor(like, like.sizes()); }
// Rows of `columns` instead of input's.
Tensor empty_rows(const Tensor& input, int64_t columns);
// A float for each row, which the last `dims` dimensions make: the shape of the dimensions before.
Tensor empty_statistics(const Tensor& input, int64_t dims);

// The tensor itself if it is contiguous: asking is cheaper than PyTorch's operator.
inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}
inline std::optional<Tensor> as_contiguous(const std::optional<Tensor>& tensor) {
  if (!tensor) return std::nullopt;
  return as_contiguous(*tensor);
}

// Memory for a packed weight. Streaming it is a matter of bandwidth, of which small pages cost a
// fifth, so it begins where a huge page does.
Tensor empty_packed_weight(const Tensor& like, int64_t count, bool in_bfloat16 = false);

// There is no memory for so many bytes: the exception that PyTorch has for it.
[[noreturn]] void throw_out_of_memory(int64_t bytes);

}  // namespace tf
