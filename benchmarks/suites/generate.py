"""Suite of transformers' ``generate``: greedy and beam search of models of released sizes.

The weights are random. End tokens never have the highest score, so all candidates generate the same
number of tokens without a minimum length, whose implementation is slow in some of them.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from transformer_fast.measure.benchmark_case import Arguments, BenchmarkCase, Candidate
from transformer_fast.testing import Parity

from . import ACCELERATED, EAGER, Maker, Scope, accelerated, suite_of
from .models import END, START, GreedyJudge, of_tokens

NEW, SOURCE = 64, 32
#: Whisper's tokens for the start, the language, the task and no timestamps.
_PROMPT = [50258, 50259, 50359, 50363]
_IDS = {"pad_token_id": 0, "bos_token_id": START, "eos_token_id": END}
_BOTH = {
    **_IDS, "decoder_start_token_id": START, "forced_eos_token_id": None, "tie_word_embeddings": False
}  # fmt: skip


def _sizes(width: int, layers: int, heads: int) -> dict[str, int]:
    halves = {"layers": layers, "attention_heads": heads, "ffn_dim": 4 * width}
    found = {f"{half}_{key}": n for half in ("encoder", "decoder") for key, n in halves.items()}
    return {"d_model": width, **found}


#: Name -> prefix and suffix of the model's class, settings of its config.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Marian base": ("Marian", "MTModel", {
        **_BOTH, **_sizes(512, 6, 8), "vocab_size": 58101, "max_position_embeddings": 512,
        "activation_function": "swish", "scale_embedding": True}),
    "T5-small": ("T5", "ForConditionalGeneration", {**_BOTH, "vocab_size": 32128}),
    "BART-base": ("Bart", "ForConditionalGeneration", {
        **_BOTH, **_sizes(768, 6, 12), "vocab_size": 50265}),
    "Whisper-tiny": ("Whisper", "ForConditionalGeneration", {
        **_sizes(384, 4, 6), "tie_word_embeddings": False, "suppress_tokens": [220]}),
    "GPT-2": ("GPT2", "LMHeadModel", {**_IDS, "tie_word_embeddings": False}),
    "Llama, 6 layers": ("Llama", "ForCausalLM", {
        **_IDS, "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1408,
        "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4}),
}  # fmt: skip


class Search(NamedTuple):
    """Batch size, beams (1: greedy) and precision of a search."""

    model: str
    batch: int
    beams: int
    precision: str

    def __str__(self) -> str:
        return f"{self.model}, {self.batch}x{self.beams}, {self.precision}"


def build(name: str) -> Any:
    import transformers

    prefix, suffix, settings = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, f"{prefix}Config")(**settings)
        model = getattr(transformers, f"{prefix}{suffix}")(config).eval().requires_grad_(False)
        embedding = model.get_input_embeddings().weight
        head = model.get_output_embeddings().weight
        for key, x in model.named_parameters():
            if x.dim() == 2 and x is not embedding and "positions" not in key and prefix != "T5":
                nn.init.xavier_normal_(x, 0.5)  # with a larger gain all steps are alike
        for x in (embedding, head):
            x.normal_(0, x.shape[1] ** -0.5)
        # Scores of 0, which are never the highest.
        head[[i for i in (config.pad_token_id, config.eos_token_id) if i is not None]] = 0
    settings = {"max_new_tokens": NEW, "num_beams": 1, "do_sample": False}
    ids = (f"{kind}_token_id" for kind in ("pad", "bos", "eos", "decoder_start"))
    settings |= {name: getattr(config, name) for name in ids if hasattr(config, name)}
    settings["suppress_tokens"] = getattr(config, "suppress_tokens", None)
    model.generation_config = transformers.GenerationConfig(**settings)
    return model


class Generate(nn.Module):
    """Returns the new tokens (B, NEW) of a search."""

    def __init__(self, model: Any, beams: int) -> None:
        super().__init__()
        self.model, self.beams = model, beams

    def forward(self, given: Tensor) -> Tensor:
        from transformers import GenerationMixin

        more: dict[str, Any] = {"num_beams": self.beams}
        if given.dim() > 2:
            more["decoder_input_ids"] = start_of(given)
            # Whisper's own `generate` splits recordings.
            found = GenerationMixin.generate(self.model, given.to(self.model.dtype), **more)
        else:
            found = self.model.generate(given, attention_mask=torch.ones_like(given), **more)
        return found[:, -NEW:]  # type: ignore[no-any-return]

    def logits(self, given: Tensor, target: Tensor) -> Tensor:
        """Returns the logits (B, T, V) of T tokens, of which all but the last are target[:, 1:]."""
        tokens, more = target[:, 1:], {}
        if self.model.config.is_encoder_decoder:
            more["decoder_input_ids"] = torch.cat((start_of(given), tokens), 1)
            given = given.to(self.model.dtype) if given.is_floating_point() else given
        else:
            given = torch.cat((given, tokens), 1)
        found: Tensor = self.model(given, use_cache=False, **more).logits
        return found[:, -target.shape[1] :].to(torch.float64)


def start_of(given: Tensor) -> Tensor:
    """Returns the first tokens of the decoder, for sources (B, S) or recordings (B, F, S)."""
    return torch.tensor([_PROMPT if given.dim() > 2 else [START]]).expand(len(given), -1)


class Judge(GreedyJudge):
    """Checks the tokens of two sources; in beam search, if they are as probable as eager ones."""

    def __init__(self, eager: Generate, reference: Generate) -> None:
        super().__init__(copy.deepcopy(eager).double(), reference.logits, NEW)
        self.eager = eager
        self.suppressed = eager.model.generation_config.suppress_tokens or []

    def __call__(self, tokens: Tensor, arguments: Arguments) -> Parity:
        return super().__call__(tokens[:2], (arguments[0][:2],))

    def error(self, source: Tensor, tokens: Tensor, true: Tensor) -> float:
        true[..., self.suppressed] = -torch.inf
        if self.eager.beams == 1:
            return super().error(source, tokens, true)
        best = self.eager(source)
        target = torch.cat((best[:, :1], best[:, :-1]), 1)
        right = of_tokens(best, self.oracle.logits(source, target).log_softmax(-1)).sum(-1)
        found = of_tokens(tokens, true.log_softmax(-1)).sum(-1)
        return max(0.0, (right - found).max().item() / NEW)


def _weights_of(model: Any) -> tuple[int, int]:
    """Returns the numbers of weights that a search reads once, and in each step."""
    every = {*model.parameters()} - {model.get_input_embeddings().weight}
    once = {*model.get_encoder().parameters()} if model.config.is_encoder_decoder else set()
    once -= {model.get_input_embeddings().weight}
    return tuple(sum(x.numel() for x in of) for of in (once, every - once))  # type: ignore[return-value]


def _generate(scope: Scope, case: Search) -> BenchmarkCase:
    name, batch, beams, precision = case
    model = build(name)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    lower = Generate(copy.deepcopy(model).bfloat16(), beams)
    eager = Generate(model, beams)
    same = lower if precision == "bfloat16" else eager
    if name.startswith("Whisper"):
        drawn = [torch.randn(batch, 80, 3000, generator=scope.generator(i)) for i in range(2)]
        inputs: list[list[Arguments]] = [[(x,)] for x in drawn]
    else:
        inputs = scope.tokens(10, 30000, batch, SOURCE)
    options = {"quantize": "int8"} if precision == "int8" else {}
    candidates = [Candidate(ACCELERATED, accelerated(same, **options))]
    if batch * beams <= 8:
        candidates.append(Candidate(EAGER, same, ours=False))
    candidates += scope.offered("search", model, inputs, beams, NEW, precision)
    judge = Judge(eager, eager if precision == "float32" else lower)
    once, each = _weights_of(model)
    positions = batch * (1500 if name.startswith("Whisper") else SOURCE)
    flops = 2.0 * (once * positions + each * batch * beams * NEW)
    size = 1 if precision == "int8" else dtype.itemsize
    return BenchmarkCase(
        "generate", str(case), inputs, candidates, judge, flops, size * (once + NEW * each), flops,
        dtype, chosen=ACCELERATED, reference=EAGER, torch=(EAGER,),
        items=batch * NEW, product="int8" if precision == "int8" else None,
    )  # fmt: skip


_SHAPES = {
    "Marian base": [(1, 1), (8, 1), (32, 1), (1, 4), (8, 4)], "T5-small": [(1, 1), (8, 1), (1, 4)],
    "BART-base": [(1, 1), (8, 1), (1, 4)], "Whisper-tiny": [(1, 1), (1, 4)],
    "GPT-2": [(1, 1), (8, 1)], "Llama, 6 layers": [(1, 1), (8, 1)],
}  # fmt: skip
#: All shapes in int8, one sequence in other precisions.
_SEARCHES = [
    Search(name, *shape, precision)
    for name, shapes in _SHAPES.items()
    for precision in ("int8", "float32", "bfloat16")
    for shape in (shapes if precision == "int8" else [(1, 1), (1, 4)][: 1 + ((1, 4) in shapes)])
]


def generate(scope: Scope) -> Iterator[tuple[str, Maker]]:
    if importlib.util.find_spec("transformers") is not None and scope.device.type == "cpu":
        yield from suite_of(("generate", _generate, _SEARCHES, [_SEARCHES[0]]))(scope)
