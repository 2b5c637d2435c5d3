// Tensors as rows, for the operators of the CPU and of CUDA.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>

namespace tf {

using torch::stable::Tensor;

// Returns the tensor itself if it is contiguous: the check is cheaper than PyTorch's operator.
inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}
inline std::optional<Tensor> as_contiguous(const std::optional<Tensor>& tensor) {
  if (!tensor) return std::nullopt;
  return as_contiguous(*tensor);
}

inline const void* data_of(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

// A tensor as rows of contiguous elements, `stride` elements apart; copied only if no such view
// exists.
struct Rows {
  Tensor owner;
  const void* data;
  int64_t stride;
};

// Rows of `columns` elements: of the last dimension or of several.
inline Rows as_rows(const Tensor& tensor, int64_t columns) {
  const int64_t dims = tensor.dim();
  bool uniform = dims > 0 && tensor.size(dims - 1) == columns &&
                 (columns <= 1 || tensor.stride(dims - 1) == 1);
  int64_t stride = columns, expected = -1;
  for (int64_t d = dims - 2; d >= 0 && uniform; --d) {
    if (tensor.size(d) == 1) continue;
    if (expected < 0)
      stride = tensor.stride(d);
    else
      uniform = tensor.stride(d) == expected;
    expected = tensor.stride(d) * tensor.size(d);
  }
  if (uniform) return {tensor, tensor.const_data_ptr(), stride};
  Tensor copy = as_contiguous(tensor);
  return {copy, copy.const_data_ptr(), columns};
}
inline Rows as_rows(const Tensor& tensor) { return as_rows(tensor, tensor.size(tensor.dim() - 1)); }

// Number of elements that are normalised together: those of the last `dims` dimensions.
inline int64_t normalized_size(const char* op, const Tensor& tensor, int64_t dims) {
  STD_TORCH_CHECK(dims > 0 && dims <= tensor.dim(), op, ": the last ", dims,
                  " dimensions were to be normalised of ", tensor.dim());
  int64_t n = 1;
  for (int64_t d = tensor.dim() - dims; d < tensor.dim(); ++d) n *= tensor.size(d);
  return n;
}

}  // namespace tf
