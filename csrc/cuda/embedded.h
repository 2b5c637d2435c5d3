// Kernels of attention that Triton compiled when the package was built, and what a launch of them
// needs. backends/triton/embed.py writes the tables. Free of CUDA.
#pragma once

#include <cstddef>
#include <vector>

namespace tf::cuda {

enum class EmbeddedKind { forward, backward_query, backward_key };

// What a kernel may be given, by the names of its parameters in backends/triton. An argument that
// Triton compiled into the code, or that is None, is no parameter any more.
enum class EmbeddedParameter : unsigned char {
  // clang-format off
  q_ptr, k_ptr, v_ptr, length_ptr, out_ptr, shift_ptr, norm_ptr, do_ptr, delta_ptr,
  dq_ptr, dk_ptr, dv_ptr,
  scratch_ptr,  // behind all others, of Triton's own, for what none of these kernels does
  // Batch, head and row of a tensor follow one another.
  stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks,
  stride_vb, stride_vh, stride_vs, stride_ob, stride_oh, stride_ot,
  stride_gb, stride_gh, stride_gt, stride_dqb, stride_dqh, stride_dqt,
  stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs,
  stride_mb, stride_mh, stride_mt, stride_ms,
  stride_length, stride_query_length, stride_list_b, stride_list_h, capacity,
  heads, key_heads, group, queries, keys, limit,
  scale, grad_scale, keep_scale,
  count
  // clang-format on
};

struct EmbeddedKernel {
  const char* name;           // in its code
  const unsigned char* code;  // a cubin
  int architecture;           // compute capability, 10 major + minor
  EmbeddedKind kind;
  bool bfloat16;  // or float16
  int head;       // of queries, keys and values
  bool causal;
  int tile;  // queries of a program; keys for gradients of keys and values
  int threads, shared;
  const EmbeddedParameter* parameters;
  int count;
};

// Of all architectures.
inline std::vector<const EmbeddedKernel*>& embedded_kernels() {
  static std::vector<const EmbeddedKernel*> all;
  return all;
}

// A table of them, known from the start of the program.
struct Embedded {
  template <size_t kCount>
  explicit Embedded(const EmbeddedKernel (&table)[kCount]) {
    for (const EmbeddedKernel& kernel : table) embedded_kernels().push_back(&kernel);
  }
};

}  // namespace tf::cuda
