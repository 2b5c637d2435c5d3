// Helpers of the cross entropy operators.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "cpu/core/host.h"
#include "cpu/ops/loss/cross_entropy_kernel.h"

namespace tf {

// Online softmax state per row while the classes are read in parts, and the final loss.
class CrossEntropyRows {
 public:
  explicit CrossEntropyRows(int64_t rows) : values_(4 * rows), rows_(rows) {}

  void set(CrossEntropyArgs& args) {
    args.row_max = values_.data();
    args.sum = args.row_max + rows_;
    args.shifted_sum = args.sum + rows_;
    args.target_logit = args.shifted_sum + rows_;
  }

  // Loss, largest logit, and log of the sum of exp(logit - row_max) of each row.
  static void finish(const CrossEntropyArgs& args, int64_t rows, float* losses, float* row_maxima,
                     float* logs) {
    const double s = args.smoothing;
    for (int64_t i = 0; i < rows; ++i) {
      if (args.target[i] == args.ignored) {
        losses[i] = row_maxima[i] = logs[i] = 0.0f;
        continue;
      }
      const bool none = args.row_max[i] == -std::numeric_limits<float>::infinity();
      const double log = none ? std::nan("") : std::log(static_cast<double>(args.sum[i]));
      const double row_max = args.row_max[i];
      double loss = log + (row_max - args.target_logit[i]);
      if (s != 0.0) loss = (1.0 - s) * loss + s * (log - args.shifted_sum[i] / args.classes);
      losses[i] = static_cast<float>(loss);
      row_maxima[i] = args.row_max[i];
      logs[i] = static_cast<float>(log);
    }
  }

 private:
  std::vector<float> values_;
  int64_t rows_;
};

// Checks that each target is a class or `ignored`.
inline Tensor checked_target(const char* op, const Tensor& target, int64_t rows, int64_t classes,
                             int64_t ignored) {
  STD_TORCH_CHECK(target.is_cpu() && target.scalar_type() == ScalarType::Long &&
                      target.dim() == 1 && target.size(0) == rows,
                  op, ": target must hold ", rows, " int64 on the CPU");
  const Tensor flat = as_contiguous(target);
  const auto* data = static_cast<const int64_t*>(flat.const_data_ptr());
  for (int64_t i = 0; i < rows; ++i)
    STD_TORCH_CHECK(data[i] == ignored || (data[i] >= 0 && data[i] < classes), "Target ", data[i],
                    " is out of bounds.");
  return flat;
}

// Checks the inputs of the backward per row: gradient of the loss, and two statistics saved by the
// forward.
inline void check_rows(const char* op, const Tensor& grad, const Tensor& known, int64_t rows) {
  check_float(op, "grad", grad);
  check_float(op, "known", known);
  STD_TORCH_CHECK(grad.dim() == 1 && grad.size(0) == rows, op, ": grad must be (", rows, ")");
  STD_TORCH_CHECK(known.dim() == 2 && known.size(0) == 2 && known.size(1) == rows, op,
                  ": known must be (2, ", rows, ")");
}

inline int64_t cross_entropy_grain(int64_t columns) {
  return std::max<int64_t>(1, 8192 / std::max<int64_t>(1, columns));
}

inline void run_cross_entropy(const CrossEntropyArgs& args, int64_t rows) {
  torch::stable::parallel_for(
      0, rows, cross_entropy_grain(args.columns),
      [&](int64_t begin, int64_t end) { TF_DISPATCH(cross_entropy_rows, args, begin, end); });
}

inline void run_cross_entropy_gradient(const CrossEntropyGradientArgs& args, int64_t rows) {
  torch::stable::parallel_for(0, rows, cross_entropy_grain(args.call.columns),
                              [&](int64_t begin, int64_t end) {
                                TF_DISPATCH(cross_entropy_gradient_rows, args, begin, end);
                              });
}

}  // namespace tf
