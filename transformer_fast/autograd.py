"""One `torch.autograd.Function` per op, shared by all backends that have a backward.

A backend registers a pair of functions per op under its name (`register`). Both take and return
plain tensors; neither is differentiated. ``wants`` tells which gradients are asked for, in the
order of the results; what is not wanted may come back as anything.

    layer_norm        forward(input, normalized_shape, weight, bias, eps) -> (output, mean, rstd)
                      backward(grad, input, normalized_shape, weight, mean, rstd, wants)
                          -> gradients of input, weight, bias
    add_layer_norm    forward(input, residual, normalized_shape, weight, bias, eps, dropout_p, seed)
                          -> (normalized, sum, mean, rstd)
                      backward(grad, grad_sum | None, sum, normalized_shape, weight, mean, rstd,
                          dropout_p, seed, wants) -> gradients of input, residual, weight, bias
    attention         forward(query, key, value, attn_mask, key_lengths, is_causal, scale,
                          dropout_p, seed, need_weights) -> (output, weights, shift, norm); weights
                          empty if not needed; shift, norm: what backward wants to know of the rows
                      backward(grad, grad_weights | None, query, key, value, attn_mask,
                          key_lengths, is_causal, scale, dropout_p, seed, output, weights, shift,
                          norm, wants) -> gradients of query, key, value, attn_mask
    linear            forward(input, weight, bias, activation, residual) -> (output, preactivation)
                      backward(grad, input, weight, bias, activation, preactivation, wants)
                          -> gradients of input, weight, bias; that of residual is grad
    feed_forward      forward(input, weight1, bias1, weight2, bias2, activation, dropout_p, seed)
                          -> (output, preactivation)
                      backward(grad, input, weight1, bias1, weight2, activation, dropout_p, seed,
                          preactivation, wants)
                          -> gradients of input, weight1, bias1, weight2, bias2
    cross_entropy     forward(input, target, ignore_index, label_smoothing) -> (losses, known);
                          known: what backward wants to know of the rows
                      backward(grad, input, target, known, ignore_index, label_smoothing, wants)
                          -> gradient of input
    linear_cross_entropy
                      forward(input, weight, bias, target, ignore_index, label_smoothing)
                          -> (losses, known)
                      backward(grad, input, weight, bias, target, known, ignore_index,
                          label_smoothing, wants) -> gradients of input, weight, bias

``preactivation`` is what activation was applied to, or anything else that backward wants to keep.

A second derivative is refused with a sentence, and so is forward-mode differentiation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad

from .dispatch import OPS


class _Pair(NamedTuple):
    forward: Callable[..., Any]
    backward: Callable[..., Any]


_pairs: dict[str, dict[str, _Pair]] = {op: {} for op in OPS}


def register(
    op: str, backend: str, forward: Callable[..., Any], backward: Callable[..., Any]
) -> None:
    """Add a backend's pair for an op; a second one replaces the first."""
    _pairs[op][backend] = _Pair(forward, backward)


def needs_function(*tensors: Tensor | None) -> bool:
    """Whether a call with these tensors has to go through an autograd function.

    Raises NotImplementedError if one has a tangent, which a bare operator would lose in silence.
    """
    if forward_ad._current_level >= 0:
        _refuse_tangents(tensors)
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def _refuse_tangents(tensors: tuple[Tensor | None, ...]) -> None:
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                "the kernels have no forward-mode derivative; run the call under "
                "transformer_fast.use_backend('reference')"
            )


class _Function(torch.autograd.Function):
    """Takes all its arguments by position."""

    generate_vmap_rule = True

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """What torch's does, but for inspecting forward's signature: longer than many an op."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)  # type: ignore[no-untyped-call]
        args = unwrap_dead_wrappers(args)
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


class _NoSecondDerivative(_Function):
    """The identity on gradients; going back through it raises."""

    @staticmethod
    def forward(op: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.op = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:  # type: ignore[override]
        raise RuntimeError(
            f"the kernels of {ctx.op} have no second derivative; run the call under "
            "transformer_fast.use_backend('reference') to differentiate twice"
        )


def _once(op: str, found: Sequence[Tensor | None], *used: Tensor | None) -> tuple[Any, ...]:
    """The gradients, so marked that differentiating them raises if it would have to be non-zero."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return tuple(found)
    witnesses = [t for t in used if t is not None and t.requires_grad]
    if not witnesses:
        return tuple(found)
    present = [t for t in found if t is not None]
    marked = iter(_NoSecondDerivative.apply(op, len(present), *present, *witnesses))  # type: ignore[no-untyped-call]
    return tuple(None if t is None else next(marked) for t in found)


def _only(wants: Sequence[bool], found: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [t if want else None for want, t in zip(wants, found, strict=True)]


class LayerNorm(_Function):
    @staticmethod
    def forward(
        backend: str,
        input: Tensor,
        normalized_shape: tuple[int, ...],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        pair = _pairs["layer_norm"][backend]
        return pair.forward(input, normalized_shape, weight, bias, eps)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.backend, input, ctx.normalized_shape, weight, _, _ = inputs
        _, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, weight, mean, rstd)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * 6
        input, weight, mean, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad
        wants = needs[1], needs[3], needs[4]
        with torch.no_grad():
            found = _pairs["layer_norm"][ctx.backend].backward(
                grad, input, ctx.normalized_shape, weight, mean, rstd, wants
            )
        dinput, dweight, dbias = _once("layer_norm", _only(wants, found), grad, input, weight)
        return None, dinput, None, dweight, dbias, None


class AddLayerNorm(_Function):
    @staticmethod
    def forward(
        backend: str,
        input: Tensor,
        residual: Tensor,
        normalized_shape: tuple[int, ...],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        dropout_p: float,
        seed: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _pairs["add_layer_norm"][backend].forward(  # type: ignore[no-any-return]
            input, residual, normalized_shape, weight, bias, eps, dropout_p, seed
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.backend, _, _, ctx.normalized_shape, weight, _, _, ctx.dropout_p, seed = inputs
        _, sum, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(sum, weight, mean, rstd, seed)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, *_: Any
    ) -> tuple[Any, ...]:
        if grad is None and grad_sum is None:
            return (None,) * 9
        sum, weight, mean, rstd, seed = ctx.saved_tensors
        needs = ctx.needs_input_grad
        wants = needs[1], needs[2], needs[4], needs[5]
        with torch.no_grad():
            found = _pairs["add_layer_norm"][ctx.backend].backward(
                torch.zeros_like(sum) if grad is None else grad,
                grad_sum,
                sum,
                ctx.normalized_shape,
                weight,
                mean,
                rstd,
                ctx.dropout_p,
                seed,
                wants,
            )
        dinput, dresidual, dweight, dbias = _once(
            "add_layer_norm", _only(wants, found), grad, grad_sum, sum, weight
        )
        return None, dinput, dresidual, None, dweight, dbias, None, None, None


class Attention(_Function):
    @staticmethod
    def forward(
        backend: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        key_lengths: Tensor | None,
        is_causal: bool,
        scale: float,
        dropout_p: float,
        seed: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _pairs["attention"][backend].forward(  # type: ignore[no-any-return]
            query, key, value, attn_mask, key_lengths, is_causal, scale, dropout_p, seed,
            need_weights,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        backend, query, key, value, mask, lengths, causal, scale, dropout_p, seed, need = inputs
        output, weights, shift, norm = results
        ctx.backend, ctx.need_weights = backend, need
        ctx.is_causal, ctx.scale, ctx.dropout_p = causal, scale, dropout_p
        if need:
            ctx.mark_non_differentiable(shift, norm)
        else:
            ctx.mark_non_differentiable(weights, shift, norm)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            query, key, value, mask, lengths, seed, output, weights if need else None, shift, norm
        )

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, grad_weights: Tensor | None, *_: Any
    ) -> tuple[Any, ...]:
        if not ctx.need_weights:
            grad_weights = None
        if grad is None and grad_weights is None:
            return (None,) * 11
        saved = ctx.saved_tensors
        query, key, value, mask, lengths, seed, output, weights, shift, norm = saved
        wants = ctx.needs_input_grad[1:5]
        with torch.no_grad():
            found = _pairs["attention"][ctx.backend].backward(
                torch.zeros_like(output) if grad is None else grad,
                grad_weights,
                query,
                key,
                value,
                mask,
                lengths,
                ctx.is_causal,
                ctx.scale,
                ctx.dropout_p,
                seed,
                output,
                weights,
                shift,
                norm,
                wants,
            )
        dquery, dkey, dvalue, dmask = _once(
            "attention", _only(wants, found), grad, grad_weights, query, key, value, mask
        )
        return None, dquery, dkey, dvalue, dmask, None, None, None, None, None, None


class Linear(_Function):
    @staticmethod
    def forward(
        backend: str,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        pair = _pairs["linear"][backend]
        return pair.forward(input, weight, bias, activation, residual)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        ctx.backend, input, weight, bias, ctx.activation, _ = inputs
        _, preactivation = results
        ctx.mark_non_differentiable(preactivation)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, weight, bias, preactivation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * 6
        input, weight, bias, preactivation = ctx.saved_tensors
        wants = ctx.needs_input_grad[1:4]
        found: Sequence[Tensor | None] = (None, None, None)
        if any(wants):
            with torch.no_grad():
                found = _pairs["linear"][ctx.backend].backward(
                    grad, input, weight, bias, ctx.activation, preactivation, wants
                )
        dinput, dweight, dbias = _once("linear", _only(wants, found), grad, input, weight)
        return None, dinput, dweight, dbias, None, grad if ctx.needs_input_grad[5] else None


class FeedForward(_Function):
    @staticmethod
    def forward(
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
        return _pairs["feed_forward"][backend].forward(  # type: ignore[no-any-return]
            input, weight1, bias1, weight2, bias2, activation, dropout_p, seed
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        backend, input, weight1, bias1, weight2, _, activation, dropout_p, seed = inputs
        _, preactivation = results
        ctx.backend, ctx.activation, ctx.dropout_p = backend, activation, dropout_p
        ctx.mark_non_differentiable(preactivation)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, weight1, bias1, weight2, seed, preactivation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * 9
        input, weight1, bias1, weight2, seed, preactivation = ctx.saved_tensors
        wants = ctx.needs_input_grad[1:6]
        with torch.no_grad():
            found = _pairs["feed_forward"][ctx.backend].backward(
                grad,
                input,
                weight1,
                bias1,
                weight2,
                ctx.activation,
                ctx.dropout_p,
                seed,
                preactivation,
                wants,
            )
        found = _once("feed_forward", _only(wants, found), grad, input, weight1, bias1, weight2)
        return None, *found, None, None, None


class CrossEntropy(_Function):
    @staticmethod
    def forward(
        backend: str, input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
    ) -> tuple[Tensor, Tensor]:
        pair = _pairs["cross_entropy"][backend]
        return pair.forward(input, target, ignore_index, label_smoothing)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        ctx.backend, input, target, ctx.ignore_index, ctx.label_smoothing = inputs
        _, known = results
        ctx.mark_non_differentiable(known)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, target, known)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * 5
        input, target, known = ctx.saved_tensors
        wants = (ctx.needs_input_grad[1],)
        with torch.no_grad():
            found = _pairs["cross_entropy"][ctx.backend].backward(
                grad, input, target, known, ctx.ignore_index, ctx.label_smoothing, wants
            )
        (dinput,) = _once("cross_entropy", _only(wants, found), grad, input)
        return None, dinput, None, None, None


class LinearCrossEntropy(_Function):
    @staticmethod
    def forward(
        backend: str,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        label_smoothing: float,
    ) -> tuple[Tensor, Tensor]:
        return _pairs["linear_cross_entropy"][backend].forward(  # type: ignore[no-any-return]
            input, weight, bias, target, ignore_index, label_smoothing
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        ctx.backend, input, weight, bias, target, ctx.ignore_index, ctx.label_smoothing = inputs
        _, known = results
        ctx.mark_non_differentiable(known)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, weight, bias, target, known)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * 7
        input, weight, bias, target, known = ctx.saved_tensors
        wants = ctx.needs_input_grad[1:4]
        with torch.no_grad():
            found = _pairs["linear_cross_entropy"][ctx.backend].backward(
                grad, input, weight, bias, target, known, ctx.ignore_index, ctx.label_smoothing,
                wants,
            )  # fmt: skip
        found = _once("linear_cross_entropy", _only(wants, found), grad, input, weight, bias)
        return None, *found, None, None, None
