"""feed_forward on Triton."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .... import reference
from ....autograd import FeedForward, needs_function, register
from .define import absent, define, given


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


def _fake(
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
    output = input.new_empty((*input.shape[:-1], weight2.shape[0]))
    if not save:
        return output, absent(output)
    return output, output.new_empty((input.numel() // input.shape[-1], weight1.shape[0]))


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


def _fake_backward(
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
) -> tuple[Tensor, ...]:
    return (
        input.new_empty(input.shape) if need_input else absent(grad),
        weight1.new_empty(weight1.shape),
        weight1.new_empty(weight1.shape[:1]) if need_bias1 else absent(grad),
        weight2.new_empty(weight2.shape),
        weight2.new_empty(weight2.shape[:1]) if need_bias2 else absent(grad),
    )


_forward = define(
    "triton_feed_forward(Tensor input, Tensor weight1, Tensor? bias1, Tensor weight2,"
    " Tensor? bias2, str activation, float dropout_p, Tensor? seed, bool save)"
    " -> (Tensor, Tensor)",
    _run,
    _fake,
)
_backward = define(
    "triton_feed_forward_backward(Tensor grad, Tensor input, Tensor weight1, Tensor weight2,"
    " str activation, float dropout_p, Tensor? seed, Tensor saved, bool need_input,"
    " bool need_bias1, bool need_bias2) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
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
