"""Triton's kernels in the library of the CUDA kernels: what the operators launch, and that it is what
Triton's own launchers would. The machine code of sm_80 is run by the emulator of PTX."""

from __future__ import annotations

import ctypes
import functools
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simt_build
import torch
from conftest import ON_GPU
from test_cuda_attention import heads
from test_cuda_machine_code import TOOL
from test_cuda_operators import hold, ops, rows_of, the_kernel

from transformer_fast import _native, dispatch
from transformer_fast.cli import info
from transformer_fast.specs.attention_cases import arrange
from transformer_fast.testing import call_of, check, require_grad

sys.path.append(str(Path(__file__).parents[1] / "triton"))
import ptx_emulator

BUILT = [path.parent for path in simt_build.embedded()]
embedded = pytest.mark.skipif(
    not BUILT, reason=f"no kernels of Triton were built here: {_native.embedded.why_not}"
)
on_the_machine = pytest.mark.skipif(ON_GPU, reason="a GPU launches its kernels itself")
HALF = torch.bfloat16


class Kernel(ctypes.Structure):
    """EmbeddedKernel of csrc/cuda/embedded.h."""

    _fields_ = (
        ("name", ctypes.c_char_p), ("code", ctypes.c_void_p), ("architecture", ctypes.c_int),
        ("kind", ctypes.c_int), ("bfloat16", ctypes.c_bool), ("head", ctypes.c_int),
        ("causal", ctypes.c_bool), ("tile", ctypes.c_int), ("threads", ctypes.c_int),
        ("shared", ctypes.c_int), ("parameters", ctypes.POINTER(ctypes.c_ubyte)),
        ("count", ctypes.c_int),
    )  # fmt: skip


def _enumeration(name: str) -> list[str]:
    """The names that an enumeration of embedded.h has."""
    text = re.sub(r"//[^\n]*", "", (simt_build.SOURCES / "embedded.h").read_text())
    found = re.search(rf"enum class {name}[^{{]*{{([^}}]*)}}", text)
    assert found is not None
    return re.findall(r"\w+", found[1])


PARAMETERS, KINDS = _enumeration("EmbeddedParameter"), _enumeration("EmbeddedKind")
REALS = ("scale", "grad_scale", "keep_scale")


@dataclass
class Launch:
    """What an operator asked for."""

    kernel: str
    kind: str
    variant: str
    architecture: int
    tile: int
    threads: int
    shared: int
    blocks: int
    arguments: dict[str, Any]


def _recorded(kernel: Kernel, blocks: int, given: Any) -> Launch:
    names = [PARAMETERS[i] for i in kernel.parameters[: kernel.count]]
    arguments = {}
    for i, name in enumerate(names):
        kind: Any = ctypes.c_void_p if name.endswith("_ptr") else ctypes.c_int
        kind = ctypes.c_float if name in REALS else kind
        arguments[name] = kind.from_address(given[i]).value or 0
    dtype, order = ("float16", "bfloat16")[kernel.bfloat16], ("all", "causal")[kernel.causal]
    return Launch(
        kernel.name.decode(), KINDS[kernel.kind], f"{KINDS[kernel.kind]}_{dtype}_{kernel.head}_{order}",
        kernel.architecture, kernel.tile, kernel.threads, kernel.shared, blocks, arguments,
    )  # fmt: skip


Take = Callable[[Launch], None]


@pytest.fixture
def taking(operators: str) -> Iterator[Callable[[int, Take], None]]:
    """A function that makes the machine a GPU of a compute capability whose launches are given away."""
    take = ctypes.CDLL(str(simt_build.library())).simt_take
    callback = ctypes.CFUNCTYPE(
        None, ctypes.POINTER(Kernel), ctypes.c_int, ctypes.POINTER(ctypes.c_void_p)
    )
    kept, failed = [], []

    def start(capability: int, to: Take) -> None:
        def call(kernel: Any, blocks: int, given: Any) -> None:
            try:
                to(_recorded(kernel.contents, blocks, given))
            except Exception as error:  # it would not get through the C++ code
                failed.append(error)

        kept.append(callback(call))
        take(capability, kept[-1])

    yield start
    take(0, callback())
    for error in failed:
        raise error


@functools.cache
def _program(path: Path) -> ptx_emulator.Program:
    return ptx_emulator.Program(path.read_text())


def _places(launch: Launch) -> list[tuple[int, int]]:
    """(address, bytes) of the tensors of a launch."""
    given, head = launch.arguments, int(launch.variant.split("_")[-2])
    queries, keys = given["queries"], given["keys"]
    if launch.kind == "backward_key":
        query_heads = key_heads = given["key_heads"]
    else:
        query_heads, key_heads = given["heads"], given["heads"] // given["group"]
    tiles = -(-(keys if launch.kind == "backward_key" else queries) // launch.tile)
    batch = launch.blocks // tiles // query_heads
    found = [(given["length_ptr"], 8 * ((batch - 1) * given["stride_length"] + 1))]
    for name in ("shift", "norm", "delta"):
        found.append((given.get(f"{name}_ptr", 0), 4 * batch * query_heads * queries))
    for name, stride, count, rows in (
        ("q", "qbht", query_heads, queries), ("k", "kbhs", key_heads, keys),
        ("v", "vbhs", key_heads, keys), ("out", "obht", query_heads, queries),
        ("do", "gbht", query_heads, queries), ("dq", "dqbht", query_heads, queries),
        ("dk", "dkbhs", key_heads, keys), ("dv", "dvbhs", key_heads, keys),
    ):  # fmt: skip
        if f"{name}_ptr" in given:
            b, h, row = (given[f"stride_{stride[:-3]}{dim}"] for dim in stride[-3:])
            span = (batch - 1) * b + (count - 1) * h + (rows - 1) * row + head
            found.append((given[f"{name}_ptr"], 2 * span))
    return [place for place in found if place[0]]


def emulate(launch: Launch) -> None:
    program = _program(BUILT[0] / str(launch.architecture) / f"{launch.variant}.ptx")
    assert program.threads == launch.threads
    count = len(program.parameters)
    # Behind the last of our own come those of Triton, which has no names for them.
    arguments = [*launch.arguments.values()]
    arguments += [0] * (count - len(arguments))
    memory = ptx_emulator.Memory(_places(launch))
    ptx_emulator.launch(program, (launch.blocks,), launch.shared, arguments, memory)


def _called(tensors: tuple[torch.Tensor, ...], **options: Any) -> dict[str, Any]:
    """What the operators are called with."""
    given = dict(zip(("query", "key", "value"), tensors, strict=True))
    return {**given, "lengths": None, "causal": False, "scale": 0.2, **options}


def _forward(call: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    q, k, v = call["query"], call["key"], call["value"]
    rest = call["lengths"], call["causal"], call["scale"], 0.0, None
    return ops.cuda_attention(q, k, v, None, *rest, False)


def _backward(
    call: dict[str, Any], grad: torch.Tensor, found: Any, wants: Any = (1, 1, 1)
) -> tuple[torch.Tensor, ...]:
    q, k, v = call["query"], call["key"], call["value"]
    rest = call["lengths"], call["causal"], call["scale"], 0.0, None
    output, _, shift, norm = found
    return ops.cuda_attention_backward(
        grad, None, q, k, v, None, *rest, output, shift, norm, *map(bool, wants), False
    )


def _expected(call: dict[str, Any], grad: torch.Tensor, output: torch.Tensor) -> list[Any]:
    """What Triton's launchers launch for the same call."""
    from transformer_fast.backends.triton import config, runtime
    from transformer_fast.backends.triton.attention import attention_forward
    from transformer_fast.backends.triton.attention_bwd import attention_backward

    arguments = (
        call["query"], call["key"], call["value"], None, call["lengths"], call["causal"],
        call["scale"], 0.0, None,
    )  # fmt: skip
    with config.use_architecture(80), runtime.record_launches() as found:
        _, shift, norm = attention_forward(*arguments)
        attention_backward(grad, None, *arguments, output, None, shift, norm, False)
    return found


def _tensors(call: dict[str, Any], grad: Any, found: Any, grads: Any) -> dict[str, Any]:
    """The tensors of a call by the names of kernels' parameters and of their strides."""
    output, _, shift, norm = found
    return {
        "q": call["query"], "k": call["key"], "v": call["value"], "do": grad, "out": output,
        "shift": shift, "norm": norm, "dq": grads[0], "dk": grads[1], "dv": grads[2],
        "length": call["lengths"],
    }  # fmt: skip


def compare(mine: list[Launch], theirs: list[Any], tensors: dict[str, Any]) -> None:
    """Holds launches to those of Triton's launchers."""
    from transformer_fast.backends.triton import embed

    compiled = {one.name: one.launch for one in embed.variants(80, [HALF])}
    assert [one.kernel for one in mine] == [one.kernel.fn.__name__ for one in theirs]
    for one, other in zip(mine, theirs, strict=True):
        names = list(inspect.signature(other.kernel.fn).parameters)
        given = {**dict(zip(names, other.args, strict=False)), **other.constants}
        assert (one.blocks,) == other.grid
        assert one.threads == 32 * other.warps
        for name, value in compiled[one.variant].constants.items():
            assert name.startswith("RAGGED") or value == given[name], name
        order = [name for name in names if name in one.arguments]
        assert order == [name for name in one.arguments if name != "scratch_ptr"]
        for name, value in one.arguments.items():
            where = f"{name} of {one.kernel}"
            if name == "scratch_ptr":
                assert value == 0
            elif name == "delta_ptr":
                assert value == mine[-1].arguments[name], where
            elif name == "length_ptr" and tensors["length"] is None:
                assert ctypes.c_int64.from_address(value).value == 2**63 - 1
            elif name.endswith("_ptr"):
                assert value == tensors[name.removesuffix("_ptr")].data_ptr(), where
            elif name in REALS:
                assert value == np.float32(given[name]), where
            elif (stride := re.fullmatch(r"stride_(q|k|v|o|g|dq|dk|dv)([bhts])", name)) is not None:
                owner = {"o": "out", "g": "do"}.get(stride[1], stride[1])
                dim = "bhts".index(stride[2]) if stride[2] != "s" else 2
                size, found = tensors[owner].shape[dim], tensors[owner].stride(dim)
                assert value == (found if size > 1 or value else 0), where
            else:
                assert value == given[name], where


def _packed(queries: int, size: int) -> tuple[torch.Tensor, ...]:
    """Query, key and value as one projection of two heads makes them."""
    made = rows_of((3, queries, 3, 2, size), HALF, "cpu", 1)
    return tuple(made[:, :, i].transpose(1, 2) for i in range(3))


CALLS = {
    "plain": lambda: _called(heads("cpu", HALF, 40, 520, 64, batch=2, heads=3)),
    "packed, causal": lambda: _called(_packed(600, 64), causal=True),
    "head 128, lengths": lambda: _called(
        heads("cpu", HALF, 130, 513, 128, batch=3, heads=16),
        lengths=torch.tensor([513, 9, 0, 9, 44, 9])[::2],
    ),
    "head 128, causal, one head": lambda: _called(heads("cpu", HALF, 700, 700, 128), causal=True),
    "shared keys": lambda: _called(
        tuple(x.expand(2, -1, -1, -1) for x in heads("cpu", HALF, 40, 520, 64, heads=2))
    ),
}


@embedded
@on_the_machine
@pytest.mark.parametrize("name", CALLS)
def test_launches_are_those_of_tritons_launchers(name, taking):
    call, mine = CALLS[name](), []
    taking(80, mine.append)
    found = _forward(call)
    grad = torch.randn_like(found[0])
    grads = _backward(call, grad, found)
    theirs, tensors = _expected(call, grad, found[0]), _tensors(call, grad, found, grads)
    compare(mine, theirs, tensors)
    for kind, one, other in (
        (0, "stride_kh", "stride_ks"), (0, "q_ptr", "k_ptr"), (0, "queries", "keys"),
        (1, "scale", "grad_scale"), (2, "dk_ptr", "dv_ptr"), (2, "shift_ptr", "norm_ptr"),
    ):  # fmt: skip
        given = mine[kind].arguments
        if given[one] == given[other]:
            continue
        given[one], given[other] = given[other], given[one]
        with pytest.raises(AssertionError):
            compare(mine, theirs, tensors)
        given[one], given[other] = given[other], given[one]


NUMBERS = {
    "lengths": (lambda: heads("cpu", HALF, 33, 520, 64, batch=2), {"lengths": [520, 70]}),
    "no lengths": (lambda: heads("cpu", HALF, 33, 540, 64, heads=2), {}),
    "causal, rows of nothing": (
        lambda: heads("cpu", HALF, 530, 530, 64, batch=2),
        {"causal": True, "lengths": [530, 0]},
    ),
    "head 128, causal": (lambda: heads("cpu", HALF, 520, 520, 128), {"causal": True}),
}


@embedded
@on_the_machine
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name, taking, device):
    make, options = NUMBERS[name]
    if "lengths" in options:
        options = {**options, "lengths": torch.tensor(options["lengths"])}
    ran: list[str] = []

    def run(launch: Launch) -> None:
        ran.append(launch.kind)
        emulate(launch)

    taking(80, run)
    hold("attention", arrange(*make(), **options))
    assert set(ran) == set(KINDS)


@embedded
@on_the_machine
def test_grouped_heads_without_gradients(taking, device):
    taking(80, emulate)
    q, k, v = heads("cpu", HALF, 33, 520, 64, heads=4, key_heads=2)
    found, _ = the_kernel("attention").run(*arrange(q, k, v, gqa=True))
    check("attention", (found, None), arrange(q, k, v, gqa=True))


@embedded
@on_the_machine
def test_a_wrong_argument_is_seen_in_the_numbers(taking, device):
    def run(launch: Launch) -> None:
        if launch.kind == "backward_key":
            given = launch.arguments
            given["dk_ptr"], given["dv_ptr"] = given["dv_ptr"], given["dk_ptr"]
        emulate(launch)

    taking(80, run)
    with pytest.raises(AssertionError, match=r"grad of (key|value)"):
        hold("attention", arrange(*heads("cpu", HALF, 33, 520, 64)))


@embedded
@on_the_machine
def test_tensors_that_kernels_cannot_read_are_copied(taking):
    mine: list[Launch] = []
    taking(80, mine.append)
    q, k, v = heads("cpu", HALF, 40, 520, 64, batch=2, heads=3)
    aside = torch.empty(q.numel() + 1, dtype=HALF)[1:].view(q.shape).copy_(q)
    spread = torch.empty(*k.shape[:3], 72, dtype=HALF)[..., :64].copy_(k)  # rows of 144 bytes
    columns = v.transpose(2, 3).contiguous().transpose(2, 3)
    call = _called((aside, spread, columns))
    found = _forward(call)
    _backward(call, found[0][:1, :1, :1, :1].expand_as(q), found)
    for one in mine:
        for name in ("q", "k", "v", *(("do",) if one.kind != "forward" else ())):
            assert one.arguments[f"{name}_ptr"] % 16 == 0
            strides = [v for n, v in one.arguments.items() if n.startswith("stride_")]
            assert not any(stride % 16 for stride in strides if stride != 1)
    assert mine[0].arguments["q_ptr"] != aside.data_ptr()
    assert mine[0].arguments["stride_ks"] == mine[0].arguments["stride_vs"] == 64


@embedded
@on_the_machine
def test_gradients_that_nobody_wants_are_not_worked_out(taking):
    mine: list[Launch] = []
    call = _called(heads("cpu", HALF, 40, 520, 64))
    taking(80, mine.append)
    found = _forward(call)
    for wants, kinds in (
        ((1, 0, 0), ["backward_query"]), ((0, 0, 1), ["backward_query", "backward_key"]),
    ):  # fmt: skip
        mine.clear()
        grads = _backward(call, torch.randn_like(found[0]), found, wants)
        assert [one.kind for one in mine] == kinds
        assert [bool(x.numel()) for x in grads[:3]] == [bool(want) for want in wants]


@embedded
@on_the_machine
@pytest.mark.parametrize(
    ("capability", "served"),
    [(75, None), (80, 80), (86, 80), (89, 80), (90, 90), (100, 100), (103, None), (120, None)],
)
def test_which_gpus_are_served(capability, served, taking):
    if served not in (None, *_native.embedded.architectures):
        pytest.skip(f"nothing was built for {served}")
    mine: list[Launch] = []
    taking(capability, mine.append)
    _forward(_called(heads("cpu", HALF, 2, 513, 64)))
    assert [one.architecture for one in mine] == ([] if served is None else [served])


#: Calls that the kernels of CUDA C++ serve, however many keys they have.
OTHERS: dict[str, Callable[[Any, Any, Any], tuple[Any, ...]]] = {
    "few keys": lambda q, k, v: (q, k[..., :512, :], v[..., :512, :], None, None, False, 0.2, 0.0),
    "float32": lambda q, k, v: (q.float(), k.float(), v.float(), None, None, False, 0.2, 0.0),
    "a size of its own": lambda q, k, v: (q, k, v[..., :40], None, None, False, 0.2, 0.0),
    "another size": lambda *qkv: (*(x[..., :48] for x in qkv), None, None, False, 0.2, 0.0),
    "mask": lambda q, k, v: (q, k, v, torch.ones(1, 513).bool(), None, False, 0.2, 0.0),
    "scale": lambda q, k, v: (q, k, v, None, None, False, -0.2, 0.0),
    "dropout": lambda q, k, v: (q, k, v, None, None, False, 0.2, 0.5),
    "one query": lambda q, k, v: (q[..., :1, :], k, v, None, None, False, 0.2, 0.0),
    "short lengths": lambda q, k, v: (q, k, v, None, torch.tensor([9]).int(), False, 0.2, 0.0),
}


@embedded
@on_the_machine
@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_are_left_to_cuda_cpp(name, taking):
    mine: list[Launch] = []
    taking(80, mine.append)
    arguments = OTHERS[name](*heads("cpu", HALF, 2, 513, 64))
    output, *_ = ops.cuda_attention(*arguments, torch.tensor(7), False)
    assert not mine
    assert output.isfinite().all()


@embedded
@on_the_machine
def test_wrong_calls_are_errors(taking):
    taking(80, lambda launch: None)
    call = _called(heads("cpu", HALF, 2, 513, 64, heads=2, key_heads=1))
    found = _forward(call)
    with pytest.raises(RuntimeError, match="no gradients of grouped heads"):
        _backward(call, found[0], found)
    with pytest.raises(RuntimeError, match="what a forward without weights gave"):
        _backward(call, found[0], (found[0][:, :1], *found[1:]))


LIMITS = {
    "served": ({}, {}, None),
    "lengths": ({"lengths": torch.tensor([9]), "causal": True}, {}, None),
    "float16": ({}, {"dtype": torch.float16}, "and the call has float16"),
    "float32": ({}, {"dtype": torch.float32}, "and the call has float32"),
    "head": ({}, {"size": 96}, "heads of 64 or 128, .* has head size 96"),
    "value": ({}, {"value_size": 128}, "has head size 64"),
    "mask": ({"mask": torch.ones(1, 513).bool()}, {}, "has a mask"),
    "dropout": ({"dropout_p": 0.1, "seed": torch.tensor(7)}, {}, "has dropout"),
    "weights": ({"weights": True}, {}, "has weights to return"),
    "one query": ({}, {"queries": 1}, "has one query"),
    "grouped heads": ({"gqa": True}, {"heads": 2, "key_heads": 1}, "has grouped heads"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits(name, device, monkeypatch):
    options, shape, said = LIMITS[name]
    shape = {"dtype": HALF, "queries": 5, "keys": 513, "size": 64, **shape}
    tensors = heads("cpu", **shape)
    call = require_grad("attention", arrange(*tensors, **options))
    some = _native.Embedded((80, 90), ("bfloat16",), "")
    monkeypatch.setattr(_native, "embedded", some)

    def reasons() -> str:
        return "; ".join(dispatch.why_not(the_kernel("attention"), call_of("attention", call)))

    if said is None:
        assert reasons() == ""
    else:
        assert re.search(f"512 keys and the call has 513; of more, bfloat16 in .*{said}", reasons())
    monkeypatch.setattr(_native, "embedded", some._replace(architectures=(86, 90)))
    assert "embedded for compute capability 8.6, 9.0 and this GPU has 8.0" in reasons()
    monkeypatch.setattr(_native, "embedded", _native.Embedded((), (), "there is no Triton"))
    assert "the call has 513; kernels for more were not embedded: there is no Triton" in reasons()


def test_info(monkeypatch):
    monkeypatch.setattr(_native, "embedded", _native.Embedded((80, 120), ("bfloat16",), ""))
    assert info.embedded_state().endswith("in bfloat16, for compute capability 8.0, 12.0")
    monkeypatch.setattr(_native, "embedded", _native.Embedded((), (), "there is no Triton"))
    assert info.embedded_state() == "none: there is no Triton"


ROW = re.compile(
    r'{"(\w+)", tf_(\d+)_(\w+), \d+, EmbeddedKind::(\w+), (\w+), (\d+), (\w+), (\d+), (\d+), '
    r"(\d+), \w+, (\d+)},"
)
#: Bytes a thread that may lie on the stack.
SPILLED = {"forward": 0, "backward_query": 24, "backward_key": 40}


@embedded
@pytest.mark.skipif(TOOL is None, reason="there is no cuobjdump")
@pytest.mark.parametrize("architecture", _native.embedded.architectures)
def test_machine_code(architecture):
    """It is in the library, as the table says, and keeps nearly everything in registers."""
    from transformer_fast.backends.triton import compile_ahead

    library = _native.CUDA_LIBRARY.read_bytes()
    # What is compiled for 8.0 runs on 8.6, too, which has less shared memory.
    limit = compile_ahead.SHARED_LIMIT[86 if architecture == 80 else architecture]
    rows = ROW.findall((BUILT[0] / f"embedded_{architecture}.cpp").read_text())
    served = {(kind, *which) for _, _, _, kind, *which, _, _, _, _ in rows}
    assert len(rows) == len(served) == 3 * 2 * 2 * len(_native.embedded.dtypes)
    for name, number, variant, kind, *_, threads, shared, count in rows:
        assert int(number) == architecture
        path = BUILT[0] / number / f"{variant}.cubin"
        cubin, ptx = path.read_bytes(), path.with_suffix(".ptx").read_text()
        program = re.search(rf"\.entry {name}\((.*?)\).*?\.reqntid (\d+)", ptx, re.DOTALL)
        assert program is not None, variant
        assert (program[1].count(".param"), int(program[2])) == (int(count), int(threads)), variant
        assert cubin in library, variant
        assert int(shared) <= limit, variant
        registers, spilled = compile_ahead.resources(cubin)
        assert registers <= compile_ahead.REGISTER_LIMIT
        assert spilled <= SPILLED[kind], variant


def test_kernels_can_be_loaded_while_a_cuda_graph_is_captured(tmp_path):
    """By the header of Triton's own CUDA, with functions of the test's own behind it."""
    header = Path(pytest.importorskip("triton").__file__).parent / "backends" / "nvidia" / "include"
    if simt_build.WHY_NOT or not (header / "cuda_runtime_api.h").is_file():
        pytest.skip(simt_build.WHY_NOT or "there is no header of CUDA's")
    program = tmp_path / "runtime"
    folders = [f"-I{simt_build.SOURCES.parent}", f"-isystem{header}"]
    source = str(simt_build.HERE / "runtime.cpp")
    options = ["-std=c++20", "-Wall", "-Wextra", "-Werror", *folders]
    made = subprocess.run(
        [str(simt_build.COMPILER), *options, "-o", str(program), source],
        capture_output=True, text=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    told = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    assert told == "CUDA: no memory\n3 libraries, 6 launches\n"
