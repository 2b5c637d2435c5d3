"""Triton's PTX for sm_80, run by `ptx_emulator`, is within the error budget.

The calls run in a subprocess without the interpreter, for which this file is the program. A test
sends one line per call: the name of a case and, to test that the budget catches bugs, a change of
the PTX (kernel, expression, replacement). The answer is a line of JSON.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.thorough

FILE = Path(__file__).resolve()
#: Case names, parsed from this file: kernels cannot be imported here, with the interpreter on.
CASES = [
    ast.literal_eval(name)
    for name in re.findall(r'^    yield \(?\s*("[^"]+")', FILE.read_text("utf-8"), re.MULTILINE)
]
#: Case -> kernels it must run, and instructions that identify the code path.
HIT: dict[str, tuple[str, ...]] = {
    "attention": (
        "attention_forward_kernel", "attention_backward_query_kernel",
        "attention_backward_key_kernel", "mma", "ldmatrix", "cp",
    ),
    "attention mask lists": ("mask_code_kernel", "tile_list_kernel"),
    "attention float mask dropout weights": ("attention_bias_kernel", "attention_weights_kernel"),
    "attention decoding": ("attention_decode_kernel", "attention_merge_kernel"),
    "layer_norm": (
        "layer_norm_forward_kernel", "layer_norm_backward_kernel", "column_sum_kernel"
    ),
    "linear": ("matmul_kernel", "epilogue_kernel", "mma"),
    "linear few rows": ("epilogue_kernel",),
    "feed_forward few rows dropout": ("epilogue_kernel",),
    "feed_forward relu dropout": ("matmul_kernel", "mma"),
    "cross_entropy": ("cross_entropy_forward_kernel", "cross_entropy_backward_kernel"),
}  # fmt: skip
KERNELS = {
    "attention_forward_kernel", "attention_backward_query_kernel", "attention_backward_key_kernel",
    "attention_bias_kernel", "attention_weights_kernel", "attention_decode_kernel",
    "attention_merge_kernel", "mask_code_kernel", "tile_list_kernel", "layer_norm_forward_kernel",
    "layer_norm_backward_kernel", "column_sum_kernel", "matmul_kernel", "epilogue_kernel",
    "cross_entropy_forward_kernel", "cross_entropy_backward_kernel",
}  # fmt: skip


def flat(kinds: Any, values: Any) -> Iterator[Any]:
    """Yields a launch's arguments that are parameters of the compiled kernel: no constants, no
    tuples.

    ``kinds``: Triton's type names; those of a tuple argument are a tuple.
    """
    for kind, value in zip(kinds, values, strict=False):  # constants come last
        if isinstance(kind, tuple):
            yield from flat(kind, value)
        elif kind != "constexpr":
            yield value


class Emulator:
    """The test side of the subprocess."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def ask(self, case: str, change: tuple[str, str, str] | None = None) -> dict[str, Any]:
        if self.process is None or self.process.poll() is not None:
            environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
            environment["PYTHONPATH"] = os.pathsep.join([str(FILE.parents[2]), *sys.path])
            self.process = subprocess.Popen(
                [sys.executable, str(FILE)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([case, change]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the emulator's process ended"
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()


@pytest.fixture(scope="module")
def emulator() -> Iterator[Emulator]:
    one = Emulator()
    yield one
    one.close()


@pytest.mark.parametrize("case", CASES)
def test_ptx_is_within_the_budget(emulator, case):
    answer = emulator.ask(case)
    assert answer["ok"], answer["told"]
    instructions = {name.split(": ")[1].split(".")[0] for name in answer["ran"]}
    kernels = {name.split(":")[0] for name in answer["ran"]}
    for wanted in HIT.get(case, ()):
        assert wanted in kernels | instructions


#: (case, kernel, expression in its PTX, replacement, part of the resulting message)
BUGS = [
    ("attention", "attention_forward", r"max\.f32", "min.f32", "output"),
    ("attention", "attention_forward", r"\.trans\.shared", ".shared", "output"),
    ("attention", "attention_forward", r"(mma\.[^{]*{[^}]*}, {) (%r\d+), (%r\d+)", r"\1 \3, \2", "out"),
    ("attention", "attention_backward_key", r"wait_group\s+\d+;", "wait_group 9;", "under way"),
    ("attention", "attention_backward_query", r"bar\.sync\s+0;", "", "two warps"),
    ("attention", "attention_forward", r"ex2\.approx", "rcp.approx", "output"),
    ("attention causal strided lengths", "attention_forward", r"min\.s64", "max.s64", "output"),
    ("attention query lengths", "attention_backward_key", r"min\.s64", "max.s64", "grad of value"),
    ("attention sequences causal groups", "attention_forward", r"max\.s64", "min.s64", "output"),
    ("layer_norm", "layer_norm_forward", r"@%p\d+ (st\.global)", r"\1", "beyond the tensors"),
    ("layer_norm", "layer_norm_forward", r"(ld\.global\.v4\.b32 [^;]*\+ )0 \]", r"\g<1>8 ]", "alignment"),
    ("layer_norm fp32 far from 0", "layer_norm_forward", r"div\.rn\.f32", "div.full.f32", "output"),
    ("add_layer_norm dropout", "layer_norm_forward", r"mul\.hi\.u32", "mul.lo.u32", "sum["),
    ("linear few rows", "epilogue", r"@%p\d+ (st\.global)", r"\1", "beyond the tensors"),
    ("feed_forward few rows dropout", "epilogue", r"mul\.hi\.u32", "mul.lo.u32", "output"),
    ("cross_entropy", "cross_entropy_forward", r"add\.f64", "sub.f64", "grad of input"),
]  # fmt: skip


@pytest.mark.sampled(100, 50)
@pytest.mark.parametrize(("case", "kernel", "was", "becomes", "told"), BUGS)
def test_planted_bugs_are_caught(emulator, case, kernel, was, becomes, told):
    answer = emulator.ask(case, (f"{kernel}_kernel", was, becomes))
    assert not answer["ok"], answer["told"]
    assert told in answer["told"]


def test_every_kernel_has_a_case():
    wanted = {name for names in HIT.values() for name in names if name.endswith("_kernel")}
    assert wanted == KERNELS


# In the subprocess --------------------------------------------------------------------------------


def serve() -> None:
    import ptx_emulator
    import torch

    from transformer_fast.backends.triton import config, runtime
    from transformer_fast.backends.triton.compile_ahead import compile_binary
    from transformer_fast.testing import embed_all_in_nan, measure, measure_gradients, nan_memory
    from transformer_fast.testing.memory import embed_in_nan

    torch.set_num_threads(1)
    makers = dict(_cases())
    ran: dict[str, int] = {}
    change: tuple[str, str, str] | None = None

    @functools.cache
    def program(text: str) -> ptx_emulator.Program:
        return ptx_emulator.Program(text)

    def emulate(launch: runtime.Launch) -> None:
        if 0 in launch.grid:
            return
        binary = compile_binary(launch, 80)
        name, text = launch.kernel.fn.__name__, binary.asm["ptx"]
        if change is not None and change[0] == name:
            text, count = re.subn(change[1], change[2], text)
            if not count:
                raise LookupError(f"{change[1]} is not in {name}")
        given, places = [], []
        for value in flat(tuple(binary.src.signature.values()), launch.args):
            if isinstance(value, torch.Tensor):
                reach = zip(value.shape, value.stride(), strict=True)
                span = sum((n - 1) * s for n, s in reach) + 1
                places.append((value.data_ptr(), span * value.element_size()))
                value = value.data_ptr()
            given.append(value)
        done = program(text)
        before = dict(done.counts)
        # Triton adds two pointers to memory that these kernels do not use.
        given += [0] * (len(done.parameters) - len(given))
        memory = ptx_emulator.Memory(places)
        try:
            ptx_emulator.launch(done, launch.grid, binary.metadata.shared, given, memory)
        except ptx_emulator.EmulationError as error:
            raise ptx_emulator.EmulationError(f"{name}: {error}") from error
        for instruction, count in done.counts.items():
            key = f"{name}: {instruction}"
            ran[key] = ran.get(key, 0) + count - before.get(instruction, 0)

    for line in sys.stdin:
        case, change = json.loads(line)
        ran.clear()
        op, run, arguments, gradients, settings = makers[case]()
        before = {name: getattr(config, name) for name in settings}
        for name, value in settings.items():
            setattr(config, name, value)
        try:
            with config.use_architecture(80), runtime.instead_of_launching(emulate), nan_memory():
                # Aligned loads are wide and use cp.async.
                placed = tuple(
                    embed_in_nan(x, 64) if isinstance(x, torch.Tensor) else x for x in arguments
                )
                if "misaligned" in case:
                    placed = embed_all_in_nan(arguments)
                with torch.no_grad():
                    found = [measure(op, run(*placed), arguments)]
                if gradients:
                    found.append(measure_gradients(op, run, placed))
            answer = {"ok": all(p.ok for p in found), "told": "; ".join(map(str, found))}
        except AssertionError as error:
            answer = {"ok": False, "told": f"{type(error).__name__}: {error}"}
        except LookupError as error:  # the expression was not found, so no bug was planted
            answer = {"ok": True, "told": str(error)}
        finally:
            for name, value in before.items():
                setattr(config, name, value)
        print(json.dumps({**answer, "ran": ran}), flush=True)


def _cases() -> Iterator[tuple[str, Any]]:
    import torch

    from transformer_fast.backends.triton import config, operators
    from transformer_fast.ops.arguments import RECORDS
    from transformer_fast.ops.layer_norm import norm_on
    from transformer_fast.specs.attention import _attention, _floats, arrange
    from transformer_fast.specs.cross_entropy import _loss
    from transformer_fast.specs.feed_forward import _feed_forward
    from transformer_fast.specs.layer_norm import _added, _plain
    from transformer_fast.specs.linear import _linear
    from transformer_fast.specs.spec import Draw

    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    listed = {"use_block_lists": lambda *sizes: True}
    own = {"few_rows": 0}  # our own products, for any number of rows

    def made(
        op: str, run: Any, build: Any, dtype: torch.dtype, gradients: bool = True, **settings: Any
    ) -> Any:
        def make() -> Any:
            draw = Draw(dtype, "cpu", torch.Generator().manual_seed(0))
            return op, lambda *given: run(RECORDS[op](*given)), build(draw), gradients, settings

        return make

    def patchy(draw: Draw, b: int, h: int, t: int, s: int) -> torch.Tensor:
        """Returns a mask with masked, visible and mixed tiles, and a fully masked query."""
        mask = draw.bools(1, 1, t, s, true=0.7)
        mask[..., :, 64:128] = False
        mask[..., :64, :64] = True
        mask[..., 5, :] = False
        return mask

    def attention(
        b: int = 1, h: int = 2, t: int = 70, s: int = 150, d: int = 64, *, groups: int = 1,
        dtype: torch.dtype = bf16, gradients: bool = True, settings: Any = None, **rest: Any,
    ) -> Any:  # fmt: skip
        build = _attention(b, h, t, s, d, key_heads=h // groups, **rest)
        return made("attention", operators.attention, build, dtype, gradients, **(settings or {}))

    def packed(draw: Draw) -> Any:
        """Strides as after one projection of query, key and value."""
        return arrange(*(x.transpose(1, 2) for x in draw.normal(1, 80, 3, 2, 64).unbind(2)))

    def sequences(queries: list[int], keys: list[int], **more: Any) -> Any:
        """Packed sequences, with offsets of any stride, and rows that belong to no sequence."""

        def make() -> Any:
            rows, key_rows = sum(queries) + 2, sum(keys) + 3
            op, run, arguments, _, settings = attention(t=rows, s=key_rows, **more)()
            ends = torch.tensor([0, *keys]).cumsum(0).to(torch.int32)
            starts = torch.tensor([0, *queries]).cumsum(0).repeat_interleave(3)[::3]
            longest = max(queries), max(keys)
            arguments = (*arguments[:4], ends, *arguments[5:11], starts, longest)
            return op, run, arguments, True, settings

        return make

    def norm(rows: int, columns: int, dtype: torch.dtype, p: float = 0.0, far: float = 0.0) -> Any:
        if p:
            op, build = "add_layer_norm", _added(_plain(rows, columns), p)
        else:
            op, build = "layer_norm", _plain(rows, columns, shift=far)
        return made(op, norm_on("triton", op), build, dtype)

    def linear(
        rows: int, k: int, n: int, activation: str | None, dtype: torch.dtype, **settings: Any
    ) -> Any:
        build = _linear((rows,), k, n, activation=activation, residual=activation is not None)
        return made("linear", operators.linear, build, dtype, **settings)

    def network(
        rows: int, m: int, f: int, activation: str, p: float, dtype: torch.dtype, **settings: Any
    ) -> Any:
        build = _feed_forward((rows,), m, f, activation=activation, dropout_p=p)
        return made("feed_forward", operators.feed_forward, build, dtype, **settings)

    def loss(rows: int, classes: int, smoothing: float, dtype: torch.dtype) -> Any:
        build = _loss(rows, classes, smoothing=smoothing, ignored=0.3, scale=3.0)
        return made("cross_entropy", operators.cross_entropy, build, dtype)

    def spaced(*_: Any) -> torch.Tensor:
        return torch.tensor([150, 0, 0, 33, 0, 0])[::3]

    yield "attention", attention()
    yield "attention misaligned", attention(t=40, s=80, causal=True)
    yield "attention fp16 packed", made("attention", operators.attention, packed, fp16)
    yield "attention fp32 causal", attention(dtype=fp32, h=1, t=33, s=40, d=16, causal=True)
    yield "attention head 128 groups", attention(t=40, s=100, d=128, groups=2)
    yield "attention odd head", attention(t=33, s=70, d=40, value_size=24, causal=True)
    yield "attention causal strided lengths", attention(b=2, lengths=spaced, causal=True)
    yield "attention query lengths", attention(b=2, t=140, h=1, query_lengths=spaced)
    yield (
        "attention query lengths mask lists dropout weights",
        attention(
            b=2,
            h=1,
            t=140,
            mask=patchy,
            query_lengths=spaced,
            dropout_p=0.3,
            weights=True,
            settings=listed,
        ),
    )
    yield (
        "attention sequences causal groups",
        sequences([140, 0, 5], [100, 33, 70], groups=2, causal=True),
    )
    yield "attention mask", attention(mask=patchy)
    yield (
        "attention mask lists",
        attention(h=1, t=140, s=260, mask=patchy, causal=True, settings=listed),
    )
    yield (
        "attention float mask dropout weights",
        attention(mask=_floats("hts"), dropout_p=0.3, weights=True),
    )

    def hidden_garbage() -> Any:
        op, run, arguments, _, settings = attention(mask=patchy)()
        arguments[1][:, :, 70], arguments[2][:, :, 80] = math.nan, math.inf
        return op, run, arguments, True, settings

    yield "attention hidden garbage", hidden_garbage
    split = {"attention_decode": lambda *sizes: config.DecodeTile(64, 64, 4, 3)}
    decoding = {"b": 2, "h": 4, "t": 1, "s": 200, "groups": 2, "gradients": False}
    decoding["lengths"] = lambda *_: torch.tensor([200, 33])
    alone = {**decoding, "b": 1, "lengths": lambda *_: torch.tensor([150])}
    yield "attention decoding", attention(**alone, settings=split)
    yield "attention decoding one split", attention(**decoding)
    yield "layer_norm", norm(37, 512, bf16)
    yield "layer_norm misaligned", norm(9, 500, bf16)
    yield "layer_norm fp32 far from 0", norm(21, 300, fp32, far=1000.0)
    yield "layer_norm wide", norm(5, 5000, fp16)
    yield "add_layer_norm dropout", norm(13, 200, bf16, p=0.3)
    yield "linear", linear(70, 96, 136, "gelu", bf16)
    yield "linear plain", linear(150, 100, 40, None, fp16)
    yield "linear fp32 silu", linear(40, 33, 50, "silu", fp32, **own)
    yield "linear few rows", linear(5, 64, 136, "gelu", bf16)
    yield "feed_forward relu dropout", network(70, 64, 96, "relu", 0.2, bf16)
    yield "feed_forward gelu_tanh dropout", network(33, 64, 96, "gelu_tanh", 0.2, bf16, **own)
    yield "feed_forward few rows dropout", network(33, 64, 100, "silu", 0.2, fp16)
    yield "cross_entropy", loss(9, 1000, 0.1, bf16)
    yield "cross_entropy long rows", loss(5, 5003, 0.0, fp32)


if __name__ == "__main__":
    serve()
