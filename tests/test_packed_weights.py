"""Packed copies of weights: no copy misses a write of a row or column, or outlives its weight."""

from __future__ import annotations

import copy
import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import DTYPES, Operators, in_threads, spied
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from transformer_fast import _native, functional, memory, nn
from transformer_fast.backends import cpu_packing

pytestmark = [
    pytest.mark.sampled(15, 60),
    pytest.mark.skipif(_native.module is None, reason=str(_native.why_not)),
]


@pytest.fixture(autouse=True)
def _no_copies() -> Iterator[None]:
    gc.collect()
    memory.forget_packed()  # includes values of programs that earlier tests compiled
    cpu_packing._refused.clear()
    yield
    cpu_packing.forget()


@torch.no_grad()
def call(weight: Tensor, x: Tensor) -> Tensor:
    return functional.linear(x, weight, backend="cpu")


def rows_of(weight: Tensor, count: int) -> Tensor:
    return torch.randn(count, weight.shape[1]).to(weight.dtype)


def check(weight: Tensor, x: Tensor) -> None:
    """Checks that two calls give the results of a copy packed now."""
    found, again = call(weight, x), call(weight, x)
    cpu_packing.forget()
    assert torch.equal(found, call(weight, x))
    assert torch.equal(again, found)


def parameter(n: int, k: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(n, k).to(dtype))


# Writes that do not increment version counters ----------------------------------------------------


def through_data(weight: Tensor) -> Tensor:
    return weight.data


def through_another_tensor(weight: Tensor) -> Tensor:
    return torch.empty(0, dtype=weight.dtype).set_(
        weight.untyped_storage(), weight.storage_offset(), weight.shape, weight.stride()
    )


def through_numpy(weight: Tensor) -> Tensor:
    """Returns a tensor on the memory of a NumPy array on the memory of the weight."""
    return torch.from_numpy(weight.detach().view(torch.int16).numpy()).view(weight.dtype)


WAYS = [through_data, through_another_tensor, through_numpy]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_written_row_or_column_is_detected(
    dtype: torch.dtype, way: Callable[[Tensor], Tensor], isa: str
) -> None:
    choose = random.Random(1)
    for _ in range(20):
        n, k = (choose.choice([1, 2, 15, 64, 127, 200, 300, 513]) for _ in range(2))
        weight = parameter(n, k, dtype)
        x = rows_of(weight, choose.choice([5, 8, 40, 150, 1030]))
        for _ in range(choose.randrange(1, 4)):
            call(weight, x)
        write, row, column = way(weight), choose.randrange(n), choose.randrange(k)
        if choose.random() < 0.5:
            write[row] = choose.choice([0.0, 1.5])
        else:
            write[:, column] = choose.choice([0.0, 1.5])
        check(weight, x)


def fingerprint(weight: Tensor) -> Any:
    assert _native.module is not None
    size = weight.element_size()
    return _native.module.Fingerprint(
        weight.data_ptr(), weight.shape[0], weight.shape[1] * size, weight.stride(0) * size
    )


def holds(taken: Any, rows: int = 1) -> bool:
    assert _native.module is not None
    return bool(_native.module.all_hold([taken], rows))


@pytest.mark.parametrize("rows", [5, 1024])
def test_written_elements_are_detected_within_32_calls(rows: int) -> None:
    weight = parameter(512, 512)
    x = rows_of(weight, rows)
    for seed in range(20):
        call(weight, x)
        choose = random.Random(seed)
        row, column = choose.randrange(512), choose.randrange(512)
        weight.data[row, column] += 1.0
        # A call with many rows checks all elements, others one of 32 groups of 16 elements per row.
        for _ in range(0 if rows >= 1024 else 31):
            call(weight, x)
        check(weight, x)


def test_permuted_rows_and_changed_signs_are_detected(isa: str) -> None:
    """A fingerprint by plain sums, without positions, would not detect these."""
    weight = torch.randn(96, 96)
    taken = fingerprint(weight)
    lines = weight.view(96, 6, 16).transpose(0, 1)  # groups of 64 bytes
    for part in (weight, weight.t(), lines):
        part[[0, 3]] = part[[3, 0]].clone()
        assert not holds(taken, 1024)
        part[[0, 3]] = part[[3, 0]].clone()
        assert holds(taken, 1024)
    weight[:, ::2].neg_()  # only signs change
    assert not holds(taken)


def test_writes_to_tied_weights_are_detected() -> None:
    embedding, head = torch.nn.Embedding(300, 48, sparse=True), nn.Linear(48, 300, bias=False)
    head.weight.data = embedding.weight.data
    optimizer = torch.optim.SGD(embedding.parameters(), 1e3)
    x = torch.randn(16, 48)
    for step in range(20):
        with torch.no_grad():
            head(x)
        embedding(torch.tensor([step, 299])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            together = head(x)
            alone = torch.stack([head(row) for row in x])
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-2)
        embedding.weight.data[-1] = float(step)
        with torch.no_grad():
            torch.testing.assert_close(head(x)[:, -1], step * x.sum(1), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("view", ["rows", "transposed", "strided"])
def test_views_of_parameters_have_packed_copies(view: str) -> None:
    whole = parameter(90, 64)
    weight = {"rows": whole[30:60], "transposed": whole.t(), "strided": whole[::2, ::2]}[view]
    x = rows_of(weight, 30)
    for _ in range(3):
        call(weight, x)
        assert (memory.packed() > 0) == (view != "strided")
        whole.data[31 if view == "rows" else 4] = 1.0
        check(weight, x)
        whole.data[:, 3] *= 2.0
        check(weight, x)


@pytest.mark.parametrize(
    "view", [Tensor.t, lambda data: data.view(torch.float16)], ids=["transposed", "other dtype"]
)
def test_data_may_read_the_same_memory_in_another_way(view: Callable[[Tensor], Tensor]) -> None:
    weight = parameter(64, 64, torch.bfloat16)
    copies = cpu_packing.PackedWeights()
    with torch.no_grad():
        (before,) = copies([weight], 64)
        weight.data = view(weight.data)
        (found,), expected = copies([weight], 64), cpu_packing.packed_weight(weight, 64)
    assert found is expected
    assert found is not before


def test_forget_packed_frees_the_copies() -> None:
    ours, other = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    x = torch.randn(8, 64)
    with torch.no_grad():
        ours(x), other(x)
        both = memory.packed()
        place = torch.randint(64, (40, 2))
        for i, (row, column) in enumerate(place.tolist()):
            ours.weight.data[row, column] += 1.0 + i
            memory.forget_packed(torch.nn.Sequential(ours))
            assert memory.packed() == both // 2
            torch.testing.assert_close(ours(x), x @ ours.weight.t())
    memory.forget_packed()
    assert memory.packed() == 0


# Traced programs ----------------------------------------------------------------------------------


class ByFunction(torch.nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight, self.bias, backend="cpu")


@torch.no_grad()
@pytest.mark.parametrize("tracer", ["make_fx", "jit"])
@pytest.mark.parametrize("module", ["linear", "Linear", "TransformerEncoderLayer"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traced_programs_contain_no_copies(tracer: str, module: str) -> None:
    if module == "linear":
        model: torch.nn.Module = ByFunction(32, 32)
    elif module == "Linear":
        model = nn.Linear(32, 32)
    else:
        model = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    x = torch.randn(2, 9, 32)
    model(x)  # creates the packed copies
    if tracer == "make_fx":
        traced = make_fx(lambda x: model(x))(x)
    else:
        traced = torch.jit.trace(model, (x,), check_trace=False)
        assert "pack_weight" not in str(traced.inlined_graph)
    for weight in model.parameters():
        weight.mul_(-0.5)
    torch.testing.assert_close(traced(x), model(x))


@torch.no_grad()
def test_copies_are_not_used_under_dispatch_modes() -> None:
    weight = parameter(32, 32)
    assert cpu_packing.packed_weight(weight, 16) is not None
    remembered = cpu_packing.PackedWeights()
    assert remembered([weight], 16) != [None]
    for mode in (Operators(), FakeTensorMode(allow_non_fake_inputs=True)):
        with mode:
            assert remembered([weight], 16) == [None]
    assert cpu_packing.packed_weight(weight, 16) is not None


class Viewed(torch.nn.Module):
    """Linear layers whose weights are views of parameters: transposed, and slices."""

    def __init__(self) -> None:
        super().__init__()
        self.turned, self.bias = parameter(96, 320), torch.nn.Parameter(torch.randn(320))
        self.both = parameter(192, 320)
        for weight in self.parameters():
            weight.data /= 16

    def forward(self, x: Tensor) -> Tensor:
        x = torch.addmm(self.bias, x.flatten(0, 1), self.turned).view(2, 20, 320).relu()
        first, second = self.both.chunk(2)
        return F.linear(x, first) * F.linear(x, second)


@pytest.mark.thorough
@torch.no_grad()
@pytest.mark.parametrize("inner", [None, "aot_eager"])
@pytest.mark.parametrize("viewed", [False, True])
def test_compiled_programs_use_copies_at_run_time(inner: str | None, viewed: bool) -> None:
    layers = (
        torch.nn.Linear(96, 320), torch.nn.ReLU(), torch.nn.Linear(320, 96), torch.nn.Linear(96, 96)
    )  # fmt: skip
    model = Viewed().eval() if viewed else torch.nn.Sequential(*layers).eval()
    if viewed and inner is not None:
        pytest.skip("views of another compiler than inductor are not known")
    x = torch.randn(2, 20, 96)
    compiled = torch.compile(
        model, backend="transformer_fast", options={"inner": inner} if inner else {}
    )
    for _ in range(2):  # the first call also runs the original program
        memory.forget_packed()
        torch.testing.assert_close(compiled(x), model(x))
    before = memory.packed()
    assert before >= 4 * 3 * 96 * 320 if viewed else before > 0
    for weight in model.parameters():
        weight.mul_(-0.5)
    torch.testing.assert_close(compiled(x), model(x))
    assert memory.packed() == before
    assert not memory.program.parameters


@pytest.mark.thorough
@torch.no_grad()
def test_compiled_programs_detect_writes_to_shared_memory() -> None:
    """A write to one of them is detected although the other's version counter does not change."""
    model = torch.nn.Module()
    flat = torch.randn(2, 512, 512) / 20
    model.one, model.other = parameter(512, 512), parameter(512, 512)
    model.one.data, model.other.data = flat[0], flat[1]
    run = lambda x: torch.sigmoid(x @ model.one) @ model.other  # noqa: E731
    compiled = torch.compile(run, backend="transformer_fast")
    x = torch.randn(40, 512)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), run(x))
    for weight in (model.one, model.other):
        weight[3, 5] += 100
        torch.testing.assert_close(compiled(x), run(x))


# Lifetime of copies -------------------------------------------------------------------------------


@torch.no_grad()
def test_copies_are_freed_with_their_weights() -> None:
    model = torch.nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    x = torch.randn(17, 64)
    model(x)
    storages = [torch.multiprocessing.reductions.StorageWeakRef(p.untyped_storage())
                for p in model.parameters()]  # fmt: skip
    assert memory.packed() > 0
    model.to(torch.bfloat16)
    assert memory.packed() == 0
    assert all(storage.expired() for storage in storages)
    model(x.bfloat16())
    for weight in model.parameters():
        weight.data = weight.data.clone()
    assert memory.packed() == 0
    model(x.bfloat16())
    del model, weight
    gc.collect()
    assert memory.packed() == 0


@torch.no_grad()
def test_swapped_parameters_have_new_copies() -> None:
    ours, other = nn.Linear(64, 64), nn.Linear(64, 64)
    x = torch.randn(9, 64)
    expected = other(x), ours(x)
    torch.utils.swap_tensors(ours.weight, other.weight)
    torch.utils.swap_tensors(ours.bias, other.bias)
    torch.testing.assert_close((ours(x), other(x)), expected)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    state = copy.deepcopy(layer.state_dict())
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for module, input in ((ours, x), (layer, x[None])):
            module(input)
            module.to(torch.bfloat16)
            module(input.bfloat16())
            module.to(torch.float32)
            module(input)
        layer.load_state_dict(state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    fresh = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    fresh.load_state_dict(state)
    torch.testing.assert_close(layer(x[None]), fresh(x[None]))


@torch.no_grad()
def test_a_full_cache_keeps_the_copies_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [parameter(64, 64) for _ in range(10)]
    x = torch.randn(9, 64)
    call(weights[0], x)
    each = memory.packed()
    monkeypatch.setattr(cpu_packing, "_limit", 7 * each)
    packs = spied(monkeypatch, cpu_packing, "_Entry", lambda *_: None)
    for _ in range(5):
        for weight in weights:
            call(weight, x)
    assert memory.packed() <= 7 * each
    assert len(packs) <= 6, "of a model that does not fit some copies stay"
    # Another model; the first one is no longer used.
    others = [parameter(64, 64) for _ in range(3)]
    for _ in range(3):
        for weight in others:
            call(weight, x)
    assert len(packs) <= 9
    for weight in others:
        check(weight, x)


def test_forking_while_a_thread_packs_does_not_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on = threading.Event(), threading.Event()
    make = cpu_packing._Entry
    main = threading.get_ident()

    def slow(*arguments: Any) -> Any:
        if threading.get_ident() != main:
            inside.set()
            go_on.wait(60)
        return make(*arguments)

    monkeypatch.setattr(cpu_packing, "_Entry", slow)
    weight, other = parameter(64, 64), parameter(64, 64)
    x = torch.randn(17, 64)
    thread = threading.Thread(target=call, args=(weight, x))
    thread.start()
    assert inside.wait(60)
    child = os.fork()
    if child == 0:
        call(other, x)
        call(weight, x)
        cpu_packing.forget()
        os._exit(0)
    for _ in range(600):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.05)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    go_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


@torch.no_grad()
def test_threads_use_copies_with_their_own_writes() -> None:
    """Rows of one thread's weight change while other threads use and pack their own."""
    wrong: list[bool] = []

    def work(seed: int) -> None:
        with torch.no_grad():
            generator = torch.Generator().manual_seed(seed)
            weight = torch.nn.Parameter(torch.randn(48, 32, generator=generator))
            x = torch.randn(9, 32, generator=generator)
            for i in range(100):
                weight.data[i % 48] = float(i)
                found = call(weight, x)[:, i % 48]
                wrong.append(not torch.allclose(found, i * x.sum(1), rtol=1e-3, atol=1e-2))
                if i % 10 == seed:
                    memory.forget_packed()

    in_threads(work, 4)
    assert len(wrong) == 400
    assert not any(wrong)


def test_garbage_collections_may_drop_copies_while_the_cache_is_read() -> None:
    x = torch.randn(9, 64)
    weights = [parameter(64, 64) for _ in range(40)]
    for weight in weights:
        call(weight, x)
    other = parameter(64, 64)
    before = gc.get_threshold()
    gc.collect()
    gc.disable()
    try:
        for weight in weights:
            cycle: list[Any] = [weight]
            cycle.append(cycle)
        del weights, weight, cycle
        gc.set_threshold(gc.get_count()[0] + 20)
        gc.enable()
        cpu_packing._make_room(("a key",), other, 9, next(cpu_packing._clock))
        gc.collect()
    finally:
        gc.set_threshold(*before)
        gc.enable()
    assert not cpu_packing.held_bytes()
