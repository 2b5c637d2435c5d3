"""Entries of small calls in C++, and their autograd nodes (``csrc/autograd``)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from harness import Functions, check_threads, in_threads, same_bits, spied
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import transformer_fast
from transformer_fast import _native, dispatch, fast_path, functional
from transformer_fast.testing import parity
from transformer_fast.testing.oracle import as_results

pytestmark = [
    pytest.mark.usefixtures("small_calls"),
    pytest.mark.skipif(_native.autograd is None, reason=str(_native.why_no_autograd)),
]


class Case(NamedTuple):
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = MappingProxyType({})

    def __call__(self) -> Any:
        return self.function(*self.arguments, **self.options)

    @property
    def leaves(self) -> list[Tensor]:
        return [x for x in self.arguments if isinstance(x, Tensor) and x.requires_grad]

    def gradients(self, **options: Any) -> tuple[Tensor, ...]:
        results = as_results(self())
        starts = [parity.upstream(result, place) for place, result in enumerate(results)]
        return torch.autograd.grad(results, self.leaves, starts, **options)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def _attention(mask: Tensor | None = None, **options: Any) -> Case:
    q, k, v = (torch.randn(2, 5, 4, 8).transpose(1, 2).requires_grad_() for _ in range(3))
    return Case(functional.scaled_dot_product_attention, (q, k, v, mask), options)


#: Name -> function that returns a small call; the name starts with the op's.
CASES: dict[str, Callable[[], Case]] = {
    "linear": lambda: Case(functional.linear, (leaf(3, 7, 24), leaf(20, 24), leaf(20))),
    "linear no bias": lambda: Case(functional.linear, (leaf(1, 24), leaf(20, 24))),
    "linear many rows": lambda: Case(functional.linear, (leaf(200, 24), leaf(70, 24), leaf(70))),
    "linear gelu": lambda: Case(
        functional.linear, (leaf(6, 24), leaf(20, 24), leaf(20)), {"activation": "gelu"}),
    "layer_norm": lambda: Case(functional.layer_norm, (leaf(3, 7, 24), (24,), leaf(24), leaf(24))),
    "layer_norm plain": lambda: Case(functional.layer_norm, (leaf(150, 24), (24,))),
    "add_layer_norm": lambda: Case(
        functional.add_layer_norm, (leaf(7, 24), leaf(7, 24), (24,), leaf(24), leaf(24))),
    "rms_norm": lambda: Case(functional.rms_norm, (leaf(7, 24), (24,), leaf(24))),
    "add_rms_norm": lambda: Case(
        functional.add_rms_norm, (leaf(7, 24), leaf(7, 24), (24,), leaf(24), 1e-3)),
    "feed_forward": lambda: Case(
        functional.feed_forward, (leaf(2, 7, 24), leaf(40, 24), leaf(40), leaf(24, 40), leaf(24))),
    "feed_forward silu": lambda: Case(
        functional.feed_forward, (leaf(130, 24), leaf(40, 24), None, leaf(20, 40), None),
        {"activation": "silu"}),
    "attention": _attention,
    "attention causal": lambda: _attention(is_causal=True, scale=0.3),
    "attention bool mask": lambda: _attention(torch.rand(5, 5) < 0.5),
    "attention padding": lambda: _attention(torch.rand(2, 1, 1, 5) < 0.5),
    "attention grouped": lambda: Case(
        functional.scaled_dot_product_attention,
        (leaf(2, 4, 5, 8), leaf(2, 2, 6, 8), leaf(2, 2, 6, 8)), {"enable_gqa": True}),
}  # fmt: skip
cases = pytest.mark.parametrize("name", CASES)


def op_of(name: str) -> str:
    return name.partition(" ")[0]


def runs_in_entry(call: Callable[[], Any], op: str) -> bool:
    """True if the node of the result is the entry's."""
    return bool(as_results(call())[0].grad_fn.name() == f"transformer_fast::{op}_backward")


def enters(case: Case, name: str) -> bool:
    return runs_in_entry(case, op_of(name)) or name == "linear gelu"


@cases
def test_entries_have_the_bits_of_the_kernels(name: str) -> None:
    """Both run the same kernels, with and without autograd."""
    case = CASES[name]()
    assert enters(case, name)
    named = case._replace(options={**case.options, "backend": "cpu"})
    if name != "linear gelu":  # in training the activation is a separate operator
        assert same_bits(case(), named())
        assert same_bits(case.gradients(), named.gradients())
    with torch.no_grad():
        assert same_bits(case(), named())


@pytest.mark.usefixtures("threads")
@cases
def test_results_do_not_depend_on_threads(name: str) -> None:
    case = CASES[name]()
    check_threads(lambda: (*as_results(case()), *case.gradients()))


@pytest.mark.parametrize("op", ["linear", "layer_norm", "rms_norm", "feed_forward", "attention"])
def test_errors_stay_within_the_budget(op: str) -> None:
    case = CASES[op]()
    run = case.function
    given = {
        "linear": (*case.arguments, None, None),
        "layer_norm": (*case.arguments, 1e-5),
        "rms_norm": (*case.arguments, 1e-5),
        "feed_forward": (*case.arguments, "relu", 0.0, None),
        "attention": (*case.arguments, None, False, None, 0.0, None, False, False, None),
    }[op]

    def called(*tensors: Any) -> Any:
        if op == "attention":
            return run(*tensors[:4]), None
        return run(*tensors[: 4 if op == "rms_norm" else 5 if op != "linear" else 3])

    with torch.no_grad():
        parity.check(op, called(*given), given)
    parity.check_gradients(op, called, given)


@cases
def test_second_derivatives_are_the_references(name: str) -> None:
    case = CASES[name]()
    reference = case._replace(options={**case.options, "backend": "reference"})

    def twice(call: Case) -> tuple[Tensor, ...]:
        found = call.gradients(create_graph=True)
        return torch.autograd.grad(
            sum(x.pow(2).sum() for x in found), call.leaves, allow_unused=True
        )

    for ours, theirs in zip(twice(case), twice(reference), strict=True):
        if theirs is None:
            assert ours is None or not ours.any()
        else:
            torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)


@cases
def test_gradients_of_a_part_are_those_of_all(name: str) -> None:
    """`autograd.grad` of some inputs, and inputs that need no gradient."""
    case = CASES[name]()
    full = case.gradients()
    results = as_results(case())
    starts = [parity.upstream(result, place) for place, result in enumerate(results)]
    for place, one in enumerate(case.leaves):
        (found,) = torch.autograd.grad(results, [one], starts, retain_graph=True)
        assert torch.equal(found, full[place])
    for place, one in enumerate(leaves := case.leaves):
        for other in leaves:
            other.requires_grad_(other is one)
        assert enters(case, name)
        assert torch.equal(case.gradients()[0], full[place])


@cases
def test_saved_tensors_are_autograds(name: str) -> None:
    """Saved tensors are checked for in-place changes, passed to hooks, and released."""
    case = CASES[name]()
    result = as_results(case())[0]
    with torch.no_grad():
        case.leaves[1 if op_of(name) == "linear" else 0].mul_(1.0)
        for one in as_results(result):
            one.mul_(1.0)
    saved = not ("norm" in name and name.startswith("add"))  # these ops save the sum instead
    if saved and name != "linear gelu":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()
    again = as_results(case())[0].sum()
    again.backward(retain_graph=True)
    again.backward()
    with pytest.raises(RuntimeError, match="second time"):
        again.backward()
    packed: list[Tensor] = []
    expected = case.gradients()
    with saved_tensors_hooks(lambda x: (packed.append(x), x.clone())[1], lambda x: x):
        found = case.gradients()
    assert packed
    assert same_bits(found, expected)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@cases
def test_hooks_anomaly_mode_and_checkpoints(name: str) -> None:
    case = CASES[name]()
    expected = case.gradients()
    seen: list[str] = []
    handle = case.leaves[0].register_hook(lambda _: seen.append("tensor"))
    result = as_results(case())[0]
    node = result.grad_fn
    node.register_hook(lambda *_: seen.append("node"))
    node.register_prehook(lambda *_: seen.append("before"))
    result.sum().backward()
    handle.remove()
    assert sorted(seen) == ["before", "node", "tensor"]
    with torch.autograd.detect_anomaly(check_nan=True):
        assert same_bits(case.gradients(), expected)
    again = case._replace(function=partial(checkpoint, case.function, use_reentrant=False))
    assert same_bits(again.gradients(), expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", [*CASES, "cross_entropy"])
def test_calls_that_the_guard_refuses_are_dispatched(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = Case(functional.cross_entropy, (leaf(6, 20), torch.arange(6)))
    case = CASES.get(name, lambda: loss)()
    op = op_of(name)
    names = {"add_layer_norm": "_enter_add", "rms_norm": "_enter_rms"}
    names["add_rms_norm"] = "_enter_add_rms"
    own, enter = inspect.getmodule(case.function), names.get(op, "_enter")
    entered = spied(monkeypatch, own, enter, lambda y, *given: y is not None)

    class Own(Tensor):
        pass

    x, *rest = case.arguments
    run = partial(case.function, **case.options)
    bare, *bares = (y.detach() if isinstance(y, Tensor) else y for y in case.arguments)

    def in_block(block: Any) -> None:
        with block, torch.no_grad():
            run(x, *rest)

    def dual() -> None:
        with forward_ad.dual_level():
            run(forward_ad.make_dual(bare, bare), *rest)

    with torch.no_grad():
        run(x, *rest)
        with torch.device("cpu"):  # PyTorch's own mode, which only affects new tensors
            run(x, *rest)
    assert entered == [True, True]
    refused: list[Callable[[], Any]] = [
        lambda: in_block(torch.autocast("cpu", torch.bfloat16)),
        lambda: in_block(Functions()),
        lambda: in_block(FlopCounterMode(display=False)),
        lambda: in_block(transformer_fast.use_backend("cpu")),
        lambda: in_block(fast_path.small_size_fallback(short=False)),
        lambda: run(bare.as_subclass(Own), *rest),
        lambda: run(bare.double(), *(y.double() if isinstance(y, Tensor) and y.is_floating_point()
                                     else y for y in rest)),
        lambda: torch.func.vjp(lambda y: run(y, *rest), bare),
        lambda: torch.vmap(lambda y: run(y, *rest))(bare[None]),
        dual,
        lambda: torch.jit.trace(lambda y: run(y, *bares), (bare,), check_trace=False),
    ]  # fmt: skip
    if op == "linear":
        refused.append(lambda: run(torch._neg_view(bare), *rest))
    for number, call in enumerate(refused):
        entered.clear()
        call()
        assert entered, number
        assert not any(entered), number
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        entered.clear()
        run(bare, *rest)
    assert entered == [False]


@cases
def test_inference_mode_gives_inference_tensors(name: str) -> None:
    case = CASES[name]()
    with torch.no_grad():
        expected = case()
    with torch.inference_mode():
        found = case()
    assert all(one.is_inference() for one in as_results(found))
    assert same_bits(found, expected)
    with torch.inference_mode():
        bare = case.arguments[0].detach().clone()
    assert not enters_safely(case, bare)


def enters_safely(case: Case, first: Tensor) -> bool:
    """Calls with an inference tensor that autograd cannot save; True if an entry's node ran."""
    try:
        result = as_results(case._replace(arguments=(first, *case.arguments[1:]))())[0]
    except RuntimeError as error:
        assert "Inference tensors" in str(error)  # noqa: PT017 - PyTorch's own rule
        return False
    node = result.grad_fn
    return node is not None and node.name().startswith("transformer_fast::")


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # by PyTorch 2.10
@cases
def test_profiles_show_forward_and_backward(name: str) -> None:
    case = CASES[name]()
    with torch.profiler.profile() as profile:
        case.gradients()
    found = {event.key for event in profile.key_averages()}
    assert f"transformer_fast::{op_of(name)}" in found
    assert any(f"transformer_fast::{op_of(name)}_backward" in key for key in found)


@pytest.mark.sampled(30, 60)
@cases
def test_programs_are_traced(name: str) -> None:
    """Dynamo and torch.export record PyTorch's and the package's operators in place of an entry."""
    torch._dynamo.reset()
    case = CASES[name]()
    tensors = [x for x in case.arguments if isinstance(x, Tensor)]

    class Program(torch.nn.Module):
        def forward(self, *given: Tensor) -> Any:
            rest = iter(given)
            own = [next(rest) if isinstance(x, Tensor) else x for x in case.arguments]
            return as_results(case.function(*own, **case.options))[0] * 2.0

    expected = as_results(case())[0] * 2.0
    compiled = torch.compile(Program(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), expected, rtol=1e-4, atol=1e-5)
    bare = tuple(x.detach() for x in tensors)
    for strict in (False, True):
        program = torch.export.export(Program(), bare, strict=strict)
        torch.testing.assert_close(program.module()(*bare), expected, rtol=1e-4, atol=1e-5)


def _widened(argument: Any) -> Any:
    if not (isinstance(argument, Tensor) and argument.is_floating_point()):
        return argument
    return argument.detach().double().requires_grad_(argument.requires_grad)


@cases
def test_gradients_of_several_vectors_at_once(name: str) -> None:
    case = CASES[name]()
    assert enters(case, name)
    results = as_results(case())
    several = [torch.randn(3, *result.shape, dtype=result.dtype) for result in results]
    found = torch.autograd.grad(
        results, case.leaves, several, is_grads_batched=True, retain_graph=True
    )
    for i, vectors in enumerate(zip(*several, strict=True)):
        expected = torch.autograd.grad(results, case.leaves, vectors, retain_graph=True)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one[i], other, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.sampled(50)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@cases
def test_compiled_autograd_runs_the_nodes(name: str, backend: str) -> None:
    """A program of "eager" calls the kernels, one of "aot_eager" consists of the reference's formula.

    Tensors, seeds of dropout included, are arguments of the program.
    """
    torch._dynamo.reset()
    case = CASES[name]()
    dropped = "dropout_p" in inspect.signature(case.function).parameters
    if dropped and backend == "eager":  # traced, random numbers would be thousands of operators
        case = case._replace(options={**case.options, "dropout_p": 0.3})
    assert enters(case, name)

    def gradients(
        seed: int, places: range, case: Case = case, compiled: bool = False
    ) -> tuple[Tensor, ...]:
        torch.manual_seed(seed)
        results = as_results(case())
        starts = [parity.upstream(result, place) for place, result in enumerate(results)]
        compiler = torch.compile(backend=backend)
        with compiled_autograd._enable(compiler) if compiled else nullcontext():
            return torch.autograd.grad(results, [case.leaves[n] for n in places], starts)

    counters.clear()
    for seed, places in ((1, every := range(len(case.leaves))), (2, every), (3, range(1))):
        expected, found = gradients(seed, places), gradients(seed, places, compiled=True)
        if backend == "eager":
            assert same_bits(found, expected)
        else:
            wide = case._replace(arguments=tuple(map(_widened, case.arguments)))
            oracle = gradients(seed, places, wide)
            for one, other, exact in zip(found, expected, oracle, strict=True):
                close = parity.compare(name, one, other, exact, factor=3.0)
                assert close.ok, close
        with torch.no_grad():
            case.leaves[0].mul_(0.9)
    captures = 1 if len(case.leaves) == 1 else 2  # the second call reuses the first program
    assert counters["compiled_autograd"]["captures"] == captures
    result = as_results(case())[0].sum()
    result.backward()
    with (
        compiled_autograd._enable(torch.compile(backend=backend)),
        pytest.raises(RuntimeError, match="second time"),
    ):
        result.backward()


@cases
def test_threads_run_at_the_same_time(name: str) -> None:
    case = CASES[name]()
    expected = case.gradients()
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            if not same_bits(case.gradients(), expected):
                wrong.append(number)

    in_threads(work, 4)
    assert not wrong


def test_a_new_kernel_is_used_at_once() -> None:
    case = CASES["linear"]()
    kernel = next(k for k in dispatch.kernels("linear") if k.backend == "cpu")
    dispatch.register(dataclasses.replace(kernel, unavailable="it is broken"))
    assert not runs_in_entry(case, "linear")
    dispatch.register(kernel)
    assert runs_in_entry(case, "linear")


def test_a_module_of_another_torch_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    module, why = _native._load_autograd()
    assert module is None
    assert why is not None
    assert "2.99.0" in why


@pytest.mark.parametrize("op", ["linear", "layer_norm"])
def test_wrong_arguments_raise_the_same_errors(op: str) -> None:
    x = torch.randn(3, 8)
    wrong = {
        "linear": [(x, torch.randn(5, 7)), (x, torch.randn(5, 8), torch.randn(4)), (x, None)],
        "layer_norm": [
            (x, (7,)),
            (x, (8,), torch.randn(7)),
            (x, (8.0,)),
            (x, (8,), None, None, "1"),
        ],
    }[op]
    function = getattr(functional, op)
    for arguments in wrong:
        with pytest.raises((RuntimeError, TypeError, ValueError)) as ours:
            function(*arguments)
        with (
            fast_path.small_size_fallback(short=False),
            pytest.raises(type(ours.value)) as theirs,
        ):
            function(*arguments)
        assert str(ours.value) == str(theirs.value)
