"""Operators of the norms and of norms behind a residual connection, their rules, and autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..recipe import NormKind
from ..reference.dropout import dropout
from .arguments import RECORDS
from .autograd import (
    Function,
    called_directly,
    differentiates_again,
    gradients,
    gradients_of,
    mask_unwanted,
    placeholder,
    vjp,
)
from .operator import Operator, Rule

# ``dims``: number of trailing dimensions that are normalised. ``kind``: index in `_FORMULAS`. mean,
# rstd: float32, one value per normalised slice. ``source``: the tensor that was normalised.
# ``want_input``: the gradient of the dropout's input; without dropout it equals grad_source.
# Results that are not requested are empty.
_PARAMETERS = "Tensor? weight, Tensor? bias, int dims, float eps, int kind"
_TENSORS = "input:...* residual:...* grad:...* grad_sum:...* source:...* mean:... rstd:..."
INFERENCE = Operator(
    f"layer_norm(Tensor input, {_PARAMETERS}) -> Tensor", Rule(_TENSORS, "...*", by=".")
)
ADD_INFERENCE = Operator(
    f"add_layer_norm(Tensor input, Tensor residual, {_PARAMETERS}) -> (Tensor output, Tensor sum)",
    Rule(_TENSORS, "...* ...*", by="."),
)
TRAINING = Operator(
    f"layer_norm_training(Tensor input, Tensor? residual, {_PARAMETERS}, float dropout_p,"
    " Tensor? seed) -> (Tensor output, Tensor sum, Tensor mean, Tensor rstd)",
    Rule(_TENSORS, "...* ...*?residual ...:float32 ...:float32", by="."),
)
BACKWARD = Operator(
    "layer_norm_backward(Tensor grad, Tensor? grad_sum, Tensor source, Tensor? weight, Tensor mean,"
    " Tensor rstd, int dims, int kind, float dropout_p, Tensor? seed, bool want_source, bool want_input,"
    " bool want_weight, bool want_bias)"
    " -> (Tensor grad_source, Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
    Rule(
        _TENSORS,
        "...*?want_source ...*?want_input *:@weight?want_weight *:@weight?want_bias",
        by=".",
    ),
)


#: Values of the operators' argument ``kind``; plain numbers, which tracers take.
LAYER, RMS, ANNOTATED, ANNOTATED_BIASED = (int(kind) for kind in NormKind if kind >= 0)


class Norm(NamedTuple):
    """A norm. There are two ops for it: ``<name>``, and ``add_<name>`` behind a residual
    connection."""

    kind: int
    #: PyTorch's function, with the same parameters.
    pytorch: Callable[..., Tensor]
    module: type[torch.nn.Module]
    has_bias: bool


#: Op -> norm.
NORMS = {
    "layer_norm": Norm(LAYER, F.layer_norm, torch.nn.LayerNorm, True),
    "rms_norm": Norm(RMS, F.rms_norm, torch.nn.RMSNorm, False),
}


def behind_sum(
    norm: Callable[..., Tensor], dropout: Callable[..., Tensor]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns the function of the op ``add_<norm>``, from PyTorch's norm and dropout."""

    def run(input: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        *given, dropout_p, seed = rest
        total = residual + (input if dropout_p == 0.0 else dropout(input, dropout_p, seed))
        return norm(total, *given), total

    return run


#: Kind -> formula of the output, with arguments (source, normalized_shape, weight, bias, eps).
_FORMULAS: tuple[Callable[..., Tensor], ...] = (
    reference.layer_norm,
    lambda x, shape, w, b, eps: reference.rms_norm(x, shape, w, eps),
    lambda x, shape, w, b, eps: reference.annotated_layer_norm(x, w, b, eps),
    lambda x, shape, w, b, eps: reference.annotated_layer_norm(x, w, b, eps, False),
)


def norm_on(backend: str, op: str) -> Callable[[Any], Any]:
    """Returns the function that the dispatcher runs for a norm, with or without a residual sum."""
    fields = RECORDS[op]._fields
    adds, has_bias, annotated = ("residual" in fields, "bias" in fields, "unbiased" in fields)
    kind = ANNOTATED if annotated else NORMS[op.removeprefix("add_")].kind

    def run(arguments: Any) -> Any:
        input, weight = arguments.input, arguments.weight
        bias = arguments.bias if has_bias else None
        residual, p, seed = None, 0.0, None
        if adds:
            residual, p, seed = arguments.residual, arguments.dropout_p, arguments.seed
        dims = 1 if annotated else len(arguments.normalized_shape)
        own = ANNOTATED_BIASED if annotated and not arguments.unbiased else kind
        given = (dims, arguments.eps, own)
        if torch.is_grad_enabled():
            result = NormFunction.recorded(
                (backend, *given, p), (input, residual, weight, bias, seed)
            )
            if result is not None:
                return result
        if p == 0.0 and backend in INFERENCE.of:
            if adds:
                return ADD_INFERENCE.of[backend](input, residual, weight, bias, *given)
            return INFERENCE.of[backend](input, weight, bias, *given)
        results = TRAINING.of[backend](input, residual, weight, bias, *given, p, seed)
        return results[:2] if adds else results[0]

    return run


@called_directly
class NormFunction(Function):
    """Normalises input, or residual + dropout(input); this sum is then a second result."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, options: tuple[str, int, float, int, float], *tensors: Any
    ) -> Any:
        input, residual, weight, _, seed = tensors
        backend, *rest = ctx.options = options
        output, sum, mean, rstd = TRAINING.of[backend](*tensors[:4], *rest, seed)
        ctx.set_materialize_grads(False)
        needs = ctx.needs_input_grad
        source = sum
        if residual is None:
            source = input if needs[1] or needs[3] else None
        # The gradients of weight and bias need only the weight's dtype. Without a saved weight, users
        # may change it in place before the backward.
        if weight is not None and not (needs[1] or needs[2]):
            weight = placeholder(weight, *weight.shape) if needs[3] or needs[4] else None
        ctx.save_for_backward(source, weight, mean, rstd, seed)
        return output if residual is None else (output, sum)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, grad_sum: Tensor | None = None
    ) -> tuple[Any, ...]:
        if grad is None and grad_sum is None:
            return gradients_of(ctx)
        source, weight, mean, rstd, seed = ctx.saved_tensors
        needs = ctx.needs_input_grad
        backend, dims, eps, kind, dropout_p = ctx.options
        if differentiates_again():
            given = grad, grad_sum, source, weight, seed, kind, eps, dropout_p, needs[1:5], dims
            return None, *gradients_again(*given), None
        if source is None:
            source = grad.detach()  # type: ignore[union-attr] # the bias's gradient needs no more
        if grad is None:
            grad = torch.zeros_like(source)
        drops = dropout_p > 0.0
        found = gradients(
            BACKWARD.of[backend], grad, grad_sum, source, weight, mean, rstd, dims, kind, dropout_p,
            seed, needs[2] or (needs[1] and not drops), needs[1] and drops, *needs[3:5],
        )  # fmt: skip
        wants = needs[1] or needs[2], needs[1], needs[3], needs[4]
        dsource, dinput, dweight, dbias = mask_unwanted(wants, found)
        if not drops:
            dinput = dsource
        return (
            None, dinput if needs[1] else None, dsource if needs[2] else None, dweight, dbias, None
        )  # fmt: skip


def gradients_again(
    grad: Tensor | None,
    grad_sum: Tensor | None,
    source: Tensor | None,
    weight: Tensor | None,
    seed: Tensor | None,
    kind: float,
    eps: float,
    dropout_p: float,
    wants: Sequence[bool],
    dims: int = 1,
) -> tuple[Tensor | None, ...]:
    """Returns the differentiable gradients of input, residual, weight and bias."""
    if grad is None:
        assert grad_sum is not None
        grad = torch.zeros_like(grad_sum)
    if source is None:
        source = grad.detach()
    shape = tuple(source.shape[-dims:])
    # The gradients of weight and bias do not depend on their values.
    if wants[2] and weight is None:
        weight = grad.new_ones(shape)
    dsource, dweight, dbias = vjp(
        lambda x, w, b: _FORMULAS[int(kind)](x, shape, w, b, eps),
        (source, weight, grad.new_zeros(shape) if wants[3] else None),
        (wants[0] or wants[1], wants[2], wants[3]), (grad,),
    )  # fmt: skip
    if dsource is not None and grad_sum is not None:
        dsource = dsource + grad_sum
    dinput = dsource
    if wants[0] and dropout_p > 0.0:
        assert dsource is not None
        dinput = dropout(dsource, dropout_p, seed)
    return dinput if wants[0] else None, dsource if wants[1] else None, dweight, dbias
