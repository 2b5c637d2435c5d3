"""Holds kernels to the definitions (`definitions.py`) on every instruction set of this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import definitions
import numpy as np
import torch
from torch import Tensor

from transformer_fast import _native, dispatch
from transformer_fast.dispatch import Kernel, why_not
from transformer_fast.specs import OPS
from transformer_fast.testing import (
    GradientTruth,
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
    if op in ("feed_forward", "add_layer_norm"):
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
    from_rounded: bool = False,
) -> dict[str, Tensor]:
    results, back = _defined(op, arguments)
    dtype = arguments[0].dtype
    if "cross_entropy" in op:  # its losses are fp32 at least
        dtype = torch.promote_types(dtype, torch.float32)
    starts = [
        None if x is None else exact(upstream(torch.empty(x.shape, dtype=dtype), number))
        for number, x in enumerate(results)
    ]
    if from_rounded and op == "attention":
        rounded = [None if x is None else exact(torch.from_numpy(x).to(dtype)) for x in results]
        starts.append(rounded)  # type: ignore[arg-type]
    elif from_rounded:
        starts.append(torch.finfo(dtype).eps / 2)  # type: ignore[arg-type]
    found = back(*starts)
    named = OPS[op].named(arguments)
    names = OPS[op].gradients_of if names is None else names
    return {
        name: _tensor(found[name], named[name].dtype)
        for name in OPS[op].arguments
        if name in names and isinstance(named[name], Tensor) and named[name].is_floating_point()
    }


def other_orders(arguments: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """An attention's call with the channels of its queries and keys in other orders, and the way back.

    The scores are the same sums, rounded differently. Those of some hundreds have an error of 1e-5 in
    fp32, whoever adds up; a row's weights hang on two or three of them, and a call's largest error on
    two or three rows. So which order is the better one is luck, and the reference has only one.
    """
    query, key, *rest = arguments
    generator = torch.Generator().manual_seed(0)
    for _ in range(ORDERS):
        order = torch.randperm(query.shape[-1], generator=generator)
        yield (query[..., order], key[..., order], *rest), order.argsort()


#: So many more orders in which the reference's scores are added up.
ORDERS = 7


def result_truth(op: str, arguments: tuple[Any, ...]) -> Truth:
    truth = truth_of(op, arguments, oracle=oracle)
    if op != "attention" or arguments[0].dtype != torch.float32:
        return truth
    units = truth.units
    for other, _ in other_orders(arguments):
        with torch.no_grad():
            found = map(relative_error, OPS[op].reference(*other), truth.true)
        units = tuple(map(max, units, found))
    return dataclasses.replace(truth, units=units)


def gradient_truth(op: str, arguments: tuple[Any, ...], names: tuple[str, ...]) -> GradientTruth:
    """What is known about the gradients; those of attention and of losses may be differences.

    The mean of the slopes over a row's weights W is dO O + dW W. Where one key has almost all of a
    row, that takes away almost all of its slope, and a rounding of O is much of what is left; so
    what exact arithmetic makes of the rounded results counts as the reference's, where it is
    farther off. So does what it makes of rounded probabilities where a loss's slopes are smaller
    than that: with equal logits and a smoothing of 1 they vanish, in the reference by luck.
    """
    truth = truth_of_gradients(op, arguments, names, oracle=gradient_oracle)
    loss = "cross_entropy" in op
    if (op == "attention" and arguments[0].dtype != torch.float64) or loss:
        rounded = gradient_oracle(op, arguments, names, from_rounded=True)
        for name, true in truth.true.items():
            off = rounded[name] if loss else rounded[name].to(truth.expected[name].dtype)
            far = _far(off, true)
            if loss and far < _size(true):
                continue
            if off.isfinite().all() and far > _far(truth.expected[name], true):
                truth.expected[name] = off.to(truth.expected[name].dtype)
    if op == "attention" and arguments[0].dtype == torch.float32:
        for other, back in other_orders(arguments):
            for name, found in gradients(op, OPS[op].reference, other, names).items():
                got = found[..., back] if name in ("query", "key") else found
                error = relative_error(got, truth.true[name])
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
    rounding = 4 * torch.finfo(torch.float64).eps
    if names:
        found = truth_of_gradients(op, wide, names, oracle=gradient_oracle)
        pairs += [(name, x, found.true[name]) for name, x in found.expected.items()]
        largest = max((_size(x) for x in found.true.values()), default=0.0)
    for name, got, true in pairs:
        if got is None or true is None or true.numel() == 0:
            continue
        size = _size(true)
        if names and name in names:
            size = max(size, largest * torch.finfo(dtype).eps)
            rounding = (4 + 1000 * largest) * torch.finfo(torch.float64).eps
        same = (got == true) | (got.isnan() & true.isnan())
        error = torch.where(same, 0.0, (got - true).abs())
        limit = torch.finfo(dtype).eps / 2 * size + rounding
        if not bool((error <= limit).all()):
            raise Wrong(
                f"{op}: the reference in fp64 is not the definition: {name}: "
                f"error {error.max().item():.3g}, limit {limit:.3g}"
            )


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
    truth: Truth | None = None
    of_gradients: GradientTruth | None = None
    ran = 0
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

                if truth is None:
                    truth = result_truth(op, arguments)
                if wanted:
                    if of_gradients is None:
                        of_gradients = gradient_truth(op, arguments, wanted)
                    found = measure_gradients(op, run, arguments, names=wanted, truth=of_gradients)
                    if not found.ok:
                        raise Wrong(f"{op} on {kernel.backend}, {kernel_isa}: {found}")
                else:
                    with torch.no_grad():
                        run(*arguments)
                found = measure(op, kept[0], arguments, truth=truth)
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
