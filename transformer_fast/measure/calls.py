"""Which backend a call is dispatched to, and a recorder of the calls that ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from .. import dispatch, small
from ..backends import cpu_blocks
from ..dispatch import OPS, Kernel
from ..testing import call_of


def chosen(op: str, arguments: tuple[Any, ...]) -> str | None:
    """The backend that the dispatcher chooses; None if it refuses the call."""
    return dispatch.explain_call(call_of(op, arguments)).backend


@dataclass
class Record:
    """The backends that a block of code ran on."""

    #: How often each (op, backend) ran.
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: For the first call of each (op, backend): why other backends were not selected.
    reasons: dict[tuple[str, str], dict[str, list[str]]] = field(default_factory=dict)

    @property
    def backends(self) -> str:
        """As 'cpu+torch'."""
        return "+".join(sorted({backend for _, backend in self.calls}))


def _sublayer_name(sublayer: cpu_blocks.Sublayer) -> str:
    network = sublayer.kind == cpu_blocks.Kind.FEED_FORWARD
    return "feed_forward sub-layer" if network else "attention sub-layer"


@contextmanager
def record() -> Iterator[Record]:
    """Records every kernel call in the block. Single-threaded; slows calls down."""
    found = Record()

    def watch(kernel: Kernel) -> Kernel:
        key = kernel.op, kernel.backend

        def run(*arguments: Any) -> Any:
            if key not in found.calls:
                found.reasons[key] = dispatch.explain_call(call_of(kernel.op, arguments)).reasons
            found.calls[key] += 1
            return kernel.run(*arguments)

        return replace(kernel, run=run)

    def watch_block(run: Callable[..., Any], names: Callable[..., Iterable[str]]) -> Any:
        def block(*arguments: Any) -> Any:
            found.calls.update((name, "cpu") for name in names(*arguments))
            return run(*arguments)

        return block

    before = [kernel for op in OPS for kernel in dispatch.kernels(op)]
    # Fused layers and decoding steps bypass the dispatcher.
    blocks: list[tuple[Any, str, Callable[..., Iterable[str]]]] = [
        (cpu_blocks, "layers", lambda _, sublayers, *rest: map(_sublayer_name, sublayers)),
        (cpu_blocks.DecodeStack, "__call__", lambda *_: ["decoding step"]),
    ]
    plain = [getattr(owner, name) for owner, name, _ in blocks]
    for kernel in before:
        dispatch.register(watch(kernel))
    for (owner, name, names), run in zip(blocks, plain, strict=True):
        setattr(owner, name, watch_block(run, names))
    try:
        with small.handed_over(short=False):
            yield found
    finally:
        for kernel in before:
            dispatch.register(kernel)
        for (owner, name, _), run in zip(blocks, plain, strict=True):
            setattr(owner, name, run)


def forced(run: Callable[..., Any], backend: str | None) -> Callable[..., Any]:
    """``run`` with all ops on ``backend``; None: the dispatcher's choice."""
    if backend is None:
        return run

    def on_backend(*arguments: Any) -> Any:
        with dispatch.use_backend(backend):
            return run(*arguments)

    return on_backend
