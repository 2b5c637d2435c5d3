"""Context managers that change settings: threads, tasks, generators, compiled programs; the defaults."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from harness import Operators, since_torch
from torch import Tensor

import transformer_fast
from transformer_fast import _native, dispatch, fast_path, functional, nn
from transformer_fast._context import settings
from transformer_fast.backends import call_cache

needs_native = pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))
X, WEIGHT = torch.randn(4, 8), torch.randn(8, 8)
NAMES = ("backend", "strict", "export_operators", "batch_invariant")
#: Setting -> (context manager that changes it, its value inside).
BLOCKS: dict[str, tuple[Callable[[], AbstractContextManager[None]], Any]] = {
    "backend": (lambda: dispatch.use_backend("reference"), "reference"),
    "strict": (dispatch.strict, True),
    "export_operators": (dispatch.export_operators, True),
    "batch_invariant": (dispatch.batch_invariant, True),
    "small_size_fallback": (lambda: fast_path.small_size_fallback(on=True), True),
    "bypass": (lambda: fast_path.small_size_fallback(short=False), False),
    "architecture": (lambda: call_cache.key_scope(90, architecture=90), 90),
}
every_block = pytest.mark.parametrize("name", BLOCKS)


def now(name: str) -> Any:
    return getattr(settings.current, name)


def chosen() -> str | None:
    return transformer_fast.explain("linear", X, WEIGHT).backend


@pytest.fixture
def defaults() -> Iterator[None]:
    """Restores the defaults of the process after the test."""
    before = {name: getattr(settings, name) for name in NAMES}
    yield
    dispatch.set_defaults(**before)


@every_block
def test_blocks_end_after_an_error(name: str) -> None:
    block, value = BLOCKS[name]
    before = now(name)
    with pytest.raises(ZeroDivisionError), block():
        assert 1 / (now(name) != value)
    assert now(name) == before != value


@every_block
def test_overlapping_generators_leave_nothing_set(name: str) -> None:
    """A generator runs in its caller's context, so its block holds there until it ends."""
    block, value = BLOCKS[name]
    before = now(name)

    def generate() -> Iterator[None]:
        with block():
            yield

    one, two = generate(), generate()
    next(one)
    next(two)
    assert now(name) != before
    assert list(one) == []
    assert now(name) == value
    assert list(two) == []
    assert now(name) == before


def test_a_generator_that_ends_in_another_context_leaves_that_alone() -> None:
    async def generate() -> AsyncIterator[str | None]:
        with dispatch.use_backend("reference"):
            yield dispatch.named_backend()

    async def main() -> None:
        found = generate()
        assert await asyncio.create_task(anext(found)) == "reference"  # type: ignore[arg-type]
        with dispatch.use_backend("torch"):
            await found.aclose()
            assert dispatch.named_backend() == "torch"
        assert dispatch.named_backend() is None

    asyncio.run(main())


def test_blocks_nest_and_keep_the_other_settings() -> None:
    with dispatch.use_backend("reference"), dispatch.strict():
        with dispatch.use_backend(None), dispatch.batch_invariant():
            assert (now("backend"), now("strict"), now("batch_invariant")) == (None, True, True)
            with dispatch.batch_invariant(False), dispatch.strict(False):
                assert (now("strict"), now("batch_invariant")) == (False, False)
        assert (now("backend"), now("strict"), now("batch_invariant")) == ("reference", True, False)


def test_other_threads_run_in_a_copy_of_the_context() -> None:
    with dispatch.use_backend("reference"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(dispatch.named_backend).result() is None
        copied = contextvars.copy_context()
        assert pool.submit(copied.run, dispatch.named_backend).result() == "reference"
        assert asyncio.run(asyncio.to_thread(dispatch.named_backend)) == "reference"


def test_defaults_hold_in_every_thread_and_blocks_override_them(defaults: None) -> None:
    def here_and_in_a_thread() -> list[str | None]:
        with ThreadPoolExecutor(1) as pool:
            return [chosen(), pool.submit(chosen).result()]

    dispatch.set_defaults(backend="reference")
    assert here_and_in_a_thread() == ["reference", "reference"]
    with dispatch.use_backend("torch"):
        assert here_and_in_a_thread() == ["torch", "reference"]
        dispatch.set_defaults(backend=None, strict=True)
        assert dispatch.named_backend() == "torch"
        assert dispatch.is_strict()  # the block does not set it, so the default applies here, too
    assert dispatch.is_strict()
    assert dispatch.named_backend() is None
    with pytest.raises(ValueError, match="backend must be one of"):
        dispatch.set_defaults(backend="fastest")
    with pytest.raises(NotImplementedError, match="strict mode"):
        functional.linear(X, WEIGHT, activation=torch.sin)


def test_environment_variables_are_the_first_defaults(
    defaults: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for backend in dispatch.BACKENDS:
        for value in (backend, backend.upper()):
            monkeypatch.setenv("TRANSFORMER_FAST_BACKEND", value)
            dispatch._read_environment()
            assert settings.backend == backend
    for name in NAMES[1:]:
        variable = f"TRANSFORMER_FAST_{name.upper()}"
        for value, meant in (("", False), ("0", False), ("1", True), ("yes", True), ("OFF", False)):
            monkeypatch.setenv(variable, value)
            dispatch._read_environment()
            assert getattr(settings, name) is meant
        monkeypatch.setenv(variable, "maybe")
        with pytest.raises(ValueError, match=f"^{variable} must be .*, not 'maybe'$"):
            dispatch._read_environment()
        monkeypatch.delenv(variable)
    monkeypatch.setenv("TRANSFORMER_FAST_BACKEND", "fastest")
    with pytest.raises(ValueError, match=r"^TRANSFORMER_FAST_BACKEND must be .*'fast"):
        dispatch._read_environment()


@needs_native
@pytest.mark.parametrize("leave", [True, False])
def test_a_backward_runs_on_the_backend_of_its_forward(leave: bool) -> None:
    """The backward runs in the same block, in another block, and on another thread."""
    norm = nn.LayerNorm(8)
    x = X.clone().requires_grad_()
    with dispatch.use_backend("cpu"):
        loss = norm(x).sum()
    found = Operators()

    def backward() -> None:
        with dispatch.use_backend("reference"), found:
            loss.backward()

    if leave:
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    else:
        backward()
    assert "layer_norm_backward.cpu" in found.ours


def _program(count: list[int]) -> Callable[..., Any]:
    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> torch.fx.GraphModule:
        count.append(sum("transformer_fast" in str(node.target) for node in module.graph.nodes))
        return module

    return torch.compile(
        partial(functional.linear, activation="relu"), backend=backend, fullgraph=True
    )


@since_torch(2, 13, why="with PyTorch 2.10 these programs have no packed weights")
@needs_native
def test_compiled_programs_are_chosen_by_the_context() -> None:
    torch._dynamo.reset()
    graphs: list[int] = []
    run = _program(graphs)
    outside = run(X, WEIGHT)
    with dispatch.use_backend("reference"):
        run(X, WEIGHT)
    assert len(graphs) == 2
    assert graphs[0] > graphs[1] == 0

    def in_thread() -> Tensor:
        return run(X, WEIGHT)

    with dispatch.use_backend("reference"), ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(in_thread).result(), outside)  # by the first program
        run(X, WEIGHT)
    assert len(graphs) == 2


def test_blocks_are_traced() -> None:
    torch._dynamo.reset()

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        with dispatch.use_backend("reference"), dispatch.strict(False):
            with dispatch.use_backend("torch"):
                first = functional.linear(x, WEIGHT) + (dispatch.named_backend() == "torch")
            second = functional.linear(x, WEIGHT) + (dispatch.named_backend() == "reference")
        return first, second + (dispatch.named_backend() is None)

    found = torch.compile(forward, backend="eager", fullgraph=True)(X)
    expected = forward(X)
    assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))
    assert settings.traced is None


def _rows_differ(x: Tensor, weight: Tensor) -> bool:
    """True if one row alone differs from the same row of a batch."""
    return not torch.equal(functional.linear(x[:1], weight), functional.linear(x, weight)[:1])


@needs_native
@pytest.mark.parametrize("count", [1, 2])
def test_native_kernels_are_batch_invariant_in_the_context_only(count: int, threads: None) -> None:
    """Blocks overlap in tasks and threads; ``count``: number of PyTorch's threads."""
    torch.set_num_threads(count)
    x, weight = torch.randn(64, 512), torch.randn(512, 512)
    assert _rows_differ(x, weight)

    async def task(entered: asyncio.Event, leave: asyncio.Event) -> bool:
        with dispatch.batch_invariant():
            entered.set()
            await leave.wait()
            return _rows_differ(x, weight)

    async def main() -> None:
        entered, leave = asyncio.Event(), asyncio.Event()
        inside = asyncio.create_task(task(entered, leave))
        await entered.wait()
        assert _rows_differ(x, weight)  # in this task
        assert await asyncio.to_thread(_rows_differ, x, weight)
        leave.set()
        assert not await inside

    with torch.no_grad():
        asyncio.run(main())
        with dispatch.batch_invariant(), ThreadPoolExecutor(1) as pool:
            assert not _rows_differ(x, weight)
            assert pool.submit(torch.no_grad()(_rows_differ), x, weight).result()
            assert not contextvars.copy_context().run(_rows_differ, x, weight)
        assert _rows_differ(x, weight)


@needs_native
def test_native_kernels_are_batch_invariant_by_default(defaults: None) -> None:
    x, weight = torch.randn(64, 512), torch.randn(512, 512)
    dispatch.set_defaults(batch_invariant=True)
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        assert not _rows_differ(x, weight)
        assert not pool.submit(torch.no_grad()(_rows_differ), x, weight).result()
        with dispatch.batch_invariant(False):
            assert _rows_differ(x, weight)
