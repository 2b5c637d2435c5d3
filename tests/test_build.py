"""The native module: instruction sets and their selection, probes, and the contents of object
files.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest
import torch
from harness import in_use, python

from transformer_fast import _native, functional

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(_native.module is None, reason=str(_native.why_not)),
]

_C = _native.module
ROOT = Path(__file__).resolve().parents[1]
#: The instruction sets of this architecture, from low to high.
ON_ARM = platform.machine() in ("aarch64", "arm64")
ISAS = ["baseline", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"]
if ON_ARM:
    ISAS = ["neon", "neon_dot", "neon_i8mm"]
on_x86 = pytest.mark.skipif(ON_ARM, reason="this CPU is no x86-64")
#: Sets with 8-bit dot products and no others.
DOT8 = ("avx_vnni", "avx512_vnni", "neon_dot", "neon_i8mm")
SUPPORTED = _C.supported_isas() if _C else []


def import_with(isa, before="", status=0):
    """Imports the package in a new process with TRANSFORMER_FAST_CPU_ISA; returns the finished
    process.
    """
    code = f"{before}\nfrom transformer_fast import _native\nprint(_native.module.isa())"
    return python("-c", code, status=status, TRANSFORMER_FAST_CPU_ISA=isa)


def test_the_environment_selects_the_isa():
    # Names are case-insensitive.
    assert import_with(SUPPORTED[0].upper()).stdout.strip() == SUPPORTED[0]


def test_unknown_isas_raise():
    done = import_with("sse9", status=1)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: TRANSFORMER_FAST_CPU_ISA is 'sse9', which is not")
    assert last.endswith("this machine has: " + ", ".join(SUPPORTED))


# A signal stack of 8 KiB leaves no space for tile registers, so Linux denies them to the process.
# Even a CPU with all features then lacks one.
SMALL_SIGNAL_STACK = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(8192)
stack = Stack(ctypes.addressof(memory), 0, len(memory))
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
"""


def test_unsupported_isas_raise():
    lacking = [isa for isa in ISAS if isa not in SUPPORTED] or ["amx"]
    done = import_with(lacking[0], SMALL_SIGNAL_STACK, status=1)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        f"ValueError: TRANSFORMER_FAST_CPU_ISA is '{lacking[0]}', but this machine does not have"
    )
    assert last.endswith("it has: " + ", ".join(isa for isa in SUPPORTED if isa != lacking[0]))


def test_set_isa_changes_the_isa_in_use():
    with in_use(_C.isa()):
        for isa in SUPPORTED:
            _C.set_isa(isa)
            assert _C.isa() == isa
        with pytest.raises(ValueError, match="'mmx', which is not an instruction set known here"):
            _C.set_isa("mmx")
        assert _C.isa() == SUPPORTED[-1]


def _calls():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, weight = torch.randn(96, 256).to(dtype), torch.randn(384, 256).to(dtype)
        query = torch.randn(2, 4, 40, 32).to(dtype)
        yield partial(functional.linear, x, weight, backend="cpu")
        yield partial(
            functional.scaled_dot_product_attention, query, query, query, is_causal=True,
            backend="cpu",
        )  # fmt: skip


def test_set_isa_while_other_threads_compute():
    """Each result is computed with one instruction set from beginning to end."""
    calls, results = list(_calls()), []

    def count_wrong():
        return sum(
            not any(map(partial(torch.equal, call()), known))
            for _ in range(50)
            for call, known in zip(calls, results, strict=True)
        )

    with in_use(_C.isa()):
        for isa in SUPPORTED:
            _C.set_isa(isa)
            results.append([call() for call in calls])
        results = list(zip(*results, strict=True))
        with ThreadPoolExecutor(2) as pool:
            workers = [pool.submit(count_wrong) for _ in range(2)]
            for isa in cycle(SUPPORTED):
                _C.set_isa(isa)
                if all(worker.done() for worker in workers):
                    break
    assert [worker.result() for worker in workers] == [0, 0]


def test_supported_isas_follow_from_cpu_features():
    cpu = _C.cpu_features()
    assert [isa for isa in ISAS if isa in SUPPORTED] == SUPPORTED  # from low to high
    if ON_ARM:
        assert cpu["neon"]
        assert ("neon_i8mm" in SUPPORTED) == (cpu["dotprod"] and cpu["i8mm"])
        return
    assert ("avx2" in SUPPORTED) == (cpu["avx2"] and cpu["fma"] and cpu["f16c"])
    for isa, extended in (("avx_vnni", "avx2"), ("avx512_vnni", "avx512")):
        assert (isa in SUPPORTED) == (extended in SUPPORTED and cpu[isa])
    assert ("avx512_bf16" in SUPPORTED) == ("avx512_vnni" in SUPPORTED and cpu["avx512_bf16"])


@pytest.mark.parametrize("isa", SUPPORTED)
def test_dot_types_of_each_isa(isa):
    types = ["int8"] if isa in DOT8 else ["int8", "bf16"] if isa in ("avx512_bf16", "amx") else []
    assert _C.dot_types(isa) == types
    with in_use(isa):
        assert _C.dot_types() == types
    with pytest.raises(ValueError, match="isa is 'sse9', which is not an instruction set known"):
        _C.dot_types("sse9")


@on_x86
@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="no /proc/cpuinfo")
def test_cpu_features_agree_with_linux():
    found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    flags = set(found.group(1).split())
    for name, present in _C.cpu_features().items():
        assert present == (name in flags), name


def test_build_info_is_recorded():
    info = _C.build_info()
    assert list(info["isa_flags"]) == [isa for isa in ISAS if isa in info["isa_flags"]]
    flag = ("neon_dot", "+dotprod") if ON_ARM else ("avx2", "-mfma")
    assert flag[1] in info["isa_flags"][flag[0]]
    assert int(info["torch_target"], 16) >> 48 == 0x020A
    assert "-ffast-math" not in str(info)
    assert "-march=native" not in str(info)


# Probes -----------------------------------------------------------------------------------------

#: 8-bit operations per cycle.
OPERATIONS = {
    **{"avx_vnni": 128, "avx512_vnni": 256, "avx512_bf16": 256, "amx": 4096},
    **dict.fromkeys(("neon_dot", "neon_i8mm"), 128),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_probes_of_dot_products_give_plausible_rates(isa, name):
    probe = {"bf16": _C.probe_bf16_dot, "int8": _C.probe_int8_dot}[name]
    if isa not in SUPPORTED:
        with pytest.raises(ValueError, match=f"isa is '{isa}', but this machine does not have it"):
            probe(1, isa)
    elif name in _C.dot_types(isa):
        most = OPERATIONS[isa] * 7.0 / (1 if name == "int8" else 2)
        assert most / 200 < probe(1, isa) <= most
    else:
        others = ", ".join(
            one for one in OPERATIONS if one in ISAS and (name == "int8" or one not in DOT8)
        )
        with pytest.raises(ValueError, match=f"no {name} dot product; these have: {others}"):
            probe(1, isa)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux limits a process's memory")
def test_probes_report_that_the_system_starts_no_more_threads():
    code = """
import resource
import transformer_fast._C as native
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28,) * 2)
try:
    native.probe_fma(4096)
except RuntimeError as error:
    print(error)
"""
    assert "Resource temporarily unavailable" in python("-c", code).stdout


# Object files -------------------------------------------------------------------------------------


def tool(*command):
    return subprocess.run(command, check=True, text=True, capture_output=True).stdout


def kernel_objects():
    """Returns {(kernel, isa): object file} of a developer's build; skips for an installed wheel."""
    record = _native._build_record()
    folder = Path(getattr(record, "BUILD_DIR", "")) / "CMakeFiles"
    if not getattr(record, "BUILD_DIR", None) or not folder.is_dir():
        pytest.skip("the build folder is not here (installed from a wheel)")
    if not (shutil.which("nm") and shutil.which("objdump")):
        pytest.skip("binutils are not installed")
    found = {}
    for path in folder.glob("*.dir/csrc/cpu/**/*_kernel.cpp.o"):
        kernel = path.name.removesuffix("_kernel.cpp.o")
        target = path.relative_to(folder).parts[0].removesuffix(".dir")
        found[kernel, target.removeprefix(f"{kernel}_")] = path
    assert {isa for kernel, isa in found if kernel == "probe"} == set(_C.build_info()["isa_flags"])
    return found


def test_kernels_share_no_symbols():
    """The linker merges weak symbols, so an AVX-512 copy might run on an older CPU."""
    for (kernel, isa), path in kernel_objects().items():
        for line in tool("nm", "-C", str(path)).splitlines():
            kind, name = line[17:].split(maxsplit=1)
            assert kind not in "WwVvuC", f"{kernel} for {isa} shares {name}"
            if kind == "U":
                own = name.startswith(f"tf::{isa}::")
                assert own or "::" not in name, f"{kernel} for {isa} calls {name}"
            elif kind.isupper():
                assert name.startswith(f"tf::{isa}::"), f"{kernel} for {isa} defines {name}"


def test_builds_of_a_kernel_define_the_same_functions():
    """Compares the symbols that are called, for instruction sets up to AVX-512, whose fp32 build also
    serves higher ones.
    """
    names = {}
    for (kernel, isa), path in kernel_objects().items():
        symbols = re.findall(rf" T tf::{isa}::(.*)$", tool("nm", "-C", str(path)), re.MULTILINE)
        assert symbols, f"{kernel} for {isa} defines nothing"
        if isa in ("baseline", "avx2", "avx512", "neon"):
            names.setdefault(kernel, set()).add(tuple(sorted(symbols)))
    assert all(len(variants) == 1 for variants in names.values()), names
    assert " U tf::" not in tool("nm", "-C", _C.__file__)


@on_x86
def test_lower_builds_use_no_wider_registers():
    wider = {"baseline": "%[yz]mm", "avx2": "%zmm", "avx_vnni": "%zmm"}
    checked = 0
    for (kernel, isa), path in kernel_objects().items():
        if isa in wider:
            code = tool("objdump", "-d", "--no-show-raw-insn", str(path))
            assert not re.search(wider[isa], code), f"{kernel} for {isa}"
            checked += 1
    assert checked >= 2


def test_module_has_no_machine_paths():
    content = Path(_C.__file__).read_bytes()
    assert str(ROOT).encode() not in content
    assert sys.prefix.encode() not in content
    paths = re.findall(rb"[ -~]*/[ -~]*\.(?:h|hpp|cpp)\b", content)
    known = rb"(csrc|torch/include)/|.*<pybind11/"  # pybind11's messages recommend headers
    assert [path for path in paths if not re.match(known, path)] == []
