// Parallel execution of the feed-forward network.
#pragma once

#include "cpu/ops/feed_forward/feed_forward.h"
#include "cpu/ops/linear/linear_host.h"

namespace tf {

// Weights as for run_linear(), packed into shared scratch 0 and 1 if necessary; `slot` is for the
// hidden block of a call of few rows.
void run_feed_forward(FeedForwardArgs args, const Matrix& weight1,
                      const std::optional<Tensor>& packed1, const Matrix& weight2,
                      const std::optional<Tensor>& packed2, int slot);

// The same with 8-bit weights, packed.
void run_int8_feed_forward(FeedForwardArgs args, int slot);

}  // namespace tf
