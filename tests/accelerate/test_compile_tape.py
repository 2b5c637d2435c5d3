"""torch.compile(model, backend="transformer_fast") runs rewritten graphs as tapes.

In every mode, a tape must have the effects and results of its graph in Python, bit for bit.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from hand_written import B, M, T, Translator, sentences
from harness import Functions, Operators, in_threads, spied
from torch import Tensor, nn

from transformer_fast import _native, batch_invariant, compile_backend, use_backend
from transformer_fast.compile import backend, tape

pytestmark = [
    pytest.mark.usefixtures("fresh", "small_calls"),
    pytest.mark.skipif(_native.autograd is None, reason=str(_native.why_no_autograd)),
]
#: The tape, the function of its graph in Python, and the inputs of a call.
Captured = tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]


def capture(model: Any, *args: Any, **options: Any) -> Captured:
    """Compiles and calls the model; returns the last graph that ran."""
    found: list[Captured] = []

    def spy(module: Any) -> Callable[..., Any]:
        native = tape.tape(module)

        def run(*inputs: Any) -> Any:
            found.append((native, module.forward, inputs))
            return native(*inputs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "tape", spy)
        torch.compile(model, backend=compile_backend, **options)(*args)
    assert found[-1][0] is not found[-1][1], "nothing runs natively"
    return found[-1]


@pytest.fixture
def declined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the names of the native instructions that ran in Python."""
    return spied(monkeypatch, tape._Function, "__call__", lambda y, own, *_: own.parts[1][0].name)


def assert_same(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert type(one) is type(other)
        if isinstance(one, Tensor):
            assert one.stride() == other.stride()
            assert one.is_inference() == other.is_inference()
            assert one.requires_grad == other.requires_grad


def translator(p: float = 0.0, dtype: torch.dtype = torch.float32) -> Translator:
    torch.manual_seed(0)
    return Translator(False, None, p).to(dtype)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_same_bits_as_in_python(dtype: torch.dtype, mode: Any, declined: list[str]) -> None:
    with mode():
        native, forward, inputs = capture(translator(dtype=dtype).eval(), *sentences())
        declined.clear()
        assert_same(native(*inputs), forward(*inputs))
    assert bool(declined) == (dtype is not torch.float32)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_same_gradients_as_in_python(p: float) -> None:
    model = translator(p).train()
    native, forward, inputs = capture(model, *sentences())
    found = []
    for run in (native, forward):
        torch.manual_seed(1)
        (y,) = run(*inputs)
        weights = torch.linspace(-1, 1, y.numel()).view(y.shape)
        found.append((y, *torch.autograd.grad((y * weights).sum(), [*model.parameters()])))
    assert_same(*found)


def _write_to_data(parameter: Tensor) -> None:
    parameter.data.mul_(1.5)


def _write_to_array(parameter: Tensor) -> None:
    parameter.detach().numpy()[...] *= 0.5


def _step(parameter: Tensor) -> None:
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.1).step()


@pytest.mark.parametrize("write", [_step, _write_to_data, _write_to_array])
def test_writes_to_parameters_are_seen(write: Callable[[Tensor], None]) -> None:
    model, (source, target) = translator().eval(), sentences()
    with torch.no_grad():
        native, forward, inputs = capture(model, source, target)
        before = native(*inputs)[0].clone()
        for parameter in model.parameters():
            write(parameter)
        assert_same(native(*inputs), forward(*inputs))
        assert not torch.equal(native(*inputs)[0], before)


def test_replaced_and_copied_models_have_their_own_weights() -> None:
    model = translator().eval()
    run = torch.compile(model, backend=compile_backend)
    with torch.no_grad():
        before = run(*sentences_of(3))
        other = copy.deepcopy(model)
        for parameter in other.parameters():
            parameter.mul_(0.5)
        copied = torch.compile(other, backend=compile_backend)
        torch.testing.assert_close(copied(*sentences_of(3)), other(*sentences_of(3)))
        assert torch.equal(run(*sentences_of(3)), before)
        model.head.weight = nn.Parameter(other.head.weight.clone())
        torch.testing.assert_close(run(*sentences_of(3)), model(*sentences_of(3)))


def sentences_of(seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return sentences()


def test_graphs_may_share_weights() -> None:
    block = nn.Sequential(nn.Linear(M, M), nn.LayerNorm(M))
    x = torch.randn(B, T, M)
    one, other = capture(lambda x: block(x) + 1, x), capture(lambda x: block(x) * 2, x)
    for _ in range(2):
        for native, forward, inputs in (one, other):
            assert_same(native(*inputs), forward(*inputs))
        block[0].weight.data.mul_(2.0)


def test_sizes_known_only_at_run_time(declined: list[str]) -> None:
    model = translator().eval()
    run = torch.compile(model, backend=compile_backend, dynamic=True)
    with torch.no_grad():
        run(*sentences())
        declined.clear()
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for batch, length in ((2, 5), (3, 9), (4, 3)):
            source, target = torch.randint(1, 17, (2, batch, length))
            torch.testing.assert_close(run(source, target), model(source, target))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    assert not declined


def test_rows_without_visible_keys_run_in_python(declined: list[str]) -> None:
    source, target = sentences()
    source[0] = 0
    with torch.no_grad():
        native, forward, inputs = capture(translator().eval(), source, target)
        assert len(declined) == 2  # the calls of layers
        assert_same(native(*inputs), forward(*inputs))


@pytest.mark.parametrize("mode", [Operators, Functions])
def test_modes_see_all_calls(mode: Any) -> None:
    with torch.no_grad():
        native, forward, inputs = capture(translator().eval(), *sentences())
        with mode():
            native(*inputs)  # packs weights
        with mode() as found:
            one = native(*inputs)
        with mode() as expected:
            other = forward(*inputs)
    assert_same(one, other)
    assert found.seen == expected.seen
    assert found.seen


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "reference": lambda: use_backend("reference"),
    "batch_invariant": batch_invariant,
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "none": nullcontext,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", MODES)
def test_modes_entered_after_the_capture(name: str) -> None:
    native, forward, inputs = capture(translator().train(), *sentences())
    with MODES[name]():
        found, expected = native(*inputs), forward(*inputs)
    assert_same(found, expected)
    torch.func.vmap(lambda x: x)(torch.ones(2))
    gradients = [
        torch.autograd.grad(y[0].sum(), [x for x in inputs if x.requires_grad])
        for y in (found, expected)
        if y[0].requires_grad
    ]
    if gradients:
        assert_same(*gradients)


def test_transforms() -> None:
    program = nn.Sequential(nn.Linear(M, M), nn.LayerNorm(M)).requires_grad_(False)
    native, forward, inputs = capture(program, torch.randn(B, M))
    place = next(i for i, x in enumerate(inputs) if x.shape == (B, M))

    def of(run: Any) -> Any:
        return lambda x: run(*inputs[:place], x, *inputs[place + 1 :])[0].square().sum()

    x = torch.randn(3, B, M)
    for transform in (torch.func.vmap, lambda f: torch.func.vmap(torch.func.grad(f))):
        assert_same([transform(of(native))(x)], [transform(of(forward))(x)])
    one, other = (torch.func.jvp(of(run), (x[0],), (x[1],)) for run in (native, forward))
    assert_same(one, other)


class Subclass(torch.Tensor):
    """A tensor subclass whose operators return the subclass."""


def test_subclasses_run_in_python(declined: list[str]) -> None:
    native, forward, inputs = capture(lambda x: (x + 1).view(-1) * 2, torch.randn(2, 3))
    given = inputs[0].as_subclass(Subclass)
    assert_same(native(given), forward(given))
    assert type(native(given)[0]) is Subclass
    assert declined


def test_profiles_show_ops() -> None:
    with torch.no_grad():
        native, _, inputs = capture(translator().eval(), *sentences())
        with torch.profiler.profile() as profile:
            native(*inputs)
    names = {event.name for event in profile.events()}
    ops = "encoder_layer", "linear", "attention"
    assert {"aten::embedding", *(f"transformer_fast::{op}" for op in ops)} <= names


@contextmanager
def _saved(found: list[Any]) -> Iterator[None]:
    def pack(x: Tensor) -> Tensor:
        found.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield


def test_hooks() -> None:
    model = translator().train()
    native, forward, inputs = capture(model, *sentences())
    seen: list[Any] = []
    parameter = model.head.weight
    handle = parameter.register_hook(lambda grad: seen.append(grad.clone()))
    saved: list[list[Any]] = [[], []]
    for run, shapes in zip((native, forward), saved, strict=True):
        with _saved(shapes):
            (y,) = run(*inputs)
        y.register_hook(lambda grad: 2 * grad)
        torch.autograd.grad(y.sum(), parameter)
    handle.remove()
    assert_same([seen[0]], [seen[1]])
    assert saved[0] == saved[1]


def test_errors_end_a_call() -> None:
    native, forward, inputs = capture(translator().eval(), *sentences())
    place = next(i for i, x in enumerate(inputs) if x.dtype == torch.int64)
    wrong = inputs[place].clone()
    wrong[0, 0] = 1000
    given = (*inputs[:place], wrong, *inputs[place + 1 :])
    forward(*inputs)  # binds the layers
    counts = [sys.getrefcount(x) for x in inputs]
    messages = []
    for run in (native, forward):
        with pytest.raises(IndexError) as error:
            run(*given)
        messages.append(str(error.value))
        del error
    assert messages[0] == messages[1]
    assert_same(native(*inputs), forward(*inputs))
    assert [sys.getrefcount(x) for x in inputs] == counts
    with pytest.raises(TypeError):
        native(*inputs[1:])


def test_threads() -> None:
    model = translator().eval()
    with torch.no_grad():
        native, forward, inputs = capture(model, *sentences())
        (expected,) = forward(*inputs)
    found: list[bool] = []

    def run(number: int) -> None:
        with torch.no_grad():
            found.extend(torch.equal(native(*inputs)[0], expected) for _ in range(50))

    in_threads(run, 4)
    assert found == [True] * 200


def _aliases(x: Tensor) -> Any:
    return x, x.view(-1), x.transpose(0, 1), x[:, None], x + 1


def _writes(x: Tensor) -> Any:
    y = x * 2
    x.add_(y)
    z = x.view(-1)
    z.mul_(3)
    return x + 1, z, y


def _constants(x: Tensor) -> Any:
    past = torch.ones(3, 3).tril()
    written = torch.ones(3, 3)
    written.add_(1.0)
    viewed = torch.zeros(9).view(3, 3)
    return past, written * 2, viewed, x * torch.full((3,), 2.0), torch.ones(3, 3).triu(1) == 0


PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "aliases": _aliases,
    "writes": _writes,
    "constants": _constants,
    "arithmetic": lambda x: (2 * x, 1 - x, x - 1.5, x / 3, x + x, x * 2.5, 1 / (x * x + 1)),
    "comparisons": lambda x: (x == 0, x != x * 2, x < 1.5, x >= x * 2, x.le(0), torch.gt(x, 0)),
    "masks": lambda x: (~(x > 0), (x > 0) & (x < 1), (x > 0) | (x < -1), (x > 0).logical_not()),
    "bits": lambda x: (~x.long(), x.long() & 3, x.long() | x.long().logical_not()),
    "indices": lambda x: (x[0], x[:, None], x[1:, -1], x[-2:5, None, :2], x[..., 0], x[None] + 0),
    "other indices": lambda x: (x[:], x[::2], x[x > 0], x[[1, 0]], x[True], x[torch.tensor(1)]),
    "shapes": lambda x: (
        x.view(-1), x.reshape(3, 2), x.view((3, -1)), x.permute(1, 0) + 0, x.t().contiguous(),
        x.transpose(-1, 0).reshape(-1), x.unsqueeze(-1), x.view(torch.int32), x.contiguous(),
    ),
    "several": lambda x: (x.chunk(3, 1)[1] + 1, x.max(1).values * 2, x.unbind(0)[0] + x.size(0)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3).to(dtype)
    program = PROGRAMS[name]
    if name == "shapes" and dtype is not torch.float32:
        pytest.skip("the program views the bits of float32")
    native, forward, (given, *rest) = capture(lambda x: (x.sum() + 1, program(x)), x)
    for _ in range(2):
        one, other = given.clone(), given.clone()
        found, expected = native(one, *rest), forward(other, *rest)
        assert_same(found, expected)
        assert_same([one], [other])
        same = [y.data_ptr() == one.data_ptr() for y in found]
        assert same == [y.data_ptr() == other.data_ptr() for y in expected]


def test_arithmetic_runs_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: Any) -> None:
        pytest.fail(f"runs in Python: {function.parts[1]}")

    def program(x: Tensor) -> Tensor:
        one = x[:, None, 1:] * 2 + x.view(2, 1, 3)[0, 0, :1] == 1
        return one & (x.transpose(0, 1)[0].unsqueeze(0) * x.reshape(3, 2)[0] != 0)

    monkeypatch.setattr(tape._Function, "forward", property(fail))
    capture(program, torch.randn(2, 3))


def test_inputs_may_have_names_of_operators() -> None:
    graph = torch.fx.Graph()
    tril = graph.placeholder("tril")
    tril.meta["example_value"] = torch.ones(2, 2)
    total = graph.call_function(torch.add, (tril, 1))
    total.meta["example_value"] = torch.ones(2, 2)
    graph.output((total,))
    found = tape.tape(torch.fx.GraphModule({}, graph))(torch.zeros(2, 2))
    assert_same(found, [torch.ones(2, 2)])


def test_constants_are_not_computed_in_each_call() -> None:
    native, _, inputs = capture(lambda x: x * torch.ones(3, 3).tril(), torch.randn(3, 3))
    with torch.profiler.profile() as profile:
        native(*inputs)
    assert not {"aten::ones", "aten::tril"} & {event.name for event in profile.events()}


def test_results_are_released_after_their_last_use() -> None:
    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(8):
                x = x + 1
            return x

    native, _, inputs = capture(Large(), torch.randn(1 << 16))
    with torch.profiler.profile(profile_memory=True) as profile:
        native(*inputs)
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    assert 0 < most <= 3 * inputs[0].nbytes
