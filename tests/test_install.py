"""Installation without a native module: the package works, and reports what is missing."""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

import transformer_fast
from transformer_fast import _native, dispatch
from transformer_fast.backends import cuda

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (
    *("pyproject.toml", "setup.py", "CMakeLists.txt", "MANIFEST.in", "README.md", "LICENSE"),
    *("csrc", "cmake", "transformer_fast"),
)

# A user's first lines; PYTHONPATH contains only the installed copy.
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
    """Returns a fresh copy of the sources, without build results."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    built = shutil.ignore_patterns("*.so", "_build_info.py", "__pycache__")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=built)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def run(command, cwd, errors=subprocess.STDOUT, **environment):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TRANSFORMER_FAST", "CXX"))}
    env.update({"PYTHONNOUSERSITE": "1", **environment})
    return subprocess.run(
        command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=errors
    )


def run_python(*arguments, cwd, **environment):
    """Runs Python, which must succeed, and returns its output lines."""
    done = run([sys.executable, *arguments], cwd, **environment)
    assert done.returncode == 0, done.stdout
    return done.stdout.strip().splitlines()


def pip(command, option, target, source, **environment):
    """Runs ``pip install --target`` or ``pip wheel --wheel-dir``."""
    options = ["-q", "--no-deps", "--no-build-isolation", "--no-index", option, str(target)]
    run_python("-m", "pip", command, *options, str(source), cwd=target.parent, **environment)


def write_script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def use_installed(target, cwd):
    """Runs USE on the installed copy; returns (True if the module is missing, the reason)."""
    file, missing, why = run_python("-c", USE, cwd=cwd, PYTHONPATH=str(target))[-3:]
    assert Path(file).is_relative_to(target)
    return missing == "True", why


def build_ext(checkout, **environment):
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    return run(command, checkout, **environment)


def reason_recorded(checkout, **environment):
    """Returns the reason recorded by a build that continues without the native module."""
    done = build_ext(checkout, **environment)
    assert done.returncode == 0, done.stdout
    assert "installing without native kernels" in done.stdout
    return runpy.run_path(str(checkout / "transformer_fast" / "_build_info.py"))["REASON"]


def test_the_source_archive_builds_a_pure_wheel(checkout, tmp_path):
    """A build without kernels gives a wheel for any platform, whatever was built in place before."""
    target, package = tmp_path / "site", checkout / "transformer_fast"
    (package / "_build_info.py").write_text("BUILD_DIR = '/home/somebody'\n")
    (package / "_C.cpython-3.so").write_text("")
    (checkout / "tests").mkdir()
    (checkout / "tests" / "test_it.py").write_text("")
    run_python("setup.py", "--quiet", "sdist", cwd=checkout)
    (archive,) = (checkout / "dist").iterdir()
    assert archive.name == f"transformer_fast-{transformer_fast.__version__}.tar.gz"
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"CMakeLists.txt", "cmake/Isa.cmake", "csrc/module.cpp", "LICENSE"} <= names
    unwanted = (
        "tests",
        "transformer_fast/_build_info.py",
        "transformer_fast/_C",
        "transformer_fast/_a",
    )
    assert not [name for name in names if name.startswith(unwanted)]

    pip("wheel", "--wheel-dir", tmp_path / "wheels", archive, TRANSFORMER_FAST_BUILD="0")
    (wheel,) = (tmp_path / "wheels").iterdir()
    assert wheel.name == f"transformer_fast-{transformer_fast.__version__}-py3-none-any.whl"
    pip("install", "--target", target, wheel)
    missing, why = use_installed(target, tmp_path)
    assert missing
    assert why.startswith("this is the pure-Python wheel; for the CPU kernels run")
    assert (target / "transformer_fast" / "py.typed").is_file()


# Every drop-in module is bitwise equal to torch.nn's, dropout included, since torch.nn's own
# forward runs. A named backend runs the package's ops. The dispatcher prefers PyTorch's ops to the
# reference for every case.
WITHOUT_KERNELS = """
import itertools, torch, transformer_fast
from transformer_fast import _native, nn
assert _native.module is None

def results(library):
    torch.manual_seed(0)
    x, tokens = torch.randn(2, 6, 16, requires_grad=True), torch.tensor([[1, 2], [3, 0]])
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    causal = library.Transformer.generate_square_subsequent_mask(6)
    layer = library.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    attention = library.MultiheadAttention(16, 2, dropout=0.2, batch_first=True)
    for training in (True, False):
        attention.train(training)
        with torch.set_grad_enabled(training):
            yield library.Linear(16, 8).train(training)(x)
            yield library.LayerNorm(16)(x.bfloat16().float())
            yield library.Embedding(5, 16)(tokens)
            yield library.CrossEntropyLoss()(x[0], torch.arange(6))
            yield from attention(x, x, x, key_padding_mask=padding, need_weights=True)
            yield layer.train(training)(x, src_key_padding_mask=padding)
            yield library.TransformerEncoder(layer, 2)(x, src_key_padding_mask=padding)
            model = library.Transformer(16, 2, 1, 1, 32, batch_first=True).train(training)
            yield model(x, x, tgt_mask=causal, tgt_is_causal=True)

for one, other in zip(list(results(nn)), list(results(torch.nn)), strict=True):
    torch.testing.assert_close(one, other, rtol=0, atol=0)
try:
    with transformer_fast.use_backend("cpu"):
        nn.Linear(4, 4)(torch.randn(2, 4))
    raise AssertionError
except NotImplementedError:
    pass

q = torch.randn(2, 2, 5, 8, requires_grad=True)
mask = torch.ones(5, 5, dtype=torch.bool).tril()
for dtype, more in itertools.product(
    (torch.float32, torch.bfloat16, torch.float64),
    ({}, {"is_causal": True}, {"attn_mask": mask}, {"key_lengths": torch.tensor([5, 0])},
     {"dropout_p": 0.5}, {"need_weights": True}),
):
    args = (q.to(dtype),) * 3
    assert transformer_fast.explain("attention", *args, **more).backend == "torch", (dtype, more)
    x, w = torch.randn(3, 8, dtype=dtype, requires_grad=True), torch.randn(8, 8, dtype=dtype)
    for call in (
        ("layer_norm", x, 8), ("add_layer_norm", x, x, 8), ("linear", x, w),
        ("feed_forward", x, w, None, w, None), ("cross_entropy", x, torch.zeros(3).long()),
        ("linear_cross_entropy", x, w, torch.zeros(3).long()),
    ):
        assert transformer_fast.explain(*call).backend == "torch", call[0]

x, network = torch.randn(4, 16), torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU())
expected, reports = network(x), []
options = {"quantize": "int8", "report": reports.append, "inner": None}
with torch.no_grad():
    found = torch.compile(network, backend="transformer_fast", options=options)(x)
torch.testing.assert_close(found, expected, rtol=0, atol=0)
assert "no C++ compiler was found" in str(reports[0])
report = transformer_fast.accelerate(network, quantize="int8")
assert "no kernel here: no C++ compiler was found" in report["0"].reason
assert "no module is quantised" in str(report.int8)
torch.testing.assert_close(network(x), expected, rtol=0, atol=0)
"""


@pytest.fixture
def without_kernels(checkout):
    """The state after a build without a compiler."""
    # Written, not left out: an editable installation would find the record of this checkout.
    record = "PYTHON = ''\nREASON = 'no C++ compiler was found'\n"
    (checkout / "transformer_fast" / "_build_info.py").write_text(record)


@pytest.mark.parametrize(
    "command", [["info", "--probe"], ["compare", "--quick", "--op", "layer_norm"]]
)
def test_commands_run_without_kernels(without_kernels, checkout, command):
    called = [sys.executable, "-m", "transformer_fast", *command]
    environment = {"COLUMNS": "160", "OMP_NUM_THREADS": "1"}
    done = run(called, checkout, subprocess.PIPE, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no C++ compiler was found" in done.stdout
    if command[0] == "compare":
        assert "no native module" in done.stdout
        assert "cpu: no C++ compiler was found" in done.stdout
        assert done.stdout.count("no C++ compiler was found") == 2


# On Linux on x86-64 the first use warns, unless the package was built without kernels on purpose.
# Each use has a process of its own, forked after the import of torch.
FIRST_USE = """
import os, sys, warnings
import torch
warnings.simplefilter("always")
for use in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    with warnings.catch_warnings(record=True) as found:
        import transformer_fast
        from transformer_fast import functional as F, nn
        x, weight = torch.randn(64, 512), torch.randn(2048, 512)
        assert not found, found
        for _ in range(2):
            exec(use)
            F.linear(x, weight, activation="relu")
            nn.Linear(512, 16)(x)
            transformer_fast.accelerate(torch.nn.Linear(2, 2))
    print([(one.category.__name__, str(one.message)) for one in found], flush=True)
    os._exit(0)
"""
USES = (
    "F.linear(x, weight)",
    "nn.Linear(512, 16)(x)",
    "transformer_fast.accelerate(torch.nn.Linear(2, 2))",
    "F.cross_entropy(torch.randn(5000, 99), torch.zeros(5000).long())",
    "torch.compile(torch.sin, backend='transformer_fast', options={'inner': None})(x)",
)


@pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() != "x86_64",
    reason="kernels are for Linux on x86-64",
)
def test_the_first_use_without_kernels_warns_once(without_kernels, checkout, tmp_path):
    lines = run_python("-c", FIRST_USE, *USES, cwd=tmp_path, PYTHONPATH=str(checkout))
    for line, use in zip(lines, USES, strict=True):
        [(kind, message)] = ast.literal_eval(line)
        assert kind == "RuntimeWarning", use
        assert "without its CPU kernels: no C++ compiler was found. To build them" in message


def test_a_build_without_kernels_on_purpose_does_not_warn(checkout, tmp_path):
    done = build_ext(checkout, TRANSFORMER_FAST_BUILD="0")
    assert done.returncode == 0, done.stdout
    (line,) = run_python("-c", FIRST_USE, USES[0], cwd=tmp_path, PYTHONPATH=str(checkout))
    assert line == "[]"


def test_without_kernels_pytorchs_ops_run(without_kernels, checkout, tmp_path):
    run_python("-W", "ignore", "-c", WITHOUT_KERNELS, cwd=tmp_path, PYTHONPATH=str(checkout))


@pytest.mark.exhaustive
@pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))
def test_the_native_wheel_contains_the_module(checkout, tmp_path):
    target = tmp_path / "site"
    # One instruction set, no CUDA, little optimisation: only the contents of the wheel matter here.
    cmake_args = "-DTF_ISAS=baseline -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0"
    required = {"TRANSFORMER_FAST_BUILD": "require", "TRANSFORMER_FAST_CUDA_BUILD": "0"}
    pip("install", "--target", target, checkout, CMAKE_ARGS=cmake_args, **required)
    assert use_installed(target, tmp_path) == (False, "None")


def _break_a_kernel(checkout):
    with (checkout / "csrc" / "cpu" / "probe" / "probe_kernel.cpp").open("a") as source:
        source.write("this does not compile;\n")
    return {}


def _install_an_old_torch(checkout):
    torch = checkout.parent / "old" / "torch"
    torch.mkdir(parents=True)
    (torch / "version.py").write_text("__version__ = '2.9.1'\n")
    return {"PYTHONPATH": str(torch.parent)}


#: Function that makes a build fail -> a pattern of the reason that is recorded.
FAILURES = {
    lambda checkout: {"PATH": str(checkout.parent)}: "no C\\+\\+ compiler was found",
    lambda checkout: {"CXX": "false"}: (
        r"cmake failed at build time: The C\+\+ compiler.*is not able to compile a simple test program.$"
    ),
    _break_a_kernel: (r"cmake failed at build time: \S*probe_kernel\.cpp:\d+:\d+: error: .*this"),
    _install_an_old_torch: ".*torch 2.9.1 was installed at build time; 2.10 or later",
}


@pytest.mark.parametrize("failure", FAILURES)
def test_the_reason_of_a_failing_build_is_recorded(failure, checkout):
    assert re.match(FAILURES[failure], reason_recorded(checkout, **failure(checkout)), re.DOTALL)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("TRANSFORMER_FAST_BUILD", "require", "native build required, but cmake failed"),
        ("TRANSFORMER_FAST_BUILD", "yes", "is 'yes'; expected auto, 0 or require"),
        ("TRANSFORMER_FAST_CUDA_BUILD", "yes", "is 'yes'; expected auto, 0 or 1"),
    ],
)
def test_failing_builds_raise_if_required(name, value, said, checkout):
    done = build_ext(checkout, CXX="false", **{name: value})
    assert done.returncode != 0
    assert said in done.stdout
    assert value == "require" or done.stdout.splitlines()[-1] == f"{name} {said}"


@pytest.mark.parametrize(
    ("record", "machine", "said"),
    [
        (None, "ppc64le", "this is Linux on ppc64le"),
        (None, "x86_64", "was not built: run `make build`"),
        (
            SimpleNamespace(REASON="", PYTHON="cpython-39"),
            "x86_64",
            "was built for cpython-39; this interpreter is cpython-3",
        ),
    ],
)
def test_the_reason_why_the_native_module_is_missing(record, machine, said, monkeypatch):
    monkeypatch.setattr(_native.platform, "machine", lambda: machine)
    monkeypatch.setattr(_native, "_build_record", lambda: record)
    assert said in _native._why_absent()


def test_the_reason_why_cuda_kernels_are_missing(monkeypatch, tmp_path):
    class Record:
        CUDA_REASON = "no GPU was found at build time"

    monkeypatch.setattr(_native.torch.version, "cuda", "13.0")
    monkeypatch.setattr(_native, "CUDA_LIBRARY", tmp_path / "_C_cuda.so")
    monkeypatch.setattr(_native, "_build_record", lambda: Record)
    reason = "the CUDA kernels were not built: no GPU was found at build time"
    assert _native._load_cuda() == reason
    monkeypatch.setattr(_native, "cuda_why_not", reason)
    assert dispatch.STATES["cuda"]() == reason


class Record:
    CUDA_VERSION = "13.0"
    CUDA_ARCHITECTURES = ("8.0", "9.0a", "10.0+PTX")


@pytest.fixture
def cuda_build(monkeypatch, tmp_path):
    """Installs a record of built CUDA kernels, as in `Record`, and simulates a torch with CUDA."""
    (tmp_path / "_C_cuda.so").touch()
    monkeypatch.setattr(_native, "CUDA_LIBRARY", tmp_path / "_C_cuda.so")
    monkeypatch.setattr(_native, "_build_record", lambda: Record)
    monkeypatch.setattr(_native.torch.version, "cuda", "12.8")
    monkeypatch.setattr(_native.torch.ops, "load_library", lambda path: None)
    _native.why_no_code.cache_clear()
    yield lambda version: monkeypatch.setattr(
        _native.torch._C, "_cuda_getDriverVersion", lambda: version, raising=False
    )
    _native.why_no_code.cache_clear()


def test_an_older_driver_is_reported(cuda_build):
    cuda_build(12080)
    assert _native._load_cuda() == (
        "the CUDA kernels were built with CUDA 13.0 and the driver is made for CUDA 12.8: they need "
        "a newer driver, or an older nvcc"
    )
    for enough in (13000, 13020, 14000, 0):
        cuda_build(enough)
        assert _native._load_cuda() is None


def test_unsupported_gpus_are_reported(cuda_build, monkeypatch):
    cuda_build(13000)
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)):
        assert _native.why_no_code(*capability) is None
    assert _native.why_no_code(7, 5) == (
        "it was built for GPUs of compute capability 8.0, 9.0a, 10.0+PTX and this one has 7.5"
    )
    with FakeTensorMode():
        call = dispatch.Call("linear", (torch.empty(2, 2, device="cuda"),), False, None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    for kernel in cuda.kernels("cuda", None):
        if kernel.op != "attention":
            assert kernel.refuses(call) == _native.why_no_code(7, 5)
    _native.why_no_code.cache_clear()
    cuda_build(12080)  # the driver cannot compile PTX of CUDA 13.0
    assert _native.why_no_code(10, 3) is None
    assert _native.why_no_code(12, 0).endswith("and this one has 12.0")
    monkeypatch.setattr(Record, "CUDA_ARCHITECTURES", ("9.0a+PTX", "10.0f+PTX"))
    cuda_build(13000)
    for capability, runs in {(9, 0): True, (9, 1): False, (10, 3): True, (12, 1): False}.items():
        assert (_native.why_no_code(*capability) is None) is runs


def test_built_architectures_are_recorded(checkout, tmp_path):
    script = "echo 'Cuda compilation tools, release 12.9, V12.9.41'"
    write_script(tmp_path / "bin" / "nvcc", script)
    code = (
        "import runpy, sys, setuptools; sys.argv = ['setup.py', '--name']\n"
        "module = runpy.run_path('setup.py', run_name='setup')\n"
        "names = module['build'].__globals__\n"
        "extensions = [setuptools.Extension('transformer_fast._C', sources=[])]\n"
        "command = module['CMakeBuild'](setuptools.Distribution({'ext_modules': extensions}))\n"
        "command.inplace = True; command.ensure_finalized()\n"
        "for built in (module['Built'](cuda_architectures=('8.0',)), module['Built']('', 'none')):\n"
        "    names['build'] = lambda *folders: built\n"
        "    command.run()\n"
        "    record = runpy.run_path('transformer_fast/_build_info.py')\n"
        "    print([record['CUDA_VERSION'], record['CUDA_ARCHITECTURES']])\n"
    )
    done = run([sys.executable, "-c", code], checkout, CUDA_HOME=str(tmp_path))
    assert list(map(ast.literal_eval, done.stdout.splitlines()[-2:])) == [
        ["12.9", ("8.0",)],
        ["", ()],
    ], done.stdout


@pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))
def test_an_old_torch_at_run_time_is_reported(monkeypatch):
    monkeypatch.setattr(_native.torch, "__version__", "2.9.1+cpu")
    monkeypatch.setattr(_native, "TORCH_VERSION", (2, 9))
    module, why = _native._load()
    assert module is None
    assert "needs torch 2.10 or later; this is 2.9.1+cpu" in why


#: Runs `build` for each case in $CASES, in a process that is forked after the import of torch; prints
#: its result, the architectures that CMake got, and the files that it leaves.
BUILDS = """
import json, os, pathlib, re, runpy, sys, sysconfig, warnings
warnings.simplefilter("ignore")
cases, cmake, device = json.loads(os.environ["CASES"]), *sys.argv[1:3]
sys.argv[1:] = ["--name"]
os.environ["SUFFIX"] = sysconfig.get_config_var("EXT_SUFFIX")
module = runpy.run_path("setup.py", run_name="setup")
build = module["build"]
build.__globals__["find_tool"] = lambda name, *_: cmake
build.__globals__["GPU_DEVICES"] = (device,)
for number, case in enumerate(cases):
    if os.fork():
        os.wait()
        continue
    os.environ.update(case)
    if case["GPU"]:
        pathlib.Path(device).touch()
    out = pathlib.Path(f"out{number}")
    out.mkdir()
    os.environ["LOG"] = f"log{number}"
    reason, built = build(pathlib.Path(f"build/{number}"), out)[1:3]
    found = re.search(r"TF_CUDA_ARCHITECTURES=(\\S+)", pathlib.Path(f"log{number}").read_text())
    files = sorted(path.name.split(".")[0] for path in out.iterdir())
    print(json.dumps([reason, built, found and found[1], files]), flush=True)
    os._exit(0)
"""
ALL = ["_C", "_C_cuda", "_autograd"]
WITHOUT_CUDA = ["_C", "_autograd"]
#: Environment of a build -> the start of the reason why it has no CUDA kernels, its architectures, and
#: its files. nvcc and CMake are scripts: CMake fails for calls like FAILS, nvcc supports KNOWN. Without
#: GPU there is none.
STAND_IN_BUILDS = [
    # Without a GPU they are built on request only.
    ({"GPU": ""}, "no GPU was found at build time; TRANSFORMER_FAST_CUDA_BUILD=1 builds them", "",
     WITHOUT_CUDA),
    ({"GPU": "", "TRANSFORMER_FAST_CUDA_BUILD": "1"}, "",
     "80-real;90-real;100-real;120-real;120-virtual", ALL),
    # From here on there is a GPU.
    ({}, "", "80-real;90-real;100-real;120-real;120-virtual", ALL),
    ({"KNOWN": "sm_75 sm_80 sm_90"}, "", "80-real;90-real;90-virtual", ALL),
    ({"TORCH_CUDA_ARCH_LIST": "7.5;8.6 9.0a+PTX"}, "", "86-real;90a-real;90a-virtual", ALL),
    ({"TRANSFORMER_FAST_CUDA_BUILD": "0"}, "they were switched off at build time", "", WITHOUT_CUDA),
    ({"CUDA_HOME": "/nowhere"}, "CUDA_HOME is '/nowhere', where there is no bin/nvcc", "",
     WITHOUT_CUDA),
    ({"TORCH_CUDA_ARCH_LIST": "sm_90"}, "TORCH_CUDA_ARCH_LIST has 'sm_90'", "", WITHOUT_CUDA),
    ({"TORCH_CUDA_ARCH_LIST": "7.0"}, "TORCH_CUDA_ARCH_LIST names nothing from compute", "",
     WITHOUT_CUDA),
    # A failing nvcc loses only the CUDA kernels, and a torch with another API only the entries.
    ({"FAILS": "*TF_NVCC=*"}, "cmake failed at build time: exit status 1", None, WITHOUT_CUDA),
    ({"FAILS": "*_autograd*"}, "", "80-real;90-real;100-real;120-real;120-virtual", ALL[:2]),
]  # fmt: skip


def test_conditions_and_architectures_of_the_cuda_build(checkout, tmp_path):
    nvcc, cmake, device = tmp_path / "cuda" / "bin" / "nvcc", tmp_path / "cmake", tmp_path / "gpu"
    write_script(nvcc, '[ "$*" = --list-gpu-code ] && echo $KNOWN')
    write_script(
        cmake,
        'case "$*" in $FAILS) exit 1;; esac\n'
        'for word in "$@"; do last="$folder"; case "$previous" in -B|--build) folder="$word";; '
        'esac; previous="$word"; done\n'
        'echo "$*" >> $LOG\n'
        'mkdir -p "$folder"\n'
        'touch "$folder/_C$SUFFIX" "$folder/_autograd$SUFFIX" "$folder/_C_cuda.so"',
    )
    usual = {
        "FAILS": "nothing", "GPU": "yes", "KNOWN": "sm_80 sm_90 sm_100 sm_120",
        "CUDA_HOME": str(tmp_path / "cuda"), "TORCH_CUDA_ARCH_LIST": "",
    }  # fmt: skip
    cases = json.dumps([usual | change for change, *_ in STAND_IN_BUILDS])
    command = [sys.executable, "-c", BUILDS, str(cmake), str(device)]
    done = run(command, checkout, subprocess.PIPE, CASES=cases)
    lines = done.stdout.splitlines()[1:]  # after the name that setup.py prints
    assert len(lines) == len(STAND_IN_BUILDS), done
    for line, (change, reason, architectures, files) in zip(lines, STAND_IN_BUILDS, strict=True):
        said, built, in_cmake, left = json.loads(line)
        assert said.startswith(reason), change
        assert bool(said) == bool(reason) != bool(built), change
        assert left == files, change
        assert architectures is None or (in_cmake or "") == architectures, change
