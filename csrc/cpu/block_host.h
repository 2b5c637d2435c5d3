// What the operators made of several share: scratch for what lies between, the norm.
#pragma once

#include <algorithm>

#include "cpu/layer_norm_kernel.h"
#include "cpu/linear_host.h"

namespace tf {

// Slots of the shared scratch; 0 and 1 hold weights packed in the call.
enum Slot {
  kHiddenSlot = 2,
  kProjectedSlot = 3,
  kAttendedSlot = 4,
  kNormedSlot = 5,
  kStreamSlot = 6
};

struct Norm {
  std::optional<Tensor> weight, bias;
  float eps;

  Norm(std::optional<Tensor> w, std::optional<Tensor> b, double e, int64_t columns)
      : weight(as_contiguous(w)), bias(as_contiguous(b)), eps(static_cast<float>(e)) {
    for (const auto* t : {&weight, &bias}) {
      if (!*t) continue;
      check_float("block", "the norm's parameters", **t);
      STD_TORCH_CHECK((*t)->numel() == columns, "block: the norm must have ", columns, " columns");
    }
  }

  // May work in place.
  void run(const float* x, float* y, int64_t rows, int64_t columns) const {
    LayerNormArgs args{};
    args.x = x;
    args.weight = optional_data(weight);
    args.bias = optional_data(bias);
    args.y = y;
    args.n = columns;
    args.x_stride = columns;
    args.eps = eps;
    args.dropout_columns = columns;
    const int64_t scratch = TF_DISPATCH(layer_norm_scratch, args);
    const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, columns));
    torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
      TF_DISPATCH(layer_norm_rows, args, begin, end, kernel_scratch().floats(scratch));
    });
  }
};

inline float* data_of(const Tensor& tensor) {
  return static_cast<float*>(tensor.mutable_data_ptr());
}

}  // namespace tf
