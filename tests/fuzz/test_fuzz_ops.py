"""Every op on random calls against its definition in NumPy and fp64, on every instruction set.

The definitions are `Row.defined` of the package `ops`. The ordinary run draws the same few thousand
calls each time. ``TRANSFORMER_FAST_FUZZ=50000`` draws 50000 calls in all, and different ones in
each run; ``--hypothesis-seed`` repeats a run. The oracle is itself tested: by known random words,
by the reference's gradients and by planted bugs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import DTYPES
from hypothesis import Phase, given, settings
from ops import ROWS, Drawn, exact, philox, size_of
from torch import Tensor
from torch.overrides import TorchFunctionMode

from transformer_fast import _native, dispatch, reference
from transformer_fast.dispatch import Kernel, why_not
from transformer_fast.reference import DIFFERENTIABLE
from transformer_fast.specs import OPS
from transformer_fast.specs.attention import arrange
from transformer_fast.specs.spec import Draw
from transformer_fast.testing import (
    Parity,
    Truth,
    call_of,
    embed_all_in_nan,
    gradients,
    measure,
    measure_gradients,
    nan_memory,
    require_grad,
    truth_of,
    truth_of_gradients,
    upstream,
)
from transformer_fast.testing.oracle import as_results
from transformer_fast.testing.parity import named, relative_error

pytestmark = pytest.mark.thorough

ISAS: tuple[str | None, ...] = harness.ISAS or (None,)
MORE = int(os.environ.get("TRANSFORMER_FAST_FUZZ", "0"))
CALLS = MORE or 1400
#: Share of the calls per op: attention has the most code paths. Other ops share the rest.
SHARES = {"attention": 0.5, "linear": 0.12, "feed_forward": 0.1}


def share_of(op: str) -> int:
    rest = (1.0 - sum(SHARES.values())) / (len(OPS) - len(SHARES))
    return max(1, round(CALLS * SHARES.get(op, rest) / len(DTYPES)))


def _defined(op: str, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], Callable[..., Any]]:
    results, back = ROWS[op].defined(
        *(
            int(value) if name == "seed" and value is not None else exact(value)
            for name, value in zip(OPS[op].arguments, arguments, strict=False)
        )
    )
    return results if isinstance(results, tuple) else (results,), back


def _tensor(array: Any, like: torch.dtype) -> Tensor:
    """Converts to the dtype; finite values beyond its range become infinite."""
    if like != torch.float64:
        largest = torch.finfo(like).max * (1 + torch.finfo(like).eps / 4)
        with np.errstate(invalid="ignore"):
            array = np.where(np.abs(array) > largest, np.copysign(np.inf, array), array)
    return torch.from_numpy(np.ascontiguousarray(array))


def oracle(op: str, arguments: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    results, _ = _defined(op, arguments)
    return tuple(None if x is None else _tensor(x, arguments[0].dtype) for x in results)


def gradient_oracle(
    op: str,
    arguments: tuple[Any, ...],
    names: tuple[str, ...] | None,
    from_rounded: int | None = None,
) -> dict[str, Tensor]:
    results, back = _defined(op, arguments)
    dtype = arguments[0].dtype
    if "cross_entropy" in op:  # the losses are at least fp32
        dtype = torch.promote_types(dtype, torch.float32)
    starts = [
        None if x is None else exact(upstream(torch.empty(x.shape, dtype=dtype), number))
        for number, x in enumerate(results)
    ]
    if from_rounded is not None and op == "attention":
        generator = np.random.default_rng(from_rounded)
        # Low precision is also computed in fp32, and rounded once. A result halfway between two
        # values of the dtype, as a mean of two values often is, may be rounded either way.
        half = dtype in (torch.float16, torch.bfloat16)
        wide = (x.float() if isinstance(x, Tensor) and x.dtype == dtype else x for x in arguments)
        with torch.no_grad():
            own = as_results(Orders(op, from_rounded, dtype)(*wide))
        rounded = [
            None if x is None
            else exact(torch.from_numpy(_about(exact(x), generator)).to(dtype) if half else x)
            for x in own
        ]  # fmt: skip
        order = generator.permutation(results[0].shape[-1])
        factor = _rounding(dtype) if half and from_rounded % 2 else np.array
        starts.append((*rounded, order, factor))  # type: ignore[arg-type]
    elif from_rounded is not None:
        starts.append(torch.finfo(dtype).eps / 2)  # type: ignore[arg-type]
    with np.errstate(over="ignore", invalid="ignore"):
        found = back(*starts)
    named = OPS[op].named(arguments)
    names = OPS[op].gradients_of if names is None else names
    return {
        name: _tensor(found[name], named[name].dtype)
        for name in OPS[op].arguments
        if name in names and isinstance(named[name], Tensor) and named[name].is_floating_point()
    }


def _rounding(dtype: torch.dtype) -> Callable[[Any], Any]:
    return lambda x: exact(torch.from_numpy(x).to(dtype))


def _about(x: Any, generator: np.random.Generator) -> Any:
    """Returns x with a relative error of a few units of fp32's rounding."""
    return x * (1.0 + torch.finfo(torch.float32).eps * generator.integers(-4, 5, x.shape))


class _OneByOne(torch.autograd.Function):
    """a @ b as a loop over the terms; a library's product adds several partial sums."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(a, b)
        return _one_by_one(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        da, db = _one_by_one(grad, b.mT), _one_by_one(a.mT, grad)
        return da.sum_to_size(a.shape), db.sum_to_size(b.shape)


def _one_by_one(a: Tensor, b: Tensor) -> Tensor:
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    total = a.new_zeros(*lead, a.shape[-2], b.shape[-1])
    for k in range(a.shape[-1]):
        total = torch.addcmul(total, a[..., k : k + 1], b[..., k : k + 1, :])
    return total


class OneByOne(TorchFunctionMode):
    """Computes fp32 products and row sums term by term.

    Exponentials are multiplied by a factor, which cancels in a softmax. Without it, equal scores
    would give exponentials of 1 and exact sums. In low-precision calls they are rounded to that
    dtype, as the factors of a matrix unit are.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float32:
            if func in (Tensor.__matmul__, Tensor.matmul, torch.matmul):
                return _OneByOne.apply(*args)
            if func is F.linear:
                x, weight, bias = args
                y = _OneByOne.apply(x, weight.mT)
                return y if bias is None else y + bias
            if func is torch.exp:
                return (func(*args) * 0.7).to(self.dtype).float()
            if func is Tensor.sum and kwargs == {"dim": -1, "keepdim": True}:
                return _OneByOne.apply(args[0], args[0].new_ones(args[0].shape[-1], 1))
        return func(*args, **(kwargs or {}))


class Orders:
    """The reference with random summation orders. The results themselves are not permuted.

    Sums are equal up to rounding. In fp32 any order has an error of 1e-5 in scores of some
    hundreds. Two or three scores determine a row's weights, and two or three rows determine the
    largest error of a call. The same holds for derivatives of activations at products with large
    terms, and for gradients that are small differences. Which order is more exact is luck, and the
    reference has only one. Half of the orders are loops, whose errors are up to four times those of
    a library's products.
    """

    def __init__(self, op: str, seed: int, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self.reference = OPS[op].reference
        self.run = functools.partial(ROWS[op].in_order, self)
        self.seed = seed

    def __call__(self, *arguments: Any) -> Any:
        self.generator = torch.Generator().manual_seed(self.seed)
        dtype = arguments[0].dtype if self.dtype is None else self.dtype
        with OneByOne(dtype) if self.seed % 2 else contextlib.nullcontext():
            return self.run(*arguments)

    def order(self, n: int, fixed: bool = False) -> Tensor:
        return torch.arange(n) if fixed else torch.randperm(n, generator=self.generator)


#: Number of other summation orders. They are tried only if a result exceeds the budget of the
#: reference's own order, and the worst of them then counts.
ORDERS = 63


def result_truth(op: str, arguments: tuple[Any, ...], orders: int) -> Truth:
    truth = truth_of(op, arguments, oracle=oracle)
    units = dict(truth.units)
    for seed in range(orders):
        with torch.no_grad():
            found = named(op, Orders(op, seed)(*arguments))
        for name, result in found.items():
            units[name] = max(units[name], relative_error(result, truth.true[name]))
    return dataclasses.replace(truth, units=units)


def gradient_truth(
    op: str, arguments: tuple[Any, ...], names: tuple[str, ...], orders: int
) -> Truth:
    """Returns the `Truth` about gradients; those of attention and losses may be small differences.

    For weights W, the mean of dP over a row is dO O + dW W. If one key has almost all of a row, the
    mean cancels almost all of its dP, and the rounding of O is much of the rest. If values are
    equal, the mean cancels all of dO V. The reference averages dP itself, so both sides have the
    same rounding. Therefore the formula counts as the reference if its error is larger, with dP and
    its mean summed in fp32, and all else exact. Its inputs are the reference's own results in fp32,
    or rounded exact results in low precision. Likewise for a loss: what exact arithmetic computes
    from rounded probabilities counts if the gradients are smaller than that rounding. With equal
    logits and a smoothing of 1 they vanish, in the reference by luck.
    """
    truth = truth_of_gradients(op, arguments, names, oracle=gradient_oracle)
    # A copy: the original is cached and may be returned again.
    truth = Truth({**truth.expected}, truth.true, {**truth.units})
    loss = "cross_entropy" in op
    for seed in range(1 + orders if op == "attention" else int(loss)):
        rounded = gradient_oracle(op, arguments, names, from_rounded=seed)
        for name, true in truth.true.items():
            off = rounded[name] if loss else rounded[name].to(truth.expected[name].dtype)
            far = _far(off, true)
            if loss and far < size_of(true):
                continue
            if off.isfinite().all() and far > _far(truth.expected[name], true):
                truth.expected[name] = off.to(truth.expected[name].dtype)
    for seed in range(orders):
        for name, found in gradients(op, Orders(op, seed), arguments, names).items():
            error = relative_error(found, truth.true[name])
            truth.units[name] = max(truth.units[name], error)
    return truth


def _far(got: Tensor, true: Tensor) -> float:
    return size_of(got.double() - true)


class Wrong(AssertionError):  # noqa: N818 - a verdict, not a fault of the test
    """A result beyond the error budget, with the kernel that computed it."""


def _use(isa: str | None) -> None:
    if _native.module is not None and isa is not None:
        _native.module.set_isa(isa)


def kernels_of(op: str) -> list[tuple[Kernel, str | None]]:
    """Returns the native kernels with each instruction set of this machine."""
    return [
        (kernel, isa)
        for kernel in dispatch.kernels(op)
        if kernel.unavailable is None and kernel.backend == "cpu"
        for isa in harness.isas_of(op)
    ]


def check_reference(op: str, arguments: tuple[Any, ...], names: tuple[str, ...] | None) -> None:
    """Checks the fp64 reference against the definition, up to the rounding of the call's dtype."""
    reference = OPS[op].reference
    dtype = arguments[0].dtype
    wide = tuple(
        x.detach().double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in arguments
    )
    with torch.no_grad():
        results = as_results(reference(*wide))
    defined = oracle(op, wide)
    pairs = list(zip(OPS[op].results, results, defined, strict=True))
    # Where all terms cancel (the loss of a target with probability 1), fp64 itself is off by
    # hundreds of eps if the scores are in the hundreds.
    rounding = 4 * torch.finfo(torch.float64).eps * (1.0 + ROWS[op].terms(arguments, defined))
    if names:
        found = truth_of_gradients(op, wide, names, oracle=gradient_oracle)
        pairs += [(name, x, found.true[name]) for name, x in found.expected.items()]
        largest = max((size_of(x) for x in found.true.values()), default=0.0)
        terms = ROWS[op].gradient_terms(arguments)
    for name, got, true in pairs:
        if got is None or true is None or true.numel() == 0:
            continue
        size = size_of(true)
        if names and name in names:
            size = max(size, largest * torch.finfo(dtype).eps)
            rounding = (4 + 1000 * largest + 4 * terms) * torch.finfo(torch.float64).eps
        same = (got == true) | (got.isnan() & true.isnan())
        error = torch.where(same, 0.0, (got - true).abs())
        limit = torch.finfo(dtype).eps / 2 * size + rounding
        if not bool((error <= limit).all()):
            raise Wrong(
                f"{op}: the reference in fp64 is not the definition: {name}: "
                f"error {error.max().item():.3g}, limit {limit:.3g}"
            )


def check_kernels(
    op: str,
    arguments: tuple[Any, ...],
    names: tuple[str, ...] = (),
    offset: int = 1,
    kernels: list[tuple[Kernel, str | None]] | None = None,
) -> int:
    """Checks results and gradients (of ``names``) of all kernels that support the call.

    Inference runs in `no_grad`; with gradients, the training path runs as well. Returns the number
    of runs.
    """
    arguments = embed_all_in_nan(arguments, offset)
    before = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
    ran = 0

    @functools.cache
    def truth(orders: int) -> Truth:
        return result_truth(op, arguments, orders)

    @functools.cache
    def of_gradients(orders: int) -> Truth:
        return gradient_truth(op, arguments, names, orders)

    def checked(checker: Callable[[int], Parity]) -> Parity:
        found = checker(0)
        return found if found.ok else checker(ORDERS)

    isa = _native.module.isa() if _native.module is not None else None
    try:
        for kernel, kernel_isa in kernels_of(op) if kernels is None else kernels:
            for wanted in ((), names) if names else ((),):
                called = require_grad(op, arguments, wanted)
                with torch.set_grad_enabled(bool(wanted)):
                    if why_not(kernel, call_of(op, called)):
                        continue
                _use(kernel_isa)
                kept: list[Any] = []

                def run(
                    *given: Any, kernel: Kernel = kernel, kept: list[Any] = kept
                ) -> tuple[Any, ...] | Tensor:
                    with nan_memory():
                        kept.append(kernel.run(*given))
                    return kept[-1]

                if wanted:
                    found = checked(
                        lambda orders, run=run: measure_gradients(  # type: ignore[misc]
                            op, run, arguments, names=names, truth=of_gradients(orders)
                        )
                    )
                    if not found.ok:
                        raise Wrong(f"{op} on {kernel.backend}, {kernel_isa}: {found}")
                else:
                    with torch.no_grad():
                        run(*arguments)
                found = checked(
                    lambda orders, kept=kept: measure(  # type: ignore[misc]
                        op, kept[0], arguments, truth=truth(orders)
                    )
                )
                if not found.ok:
                    way = "with" if wanted else "without"
                    raise Wrong(f"{op} on {kernel.backend}, {kernel_isa}, {way} gradients: {found}")
                exact = OPS[op].exact(arguments)
                if exact and not harness.same_bits(kept[0], OPS[op].reference(*arguments)):
                    raise Wrong(f"{op} on {kernel.backend}, {kernel_isa}: not the reference's bits")
                ran += 1
    finally:
        _use(isa)
    for value, old in zip(arguments, before, strict=True):
        if isinstance(value, Tensor) and value.numel():
            same = (value == old) | (value != value)
            if not bool(same.all()):
                raise Wrong(f"{op}: an input was modified")
    return ran


#: NumPy cannot run PyTorch's callables.
CASES = [(op, c.name) for op in OPS for c in OPS[op].cases if "callable" not in c.name]


@pytest.mark.parametrize(("op", "case"), CASES)
def test_the_reference_matches_the_definition_on_every_case(op: str, case: str) -> None:
    check_reference(op, harness.drawn(op, case, torch.float32), OPS[op].gradients_of)


def edges(draw: Draw) -> dict[str, list[tuple[Any, ...]]]:
    """Returns calls that the op table lacks: empty sizes, and NaN."""

    def product(rows: int, k: int, n: int, act: str | None = None) -> tuple[Any, ...]:
        return draw.normal(rows, k), draw.weight(n, k), draw.normal(n), act, None

    def network(rows: int, model: int, hidden: int, outputs: int = 64) -> tuple[Any, ...]:
        x, w1, b1, *_ = product(rows, model, hidden)
        return x, w1, b1, draw.weight(outputs, hidden), draw.normal(outputs), "gelu", 0.0, None

    def norm(columns: int, *shape: int) -> tuple[Any, ...]:
        return draw.normal(*shape), (columns,), draw.normal(columns), None, 1e-5

    def attend(*sizes: int, causal: bool = False, mask: Any = None) -> tuple[Any, ...]:
        b, h, t, s, d = sizes
        tensors = draw.normal(b, h, t, d), draw.normal(b, h, s, d), draw.normal(b, h, s, 3)
        return arrange(*tensors, causal=causal, mask=mask, weights=True)

    # The first calls leave values in scratch memory, which later calls must not read.
    products, networks = [product(300, 64, 128)], [network(300, 64, 128)]
    sizes = (0, 8, 5), (5, 0, 3), (5, 4, 0), (80, 0, 50), (300, 0, 3), (300, 4, 0), (0, 0, 0)
    products += [product(*each, act) for each in sizes for act in (None, "relu")]
    networks += [network(*each) for each in ((0, 8, 5, 4), (50, 4, 5, 0), (5, 4, 5, 0))]
    nothing = (64, 0), (0, 64), (0, 0)
    networks += [network(n, *each) for n in (5, 30, 80, 300) for each in nothing]
    norms = [norm(4, 0, 4), norm(0, 3, 0), norm(0, 0), norm(8, 3, 8)]
    empty = (0, 2, 3, 4, 5), (2, 0, 3, 4, 5), (2, 2, 0, 4, 5), (2, 3, 4, 0, 5), (1, 1, 2, 4, 0)
    attentions = [attend(*each, causal=causal) for each in empty for causal in (False, True)]
    seen = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1]])[None, None] > 0
    added = torch.where(seen, 0.5, -torch.inf)
    attentions += [attend(1, 1, 3, 3, 5, mask=m) for m in (None, seen, added, added[:, :, 1:2])]
    products.append(product(3, 8, 5, "relu"))
    norms[-1][0][1, 2] = products[-1][0][1, 2] = torch.nan
    for query, *_ in attentions[-4:]:
        query[:, :, 1] = torch.nan
    found = {"linear": products, "feed_forward": networks, "layer_norm": norms}
    return {**found, "attention": attentions}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("op", edges(Draw(torch.float32, "cpu", None)))
def test_edges_empty_sizes_and_nan(op: str, dtype: torch.dtype) -> None:
    for arguments in edges(Draw(dtype, "cpu", torch.Generator().manual_seed(0)))[op]:
        # Gradients at NaN inputs are unspecified.
        odd = any(isinstance(x, Tensor) and bool(x.isnan().any()) for x in arguments)
        names = () if odd else OPS[op].gradients_of
        check_reference(op, arguments, names)
        check_kernels(op, arguments, names)


@pytest.mark.sampled(100, 50)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("op", OPS)
def test_random_calls_are_within_the_budget(op: str, dtype: torch.dtype) -> None:
    # No shrinking: it takes minutes, and the first failing call is as informative.
    @settings(max_examples=share_of(op), derandomize=not MORE, phases=[Phase.generate])
    @given(ROWS[op].drawn(dtype))
    def check_drawn(drawn: Drawn) -> None:
        check_reference(op, drawn.arguments, drawn.names)
        check_kernels(op, *drawn)

    check_drawn()


# Tests of the oracle ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (2**32 - 1, 2**32 - 1),
            (2**32 - 1,) * 4,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_matches_known_words(key: Any, counter: Any, words: Any) -> None:
    """Test vectors of Random123, the implementation by the authors of Philox."""
    assert philox(key, np.array(counter, np.uint64)).tolist() == list(words)


def _call(op: str) -> tuple[Any, ...]:
    return ROWS[op].small(Draw(torch.float64, "cpu", torch.Generator().manual_seed(7)))[-1]


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_other_orders_match_the_reference(op: str) -> None:
    arguments = _call(op)
    expected = gradients(op, OPS[op].reference, arguments)
    for seed in range(3):
        results = zip(
            as_results(Orders(op, seed)(*arguments)),
            as_results(OPS[op].reference(*arguments)),
            strict=True,
        )
        for got, result in results:
            torch.testing.assert_close(got, result, rtol=0, atol=1e-14)
        found = gradients(op, Orders(op, seed), arguments)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def test_a_wrong_reference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle also checks the reference, on which the budget is based."""
    right = reference.linear
    monkeypatch.setattr(reference, "linear", lambda *given: right(*given) * (1 + 1e-6))
    with pytest.raises(Wrong, match="not the definition"):
        check_reference("linear", (torch.ones(3, 4), torch.ones(5, 4), None, None, None), ())
