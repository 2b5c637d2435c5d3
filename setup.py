"""Bridge to CMake: builds transformer_fast._C, or records why it could not.

TRANSFORMER_FAST_BUILD=auto (default) falls back to a pure Python installation with a warning,
=0 skips the native build, =require makes any failure an error. MAX_JOBS limits parallel compiles,
CMAKE_ARGS adds arguments to cmake, CXX names the compiler.

The CUDA kernels are built where nvcc is found (CUDA_HOME, PATH, the package nvidia-cuda-nvcc, or
/usr/local/cuda), GPU or not, for TORCH_CUDA_ARCH_LIST; where it is not, or fails, everything else
is, unless it is required. TRANSFORMER_FAST_CUDA_BUILD=0 leaves them out.

Where Triton stands beside torch, it compiles attention of many keys into that library, for the same
architectures: in the dtypes that TRANSFORMER_FAST_CUDA_EMBED names (bfloat16; "bfloat16,float16" takes
twice as long), with 0 in none.
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
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
OLDEST_TORCH = (2, 10)
REASON_FILE = "_build_info.py"
CUDA_LIBRARY = "_C_cuda.so"


class BuildError(Exception):
    """Why the native module is not built, in one sentence."""


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
    if os.environ.get("TRANSFORMER_FAST_CUDA_BUILD") == "0":
        raise BuildError("they were switched off at build time (TRANSFORMER_FAST_CUDA_BUILD=0)")
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


def cuda_architectures() -> str:
    """Translate TORCH_CUDA_ARCH_LIST ("8.0;9.0a;10.0+PTX") into CMake's words."""
    wanted = re.split(
        r"[;, ]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "8.0;9.0a;10.0+PTX").strip()
    )
    found = []
    for architecture in wanted:
        parts = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", architecture)
        if parts is None:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST has {architecture!r}; expected numbers like 9.0a or 10.0+PTX"
            )
        major, minor, variant, ptx = parts.groups()
        if (int(major), int(minor)) < (8, 0):
            continue  # bfloat16 products and asynchronous copies begin there
        found.append(f"{major}{minor}{variant}-real")
        if ptx:
            found.append(f"{major}{minor}{variant}-virtual")
    if not found:
        raise BuildError("TORCH_CUDA_ARCH_LIST names nothing from compute capability 8.0 on")
    return ";".join(found)


def embedded_dtypes() -> list[str]:
    """Return what TRANSFORMER_FAST_CUDA_EMBED asks for; nothing: none are to be embedded."""
    wanted = os.environ.get("TRANSFORMER_FAST_CUDA_EMBED", "bfloat16")
    dtypes = sorted(set(re.split(r"[;, ]+", wanted.strip())))
    if dtypes == ["0"]:
        return []
    if not set(dtypes) <= {"bfloat16", "float16"}:
        raise SystemExit(
            f"TRANSFORMER_FAST_CUDA_EMBED is {wanted!r}; expected 0, or of bfloat16 and float16"
        )
    return dtypes


def check_embedding(dtypes: list[str], torch_dir: Path) -> None:
    if not dtypes:
        raise BuildError("they were switched off at build time (TRANSFORMER_FAST_CUDA_EMBED=0)")
    if not (torch_dir.parent / "triton" / "__init__.py").is_file():
        raise BuildError("Triton was not found beside torch at build time")


def check_machine() -> None:
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine.lower() not in ("x86_64", "amd64"):
        raise BuildError(f"the native kernels need Linux on x86-64; this is {system} on {machine}")
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
    """What was built: torch's version, why there are no CUDA kernels, what of Triton's is among them
    (compute capabilities, and names of dtypes), and why not."""

    torch_version: str = ""
    cuda_reason: str = ""
    architectures: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    embed_reason: str = ""


def build(build_dir: Path, output_dir: Path) -> Built:
    """Configure, compile and put the libraries into output_dir."""
    dtypes = embedded_dtypes()  # a wrong value is told before minutes of work
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
        *shlex.split(os.environ.get("CMAKE_ARGS", "")),
    ]
    jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))

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

    make(build_dir, "_C", "_C" + sysconfig.get_config_var("EXT_SUFFIX"))
    required = os.environ.get("TRANSFORMER_FAST_BUILD") == "require"
    try:
        nvcc = f"-DTF_NVCC={find_nvcc()}"
    except BuildError as error:
        (output_dir / CUDA_LIBRARY).unlink(missing_ok=True)
        return Built(torch_version, str(error))

    def make_cuda(embed: Iterable[int], dtypes: Iterable[str]) -> None:
        make(
            build_dir / "cuda", "_C_cuda", CUDA_LIBRARY, nvcc,
            f"-DTF_CUDA_ARCHITECTURES={architectures}", f"-DTF_EMBED={';'.join(map(str, embed))}",
            f"-DTF_EMBED_DTYPES={';'.join(dtypes)}",
        )  # fmt: skip

    try:
        architectures = cuda_architectures()
        embed_reason = ""
        try:
            check_embedding(dtypes, torch_dir)
            embed = sorted({int(n) for n in re.findall(r"(\d+)[af]?-real", architectures)})
        except BuildError as error:
            dtypes, embed, embed_reason = [], [], str(error)
        try:
            make_cuda(embed, dtypes)
        except BuildError as error:
            if required or not embed:
                raise
            # A Triton that is too old, or that does not know an architecture, say.
            warnings.warn(f"installing without embedded kernels: {error}", stacklevel=1)
            dtypes, embed, embed_reason = [], [], str(error)
            make_cuda(embed, dtypes)
    except BuildError as error:
        (output_dir / CUDA_LIBRARY).unlink(missing_ok=True)
        if required:
            raise
        # An nvcc that is too old, say; the CPU's kernels are there all the same.
        warnings.warn(f"installing without CUDA kernels: {error}", stacklevel=1)
        return Built(torch_version, str(error))
    return Built(torch_version, "", tuple(embed), tuple(dtypes), embed_reason)


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
        mode = os.environ.get("TRANSFORMER_FAST_BUILD", "auto")
        if mode not in ("auto", "0", "require"):
            raise SystemExit(f"TRANSFORMER_FAST_BUILD is {mode!r}; expected auto, 0 or require")
        reason, built = "", Built()
        try:
            if mode == "0":
                raise BuildError("it was switched off at build time (TRANSFORMER_FAST_BUILD=0)")
            built = build(build_dir, output_dir)
        except (BuildError, OSError) as error:
            for stale in (*output_dir.glob("_C.*.so"), *output_dir.glob(CUDA_LIBRARY)):
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
            f"CUDA_REASON = {built.cuda_reason!r}",
            f"EMBEDDED_ARCHITECTURES = {built.architectures!r}",
            f"EMBEDDED_DTYPES = {built.dtypes!r}",
            f"EMBEDDED_REASON = {built.embed_reason!r}",
            f"PYTHON = {sys.implementation.cache_tag!r}",
            f"TORCH = {built.torch_version!r}",
        ]
        if self.inplace and not reason:
            lines.append(f"BUILD_DIR = {str(build_dir)!r}")
        (output_dir / REASON_FILE).write_text("\n".join(lines) + "\n")

    def get_outputs(self) -> list[str]:
        folder = Path(self.build_lib) / "transformer_fast"
        built = (*folder.glob("_C.*.so"), *folder.glob(CUDA_LIBRARY), folder / REASON_FILE)
        return [str(path) for path in built]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


setup(
    # Named so that the wheel is marked as platform-specific; CMake has the sources.
    ext_modules=[Extension("transformer_fast._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
