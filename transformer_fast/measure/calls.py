"""Records which kernels ran, and forces calls to run on a given backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from .. import dispatch, fast_path
from ..dispatch import FUSED, OPS, Kernel
from ..recipe import Kind
from ..testing import call_of


@dataclass
class Record:
    """The kernel calls of a block of code."""

    #: Number of calls of each (op, backend).
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: For the first call of each (op, backend): why other backends were not selected.
    reasons: dict[tuple[str, str], dict[str, list[str]]] = field(default_factory=dict)

    @property
    def backends(self) -> str:
        """Sorted names of the backends that ran, such as 'cpu+torch'."""
        return "+".join(sorted({backend for _, backend in self.calls}))


def _sublayers(kinds: Sequence[int], eps: Sequence[float]) -> list[str]:
    """Names the sub-layers that a call of several layers runs.

    ``kinds``: the kinds of one layer's sub-layers. ``eps``: one value per sub-layer of all layers.
    """
    whole = [kind for kind in map(Kind, kinds) if not kind.is_part]
    names = ["attention sub-layer" if k.is_attention else "feed_forward sub-layer" for k in whole]
    return names * (len(eps) // len(kinds))


@contextmanager
def record() -> Iterator[Record]:
    """Context manager that records every kernel call. Not thread-safe; slows calls down."""
    found = Record()

    def watch(kernel: Kernel) -> Kernel:
        key = kernel.op, kernel.backend

        def run(arguments: Any) -> Any:
            if key not in found.calls:
                found.reasons[key] = dispatch.explain_call(call_of(kernel.op, arguments)).reasons
            found.calls[key] += 1
            return kernel.function(arguments)

        def run_layers(*arguments: Any) -> Any:
            stack = arguments[0]
            names = _sublayers(stack.kinds, stack.eps)
            found.calls.update((name, kernel.backend) for name in names)
            return kernel.run(*arguments)

        def bind_step(*arguments: Any) -> Any:
            step = kernel.run(*arguments)

            def run_step(*inputs: Any) -> Any:
                found.calls["decoding step", kernel.backend] += 1
                return step(*inputs)

            return run_step

        special = {**dict.fromkeys(FUSED[:2], run_layers), "decode_step": bind_step}
        return replace(kernel, function=special.get(kernel.op, run))

    before = [kernel for op in (*OPS, *FUSED[:3]) for kernel in dispatch.kernels(op)]
    for kernel in before:
        dispatch.register(watch(kernel))
    try:
        with fast_path.small_size_fallback(short=False):
            yield found
    finally:
        for kernel in before:
            dispatch.register(kernel)


def forced(run: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Wraps ``run`` so that all ops run on ``backend``."""
    on_backend: Any = dispatch.use_backend(backend)
    return on_backend(lambda *arguments: run(*arguments))  # type: ignore[no-any-return]
