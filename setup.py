"""Bridge to CMake: builds transformer_fast._C and _autograd, or records why it could not.

TRANSFORMER_FAST_BUILD=auto (default) falls back to a pure Python installation with a warning,
=0 skips the native build and gives a pure wheel, =require makes any failure an error. MAX_JOBS
limits parallel compiles, CMAKE_ARGS adds arguments to cmake, CXX names the compiler.

The CUDA kernels are built where nvcc (CUDA_HOME, PATH, the package nvidia-cuda-nvcc, or
/usr/local/cuda) and a GPU are found, for TORCH_CUDA_ARCH_LIST; where they are not, or the compiler
fails, everything else is, unless it is required. TRANSFORMER_FAST_CUDA_BUILD=1 needs no GPU, =0 leaves
them out.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
OLDEST_TORCH = (2, 10)
#: Systems and architectures with kernels, as in transformer_fast/_native.py.
MACHINES = {("Linux", "x86_64"), ("Linux", "aarch64"), ("Darwin", "arm64")}
PLATFORMS = "Linux on x86-64 or 64-bit ARM, or macOS on Apple silicon"
REASON_FILE = "_build_info.py"
CUDA_LIBRARY = "_C_cuda.so"
LIBRARIES = ("_C.*.so", "_autograd.*.so", CUDA_LIBRARY)
#: What NVIDIA's driver makes where there is a GPU: on Linux, and on Linux in Windows.
GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
#: One of each generation: machine code runs on later GPUs of the same major number, too.
CUDA_ARCHITECTURES = ("8.0", "9.0", "10.0", "12.0")
#: Why TRANSFORMER_FAST_BUILD=0 has no kernels.
PURE = "this is the pure-Python wheel; for the CPU kernels run `pip install .` in a clone, with g++"


class BuildError(Exception):
    """Why the native module is not built, in one sentence."""


def switch(name: str, *values: str) -> str:
    """Return what an environment variable says, by default the first of these values."""
    value = os.environ.get(name) or values[0]
    if value not in values:
        expected = f"{', '.join(values[:-1])} or {values[-1]}"
        raise SystemExit(f"{name} is {value!r}; expected {expected}")
    return value


def find_torch() -> tuple[Path, str]:
    """Return the installed torch's folder and version, without importing it.

    An isolated build hides the environment's packages from sys.path but still runs its
    interpreter, so its site-packages folder is searched as well.
    """
    paths = sysconfig.get_paths()
    folders = [*sys.path, paths["purelib"], paths["platlib"], *site.getsitepackages()]
    for folder in [*folders, site.getusersitepackages()]:
        version_file = Path(folder or ".") / "torch" / "version.py"
        if version_file.is_file():
            found = re.search(r"__version__ = ['\"]([^'\"]+)", version_file.read_text())
            if found:
                return version_file.parent, found.group(1)
    raise BuildError(
        "torch was not found at build time: install torch first, then this package "
        "(with --no-build-isolation if your installer builds in another environment)"
    )


def check_torch_version(version: str) -> None:
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise BuildError(
            f"torch {version} was installed at build time; {oldest} or later is needed"
        )


def find_tool(name: str, module: str, attribute: str) -> str:
    """Return cmake or ninja: from its Python package, else from PATH."""
    try:
        package = __import__(module)
        candidate = shutil.which(name, path=getattr(package, attribute))
    except (ImportError, AttributeError):
        candidate = None
    candidate = candidate or shutil.which(name)
    if candidate is None:
        raise BuildError(f"{name} was not found at build time")
    return candidate


def find_nvcc() -> str:
    """Return nvcc: of CUDA_HOME if that is set, else of PATH, of its Python package, or of the usual
    place."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        found = shutil.which("nvcc", path=str(Path(home) / "bin"))
        if found is None:
            raise BuildError(f"CUDA_HOME is {home!r}, where there is no bin/nvcc")
        return found
    folders = {sysconfig.get_paths()["purelib"], *sys.path, *site.getsitepackages()}
    packaged = [
        str(nvcc.parent)
        for folder in sorted(folders)
        for nvcc in sorted(Path(folder or ".").glob("nvidia/cu*/bin/nvcc"))
    ]
    for path in (None, *packaged, "/usr/local/cuda/bin"):
        found = shutil.which("nvcc", path=path)
        if found is not None:
            return found
    raise BuildError("nvcc was not found at build time")


def cuda_compiler() -> str:
    """Return nvcc if the CUDA kernels are to be built."""
    wanted = switch("TRANSFORMER_FAST_CUDA_BUILD", "auto", "0", "1")
    if wanted == "0":
        raise BuildError("they were switched off at build time (TRANSFORMER_FAST_CUDA_BUILD=0)")
    nvcc = find_nvcc()
    if wanted == "auto" and not any(map(os.path.exists, GPU_DEVICES)):
        raise BuildError(
            "no GPU was found at build time; TRANSFORMER_FAST_CUDA_BUILD=1 builds them all the same"
        )
    return nvcc


def cuda_architectures(nvcc: str) -> list[str]:
    """Return what TORCH_CUDA_ARCH_LIST ("8.0;9.0a;12.0+PTX") has from 8.0 on, or what nvcc knows of
    CUDA_ARCHITECTURES."""
    wanted = re.split(r"[;, ]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip())
    if wanted == [""]:
        command = [nvcc, "--list-gpu-code"]
        known = subprocess.run(command, capture_output=True, text=True).stdout.split()
        ours = [one for one in CUDA_ARCHITECTURES if f"sm_{one.replace('.', '')}" in known]
        *wanted, newest = ours or CUDA_ARCHITECTURES
        wanted.append(f"{newest}+PTX")
    found = []
    for architecture in wanted:
        parts = re.fullmatch(r"(\d+)\.\d[af]?(\+PTX)?", architecture)
        if parts is None:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST has {architecture!r}; expected numbers like 9.0a or 12.0+PTX"
            )
        if int(parts[1]) >= 8:  # bfloat16 products and asynchronous copies begin there
            found.append(architecture)
    if not found:
        raise BuildError("TORCH_CUDA_ARCH_LIST names nothing from compute capability 8.0 on")
    return found


def in_cmake(architectures: list[str]) -> str:
    """Return the same in the words of CMake's CUDA_ARCHITECTURES."""
    found = []
    for architecture in architectures:
        number, _, ptx = architecture.replace(".", "").partition("+")
        found += [f"{number}-real", *([f"{number}-virtual"] if ptx else [])]
    return ";".join(found)


def cuda_version() -> str:
    """Return the CUDA that nvcc is of, as "12.9"."""
    told = subprocess.run([find_nvcc(), "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+\.\d+)", told)
    return found.group(1) if found else ""


def check_machine() -> None:
    system, machine = platform.system(), platform.machine()
    if (system, machine) not in MACHINES:
        raise BuildError(f"the native kernels need {PLATFORMS}; this is {system} on {machine}")
    compiler = os.environ.get("CXX", "").split()
    names = compiler[:1] or ["c++", "g++", "clang++"]
    if not any(shutil.which(name) for name in names):
        raise BuildError(f"no C++ compiler was found at build time (looked for {', '.join(names)})")


def first_error(output: list[str]) -> str:
    """Return what went wrong, in one line: a compiler's error line, or a CMake message."""
    for number, line in enumerate(output):
        if line.startswith("CMake Error"):
            message = re.match(r"\s*([^.]*\.?)", " ".join(output[number + 1 :]))
            return " ".join(message.group(1).split())
        if "error:" in line.lower():
            return line.strip()
    return ""


def run(command: list[str]) -> None:
    """Run a command and show its output as it comes."""
    output = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            output.append(line)
    if process.returncode:
        detail = first_error(output) or f"exit status {process.returncode}"
        raise BuildError(f"{Path(command[0]).name} failed at build time: {detail}")


class Built(NamedTuple):
    """What was built: torch's version, why there are no CUDA kernels, for what they are, and why there
    are no entries in C++."""

    torch_version: str = ""
    cuda_reason: str = ""
    cuda_architectures: tuple[str, ...] = ()
    autograd_reason: str = ""


def build(build_dir: Path, output_dir: Path) -> Built:
    """Configure, compile and put the libraries into output_dir."""
    check_machine()
    torch_dir, torch_version = find_torch()
    check_torch_version(torch_version)
    cmake = find_tool("cmake", "cmake", "CMAKE_BIN_DIR")
    ninja = find_tool("ninja", "ninja", "BIN_DIR")
    try:
        import pybind11
    except ImportError:
        raise BuildError("pybind11 was not found at build time") from None
    configure = [
        *(cmake, "-S", str(ROOT), "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={ninja}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        f"-DTF_TORCH_DIR={torch_dir}",
        f"-DTF_TORCH_VERSION={torch_version}",
        "-DTF_ISAS=",  # not those of an earlier build
        *shlex.split(os.environ.get("CMAKE_ARGS", "")),
    ]
    # macOS has no affinity.
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    jobs = os.environ.get("MAX_JOBS") or str(cpus)

    def make(folder: Path, target: str, library: str, *options: str) -> None:
        try:
            run([*configure, "-B", str(folder), *options])
        except BuildError:
            # CMake would remember the compiler that failed, also after another one is installed.
            shutil.rmtree(folder, ignore_errors=True)
            raise
        run([cmake, "--build", str(folder), "--parallel", jobs, "--target", target])
        # Renamed into place: a process that has the old one loaded keeps the old file.
        fresh = output_dir / (library + ".new")
        shutil.copy2(folder / library, fresh)
        fresh.replace(output_dir / library)

    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    make(build_dir, "_C", "_C" + suffix)
    autograd_reason = ""
    try:
        make(build_dir, "_autograd", "_autograd" + suffix)
    except BuildError as error:
        (output_dir / ("_autograd" + suffix)).unlink(missing_ok=True)
        if os.environ.get("TRANSFORMER_FAST_BUILD") == "require":
            raise
        # A torch whose C++ API differs, say: calls run all the same, small ones slower.
        warnings.warn(f"installing without entries in C++: {error}", stacklevel=1)
        autograd_reason = str(error)
    nvcc = None
    try:
        nvcc = cuda_compiler()
        architectures = cuda_architectures(nvcc)
        make(
            build_dir / "cuda", "_C_cuda", CUDA_LIBRARY,
            f"-DTF_NVCC={nvcc}", f"-DTF_CUDA_ARCHITECTURES={in_cmake(architectures)}",
        )  # fmt: skip
    except (BuildError, OSError) as error:
        (output_dir / CUDA_LIBRARY).unlink(missing_ok=True)
        if nvcc is not None:
            if os.environ.get("TRANSFORMER_FAST_BUILD") == "require":
                raise
            # An nvcc that is too old, say; the CPU's kernels are there all the same.
            warnings.warn(f"installing without CUDA kernels: {error}", stacklevel=1)
        return Built(torch_version, str(error), autograd_reason=autograd_reason)
    return Built(torch_version, "", tuple(architectures), autograd_reason)


class CMakeBuild(build_ext):
    """Runs CMake in place of the compiler driver and writes transformer_fast/_build_info.py."""

    def finalize_options(self) -> None:
        # Builds of other kinds (`make sanitize`) name a folder of their own with --build-temp.
        usual = ROOT / "build" / f"native-{sys.implementation.cache_tag}"
        self.native_dir = Path(self.build_temp or usual).resolve()
        super().finalize_options()

    def run(self) -> None:
        package = Path("transformer_fast")
        output_dir = (ROOT if self.inplace else Path(self.build_lib).resolve()) / package
        output_dir.mkdir(parents=True, exist_ok=True)
        build_dir = self.native_dir
        mode = switch("TRANSFORMER_FAST_BUILD", "auto", "0", "require")
        switch("TRANSFORMER_FAST_CUDA_BUILD", "auto", "0", "1")  # told before minutes of work
        reason, built = "", Built()
        try:
            if mode == "0":
                raise BuildError(PURE)
            built = build(build_dir, output_dir)
        except (BuildError, OSError) as error:
            for pattern in LIBRARIES:
                for stale in output_dir.glob(pattern):
                    stale.unlink()
            if mode == "require":
                raise SystemExit(f"transformer_fast: native build required, but {error}") from None
            reason = str(error)
            built = Built(cuda_reason=reason)
            if mode == "auto":
                warnings.warn(f"installing without native kernels: {reason}", stacklevel=1)
        lines = [
            '"""Written by setup.py: how the native module was built, or why it was not."""',
            "",
            f"REASON = {reason!r}",
            # Without kernels on purpose, of which `_native` does not warn.
            f"PURE = {mode == '0'}",
            f"AUTOGRAD_REASON = {built.autograd_reason!r}",
            f"CUDA_REASON = {built.cuda_reason!r}",
            # What `_native` asks of the driver, and of a GPU.
            f"CUDA_VERSION = {cuda_version() if not built.cuda_reason else ''!r}",
            f"CUDA_ARCHITECTURES = {built.cuda_architectures!r}",
            f"PYTHON = {sys.implementation.cache_tag!r}",
            f"TORCH = {built.torch_version!r}",
        ]
        if self.inplace and not reason:
            lines.append(f"BUILD_DIR = {str(build_dir)!r}")
        (output_dir / REASON_FILE).write_text("\n".join(lines) + "\n")

    def get_outputs(self) -> list[str]:
        folder = Path(self.build_lib) / "transformer_fast"
        built = (path for pattern in (*LIBRARIES, REASON_FILE) for path in folder.glob(pattern))
        return [str(path) for path in built]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Wheel(bdist_wheel):
    """Without native code a wheel is for any Python 3 on any platform."""

    def get_tag(self) -> tuple[str, str, str]:
        pure = os.environ.get("TRANSFORMER_FAST_BUILD") == "0"
        return ("py3", "none", "any") if pure else super().get_tag()


setup(
    # Named so that the wheel is marked as platform-specific; CMake has the sources.
    ext_modules=[Extension("transformer_fast._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": Wheel},
)
