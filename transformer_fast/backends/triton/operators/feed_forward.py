"""feed_forward on Triton."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .... import reference
from ....autograd import FeedForward, needs_function, register
from .define import define, given


def _run(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
    save: bool,
) -> tuple[Tensor, ...]:
    from ..feed_forward import feed_forward_forward

    output, saved = feed_forward_forward(
        input, weight1, bias1, weight2, bias2, activation, dropout_p, seed, save
    )
    return output, given(saved, output)


def _run_backward(
    grad: Tensor,
    input: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
    saved: Tensor,
    need_input: bool,
    need_bias1: bool,
    need_bias2: bool,
) -> tuple[Tensor | None, ...]:
    from ..feed_forward import feed_forward_backward

    return feed_forward_backward(
        grad, input, weight1, weight2, activation, dropout_p, seed, saved, need_input, need_bias1,
        need_bias2,
    )  # fmt: skip


_forward = define(
    "triton_feed_forward(Tensor input, Tensor weight1, Tensor? bias1, Tensor weight2,"
    " Tensor? bias2, str activation, float dropout_p, Tensor? seed, bool save)"
    " -> (Tensor, Tensor)",
    _run,
)
_backward = define(
    "triton_feed_forward_backward(Tensor grad, Tensor input, Tensor weight1, Tensor weight2,"
    " str activation, float dropout_p, Tensor? seed, Tensor saved, bool need_input,"
    " bool need_bias1, bool need_bias2) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
)


def _feed_forward_forward(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, ...]:
    return _forward(  # type: ignore[no-any-return]
        input, weight1, bias1, weight2, bias2, activation, dropout_p, seed, True
    )


def _feed_forward_backward(
    grad: Tensor,
    input: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
    kept: Tensor,
    wants: Sequence[bool],
) -> tuple[Tensor, ...]:
    return _backward(  # type: ignore[no-any-return]
        grad, input, weight1, weight2, activation, dropout_p, seed, kept, wants[0], wants[2],
        wants[4],
    )  # fmt: skip


register(
    "feed_forward", "triton", _feed_forward_forward, _feed_forward_backward,
    keeps_preactivation=False,  # of relu the hidden units are kept
)  # fmt: skip


def feed_forward(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    arguments = (input, weight1, bias1, weight2, bias2, activation, dropout_p, seed)
    if input.numel() == 0 or weight1.numel() == 0 or weight2.numel() == 0:
        return reference.feed_forward(*arguments)
    if needs_function(input, weight1, bias1, weight2, bias2):
        return FeedForward.apply("triton", *arguments)[0]  # type: ignore[no-untyped-call, no-any-return]
    output: Tensor = _forward(*arguments, False)[0]
    return output
