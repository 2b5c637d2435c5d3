"""Generation methods, the choice of tokens from logits, and the result of generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Union

import torch
from torch import Tensor

from ..._context import is_traced
from ...dispatch import Call, find
from ...ops.arguments import LayerArguments


class Generated(NamedTuple):
    """Result of `generate`, for B sequences of at most L new tokens.

    With ``BeamSearch(n_best=n)`` all three tensors have a second dimension of n hypotheses, best first.
    """

    #: int64 (B, L): the new tokens, including the end token, then padding.
    tokens: Tensor
    #: int64 (B,): number of real tokens.
    lengths: Tensor
    #: fp32 (B,): beam search: log-probabilities divided by the length penalty; else None.
    scores: Tensor | None


@dataclass(frozen=True)
class Greedy:
    """Chooses the most probable token at each step."""


@dataclass(frozen=True)
class Sampling:
    """Draws a random token at each step from ``softmax(logits / temperature)``.

    Args:
        temperature: positive; below 1 sharpens the distribution, above 1 flattens it.
        top_k: draw from the k most probable tokens; None: from all.
        top_p: draw from the fewest most probable tokens with at least this total probability (after
            top_k), at least one; None: from all.
        seed: equal seeds give equal tokens; None: use PyTorch's generator.

    Source: Fan et al. 2018 (top_k), Holtzman et al. 2020 (top_p).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature > 0.0:
            raise ValueError(
                f"temperature must be above 0, not {self.temperature}; Greedy() is its limit at 0"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, or None, not {self.top_k}")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], or be None, not {self.top_p}")


@dataclass(frozen=True)
class BeamSearch:
    """Beam search: keeps the ``beams`` best sequences at each step.

    A sequence's score is ``log P(tokens) / ((5 + length) / 6) ** length_penalty``; its length counts
    the new tokens and the end token. At each step the ``beams`` best extensions that do not end stay
    alive. Extensions that end are finished if they are among the ``beams`` best of all. Sequences alive
    after max_new_tokens count as finished.

    Args:
        beams: number of live sequences; at most the size of the vocabulary.
        length_penalty: above 0 favours long sequences, below 0 short ones.
        early_stop: True: stop as soon as ``beams`` sequences are finished. False: stop when no live
            sequence can become better than the finished ones to be returned; this never changes the
            result.
        n_best: number of sequences returned for each source, best first; None: only the best. Missing
            ones have length 0 and score -inf.

    Source: "Attention Is All You Need", section 6.1; Wu et al. 2016, section 7, for the penalty.
    """

    beams: int = 4
    length_penalty: float = 0.6
    early_stop: bool = False
    n_best: int | None = None

    def __post_init__(self) -> None:
        if self.beams < 1:
            raise ValueError(f"beams must be at least 1, not {self.beams}")
        if self.n_best is not None and not 1 <= self.n_best <= self.beams:
            raise ValueError(
                f"n_best must lie between 1 and beams={self.beams}, or be None, not {self.n_best}"
            )


Method = Union[Greedy, Sampling, BeamSearch]  # noqa: UP007 - evaluated by Python 3.10 too


_BLOCK = 64
#: Number of tokens that top_p sorts before it sorts the whole vocabulary.
_FIRST = 256


def _in_blocks(logits: Tensor) -> bool:
    # PyTorch's topk over long CPU rows is not vectorised; maxima of blocks are.
    return logits.device.type == "cpu" and logits.shape[-1] >= 16 * _BLOCK


def bind_best(sample: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns the argmax function for logits like these: (R, V) to (R,), the first of equal maxima."""
    kernel = None if is_traced() else find(Call("argmax", (sample,), False, LayerArguments()))
    return partial(torch.argmax, dim=-1) if kernel is None else kernel.function


def top(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k highest logits of each row (R, V), highest first, and their indices; both (R, k)."""
    rows, size = logits.shape
    blocks = size // _BLOCK
    if not _in_blocks(logits) or 4 * k >= blocks:
        values, indices = logits.topk(k, dim=-1)
        return values, indices
    body = logits[:, : blocks * _BLOCK].view(rows, blocks, _BLOCK)
    # The k highest values are in the k blocks with the highest maxima.
    block = body.amax(dim=-1).topk(k, dim=-1).indices
    found = body.gather(1, block[..., None].expand(-1, -1, _BLOCK)).flatten(1)
    found = torch.cat((found, logits[:, blocks * _BLOCK :]), dim=1)
    values, place = found.topk(k, dim=-1)
    column = block.gather(1, (place // _BLOCK).clamp_(max=k - 1)) * _BLOCK + place % _BLOCK
    rest = place - k * _BLOCK
    return values, torch.where(rest >= 0, rest + blocks * _BLOCK, column)


def _pick(values: Tensor, draws: Tensor) -> Tensor:
    """Returns indices (R,) drawn in proportion to values (R, n) >= 0, by uniform draws (R,) in [0, 1)."""
    sums = values.cumsum(dim=-1)
    total = sums[:, -1]
    # Limited below the total: rounding could otherwise select a trailing value of 0.
    place = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(sums, place[:, None], right=True).squeeze(1)
    return found.clamp_(max=values.shape[1] - 1)  # with NaN, searchsorted finds n


def _pick_nucleus(values: Tensor, total: Tensor, top_p: float, draws: Tensor) -> Tensor:
    """`_pick` among sorted values, cut off where their sum reaches top_p of the total (R, 1)."""
    before = values.cumsum(dim=-1) - values
    return _pick(values.masked_fill(before >= top_p * total, 0.0), draws)


def sampler(method: Sampling, vocab_size: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a function of logits (R, V) and uniform draws (R,) in [0, 1) that returns tokens (R,)."""
    temperature, top_k, top_p = method.temperature, method.top_k, method.top_p

    def values_of(logits: Tensor, highest: Tensor) -> Tensor:
        return ((logits - highest) / temperature).exp()

    def from_all(logits: Tensor, draws: Tensor) -> Tensor:
        return _pick(values_of(logits, logits.amax(dim=-1, keepdim=True)), draws)

    def from_top(logits: Tensor, draws: Tensor) -> Tensor:
        assert top_k is not None
        scores, tokens = top(logits, top_k)
        values = values_of(scores, scores[:, :1])
        if top_p is None:
            place = _pick(values, draws)
        else:
            place = _pick_nucleus(values, values.sum(dim=-1, keepdim=True), top_p, draws)
        return tokens.gather(1, place[:, None]).squeeze(1)

    def from_nucleus(logits: Tensor, draws: Tensor) -> Tensor:
        assert top_p is not None
        scores, tokens = top(logits, min(_FIRST, vocab_size))
        highest = scores[:, :1]
        total = values_of(logits, highest).sum(dim=-1, keepdim=True)
        values = values_of(scores, highest)
        place = _pick_nucleus(values, total, top_p, draws)
        found = tokens.gather(1, place[:, None]).squeeze(1)
        flat = (values.sum(dim=-1, keepdim=True) < top_p * total).squeeze(1).nonzero().squeeze(1)
        if flat.numel():
            # In these rows the first tokens do not reach top_p: sort all tokens.
            scores, tokens = logits[flat].sort(dim=-1, descending=True)
            values = values_of(scores, scores[:, :1])
            place = _pick_nucleus(values, total[flat], top_p, draws[flat])
            found[flat] = tokens.gather(1, place[:, None]).squeeze(1)
        return found

    draw = from_top if top_k is not None and top_k < vocab_size else from_all
    if draw is from_all and top_p is not None:
        draw = from_nucleus
    return lambda logits, draws: draw(logits.float(), draws)
