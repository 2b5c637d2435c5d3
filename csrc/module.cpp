// Python module transformer_fast._C: build info, CPU features, and roofline probes. Importing it
// also registers the operators.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "build_config.h"
#include "cpu/core/allocator.h"
#include "cpu/core/host.h"
#include "cpu/core/isa.h"
#include "cpu/gemm/fingerprint.h"
#include "cpu/probe/probe.h"
#include "kernel_table.h"

namespace py = pybind11;

namespace {

py::dict build_info() {
  struct IsaFlags {
    const char* isa;
    const char* flags;
  };
  constexpr IsaFlags table[] = TF_BUILD_ISA_FLAGS;
  py::dict isa_flags;
  for (const IsaFlags& entry : table) isa_flags[entry.isa] = entry.flags;
  py::dict info;
  info["compiler"] = TF_BUILD_COMPILER;
  info["flags"] = TF_BUILD_FLAGS;
  info["isa_flags"] = isa_flags;
  info["torch_version"] = TF_BUILD_TORCH;
  info["torch_target"] = TF_BUILD_TORCH_TARGET;
  return info;
}

py::dict cpu_features() {
  const tf::CpuFeatures& cpu = tf::cpu_features();
  py::dict features;
#if defined(__aarch64__)
  features["neon"] = cpu.neon;
  features["dotprod"] = cpu.dotprod;
  features["i8mm"] = cpu.i8mm;
#else
  features["avx2"] = cpu.avx2;
  features["fma"] = cpu.fma;
  features["f16c"] = cpu.f16c;
  features["avx512f"] = cpu.avx512f;
  features["avx512bw"] = cpu.avx512bw;
  features["avx512dq"] = cpu.avx512dq;
  features["avx512vl"] = cpu.avx512vl;
  features["avx_vnni"] = cpu.avx_vnni;
  features["avx512_vnni"] = cpu.avx512_vnni;
  features["avx512_bf16"] = cpu.avx512_bf16;
  features["amx_tile"] = cpu.amx_tile;
  features["amx_bf16"] = cpu.amx_bf16;
  features["amx_int8"] = cpu.amx_int8;
#endif
  return features;
}

py::list supported_isas() {
  py::list names;
  for (const tf::Isa isa : tf::kIsas)
    if (tf::isa_supported(isa)) names.append(tf::isa_name(isa));
  return names;
}

py::list dot_types(const std::optional<std::string>& isa) {
  const tf::Isa set = isa ? tf::find_isa(isa->c_str(), "isa") : tf::current_isa();
  py::list names;
  for (const tf::Dot type : tf::kDots)
    if (tf::has_dot(set, type)) names.append(tf::dot_name(type));
  return names;
}

// A matrix with rows of `row_bytes` bytes, `stride` bytes apart.
std::unique_ptr<tf::Fingerprint> take_fingerprint(uintptr_t address, tf::Index rows,
                                                  tf::Index row_bytes, tf::Index stride) {
  if (address == 0 || rows <= 0 || row_bytes <= 0)
    throw std::invalid_argument("Fingerprint: the matrix must not be empty");
  const py::gil_scoped_release release;
  return std::make_unique<tf::Fingerprint>(
      tf::FingerprintArgs{reinterpret_cast<const char*>(address), rows, row_bytes, stride});
}

bool all_hold(const std::vector<tf::Fingerprint*>& fingerprints, int64_t rows) {
  const py::gil_scoped_release release;
  return tf::all_hold(fingerprints, rows);
}

// Returns the number of targets in [0, classes) other than `ignore_index`, and the first that is
// neither in that range nor ignored.
std::pair<int64_t, std::optional<int64_t>> count_targets(uintptr_t address, int64_t count,
                                                         int64_t classes, int64_t ignore_index) {
  const auto* targets = reinterpret_cast<const int64_t*>(address);
  int64_t counted = 0, ignored = 0;
  for (int64_t i = 0; i < count; ++i) {
    const bool ignore = targets[i] == ignore_index;
    ignored += ignore;
    counted += !ignore && static_cast<uint64_t>(targets[i]) < static_cast<uint64_t>(classes);
  }
  if (counted + ignored == count) return {counted, std::nullopt};
  return {counted, *std::find_if(targets, targets + count, [&](int64_t target) {
            return target != ignore_index && (target < 0 || target >= classes);
          })};
}

// Python function without arguments that reads the setting. Never freed: operators may outlive the
// interpreter.
PyObject* batch_invariant_function = nullptr;

// Operators run without the GIL. A thread keeps its Python context when it releases the GIL.
bool context_is_batch_invariant() {
  const PyGILState_STATE state = PyGILState_Ensure();
  PyObject* const found = PyObject_CallNoArgs(batch_invariant_function);
  const bool on = found == Py_True;
  if (found == nullptr) PyErr_WriteUnraisable(batch_invariant_function);
  Py_XDECREF(found);
  PyGILState_Release(state);
  return on;
}

void read_batch_invariant_from(const py::function& function) {
  if (batch_invariant_function != nullptr) return;
  batch_invariant_function = function.inc_ref().ptr();
  tf::batch_invariant_source.store(&context_is_batch_invariant, std::memory_order_release);
}

tf::Index direct_rows(const std::string& element, tf::Index elements) {
  const tf::RunningOperator running;
  if (element == "float32") return tf::direct_rows(tf::Element::float32, elements);
  if (element == "bfloat16") return tf::direct_rows(tf::Element::bfloat16, elements);
  if (element == "float16") return tf::direct_rows(tf::Element::float16, elements);
  throw std::invalid_argument("direct_rows: no kernel multiplies " + element);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  tf::current_isa();  // raises for an unsupported TRANSFORMER_FAST_CPU_ISA at import, not at the
                      // first op

  // The instruction set and batch_invariant() cannot change during a call.
  static const tf::KernelTable table{
      .layer_norm = &tf::OnOneIsa<&tf::run_layer_norm>::run,
      .layer_norm_backward = &tf::OnOneIsa<&tf::run_layer_norm_backward>::run,
      .linear = &tf::OnOneIsa<static_cast<void (*)(const tf::LinearArgs&)>(&tf::run_linear)>::run,
      .linear_backward = &tf::OnOneIsa<&tf::run_linear_backward>::run,
      .feed_forward = &tf::OnOneIsa<&tf::run_feed_forward>::run,
      .feed_forward_backward = &tf::OnOneIsa<&tf::run_feed_forward_backward>::run,
      .attention = &tf::OnOneIsa<&tf::run_attention>::run,
      .attention_backward = &tf::OnOneIsa<&tf::run_attention_backward>::run};
  m.attr("kernel_table") = py::capsule(&table, tf::kKernelTable);

  m.def("build_info", &build_info, "Compiler, flags and torch that this module was built with.");
  m.def("cpu_features", &cpu_features, "CPU features that the kernels may use, by name.");
  m.def("isa", [] { return tf::isa_name(tf::current_isa()); }, "The instruction set in use.");
  m.def("isa_proven", &tf::isa_proven,
        "Whether kernels of the instruction set in use were timed on hardware, or it was named.");
  m.def("is_intel", &tf::is_intel,
        "Whether Intel made this CPU: on others MKL, behind PyTorch's products, does without "
        "AVX-512.");
  m.def("supported_isas", &supported_isas, "Instruction sets this CPU has, from low to high.");
  m.def("dot_types", &dot_types, py::arg("isa") = py::none(),
        "'int8', 'bf16': types that an instruction set multiplies by dot products or tiles; isa "
        "None means the one in use.");
  m.def(
      "set_isa", [](const std::string& name) { tf::set_isa(name.c_str()); }, py::arg("name"),
      py::call_guard<py::gil_scoped_release>(),
      "Chooses the instruction set for the whole process, for tests, once no thread is inside an "
      "operator. Raises ValueError, and RuntimeError if operators run for 10 s without a gap.");

  m.def("read_batch_invariant_from", &read_batch_invariant_from, py::arg("function"),
        "From now on every operator calls `function`, in its caller's context: True if a row of a "
        "result must have the same bits whatever the number of rows. Later calls do nothing.");
  m.def("fill_fresh", &tf::fill_empty, py::arg("fill"),
        "Fills results of operators with NaN before they are written, for tests; returns the "
        "previous "
        "setting.");
  m.def("count_targets", &count_targets, py::arg("address"), py::arg("count"), py::arg("classes"),
        py::arg("ignore_index"),
        "How many of contiguous int64 targets are classes and not ignored, and the first that is "
        "neither a class nor ignored, or None.");
  m.def("direct_rows", &direct_rows, py::arg("element"), py::arg("elements"),
        "Largest number of rows for which a product reads an unpacked weight of `elements` "
        "elements of "
        "float32, bfloat16 or float16.");
  m.def("packs_pieces", &tf::packs_bf16x3, py::arg("rows"),
        "Whether weights for fp32 products of `rows` rows are packed as bf16x3.");
  m.def("splits_panels", &tf::splits_panels, py::arg("rows"),
        "Whether such products split weights packed in fp32 into bf16x3 as they read them.");

  py::class_<tf::Fingerprint>(m, "Fingerprint",
                              "Whether a matrix in memory, which must still be there, has changed.")
      .def(py::init(&take_fingerprint), py::arg("address"), py::arg("rows"), py::arg("row_bytes"),
           py::arg("stride"));
  m.def("all_hold", &all_hold, py::arg("fingerprints"), py::arg("rows"),
        "Whether no change of the matrices is detected; products of `rows` rows.");

  m.def("kept_bytes", &tf::cached_bytes, "Bytes of unused memory in the caching allocator.");
  m.def("kept_limit", &tf::cache_limit, "Limit of the caching allocator in bytes.");
  m.def("set_kept_limit", &tf::set_cache_limit, py::arg("bytes"), "Changes the limit.");
  m.def("release_kept", &tf::release_cached,
        "Frees all cached memory; returns whether there was any.");

  const auto def_probe = [&](const char* name, double (*probe)(int, tf::Isa), const char* doc) {
    m.def(
        name,
        [probe](int threads, const std::optional<std::string>& isa) {
          const tf::Isa chosen = isa ? tf::find_isa(isa->c_str(), "isa") : tf::current_isa();
          py::gil_scoped_release release;
          return probe(threads, chosen);
        },
        py::arg("threads"), py::arg("isa") = py::none(), doc);
  };
  def_probe("probe_fma", &tf::probe_fma,
            "Peak fp32 multiply-add rate in GFLOP/s; isa None means the one in use.");
  def_probe("probe_bf16_dot", &tf::probe_bf16_dot,
            "Peak bf16 dot-product rate in GFLOP/s: vdpbf16ps, or AMX tiles. Raises ValueError for "
            "instruction sets without them, see dot_types.");
  def_probe("probe_int8_dot", &tf::probe_int8_dot,
            "The same for 8-bit dot products: vpdpbusd, or AMX tiles.");
  m.def("probe_read_bandwidth", &tf::probe_read_bandwidth, py::arg("bytes"), py::arg("threads"),
        py::call_guard<py::gil_scoped_release>(),
        "Rate of reading a buffer of that many bytes over and over, in GB/s.");
  m.def("probe_copy_bandwidth", &tf::probe_copy_bandwidth, py::arg("bytes"), py::arg("threads"),
        py::call_guard<py::gil_scoped_release>(),
        "Rate of memcpy between two such buffers, bytes read plus bytes written, in GB/s.");
}
