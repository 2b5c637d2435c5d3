// Cross entropy of rows of logits with label smoothing, over some of the classes at a time: the
// softmax is online, so the logits of a row need not be in memory together.
#pragma once

#include "cpu/core/isa.h"
#include "types.h"

namespace tf {

// Distances in elements. Rows may come in groups: the pixels of an image, whose classes are planes.
struct LogitsLayout {
  Index row;         // between neighbouring rows; this or `column` is 1
  Index column = 1;  // between neighbouring classes
  Index group = 0;   // between the first rows of neighbouring groups
};

struct CrossEntropyArgs {
  Element type;           // of logits and gradient
  const void* logits;     // (rows, columns): classes first ... first + columns
  LogitsLayout layout;    // of logits
  Index group_rows;       // rows of a group; at least all rows if there are no groups
  const int64_t* target;  // (rows)
  Index first, columns, classes;
  int64_t ignored;  // rows with this target have no loss and no gradient
  float smoothing;
  // State over classes 0 ... first + columns, (rows) each: largest logit, sum of
  // exp(logit - row_max), sum of logit - row_max, and logit of the target. nullptr if columns ==
  // classes.
  float *row_max, *sum, *shifted_sum, *target_logit;
  // Written with the last class: losses (rows); largest logit and log of the sum (rows, 2).
  float *losses, *statistics;
};
TF_KERNEL(void cross_entropy_rows(const CrossEntropyArgs& args, Index begin, Index end))

// gradient = scale (softmax(logits) - (1 - smoothing) [class is target] - smoothing / classes)
struct CrossEntropyGradientArgs {
  CrossEntropyArgs call;  // its `statistics` are an input here
  const float* scale;     // (rows), scale_stride apart
  Index scale_stride;     // 1, or 0: one for all rows
  void* gradient;         // (rows, columns); may be the logits
  LogitsLayout layout;    // of gradient, in the same groups
};
TF_KERNEL(void cross_entropy_gradient_rows(const CrossEntropyGradientArgs& args, Index begin,
                                           Index end))

}  // namespace tf
