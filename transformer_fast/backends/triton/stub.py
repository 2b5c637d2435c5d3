"""Triton as on a GPU, but for the compiler and the driver: nothing is compiled and nothing runs.

What is left is what a call costs on the host, and what it would compile and launch. For processes of
their own without a GPU: Triton keeps what it believes to have compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ... import call_cache, dispatch
from . import kernels


class Machine:
    """A GPU of compute capability 9.0 whose launches are only written down."""

    def __init__(self) -> None:
        self.compiled: list[Any] = []
        #: (binary, grid, stream, arguments) of each launch; None: they are not wanted.
        self.launches: list[tuple[Any, ...]] | None = []
        self.stream = 7
        #: The dispatcher's kernels as they were outside of the block, and as they are within.
        self.kernels: tuple[Any, Any] = (None, None)

    def take(self) -> list[tuple[Any, ...]]:
        """The launches since this was asked last."""
        assert self.launches is not None
        found, self.launches = self.launches, []
        return found


def _install(machine: Machine) -> None:
    import triton.compiler
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime import driver

    class Binary(CompiledKernel):  # type: ignore[misc]
        def __init__(self, src: Any, target: Any, options: Any) -> None:
            self.src, self.name, self.packed_metadata = src, src.fn.__name__, None
            self.module, self.function, self.metadata = self, id(self), None
            self.hash = f"{src.hash()} {options['num_warps']} {options['num_stages']}"
            machine.compiled.append(self)

        def _run(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
            if machine.launches is not None:
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

    def compiles(src: Any, target: Any = None, options: Any = None, **_: Any) -> Any:
        return Binary(src, target, options)

    triton.compiler.compile = triton.compile = compiles
    driver.set_active(Driver())


_installed: Machine | None = None


@contextmanager
def stubbed() -> Iterator[Machine]:
    """Within the block Triton's kernels take CPU tensors, named or not, and do nothing.

    What is remembered of calls in one block is known in the next.

    Raises:
        RuntimeError: there is a GPU, or Triton's interpreter is on.
    """
    global _installed
    from . import config, runtime

    if torch.cuda.is_available() or runtime.INTERPRETED:
        raise RuntimeError("the launcher is stubbed only without a GPU and without the interpreter")
    if _installed is None:
        _install(_installed := Machine())
    state, on_cpu = dispatch._state, call_cache.on_cpu
    before = dict(state.kernels), dict(state.usable)
    try:
        if _installed.kernels[0] == before:
            # The very same records as before: what is remembered of calls goes by them.
            found, usable = _installed.kernels[1]
            state.kernels.update(found)
            state.usable.update(usable)
        else:
            for kernel in kernels(interpreted=True):
                dispatch.register(kernel)
            _installed.kernels = before, (dict(state.kernels), dict(state.usable))
        call_cache.on_cpu = True
        with config.use_architecture(90), dispatch.use_backend("triton"):
            yield _installed
    finally:
        call_cache.on_cpu = on_cpu
        state.kernels.update(before[0])
        state.usable.update(before[1])
