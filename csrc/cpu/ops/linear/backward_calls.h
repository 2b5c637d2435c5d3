// The calls of the backward operators around linear maps, checked, with room for what they give.
// The operators make them; what works them out, by type, is in the files of those, and for half
// types in half_backward.cpp.
#pragma once

#include "cpu/core/host.h"
#include "cpu/simd/dropout.h"

namespace tf {

// Of y = act(x W^T + b). Where it is worked out, m and n are positive, and dy is the gradient
// before the activation.
struct LinearGradients {
  int64_t m, n, k;
  Tensor input, weight;  // (m, k), (n, k)
  Tensor grad;           // keeps dy's memory
  const void* dy;        // (m, n), rows dy_stride apart
  int64_t dy_stride;
  // Results, empty where they are not wanted.
  bool want_input, want_weight, want_bias;
  Tensor grad_input, grad_weight, grad_bias;
};

// Of y = dropout(act(x W1^T + b1)) W2^T + b2. Where it is worked out, m and n are positive.
struct FeedForwardGradients {
  int64_t m, k, f, n;
  Tensor grad, input, weight1, weight2;  // (m, n), (m, k), (f, k), (n, f)
  Tensor preactivation;                  // x W1^T + b1 (m, f), contiguous
  int activation;
  Dropout dropout;
  // Of input, weight1, bias1, weight2, bias2; results are empty where they are not wanted.
  bool wants[5];
  Tensor results[5];

  // Whether the gradient of x W1^T + b1 is needed for itself.
  bool through() const { return wants[0] || wants[1] || wants[2]; }
  void* place(int i) { return data_if(wants[i], results[i]); }
  float* floats(int i) { return floats_if(wants[i], results[i]); }
};

}  // namespace tf
