"""Choosing tokens from logits: the best, the k best, or random ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .methods import Sampling

_BLOCK = 64
#: How many tokens top_p sorts first, before it sorts the whole vocabulary.
_FIRST = 256


def _in_blocks(logits: Tensor) -> bool:
    # torch's argmax and topk over long CPU rows are not vectorised; maxima of blocks are.
    return logits.device.type == "cpu" and logits.shape[-1] >= 16 * _BLOCK


def best(logits: Tensor) -> Tensor:
    """The index (R,) of each row's highest logit (R, V), the first of equals."""
    if not _in_blocks(logits):
        return logits.argmax(dim=-1)
    rows, size = logits.shape
    blocks = size // _BLOCK
    body = logits[:, : blocks * _BLOCK].view(rows, blocks, _BLOCK)
    highest, block = body.amax(dim=-1).max(dim=-1)
    inside = body[torch.arange(rows), block].argmax(dim=-1)
    index = block * _BLOCK + inside
    if blocks * _BLOCK == size:
        return index
    rest, place = logits[:, blocks * _BLOCK :].max(dim=-1)
    return torch.where(rest > highest, place + blocks * _BLOCK, index)


def top(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest logits of each row (R, V), highest first, and their indices; both (R, k)."""
    rows, size = logits.shape
    blocks = size // _BLOCK
    if not _in_blocks(logits) or 4 * k >= blocks:
        values, indices = logits.topk(k, dim=-1)
        return values, indices
    body = logits[:, : blocks * _BLOCK].view(rows, blocks, _BLOCK)
    # The k highest values lie in the k blocks with the highest maxima.
    block = body.amax(dim=-1).topk(k, dim=-1).indices
    found = body.gather(1, block[..., None].expand(-1, -1, _BLOCK)).flatten(1)
    found = torch.cat((found, logits[:, blocks * _BLOCK :]), dim=1)
    values, place = found.topk(k, dim=-1)
    column = block.gather(1, (place // _BLOCK).clamp_(max=k - 1)) * _BLOCK + place % _BLOCK
    rest = place - k * _BLOCK
    return values, torch.where(rest >= 0, rest + blocks * _BLOCK, column)


def _pick(values: Tensor, draws: Tensor) -> Tensor:
    """Index (R,) drawn in proportion to values (R, n) >= 0, by one uniform draw (R,) in [0, 1)."""
    sums = values.cumsum(dim=-1)
    total = sums[:, -1]
    # Below the total even after rounding, so that no value of 0 is ever picked.
    place = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(sums, place[:, None], right=True).squeeze(1)
    return found.clamp_(max=values.shape[1] - 1)  # NaN is not below anything


def _nucleus(values: Tensor, total: Tensor, top_p: float) -> Tensor:
    """Probabilities (R, n), highest first, as 0 behind the first that reach top_p of the total."""
    before = values.cumsum(dim=-1) - values
    return values.masked_fill(before >= top_p * total, 0.0)


def sampler(method: Sampling, vocab_size: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A function from logits (R, V) and uniform draws (R,) in [0, 1) to tokens (R,)."""
    temperature, top_p = method.temperature, method.top_p
    top_k = vocab_size if method.top_k is None else min(method.top_k, vocab_size)

    def sample(logits: Tensor, draws: Tensor) -> Tensor:
        logits = logits.float()
        if top_k == vocab_size and top_p is None:
            scores = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
            return _pick(scores.exp(), draws)
        if top_k < vocab_size:
            scores, tokens = top(logits, top_k)
            values = ((scores - scores[:, :1]) / temperature).exp()
            total = values.sum(dim=-1, keepdim=True)
        else:
            scores, tokens = top(logits, min(_FIRST, vocab_size))
            highest = scores[:, :1]
            total = ((logits - highest) / temperature).exp().sum(dim=-1, keepdim=True)
            values = ((scores - highest) / temperature).exp()
            assert top_p is not None
            if bool((values.sum(dim=-1, keepdim=True) < top_p * total).any()):
                scores, tokens = logits.sort(dim=-1, descending=True)
                values = ((scores - highest) / temperature).exp()
        if top_p is not None:
            values = _nucleus(values, total, top_p)
        return tokens.gather(1, _pick(values, draws)[:, None]).squeeze(1)

    return sample
