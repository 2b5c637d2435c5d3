"""Cached launches: a repeated call launches the right variant again, and there are few variants.

A stub that only counts replaces the compiler. The cases therefore run in a subprocess without the
interpreter, for which this file is the program. It forks for each case: binaries of the stub stay in
Triton's cache of kernels.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import python
from test_triton_ptx import flat

pytestmark = pytest.mark.thorough


class Machine:
    """A fake GPU of compute capability 9.0 that only records launches."""

    def __init__(self) -> None:
        self.compiled: list[Any] = []
        #: (binary, grid, stream, arguments) of each launch.
        self.launches: list[tuple[Any, ...]] = []
        self.stream = 7

    def take(self) -> list[tuple[Any, ...]]:
        """Returns the launches since the previous call, and forgets them."""
        found, self.launches = self.launches, []
        return found


@contextmanager
def stubbed() -> Iterator[Machine]:
    """Context manager in which calls on CPU tensors run as on a GPU but compile and launch nothing.

    Once per process: nothing restores Triton's compiler and driver.
    """
    import torch
    import triton.compiler
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime import driver

    from transformer_fast import dispatch
    from transformer_fast.backends import call_cache
    from transformer_fast.backends.triton import config, kernels, runtime

    assert not runtime.INTERPRETED
    machine = Machine()

    class Binary(CompiledKernel):  # type: ignore[misc]
        def __init__(self, src: Any, target: Any = None, options: Any = None, **_: Any) -> None:
            self.src, self.name, self.packed_metadata = src, src.fn.__name__, None
            self.module, self.function, self.metadata = self, id(self), None
            self.hash = f"{src.hash()} {options['num_warps']} {options['num_stages']}"
            machine.compiled.append(self)

        def _run(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
            machine.launches.append((self, (x, y, z), stream, rest[5:]))

    class Driver:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return machine.stream

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

        def get_active_torch_device(self) -> Any:
            return torch.device("cpu")

    triton.compiler.compile = triton.compile = Binary
    driver.set_active(Driver())
    for kernel in kernels(interpreted=True):
        dispatch.register(kernel)
    dispatch.CALL_CACHES["cpu"] = call_cache.lookup
    with config.use_architecture(90), dispatch.use_backend("triton"):
        yield machine


CASES = ("variants", "stream", "batches", "fallback", "order", "empty")


def test_cached_launches():
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    python(__file__, *CASES, PYTHONPATH=path)


def _calls() -> list[Any]:
    """Returns calls that differ in one property each, on which a variant or an argument depends."""
    import torch

    from transformer_fast.backends.triton import (
        attention,
        attention_bwd,
        cross_entropy,
        layer_norm,
        linear,
    )
    from transformer_fast.backends.triton.plans import Planned

    attention_forward = Planned(attention.attention_forward)
    attention_backward = Planned(attention_bwd.attention_backward)
    cross_entropy_forward = Planned(cross_entropy.cross_entropy_forward)
    linear_forward = Planned(linear.forward)
    layer_norm_forward = Planned(layer_norm.forward)

    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32

    def heads(
        b: int = 2, h: int = 4, t: int = 48, d: int = 64, dtype: Any = bf16, off: int = 0,
        pad: int = 0, row: int = 0,
    ) -> Any:  # fmt: skip
        strides = (h * (t * (d + row) + pad), t * (d + row) + pad, d + row, 1)
        whole = torch.zeros(b * strides[0] + off, dtype=dtype)
        return whole.as_strided((b, h, t, d), strides, off)

    def attend(q: Any, k: Any, mask: Any = None, lengths: Any = None, *flags: Any) -> Any:
        causal, scale, p = flags or (False, 0.125, 0.0)
        seed = torch.tensor(3) if p else None
        return lambda: attention_forward(q, k, k, mask, lengths, causal, scale, p, seed, False)

    q, k = heads(), heads(t=64)
    found = [attend(q, k)]
    for dtype in (fp16, fp32):
        found.append(attend(heads(dtype=dtype), heads(t=64, dtype=dtype)))
    for change in (
        {"off": 1},
        {"off": 8},
        {"pad": 8},
        {"pad": 16},
        {"row": 8},
        {"row": 4},
        {"b": 3},
    ):
        found.append(attend(heads(**{**change, "b": 2}), k) if "b" not in change else attend(
            heads(b=3), heads(b=3, t=64)))  # fmt: skip
        if "b" not in change:
            found.append(attend(q, heads(t=64, **change)))
    for t in (1, 40, 47, 49, 64, 70):
        found += [attend(heads(t=t), k), attend(q, heads(t=t)), attend(heads(d=t), heads(d=t))]
    found += [attend(q, k, None, None, True, 0.125, 0.0), attend(q, k, None, None, False, 1.0, 0.0)]
    found += [attend(q, k, None, None, False, 0.125, p) for p in (0.1, 0.2, 1.0)]
    found.append(attend(heads(h=8), k))
    for kind in (torch.bool, bf16, fp32):
        for shape in ((2, 1, 1, 64), (1, 1, 48, 64), (2, 4, 48, 64)):
            mask = torch.zeros(shape, dtype=kind)
            found += [attend(q, k, mask), attend(q, k, mask, None, True, 0.125, 0.1)]
        found.append(attend(q, k, torch.zeros(48, 72, dtype=kind)[:, 3:67][None, None]))
    for kind in (torch.int32, torch.int64):
        lengths = torch.tensor([3, 0, 4, 0], dtype=kind)
        found += [attend(q, k, None, lengths[:2]), attend(q, k, None, lengths[::2])]
    packed = heads(b=1, t=70)
    for row in (0, 8):
        rows = heads(b=1, t=70, row=row)
        for kind, longest in (
            (torch.int32, (48, 48)),
            (torch.int64, (48, 64)),
            (torch.int64, (9, 9)),
        ):
            starts = torch.tensor([0, 40, 40, 70], dtype=kind)
            found.append(
                lambda x=rows, at=starts, most=longest: attention_forward(
                    x, packed, packed, None, at, False, 0.125, 0.0, None, False, at, *most
                )
            )
    shift = torch.zeros(2, 4, 48)
    for causal in (False, True):
        found.append(
            lambda causal=causal: attention_backward(
                q, None, q, k, k, None, None, causal, 0.125, 0.0, None, q, None, shift, shift, True,
                True, True, False,
            )
        )  # fmt: skip

    def norm(x: Any, w: Any, eps: float = 1e-5, p: float = 0.0) -> Any:
        if not p:
            return lambda: layer_norm_forward(x, None, w, w, 1, eps, 0, 0.0, None)
        seed = torch.tensor(3)
        return lambda: layer_norm_forward(x, x, w, None, 1, eps, 0, p, seed)

    for dtype in (bf16, fp16, fp32):
        for columns in (512, 500, 16):
            x, w = torch.zeros(9, columns, dtype=dtype), torch.zeros(columns, dtype=dtype)
            found += [
                norm(x, w),
                norm(x[:1], w),
                norm(x, None),
                norm(x, w, 1.0),
                norm(x, w, 1e-5, 0.1),
            ]
            flat = torch.zeros(9 * columns + 3, dtype=dtype)
            found += [norm(flat[1 : 1 + 9 * columns].view(9, columns), w)]
            found += [
                norm(x, flat[1 : 1 + columns]),
                norm(flat[: 9 * columns].view(-1, columns), w),
            ]
            found += [norm(x.float(), w), norm(x[:, : columns // 2], None)]
    for activation in (0, 1, 2):
        for rows, depth in ((70, 64), (70, 60), (1, 64)):
            x, w = torch.zeros(rows, depth), torch.zeros(32, depth)
            found.append(
                lambda x=x, w=w, a=activation: linear_forward(x, w, w[:, 0].clone(), None, a, False)
            )
    target = torch.zeros(10, dtype=torch.int64)
    for classes in (100, 96):
        for smoothing in (0.0, 0.1):
            for targets in (target[:5], target[::2]):
                found.append(
                    lambda c=classes, s=smoothing, y=targets: cross_entropy_forward(
                        torch.zeros(5, c), y, -100, s
                    )
                )
    return found


def _summary(launches: list[tuple[Any, ...]]) -> list[Any]:
    """Returns variant, grid, stream and arguments of each launch; of pointers only the alignment."""
    import torch

    rows = []
    for binary, grid, stream, args in launches:
        row: list[Any] = []
        kinds = tuple(binary.src.signature.values())
        for kind, value in zip(flat(kinds, kinds), flat(kinds, args), strict=True):
            if kind.startswith("*"):
                place = value.data_ptr() if isinstance(value, torch.Tensor) else value
                row.append(("pointer", place % 16))
            else:
                row.append((type(value), value))
        rows.append((binary.hash, grid, stream, row))
    return rows


def variants(machine: Machine) -> None:
    from transformer_fast.backends import call_cache
    from transformer_fast.backends.triton import plans

    calls = _calls()
    wanted = []
    for call in calls:
        call_cache.forget()
        call()
        wanted.append(_summary(machine.take()))
    compiled = len(machine.compiled)
    call_cache.forget()
    order = [*range(len(calls))] * 4
    random.Random(0).shuffle(order)
    for number in order:
        calls[number]()
        assert _summary(machine.take()) == wanted[number], number
    assert len(machine.compiled) == compiled
    assert compiled > 60
    known = [plan for store in call_cache._stores for plan in store.values()]
    assert not any(plan is plans._NEVER or plan is plans._SEEN for plan in known)
    assert len(known) >= 0.9 * len(calls)  # some calls differ in data only


def stream(machine: Machine) -> None:
    """A CUDA graph is captured on its own stream, where the kernels must be launched."""
    call = _calls()[0]
    for number in (1, 2, 1, 3):
        machine.stream = number
        call()
        assert [found[2] for found in machine.take()] == [number]


def batches(machine: Machine) -> None:
    """Padded batches of any size and length, forward and backward, causal and not."""
    import torch

    from transformer_fast import functional

    numbers = random.Random(0)
    for _ in range(30):
        b, t, s = (numbers.randrange(1, most) for most in (8, 200, 200))
        s, t = s + 1, 1 if numbers.random() < 0.1 else t
        causal = numbers.random() < 0.5
        q = torch.zeros(b, t, 8, 64, dtype=torch.bfloat16).transpose(1, 2)
        k = torch.zeros(b, s, 8, 64, dtype=torch.bfloat16).transpose(1, 2)
        lengths = torch.full((b,), s)
        q.requires_grad_()
        y = functional.scaled_dot_product_attention(q, k, k, is_causal=causal, key_lengths=lengths)
        y.backward(y.detach())
        x = torch.zeros(b, t, 512, dtype=torch.bfloat16, requires_grad=True)
        w = torch.ones(512, dtype=torch.bfloat16, requires_grad=True)
        functional.layer_norm(x, (512,), w, w).backward(x.detach())
        rows = torch.zeros(b * t, 8, 64, dtype=torch.bfloat16, requires_grad=True)
        starts = torch.arange(b + 1) * t
        y = functional.varlen_attn(rows, rows, rows, starts, starts, t, t, is_causal=causal)
        y.backward(y.detach())
        h = functional.linear(
            x.detach(), torch.zeros(512, 512, dtype=torch.bfloat16), activation="relu"
        )
        assert h.shape == x.shape
    count: dict[str, int] = {}
    for binary in machine.compiled:
        count[binary.name] = count.get(binary.name, 0) + 1
    print(count)
    for name, most in MOST_VARIANTS.items():
        assert 0 < count.pop(name) <= most, name
    assert not count, count


#: Variants include causal and ragged ones, which are compiled separately.
MOST_VARIANTS = {
    "attention_forward_kernel": 4,
    "attention_backward_query_kernel": 4,
    "attention_backward_key_kernel": 6,
    "attention_decode_kernel": 1,
    "layer_norm_forward_kernel": 1,
    "layer_norm_backward_kernel": 1,
    "column_sum_kernel": 1,
    "matmul_descriptor_kernel": 1,
    "epilogue_kernel": 2,
}


def fallback(machine: Machine) -> None:
    """Launches that return no compiled kernel are replayed in the original way.

    No launch is replayed while a launch hook of Triton is registered.
    """
    import triton

    from transformer_fast.backends import call_cache
    from transformer_fast.backends.triton import runtime

    calls = _calls()[:3]
    wanted = []
    for call in calls:
        call()
        wanted.append(_summary(machine.take()))
    runtime.CompiledKernel = int  # type: ignore[misc, assignment]
    for call, one in zip(calls * 3, wanted * 3, strict=True):
        call()
        assert _summary(machine.take()) == one
    call_cache.forget()
    seen: list[Any] = []
    triton.knobs.runtime.launch_enter_hook.add(seen.append)
    before = runtime._launch
    count: list[int] = []

    def counted(*arguments: Any) -> None:
        count.append(1)
        before(*arguments)

    runtime._launch = counted
    for call in calls * 3:
        call()
    assert len(count) == len(machine.take()) == 9


def empty(machine: Machine) -> None:
    """Empty tensors have a description; tensors without their own memory have none."""
    import torch

    from transformer_fast.backends import call_cache

    x = torch.zeros(3, 4)
    nothing = torch.empty(0, 4)
    assert call_cache.describe((x, nothing)) is not None
    assert call_cache.describe((x, nothing)) != call_cache.describe((x, torch.empty(0, 5)))
    for other in (torch.empty(0, 4, device="meta"), torch._efficientzerotensor((3, 4)),
                  torch._efficientzerotensor((0, 4)), torch.zeros(3, 4, device="meta")):  # fmt: skip
        assert call_cache.describe((x, other)) is None
    # Flags, numbers and tuples have different descriptions, in any position.
    values = (None, False, True, 0, 1, 0.0, 1.0, "1", (1,), (0,), ())
    keys = {call_cache.describe((x, one, two)) for one in values for two in values}
    assert len(keys) == len(values) ** 2


def order(machine: Machine) -> None:
    """Constants come last: a replayed launch passes None for each of them after the other
    arguments.
    """
    import importlib
    import pkgutil

    from transformer_fast.backends import triton as backend

    seen = set()
    for module in pkgutil.iter_modules(backend.__path__):
        for name, kernel in vars(
            importlib.import_module(f"{backend.__name__}.{module.name}")
        ).items():
            if not name.endswith("_kernel") or not hasattr(kernel, "params"):
                continue
            seen.add(name)
            constants = [p.is_constexpr for p in kernel.params]
            assert constants == sorted(constants), name
            assert set(kernel.do_not_specialize) & {p.name for p in kernel.params}, name
    assert len(seen) >= 17, seen


if __name__ == "__main__":
    for case in sys.argv[1:]:
        if (child := os.fork()) == 0:
            with stubbed() as machine:
                globals()[case](machine)
            raise SystemExit
        _, status = os.waitpid(child, 0)
        assert status == 0, case
