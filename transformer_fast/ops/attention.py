"""Operators of attention, their rules, and autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .. import reference
from .._context import are_plain_on_cpu, in_torch_func, is_recorded
from .arguments import AttentionArguments
from .autograd import (
    Function,
    called_directly,
    differentiates_again,
    gradients,
    gradients_of,
    mask_unwanted,
    savable,
    vjp,
)
from .operator import Operator, Rule

# Softmax statistics saved for the backward: two (B, H, T) fp32 tensors, the same in every backend.
# ``row_max`` is the maximum of a row's scores (scaled, with the mask, in natural units), or a number
# near it. ``row_sum`` is the sum of exp(score - row_max). Both are 0 for a fully masked row. The
# log-sum-exp is row_max + log(row_sum). Saving only that would not be accurate enough: where a mask adds
# finfo.min to all of a row, it rounds to row_max, and gradients of the row are S times too large. For
# scores with a standard deviation of 1000 the largest error of the gradients triples.
#
# ``longest_queries`` and ``longest_keys`` are -1 except for packed sequences.
_CALL = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? key_lengths, bool is_causal,"
    " float scale, float dropout_p, Tensor? seed"
)
_LENGTHS = "Tensor? query_lengths=None, SymInt longest_queries=-1, SymInt longest_keys=-1"
_TENSORS = (
    "query:bhtd key:bhsd value:bhse mask:bhts key_lengths:b query_lengths:b grad:bhte"
    " grad_weights:bhts output:bhte weights:bhts row_max:bht row_sum:bht"
)
INFERENCE = Operator(
    f"attention({_CALL}, bool need_weights, bool contiguous=False, float softcap=0.0)"
    " -> (Tensor output, Tensor weights)",
    Rule(_TENSORS, "bhte/attention bhts?need_weights", by="bh", products="bhtsd bhtse"),
)
TRAINING = Operator(
    f"attention_training({_CALL}, bool need_weights, {_LENGTHS}, bool contiguous=False)"
    " -> (Tensor output, Tensor weights, Tensor row_max, Tensor row_sum)",
    Rule(
        _TENSORS, "bhte/attention BhTs?need_weights BhT:float32 BhT:float32", by="bh",
        products="bhtsd bhtse",
    ),
)  # fmt: skip
BACKWARD = Operator(
    f"attention_backward(Tensor grad, Tensor? grad_weights, {_CALL}, Tensor output, Tensor? weights,"
    " Tensor row_max, Tensor row_sum, bool want_query, bool want_key, bool want_value,"
    f" bool want_mask, {_LENGTHS})"
    " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_mask)",
    Rule(
        _TENSORS, "@query/?want_query @key/?want_key @value/?want_value @mask?want_mask", by="bh",
        # One of the products recomputes the scores, for the probabilities.
        products="bhtsd bhtse bhtse bhtsd bhtsd",
    ),
)  # fmt: skip


Result = tuple[Tensor, Tensor | None]


def attention_on(
    backend: str, query_lengths: bool = False
) -> Callable[[AttentionArguments], Result]:
    """Returns the function that the dispatcher runs for a backend with operators.

    ``query_lengths``: True if the operators support query lengths and packed sequences. If False,
    sequences are padded, unless they are packed on the CPU (`_is_packed`).
    """

    def run(arguments: AttentionArguments) -> Result:
        packed = by_padding is not None and arguments.query_lengths is not None
        if packed and not (backend == "cpu" and _is_packed(arguments)):
            return by_padding(*arguments)  # type: ignore[misc]
        (
            query, key, value, mask, lengths, is_causal, scale, p, seed, _, need_weights,
            query_lengths, longest, softcap, contiguous,
        ) = arguments  # fmt: skip
        if scale is None:
            scale = 1.0 / math.sqrt(query.shape[-1] or 1)
        if torch.is_grad_enabled() and softcap is None:  # operators have no backward for a soft cap
            result = AttentionFunction.recorded(
                (backend, is_causal, scale, p, need_weights, longest, contiguous),
                (query, key, value, mask, lengths, seed, query_lengths),
            )
            if result is not None:
                return result  # type: ignore[no-any-return]
        call = (query, key, value, mask, lengths, is_causal, scale, p, seed, need_weights)
        if backend in INFERENCE.of and query_lengths is None:
            rest = (bool(contiguous),) if softcap is None else (bool(contiguous), softcap)
            output, weights = INFERENCE.of[backend](*call, *rest)
        else:
            output, weights, *_ = TRAINING.of[backend](
                *call, *_rest(query_lengths, longest, contiguous)
            )
        return output, weights if need_weights else None

    by_padding = None if query_lengths else _by_padding(run)
    return run


def _is_packed(arguments: AttentionArguments) -> bool:
    """True for packed sequences whose starts can be read, and that are not longer than ``longest``."""
    if arguments.longest is None or arguments.softcap is not None:
        return False
    if is_recorded() or in_torch_func():
        return False
    if not are_plain_on_cpu((*arguments[:3], arguments.key_lengths, arguments.query_lengths)):
        return False
    for x, starts, longest in (
        (arguments.query, arguments.query_lengths, arguments.longest[0]),
        (arguments.key, arguments.key_lengths, arguments.longest[1]),
    ):
        first, *rest = starts.tolist()  # type: ignore[union-attr]
        if first != 0 or (rest and rest[-1] > x.shape[2]):
            return False
        if any(not 0 <= after - at <= longest for at, after in pairwise((first, *rest))):
            return False
    return True


def _by_padding(attention: Callable[[AttentionArguments], Result]) -> Callable[..., Result]:
    def run(*given: Any) -> Result:
        *arguments, softcap = given
        return attention(AttentionArguments(*arguments)._replace(softcap=softcap))

    return reference.supports_query_lengths(run)


def with_query_lengths(
    attention: Callable[[AttentionArguments], Result],
) -> Callable[[AttentionArguments], Result]:
    """Adds support for query lengths, packed sequences and ``contiguous`` to a function."""
    by_padding = _by_padding(attention)
    return lambda arguments: by_padding(*arguments)


def _rest(
    query_lengths: Tensor | None, longest: tuple[int, int] | None, contiguous: bool | None = None
) -> tuple[Any, ...]:
    """Returns the operators' last arguments, without those that equal the defaults."""
    if contiguous:
        return query_lengths, *(longest or (-1, -1)), True
    if query_lengths is None:
        return ()
    return (query_lengths,) if longest is None else (query_lengths, *longest)


@called_directly
class AttentionFunction(Function):
    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], *tensors: Any) -> Result:  # type: ignore[override]
        query, key, value, mask, lengths, seed, query_lengths = tensors
        backend, is_causal, scale, p, need_weights, *layout = ctx.options = options
        output, weights, row_max, row_sum = TRAINING.of[backend](
            query, key, value, mask, lengths, is_causal, scale, p, seed, need_weights,
            *_rest(query_lengths, *layout),
        )  # fmt: skip
        if not need_weights:
            weights = None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            query, key, value, None if mask is None else savable(mask), lengths, seed, output,
            weights, row_max, row_sum, query_lengths,
        )  # fmt: skip
        # Some kernels return a view. Autograd forbids in-place changes of views that a custom
        # function returns. The detached tensor shares memory and version counter, and is allowed.
        return output.detach(), weights

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, grad_weights: Tensor | None
    ) -> tuple[Any, ...]:
        if grad is None and grad_weights is None:
            return gradients_of(ctx)
        *primals, key_lengths, seed, output, weights, row_max, row_sum, query_lengths = (
            ctx.saved_tensors
        )
        backend, is_causal, scale, p, need_weights, longest, _ = ctx.options
        others = key_lengths, is_causal, scale, p, seed
        wants = ctx.needs_input_grad[1:5]
        if differentiates_again():

            def formula(*primals: Tensor | None) -> Any:
                both = reference.attention(
                    *primals, *others, True, need_weights, query_lengths, longest
                )
                return both if need_weights else both[0]

            grads = (grad, grad_weights) if need_weights else (grad,)
            return None, *vjp(formula, primals, wants, grads), None, None, None
        grads = gradients(
            BACKWARD.of[backend], torch.zeros_like(output) if grad is None else grad,
            grad_weights, *primals, *others, output, weights, row_max, row_sum, *wants,
            *_rest(query_lengths, longest),
        )  # fmt: skip
        return None, *mask_unwanted(wants, grads), None, None, None


def gradients_again(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    is_causal: float,
    dropout_p: float,
    wants: Sequence[bool],
) -> list[Tensor | None]:
    """Returns the differentiable gradients of query, key and value, for csrc/autograd."""

    def formula(*primals: Tensor) -> Tensor:
        others = mask, None, bool(is_causal), scale, dropout_p, seed, True, False, None, None
        return reference.attention(*primals, *others)[0]

    return vjp(formula, (query, key, value), wants, (grad,))


def parts_gradients_again(
    grad: Tensor,
    first: Tensor,
    second: Tensor | None,
    third: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    heads: float,
    batch_first: float,
    is_causal: float,
    dropout_p: float,
    wants: Sequence[bool],
) -> list[Tensor | None]:
    """Returns the differentiable gradients of the tensors that hold queries, keys and values, for
    csrc/autograd."""

    def formula(*given: Tensor | None) -> Tensor:
        parts = [part for x in given if x is not None for part in x.split(grad.shape[2], 2)]
        q, k, v = (
            (x if batch_first else x.transpose(0, 1)).unflatten(2, (int(heads), -1)).transpose(1, 2)
            for x in parts
        )
        others = mask, None, bool(is_causal), None, dropout_p, seed, True, False, None, None
        y = reference.attention(q, k, v, *others)[0].transpose(1, 2).flatten(2)
        return y if batch_first else y.transpose(0, 1)

    return vjp(formula, (first, second, third), wants, (grad,))
