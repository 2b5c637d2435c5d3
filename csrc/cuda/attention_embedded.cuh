// Attention of many keys, by kernels that Triton compiled when the package was built (embedded.h).
//
// They take half types, heads of 64 or 128, key lengths and causality. Saved for the backward is
// shift = log2(sum of exp2) of each row in place of its maximum, beside the sum: these kernels and
// those of CUDA C++ do not read each other's. So what decides who serves a call is what its forward
// and its backward know alike.
#pragma once

#include <stdexcept>

#include "cuda/attention.cuh"
#include "cuda/embedded.h"

namespace tf::cuda {

// Of the current device, 10 major + minor.
#ifdef TF_SIMT
inline int compute_capability() { return simt::capability; }
#else
inline int compute_capability() {
  constexpr int kDevices = 64;
  static int known[kDevices];
  int device = 0, major = 0, minor = 0;
  check(cudaGetDevice(&device));
  if (device < kDevices && known[device] != 0) return known[device];
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  if (device < kDevices) known[device] = 10 * major + minor;
  return 10 * major + minor;
}
#endif

// Code of 8.0 runs on all GPUs 8.x. From 9.0 on kernels are compiled with what only one
// architecture has.
inline bool runs_on(int architecture, int capability) {
  const bool upwards = architecture / 10 == 8 && capability / 10 == 8;
  return architecture == capability || (upwards && architecture < capability);
}

inline const EmbeddedKernel* find_embedded(EmbeddedKind kind, Element element, int head,
                                           bool causal) {
  const EmbeddedKernel* best = nullptr;
  const int capability = compute_capability();
  for (const EmbeddedKernel* one : embedded_kernels())
    if (one->kind == kind && one->bfloat16 == (element == Element::bfloat16) && one->head == head &&
        one->causal == causal && runs_on(one->architecture, capability) &&
        (best == nullptr || best->architecture < one->architecture))
      best = one;
  return best;
}

// The kernels that serve a call, all of them or none.
struct EmbeddedAttention {
  const EmbeddedKernel *forward = nullptr, *backward_query = nullptr, *backward_key = nullptr;
  explicit operator bool() const { return backward_key != nullptr; }
};

// More keys than the kernels of CUDA C++ are made for.
constexpr int kFewKeys = 512;

inline EmbeddedAttention find_embedded(const AttentionArgs& call) {
  const int head = call.query.size;
  // Strides are 32 bits wide; those of a copy, at least, must fit.
  const bool narrow = int64_t{call.heads} * call.queries * head <= INT32_MAX &&
                      int64_t{call.heads} * call.keys * head <= INT32_MAX;
  if (call.keys <= kFewKeys || call.queries == 1 || call.type == Element::float32 ||
      call.value.size != head || call.mask_type != MaskType::none || call.dropout.on ||
      call.scaled || !narrow || (call.lengths != nullptr && !call.long_lengths))
    return {};
  EmbeddedAttention found;
  found.forward = find_embedded(EmbeddedKind::forward, call.type, head, call.causal);
  found.backward_query = find_embedded(EmbeddedKind::backward_query, call.type, head, call.causal);
  if (found.forward && found.backward_query)
    found.backward_key = find_embedded(EmbeddedKind::backward_key, call.type, head, call.causal);
  return found;
}

// Whether the kernels can read a tensor as it is: they were compiled for an aligned address and
// strides that are multiples of 16.
inline bool embedded_can_read(const HeadsView& view) {
  const auto good = [](int64_t stride) { return stride % 16 == 0 && stride <= INT32_MAX; };
  return aligned(view.data) && view.column == 1 && good(view.batch) && good(view.head) &&
         good(view.row);
}

class EmbeddedArguments {
  using P = EmbeddedParameter;

 public:
  void set(P which, const void* value) { word(which).pointer = value; }
  void set(P which, int value) { word(which).integer = value; }
  void set(P which, float value) { word(which).real = value; }
  void set(P which, P strides, const HeadsView& view) {
    set(which, view.data);
    const int first = static_cast<int>(strides);
    const int64_t values[] = {view.batch, view.head, view.row};
    for (int i = 0; i < 3; ++i) set(static_cast<P>(first + i), static_cast<int>(values[i]));
  }
  void* at(P which) { return &word(which); }

 private:
  union Word {
    const void* pointer;
    int integer;
    float real;
  };
  Word& word(P which) { return words_[static_cast<int>(which)]; }
  Word words_[static_cast<int>(P::count)] = {};
};

// The length where a call has none: more keys than there are.
#ifdef TF_SIMT
inline long long no_length = INT64_MAX;
inline const void* address_of_no_length() { return &no_length; }
#else
static __device__ long long no_length = INT64_MAX;
inline const void* address_of_no_length() {
  const DespiteCapture here;  // CUDA may load what has the symbol only now
  void* found = nullptr;
  check(cudaGetSymbolAddress(&found, no_length));
  return found;
}
#endif

// What all three are told.
inline EmbeddedArguments embedded_arguments(const AttentionArgs& call) {
  using P = EmbeddedParameter;
  EmbeddedArguments found;
  found.set(P::q_ptr, P::stride_qb, call.query);
  found.set(P::k_ptr, P::stride_kb, call.key);
  found.set(P::v_ptr, P::stride_vb, call.value);
  found.set(P::length_ptr, call.lengths != nullptr ? call.lengths : address_of_no_length());
  found.set(P::stride_length, static_cast<int>(call.lengths != nullptr ? call.length_stride : 0));
  found.set(P::shift_ptr, call.row_max);
  found.set(P::norm_ptr, call.row_sum);
  found.set(P::heads, call.heads);
  found.set(P::key_heads, call.heads / call.group);
  found.set(P::group, call.group);
  found.set(P::queries, call.queries);
  found.set(P::keys, call.keys);
  found.set(P::scale, call.exponent);
  found.set(P::grad_scale, call.scale);
  found.set(P::keep_scale, 1.0f);
  return found;
}

// A program for each tile of `rows` rows of each of `heads` heads.
inline void launch_embedded(const EmbeddedKernel& kernel, int64_t rows, int64_t heads,
                            EmbeddedArguments& arguments, Stream stream) {
  const int64_t blocks = ceil_div(rows, kernel.tile) * heads;
  if (blocks == 0) return;
  void* given[static_cast<int>(EmbeddedParameter::count) + 8];
  for (int i = 0; i < kernel.count; ++i) given[i] = arguments.at(kernel.parameters[i]);
  const dim3 grid(static_cast<unsigned>(blocks));
#ifdef TF_SIMT
  (void)stream;
  simt::foreign(&kernel, static_cast<int>(grid.x), given);
#elif CUDART_VERSION >= 12080
  launch_cubin(kernel.code, kernel.name, grid, kernel.threads, kernel.shared, stream, given);
#else
  throw std::runtime_error("CUDA: this library was built without a way to load kernels");
#endif
}

}  // namespace tf::cuda
