"""Models that others wrote: as they are, and each of our ways in beside the compilers.

Architectures of Hugging Face `transformers` by their own classes, with random weights: the sizes are
those of base models, cut to a few layers, because layers repeat.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from transformer_fast.measure.accuracy import ModuleChecker, StepChecker
from transformer_fast.measure.benchmark_case import Arguments, BenchmarkCase, Candidate
from transformer_fast.measure.modules import parameter_bytes
from transformer_fast.measure.ops import TIMES_FORWARD

from .. import peers
from ..scope import Maker, Scope
from .decode import START, GreedyJudge
from .hand_written import accelerated, rewritten
from .ops import spread_biases

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
_VISION = {
    "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": _LAYERS,
    "num_attention_heads": 6, "image_size": 224, "patch_size": 16,
}  # fmt: skip


class Model(NamedTuple):
    """An architecture of `transformers`."""

    #: The stem of its classes' names.
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
    "T5": Model(
        "T5",
        {**_TOKENS, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_heads": 8, "num_layers": _LAYERS},
        "pair",
    ),
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

#: Those that are trained, forward and backward.
_TRAINED = ("BERT", "GPT-2", "Llama", "T5", "ViT")

#: Those that decode: the rest of their classes' names, and what names the number of layers.
_GENERATE = {
    "GPT-2": ("LMHeadModel", "n_layer"),
    "Qwen3": ("ForCausalLM", "num_hidden_layers"),
    "T5": ("ForConditionalGeneration", "num_layers"),
    "Marian": ("MTModel", "encoder_layers decoder_layers"),
}
#: (B, T, new tokens, vocabulary, layers)
_PROMPTS = ((1, 32, 64, 32000, 6), (4, 32, 64, 32000, 6))
_QUICK_PROMPTS = ((2, 8, 6, 1000, 2),)


class _First(nn.Module):
    """A model by its first result, which is a tensor."""

    def __init__(self, model: nn.Module, takes: str) -> None:
        super().__init__()
        self.model, self.takes = model, takes

    def forward(self, given: Tensor) -> Tensor:
        if self.takes == "pair":
            found = self.model(input_ids=given, decoder_input_ids=given)
        elif self.takes == "tokens":
            found = self.model(input_ids=given)
        else:
            found = self.model(given)
        first: Tensor = found[0]
        return first


def _inputs(scope: Scope, takes: str) -> list[list[Arguments]]:
    def draw(seed: int) -> Tensor:
        generator = scope.generator(seed)
        if takes == "image":
            return torch.randn(2, 3, 224, 224, generator=generator).to(scope.dtype)
        if takes == "sound":
            return torch.randn(2, 16000, generator=generator).to(scope.dtype)
        return torch.randint(5, 2000, (4, 128), generator=generator)

    return [[(draw(seed).to(scope.device),)] for seed in range(2)]


def _flops(model: nn.Module, arguments: Arguments) -> float:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*arguments)
    return float(counter.get_total_flops())


def _case(scope: Scope, name: str) -> BenchmarkCase:
    takes = MODELS[name].takes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _First(spread_biases(MODELS[name].build()), takes).eval()
    model.requires_grad_(False).to(scope.device, scope.dtype)
    inputs = _inputs(scope, takes)
    oracle = copy.deepcopy(model).double()
    candidates = [
        Candidate("compiled", rewritten(copy.deepcopy(model))),
        Candidate("accelerated", accelerated(model)),
        Candidate("torch eager", model, ours=False),
        *peers.candidates(scope.peers, "hand_written", copy.deepcopy(model), lambda run: run),
    ]
    return BenchmarkCase(
        "third-party model", name, inputs, candidates, ModuleChecker(oracle, model, lambda x: ...),
        flops := _flops(model, inputs[0][0]), parameter_bytes(model), flops,
        scope.dtype, scope.device, chosen="compiled", torch=("torch eager", "torch.compile"),
    )  # fmt: skip


class _Gradients:
    """Forward and backward: a loss and the gradient of every parameter that has one."""

    def __init__(self, model: nn.Module, run: Callable[..., Tensor] | None = None) -> None:
        self.model, self.run = model, model if run is None else run

    @torch.enable_grad()
    def __call__(self, given: Tensor) -> tuple[Tensor, ...]:
        found = self.run(given)
        wanted = torch.linspace(-1.0, 1.0, found.shape[-1], dtype=found.dtype, device=found.device)
        loss = ((found - wanted) ** 2).mean()
        loss.backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return (loss.detach(), *gradients)


class _GradientChecker(StepChecker):
    """Gradients of modules side by side count as one, as those of queries, keys and values.

    The gradient of a key's bias is 0, since softmax takes a constant away, and what is computed for it
    is rounding.
    """

    def __init__(self, oracle: nn.Module, reference: _Gradients, arguments: Arguments) -> None:
        named = dict(reference.model.named_parameters())
        found = torch.autograd.grad(
            reference.run(*arguments).sum(), [*named.values()], allow_unused=True
        )
        self.groups: dict[str, list[int]] = {}
        used = [name for name, gradient in zip(named, found, strict=True) if gradient is not None]
        for index, name in enumerate(used, 1):
            module, _, parameter = name.rpartition(".")
            group = f"{module.rpartition('.')[0]}.*.{parameter}"
            self.groups.setdefault(group, []).append(index)
        names = ("loss", *(f"grad of {group}" for group in self.groups))
        super().__init__(_Gradients(oracle), reference, names)

    def _results(self, result: Any, arguments: Arguments) -> tuple[Tensor | None, ...]:
        groups = ([result[i].flatten() for i in group] for group in self.groups.values())
        return (result[0], *map(torch.cat, groups))

    def _truth(self, arguments: Arguments) -> Any:
        exact = [x.double() if x.is_floating_point() else x for x in arguments]
        return tuple(
            self._results(run, arguments)
            for run in (self.reference(*arguments), self.oracle(*exact))
        )


def _training(scope: Scope, name: str) -> BenchmarkCase:
    takes = MODELS[name].takes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # In evaluation, as dropout would draw other elements in each of them.
        model = _First(spread_biases(MODELS[name].build()), takes).eval()
    model.to(scope.device, scope.dtype)
    inputs = _inputs(scope, takes)
    oracle = copy.deepcopy(model).double()
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    reference = _Gradients(model)
    candidates = [
        Candidate("compiled", _Gradients(ours, rewritten(ours))),
        Candidate("accelerated", _Gradients(accelerated(model))),
        Candidate("torch eager", reference, ours=False),
        *peers.candidates(scope.peers, "training", theirs, functools.partial(_Gradients, theirs)),
    ]
    flops = TIMES_FORWARD * _flops(model, inputs[0][0])
    return BenchmarkCase(
        "third-party training", name, inputs, candidates,
        _GradientChecker(oracle, reference, inputs[0][0]),
        flops, TIMES_FORWARD * parameter_bytes(model), flops,
        scope.dtype, scope.device, chosen="compiled", torch=("torch eager", "torch.compile"),
    )  # fmt: skip


class _Generate(nn.Module):
    """Greedy ``generate``: new tokens (B, new) for a prompt (B, T)."""

    def __init__(self, model: Any, new: int, **settings: Any) -> None:
        super().__init__()
        self.model, self.new, self.settings = model, new, settings

    def forward(self, prompt: Tensor) -> Tensor:
        mask = torch.ones_like(prompt)
        found: Tensor = self.model.generate(prompt, attention_mask=mask, **self.settings)
        return found[:, -self.new :]

    def logits(self, prompt: Tensor, target: Tensor) -> Tensor:
        """(B, new, V), under teacher forcing; target begins with the start token."""
        given: dict[str, Any] = {"input_ids": prompt, "decoder_input_ids": target}
        if not self.model.config.is_encoder_decoder:
            given = {"input_ids": torch.cat((prompt, target[:, 1:]), 1), "logits_to_keep": self.new}
        found: Tensor = self.model(**given, use_cache=False).logits
        return found


def _bytes_of_a_token(model: Any) -> int:
    """Of the weights that are read for each: all of the decoder, but of embeddings next to nothing."""
    read = {*model.get_decoder().parameters()} - {model.get_input_embeddings().weight}
    return sum(p.nbytes for p in read | {model.get_output_embeddings().weight})


def _generate(
    scope: Scope, name: str, batch: int, length: int, new: int, vocabulary: int, layers: int
) -> BenchmarkCase:
    from transformers import GenerationConfig

    head, counts = _GENERATE[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name].build(
            head, vocab_size=vocabulary, **dict.fromkeys(counts.split(), layers),
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
    if name == "T5":  # a token's embedding, of all the largest in the sum, would repeat the token
        model.get_input_embeddings().weight.data.mul_(0.05)
    # Without an end token all make equally many tokens.
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=new, pad_token_id=0, decoder_start_token_id=START
    )
    model.requires_grad_(False).to(scope.device, scope.dtype)
    run = _Generate(model, new).eval()
    inputs: list[list[Arguments]] = []
    for seed in range(2):
        tokens = torch.randint(5, vocabulary, (batch, length), generator=scope.generator(seed))
        inputs.append([(tokens.to(scope.device),)])
    candidates = [
        Candidate("accelerated", accelerated(run)),
        Candidate("torch eager", run, ours=False),
    ]
    if not scope.quick:  # it takes most of a minute to compile

        def compiled(**settings: Any) -> nn.Module:
            return _Generate(copy.deepcopy(model), new, **settings)

        candidates += peers.candidates(scope.peers, "generate", compiled)
    checker = GreedyJudge(copy.deepcopy(run).double(), run.logits, new)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run.logits(inputs[0][0][0], torch.full((batch, new), START, device=scope.device))
    flops = float(counter.get_total_flops())
    moved = new * _bytes_of_a_token(model)
    if model.config.is_encoder_decoder:
        moved += parameter_bytes(model.get_encoder())
    return BenchmarkCase(
        "third-party generate", f"{name}, ({batch},{length}), {new} new, V = {vocabulary}", inputs,
        candidates, checker, flops, moved, flops, scope.dtype, scope.device,
        chosen="accelerated", reference="torch eager", torch=("torch eager", "torch.compile"),
    )  # fmt: skip


def suite(scope: Scope) -> Iterator[tuple[str, Maker]]:
    if importlib.util.find_spec("transformers") is None:
        return
    for name in _QUICK if scope.quick else MODELS:
        yield f"third-party {name}", functools.partial(_case, scope, name)
    for name in _QUICK if scope.quick else _TRAINED:
        yield f"third-party {name}, training", functools.partial(_training, scope, name)
    for name in _GENERATE:
        for case in _QUICK_PROMPTS if scope.quick else _PROMPTS:
            label = f"third-party {name}, generate {case[:2]}"
            yield label, functools.partial(_generate, scope, name, *case)
