// Kernels as plain functions: what `_C` hands to the module of the autograd nodes (csrc/autograd),
// which runs them without dispatcher, tensors and the cache of packed weights. Both modules are
// built from one source tree, in one go.
#pragma once

#include "cpu/ops/attention/attention.h"
#include "cpu/ops/feed_forward/feed_forward.h"
#include "cpu/ops/layer_norm/layer_norm.h"
#include "cpu/ops/linear/linear.h"

namespace tf {

// Gradients of a linear layer, m and n positive; nullptr: not wanted.
struct LinearBackwardArgs {
  Element type;               // of all tensors
  const void* grad;           // dY (m, n), rows grad_stride apart
  const void* x;              // (m, k), rows x_stride apart
  const void* weight;         // W (n, k), rows weight_stride apart
  const void* preactivation;  // (m, n), contiguous: x W^T + bias, for an activation
  void *grad_input, *grad_weight, *grad_bias;  // (m, k), (n, k), (n), contiguous
  Index m, n, k, grad_stride, x_stride, weight_stride;
  int activation;
};

// Gradients of a feed-forward network, m and n positive.
struct FeedForwardBackwardArgs {
  Element type;                   // of all tensors
  const void* grad;               // dY (m, n), rows grad_stride apart
  const void* x;                  // (m, k), rows x_stride apart
  const void *weight1, *weight2;  // (f, k), (n, f), rows weight*_stride apart
  const void* z;                  // (m, f), contiguous: x W1^T + b1
  Index m, k, f, n, grad_stride, x_stride, weight1_stride, weight2_stride;
  int activation;
  Dropout dropout;
  void* results[5];  // of x, W1, b1, W2, b2, contiguous; nullptr: not wanted
};

// They run on torch's threads, and allocate nothing but scratch.
void run_linear(const LinearArgs& args);
void run_linear_backward(LinearBackwardArgs args);
void run_feed_forward(const FeedForwardArgs& args, const void* weight1, const void* weight2);
void run_feed_forward_backward(const FeedForwardBackwardArgs& args);
// grad_weight, grad_bias: (n), of args.weight_type, or nullptr. Sets args.partial and args.blocks.
void run_layer_norm_backward(LayerNormBackwardArgs args, void* grad_weight, void* grad_bias);
// Without a gradient of the mask. Sets args.delta.
void run_attention_backward(AttentionBackwardArgs args);

struct KernelTable {
  void (*layer_norm)(const LayerNormArgs& args, Index rows);
  void (*layer_norm_backward)(LayerNormBackwardArgs args, void* grad_weight, void* grad_bias);
  void (*linear)(const LinearArgs& args);  // from the unpacked weight
  void (*linear_backward)(LinearBackwardArgs args);
  void (*feed_forward)(const FeedForwardArgs& args, const void* weight1, const void* weight2);
  void (*feed_forward_backward)(const FeedForwardBackwardArgs& args);
  void (*attention)(AttentionArgs args);
  void (*attention_backward)(AttentionBackwardArgs args);
};
// Name of the capsule that holds the address of the table.
constexpr const char* kKernelTable = "transformer_fast._C.kernel_table";

}  // namespace tf
