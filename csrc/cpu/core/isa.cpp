#include "cpu/core/isa.h"

#if !defined(__aarch64__)
#include <cpuid.h>
#endif
#include <strings.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

#include "cpu/core/host.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tf {
namespace {

// Features that a set needs beyond those of the set that it extends.
bool has_baseline(const CpuFeatures&) { return true; }
bool has_avx2(const CpuFeatures& cpu) { return cpu.avx2 && cpu.fma && cpu.f16c; }
bool has_avx_vnni(const CpuFeatures& cpu) { return cpu.avx_vnni; }
bool has_avx512(const CpuFeatures& cpu) {
  return cpu.avx512f && cpu.avx512bw && cpu.avx512dq && cpu.avx512vl;
}
bool has_avx512_vnni(const CpuFeatures& cpu) { return cpu.avx512_vnni; }
bool has_avx512_bf16(const CpuFeatures& cpu) { return cpu.avx512_bf16; }
// All CPUs with AMX-BF16 have AMX-INT8; kernels use both.
bool has_amx([[maybe_unused]] const CpuFeatures& cpu) {
#ifdef TF_EMULATE_AMX
  return true;
#else
  return cpu.amx_tile && cpu.amx_bf16 && cpu.amx_int8;
#endif
}
bool has_neon(const CpuFeatures& cpu) { return cpu.neon; }
bool has_neon_dot(const CpuFeatures& cpu) { return cpu.dotprod; }
bool has_neon_i8mm(const CpuFeatures& cpu) { return cpu.i8mm; }

struct Entry {
  Isa isa, extended;
  const char* name;
  bool built;
  bool (*has)(const CpuFeatures&);
  Dot dot;      // what it adds to the sets that it extends
  bool proven;  // its kernels were timed on hardware
};

// All sets, in ascending order of preference; see TF_ISA_TABLE.
constexpr Entry kSets[] = {
    {Isa::baseline, Isa::no_set, "baseline", TF_HAVE_BASELINE, has_baseline, Dot::none, true},
    {Isa::avx2, Isa::baseline, "avx2", TF_HAVE_AVX2, has_avx2, Dot::none, true},
    {Isa::avx_vnni, Isa::avx2, "avx_vnni", TF_HAVE_AVX_VNNI, has_avx_vnni, Dot::int8, true},
    {Isa::avx512, Isa::avx2, "avx512", TF_HAVE_AVX512, has_avx512, Dot::none, true},
    {Isa::avx512_vnni, Isa::avx512, "avx512_vnni", TF_HAVE_AVX512_VNNI, has_avx512_vnni, Dot::int8,
     true},
    {Isa::avx512_bf16, Isa::avx512_vnni, "avx512_bf16", TF_HAVE_AVX512_BF16, has_avx512_bf16,
     Dot::bf16, true},
    {Isa::amx, Isa::avx512_bf16, "amx", TF_HAVE_AMX, has_amx, Dot::none, true},
    {Isa::neon, Isa::no_set, "neon", TF_HAVE_NEON, has_neon, Dot::none, false},
    {Isa::neon_dot, Isa::neon, "neon_dot", TF_HAVE_NEON_DOT, has_neon_dot, Dot::int8, false},
    {Isa::neon_i8mm, Isa::neon_dot, "neon_i8mm", TF_HAVE_NEON_I8MM, has_neon_i8mm, Dot::none,
     false},
};

const Entry* entry_of(Isa isa) {
  for (const Entry& set : kSets)
    if (set.isa == isa) return &set;
  return nullptr;
}

#if defined(__aarch64__)

CpuFeatures detect() {
  CpuFeatures found{};
  found.neon = true;
#if defined(__linux__)
  found.dotprod = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
  found.i8mm = getauxval(AT_HWCAP2) & HWCAP2_I8MM;
#elif defined(__APPLE__)
  const auto has = [](const char* name) {
    int value = 0;
    size_t size = sizeof(value);
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
  };
  found.dotprod = has("hw.optional.arm.FEAT_DotProd");
  found.i8mm = has("hw.optional.arm.FEAT_I8MM");
#endif
  return found;
}

#else

bool bit(unsigned word, int index) { return (word >> index) & 1u; }

// XCR0: the register states that the operating system saves and restores.
unsigned long long enabled_states() {
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<unsigned long long>(high) << 32) | low;
}

// Linux grants the 8 KiB of AMX tile state only to processes that request it.
bool request_amx_permission() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// Bit positions: Intel SDM volume 2, CPUID leaves 1 and 7; XCR0 in volume 1, section 13.
CpuFeatures detect() {
  CpuFeatures found{};
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
  const bool fma = bit(c, 12), f16c = bit(c, 29), osxsave = bit(c, 27), avx = bit(c, 28);
  if (!osxsave || !avx) return found;
  const unsigned long long states = enabled_states();
  const bool ymm = (states & 0x6) == 0x6;
  const bool zmm = ymm && (states & 0xe0) == 0xe0;
  const bool tiles = (states & 0x60000) == 0x60000;
  if (!ymm || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  const unsigned subleaves = a;
  found.fma = fma;
  found.f16c = f16c;
  found.avx2 = bit(b, 5);
  found.avx512f = zmm && bit(b, 16);
  found.avx512dq = zmm && bit(b, 17);
  found.avx512bw = zmm && bit(b, 30);
  found.avx512vl = zmm && bit(b, 31);
  found.avx512_vnni = zmm && bit(c, 11);
  const bool amx_bf16 = bit(d, 22), amx_tile = bit(d, 24), amx_int8 = bit(d, 25);
  if (tiles && amx_tile && request_amx_permission()) {
    found.amx_tile = true;
    found.amx_bf16 = amx_bf16;
    found.amx_int8 = amx_int8;
  }
  if (subleaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) {
    found.avx_vnni = bit(a, 4);
    found.avx512_bf16 = zmm && bit(a, 5);
  }
  return found;
}

#endif

std::string names_of(bool all) {
  std::string names;
  for (const Entry& set : kSets) {
    if (!all && !isa_supported(set.isa)) continue;
    if (!names.empty()) names += ", ";
    names += set.name;
  }
  return names;
}

Isa best_isa() {
  Isa best = Isa::no_set;
  for (const Entry& set : kSets)
    if (isa_supported(set.isa)) best = set.isa;
  if (best == Isa::no_set)
    throw std::runtime_error("this build has kernels for no instruction set of this machine");
  return best;
}

// Returns the usable instruction set of that name; otherwise throws Error, which begins with
// `what`.
template <class Error>
Isa parse(const char* name, const std::string& what) {
  for (const Entry& set : kSets) {
    if (strcasecmp(name, set.name) != 0) continue;
    if (isa_supported(set.isa)) return set.isa;
    throw Error(what + "'" + name +
                "', but this machine does not have it; it has: " + names_of(false));
  }
  throw Error(what + "'" + name + "', which is not an instruction set known here (" +
              names_of(true) + "); this machine has: " + names_of(false));
}

Isa initial_isa() {
  const char* forced = std::getenv("TRANSFORMER_FAST_CPU_ISA");
  if (forced == nullptr || *forced == '\0') return best_isa();
  return parse<std::runtime_error>(forced, "TRANSFORMER_FAST_CPU_ISA is ");
}

std::atomic<Isa>& chosen() {
  static std::atomic<Isa> isa{initial_isa()};
  return isa;
}

thread_local bool invariant = false;

bool has_bf16x3() { return current_isa() == Isa::amx && !batch_invariant(); }

}  // namespace

bool batch_invariant() { return invariant; }

extern "C" bool tf_batch_invariant() { return batch_invariant(); }

void set_batch_invariant(bool on) { invariant = on; }

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

bool isa_supported(Isa isa) {
  const Entry* set = entry_of(isa);
  if (set == nullptr || !set->built) return false;
  for (; set != nullptr; set = entry_of(set->extended))
    if (!set->has(cpu_features())) return false;
  return true;
}

bool isa_proven() {
  static const char* const named = std::getenv("TRANSFORMER_FAST_CPU_ISA");
  return entry_of(current_isa())->proven || (named != nullptr && *named != '\0');
}

bool isa_extends(Isa isa, Isa base) {
  while (isa != base && isa != Isa::no_set) isa = entry_of(isa)->extended;
  return isa == base;
}

bool has_dot(Isa isa, Dot type) {
  for (const Entry* set = entry_of(isa); set != nullptr; set = entry_of(set->extended))
    if (set->dot == type) return true;
  return false;
}

Isa product_isa(Element type) {
  // Intel CPUs run vdpbf16ps at half the rate of fp32 multiply-adds (Emerald Rapids and later, AMX
  // aside), so converted operands take 0.55 of the time. Unpacked weights of few rows are read as
  // they are, see direct_rows().
  static const bool slow = is_intel() && isa_supported(Isa::avx512);
  const Isa isa = current_isa();
  return type == Element::bfloat16 && isa == Isa::avx512_bf16 && slow ? Isa::avx512 : isa;
}

bool is_intel() {
#if defined(__aarch64__)
  return false;
#else
  return __builtin_cpu_is("intel") != 0;
#endif
}

const char* dot_name(Dot type) { return type == Dot::int8 ? "int8" : "bf16"; }

const char* isa_name(Isa isa) { return entry_of(isa)->name; }

Isa current_isa() { return chosen().load(std::memory_order_relaxed); }

bool uses_bf16x3(Index rows) { return rows >= 72 && has_bf16x3(); }

bool packs_bf16x3(Index rows) { return rows >= 144 && has_bf16x3(); }

bool splits_panels(Index rows) { return rows >= 12 && has_bf16x3() && !packs_bf16x3(rows); }

Index direct_rows(Element type, Index elements) {
  // Weights larger than the caches are read from memory, which hides the arithmetic of more rows;
  // verifying the fingerprint of a packed copy would read them as well.
  constexpr Index kMinBytes = Index{16} << 20;
  if (batch_invariant()) return 0;
  const Isa isa = current_isa();
  const bool uncached = isa != Isa::amx && elements * element_bytes(type) >= kMinBytes;
  switch (type) {
    case Element::float32:
      // With 8 rows, twice as fast as packing in each call. Up to 1024 x 512, 0.87 to 1 times as
      // fast as with a cached packed copy.
      if (isa != Isa::amx && isa_extends(isa, Isa::avx512) && elements <= Index{1} << 19) return 12;
      return uncached ? 8 : 4;
    case Element::float16:  // with F16C
      return isa_extends(isa, Isa::avx2) || isa_extends(isa, Isa::neon) ? 4 : 0;
    case Element::bfloat16:
      // AMX multiplies 16 rows by a panel in the time of one.
      if (isa == Isa::amx) return 4;
      if (has_dot(isa, Dot::bf16)) return uncached ? 12 : 8;
      // Else it is converted to fp32.
      if (isa_extends(isa, Isa::avx512)) return 4;
      return !isa_extends(isa, Isa::avx2) ? 0 : uncached ? 4 : 2;
    default:
      return 0;
  }
}

std::atomic<bool (*)()> batch_invariant_source{nullptr};

std::atomic<Index> running_operators{0};

void wait_for_set_isa() {
  while (running_operators.load(std::memory_order_acquire) < 0) std::this_thread::yield();
}

void set_isa(const char* name) {
  constexpr Index kStoring = -(Index{1} << 40);
  constexpr auto kTimeout = std::chrono::seconds(10);
  const Isa isa = parse<std::invalid_argument>(name, "set_isa: name is ");
  const auto end = std::chrono::steady_clock::now() + kTimeout;
  for (Index none = 0; !running_operators.compare_exchange_strong(none, kStoring); none = 0) {
    if (std::chrono::steady_clock::now() > end)
      throw std::runtime_error("set_isa: operators of other threads have been running for 10 s");
    std::this_thread::yield();
  }
  chosen().store(isa, std::memory_order_relaxed);
  running_operators.fetch_sub(kStoring, std::memory_order_release);
}

Isa find_isa(const char* name, const char* argument) {
  return parse<std::invalid_argument>(name, std::string(argument) + " is ");
}

}  // namespace tf
