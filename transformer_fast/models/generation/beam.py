"""Beam search, for all sources at once, without a look at the data between the steps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .choose import top
from .incremental import StepDecoder, Task, pays
from .methods import BeamSearch, Generated


def penalty(length: int, power: float) -> float:
    return ((5.0 + length) / 6.0) ** power


class _History:
    """The tokens of all hypotheses as a tree: each step's tokens and where they hang.

    A hypothesis is known by its last token's place, ``step * beams + beam``; -1 is the prompt.
    """

    def __init__(self, task: Task, beams: int) -> None:
        shape = (task.max_new_tokens, task.prompt.shape[0], beams)
        self.beams = beams
        self.tokens = task.prompt.new_zeros(shape)
        self.parents = task.prompt.new_zeros(shape)

    def add(self, step: int, sources: Tensor, tokens: Tensor, parents: Tensor) -> None:
        """``parents`` (b, beams): the beams of the step before."""
        self.tokens[step].index_copy_(0, sources, tokens)
        self.parents[step].index_copy_(0, sources, parents)

    def read(self, places: Tensor, ended: Tensor, end_token: int, pad_token: int) -> Generated:
        """The hypotheses (B, n) at these places, those that ended with the end token behind."""
        steps = torch.div(places, self.beams, rounding_mode="floor")
        beam = places.remainder(self.beams)
        lengths = steps + 1 + ended
        width = int(lengths.max()) if lengths.numel() else 0
        found = places.new_empty((*places.shape, width))
        rows = torch.arange(places.shape[0], device=places.device)[:, None]
        for step in range(width - 1, -1, -1):
            on = steps >= step
            found[..., step] = torch.where(on, self.tokens[step][rows, beam], pad_token)
            beam = torch.where(on, self.parents[step][rows, beam], beam)
        at_end = (steps + 1)[..., None] == torch.arange(width, device=places.device)
        found.masked_fill_(at_end & ended[..., None], end_token)
        return Generated(found, lengths, None)


class _Finished:
    """The best finished hypotheses (b, beams) of each source: score, place, whether ended."""

    def __init__(self, like: Tensor, sources: int, beams: int) -> None:
        shape = (sources, beams)
        self.scores = torch.full(shape, -math.inf, device=like.device)
        self.places = torch.full(shape, -1, dtype=torch.int64, device=like.device)
        self.ended = torch.zeros(shape, dtype=torch.bool, device=like.device)

    def add(self, scores: Tensor, places: Tensor, ended: bool) -> None:
        count = self.scores.shape[1]
        self.scores, order = torch.cat((self.scores, scores), dim=1).topk(count, dim=1)
        self.places = torch.cat((self.places, places), dim=1).gather(1, order)
        flags = torch.full_like(scores, float(ended)).bool()
        self.ended = torch.cat((self.ended, flags), dim=1).gather(1, order)

    def keep(self, rows: Tensor) -> None:
        self.scores, self.places, self.ended = (
            x[rows] for x in (self.scores, self.places, self.ended)
        )

    def put(self, sources: Tensor, others: _Finished) -> None:
        """Replace the hypotheses of these sources by others."""
        self.scores.index_copy_(0, sources, others.scores)
        self.places.index_copy_(0, sources, others.places)
        self.ended.index_copy_(0, sources, others.ended)


def _extensions(logits: Tensor, scores: Tensor, beams: int) -> tuple[Tensor, Tensor, Tensor]:
    """The 2 * beams best (score, beam, token) of each source, best first.

    Of 2 * beams at least ``beams`` do not end, since each live hypothesis can end in one way.
    """
    sources, live = scores.shape
    values, tokens = top(logits, min(2 * beams, logits.shape[1]))
    values = values.float() - logits.float().logsumexp(dim=-1, keepdim=True)
    each = values.shape[1]
    values = (scores[:, :, None] + values.view(sources, live, each)).flatten(1)
    count = min(2 * beams, live * each)
    best_scores, place = values.topk(count, dim=1)
    parents = place // each
    return best_scores, parents, tokens.view(sources, -1).gather(1, place)


@torch.no_grad()
def beam_search(decoder: StepDecoder, task: Task, method: BeamSearch) -> Generated:
    """The n best sequences of each source, as `BeamSearch` defines them."""
    beams, wanted = method.beams, method.n_best or 1
    device, count = task.prompt.device, task.prompt.shape[0]
    sources = torch.arange(count, device=device)
    history = _History(task, beams)
    # Of the sources in the batch, and of all as they leave it.
    finished, results = (_Finished(task.prompt, count, beams) for _ in range(2))
    logits = decoder.start(task.prompt)
    task.check(logits)
    if beams > logits.shape[1]:
        raise ValueError(
            f"beams must be at most the size of the vocabulary, {logits.shape[1]}, not {beams}"
        )
    scores = torch.zeros((count, 1), device=device)
    for step in range(task.max_new_tokens):
        value, parents, tokens = _extensions(logits, scores, beams)
        ended = tokens == task.end_token
        before = torch.full_like(parents, -1) if step == 0 else (step - 1) * beams + parents
        # Finished: those that end and are among the best of all extensions.
        ending = value.masked_fill(~ended, -math.inf)[:, :beams]
        finished.add(ending / penalty(step + 1, method.length_penalty), before[:, :beams], True)
        # Live: the best of those that go on; fewer than beams only in the first steps.
        going = value.masked_fill(ended, -math.inf)
        scores, order = going.topk(min(beams, going.shape[1]), dim=1)
        tokens, parents = tokens.gather(1, order), parents.gather(1, order)
        if scores.shape[1] < beams:
            missing = (0, beams - scores.shape[1])
            scores = torch.nn.functional.pad(scores, missing, value=-math.inf)
            tokens, parents = (torch.nn.functional.pad(x, missing) for x in (tokens, parents))
        history.add(step, sources, tokens, parents)
        if step + 1 == task.max_new_tokens:
            places = step * beams + torch.arange(beams, device=device).expand_as(parents)
            lengths = penalty(step + 1, method.length_penalty)
            finished.add(scores / lengths, places, False)
            break

        done = _is_done(finished, scores, step, task, method, wanted)
        scores = scores.masked_fill(done[:, None], -math.inf)
        if step == 0:
            decoder.spread(beams)
        else:
            first = torch.arange(0, scores.shape[0] * beams, beams, device=device)
            decoder.reorder((first[:, None] + parents).flatten())
        if step % task.looks == 0:
            remaining = done.shape[0] - int(done.sum())
            if remaining == 0:
                break
            if pays(remaining, done.shape[0]):
                results.put(sources, finished)
                rows = (~done).nonzero().squeeze(1)
                decoder.keep(rows)
                finished.keep(rows)
                sources, scores, tokens = sources[rows], scores[rows], tokens[rows]
        logits = decoder.step(tokens.flatten())
    results.put(sources, finished)
    return _read(history, results, wanted, method, task)


def _is_done(
    finished: _Finished, scores: Tensor, step: int, task: Task, method: BeamSearch, wanted: int
) -> Tensor:
    """Which sources (b,) cannot, or need not, get better."""
    if method.early_stop:
        return finished.scores[:, -1] > -math.inf
    # Scores only fall and are below 0, so a live hypothesis is best at the largest divisor to come.
    power = method.length_penalty
    divisor = penalty(task.max_new_tokens if power > 0 else step + 2, power)
    return finished.scores[:, wanted - 1] >= scores[:, 0] / divisor


def _read(
    history: _History, results: _Finished, wanted: int, method: BeamSearch, task: Task
) -> Generated:
    scores, places, ended = (x[:, :wanted] for x in (results.scores, results.places, results.ended))
    missing = scores == -math.inf
    places = places.masked_fill(missing, -1)
    found = history.read(places, ended & ~missing, task.end_token, task.pad_token)
    if method.n_best is None:
        return Generated(found.tokens[:, 0], found.lengths[:, 0], scores[:, 0])
    return Generated(found.tokens, found.lengths, scores)
