// Instruction sets: detection, selection, and dispatch of calls to the build for the selected one.
//
// A kernel file csrc/cpu/<op>_kernel.cpp is compiled once per instruction set with -DTF_ISA=<isa>
// and puts its functions into namespace tf::TF_ISA (helpers in an unnamed namespace inside it, so
// that no two builds share a symbol). Its header declares them for all builds at once:
//
//   namespace tf { TF_KERNEL(void layer_norm_rows(const float* input, float* output, Index rows)) }
//
// and a caller, compiled once, writes TF_DISPATCH(layer_norm_rows, input, output, rows).
#pragma once

#include "types.h"

namespace tf {

// The instruction sets in ascending order of preference, each with the one that it extends. A set
// may extend any earlier one: the builds of a kernel that a CPU can run are those of the set in use
// and of the chain below it. cmake/Isa.cmake has the same table with compiler flags.
//
// Expands X(set, extended set, arguments...) for each set that is built: TF_HAVE_<SET> is 0 or 1.
#define TF_ISA_TABLE(X, ...)                                      \
  TF_IN(TF_HAVE_BASELINE, X(baseline, no_set, __VA_ARGS__))       \
  TF_IN(TF_HAVE_AVX2, X(avx2, baseline, __VA_ARGS__))             \
  TF_IN(TF_HAVE_AVX_VNNI, X(avx_vnni, avx2, __VA_ARGS__))         \
  TF_IN(TF_HAVE_AVX512, X(avx512, avx2, __VA_ARGS__))             \
  TF_IN(TF_HAVE_AVX512_VNNI, X(avx512_vnni, avx512, __VA_ARGS__)) \
  TF_IN(TF_HAVE_NEON, X(neon, no_set, __VA_ARGS__))               \
  TF_IN(TF_HAVE_NEON_DOT, X(neon_dot, neon, __VA_ARGS__))         \
  TF_IN(TF_HAVE_NEON_I8MM, X(neon_i8mm, neon_dot, __VA_ARGS__))   \
  TF_ISA_TABLE_UNITS(X, __VA_ARGS__)
// The sets with bfloat16 units: vdpbf16ps or AMX.
#define TF_ISA_TABLE_UNITS(X, ...)                                     \
  TF_IN(TF_HAVE_AVX512_BF16, X(avx512_bf16, avx512_vnni, __VA_ARGS__)) \
  TF_IN(TF_HAVE_AMX, X(amx, avx512_bf16, __VA_ARGS__))

enum class Isa {
  no_set,
  baseline,
  avx2,
  avx_vnni,
  avx512,
  avx512_vnni,
  avx512_bf16,
  amx,
  neon,
  neon_dot,
  neon_i8mm
};
// The instruction sets of the architecture that this binary is built for.
#if defined(__aarch64__)
constexpr Isa kIsas[] = {Isa::neon, Isa::neon_dot, Isa::neon_i8mm};
#else
constexpr Isa kIsas[] = {Isa::baseline,    Isa::avx2,        Isa::avx_vnni, Isa::avx512,
                         Isa::avx512_vnni, Isa::avx512_bf16, Isa::amx};
#endif

// Element types with instructions of their own: dot products, or AMX tiles.
enum class Dot { none, int8, bf16 };
constexpr Dot kDots[] = {Dot::int8, Dot::bf16};

// The instruction set in use: the best one that the CPU supports, or the one selected by
// TRANSFORMER_FAST_CPU_ISA or set_isa(). The first call reads the environment variable and throws
// std::runtime_error if it names one that the CPU does not support.
Isa current_isa();

// Selects by name for the whole process, once no operator is running (std::runtime_error
// after a timeout). Throws std::invalid_argument for unknown or unsupported names.
void set_isa(const char* name);

// The instruction set of that name; throws like set_isa(), naming `argument`.
Isa find_isa(const char* name, const char* argument);

const char* isa_name(Isa isa);
bool isa_supported(Isa isa);
// True if the kernels of the set in use were timed on hardware, or TRANSFORMER_FAST_CPU_ISA names
// it.
bool isa_proven();
// True if `isa` is `base` or extends it, directly or through others.
bool isa_extends(Isa isa, Isa base);
// True if `isa`, or a set that it extends, has instructions for the type.
bool has_dot(Isa isa, Dot type);
// The set whose kernels multiply packed operands of `type`: the one in use, or one that it extends
// where that is faster.
Isa product_isa(Element type);
const char* dot_name(Dot type);

// True if a row of a result must have the same bits for any number of rows in the call. Then none
// of the choices below depends on the number of rows. Thread-local: operators read it once from the
// caller's context (RunningOperator) and pass it to their worker threads (parallel_for).
bool batch_invariant();
void set_batch_invariant(bool on);
// batch_invariant() for kernel files, which must not reference C++ symbols outside their namespace.
extern "C" bool tf_batch_invariant();

// Whether fp32 products of `rows` rows run on bfloat16 units as bf16x3 (bf16_pairs.h), which
// requires AMX. The thresholds were measured.
//
// For operands that are split during the call.
bool uses_bf16x3(Index rows);
// For weights packed as bf16x3, 6 bytes per element.
bool packs_bf16x3(Index rows);
// For weights packed in fp32 that are split while they are read: with few rows, reading the weight
// is most of the work.
bool splits_panels(Index rows);

// Largest number of rows for which a product reads an unpacked weight of `elements` elements; no
// packed copy is cached for so few rows.
Index direct_rows(Element type, Index elements);

// CPU features that the CPU reports and the operating system has enabled. Features of other
// architectures are false.
struct CpuFeatures {
  bool avx2, fma, f16c, avx512f, avx512bw, avx512dq, avx512vl, avx_vnni, avx512_vnni, avx512_bf16,
      amx_tile, amx_bf16, amx_int8;
  bool neon, dotprod, i8mm;
};
const CpuFeatures& cpu_features();
// True if Intel made the CPU.
bool is_intel();

}  // namespace tf

// Declares a kernel function for each of its builds: one macro per list of instruction sets, which
// must match the list of that name in cmake/Isa.cmake.
#define TF_DECLARE_IN(isa, ...) \
  namespace isa {               \
  __VA_ARGS__;                  \
  }

#define TF_KERNEL(...)                 \
  TF_DECLARE_IN(baseline, __VA_ARGS__) \
  TF_DECLARE_IN(avx2, __VA_ARGS__)     \
  TF_DECLARE_IN(avx512, __VA_ARGS__)   \
  TF_DECLARE_IN(neon, __VA_ARGS__)

// Requires bfloat16 units: vdpbf16ps or AMX.
#define TF_KERNEL_UNITS(...) TF_DECLARE_IN(avx512_bf16, __VA_ARGS__) TF_DECLARE_IN(amx, __VA_ARGS__)

#define TF_KERNEL_AMX(...) TF_KERNEL(__VA_ARGS__) TF_KERNEL_UNITS(__VA_ARGS__)

// 8-bit products, the only ones that the sets with VNNI, SDOT or USDOT add to those they extend.
#define TF_KERNEL_INT8(...)               \
  TF_KERNEL_AMX(__VA_ARGS__)              \
  TF_DECLARE_IN(avx_vnni, __VA_ARGS__)    \
  TF_DECLARE_IN(avx512_vnni, __VA_ARGS__) \
  TF_DECLARE_IN(neon_dot, __VA_ARGS__)    \
  TF_DECLARE_IN(neon_i8mm, __VA_ARGS__)

// fp32 emulated by bf16x3, which is faster than FMA on AMX only.
#define TF_KERNEL_BF16X3(...) TF_DECLARE_IN(amx, __VA_ARGS__)

#define TF_HAVE_UNITS (TF_HAVE_AVX512_BF16 || TF_HAVE_AMX)

// Expands only in builds that include the instruction set (TF_ISAS in CMakeLists.txt): `have` is
// the 0 or 1 of its TF_HAVE_<SET>.
#define TF_IN(have, ...) TF_IN_(have, __VA_ARGS__)
#define TF_IN_(have, ...) TF_IN_##have(__VA_ARGS__)
#define TF_IN_0(...)
#define TF_IN_1(...) __VA_ARGS__

#ifndef TF_ISA
// The namespace of a set imports that of the set it extends, so that tf::amx::f names the best
// build of f. Not in kernel files, where a missing helper must be an error rather than resolve to
// another build.
namespace tf {
namespace no_set {}
namespace baseline {
using namespace no_set;
}
namespace avx2 {
using namespace baseline;
}
namespace avx_vnni {
using namespace avx2;
}
namespace avx512 {
using namespace avx2;
}
namespace avx512_vnni {
using namespace avx512;
}
namespace avx512_bf16 {
using namespace avx512_vnni;
}
namespace amx {
using namespace avx512_bf16;
}
namespace neon {
using namespace no_set;
}
namespace neon_dot {
using namespace neon;
}
namespace neon_i8mm {
using namespace neon_dot;
}
}  // namespace tf

// Calls function(args...) in its best build for the instruction set in use and returns the result.
#define TF_DISPATCH(function, ...) TF_DISPATCH_TO(::tf::current_isa(), function, __VA_ARGS__)

// The same for a given instruction set.
#define TF_DISPATCH_TO(isa, function, ...)                  \
  [&] {                                                     \
    switch (isa) {                                          \
      TF_ISA_TABLE(TF_DISPATCH_CASE, function, __VA_ARGS__) \
      default:                                              \
        __builtin_unreachable();                            \
    }                                                       \
  }()

// The same for functions declared with TF_KERNEL_UNITS; requires that one of these instruction sets
// is in use.
#define TF_DISPATCH_UNITS(function, ...)                          \
  [&] {                                                           \
    switch (::tf::current_isa()) {                                \
      TF_ISA_TABLE_UNITS(TF_DISPATCH_CASE, function, __VA_ARGS__) \
      default:                                                    \
        __builtin_unreachable();                                  \
    }                                                             \
  }()

#define TF_DISPATCH_CASE(set, extended, function, ...) \
  case ::tf::Isa::set:                                 \
    return ::tf::set::function(__VA_ARGS__);
#endif
