// A linear map whose tensors are of a type told by a field.
#pragma once

#include "cpu/core/element.h"

namespace tf {

struct TypedLinearArgs {
  Element type;          // of all tensors here
  const void* x;         // (m, k), rows x_stride apart
  const void* packed;    // W (n, k) in panels, see the kernels, or nullptr
  const void* bias;      // (n) or nullptr: zeros
  const void* residual;  // (m, n), rows residual_stride apart, or nullptr
  void* y;               // (m, n), rows y_stride apart
  long m, k, n, x_stride, residual_stride, y_stride;
  int activation;
  void* preactivation = nullptr;  // (m, n), contiguous: x W^T + bias is kept here, or nullptr
  // In place of packed: W itself, rows weight_stride apart, or, if turned, W^T.
  const void* weight = nullptr;
  long weight_stride = 0;
  bool turned = false;
};

}  // namespace tf
