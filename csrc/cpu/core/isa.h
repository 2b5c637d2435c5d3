// Instruction sets: what this CPU has, which one is in use, and how a call reaches its build.
//
// A kernel file csrc/cpu/<op>_kernel.cpp is compiled once per instruction set with -DTF_ISA=<isa>
// and puts its functions into namespace tf::TF_ISA (helpers in an unnamed namespace inside it, so
// that no build shares a symbol with another). Its header declares them for all builds at once:
//
//   namespace tf { TF_KERNEL(void layer_norm_rows(const float* input, float* output, long rows)) }
//
// and a caller compiled once writes TF_DISPATCH(layer_norm_rows, input, output, rows).
#pragma once

#include "cpu/core/element.h"

namespace tf {

enum class Isa { baseline, avx2, avx512, avx512_bf16, amx };
constexpr int kIsaCount = 5;

// The instruction set in use: the best one the CPU has, or what TRANSFORMER_FAST_CPU_ISA or
// set_isa() chose. The first call reads the environment and throws std::runtime_error when it asks
// for something this CPU lacks.
Isa current_isa();

// Chooses by name for the whole process, once no operator runs (box.h; std::runtime_error if one
// always does). Throws std::invalid_argument for a name unknown or of what this CPU lacks.
void set_isa(const char* name);

// The instruction set of that name; throws like set_isa(), naming `argument`.
Isa find_isa(const char* name, const char* argument);

const char* isa_name(Isa isa);
bool isa_supported(Isa isa);

// Whether a row of a result must have the same bits whatever the number of rows, so that none of
// the choices below goes by it. For the whole process; operators that run meanwhile may see either.
bool batch_invariant();
void set_batch_invariant(bool on);
// batch_invariant() for kernel files, which refer to no C++ symbol outside of their own namespace.
extern "C" bool tf_batch_invariant();

// How fp32 products of so many rows run on bfloat16 units (bf16_amx.h), for which the instruction
// set in use must have tiles. All three were measured.
//
// Whether products of operands that are split for the call do.
bool uses_bf16x3(long rows);
// Whether those with a weight do that is packed in pieces, of 6 bytes a weight.
bool packs_bf16x3(long rows);
// Whether those with a weight do that is packed in fp32. Reading it is most of their work, and it
// is split as it is read.
bool splits_panels(long rows);

// Up to how many rows a product reads a weight of so many elements as it is, in which case no
// packed copy is kept.
long direct_rows(Element type, long elements);

// What CPUID and the operating system say, feature by feature.
struct CpuFeatures {
  bool avx2, fma, f16c, avx512f, avx512bw, avx512dq, avx512vl, avx512_vnni, avx512_bf16, amx_tile,
      amx_bf16, amx_int8;
};
const CpuFeatures& cpu_features();

}  // namespace tf

// Declares a kernel function for every build it has. One macro per list of instruction sets; the
// list must equal the one given to tf_add_kernel() in CMakeLists.txt.
#define TF_DECLARE_IN(isa, ...) \
  namespace isa {               \
  __VA_ARGS__;                  \
  }

#define TF_KERNEL(...)                 \
  TF_DECLARE_IN(baseline, __VA_ARGS__) \
  TF_DECLARE_IN(avx2, __VA_ARGS__)     \
  TF_DECLARE_IN(avx512, __VA_ARGS__)

#define TF_KERNEL_BF16(...) TF_KERNEL(__VA_ARGS__) TF_DECLARE_IN(avx512_bf16, __VA_ARGS__)

#define TF_KERNEL_AMX(...) TF_KERNEL_BF16(__VA_ARGS__) TF_DECLARE_IN(amx, __VA_ARGS__)

// On bfloat16 units only, of whichever kind.
#define TF_KERNEL_UNITS(...) TF_DECLARE_IN(avx512_bf16, __VA_ARGS__) TF_DECLARE_IN(amx, __VA_ARGS__)

// fp32 in pieces on bfloat16 units: only where those are so fast that it pays.
#define TF_KERNEL_BF16X3(...) TF_DECLARE_IN(amx, __VA_ARGS__)

#if defined(TF_HAVE_AVX512_BF16) || defined(TF_HAVE_AMX)
#define TF_HAVE_UNITS 1
#endif

// What is there only in builds that can run in the instruction set (TF_ISAS in CMakeLists.txt).
#ifdef TF_HAVE_BASELINE
#define TF_IN_BASELINE(...) __VA_ARGS__
#else
#define TF_IN_BASELINE(...)
#endif
#ifdef TF_HAVE_AVX2
#define TF_IN_AVX2(...) __VA_ARGS__
#else
#define TF_IN_AVX2(...)
#endif
#ifdef TF_HAVE_AVX512
#define TF_IN_AVX512(...) __VA_ARGS__
#else
#define TF_IN_AVX512(...)
#endif
#ifdef TF_HAVE_AVX512_BF16
#define TF_IN_AVX512_BF16(...) __VA_ARGS__
#else
#define TF_IN_AVX512_BF16(...)
#endif
#ifdef TF_HAVE_AMX
#define TF_IN_AMX(...) __VA_ARGS__
#else
#define TF_IN_AMX(...)
#endif

#ifndef TF_ISA
// Each set sees the next lower one, so tf::amx::f names the best build that f has. Kernel files are
// left out of this: there a missing helper must be an error, not another build's function.
namespace tf {
namespace baseline {}
namespace avx2 {
using namespace baseline;
}
namespace avx512 {
using namespace avx2;
}
namespace avx512_bf16 {
using namespace avx512;
}
namespace amx {
using namespace avx512_bf16;
}
}  // namespace tf

// Calls function(args...) in its best build for the instruction set in use; has its value.
#define TF_DISPATCH(function, ...) TF_DISPATCH_TO(::tf::current_isa(), function, __VA_ARGS__)

// The same for an instruction set named by the caller.
#define TF_DISPATCH_TO(isa, function, ...)                                                     \
  [&] {                                                                                        \
    switch (isa) {                                                                             \
      TF_IN_BASELINE(case ::tf::Isa::baseline : return ::tf::baseline::function(__VA_ARGS__);) \
      TF_IN_AVX2(case ::tf::Isa::avx2 : return ::tf::avx2::function(__VA_ARGS__);)             \
      TF_IN_AVX512(case ::tf::Isa::avx512 : return ::tf::avx512::function(__VA_ARGS__);)       \
      TF_DISPATCH_CASES_UNITS(function, __VA_ARGS__)                                           \
    }                                                                                          \
  }()

// The same for what is declared by TF_KERNEL_UNITS; one of these instruction sets is in use.
#define TF_DISPATCH_UNITS(function, ...)                                            \
  [&] {                                                                             \
    switch (::tf::current_isa()) { TF_DISPATCH_CASES_UNITS(function, __VA_ARGS__) } \
  }()

// What is not among TF_ISAS is never in use, and a kernel may lack that build.
#define TF_DISPATCH_CASES_UNITS(function, ...)                                        \
  TF_IN_AVX512_BF16(                                                                  \
      case ::tf::Isa::avx512_bf16 : return ::tf::avx512_bf16::function(__VA_ARGS__);) \
  TF_IN_AMX(case ::tf::Isa::amx : return ::tf::amx::function(__VA_ARGS__);)           \
  default:                                                                            \
    __builtin_unreachable();
#endif
