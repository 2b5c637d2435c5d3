"""Installing where no native module can be had: the package works, and says what is missing."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from transformer_fast import _native

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (
    *("pyproject.toml", "setup.py", "CMakeLists.txt", "MANIFEST.in", "README.md", "LICENSE"),
    *("csrc", "cmake", "transformer_fast"),
)

# What a user's first lines would be; PYTHONPATH holds the installed copy alone.
USE = """
import torch, transformer_fast
from transformer_fast import _native
x = torch.randn(3, 5)
y = transformer_fast.functional.layer_norm(x, (5,))
torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (5,)))
print(transformer_fast.__file__)
print(_native.module is None)
print(_native.why_not)
"""


@pytest.fixture
def checkout(tmp_path):
    """A fresh copy of the sources, without anything that was built."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    built = shutil.ignore_patterns("*.so", "_build_info.py", "__pycache__")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=built)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def run(command, cwd, **environment):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TRANSFORMER_FAST", "CXX"))}
    env.update({"PYTHONNOUSERSITE": "1", **environment})
    return subprocess.run(
        command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def pip_install(checkout, target, **environment):
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    command = [sys.executable, "-m", "pip", "install", "-q", *options, str(checkout)]
    done = run(command, checkout, **environment)
    assert done.returncode == 0, done.stdout


def use_installed(target, cwd):
    """Run USE on the installed copy; return (module is missing, why)."""
    done = run([sys.executable, "-c", USE], cwd, PYTHONPATH=str(target))
    assert done.returncode == 0, done.stdout
    file, missing, why = done.stdout.strip().splitlines()[-3:]
    assert Path(file).is_relative_to(target)
    return missing == "True", why


def build_ext(checkout, **environment):
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    return run(command, checkout, **environment)


def recorded_reason(checkout):
    scope = {}
    exec((checkout / "transformer_fast" / "_build_info.py").read_text(), scope)
    return scope["REASON"]


def test_switched_off(checkout, tmp_path):
    target = tmp_path / "site"
    pip_install(checkout, target, TRANSFORMER_FAST_BUILD="0")
    missing, why = use_installed(target, tmp_path)
    assert missing
    assert "TRANSFORMER_FAST_BUILD=0" in why
    assert (target / "transformer_fast" / "py.typed").is_file()


def test_no_compiler(checkout, tmp_path):
    target, empty = tmp_path / "site", tmp_path / "bin"
    empty.mkdir()
    pip_install(checkout, target, PATH=str(empty))
    missing, why = use_installed(target, tmp_path)
    assert missing
    assert "no C++ compiler was found" in why


@pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))
def test_native_wheel(checkout, tmp_path):
    target = tmp_path / "site"
    # One instruction set, no CUDA and little optimisation: this is about the way into the wheel.
    cmake_args = "-DTF_ISAS=baseline -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0"
    pip_install(
        checkout,
        target,
        TRANSFORMER_FAST_BUILD="require",
        TRANSFORMER_FAST_CUDA_BUILD="0",
        CMAKE_ARGS=cmake_args,
    )
    assert use_installed(target, tmp_path) == (False, "None")


def test_broken_compiler(checkout):
    done = build_ext(checkout, CXX="false")
    assert done.returncode == 0, done.stdout
    assert "installing without native kernels" in done.stdout
    reason = recorded_reason(checkout)
    assert reason.startswith("cmake failed at build time: The C++ compiler")
    assert reason.endswith("is not able to compile a simple test program.")


def test_compile_error(checkout):
    with (checkout / "csrc" / "cpu" / "probe" / "probe_kernel.cpp").open("a") as source:
        source.write("this does not compile;\n")
    done = build_ext(checkout)
    assert done.returncode == 0, done.stdout
    assert re.match(
        r"cmake failed at build time: \S*probe_kernel\.cpp:\d+:\d+: error: .*this",
        recorded_reason(checkout),
    )


def test_required_build_fails(checkout):
    done = build_ext(checkout, CXX="false", TRANSFORMER_FAST_BUILD="require")
    assert done.returncode != 0
    assert "native build required, but cmake failed" in done.stdout


def test_old_torch(checkout, tmp_path):
    torch = tmp_path / "old" / "torch"
    torch.mkdir(parents=True)
    (torch / "version.py").write_text("__version__ = '2.9.1'\n")
    done = build_ext(checkout, PYTHONPATH=str(torch.parent))
    assert done.returncode == 0, done.stdout
    assert "torch 2.9.1 was installed at build time; 2.10 or later" in recorded_reason(checkout)


def test_unknown_mode(checkout):
    done = build_ext(checkout, TRANSFORMER_FAST_BUILD="yes")
    assert done.returncode != 0
    assert "TRANSFORMER_FAST_BUILD is 'yes'; expected auto, 0 or require" in done.stdout


@pytest.mark.parametrize("wanted", ["0,bfloat16", ""])
def test_unknown_embedding(wanted, checkout):
    done = build_ext(checkout, CXX="false", TRANSFORMER_FAST_CUDA_EMBED=wanted)
    assert done.returncode != 0
    assert done.stdout.splitlines()[-1] == (
        f"TRANSFORMER_FAST_CUDA_EMBED is {wanted!r}; expected 0, or of bfloat16 and float16"
    )


def test_why_absent_other_machine(monkeypatch):
    monkeypatch.setattr(_native.platform, "machine", lambda: "aarch64")
    assert "this is Linux on aarch64" in _native._why_absent()


def test_why_absent_never_built(monkeypatch):
    monkeypatch.setattr(_native, "_build_record", lambda: None)
    assert "was not built: run `pip install .`" in _native._why_absent()


def test_why_absent_other_python(monkeypatch):
    class Record:
        REASON = ""
        PYTHON = "cpython-39"

    monkeypatch.setattr(_native, "_build_record", lambda: Record)
    assert "was built for cpython-39; this interpreter is cpython-3" in _native._why_absent()


@pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))
def test_torch_too_old_at_run_time(monkeypatch):
    monkeypatch.setattr(_native.torch, "__version__", "2.9.1+cpu")
    module, why = _native._load()
    assert module is None
    assert "needs torch 2.10 or later; this is 2.9.1+cpu" in why


def test_without_nvcc_the_rest_is_there(checkout):
    code = (
        "import runpy, sys; sys.argv = ['setup.py', '--name']\n"
        "module = runpy.run_path('setup.py', run_name='setup')\n"
        "for call in (module['find_nvcc'], module['cuda_architectures']):\n"
        "    try:\n"
        "        print(call())\n"
        "    except module['BuildError'] as error:\n"
        "        print(error)\n"
    )
    environment = {"CUDA_HOME": "/nowhere", "TORCH_CUDA_ARCH_LIST": "7.5;8.6 9.0a+PTX"}
    lines = run([sys.executable, "-c", code], checkout, **environment).stdout.splitlines()
    assert "CUDA_HOME is '/nowhere', where there is no bin/nvcc" in lines
    assert "86-real;90a-real;90a-virtual" in lines
    for wrong, said in {"sm_90": "has 'sm_90'", "7.0": "names nothing from compute"}.items():
        told = run([sys.executable, "-c", code], checkout, TORCH_CUDA_ARCH_LIST=wrong).stdout
        assert said in told
    off = run([sys.executable, "-c", code], checkout, TRANSFORMER_FAST_CUDA_BUILD="0").stdout
    assert "they were switched off at build time" in off


def built_by_a_stand_in(checkout, tmp_path, fails, **environment):
    """What `build` gives and leaves where CMake is a script that configures everything but calls like
    ``fails``."""
    cuda = tmp_path / "cuda" / "bin"
    cuda.mkdir(parents=True)
    (cuda / "nvcc").write_text("#!/bin/sh\necho 'nvcc is broken' >&2\nexit 1\n")
    (cuda / "nvcc").chmod(0o755)
    cmake = tmp_path / "cmake"
    cmake.write_text(
        "#!/bin/sh\n"
        f'case "$*" in {fails}) exit 1;; esac\n'
        'for word in "$@"; do last="$folder"; case "$previous" in -B|--build) folder="$word";; esac; '
        'previous="$word"; done\n'
        'mkdir -p "$folder"; touch "$folder/_C$SUFFIX" "$folder/_C_cuda.so"\n'
    )
    cmake.chmod(0o755)
    code = (
        "import os, pathlib, runpy, sys, sysconfig, warnings; sys.argv = ['setup.py', '--name']\n"
        "warnings.simplefilter('ignore')\n"
        "os.environ['SUFFIX'] = sysconfig.get_config_var('EXT_SUFFIX')\n"
        "module = runpy.run_path('setup.py', run_name='setup')\n"
        "build = module['build']\n"
        f"build.__globals__['find_tool'] = lambda name, *_: {str(cmake)!r}\n"
        "out = pathlib.Path('out'); out.mkdir()\n"
        "print(build(pathlib.Path('build/x'), out)[1:])\n"
        "print(sorted(path.name.split('.')[0] for path in out.iterdir()))\n"
    )
    environment = {"CUDA_HOME": str(tmp_path / "cuda"), **environment}
    done = run([sys.executable, "-c", code], checkout, **environment).stdout
    return tuple(map(ast.literal_eval, done.splitlines()[-2:]))


def test_an_nvcc_that_fails_costs_the_cuda_kernels_only(checkout, tmp_path):
    built, files = built_by_a_stand_in(checkout, tmp_path, "*TF_NVCC=*")
    assert built == ("cmake failed at build time: exit status 1", (), (), "")
    assert files == ["_C"]


def test_a_triton_that_fails_costs_what_it_embeds_only(checkout, tmp_path):
    reason = "cmake failed at build time: exit status 1"
    built, files = built_by_a_stand_in(checkout, tmp_path, "*TF_EMBED=8*")
    if "was not found" in built[-1]:
        pytest.skip(built[-1])
    assert built == ("", (), (), reason)
    assert files == ["_C", "_C_cuda"]


@pytest.mark.parametrize(
    ("wanted", "dtypes", "why_not"),
    [
        (None, ("bfloat16",), ""),
        ("float16, bfloat16", ("bfloat16", "float16"), ""),
        ("0", (), "they were switched off at build time (TRANSFORMER_FAST_CUDA_EMBED=0)"),
    ],
)
def test_what_triton_embeds(wanted, dtypes, why_not, checkout, tmp_path):
    environment = {} if wanted is None else {"TRANSFORMER_FAST_CUDA_EMBED": wanted}
    environment["TORCH_CUDA_ARCH_LIST"] = "8.0 9.0a 9.0a+PTX 12.0"
    built, _ = built_by_a_stand_in(checkout, tmp_path, "nothing", **environment)
    if "was not found" in built[-1]:
        pytest.skip(built[-1])
    assert built == ("", (80, 90, 120) if dtypes else (), dtypes, why_not)
