"""Suites that compare our modules with those of torch.nn.

They are encoder layers and stacks, the base Transformer, a training step of it, and greedy decoding.
Sizes are the paper's, 512/8/2048, unless a case has others.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from transformer_fast import functional, models
from transformer_fast.measure.accuracy import StepChecker
from transformer_fast.measure.benchmark_case import Arguments, BenchmarkCase, Candidate
from transformer_fast.measure.calls import forced, record
from transformer_fast.measure.cases import (
    PADDING,
    TIMES_FORWARD,
    Batch,
    Seq2Seq,
    Size,
    encoder_case,
    fast_path,
    parameter_bytes,
    transformer_case,
    transformer_work,
    twins,
    with_fast_path,
)
from transformer_fast.testing import OUTPUT_FACTOR, Parity

from ..peers import maskless
from . import ACCELERATED, EAGER, Directions, Scope, accelerated, lengths, spread_biases, suite_of

_SIZE = Size()


class Layers(NamedTuple):
    """A batch for one encoder layer, or for a stack of ``layers``."""

    batch: int
    length: int
    #: Fraction of positions that are not padding.
    share: float = 1.0
    layers: int | None = None

    def __str__(self) -> str:
        stack = "" if self.layers is None else f"{self.layers} layers, "
        real = f", {self.share:.0%} real" if self.share < 1.0 else ""
        return f"{stack}({self.batch},{self.length}){real}"

    def inputs(self, scope: Scope) -> list[list[Arguments]]:
        padding = None
        if self.share < 1.0:
            real = lengths(self.batch, self.length, self.share)
            padding = (torch.arange(self.length) >= real[:, None]).to(scope.device)
        shape = self.batch, self.length, _SIZE.model
        drawn = [torch.randn(shape, generator=scope.generator(i)) for i in range(2)]
        return [[(x.to(scope.device, scope.dtype), None, padding)] for x in drawn]


def _layers(scope: Scope, case: Layers) -> BenchmarkCase:
    offer = functools.partial(scope.offered, "encoder_layer" if case.layers is None else "encoder")
    return encoder_case(str(case), case.inputs(scope), _SIZE, peers=offer, layers=case.layers)


class _Attention(nn.Module):
    """nn.MultiheadAttention's self-attention, made of Linears, which 8-bit tools can convert."""

    def __init__(self, theirs: nn.MultiheadAttention) -> None:
        super().__init__()
        size, self.heads = theirs.embed_dim, theirs.num_heads
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.qkv.weight, self.qkv.bias = theirs.in_proj_weight, theirs.in_proj_bias
        self.out.load_state_dict(theirs.out_proj.state_dict())

    def forward(self, x: Tensor, *rest: Any, key_padding_mask: Any = None, **options: Any) -> Any:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mask = None if key_padding_mask is None else key_padding_mask[:, None, None, :]
        found = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        return self.out(found.transpose(1, 2).flatten(2)), None


class _Stack(nn.Module):
    """The layers of a TransformerEncoder on (x, padding); padding is True where masked out."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.layers = copy.deepcopy(encoder.layers)
        for layer in self.layers:
            layer.self_attn = _Attention(layer.self_attn)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        return x


def _int8_layers(scope: Scope, case: Layers) -> BenchmarkCase:
    """A stack of layers with 8-bit products, beside float32; the error is that of the worst row."""

    def make(nn: Any) -> nn.Module:
        layer = nn.TransformerEncoderLayer(_SIZE.model, _SIZE.heads, _SIZE.hidden, batch_first=True)
        return nn.TransformerEncoder(layer, case.layers or 1)

    ours, theirs = twins(make, torch.float32, "cpu")
    inputs = case.inputs(Scope())
    _, _, padding = inputs[0][0]
    real = ... if padding is None else ~padding

    def padded(model: nn.Module) -> Callable[..., Tensor]:
        return lambda x, mask, padding: model(x, src_key_padding_mask=padding)

    examples = [(x,) if padding is None else (x, padding) for ((x, _, padding),) in inputs]
    stack = _Stack(theirs).eval().requires_grad_(False)
    eager = f"{EAGER}, float32"
    candidates = [
        Candidate(ACCELERATED, padded(accelerated(theirs, quantize="int8"))),
        Candidate("transformer_fast.nn, float32", padded(ours)),
        Candidate(eager, with_fast_path(padded(theirs), False), ours=False),
        *(
            replace(one, run=one.run and maskless(one.run))
            for one in scope.offered("module", stack, examples, "int8")
        ),
    ]
    oracle = with_fast_path(padded(copy.deepcopy(theirs).double()), False)
    truths = {id(x): oracle(x.double(), None, padding)[real] for ((x, _, padding),) in inputs}
    directions = Directions(lambda x, *rest: truths[id(x)], oracle, "int8")
    name = "encoder_layer" if case.layers is None else "encoder"
    return BenchmarkCase(
        name, f"{case}, int8", inputs, candidates,
        lambda found, given: directions(found[real], given), chosen=ACCELERATED, reference=eager,
        torch=(),
    )  # fmt: skip


class Case(NamedTuple):
    """A batch of sentence pairs, and the dimensions of the model that runs it."""

    batch: int
    length: int
    vocabulary: int
    layers: int
    share: float = 1.0
    #: Width of the model. The head size is 64 for the paper's width of 512, and 16 for others.
    width: int = 512

    def __str__(self) -> str:
        real = f", {self.share:.0%} real" if self.share < 1.0 else ""
        width = f", d = {self.width}" if self.width != 512 else ""
        shape = f"({self.batch},{self.length})"
        return f"{self.layers}+{self.layers}, {shape}, V = {self.vocabulary}{real}{width}"

    @property
    def size(self) -> Size:
        width, head = self.width, 64 if self.width == 512 else 16
        return Size(width, width // head, 4 * width, self.layers, self.vocabulary)

    def work(self, scope: Scope, model: nn.Module) -> Callable[..., Any]:
        return transformer_work(self.size, parameter_bytes(model), scope.dtype.itemsize)

    def inputs(self, scope: Scope) -> list[list[Arguments]]:
        """Draws random (source, target) tokens, padded beyond `lengths`."""
        real = lengths(self.batch, self.length, self.share)

        def draw(generator: torch.Generator) -> Batch:
            shape = self.batch, self.length
            tokens = torch.randint(self.vocabulary - 1, shape, generator=generator)
            tokens += tokens >= PADDING  # no random token equals PADDING
            tokens[torch.arange(self.length) >= real[:, None]] = PADDING
            return Batch(tokens, real).to(scope.device)

        return [[(draw(one), draw(one))] for one in map(scope.generator, range(2))]


#: The sizes of tutorials, at which the overhead of calls dominates.
TUTORIALS = [
    Case(batch, length, 100, 2, width=width)
    for batch, length, width in (
        (1, 1, 64), (1, 20, 64), (1, 32, 64), (2, 10, 64), (32, 10, 64), (4, 12, 128), (4, 80, 128),
        (8, 32, 256),
    )
]  # fmt: skip


def _transformer(scope: Scope, case: Case) -> BenchmarkCase:
    return transformer_case(
        str(case), case.inputs(scope), case.size, scope.dtype, scope.device,
        peers=functools.partial(scope.offered, "transformer"),
    )  # fmt: skip


# Training step: forward, loss, backward and AdamW.

FUSED = "torch linear_cross_entropy"
#: (model, *arguments) -> loss
Loss = Callable[..., Tensor]


def by_logits(cross_entropy: Callable[..., Tensor]) -> Loss:
    """Returns the loss as in tutorials: cross entropy of the logits."""

    def loss(model: Any, source: Batch, target: Batch) -> Tensor:
        return cross_entropy(model(source, target).flatten(0, 1), _following(target))

    return loss


def fused(linear_cross_entropy: Callable[..., Tensor], **options: Any) -> Loss:
    """Returns the loss that fuses output projection and cross entropy in one op, without logits."""

    def loss(model: Any, source: Batch, target: Batch) -> Tensor:
        decoded, output = model.decoded(source, target).flatten(0, 1), model.output
        return linear_cross_entropy(
            decoded, output.weight, _following(target), linear_bias=output.bias, **options
        )

    return loss


def _following(target: Batch) -> Tensor:
    """Returns the target of each position: the next token."""
    return target.tokens.roll(-1, 1).flatten()


LOSS_OF_LOGITS = by_logits(nn.functional.cross_entropy)


class Gradients:
    """Runs forward and backward; returns the loss and all parameters' gradients, or None.

    ``run``: what the loss calls in place of the model, such as the compiled model.
    """

    def __init__(self, model: nn.Module, loss: Loss, run: Callable[..., Any] | None = None) -> None:
        self.model, self.loss, self.run = model, loss, model if run is None else run
        self.update: Callable[[], object] = lambda: None

    @torch.enable_grad()
    def __call__(self, *arguments: Any) -> tuple[Tensor | None, ...]:
        loss = self.loss(self.run, *arguments)
        loss.backward()
        self.update()
        gradients = [p.grad for p in self.model.parameters()]
        self.model.zero_grad(set_to_none=True)
        return (loss.detach(), *gradients)


class Step(Gradients):
    """A training step with AdamW; each candidate needs a model of its own.

    The learning rate is 0: AdamW does all its arithmetic and does not change the weights, so that
    every step of every candidate can be checked against the same truth.
    """

    def __init__(
        self, model: nn.Module, loss: Loss = LOSS_OF_LOGITS, fused: bool = True, run: Any = None
    ) -> None:
        super().__init__(model.train(), loss, run)
        self.update = torch.optim.AdamW(model.parameters(), lr=0.0, fused=fused).step


def _torch_fused(theirs: nn.Module) -> Candidate:
    """Returns the step with PyTorch's own linear_cross_entropy (since 2.13), which is chunked."""
    op = getattr(nn.functional, "linear_cross_entropy", None)
    if op is None:
        return Candidate(FUSED, None, "this PyTorch has no linear_cross_entropy", ours=False)
    step = Step(copy.deepcopy(theirs), fused(op, options=nn.LinearCrossEntropyOptions()))
    return Candidate(FUSED, step, ours=False)


def _training(scope: Scope, case: Case, fuses: bool = False) -> BenchmarkCase:
    # No dropout, because other random numbers would give other results.
    make = functools.partial(Seq2Seq, size=case.size, dropout=0.0)
    ours, theirs = twins(lambda nn: spread_biases(make(nn)), scope.dtype, scope.device)
    inputs = case.inputs(scope)
    loss = by_logits(functional.cross_entropy)
    oracle = Step(copy.deepcopy(theirs).double(), fused=False)
    reference = forced(Step(copy.deepcopy(ours), loss), "reference")
    step = Step(ours, fused(functional.linear_cross_entropy) if fuses else loss)
    with record() as found:
        step(*inputs[0][0])
    chosen = found.backends
    candidates = [
        *([Candidate(chosen, step)] if chosen != "reference" else []),
        Candidate("reference", reference),
        *([_torch_fused(theirs)] if fuses else []),
        Candidate(EAGER, Step(theirs), ours=False),
    ]
    if not scope.quick and not fuses:
        other = copy.deepcopy(theirs)
        candidates += scope.offered("training", other, lambda run: Step(other, run=run))
    names = ("loss", *(f"grad of {name}" for name, _ in theirs.named_parameters()))
    return scope.case(
        "training step", f"{case}{', fused loss' if fuses else ''}", inputs, candidates,
        StepChecker(oracle, reference, names), case.work(scope, theirs)(*inputs[0][0]), chosen,
        TIMES_FORWARD, (EAGER, FUSED),
    )  # fmt: skip


def flops_of(run: Callable[..., Any], *arguments: Any) -> float:
    """Returns the FLOPs of a call, as PyTorch counts them."""
    with FlopCounterMode(display=False) as counter, torch.no_grad(), fast_path(False):
        run(*arguments)
    return float(counter.get_total_flops())


# Greedy decoding, token by token.

START, END = 1, 2


class Decoding(NamedTuple):
    """A greedy decoding: sources or prompts (batch, length), ``new`` tokens each."""

    batch: int
    length: int
    new: int
    vocabulary: int
    layers: int

    def __str__(self) -> str:
        return f"({self.batch},{self.length}), {self.new} new, V = {self.vocabulary}"


class Translator(nn.Module):
    """The paper's model, post-norm and without norms after the stacks, from torch's or our ``nn``.

    The end token never has the highest logit, so all candidates generate the same number of tokens.
    """

    positions: Tensor

    def __init__(self, nn: Any, size: Size, longest: int) -> None:
        super().__init__()
        whole = Seq2Seq(nn, size, 0.0, longest)
        self.embedding, self.output = whole.embedding, whole.output
        self.encoder, self.decoder = whole.transformer.encoder, whole.transformer.decoder
        self.encoder.norm = self.decoder.norm = None
        # All sines, then all cosines, as in Marian.
        sines, cosines = whole.positions[:, ::2], whole.positions[:, 1::2]
        self.register_buffer("positions", torch.cat((sines, cosines), -1))
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    torch.nn.init.xavier_uniform_(parameter)
            self.output.bias[END] = -1e4

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        return self.embedding(tokens) + self.positions[start : start + tokens.shape[1]]

    def hidden(self, memory: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask
        future = mask(target.shape[1], memory.device, memory.dtype)
        return self.decoder(self.embed(target), memory, tgt_mask=future, tgt_is_causal=True)

    def logits(self, source: Tensor, target: Tensor) -> Tensor:
        """Returns logits (B, T, V) under teacher forcing."""
        return self.output(self.hidden(self.encoder(self.embed(source)), target))


def cached(model: Translator, new_tokens: int) -> Callable[[Tensor], Tensor]:
    """Returns our decoding function, which has a KV cache."""

    def decode(source: Tensor) -> Tensor:
        memory = model.encoder(model.embed(source))
        return models.generate(
            model.decoder, memory, embed=model.embed, project=model.output,
            prefix=START, max_new_tokens=new_tokens, end_token=-1, use_cache=True,
        ).tokens  # fmt: skip

    return decode


def recomputing(model: Translator, new_tokens: int) -> Callable[[Tensor], Tensor]:
    """Returns a decoding function without a KV cache, which recomputes all positions per token."""

    def decode(source: Tensor) -> Tensor:
        tokens = torch.full((source.shape[0], 1), START, device=source.device)
        with fast_path(False):
            memory = model.encoder(model.embed(source))
            for _ in range(new_tokens):
                hidden = model.hidden(memory, tokens)
                best = model.output(hidden[:, -1]).argmax(-1, keepdim=True)
                tokens = torch.cat((tokens, best), dim=1)
        return tokens[:, 1:]

    return decode


def of_tokens(tokens: Tensor, values: Tensor) -> Tensor:
    return values.gather(-1, tokens[..., None])[..., 0]


class GreedyJudge:
    """Checks that the oracle's logit of every token is the highest one, up to rounding errors.

    Tokens are not compared with the oracle's, because near ties may fall either way in fp32, and then
    all later tokens differ. The unit of error is the reference's largest error in a logit.
    """

    def __init__(self, oracle: Any, reference: Callable[..., Tensor], new: int) -> None:
        self.oracle, self.reference, self.new = oracle, reference, new

    @torch.no_grad()
    def __call__(self, tokens: Tensor, arguments: Arguments) -> Parity:
        (source,) = arguments
        shape = (source.shape[0], self.new)
        if tuple(tokens.shape) != shape:
            wrong = f"tokens are {list(tokens.shape)} instead of {list(shape)}"
            return Parity(float("inf"), 0.0, float("inf"), 0.0, False, wrong)
        start = torch.full((shape[0], 1), START, device=source.device)
        forced_on = torch.cat((start, tokens[:, :-1]), dim=1)
        with fast_path(False):
            true = self.oracle.logits(source, forced_on)
        close = self.reference(source, forced_on)
        eps = torch.finfo(close.dtype).eps
        size = true.clamp(min=-1e3).abs().max().item()
        unit = max((close - true).abs().max().item(), eps / 2 * size)
        error = self.error(source, tokens, true)
        # Twice the budget, because both logits of a near tie may have an error.
        limit = 2 * (OUTPUT_FACTOR * unit + eps * size)
        what = f"a token is {error:.3g} below the best"
        return Parity(error, unit, error / unit, limit, error <= limit, what)

    def error(self, source: Tensor, tokens: Tensor, true: Tensor) -> float:
        return (true.amax(-1) - of_tokens(tokens, true)).max().item()


def _decoding(scope: Scope, case: Decoding) -> BenchmarkCase:
    batch, source, new, vocabulary, layers = case
    size, longest = Size(layers=layers, vocabulary=vocabulary), source + new + 2
    ours, theirs = twins(lambda nn: Translator(nn, size, longest), scope.dtype, scope.device)
    inputs, name = scope.tokens(3, vocabulary, batch, source), f"{layers}+{layers}, {case}"
    oracle = copy.deepcopy(theirs).double()
    with torch.no_grad(), record() as found:
        cached(ours, 2)(*inputs[0][0])
    chosen = found.backends
    checker = GreedyJudge(oracle, forced(ours.logits, "reference"), new)
    eager = recomputing(theirs, new), None
    if batch > 1 and not scope.quick:
        eager = None, "torch.nn has no KV cache, and computing all positions per token takes long"
    candidates = [
        Candidate(chosen, cached(ours, new)),
        Candidate("reference", forced(cached(ours, new), "reference")),
        Candidate(EAGER, *eager, ours=False),
    ]
    starts = torch.full((batch, new), START, device=scope.device)
    flops = flops_of(theirs.logits, *inputs[0][0], starts)
    # The decoder's weights are read once per token, the encoder's once.
    each = parameter_bytes(theirs.decoder) + parameter_bytes(theirs.output)
    work = flops, flops, parameter_bytes(theirs.encoder) + new * each
    return scope.case("greedy decoding", name, inputs, candidates, checker, work, chosen)


_ONE, _BASE = (Case(4, 32, 1000, 2),), Case(8, 128, 32000, 6)

_SMALL = Layers(8, 128), Layers(1, 32), Layers(8, 128, 0.65)
_LAYERS = [Layers(8, 128), Layers(32, 128), Layers(2, 1024), Layers(1, 32)]
_LAYERS += [Layers(batch, 128, 0.65) for batch in (8, 32)]
_PADDED = [Layers(batch, 128, 0.65, 6) for batch in (8, 32)]
_FULL = [Layers(*shape, layers=6) for shape in ((1, 32), (1, 128), (8, 128), (2, 1024))]
layers = suite_of(
    ("encoder_layer", _layers, _LAYERS, _SMALL),
    ("encoder of", _layers, _PADDED, [Layers(2, 64, 0.65, 6)]),
)
_INT8 = [*_SMALL, *_FULL, _PADDED[0]]
int8_layers = suite_of(("int8", _int8_layers, _INT8, [Layers(1, 32), Layers(2, 8, 0.65)]))
_MODELS = [_BASE, _BASE._replace(share=0.65), *TUTORIALS]
transformers = suite_of(("transformer", _transformer, _MODELS, _ONE))
training = suite_of(
    ("training step", _training, [_BASE, *TUTORIALS], _ONE),
    ("training step, fused loss,", functools.partial(_training, fuses=True), [_BASE], _ONE),
)
_DECODINGS = [
    Decoding(batch, length, 64, 32000, 6) for batch, length in ((1, 32), (16, 32), (64, 64))
]
decoding = suite_of(("greedy decoding", _decoding, _DECODINGS, [Decoding(2, 8, 6, 1000, 2)]))
