// Cross entropy of rows of logits with label smoothing, over some of the classes at a time: the
// softmax is online, so the logits of a row need not be in memory together.
#pragma once

#include "cpu/core/isa.h"
#include "types.h"

namespace tf {

struct CrossEntropyArgs {
  Element type;           // of logits and gradient
  const void* logits;     // (rows, columns), rows `stride` apart: classes first ... first + columns
  const int64_t* target;  // (rows)
  long stride, first, columns, classes;
  int64_t ignored;  // rows with this target have no loss and no gradient
  float smoothing;
  // State of each row over classes 0 ... first + columns: largest logit, sum of exp(logit -
  // row_max), sum of logit - row_max, logit of the target. Initialised by the call with first = 0.
  float *row_max, *sum, *shifted_sum, *target_logit;
};
TF_KERNEL(void cross_entropy_rows(const CrossEntropyArgs& args, long begin, long end))

// gradient = scale (softmax(logits) - (1 - smoothing) [class is target] - smoothing / classes)
struct CrossEntropyGradientArgs {
  CrossEntropyArgs call;
  const float* row_max;  // (rows): the largest logit
  const float* log;      // (rows): log of the sum of exp(logit - largest)
  const float* scale;    // (rows)
  void* gradient;        // (rows, columns), rows gradient_stride apart; may be the logits
  long gradient_stride;
};
TF_KERNEL(void cross_entropy_gradient_rows(const CrossEntropyGradientArgs& args, long begin,
                                           long end))

}  // namespace tf
