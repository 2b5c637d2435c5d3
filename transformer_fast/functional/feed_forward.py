"""feed_forward: the public function, the operators behind it, autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import call_cache
from ..autograd import (
    Function,
    differentiates_again,
    gradients,
    only,
    stand_in,
    vjp,
    wants_grad,
)
from ..dispatch import Call
from ..fast_path import FEED_FORWARD, FLOAT, plain
from ..fast_path import kernel as cpu_kernel
from ..reference.dropout import draw_seed, dropout
from ..reference.linear import ACTIVATIONS, activate
from ._check import (
    autocast,
    casts_itself,
    leaves_to_torch,
    named_activation,
    require_activation,
    require_floating,
    require_probability,
    require_same_device,
    require_tensor,
)
from ._operator import Operator, Rule
from .linear import CODES, dtype_problem, products, total, weight_problem

__all__ = ["feed_forward"]


def _fits(input: Tensor, weight1: Any, bias1: Any, weight2: Any, bias2: Any) -> bool:
    """Whether nothing is wrong with the shapes."""
    if weight1 is None or weight2 is None:
        return False
    hidden, width = weight1.shape, weight2.shape
    return (
        input.dim() > 0
        and len(hidden) == 2
        and len(width) == 2
        and hidden[1] == input.shape[-1]
        and width[1] == hidden[0]
        and (bias1 is None or bias1.shape == hidden[:1])
        and (bias2 is None or bias2.shape == width[:1])
    )


def feed_forward(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    activation: str | Callable[[Tensor], Tensor] = "relu",
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """The position-wise feed-forward network: ``dropout(act(x W1^T + b1)) W2^T + b2``.

    Args:
        input: (..., M).
        weight1: (F, M); bias1: (F,); None: zeros.
        weight2: (Mout, F); bias2: (Mout,); None: zeros.
        activation: "relu", "gelu" (erf), "gelu_tanh", "silu", or a callable.
        dropout_p: probability in [0, 1] of dropping a hidden value; 0: no dropout.
        backend: None: the dispatcher chooses; a named backend never falls back.

    Raises:
        RuntimeError, ValueError: shapes, dtypes or devices do not match, the
            activation is unknown, or dropout_p is outside [0, 1].
        NotImplementedError: the named backend does not support the call.

    Source: "Attention Is All You Need", section 3.3.
    """
    if (
        backend is None
        and type(activation) is str
        and activation in ACTIVATIONS
        and type(dropout_p) is float
        and 0.0 <= dropout_p < 1.0
    ):
        grad = plain(input, weight1, bias1, weight2, bias2)
        if grad is not None and _fits(input, weight1, bias1, weight2, bias2):
            limit, weights = FEED_FORWARD, weight1.numel() + weight2.numel()
            columns = input.shape[-1]
            if (
                dropout_p == 0.0
                and input.dtype is FLOAT
                and weights <= limit.weights
                and weight1.is_cpu
                and weight2.is_cpu
                and input.numel() // max(1, columns) * weights < limit.below[grad]
            ):
                hidden = ACTIVATIONS[activation](F.linear(input, weight1, bias1))
                return F.linear(hidden, weight2, bias2)
            given = (input, weight1, bias1, weight2, bias2)
            if (run := cpu_kernel("feed_forward", *given, grad=grad)) is not None:
                seed = draw_seed(input.device) if dropout_p else None
                return run(*given, activation, dropout_p, seed)  # type: ignore[no-any-return]
    given = (input, weight1, bias1, weight2, bias2)
    key, again = call_cache.look_up("feed_forward", given, (activation, dropout_p, backend))
    if again is not None:
        return again(*given)  # type: ignore[no-any-return]
    if leaves_to_torch("feed_forward", backend, *given):
        require_activation(activation)
        hidden = activate(F.linear(input, weight1, bias1), activation)
        return F.linear(F.dropout(hidden, dropout_p), weight2, bias2)
    require_tensor("feed_forward", "input", 1, input)
    require_tensor("feed_forward", "weight1", 2, weight1)
    require_tensor("feed_forward", "bias1", 3, bias1, optional=True)
    require_tensor("feed_forward", "weight2", 4, weight2)
    require_tensor("feed_forward", "bias2", 5, bias2, optional=True)
    if activation is None:
        raise ValueError("activation must be a name or a callable, not None")
    require_activation(activation)
    require_floating("input", input)
    if input.dim() == 0:
        raise ValueError("input must have at least one dimension, not 0")
    p = require_probability("feed_forward", "dropout_p", dropout_p)
    wrong = weight_problem(("input", "weight1", "bias1"), input.shape[-1], weight1, bias1)
    if wrong is None:
        names = ("the hidden block", "weight2", "bias2")
        wrong = weight_problem(names, weight1.shape[0], weight2, bias2)
    if wrong is not None:
        raise ValueError(wrong)
    require_same_device("input", input, weight1=weight1, bias1=bias1, weight2=weight2, bias2=bias2)
    tensors: tuple[Any, ...] = given
    if not casts_itself("feed_forward", input, backend):
        tensors = x, w1, b1, w2, b2 = autocast(*given)
        wrong = dtype_problem(x, weight1=w1, bias1=b1, weight2=w2, bias2=b2)  # type: ignore[arg-type]
        if wrong is not None:
            raise ValueError(wrong)
    activation = named_activation(activation)  # type: ignore[assignment]
    call = Call("feed_forward", tensors, wants_grad(*tensors), p, activation)
    return call_cache.run(key, given, call, (*tensors, activation, p, None), backend)  # type: ignore[no-any-return]


# ``kept``, if ``keep``: what the activation was applied to, or anything else that the backward wants to
# know. What is not wanted comes back empty. ``packed1``, ``packed2``: as in `linear`.
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
#: Backends whose ``kept`` is the preactivation; others keep the hidden units of relu, which tell its
#: derivative.
_KEEP_PREACTIVATION = frozenset({"cpu"})


def feed_forward_on(backend: str) -> Callable[..., Tensor]:
    """What the dispatcher runs of `feed_forward` for a backend with operators."""

    def run(
        input: Tensor,
        weight1: Tensor,
        bias1: Tensor | None,
        weight2: Tensor,
        bias2: Tensor | None,
        activation: str,
        dropout_p: float,
        seed: Tensor | None,
    ) -> Tensor:
        found = FeedForwardFunction.recorded(
            backend, input, weight1, bias1, weight2, bias2, activation, dropout_p, seed
        )
        if found is not None:
            return found[0]  # type: ignore[no-any-return]
        code = CODES[activation]
        if dropout_p == 0.0 and backend in INFERENCE.of:
            return INFERENCE.of[backend](input, weight1, bias1, weight2, bias2, code)  # type: ignore[no-any-return]
        return TRAINING.of[backend](  # type: ignore[no-any-return]
            input, weight1, bias1, weight2, bias2, code, dropout_p, seed, False
        )[0]

    return run


class FeedForwardFunction(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        backend: str,
        input: Tensor,
        weight1: Tensor,
        bias1: Tensor | None,
        weight2: Tensor,
        bias2: Tensor | None,
        activation: str,
        dropout_p: float,
        seed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        output, kept = TRAINING.of[backend](
            input, weight1, bias1, weight2, bias2, CODES[activation], dropout_p, seed, True
        )
        ctx.backend, ctx.activation, ctx.dropout_p = backend, activation, dropout_p
        ctx.set_materialize_grads(False)
        need_input, need_weight1, need_bias1 = ctx.needs_input_grad[1:4]
        through = need_input or need_weight1 or need_bias1
        compiling = torch.compiler.is_compiling()
        # A second derivative makes the preactivation once more where it is not what was kept.
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
        """``grad_kept`` comes of a second derivative only: nobody else sees that result."""
        if grad_kept is not None and torch.compiler.is_compiling():
            grad_kept = None  # zeros
        if grad is None and grad_kept is None:
            return (None,) * 9
        wants = ctx.needs_input_grad[1:6]
        found: Sequence[Tensor | None]
        if grad is None or grad_kept is not None or differentiates_again():
            found = _by_formula(ctx, grad, grad_kept, wants)
        else:
            input, weight1, _, weight2, seed, kept = ctx.saved_tensors
            hidden, lead = kept.shape[-1], grad.shape[:-1]
            if input is None:
                input = stand_in(grad, *lead, 1 if weight1 is None else weight1.shape[1])
            if weight1 is None:
                weight1 = stand_in(grad, hidden, input.shape[-1])
            if weight2 is None:
                weight2 = stand_in(grad, grad.shape[-1], hidden)
            found = gradients(
                BACKWARD.of[ctx.backend], grad, input, weight1, weight2, kept,
                CODES[ctx.activation], ctx.dropout_p, seed, *wants,
            )  # fmt: skip
        return None, *only(wants, found), None, None, None


def _by_formula(
    ctx: Any, grad: Tensor | None, grad_kept: Tensor | None, wants: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    input, weight1, bias1, weight2, seed, z = ctx.saved_tensors
    if ctx.makes:
        z = F.linear(input, weight1, bias1)
    through = any(wants[:3])
    dz = dweight2 = dbias2 = dinput = dweight1 = dbias1 = None
    if grad is not None:

        def rest(z: Tensor, weight2: Tensor) -> Tensor:
            hidden = dropout(activate(z, ctx.activation), ctx.dropout_p, seed)
            return F.linear(hidden, weight2)

        if weight2 is None:  # its gradient does not depend on it
            weight2 = grad.new_zeros((grad.shape[-1], z.shape[-1]))
        if through or wants[3]:
            dz, dweight2 = vjp(rest, (z, weight2), (through, wants[3]), (grad,))
        dbias2 = products(grad, None, None, (False, False, wants[4]))[2]
    if through:
        dinput, dweight1, dbias1 = products(total(dz, grad_kept), input, weight1, wants[:3])
    return dinput, dweight1, dbias1, dweight2, dbias2
