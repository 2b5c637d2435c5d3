"""Holds kernels to the definitions (`definitions.py`) on every instruction set of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import definitions
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from transformer_fast import _native, dispatch
from transformer_fast.dispatch import Kernel, why_not
from transformer_fast.reference.dropout import dropout
from transformer_fast.specs import OPS
from transformer_fast.testing import (
    GradientTruth,
    Parity,
    Truth,
    all_among_nan,
    call_of,
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
from transformer_fast.testing.parity import relative_error

ISAS: tuple[str | None, ...] = tuple(_native.module.supported_isas()) if _native.module else (None,)


def exact(value: Any) -> Any:
    """A tensor as NumPy's, in fp64 if it has floating-point numbers."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    return (value.double() if value.is_floating_point() else value).resolve_neg().numpy()


def _defined(op: str, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], Callable[..., Any]]:
    given = [exact(x) for x in arguments]
    if op == "attention":
        rest, need_weights = [*given[:10], *given[11:]], given[10]
        rest[8] = None if rest[8] is None else int(rest[8])
        (output, weights), back = definitions.attention(*rest)
        return (output, weights if need_weights else None), back
    if op in ("feed_forward", "add_layer_norm", "add_rms_norm"):
        given[-1] = None if given[-1] is None else int(given[-1])
    results, back = getattr(definitions, op)(*given)
    return results if isinstance(results, tuple) else (results,), back


def _tensor(array: Any, like: torch.dtype) -> Tensor:
    """Finite numbers beyond what the dtype holds are infinite in it."""
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
    if "cross_entropy" in op:  # its losses are fp32 at least
        dtype = torch.promote_types(dtype, torch.float32)
    starts = [
        None if x is None else exact(upstream(torch.empty(x.shape, dtype=dtype), number))
        for number, x in enumerate(results)
    ]
    if from_rounded is not None and op == "attention":
        generator = np.random.default_rng(from_rounded)
        # Half types are computed in fp32, too, and rounded once. What is in the middle between two of
        # their numbers, as a mean of two values often is, becomes either.
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
    """x, off by some units of fp32's rounding."""
    return x * (1.0 + torch.finfo(torch.float32).eps * generator.integers(-4, 5, x.shape))


class _OneByOne(torch.autograd.Function):
    """a @ b as a loop over the terms gives it; a library's product adds up several partial sums."""

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
    """Products and sums of rows in fp32 add their terms one by one.

    Exponentials have a factor, which a softmax cancels: where scores are equal, all of them would be
    1 and their sums exact. In calls of half types they are rounded to the type, which is how matrix
    units take them.
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
    """The reference with what it adds up in orders of the generator's, its results in their own.

    Sums are the same, rounded differently. Whoever adds up, scores of some hundreds have an error of
    1e-5 in fp32; a row's weights hang on two or three of them, and a call's largest error on two or
    three rows. So do slopes of activations on products of large terms, and what is left of the
    differences in a gradient. Which order is the better one is luck, and the reference has only one.
    Half of the orders are loops, whose errors are up to four times those of a library's products.
    """

    def __init__(self, op: str, seed: int, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self.reference = OPS[op].reference
        self.run: Callable[..., Any] = getattr(self, op)
        self.seed = seed

    def __call__(self, *arguments: Any) -> Any:
        self.generator = torch.Generator().manual_seed(self.seed)
        dtype = arguments[0].dtype if self.dtype is None else self.dtype
        with OneByOne(dtype) if self.seed % 2 else contextlib.nullcontext():
            return self.run(*arguments)

    def order(self, n: int, fixed: bool = False) -> Tensor:
        return torch.arange(n) if fixed else torch.randperm(n, generator=self.generator)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, lengths: Any, causal: bool,
        scale: Any, p: float, seed: Any, *rest: Any,
    ) -> Any:  # fmt: skip
        of_scores, of_values = self.order(q.shape[-1]), self.order(v.shape[-1])
        if self.seed % 2 and q.dtype == torch.float32 and q.shape[-1]:
            # Some scale queries, some scores; neither is exact.
            q, scale = q * (q.shape[-1] ** -0.5 if scale is None else scale), 1.0
        places = lengths is not None or causal or seed is not None
        of_keys = self.order(k.shape[-2], fixed=places)
        if mask is not None and mask.dim() and mask.shape[-1] > 1:
            mask = mask[..., of_keys]
        output, weights = self.reference(
            q[..., of_scores], k[..., of_keys, :][..., of_scores], v[..., of_keys, :][..., of_values],
            mask, lengths, causal, scale, p, seed, *rest,
        )  # fmt: skip
        if weights is not None:
            weights = weights[..., of_keys.argsort()]
        return output[..., of_values.argsort()], weights

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None, act: Any, residual: Any) -> Tensor:
        n, k = w.shape
        lead = x.shape[:-1]
        rows, of_k, of_n = self.order(lead.numel()), self.order(k), self.order(n)
        if residual is not None:
            residual = residual.reshape(len(rows), n)[rows][:, of_n]
        y = OPS["linear"].reference(
            x.reshape(len(rows), k)[rows][:, of_k], w[of_n][:, of_k], _at(b, of_n), act, residual
        )
        return y[rows.argsort()][:, of_n.argsort()].reshape(*lead, n)

    def feed_forward(
        self, x: Tensor, w1: Tensor, b1: Any, w2: Tensor, b2: Any, act: str, p: float, seed: Any
    ) -> Tensor:
        hidden = self.linear(x, w1, b1, act, None)
        return self.linear(dropout(hidden, p, seed), w2, b2, None, None)

    def layer_norm(self, x: Tensor, shape: Any, w: Any, b: Any, eps: float) -> Tensor:
        (y,) = self.norm((x,), shape, w, b, eps)
        return y

    def add_layer_norm(
        self, x: Tensor, y: Tensor, shape: Any, w: Any, b: Any, eps: float, p: float, seed: Any
    ) -> Any:
        return self.norm((x, y), shape, w, b, eps, p, seed, fixed=seed is not None)

    def rms_norm(self, x: Tensor, shape: Any, w: Any, eps: float) -> Tensor:
        (y,) = self.norm((x,), shape, w, eps)
        return y

    def add_rms_norm(
        self, x: Tensor, y: Tensor, shape: Any, w: Any, eps: float, p: float, seed: Any
    ) -> Any:
        return self.norm((x, y), shape, w, eps, p, seed, fixed=seed is not None)

    def norm(
        self, given: Any, shape: Any, w: Any, *rest: Any, fixed: bool = False
    ) -> tuple[Tensor, ...]:
        n = math.prod(shape)
        lead = given[0].shape[: given[0].dim() - len(shape)]
        rows, of_n = self.order(lead.numel(), fixed), self.order(n, fixed)
        found = self.reference(
            *(x.reshape(len(rows), n)[rows][:, of_n] for x in given),
            *((n,), _at(w, of_n), *(_at(x, of_n) if _is_row(x, shape) else x for x in rest)),
        )
        found = found if isinstance(found, tuple) else (found,)
        back = rows.argsort(), of_n.argsort()
        return tuple(x[back[0]][:, back[1]].reshape(given[0].shape) for x in found)

    def cross_entropy(self, x: Tensor, target: Tensor, ignored: int, smoothing: float) -> Tensor:
        classes = self.order(x.shape[1])
        target = _renamed(target, ignored, classes)
        result: Tensor = self.reference(x[:, classes], target, -100, smoothing)
        return result

    def linear_cross_entropy(
        self, x: Tensor, w: Tensor, b: Any, target: Tensor, ignored: int, smoothing: float
    ) -> Tensor:
        rows, of_k, classes = (self.order(n) for n in (*x.shape, w.shape[0]))
        target = _renamed(target, ignored, classes)[rows]
        losses: Tensor = self.reference(
            *(x[rows][:, of_k], w[classes][:, of_k], _at(b, classes), target, -100, smoothing)
        )
        return losses[rows.argsort()]


def _is_row(value: Any, shape: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == tuple(shape)


def _at(x: Tensor | None, order: Tensor) -> Tensor | None:
    return None if x is None else x.reshape(-1)[order]


def _renamed(target: Tensor, ignored: int, classes: Tensor) -> Tensor:
    place = classes.argsort()[target.clamp(0, len(classes) - 1)]
    return torch.where(target == ignored, -100, place)


#: What passes beside the reference in its own order passes beside the worst of any others. They are
#: asked only for what does not, and are so many.
ORDERS = 63


def result_truth(op: str, arguments: tuple[Any, ...], orders: int) -> Truth:
    truth = truth_of(op, arguments, oracle=oracle)
    units = truth.units
    for seed in range(orders):
        with torch.no_grad():
            results = as_results(Orders(op, seed)(*arguments))
        units = tuple(map(max, units, map(relative_error, results, truth.true)))
    return dataclasses.replace(truth, units=units)


def gradient_truth(
    op: str, arguments: tuple[Any, ...], names: tuple[str, ...], orders: int
) -> GradientTruth:
    """What is known about the gradients; those of attention and of losses may be differences.

    The mean of the slopes over a row's weights W is dO O + dW W. Where one key has almost all of a
    row, that takes away almost all of its slope, and a rounding of O is much of what is left. Where
    values are equal it takes away all of dO V: the reference, which takes the mean of the slopes
    themselves, has the same rounding on both sides. So what this formula gives where slopes and
    means are summed up in fp32, from the reference's own results in fp32 and from rounded exact ones
    in half types, and all else is exact counts as the reference's, where it is farther off. So does
    what exact arithmetic makes of rounded probabilities where a loss's slopes are smaller than that:
    with equal logits and a smoothing of 1 they vanish, in the reference by luck.
    """
    truth = truth_of_gradients(op, arguments, names, oracle=gradient_oracle)
    # It may be given again.
    truth = GradientTruth({**truth.expected}, truth.true, {**truth.units})
    loss = "cross_entropy" in op
    for seed in range(1 + orders if op == "attention" else int(loss)):
        rounded = gradient_oracle(op, arguments, names, from_rounded=seed)
        for name, true in truth.true.items():
            off = rounded[name] if loss else rounded[name].to(truth.expected[name].dtype)
            far = _far(off, true)
            if loss and far < _size(true):
                continue
            if off.isfinite().all() and far > _far(truth.expected[name], true):
                truth.expected[name] = off.to(truth.expected[name].dtype)
    for seed in range(orders):
        for name, found in gradients(op, Orders(op, seed), arguments, names).items():
            error = relative_error(found, truth.true[name])
            truth.units[name] = max(truth.units[name], error)
    return truth


def _far(got: Tensor, true: Tensor) -> float:
    return _size(got.double() - true)


class Wrong(AssertionError):  # noqa: N818 - a verdict, not a fault of the test
    """A result beyond the error budget, and where it came from."""


def _use(isa: str | None) -> None:
    if _native.module is not None and isa is not None:
        _native.module.set_isa(isa)


def kernels_of(op: str) -> list[tuple[Kernel, str | None]]:
    """The native kernels on each instruction set of this machine."""
    return [
        (kernel, isa)
        for kernel in dispatch.kernels(op)
        if kernel.unavailable is None and kernel.backend == "cpu"
        for isa in ISAS
    ]


def check_reference(op: str, arguments: tuple[Any, ...], names: tuple[str, ...] | None) -> None:
    """The reference in fp64 is the definition, as far as the dtype of the call can tell."""
    reference = OPS[op].reference
    dtype = arguments[0].dtype
    wide = tuple(
        x.detach().double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in arguments
    )
    with torch.no_grad():
        results = reference(*wide)
    results = results if isinstance(results, tuple) else (results,)
    pairs = list(zip(OPS[op].results, results, oracle(op, wide), strict=True))
    # Where everything cancels (the loss of a certain target), fp64 has its own rounding: of some
    # hundreds of units where the slopes of scores of some hundreds do.
    rounding = 4 * torch.finfo(torch.float64).eps * (1.0 + _norm_terms(op, arguments))
    if names:
        found = truth_of_gradients(op, wide, names, oracle=gradient_oracle)
        pairs += [(name, x, found.true[name]) for name, x in found.expected.items()]
        largest = max((_size(x) for x in found.true.values()), default=0.0)
        of_op = {"attention": _slope_terms, "linear_cross_entropy": _logit_terms}
        terms = of_op[op](arguments) if op in of_op else 0.0
    for name, got, true in pairs:
        if got is None or true is None or true.numel() == 0:
            continue
        size = _size(true)
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


def _norm_terms(op: str, arguments: tuple[Any, ...]) -> float:
    """The largest |x| weight / sqrt(variance + eps) of a norm.

    x - mean is a difference of such terms, and the rounding of the mean is as large as what is left
    where the columns of a row are nearly equal.
    """
    if not op.endswith("_norm") or not arguments[0].numel():
        return 0.0
    named = OPS[op].named(arguments)
    x = _defined(op, arguments)[0][1] if op.startswith("add_") else exact(arguments[0])
    rows, weight = x.reshape(-1, math.prod(named["normalized_shape"])), named["weight"]
    largest = 1.0 if weight is None else _size(weight.double())
    square = (rows**2).mean(axis=1) if op.endswith("rms_norm") else rows.var(axis=1)
    terms = np.abs(rows).max(axis=1) / np.sqrt(square + named["eps"]) * largest
    return float(np.where(np.isfinite(terms), terms, 0.0).max())


def _slope_terms(arguments: tuple[Any, ...]) -> float:
    """The largest |scale| |K| sum(|dO| |V|), or with Q.

    dQ is a sum of P (dO V - dO O) K: of differences of such terms, which vanish where keys are equal.
    """
    named = OPS["attention"].named(arguments)
    query, key, value = (_size(named[name].double()) for name in ("query", "key", "value"))
    shape = (*named["query"].shape[:-1], named["value"].shape[-1])
    start = upstream(torch.empty(shape, dtype=named["query"].dtype), 0).double()
    channels = named["query"].shape[-1]
    scale = named["scale"]
    scale = 1.0 / math.sqrt(max(1, channels)) if scale is None else abs(scale)
    slopes = value * _size(start.abs().sum(dim=-1))
    return float(scale * max(query, key) * slopes)


def _logit_terms(arguments: tuple[Any, ...]) -> float:
    """The largest sums of |p - t| |W| over classes, of |p - t| |x| over rows.

    Where logits are nearly equal and all of the target is smoothing, the differences nearly vanish.
    """
    x, weight = (_size(given.double()) for given in arguments[:2])
    return max(2.0 * weight, len(arguments[0]) * x)


def _size(x: Tensor) -> float:
    return torch.where(x.isfinite(), x.abs(), 0.0).max().item() if x.numel() else 0.0


def check_kernels(
    op: str,
    arguments: tuple[Any, ...],
    names: tuple[str, ...] = (),
    offset: int = 1,
    kernels: list[tuple[Kernel, str | None]] | None = None,
) -> int:
    """Results and gradients (of ``names``) of all kernels that take the call; how many did.

    Without gradients they run in `no_grad`, with them once more in the way that training has.
    """
    arguments = all_among_nan(arguments, offset)
    before = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
    ran = 0

    @functools.cache
    def truth(orders: int) -> Truth:
        return result_truth(op, arguments, orders)

    @functools.cache
    def of_gradients(orders: int) -> GradientTruth:
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
                ran += 1
    finally:
        _use(isa)
    for value, old in zip(arguments, before, strict=True):
        if isinstance(value, Tensor) and value.numel():
            same = (value == old) | (value != value)
            if not bool(same.all()):
                raise Wrong(f"{op}: an input was modified")
    return ran
