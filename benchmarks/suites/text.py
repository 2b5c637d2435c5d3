"""Suite of sentence encoders: architectures of Hugging Face with random weights, on English text.

A call embeds a padded batch: the mean of the last layer's vectors at real tokens. The sentences are
paragraphs of Python's language reference (`measure.cases`), as words and punctuation marks. Batches
are in the order of the text, or sorted by length, as libraries do. All precisions are compared with
fp64, by the cosine of the worst sentence.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import re
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from transformer_fast.measure.benchmark_case import Arguments, BenchmarkCase, Candidate
from transformer_fast.measure.cases import paragraphs, parameter_bytes

from . import Directions, Maker, Scope, quantised
from .models import ACCELERATED, EAGER
from .third_party import Model, accelerated

PRECISIONS = ("float32", "bfloat16", "int8")
#: Tokens at which sentences are cut; numbers of tokens that are not words.
_LONGEST, _FIRST = 128, 5
_VOCABULARY = 30522
_SMALL = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}


class Text(NamedTuple):
    """A model, and how many sentences it embeds, ``batch`` at a time."""

    model: Model
    sentences: int
    batch: int
    #: Unsorted batches are also timed on one thread.
    alone: bool = False


TEXTS = {
    "MiniLM": Text(Model("Bert", {**_SMALL, "num_hidden_layers": 6}), 96, 32, True),
    "BERT-base": Text(Model("Bert", {}), 16, 8),
    "XLM-R small": Text(
        Model("XLMRoberta", {**_SMALL, "vocab_size": _VOCABULARY, "max_position_embeddings": 514}),
        32, 16,
    ),
    # As wide as its base model, with a quarter of its layers.
    "ModernBERT": Text(
        Model("ModernBert", {"num_hidden_layers": 6, "vocab_size": _VOCABULARY, "pad_token_id": 0}),
        16, 8,
    ),
}  # fmt: skip
_QUICK = {
    "MiniLM, small": Text(
        Model("Bert", {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
                       "num_hidden_layers": 2}), 12, 4,
    )
}  # fmt: skip


class Case(NamedTuple):
    text: str
    precision: str
    threads: int
    ordered: bool

    def __str__(self) -> str:
        order = "sorted" if self.ordered else "unsorted"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.text}, {order}, {self.precision}, {threads}"


class Embedder(nn.Module):
    """Token numbers and a mask of real ones, both (B, T) int64 -> sentence vectors (B, M)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        hidden = self.model(input_ids=tokens, attention_mask=mask)[0]
        real = mask[..., None].to(hidden.dtype)
        return (hidden * real).sum(1) / real.sum(1)


def sentences(count: int) -> list[Tensor]:
    """Returns the first sentences of the text; a word's number is a checksum of it."""
    words = (re.findall(rb"\w+|[^\w\s]", text)[: _LONGEST - 2] for text in paragraphs()[:count])
    span = _VOCABULARY - _FIRST
    return [torch.tensor([2, *(_FIRST + zlib.crc32(w) % span for w in one), 3]) for one in words]


class Work:
    """A sentence encoder, its batches, its true vectors, and the candidates built last."""

    def __init__(self, name: str) -> None:
        self.text = text = (TEXTS | _QUICK)[name]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = text.model.build()
            for parameter in model.parameters():
                if parameter.dim() == 1:  # else norms and biases are exactly 1 and 0
                    parameter.data += 0.1 * torch.randn_like(parameter)
        self.padding = model.config.pad_token_id
        self.model = Embedder(model).eval().requires_grad_(False)
        self.oracle = copy.deepcopy(self.model).double()
        self.inputs = {ordered: self._inputs(ordered) for ordered in (True, False)}
        self._truths: dict[tuple[str, int], Tensor] = {}
        self._built: tuple[object, list[Candidate]] = None, []

    def _inputs(self, ordered: bool) -> list[list[Arguments]]:
        found = sentences(self.text.sentences)
        if ordered:
            found.sort(key=len, reverse=True)
        calls: list[Arguments] = []
        for start in range(0, len(found), self.text.batch):
            some = found[start : start + self.text.batch]
            tokens = pad_sequence(some, batch_first=True, padding_value=self.padding)
            lengths = torch.tensor([len(one) for one in some])
            calls.append((tokens, (torch.arange(tokens.shape[1]) < lengths[:, None]).long()))
        # The same sentences in another order, so that no candidate can reuse its results.
        return [calls, [tuple(x.flip(0) for x in one) for one in calls]]

    def truth(self, precision: str, *arguments: Tensor) -> Tensor:
        """Returns the vectors in "float64", or PyTorch's in another precision, computed once."""
        key = precision, id(arguments[0])  # the inputs live as long as this object
        if key not in self._truths:
            model = self.oracle if precision == "float64" else self._in(precision)
            self._truths[key] = model(*arguments)
        return self._truths[key]

    def _in(self, precision: str) -> nn.Module:
        return copy.deepcopy(self.model).to(getattr(torch, precision))

    def candidates(self, scope: Scope, precision: str, threads: int) -> list[Candidate]:
        """Returns the candidates; sorted and unsorted batches share compiled programs."""
        if self._built[0] != (precision, threads):
            self._built = None, []
            plain = self._in("bfloat16" if precision == "bfloat16" else "float32")
            fast = quantised(plain) if precision == "int8" else accelerated(plain)
            examples = [call for given in self.inputs.values() for call in given[0]]
            offered = scope.offered("module", self.model, examples, precision)
            eager = Candidate(_eager(precision), plain, ours=False)
            self._built = (precision, threads), [Candidate(ACCELERATED, fast), eager, *offered]
        return self._built[1]


def _eager(precision: str) -> str:
    return f"{EAGER}, float32" if precision == "int8" else EAGER


_work = functools.lru_cache(maxsize=1)(Work)


def _case(scope: Scope, case: Case) -> BenchmarkCase:
    torch.set_num_threads(case.threads)  # `run` restores the number
    work, eager = _work(case.text), _eager(case.precision)
    inputs = work.inputs[case.ordered]
    checker = Directions(
        functools.partial(work.truth, "float64"), functools.partial(work.truth, case.precision),
        case.precision,
    )  # fmt: skip
    weights = sum(m.weight.numel() for m in work.model.modules() if isinstance(m, nn.Linear))
    config = work.model.model.config
    flops = [0.0, 0.0]
    for tokens, mask in inputs[0]:
        for i, lengths in enumerate((torch.full_like(mask[:, 0], tokens.shape[1]), mask.sum(1))):
            pairs = lengths.square().sum().item() * config.num_hidden_layers
            flops[i] += 2.0 * weights * lengths.sum().item() + 4.0 * pairs * config.hidden_size
    half = case.precision == "bfloat16"
    # In int8 products of 8 bits alternate with attention in bfloat16: no rate is the roof.
    cost = (
        (*flops, parameter_bytes(work.model) / (1 + half)) if case.precision != "int8" else (0,) * 3
    )
    return BenchmarkCase(
        "text_encoder", str(case), inputs, work.candidates(scope, case.precision, case.threads),
        checker, cost[0], cost[2], cost[1], torch.bfloat16 if half else torch.float32,
        chosen=ACCELERATED, reference=eager, torch=() if case.precision == "int8" else (eager,),
        items=work.text.sentences,
    )  # fmt: skip


def text_encoders(scope: Scope) -> Iterator[tuple[str, Maker]]:
    """All precisions, whatever the dtype of the run is."""
    if importlib.util.find_spec("transformers") is None or scope.device.type != "cpu":
        return
    most = torch.get_num_threads()
    for name, text in (_QUICK if scope.quick else TEXTS).items():
        for threads in sorted({1, most} if text.alone else {most}):
            for precision in PRECISIONS:
                for ordered in (True, False) if threads == most else (False,):
                    case = Case(name, precision, threads, ordered)
                    yield f"text encoder {case}", functools.partial(_case, scope, case)
