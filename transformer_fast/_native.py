"""Loads the native module `_C`, or records the reason why it is missing.

Importing `_C` registers the operators ``torch.ops.transformer_fast.<op>.cpu``. The CUDA kernels are in a
library beside it, `CUDA_LIBRARY`, which is no Python module: loading it registers ``<op>.cuda``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

# Import torch before _C, which links torch's shared libraries and finds them once they are loaded.
import torch

from . import _switches

OLDEST_TORCH = (2, 10)
#: Systems and architectures with kernels, as in setup.py.
MACHINES = {("Linux", "x86_64"), ("Linux", "aarch64"), ("Darwin", "arm64")}
PLATFORMS = "Linux on x86-64 or 64-bit ARM, or macOS on Apple silicon"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


#: The first two numbers of PyTorch's version.
TORCH_VERSION = _numbers(torch.__version__)


def _build_record() -> ModuleType | None:
    """The file that setup.py writes beside this one, if the package was ever built."""
    try:
        return importlib.import_module("transformer_fast._build_info")
    except ImportError:
        return None


def _why_absent() -> str:
    """Returns the reason why there is no module for this interpreter."""
    system, machine = platform.system(), platform.machine()
    if (system, machine) not in MACHINES:
        return f"the native kernels need {PLATFORMS}; this is {system} on {machine}"
    record = _build_record()
    if record is None:
        return (
            "the native module was not built: run `make build`; or install the package, and run Python "
            "outside its source folder"
        )
    if record.REASON:
        return str(record.REASON)
    if sys.implementation.cache_tag != record.PYTHON:
        return (
            f"the native module was built for {record.PYTHON}; "
            f"this interpreter is {sys.implementation.cache_tag}"
        )
    return "the native module was built, but its file is missing; install the package again"


def _load() -> tuple[ModuleType | None, str | None]:
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    if not any(Path(__file__).with_name(f"_C{suffix}").is_file() for suffix in suffixes):
        return None, _why_absent()
    if TORCH_VERSION < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return None, f"the native module needs torch {oldest} or later; this is {torch.__version__}"
    try:
        return importlib.import_module("transformer_fast._C"), None
    except ImportError as error:
        # pybind11 converts exceptions of the module's initialization to ImportError. An invalid
        # TRANSFORMER_FAST_CPU_ISA must be reported to the user, instead of running without kernels.
        if "TRANSFORMER_FAST_CPU_ISA" in str(error):
            raise _switches.refuse(str(error)) from None
        return None, f"the native module could not be loaded: {error}"


#: The native module ``_C``; None: it is missing.
module: ModuleType | None
#: The reason why `module` is None, as a sentence; None if it is loaded.
why_not: str | None
module, why_not = _load()


def _load_autograd() -> tuple[ModuleType | None, str | None]:
    """Loads the entries of small calls (``csrc/autograd``), for one version of PyTorch only."""
    if module is None:
        return None, why_not
    record = _build_record()
    built = getattr(record, "TORCH", "").partition("+")[0]
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    if not any(Path(__file__).with_name(f"_autograd{suffix}").is_file() for suffix in suffixes):
        return None, getattr(record, "AUTOGRAD_REASON", "") or "the entries in C++ were not built"
    if built != torch.__version__.partition("+")[0]:
        return None, f"the entries in C++ were built for torch {built}; this is {torch.__version__}"
    try:
        return importlib.import_module("transformer_fast._autograd"), None
    except ImportError as error:
        return None, f"the entries in C++ could not be loaded: {error}"


#: The module of `fast_path.entry`, or None and the reason why.
autograd, why_no_autograd = _load_autograd()


#: True if a warning is due: kernels are missing that run here by default (none on ARM), the build
#: did not exclude them, and `warn_of_absence` has not warned.
unannounced: bool = (
    module is None
    and (platform.system(), platform.machine()) == ("Linux", "x86_64")
    and not getattr(_build_record(), "PURE", False)
)


#: Functions that `warn_of_absence` calls.
at_warning: list[Callable[[], None]] = []


def warn_of_absence() -> None:
    """Warns that the kernels are missing, once: callers test `unannounced` first."""
    global unannounced
    if torch.compiler.is_compiling():
        return
    unannounced = False
    for act in at_warning:
        act()
    warnings.warn(
        f"transformer_fast runs on PyTorch's own ops, without its CPU kernels: {why_not}. To build "
        "them, run `TRANSFORMER_FAST_BUILD=require pip install --no-deps --force-reinstall .` in a "
        "clone, in the environment that has torch; docs/guides/install.md has more.",
        RuntimeWarning,
        stacklevel=2,
    )


CUDA_LIBRARY = Path(__file__).with_name("_C_cuda.so")


#: Names of ARM CPUs by /proc/cpuinfo's implementer and part (util-linux has the whole list).
_ARM_CPUS = {
    (0x41, 0xD03): "Cortex-A53", (0x41, 0xD07): "Cortex-A57", (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD0B): "Cortex-A76", (0x41, 0xD0C): "Neoverse N1", (0x41, 0xD40): "Neoverse V1",
    (0x41, 0xD49): "Neoverse N2", (0x41, 0xD4F): "Neoverse V2", (0x41, 0xD84): "Neoverse V3",
    (0x41, 0xD8E): "Neoverse N3", (0x48, 0xD01): "Kunpeng 920", (0x6D, 0xD49): "Azure Cobalt 100",
    (0xC0, 0xAC3): "Ampere-1", (0xC0, 0xAC4): "Ampere-1a",
}  # fmt: skip


def cpu_model() -> str:
    """Returns the CPU's name; adds family and model if it has no number, as in virtual machines."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    parts = r"^CPU implementer\s*:\s*(\w+)$(?:\n.*)*?\nCPU part\s*:\s*(\w+)$"
    cores = [(int(a, 16), int(b, 16)) for a, b in re.findall(parts, text, re.MULTILINE)]
    if cores:  # phones and small boards have several kinds
        named = (_ARM_CPUS.get(one, "ARM {:#x}:{:#x}".format(*one)) for one in cores)
        return " and ".join(dict.fromkeys(named))
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "Apple"
    found = re.search(r"^(?:model name|Hardware|cpu model)\s*:\s*(.+)$", text, re.MULTILINE)
    name = " ".join((found[1] if found else platform.processor() or platform.machine()).split())
    numbers = [
        f"{what} {value}"
        for what, value in re.findall(r"^(?:cpu )?(family|model)\s*:\s*(\d+)$", text, re.MULTILINE)
    ]
    hidden = not re.search(r"\d", name.partition("@")[0])
    return ", ".join([name, *dict.fromkeys(numbers)]) if hidden else name


def why_unproven() -> str | None:
    """Returns why only a validation record (`proof`) may select the CPU kernels, or None.

    The kernels of the instruction set in use were never timed on hardware, and it is not named by
    ``TRANSFORMER_FAST_CPU_ISA``.
    """
    if module is None or module.isa_proven():
        return None
    return f"kernels for {module.isa()} were never timed on hardware"


def driver_version() -> int:
    """Returns the newest CUDA version that the driver supports, 12080 for 12.8; 0 without a
    driver."""
    try:
        return int(torch._C._cuda_getDriverVersion())  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return 0


def _load_cuda() -> str | None:
    """Loads the CUDA kernels if PyTorch has CUDA; returns the reason, as a sentence, if it
    fails."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    record = _build_record()
    if not CUDA_LIBRARY.is_file():
        reason = getattr(record, "CUDA_REASON", "")
        return f"the CUDA kernels were not built{': ' + reason if reason else ''}"
    if TORCH_VERSION < OLDEST_TORCH:
        return why_not
    built, driver = getattr(record, "CUDA_VERSION", ""), driver_version()
    # A CUDA runtime runs on all drivers of its major version.
    if built and 0 < driver // 1000 < _numbers(built)[0]:
        return (
            f"the CUDA kernels were built with CUDA {built} and the driver is made for CUDA "
            f"{driver // 1000}.{driver % 1000 // 10}: they need a newer driver, or an older nvcc"
        )
    try:
        torch.ops.load_library(str(CUDA_LIBRARY))
    except OSError as error:
        return f"the CUDA kernels could not be loaded: {error}"
    return None


@functools.cache
def why_no_code(major: int, minor: int) -> str | None:
    """Returns the reason why the CUDA kernels cannot run on a compute capability, or None."""
    record = _build_record()
    built = getattr(record, "CUDA_ARCHITECTURES", ())
    # A driver compiles PTX of its own CUDA version and of older ones.
    compiles = _numbers(getattr(record, "CUDA_VERSION", "")) <= divmod(driver_version() // 10, 100)
    for architecture in built:
        first, last = _numbers(architecture)
        # Code of 9.0a runs on 9.0 alone, that of 10.0f on 10.x.
        ptx = compiles and architecture.endswith("+PTX") and not set("af") & set(architecture)
        later = first == major and last < minor and "a" not in architecture
        if (first, last) == (major, minor) or later or (ptx and (first, last) < (major, minor)):
            return None
    if not built:
        return None
    names = ", ".join(built)
    return f"it was built for GPUs of compute capability {names} and this one has {major}.{minor}"


#: The reason why there are no operators ``<op>.cuda``, as a sentence; None if there are.
cuda_why_not: str | None = _load_cuda()
