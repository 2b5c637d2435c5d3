"""Memory of large results is cached and reused: never shared by two tensors, within a limit."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from collections.abc import Iterator

import pytest
import torch
from harness import in_threads, python, since_torch
from torch import Tensor

from transformer_fast import _native, fast_path, functional, memory

MIB = 2**20

pytestmark = pytest.mark.skipif(_native.module is None, reason="needs the native module")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    limit = memory.limit()
    memory.release()
    yield
    memory.set_limit(limit)


def result(mebibytes: float, value: float = 0.0) -> Tensor:
    """Returns a result of that size, in MiB, whose elements are all ``value``."""
    rows = int(mebibytes * MIB / 4 / 256)
    x = torch.zeros(rows, 8)
    weight, bias = torch.zeros(256, 8), torch.full((256,), value)
    return functional.linear(x, weight, bias, backend="cpu")


def kept_after(*sizes: float) -> int:
    """Returns the cached bytes after results of these sizes were alive at once and then freed."""
    alive = [result(size) for size in sizes]
    del alive
    gc.collect()
    return memory.kept()


def test_results_are_ordinary_tensors() -> None:
    y = result(4, 3.0)
    assert y.device == torch.device("cpu")
    assert y.is_contiguous()
    assert y.dtype == torch.float32
    assert bool((y == 3.0).all())
    assert torch.equal(copy.deepcopy(y), y)
    assert torch.equal(pickle.loads(pickle.dumps(y)), y)
    assert y.add_(1).mean() == 4.0
    assert not y.is_inference()
    with torch.inference_mode():
        assert result(4).is_inference()


@since_torch(2, 11, why="PyTorch 2.10 cannot use memory of ours")
def test_freed_memory_is_reused() -> None:
    y = result(4)
    view, place = y[1:], y.data_ptr()
    del y
    gc.collect()
    assert memory.kept() == 0, "a view still uses it"
    del view
    gc.collect()
    assert memory.kept() == 4 * MIB
    again = result(4)
    assert again.data_ptr() == place
    assert memory.kept() == 0


@since_torch(2, 11, why="PyTorch 2.10 cannot use memory of ours")
def test_freed_gradients_of_large_weights_are_kept() -> None:
    with fast_path.small_size_fallback(on=True, short=True):  # in which entries run small calls
        weight = torch.ones(4096, 2048, requires_grad=True)
        functional.linear(torch.ones(1, 2048), weight).sum().backward()
    weight.grad = None
    assert memory.kept() >= weight.nbytes


def test_small_results_use_the_c_library() -> None:
    assert kept_after(0.125) == 0


@since_torch(2, 11, why="PyTorch 2.10 cannot use memory of ours")
def test_reused_memory_is_little_larger_than_needed() -> None:
    assert kept_after(16) == 16 * MIB
    y = result(4)
    assert memory.kept() == 16 * MIB, "16 MiB for 4 are too much"
    z = result(14)
    assert memory.kept() == 0
    assert y.data_ptr() != z.data_ptr()


def test_no_two_tensors_share_memory() -> None:
    generator = torch.Generator().manual_seed(0)
    alive: list[tuple[float, Tensor]] = []
    for i in range(120):
        size = 2 + 6 * torch.rand((), generator=generator).item()
        alive.append((float(i), result(size, float(i))))
        if len(alive) > 8:
            del alive[int(torch.randint(len(alive), (), generator=generator))]
        for value, tensor in alive:
            assert tensor[0, 0] == value
            assert tensor[-1, -1] == value
            assert bool((tensor[:: max(1, len(tensor) // 7)] == value).all())


@since_torch(2, 11, why="PyTorch 2.10 cannot use memory of ours")
def test_cached_memory_stays_within_the_limit() -> None:
    memory.set_limit(10 * MIB)
    assert memory.limit() == 10 * MIB
    assert kept_after(*[4] * 5) == 8 * MIB
    memory.set_limit(5 * MIB)
    assert memory.kept() == 4 * MIB
    memory.release()
    assert memory.kept() == 0
    assert memory.limit() == 5 * MIB
    memory.set_limit(0)
    assert kept_after(4) == 0


def test_negative_limits_raise() -> None:
    with pytest.raises(ValueError, match="size"):
        memory.set_limit(-1)
    with pytest.raises(
        ValueError, match=r"size must be a whole number of bytes, 0 or more, not '1G'"
    ):
        memory.set_limit("1G")


def test_threads_do_not_share_memory() -> None:
    """Each thread checks that no other thread writes its results."""
    wrong: list[int] = []

    def work(me: int) -> None:
        for i in range(30):
            y = result(2 + (me + i) % 3, float(me))
            if not bool((y == me).all()):
                wrong.append(me)

    in_threads(work, 4)
    assert wrong == []


@since_torch(2, 11, why="PyTorch 2.10 cannot use memory of ours")
def test_forked_processes_can_use_the_cache() -> None:
    y = result(4, 1.0)
    child = os.fork()
    if child == 0:
        # Nothing here uses PyTorch's threads, which a forked child lacks.
        memory.release()
        del y
        os._exit(0 if memory.kept() == 4 * MIB else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert bool((y == 1.0).all())


@since_torch(2, 11, why="PyTorch 2.10 cannot use memory of ours")
def test_resizing_in_place_raises_unless_caching_is_off() -> None:
    y = result(4)
    with pytest.raises(RuntimeError, match="resiz"):
        y.resize_(2 * y.shape[0], y.shape[1])
    with pytest.raises(RuntimeError, match="resiz"):
        y.untyped_storage().resize_(0)
    assert y.resize_(1, 1).numel() == 1
    memory.set_limit(0)
    y = result(4, 2.0)
    y.untyped_storage().resize_(0)
    y.untyped_storage().resize_(4 * MIB)
    y = result(4, 2.0)
    y.resize_(2 * y.shape[0], y.shape[1])
    assert y[0, 0] == 2.0


@pytest.mark.thorough
@since_torch(2, 11, why="PyTorch 2.10 cannot use memory of ours")
def test_cached_memory_is_freed_before_allocation_fails() -> None:
    """If memory is still insufficient, the error is PyTorch's."""
    code = """
import resource, torch
from transformer_fast import functional, memory
torch.set_num_threads(1)

def result(mebibytes):
    return functional.linear(
        torch.zeros(mebibytes * 1024, 8), torch.zeros(256, 8), backend="cpu"
    )

memory.set_limit(2**30)
result(8), result(300)
assert memory.kept() >= 300 * 2**20, memory.kept()
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 200 * 2**20,) * 2)
y = result(400)  # only if the 300 are given back
assert memory.kept() == 0
for mebibytes in (700, 1):
    keep = []
    try:
        while True:
            keep.append(result(mebibytes))
    except RuntimeError as error:
        print(error)
    del keep
"""
    output = python("-c", code).stdout
    expected = "DefaultCPUAllocator: can't allocate memory: you tried to allocate {} bytes"
    for mebibytes in (700, 1):
        assert expected.format(mebibytes * MIB) in output
