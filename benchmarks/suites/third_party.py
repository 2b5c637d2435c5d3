"""Suites of third-party models: unchanged, by each of our entry points, and by other compilers.

The first suite is the paper's model written by hand, as in most tutorials. It is compared with the
unchanged code, and with the same weights in `transformer_fast.nn`, whose speed is the goal. The
second suite has architectures of Hugging Face `transformers`, their own classes with random weights.
Their sizes are those of base models, with fewer layers, because all layers are alike.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import transformer_fast
from transformer_fast.measure.accuracy import ModuleChecker, StepChecker
from transformer_fast.measure.benchmark_case import Arguments, BenchmarkCase, Candidate, Checker
from transformer_fast.measure.calls import forced
from transformer_fast.measure.cases import (
    PADDING,
    TIMES_FORWARD,
    Seq2Seq,
    Size,
    parameter_bytes,
    twins,
    with_fast_path,
)
from transformer_fast.models import SinusoidalPositions

from . import ACCELERATED, EAGER, Maker, Scope, accelerated, spread_biases, suite_of
from .models import TUTORIALS, Case, Gradients, Step, flops_of

REWRITTEN, NN = "rewritten", "transformer_fast.nn"


def rewritten(model: nn.Module) -> Callable[..., Tensor]:
    """Compiles the model by our torch.compile backend."""
    torch._dynamo.reset()  # otherwise models of the same code would reach Dynamo's recompilation limit
    return torch.compile(model, backend=transformer_fast.compile_backend, dynamic=False)


# A Transformer written by hand in plain PyTorch: four Linears per attention, masks that are 0 where
# masked out and filled with -1e9, a norm after each sub-layer.


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(size.model, size.model) for _ in range(4)
        )
        self.dropout = nn.Dropout(0.0)

    def split(self, x: Tensor) -> Tensor:
        batch, length, model = x.shape
        return x.view(batch, length, self.heads, model // self.heads).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        query = self.split(self.query(x))
        key, value = self.split(self.key(memory)), self.split(self.value(memory))
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        weights = self.dropout(torch.softmax(scores, dim=-1))
        joined = torch.matmul(weights, value).transpose(1, 2).contiguous().view(x.shape)
        return self.out(joined)


class Layer(nn.Module):
    """An encoder layer; a decoder layer if ``crossed``."""

    def __init__(self, size: Size, crossed: bool = False) -> None:
        super().__init__()
        self.self_attn = Attention(size)
        self.norm1, self.norm2 = nn.LayerNorm(size.model), nn.LayerNorm(size.model)
        if crossed:
            self.multihead_attn, self.norm3 = Attention(size), nn.LayerNorm(size.model)
        self.linear1 = nn.Linear(size.model, size.hidden)
        self.linear2 = nn.Linear(size.hidden, size.model)
        self.dropout = nn.Dropout(0.0)

    def forward(
        self, x: Tensor, mask: Tensor | None, memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        last = self.norm2
        x = self.norm1(x + self.dropout(self.self_attn(x, x, mask)))
        if memory is not None:
            x = self.norm2(x + self.dropout(self.multihead_attn(x, memory, memory_mask)))
            last = self.norm3
        hidden = self.dropout(torch.relu(self.linear1(x)))
        return last(x + self.dropout(self.linear2(hidden)))


class Stack(nn.Module):
    """A stack of layers with a final norm."""

    def __init__(self, size: Size, crossed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(size, crossed) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.model)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, *rest)
        return self.norm(x)


class Transformer(nn.Module):
    """The hand-written equivalent of `Seq2Seq`, on two tensors of tokens."""

    positions: Tensor

    def __init__(self, size: Size, longest: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.model)
        table = SinusoidalPositions(longest, size.model).table
        self.register_buffer("positions", table, persistent=False)
        self.encoder, self.decoder = Stack(size), Stack(size, crossed=True)
        self.output = nn.Linear(size.model, size.vocabulary)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) + self.positions[: tokens.shape[1]]

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        source_mask = (source != PADDING)[:, None, None, :]
        length = target.shape[1]
        past = torch.ones(length, length, dtype=torch.bool, device=target.device).tril()
        target_mask = (target != PADDING)[:, None, None, :] & past
        memory = self.encoder(self.embed(source), source_mask)
        return self.output(self.decoder(self.embed(target), target_mask, memory, source_mask))


def renamed(theirs: dict[str, Any]) -> dict[str, Any]:
    """Converts a state_dict of ``torch.nn`` modules to the names of the hand-written modules."""
    found = {}
    for name, value in theirs.items():
        name = name.removeprefix("transformer.")
        head, is_packed, kind = name.partition("in_proj_")
        if is_packed:
            for part, chunk in zip(("query", "key", "value"), value.chunk(3), strict=True):
                found[f"{head}{part}.{kind}"] = chunk
        else:
            found[name.replace("out_proj.", "out.")] = value
    return found


def on_batches(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapts a model of token tensors to `Batch` arguments."""
    return lambda source, target: run(source.tokens, target.tokens)


def _step(model: nn.Module, run: Callable[..., Tensor] | None = None) -> Step:
    """Returns the training step of a hand-written model; ``run``: the compiled model, if any."""
    return Step(model, run=on_batches(model if run is None else run))


Models = tuple[nn.Module, nn.Module, nn.Module]


def _forward(
    scope: Scope, name: str, case: Case, models: Models, adapt: Callable[..., Any],
    real: Callable[..., Tensor], work: Callable[..., Sequence[float]],
) -> BenchmarkCase:  # fmt: skip
    """Returns the case of a forward pass; ``adapt``: adapts hand-written models to the inputs."""
    inputs = case.inputs(scope)
    ours, theirs, written = models
    oracle = with_fast_path(copy.deepcopy(theirs).double(), False)
    reference = forced(ours, "reference")
    candidates = [
        Candidate(REWRITTEN, adapt(rewritten(written))),
        Candidate(ACCELERATED, adapt(accelerated(written))),
        Candidate(NN, ours),
        Candidate("reference", reference),
        Candidate(EAGER, adapt(written), ours=False),
        *scope.offered("hand_written", written, adapt),
    ]
    checker = ModuleChecker(oracle, reference, real)
    cost = work(*inputs[0][0])
    return scope.case(f"hand-written {name}", case, inputs, candidates, checker, cost, REWRITTEN)


def _models(scope: Scope, make: Callable[[Any], nn.Module], written: nn.Module) -> Models:
    """Returns (our nn's, torch.nn's, the hand-written) model, with the same weights."""
    ours, theirs = twins(make, scope.dtype, scope.device)
    written.load_state_dict(renamed(theirs.state_dict()))
    return ours, theirs, written.eval().to(scope.device, scope.dtype)


def models_of(scope: Scope, size: Size, dropout: float) -> Models:
    make = functools.partial(Seq2Seq, size=size, dropout=dropout)
    return _models(scope, lambda nn: spread_biases(make(nn)), Transformer(size))


def _transformer(scope: Scope, case: Case) -> BenchmarkCase:
    models = models_of(scope, case.size, 0.1)
    real, work = lambda source, target: target.real, case.work(scope, models[1])
    return _forward(scope, "transformer", case, models, on_batches, real, work)


def training_step(scope: Scope, case: Case) -> BenchmarkCase:
    ours, theirs, written = models_of(scope, case.size, 0.0)
    model = copy.deepcopy(written)
    reference = forced(Step(copy.deepcopy(ours)), "reference")
    candidates = [
        Candidate(REWRITTEN, _step(model, rewritten(model))),
        Candidate(ACCELERATED, _step(accelerated(written))),
        Candidate(NN, Step(ours)),
        Candidate("reference", reference),
        Candidate(EAGER, _step(copy.deepcopy(written)), ours=False),
    ]
    if not scope.quick:
        other = copy.deepcopy(written)
        candidates += scope.offered("training", other, functools.partial(_step, other))
    inputs = case.inputs(scope)
    oracle = Step(copy.deepcopy(theirs).double(), fused=False)
    return scope.case(
        "hand-written training step", case, inputs, candidates,
        _GroupChecker(oracle, reference, _projections, written, theirs),
        case.work(scope, theirs)(*inputs[0][0]), REWRITTEN, TIMES_FORWARD,
    )  # fmt: skip


class _GroupChecker(StepChecker):
    """Compares the gradients of a ``group`` of parameters (query, key and value) as one tensor.

    The gradient of a key's bias is exactly 0, because softmax is invariant to a constant, so the
    computed one is rounding error only and has no relative accuracy of its own.

    ``models``: the model, and its equivalent of ``torch.nn`` if steps of it are checked, too.
    """

    def __init__(
        self, oracle: Any, reference: Any, group: Callable[[str], str], *models: nn.Module
    ) -> None:
        self.parameters = [[name for name, _ in one.named_parameters()] for one in models]
        self.groups: dict[str, list[str]] = {}
        for name in self.parameters[0]:
            self.groups.setdefault(group(name), []).append(name)
        super().__init__(oracle, reference, ("loss", *(f"grad of {one}" for one in self.groups)))

    def _results(self, result: Any, arguments: Arguments) -> tuple[Tensor | None, ...]:
        loss, *gradients = result
        names = next(one for one in self.parameters if len(one) == len(gradients))
        found = dict(zip(names, gradients, strict=True))
        found = found if names is self.parameters[0] else renamed(found)
        groups = (
            [found[name].flatten() for name in group if found[name] is not None]
            for group in self.groups.values()
        )
        return (loss, *(torch.cat(parts) if parts else None for parts in groups))


def _projections(name: str) -> str:
    return re.sub(r"\b(query|key|value)\b", "in_proj", name)


_ONE, _BASE = Case(4, 32, 1000, 2), Case(8, 128, 8000, 2)

_MODELS = [_BASE, _BASE._replace(share=0.65), *TUTORIALS]
hand_written = suite_of(
    ("hand-written transformer", _transformer, _MODELS, [_ONE._replace(share=0.65)]),
    # Without padding, because results at padded positions differ and are part of the loss.
    ("hand-written training step", training_step, [_BASE, *TUTORIALS], [_ONE]),
)


# Architectures of Hugging Face.

_LAYERS = 2
_TOKENS = {"vocab_size": 2000}
_DECODER = {
    **_TOKENS, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": _LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "pad_token_id": 0,
}  # fmt: skip
_ENCODER = {
    **_TOKENS, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": _LAYERS,
    "num_attention_heads": 8,
}  # fmt: skip
_BOTH = {
    **_TOKENS, "d_model": 512, "encoder_layers": _LAYERS, "decoder_layers": _LAYERS,
    "encoder_attention_heads": 8, "decoder_attention_heads": 8, "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048,
}  # fmt: skip
_T5 = {
    **_TOKENS, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_heads": 8, "num_layers": _LAYERS,
}  # fmt: skip
_VISION = {
    "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": _LAYERS,
    "num_attention_heads": 6, "image_size": 224, "patch_size": 16,
}  # fmt: skip


class Model(NamedTuple):
    """An architecture of `transformers`."""

    #: Prefix of the names of the architecture's classes.
    family: str
    config: dict[str, Any]
    #: "tokens", "pair" (of tokens), "image" or "sound".
    takes: str = "tokens"

    def build(self, head: str = "Model", **changes: Any) -> Any:
        import transformers

        config = getattr(transformers, f"{self.family}Config")(**{**self.config, **changes})
        config._attn_implementation = "sdpa"
        if self.takes == "pair" and head == "Model":
            config.use_cache = False
        return getattr(transformers, f"{self.family}{head}")(config)


MODELS = {
    "BERT": Model("Bert", _ENCODER),
    "RoBERTa": Model("Roberta", {**_ENCODER, "max_position_embeddings": 514, "pad_token_id": 1}),
    "DistilBERT": Model(
        "DistilBert", {**_TOKENS, "dim": 512, "hidden_dim": 2048, "n_layers": _LAYERS, "n_heads": 8}
    ),
    "MiniLM": Model(
        "Bert", {**_ENCODER, "hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 12}
    ),
    "ModernBERT": Model("ModernBert", {**_ENCODER, "intermediate_size": 1152, "pad_token_id": 0}),
    "GPT-2": Model("GPT2", {**_TOKENS, "n_embd": 512, "n_layer": _LAYERS, "n_head": 8}),
    "GPT-NeoX": Model("GPTNeoX", _ENCODER),
    "Llama": Model("Llama", _DECODER),
    "Mistral": Model("Mistral", _DECODER),
    "Qwen3": Model("Qwen3", _DECODER),
    "Gemma": Model("Gemma", _DECODER),
    "Phi-3": Model("Phi3", _DECODER),
    "T5": Model("T5", _T5, "pair"),
    "T5 1.1": Model("T5", {**_T5, "feed_forward_proj": "gated-gelu"}, "pair"),
    "BART": Model("Bart", _BOTH, "pair"),
    "Marian": Model("Marian", {**_BOTH, "pad_token_id": 0, "decoder_start_token_id": 0}, "pair"),
    "M2M100": Model("M2M100", _BOTH, "pair"),
    "ViT": Model("ViT", _VISION, "image"),
    "DINOv2": Model("Dinov2", {**_VISION, "patch_size": 14}, "image"),
    "SigLIP": Model("SiglipVision", _VISION, "image"),
    "Swin": Model("Swin", {"embed_dim": 96, "depths": [1, 1, 2], "num_heads": [3, 6, 12]}, "image"),
    "wav2vec2": Model(
        "Wav2Vec2", {**_ENCODER, "vocab_size": 32, "conv_dim": (128,) * 7}, "sound"
    ),
}  # fmt: skip
_QUICK = ("BERT", "Llama")

#: Models timed forward and backward. Not T5: without biases some value before a ReLU is so close to 0
#: that it rounds to the other side, where its gradient is another one.
_TRAINED = ("BERT", "GPT-2", "Llama", "T5 1.1", "ViT")


class _First(nn.Module):
    """Wraps a model so that it returns its first result, a tensor."""

    def __init__(self, model: nn.Module, takes: str) -> None:
        super().__init__()
        self.model, self.takes = model, takes

    def forward(self, given: Tensor) -> Tensor:
        pair = {"decoder_input_ids": given} if self.takes == "pair" else {}
        first: Tensor = self.model(given, **pair)[0]
        return first


def _inputs(scope: Scope, takes: str) -> list[list[Arguments]]:
    if takes not in ("image", "sound"):
        return scope.tokens(5, 2000, 4, 128)
    shape = (2, 3, 224, 224) if takes == "image" else (2, 16000)
    drawn = [torch.randn(shape, generator=scope.generator(seed)) for seed in range(2)]
    return [[(x.to(scope.device, scope.dtype),)] for x in drawn]


def _built(scope: Scope, name: str, *given: Any, **changes: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # In eval mode, because dropout would drop other elements in each candidate.
        model = spread_biases(MODELS[name].build(*given, **changes)).eval()
    return model.to(scope.device, scope.dtype)


def _loss(run: Callable[..., Tensor], given: Tensor) -> Tensor:
    found = run(given)
    wanted = torch.linspace(-1.0, 1.0, found.shape[-1], dtype=found.dtype, device=found.device)
    return ((found - wanted) ** 2).mean()


def _side_by_side(name: str) -> str:
    module, _, parameter = name.rpartition(".")
    return f"{module.rpartition('.')[0]}.*.{parameter}"


def _model(scope: Scope, name: str, trained: bool = False) -> BenchmarkCase:
    takes = MODELS[name].takes
    model = _First(_built(scope, name), takes).eval().requires_grad_(trained)
    inputs = _inputs(scope, takes)
    oracle, ours, theirs = copy.deepcopy(model).double(), copy.deepcopy(model), copy.deepcopy(model)

    def work(model: nn.Module, run: Callable[..., Tensor] | None = None) -> Callable[..., Any]:
        run = model if run is None else run
        return Gradients(model, _loss, run) if trained else run

    kind = "training" if trained else "hand_written"
    candidates = [
        Candidate("compiled", work(ours, rewritten(ours))),
        Candidate(ACCELERATED, work(accelerated(model))),
        Candidate(EAGER, work(model), ours=False),
        *scope.offered(kind, theirs, functools.partial(work, theirs)),
    ]
    checker: Checker = ModuleChecker(oracle, model, lambda x: ...)
    if trained:
        checker = _GroupChecker(work(oracle), work(model), _side_by_side, model)
    flops = flops_of(model, *inputs[0][0])
    return scope.case(
        f"third-party {'training' if trained else 'model'}", name, inputs, candidates, checker,
        (flops, flops, parameter_bytes(model)), "compiled", TIMES_FORWARD if trained else 1.0,
    )  # fmt: skip


def third_party(scope: Scope) -> Iterator[tuple[str, Maker]]:
    if importlib.util.find_spec("transformers") is None:
        return
    yield from suite_of(
        ("third-party", _model, [*MODELS], _QUICK),
        ("third-party training", functools.partial(_model, trained=True), _TRAINED, _QUICK),
    )(scope)
