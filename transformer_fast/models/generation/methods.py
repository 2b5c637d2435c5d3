"""How the next token is chosen, and what generation gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Union

from torch import Tensor


class Generated(NamedTuple):
    """What `generate` found, for B sequences of at most L new tokens.

    With ``BeamSearch(n_best=n)`` all three have a second dimension of n hypotheses, best first.
    """

    #: int64 (B, L): the new tokens, the end token included, then padding.
    tokens: Tensor
    #: int64 (B,): how many of them are real.
    lengths: Tensor
    #: fp32 (B,): beam search's log-probabilities, divided by the length penalty; else None.
    scores: Tensor | None


@dataclass(frozen=True)
class Greedy:
    """The most probable token at each step."""


@dataclass(frozen=True)
class Sampling:
    """A random token at each step, drawn from ``softmax(logits / temperature)``.

    Args:
        temperature: above 0; less than 1 sharpens the distribution, more flattens it.
        top_k: draw from the k most probable tokens only; None: from all.
        top_p: draw from the most probable tokens that together have at least this probability (of
            those top_k leaves), at least one; None: from all.
        seed: the same seed gives the same tokens; None: torch's generator decides.

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
    """The best sequences that can be found by keeping ``beams`` of them at each step.

    A sequence's score is ``log P(tokens) / ((5 + length) / 6) ** length_penalty``, the length
    counting the new tokens with the end token. At each step the ``beams`` best extensions that do
    not end go on; those that end and are among the ``beams`` best extensions of all are finished.
    What has not ended after max_new_tokens counts as finished there.

    Args:
        beams: how many sequences go on; at most the size of the vocabulary.
        length_penalty: above 0 favours long sequences, below 0 short ones.
        early_stop: True: stop as soon as ``beams`` sequences are finished. False: stop when none of
            those that go on can become better than the finished ones that are asked for; this never
            changes the result.
        n_best: give this many sequences of each source, best first; None: the best. Where there are
            not that many, the rest has length 0 and score -inf.

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
