// Dropout arguments of the operators.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>

#include "cpu/simd/dropout.h"

namespace tf {

// p in [0, 1]; the seed, an int64 scalar, is read only if 0 < p < 1.
inline Dropout make_dropout(const char* op, double p,
                            const std::optional<torch::stable::Tensor>& seed) {
  STD_TORCH_CHECK(p >= 0.0 && p <= 1.0, op, ": dropout_p must be between 0 and 1, not ", p);
  if (p == 0.0) return {};
  if (p == 1.0) return {true, 0, 0, 0.0f};  // all are kept, times 0
  STD_TORCH_CHECK(seed.has_value(), op, ": dropout needs a seed");
  STD_TORCH_CHECK(seed->is_cpu() && seed->scalar_type() == torch::headeronly::ScalarType::Long &&
                      seed->numel() == 1,
                  op, ": seed must be an int64 scalar on the CPU");
  return {true, static_cast<uint64_t>(*static_cast<const int64_t*>(seed->const_data_ptr())),
          dropout_threshold(p), static_cast<float>(1.0 / (1.0 - p))};
}

}  // namespace tf
