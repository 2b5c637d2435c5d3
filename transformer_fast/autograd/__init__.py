"""One `torch.autograd.Function` per op, shared by all backends that have a backward.

A backend registers a pair of functions per op under its name (`register`). Both take and return
plain tensors; neither is differentiated. ``wants`` tells which gradients are asked for, in the
order of the results; what is not wanted may come back as anything.

    attention         forward(query, key, value, attn_mask, key_lengths, is_causal, scale,
                          dropout_p, seed, need_weights[, query_lengths[, longest]]) -> (output,
                          weights, shift, norm); weights empty if not needed; shift, norm: what
                          backward wants to know of the rows
                      backward(grad, grad_weights | None, query, key, value, attn_mask,
                          key_lengths, is_causal, scale, dropout_p, seed, output, weights, shift,
                          norm, wants[, query_lengths[, longest]]) -> gradients of query, key,
                          value, attn_mask
    linear            forward(input, weight, bias, activation, residual) -> (output, preactivation)
                      backward(grad, input, weight, activation, preactivation, wants)
                          -> gradients of input, weight, bias; that of residual is grad
    feed_forward      forward(input, weight1, bias1, weight2, bias2, activation, dropout_p, seed)
                          -> (output, kept)
                      backward(grad, input, weight1, weight2, activation, dropout_p, seed, kept,
                          wants)
                          -> gradients of input, weight1, bias1, weight2, bias2

``preactivation`` is what activation was applied to, empty without one; ``kept`` is that of the
hidden units, or, with ``keeps_preactivation=False``, anything else that backward wants to know.

Saved is what the gradients that are asked for need. In place of what they do not need backward gets
a tensor of the right shape (columns of a weight that was not saved either: any number) with
anything in it; a weight of a norm is None then.

Kernels have first derivatives only. With ``create_graph=True`` a backward differentiates the
reference's formula instead, which can be differentiated again; tensors with tangents, and calls
inside torch.func's transforms, never get here (`dispatch.select`).
"""

from .attention import Attention
from .feed_forward import FeedForward
from .function import differentiates_again, needs_function, pairs, register, savable, vjp
from .linear import Linear

__all__ = [
    "Attention",
    "FeedForward",
    "Linear",
    "differentiates_again",
    "needs_function",
    "pairs",
    "register",
    "savable",
    "vjp",
]
