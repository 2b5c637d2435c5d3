"""Operators of the feed-forward network, their rules, and autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..reference.dropout import dropout
from ..reference.linear import activate
from .arguments import FeedForwardArguments
from .autograd import (
    Function,
    called_directly,
    differentiates_again,
    gradients,
    gradients_of,
    mask_unwanted,
    placeholder,
    vjp,
    wanted,
)
from .linear import CODES, products, total
from .operator import Operator, Rule

# ``kept``: saved for backward if ``keep``, see `_KEEP_PREACTIVATION`. Results that are not
# requested are empty. ``packed1``, ``packed2``: as in `linear`.
_TENSORS = "input:...m weight1:fm bias1:f weight2:of bias2:o+f grad:...o kept:...f"
_RULE = Rule(_TENSORS, "...o", ".of", ".mf .fo")
INFERENCE = Operator(
    "feed_forward(Tensor input, Tensor weight1, Tensor? bias1, Tensor weight2, Tensor? bias2,"
    " int activation) -> Tensor",
    _RULE,
)
PACKED = Operator(
    "feed_forward_packed(Tensor input, Tensor weight1, Tensor? packed1, Tensor? bias1,"
    " Tensor weight2, Tensor? packed2, Tensor? bias2, int activation) -> Tensor",
    _RULE,
)
TRAINING = Operator(
    "feed_forward_training(Tensor input, Tensor weight1, Tensor? bias1, Tensor weight2,"
    " Tensor? bias2, int activation, float dropout_p, Tensor? seed, bool keep)"
    " -> (Tensor output, Tensor kept)",
    Rule(_TENSORS, "...o ...f=o?keep", ".of", ".mf .fo", despite_dropout="o"),
)
BACKWARD = Operator(
    "feed_forward_backward(Tensor grad, Tensor input, Tensor weight1, Tensor weight2, Tensor kept,"
    " int activation, float dropout_p, Tensor? seed, bool want_input, bool want_weight1,"
    " bool want_bias1, bool want_weight2, bool want_bias2)"
    " -> (Tensor grad_input, Tensor grad_weight1, Tensor grad_bias1, Tensor grad_weight2,"
    " Tensor grad_bias2)",
    Rule(
        _TENSORS,
        "...m?want_input fm?want_weight1 f?want_bias1 of?want_weight2 o=f?want_bias2",
        ".of",
        ".fo .fo?want_weight2 .mf?want_weight1 .mf?want_input",
        despite_dropout="o",
    ),
)
#: Backends that save the preactivation of relu. The others save relu's output, which determines its
#: derivative.
_KEEP_PREACTIVATION = frozenset({"cpu"})


def feed_forward_on(backend: str) -> Callable[[FeedForwardArguments], Tensor]:
    """Returns the function that the dispatcher runs for a backend with operators."""

    def run(arguments: FeedForwardArguments) -> Tensor:
        *tensors, activation, dropout_p, seed = arguments
        if torch.is_grad_enabled():
            result = FeedForwardFunction.recorded(
                (backend, activation, dropout_p), (*tensors, seed)
            )
            if result is not None:
                return result[0]  # type: ignore[no-any-return]
        code = CODES[activation]
        if dropout_p == 0.0 and backend in INFERENCE.of:
            return INFERENCE.of[backend](*tensors, code)  # type: ignore[no-any-return]
        return TRAINING.of[backend](*tensors, code, dropout_p, seed, False)[0]  # type: ignore[no-any-return]

    return run


@called_directly
class FeedForwardFunction(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, options: tuple[str, str, float], *tensors: Any
    ) -> tuple[Tensor, Tensor]:
        input, weight1, bias1, weight2, bias2, seed = tensors
        backend, activation, dropout_p = ctx.options = options
        output, kept = TRAINING.of[backend](
            input, weight1, bias1, weight2, bias2, CODES[activation], dropout_p, seed, True
        )
        ctx.set_materialize_grads(False)
        need_input, need_weight1, need_bias1 = ctx.needs_input_grad[1:4]
        through = need_input or need_weight1 or need_bias1
        compiling = torch.compiler.is_compiling()
        # True if ``kept`` is not the preactivation, which a second derivative then recomputes.
        ctx.makes = not (compiling or backend in _KEEP_PREACTIVATION)
        if compiling or ctx.makes:
            ctx.mark_non_differentiable(kept)
        ctx.save_for_backward(
            input if need_weight1 or ctx.makes else None,
            weight1 if need_input or ctx.makes else None,
            bias1 if ctx.makes else None,
            weight2 if through else None,
            seed,
            kept,
        )
        return output, kept

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, grad_kept: Tensor | None
    ) -> tuple[Any, ...]:
        """``grad_kept``: None except in a second derivative, because users do not get ``kept``."""
        if grad_kept is not None and torch.compiler.is_compiling():
            grad_kept = None  # always zeros here
        if grad is None and grad_kept is None:
            return gradients_of(ctx)
        wants = ctx.needs_input_grad[1:6]
        grads: Sequence[Tensor | None]
        if grad is None or grad_kept is not None or differentiates_again():
            grads = _by_formula(ctx, grad, grad_kept, wants)
        else:
            backend, activation, dropout_p = ctx.options
            input, weight1, _, weight2, seed, kept = ctx.saved_tensors
            hidden, lead = kept.shape[-1], grad.shape[:-1]
            if wants[0] and (wants[1] or wants[3]):
                wants = wanted(ctx, grad.numel() * hidden)[1:6]
            if input is None:
                input = placeholder(grad, *lead, 1 if weight1 is None else weight1.shape[1])
            if weight1 is None:
                weight1 = placeholder(grad, hidden, input.shape[-1])
            if weight2 is None:
                weight2 = placeholder(grad, grad.shape[-1], hidden)
            grads = gradients(
                BACKWARD.of[backend], grad, input, weight1, weight2, kept, CODES[activation],
                dropout_p, seed, *wants,
            )  # fmt: skip
        return None, *mask_unwanted(wants, grads), None


def _by_formula(
    ctx: Any, grad: Tensor | None, grad_kept: Tensor | None, wants: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    _, activation, dropout_p = ctx.options
    input, weight1, bias1, weight2, seed, z = ctx.saved_tensors
    if ctx.makes:
        z = F.linear(input, weight1, bias1)
    through = any(wants[:3])
    dz = dweight2 = dbias2 = dinput = dweight1 = dbias1 = None
    if grad is not None:

        def rest(z: Tensor, weight2: Tensor) -> Tensor:
            hidden = dropout(activate(z, activation), dropout_p, seed)
            return F.linear(hidden, weight2)

        if weight2 is None:  # not saved: its gradient does not depend on its values
            weight2 = grad.new_zeros((grad.shape[-1], z.shape[-1]))
        if through or wants[3]:
            dz, dweight2 = vjp(rest, (z, weight2), (through, wants[3]), (grad,))
        dbias2 = products(grad, None, None, (False, False, wants[4]))[2]
    if through:
        dinput, dweight1, dbias1 = products(total(dz, grad_kept), input, weight1, wants[:3])
    return dinput, dweight1, dbias1, dweight2, dbias2


def gradients_again(
    grad: Tensor,
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    seed: Tensor | None,
    code: float,
    dropout_p: float,
    wants: Sequence[bool],
) -> list[Tensor | None]:
    """Returns the differentiable gradients of the five tensors, for csrc/autograd."""
    activation = next(name for name, each in CODES.items() if each == code)
    bias2 = grad.new_zeros(grad.shape[-1:])  # its value has no effect
    return vjp(
        lambda x, w1, b1, w2, b2: reference.feed_forward(
            x, w1, b1, w2, b2, activation, dropout_p, seed
        ),
        (input, weight1, bias1, weight2, bias2), wants, (grad,),
    )  # fmt: skip
