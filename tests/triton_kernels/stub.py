"""Stubs for Triton's compiler and driver: calls run as on a GPU, but compile and launch nothing.

They record what a call would compile and launch. Requires a process without a GPU. The stub's binaries
enter Triton's kernel cache; do not use the process for anything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from transformer_fast import dispatch
from transformer_fast.backends import call_cache
from transformer_fast.backends.triton import config, kernels, runtime


class Machine:
    """A fake GPU of compute capability 9.0 that only records launches."""

    def __init__(self) -> None:
        self.compiled: list[Any] = []
        #: (binary, grid, stream, arguments) of each launch; None: launches are not recorded.
        self.launches: list[tuple[Any, ...]] | None = []
        self.stream = 7

    def take(self) -> list[tuple[Any, ...]]:
        """Returns the launches since the previous call, and forgets them."""
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


@contextmanager
def stubbed() -> Iterator[Machine]:
    """Context manager in which Triton kernels accept CPU tensors and do nothing.

    The dispatcher selects them without naming the backend. Once per process.
    """
    assert not torch.cuda.is_available()
    assert not runtime.INTERPRETED
    _install(machine := Machine())
    for kernel in kernels(interpreted=True):
        dispatch.register(kernel)
    with call_cache.on_cpu(), config.use_architecture(90), dispatch.use_backend("triton"):
        yield machine
