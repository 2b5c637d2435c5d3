"""Searches: one sequence for each source (greedy, sampling), and beam search."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .decoders import StepDecoder
from .methods import BeamSearch, Generated, Method, Sampling, bind_best, sampler, top

# Reading from a GPU whether all sequences have ended makes the host wait.
_GPU_STEPS_BETWEEN_LOOKS = 8


@dataclass(frozen=True)
class Task:
    """A generation task, for any method.

    Rows of ``prompt`` (B, P) may have different lengths (B,), on the CPU, at least 1 each. All rows start
    together; while a prompt continues, its tokens replace the chosen ones.
    """

    prompt: Tensor
    lengths: Tensor | None
    max_new_tokens: int
    #: -1: no token ends a sequence.
    end_token: int
    pad_token: int
    #: Further tokens that end a sequence.
    more_end_tokens: tuple[int, ...] = ()

    def are_ends(self, tokens: Tensor) -> Tensor:
        found = tokens == self.end_token
        for end in self.more_end_tokens:
            found |= tokens == end
        return found

    @property
    def looks(self) -> int:
        """Number of steps between two checks whether sequences have ended."""
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
    """True if ended sequences should leave the batch.

    Leaving copies all keys and values about once, as much memory traffic as the attention of some two
    steps. It pays once a quarter of every further step would be wasted.
    """
    return 4 * remaining <= 3 * rows


def _chooser(
    method: Method, task: Task, positions: int, logits: Tensor
) -> Callable[[Tensor, int, Tensor | None], Tensor]:
    """Returns the function (logits (R, V), position, sources (R,) or None for all) -> tokens (R,), for
    logits like these."""
    if not isinstance(method, Sampling):
        best = bind_best(logits)
        return lambda logits, position, sources: best(logits)
    device = task.prompt.device
    generator = None
    if method.seed is not None:
        generator = torch.Generator(device).manual_seed(method.seed)
    # Each source has its own draws, so that its tokens do not depend on which others have left.
    shape = (positions, task.prompt.shape[0])
    draws = torch.rand(shape, generator=generator, device=device)
    sample = sampler(method, logits.shape[1])

    def choose(logits: Tensor, position: int, sources: Tensor | None) -> Tensor:
        mine = draws[position]
        return sample(logits, mine if sources is None else mine.index_select(0, sources))

    return choose


@torch.no_grad()
def one_by_one(decoder: StepDecoder, task: Task, method: Method) -> Iterator[Tensor]:
    """Yields the token (B,) of each position after the shortest prompt; padding if a row has none."""
    prompt, lengths = task.prompt, task.lengths
    sources, longest = prompt.shape
    first = longest if lengths is None else int(lengths.min())
    last = longest if lengths is None else int(lengths.max())
    total = last + task.max_new_tokens
    if lengths is not None:
        lengths = lengths.to(prompt.device)
    done = torch.zeros(sources, dtype=torch.bool, device=prompt.device)
    alive: Tensor | None = None  # the source of each row; None: all sources
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
                ended |= task.are_ends(token) & ~forced
            else:
                ended |= task.are_ends(token)
        else:
            ended = task.are_ends(token)
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
    """Returns all tokens of `one_by_one`, each row from the end of its prompt."""
    columns = list(one_by_one(decoder, task, method))
    found = torch.stack(columns, dim=1)
    if task.lengths is not None:
        # Rows with longer prompts began later; shift each to the left by that delay.
        delay = (task.lengths - task.lengths.min()).to(found.device)
        width = min(found.shape[1], task.max_new_tokens)
        position = delay[:, None] + torch.arange(width, device=found.device)
        inside = position < found.shape[1]
        found = found.gather(1, position.clamp(max=found.shape[1] - 1))
        found = found.masked_fill(~inside, task.pad_token)
    return _trimmed(found, task)


def _trimmed(tokens: Tensor, task: Task) -> Generated:
    """Returns the tokens with their lengths, without columns that are padding in all rows."""
    ends = tokens == task.end_token
    width = tokens.shape[1]
    first_end = torch.where(ends.any(dim=1), ends.int().argmax(dim=1) + 1, width)
    lengths = first_end.clamp(max=task.max_new_tokens)
    used = int(lengths.max()) if lengths.numel() else 0
    return Generated(tokens[:, :used], lengths, None)


class _History:
    """The tokens of all hypotheses as a tree: the tokens of each step and their parents.

    The index of its last token, ``step * beams + beam``, identifies a hypothesis; -1 is the prompt.
    """

    def __init__(self, task: Task, beams: int) -> None:
        shape = (task.max_new_tokens, task.prompt.shape[0], beams)
        self.beams = beams
        self.tokens = task.prompt.new_zeros(shape)
        self.parents = task.prompt.new_zeros(shape)

    def add(self, step: int, sources: Tensor, tokens: Tensor, parents: Tensor) -> None:
        """``parents`` (b, beams): the beams of the previous step that the tokens extend."""
        self.tokens[step].index_copy_(0, sources, tokens)
        self.parents[step].index_copy_(0, sources, parents)

    def read(self, places: Tensor, ends: Tensor, pad_token: int) -> Generated:
        """Returns the hypotheses at ``places`` (B, n) with their tokens of ``ends``; -1: none."""
        ended = ends >= 0
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
        found = torch.where(at_end & ended[..., None], ends[..., None], found)
        return Generated(found, lengths, None)


class _Finished:
    """The best finished hypotheses of each source: scores, indices, end tokens: (b, beams)."""

    def __init__(self, like: Tensor, sources: int, beams: int) -> None:
        shape = (sources, beams)
        self.scores = torch.full(shape, -math.inf, device=like.device)
        self.places = torch.full(shape, -1, dtype=torch.int64, device=like.device)
        #: -1: the hypothesis has not ended.
        self.ends = torch.full_like(self.places, -1)

    def add(self, scores: Tensor, places: Tensor, ends: Tensor) -> None:
        count = self.scores.shape[1]
        self.scores, order = torch.cat((self.scores, scores), dim=1).topk(count, dim=1)
        self.places = torch.cat((self.places, places), dim=1).gather(1, order)
        self.ends = torch.cat((self.ends, ends), dim=1).gather(1, order)

    def keep(self, rows: Tensor) -> None:
        self.scores, self.places, self.ends = (
            x[rows] for x in (self.scores, self.places, self.ends)
        )

    def put(self, sources: Tensor, others: _Finished) -> None:
        """Replaces the hypotheses of these sources with others."""
        self.scores.index_copy_(0, sources, others.scores)
        self.places.index_copy_(0, sources, others.places)
        self.ends.index_copy_(0, sources, others.ends)


class Rules:
    """Scores of hypotheses and the end of a beam search; subclasses follow other libraries."""

    def extensions(
        self, logits: Tensor, scores: Tensor, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the ``count`` best (score, beam, token) of each source, best first."""
        sources, live = scores.shape
        values, tokens = top(logits, min(count, logits.shape[1]))
        values = values.float() - logits.float().logsumexp(dim=-1, keepdim=True)
        each = values.shape[1]
        values = (scores[:, :, None] + values.view(sources, live, each)).flatten(1)
        best_scores, place = values.topk(min(count, live * each), dim=1)
        parents = place // each
        return best_scores, parents, tokens.view(sources, -1).gather(1, place)

    def penalty(self, length: int, power: float) -> float:
        return ((5.0 + length) / 6.0) ** power

    def is_done(
        self, finished: _Finished, scores: Tensor, step: int, task: Task, method: BeamSearch
    ) -> Tensor:
        """Returns True for each source (b,) whose hypotheses cannot, or need not, improve."""
        if method.early_stop:
            return finished.scores[:, -1] > -math.inf
        # Scores are negative and only fall: the largest possible divisor gives their upper bound.
        power = method.length_penalty
        divisor = self.penalty(task.max_new_tokens if power > 0 else step + 2, power)
        return finished.scores[:, (method.n_best or 1) - 1] >= scores[:, 0] / divisor


PAPER = Rules()


@torch.no_grad()
def beam_search(
    decoder: StepDecoder, task: Task, method: BeamSearch, rules: Rules = PAPER
) -> Generated:
    """Returns the n best sequences of each source, as `BeamSearch` defines them, for all at once."""
    beams, wanted = method.beams, method.n_best or 1
    device, count = task.prompt.device, task.prompt.shape[0]
    sources = torch.arange(count, device=device)
    history = _History(task, beams)
    # ``finished`` holds the hypotheses of sources that are still decoded, ``results`` those of all
    # sources; a source's are filled in when it leaves the batch.
    finished, results = (_Finished(task.prompt, count, beams) for _ in range(2))
    logits = decoder.start(task.prompt)
    task.check(logits)
    if beams > logits.shape[1]:
        raise ValueError(
            f"beams must be at most the size of the vocabulary, {logits.shape[1]}, not {beams}"
        )
    scores = torch.zeros((count, 1), device=device)
    for step in range(task.max_new_tokens):
        # At least ``beams`` extensions do not end: of a hypothesis, one ends with each end token.
        count = (2 + len(task.more_end_tokens)) * beams
        value, parents, tokens = rules.extensions(logits, scores, count)
        is_last = step + 1 == task.max_new_tokens
        ended = task.are_ends(tokens) | is_last
        before = torch.full_like(parents, -1) if step == 0 else (step - 1) * beams + parents
        # Finished: extensions that end and are among the best ``beams``. The others stay in the
        # tensor: topk's choice among equal scores depends on its size.
        ending = value.masked_fill(~ended, -math.inf)
        ending[:, beams:] = -math.inf
        finished.add(ending / rules.penalty(step + 1, method.length_penalty), before, tokens)
        if is_last:
            break
        # Live: the best extensions that do not end. Only the first steps have fewer than ``beams``.
        going = value.masked_fill(ended, -math.inf)
        scores, order = going.topk(min(beams, going.shape[1]), dim=1)
        tokens, parents = tokens.gather(1, order), parents.gather(1, order)
        if scores.shape[1] < beams:
            missing = (0, beams - scores.shape[1])
            scores = torch.nn.functional.pad(scores, missing, value=-math.inf)
            tokens, parents = (torch.nn.functional.pad(x, missing) for x in (tokens, parents))
        history.add(step, sources, tokens, parents)

        done = rules.is_done(finished, scores, step, task, method)
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


def _read(
    history: _History, results: _Finished, wanted: int, method: BeamSearch, task: Task
) -> Generated:
    scores, places, ends = (x[:, :wanted] for x in (results.scores, results.places, results.ends))
    missing = scores == -math.inf
    places, ends = places.masked_fill(missing, -1), ends.masked_fill(missing, -1)
    found = history.read(places, ends, task.pad_token)
    if method.n_best is None:
        return Generated(found.tokens[:, 0], found.lengths[:, 0], scores[:, 0])
    return Generated(found.tokens, found.lengths, scores)
