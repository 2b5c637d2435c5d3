"""Compiles the sources of the CUDA kernels for the CPU, on the SIMT machine of simt.h.

`library` contains the operators, registered for CPU tensors. `program` is an executable without
torch, because a sanitizer has to be active from the start of the process.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from transformer_fast import _native

ON_GPU = _native.cuda_why_not is None and torch.cuda.is_available()
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCES = ROOT / "csrc" / "cuda"
MACHINE = (HERE / "simt.cpp", HERE / "allocations.cpp")
_KEPT = ROOT / "build" / "simt"
_TORCH = Path(torch.__file__).parent
_COMMON = ("-std=c++20", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-attributes", "-DTF_SIMT")

COMPILER = shutil.which(os.environ.get("CXX", "").split(" ")[0] or "g++") or shutil.which("c++")
#: The reason why nothing can be compiled here, or None.
WHY_NOT = None if COMPILER else "no C++ compiler"


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _compile(out: Path, arguments: list[str]) -> subprocess.Popen[str]:
    return _start([str(COMPILER), *_COMMON, *arguments, "-o", str(out)])


def _finish(*processes: subprocess.Popen[str]) -> None:
    """Waits for all processes; a compiler warning is an error."""
    outputs = [process.communicate()[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
        assert "warning:" not in output, output


@contextmanager
def _made_once(name: str, sources: list[Path]) -> Iterator[tuple[Path, bool]]:
    """Yields a folder for the build of these sources, and whether it is complete; locked, since
    tests run in several processes.
    """
    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for source in sources:
        digest.update(source.read_bytes())
    folder = _KEPT / f"{name}-{digest.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder, (folder / "done").exists()
        (folder / "done").touch()


def library() -> Path:
    """Builds the operators ``<op>.cuda`` for CPU tensors, as a shared library."""
    sources = [*sorted(SOURCES.iterdir()), HERE / "simt.h", *MACHINE]
    with _made_once("library", sources) as (folder, done):
        found = folder / "libsimt.so"
        if done:
            return found
        options = ["-O1", "-fPIC", f"-I{SOURCES.parent}", f"-I{HERE}", "-isystem"]
        options += [str(_TORCH / "include"), "-DTORCH_TARGET_VERSION=0x020a000000000000", "-c"]
        running, objects = [], []
        for source in [*sorted(SOURCES.glob("*.cu")), *MACHINE]:
            objects.append(str(folder / (source.name + ".o")))
            running.append(_compile(Path(objects[-1]), [*options, "-x", "c++", str(source)]))
        _finish(*running)
        linked = ["-shared", *objects, f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10"]
        _finish(_compile(found, [*linked, f"-Wl,-rpath,{_TORCH / 'lib'}"]))
    return found


def _machine(sanitizer: str) -> Path:
    """Builds the machine without kernels."""
    sources = [HERE / "simt.h", HERE / "simt.cpp"]
    with _made_once(f"machine-{sanitizer.replace(',', '-')}", sources) as (folder, done):
        found = folder / "simt.o"
        if not done:
            options = [f"-fsanitize={sanitizer}", f"-I{HERE}", "-c", str(sources[1])]
            _finish(_compile(found, options))
    return found


def program(
    folder: Path, main: str, sanitizer: str, changes: Mapping[str, Mapping[str, str]] | None = None
) -> Path:
    """Builds tests/cuda/<main> with ``-fsanitize=<sanitizer>``.

    ``changes`` plants bugs, as file name -> {text: replacement}, in the named files of csrc/cuda.
    Each text must occur there once.
    """
    sources = folder / "csrc" / "cuda"
    shutil.copytree(SOURCES, sources, dirs_exist_ok=True)
    for name, texts in (changes or {}).items():
        text = (sources / name).read_text()
        for before, after in texts.items():
            assert text.count(before) == 1, f"{name} has {before!r} {text.count(before)} times"
            text = text.replace(before, after)
        (sources / name).write_text(text)
    out = folder / f"{Path(main).stem}-{sanitizer.partition(',')[0]}"
    options = [f"-fsanitize={sanitizer}", f"-I{folder / 'csrc'}", f"-I{HERE}"]
    compiled = _compile(out, [*options, str(_machine(sanitizer)), "-x", "c++", str(HERE / main)])
    _finish(compiled)
    return out


def ptx(nvcc: str) -> list[Path]:
    """Compiles each source to PTX for sm_80 with nvcc."""
    with _made_once("ptx", sorted(SOURCES.iterdir())) as (folder, done):
        sources = sorted(SOURCES.glob("*.cu"))
        found = [folder / f"{source.stem}.ptx" for source in sources]
        if not done:
            options = ["-std=c++20", "-ptx", "-arch=sm_80", f"-I{SOURCES.parent}"]
            options += ["-isystem", str(_TORCH / "include")]
            options += ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
            _finish(
                *(
                    _start([nvcc, *options, str(source), "-o", str(out)])
                    for source, out in zip(sources, found, strict=True)
                )
            )
    return found
