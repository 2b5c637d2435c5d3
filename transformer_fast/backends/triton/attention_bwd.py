"""The backward of attention: launchers of `attention_bwd_kernel` and `attention_bias_kernel`."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import Problem, gradient_like, make_problem
from .attention_bias_kernel import attention_bias_kernel
from .attention_bwd_kernel import attention_backward_key_kernel, attention_backward_query_kernel
from .runtime import ceil_div, launch, multiprocessors, with_unit_stride


def _query_gradient(
    problem: Problem,
    output: Tensor,
    grad_output: Tensor,
    grad_weights: Tensor | None,
    extra: Tensor | None,
    shift: Tensor,
    norm: Tensor,
) -> tuple[Tensor, Tensor]:
    """(dQ, delta)."""
    q, k, v, mask = problem.query, problem.key, problem.value, problem.mask
    batch, heads, queries, keys = problem.sizes
    grad_query = gradient_like(q, problem.packed)
    delta = torch.empty_like(shift)
    tile = problem.tile("attention_backward_query")
    lists = problem.lists(tile)
    launch(
        attention_backward_query_kernel,
        (ceil_div(queries, tile.queries) * batch * heads,),
        q,
        k,
        v,
        output,
        grad_output,
        grad_weights,
        extra,
        mask.data,
        problem.lengths,
        problem.query_lengths,
        problem.seed,
        None if lists is None else lists.counts,
        None if lists is None else lists.numbers,
        shift,
        norm,
        delta,
        grad_query,
        *problem.strides(q),
        *problem.strides(k),
        *problem.strides(v),
        *problem.strides(output),
        *problem.strides(grad_output),
        *problem.strides(grad_query),
        *mask.strides,
        problem.stride_length,
        problem.stride_query_length,
        *problem.list_arguments(lists),
        heads,
        problem.group,
        queries,
        keys,
        problem.kernel_scale,
        problem.scale,
        problem.dropout.limit,
        problem.dropout.scale,
        LISTED=lists is not None,
        RAGGED=problem.lengths is None and keys % tile.keys != 0,
        PACKED=problem.packed,
        **problem.options(tile),
    )
    return grad_query, delta


def _key_gradients(
    problem: Problem,
    grad_output: Tensor,
    grad_weights: Tensor | None,
    shift: Tensor,
    norm: Tensor,
    delta: Tensor,
) -> tuple[Tensor, Tensor]:
    """(dK, dV)."""
    q, k, v, mask = problem.query, problem.key, problem.value, problem.mask
    batch, _, queries, keys = problem.sizes
    grad_key = gradient_like(k, problem.packed)
    grad_value = gradient_like(v, problem.packed)
    tile = problem.tile("attention_backward_key")
    lists = problem.lists(tile, by_keys=True)
    launch(
        attention_backward_key_kernel,
        (ceil_div(keys, tile.keys) * batch * k.shape[1],),
        q,
        k,
        v,
        grad_output,
        grad_weights,
        mask.data,
        problem.lengths,
        problem.query_lengths,
        problem.seed,
        None if lists is None else lists.counts,
        None if lists is None else lists.numbers,
        shift,
        norm,
        delta,
        grad_key,
        grad_value,
        *problem.strides(q),
        *problem.strides(k),
        *problem.strides(v),
        *problem.strides(grad_output),
        *problem.strides(grad_key),
        *problem.strides(grad_value),
        *mask.strides,
        problem.stride_length,
        problem.stride_query_length,
        *problem.list_arguments(lists),
        k.shape[1],
        problem.group,
        queries,
        keys,
        problem.kernel_scale,
        problem.scale,
        problem.dropout.limit,
        problem.dropout.scale,
        LISTED=lists is not None,
        RAGGED=problem.query_lengths is None and queries % tile.queries != 0,
        RAGGED_KEYS=mask.data is not None and keys % tile.keys != 0,
        PACKED=problem.packed,
        **problem.options(tile),
    )
    return grad_key, grad_value


def _mask_gradient(
    problem: Problem,
    owner: Tensor,
    grad_output: Tensor,
    grad_weights: Tensor | None,
    shift: Tensor,
    norm: Tensor,
    delta: Tensor,
) -> Tensor:
    q, k, v, mask = problem.query, problem.key, problem.value, problem.mask
    batch, heads, queries, keys = problem.sizes
    # The mask's own sizes count, not its strides: expanding it is autograd's business.
    shape = (*(1,) * (4 - owner.dim()), *owner.shape)
    if shape[3] == 1:
        return torch.zeros(
            owner.shape, dtype=owner.dtype, device=owner.device
        )  # rows of dS add up to 0
    tile = problem.tile("attention_bias")
    own_tiles = ceil_div(shape[2], tile.queries) * ceil_div(shape[3], tile.keys)
    programs = shape[0] * shape[1] * own_tiles
    items = (batch // shape[0]) * (heads // shape[1])
    items *= ceil_div(queries, tile.queries) if shape[2] == 1 else 1
    splits = max(1, min(items, 4 * multiprocessors(q.device) // programs))
    kind = owner.dtype if splits == 1 else torch.float32
    shares = torch.empty((splits, *shape), dtype=kind, device=q.device)
    launch(
        attention_bias_kernel,
        (splits * programs,),
        q,
        k,
        v,
        grad_output,
        grad_weights,
        mask.data,
        problem.lengths,
        problem.query_lengths,
        problem.seed,
        shift,
        norm,
        delta,
        shares,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *grad_output.stride()[:3],
        *mask.strides,
        problem.stride_length,
        problem.stride_query_length,
        batch,
        heads,
        problem.group,
        queries,
        keys,
        *shape[:3],
        splits,
        problem.kernel_scale,
        problem.dropout.limit,
        problem.dropout.scale,
        SUM_T=shape[2] == 1,
        **problem.options(tile),
    )
    total = shares[0] if splits == 1 else shares.sum(0).to(owner.dtype)
    return total.reshape(owner.shape)


def attention_backward(
    grad_output: Tensor,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    output: Tensor,
    weights: Tensor | None,
    shift: Tensor,
    norm: Tensor,
    want_query: bool,
    want_key: bool,
    want_value: bool,
    want_mask: bool,
    query_lengths: Tensor | None = None,
    longest_queries: int = -1,
    longest_keys: int = -1,
) -> tuple[Tensor | None, ...]:
    """The operator ``attention_backward``: gradients of query, key, value and the additive attn_mask.

    ``output``, ``shift`` and ``norm`` are what the forward returned. ``grad_weights`` is the
    gradient of the returned weights, and then ``weights`` are those.
    """
    problem = make_problem(
        query, key, value, attn_mask, key_lengths, is_causal, scale, dropout_p, seed, query_lengths,
        longest_queries, longest_keys,
    )  # fmt: skip
    grad_output = with_unit_stride(grad_output)
    extra = None
    if grad_weights is not None:
        assert weights is not None
        grad_weights = grad_weights.contiguous()
        extra = (weights.float() * grad_weights.float()).sum(-1)
    grad_query, delta = _query_gradient(
        problem, output, grad_output, grad_weights, extra, shift, norm
    )
    grad_key, grad_value = _key_gradients(problem, grad_output, grad_weights, shift, norm, delta)
    if problem.sizes[3] == 1:
        # The weight of an only key is constant; NaN stays NaN.
        grad_query.mul_(0.0)
        grad_key.mul_(0.0)
    grad_mask = None
    if want_mask:
        assert attn_mask is not None
        grad_mask = _mask_gradient(
            problem, attn_mask, grad_output, grad_weights, shift, norm, delta
        )
    return (
        grad_query if want_query else None,
        grad_key if want_key else None,
        grad_value if want_value else None,
        grad_mask,
    )
