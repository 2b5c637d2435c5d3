"""attention on Triton."""

from __future__ import annotations

from torch import Tensor

from ....functional.attention import BACKWARD, TRAINING, attention_on
from .define import implement


def _longest(queries: int, keys: int) -> tuple[int, int] | None:
    return None if queries < 0 else (queries, keys)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    need_weights: bool,
    query_lengths: Tensor | None = None,
    longest_queries: int = -1,
    longest_keys: int = -1,
) -> tuple[Tensor | None, ...]:
    from ..attention import attention_forward, make_problem
    from ..attention_weights import attention_weights

    arguments = (
        query, key, value, mask, key_lengths, is_causal, scale, dropout_p, seed, query_lengths,
        _longest(longest_queries, longest_keys),
    )  # fmt: skip
    output, row_max, row_sum = attention_forward(*arguments)
    weights = (
        attention_weights(make_problem(*arguments), row_max, row_sum) if need_weights else None
    )
    return output, weights, row_max, row_sum


def _backward(
    grad: Tensor,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    output: Tensor,
    weights: Tensor | None,
    row_max: Tensor,
    row_sum: Tensor,
    want_query: bool,
    want_key: bool,
    want_value: bool,
    want_mask: bool,
    query_lengths: Tensor | None = None,
    longest_queries: int = -1,
    longest_keys: int = -1,
) -> tuple[Tensor | None, ...]:
    from ..attention_bwd import attention_backward

    found = attention_backward(
        grad, grad_weights, query, key, value, mask, key_lengths, is_causal, scale, dropout_p, seed,
        output, weights, row_max, row_sum, want_mask, query_lengths,
        _longest(longest_queries, longest_keys),
    )  # fmt: skip
    wants = (want_query, want_key, want_value, want_mask)
    return tuple([each if want else None for want, each in zip(wants, found, strict=True)])


implement(TRAINING, _forward)
implement(BACKWARD, _backward)
attention = attention_on("triton", query_lengths=True)
