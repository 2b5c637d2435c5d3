"""Greedy decoding and sampling: one sequence of each source, one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .choose import bind_best, sampler
from .methods import Generated, Method, Sampling

# Asking a GPU whether all sequences have ended makes the host wait for it.
_GPU_STEPS_BETWEEN_LOOKS = 8


class StepDecoder(Protocol):
    """What searches need: `CachedDecoder` or `RecomputedDecoder`."""

    def start(self, tokens: Tensor) -> Tensor: ...
    def step(self, tokens: Tensor) -> Tensor: ...
    def spread(self, beams: int) -> None: ...
    def reorder(self, rows: Tensor) -> None: ...
    def keep(self, sources: Tensor) -> None: ...


@dataclass(frozen=True)
class Task:
    """What is to be generated, whatever the method.

    Rows of ``prompt`` (B, P) may be prompts of different lengths (B,), on the CPU and at least 1
    each: the rows start together, and where a prompt goes on its tokens stand in for those that
    would be chosen.
    """

    prompt: Tensor
    lengths: Tensor | None
    max_new_tokens: int
    #: -1: nothing ends a sequence.
    end_token: int
    pad_token: int

    @property
    def looks(self) -> int:
        """How many steps lie between two looks at whether sequences have ended."""
        return 1 if self.prompt.device.type == "cpu" else _GPU_STEPS_BETWEEN_LOOKS

    def check(self, logits: Tensor) -> None:
        if not -1 <= self.end_token < logits.shape[1]:
            raise ValueError(
                f"end_token must be a token id in [0, {logits.shape[1]}), or -1 if nothing ends a "
                f"sequence, not {self.end_token}"
            )

    def padding(self, *shape: int) -> Tensor:
        return torch.full(shape, self.pad_token, device=self.prompt.device)


def pays(remaining: int, rows: int) -> bool:
    """Whether ended sequences should leave the batch.

    Leaving copies all keys and values about once, as much memory traffic as some two steps'
    attention; it is worth it once a quarter of every further step would be waste.
    """
    return 4 * remaining <= 3 * rows


def _chooser(
    method: Method, task: Task, positions: int, logits: Tensor
) -> Callable[[Tensor, int, Tensor | None], Tensor]:
    """A function (logits (R, V), position, sources (R,) or None for all) -> tokens (R,), for logits
    like these."""
    if not isinstance(method, Sampling):
        best = bind_best(logits)
        return lambda logits, position, sources: best(logits)
    device = task.prompt.device
    generator = None
    if method.seed is not None:
        generator = torch.Generator(device).manual_seed(method.seed)
    # Each source has its own draws, so that its tokens do not depend on who has left the batch.
    shape = (positions, task.prompt.shape[0])
    draws = torch.rand(shape, generator=generator, device=device)
    sample = sampler(method, logits.shape[1])

    def choose(logits: Tensor, position: int, sources: Tensor | None) -> Tensor:
        mine = draws[position]
        return sample(logits, mine if sources is None else mine.index_select(0, sources))

    return choose


@torch.no_grad()
def one_by_one(decoder: StepDecoder, task: Task, method: Method) -> Iterator[Tensor]:
    """The token (B,) of each position from the shortest prompt's end on; padding where none is."""
    prompt, lengths = task.prompt, task.lengths
    sources, longest = prompt.shape
    first = longest if lengths is None else int(lengths.min())
    last = longest if lengths is None else int(lengths.max())
    total = last + task.max_new_tokens
    if lengths is not None:
        lengths = lengths.to(prompt.device)
    done = torch.zeros(sources, dtype=torch.bool, device=prompt.device)
    alive: Tensor | None = None  # which sources the rows are; None: all of them
    any_done = False
    logits = decoder.start(prompt[:, :first])
    task.check(logits)
    choose = _chooser(method, task, total - first, logits)
    for position in range(first, total):
        token = choose(logits, position - first, alive)
        hidden = done if any_done else None
        if lengths is not None:
            mine = lengths if alive is None else lengths[alive]
            ended = position + 1 >= mine + task.max_new_tokens
            if position < last:
                forced = position < mine
                column = prompt[:, position] if alive is None else prompt[alive, position]
                token = torch.where(forced, column, token)
                hidden = done | forced
                ended |= (token == task.end_token) & ~forced
            else:
                ended |= token == task.end_token
        else:
            ended = token == task.end_token
        shown = token if hidden is None else token.masked_fill(hidden, task.pad_token)
        if alive is None:
            yield shown
        else:
            yield task.padding(sources).index_copy_(0, alive, shown)
        if position + 1 == total:
            return
        done |= ended
        any_done = True
        if (position - first) % task.looks == 0:
            remaining = done.shape[0] - int(done.sum())
            any_done = remaining < done.shape[0]
            if remaining == 0:
                return
            if pays(remaining, done.shape[0]):
                rows = (~done).nonzero().squeeze(1)
                decoder.keep(rows)
                alive = rows if alive is None else alive[rows]
                token, done, any_done = token[rows], done[rows], False
        logits = decoder.step(token)


def generate_incrementally(decoder: StepDecoder, task: Task, method: Method) -> Generated:
    """All of `incremental`, each row from its prompt's end on."""
    columns = list(one_by_one(decoder, task, method))
    found = torch.stack(columns, dim=1)
    if task.lengths is not None:
        # Rows with longer prompts began later; each is moved to the left by as much.
        delay = (task.lengths - task.lengths.min()).to(found.device)
        width = min(found.shape[1], task.max_new_tokens)
        place = delay[:, None] + torch.arange(width, device=found.device)
        inside = place < found.shape[1]
        found = found.gather(1, place.clamp(max=found.shape[1] - 1))
        found = found.masked_fill(~inside, task.pad_token)
    return _trimmed(found, task)


def _trimmed(tokens: Tensor, task: Task) -> Generated:
    """Lengths up to the end token, and no columns that are padding in all rows."""
    ends = tokens == task.end_token
    width = tokens.shape[1]
    first_end = torch.where(ends.any(dim=1), ends.int().argmax(dim=1) + 1, width)
    lengths = first_end.clamp(max=task.max_new_tokens)
    used = int(lengths.max()) if lengths.numel() else 0
    return Generated(tokens[:, :used], lengths, None)
