"""Every op on random calls, on every instruction set, against the error budget of the other tests.

The ordinary run draws the same few thousand calls each time. ``TRANSFORMER_FAST_FUZZ=50000`` draws
50000 calls in all, and different ones in each run; ``--hypothesis-seed`` repeats a run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import CPU, DTYPES, Target, check_target, in_use, isas_of
from hypothesis import Phase, given, settings
from ops import ROWS, Drawn
from torch import Tensor
from torch.overrides import TorchFunctionMode

from transformer_fast.specs import OPS
from transformer_fast.specs.attention import arrange
from transformer_fast.specs.spec import Draw
from transformer_fast.testing import (
    Truth,
    check,
    check_gradients,
    embed_all_in_nan,
    gradients,
    nan_memory,
    promote,
    require_grad,
    truth_of,
    truth_of_gradients,
)
from transformer_fast.testing.oracle import MORE_FACTORS, scaled
from transformer_fast.testing.parity import named, relative_error

pytestmark = pytest.mark.thorough

MORE = int(os.environ.get("TRANSFORMER_FAST_FUZZ", "0"))
CALLS = MORE or 1400
#: Share of the calls per op: attention has the most code paths. Other ops share the rest.
SHARES = {"attention": 0.5, "linear": 0.12, "feed_forward": 0.1}


def share_of(op: str) -> int:
    rest = (1.0 - sum(SHARES.values())) / (len(OPS) - len(SHARES))
    return max(1, round(CALLS * SHARES.get(op, rest) / len(DTYPES)))


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
    """Computes fp32 products and row sums term by term, with up to four times a library's error.

    Exponentials get a factor, which cancels in a softmax: sums of equal scores would be exact.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float32:
            if func in (Tensor.__matmul__, Tensor.matmul, torch.matmul):
                return _OneByOne.apply(*args)
            if func is F.linear:
                y = _OneByOne.apply(args[0], args[1].mT)
                return y if args[2] is None else y + args[2]
            if func is torch.exp:
                return func(*args) * 0.7
            if func is Tensor.sum and kwargs == {"dim": -1, "keepdim": True}:
                return _OneByOne.apply(args[0], args[0].new_ones(args[0].shape[-1], 1))
        return func(*args, **(kwargs or {}))


def one_by_one(op: str, arguments: tuple[Any, ...], names: tuple[str, ...] = ()) -> Truth:
    """Returns the `Truth` of results, or of gradients of ``names``. Its units include errors of the
    reference in sums term by term, since its own order of summation is one of many.
    """

    def called(given: tuple[Any, ...], dtype: torch.dtype | None = None) -> dict[str, Any]:
        if names:
            return gradients(op, OPS[op].reference, given, names, dtype)
        return {**named(op, OPS[op].reference(*given))}

    truth = truth_of_gradients(op, arguments, names) if names else truth_of(op, arguments)
    units = {**truth.units}
    for factor in (1.0, *MORE_FACTORS[:9]):
        given = scaled(op, arguments, factor)
        true = called(promote(given), arguments[0].dtype)
        with OneByOne():
            found = called(given)
        for name in units:
            units[name] = max(units[name], relative_error(found[name], true[name]))
    return Truth(truth.expected, truth.true, units)


def check_kernels(
    op: str, arguments: tuple[Any, ...], names: tuple[str, ...] = (), offset: int = 1
) -> int:
    """Checks results and gradients (of ``names``) on each instruction set that supports the call.

    Inference runs in `no_grad`; with gradients, the training path runs as well. Returns the number
    of runs.
    """
    ran, placed = 0, embed_all_in_nan(arguments, offset)

    def within_the_budget(check: Callable[..., Any], names: tuple[str, ...] = ()) -> int:
        try:
            check()
        except AssertionError:
            check(truth=one_by_one(op, arguments, names))
        return 1

    for isa in isas_of(op):
        target = CPU._replace(way=isa).of(op, arguments[0].dtype)
        kept: list[Any] = []

        def run(*given: Any, target: Target = target, kept: list[Any] = kept) -> Any:
            with in_use(target.isa), nan_memory():
                kept.append(target.kernel.run(*given))
            return kept[-1]

        try:
            if not target.refusal(arguments):
                ran += within_the_budget(partial(check_target, target, arguments, offset))
            if names and not target.refusal(require_grad(op, arguments, names)):
                with in_use(isa):
                    trained = partial(check_gradients, op, run, placed, names=names)
                    ran += within_the_budget(trained, names)
                within_the_budget(partial(check, op, kept[0], placed))
        except AssertionError as error:
            raise AssertionError(f"{target}: {error}") from error
    return ran


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
        check_kernels(op, arguments, () if odd else OPS[op].gradients_of)


@pytest.mark.sampled(100, 50)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("op", OPS)
def test_random_calls_are_within_the_budget(op: str, dtype: torch.dtype) -> None:
    ran = 0

    # No shrinking: it takes minutes, and the first failing call is as informative.
    @settings(max_examples=share_of(op), derandomize=not MORE, phases=[Phase.generate])
    @given(ROWS[op].drawn(dtype))
    def check_drawn(drawn: Drawn) -> None:
        nonlocal ran
        ran += check_kernels(op, *drawn)

    check_drawn()
    assert ran >= share_of(op) or not isas_of(op)
