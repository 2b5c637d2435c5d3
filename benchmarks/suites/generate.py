"""Suite of transformers' ``generate``: greedy and beam search of models of released sizes.

The weights are random. No end token ever has the highest score, so all candidates generate the same
number of tokens, without a minimum length, which some of them implement by a slow step.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from transformer_fast.measure.benchmark_case import Arguments, BenchmarkCase, Candidate
from transformer_fast.measure.cases import fast_path
from transformer_fast.testing import OUTPUT_FACTOR, Parity

from . import ACCELERATED, EAGER, Maker, Scope, accelerated, suite_of

NEW, SOURCE, START, END = 64, 32, 1, 2
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
        embedding, head = (
            (x.weight for x in (model.get_input_embeddings(), model.lm_head))
            if (hasattr(model, "lm_head"))
            else (model.get_input_embeddings().weight, model.proj_out.weight)
        )
        for key, x in model.named_parameters():
            if x.dim() == 2 and x is not embedding and "positions" not in key and prefix != "T5":
                nn.init.xavier_normal_(x, 0.5)  # with larger ones all steps are alike
        for x in (embedding, head):
            x.normal_(0, x.shape[1] ** -0.5)
        # Scores of 0, which are never the highest.
        head[[i for i in (config.pad_token_id, config.eos_token_id) if i is not None]] = 0
    settings = {"max_new_tokens": NEW, "num_beams": 1, "do_sample": False, "suppress_tokens": None}
    ids = (f"{kind}_token_id" for kind in ("pad", "bos", "eos", "decoder_start"))
    settings |= {name: getattr(config, name) for name in ids if hasattr(config, name)}
    settings["suppress_tokens"] = getattr(config, "suppress_tokens", None)
    model.generation_config = transformers.GenerationConfig(**settings)
    return model


class Generate(nn.Module):
    """Returns the new tokens (B, NEW) of a search."""

    def __init__(self, model: Any, beams: int, **settings: Any) -> None:
        super().__init__()
        self.model, self.beams, self.settings = model, beams, settings

    def forward(self, given: Tensor) -> Tensor:
        from transformers import GenerationMixin

        more = {"num_beams": self.beams, **self.settings}
        if given.dim() > 2:
            more["decoder_input_ids"] = start_of(given)
            # Whisper's own `generate` splits recordings.
            found = GenerationMixin.generate(self.model, given.to(self.model.dtype), **more)
        else:
            found = self.model.generate(given, attention_mask=torch.ones_like(given), **more)
        return found[:, -NEW:]  # type: ignore[no-any-return]

    def logits(self, given: Tensor, tokens: Tensor) -> Tensor:
        """Returns logits (B, NEW, V) of these tokens (B, NEW) under teacher forcing."""
        if not self.model.config.is_encoder_decoder:
            whole = torch.cat((given, tokens[:, :-1]), 1)
            return self.model(whole, use_cache=False).logits[:, -NEW:]  # type: ignore[no-any-return]
        target = torch.cat((start_of(given), tokens[:, :-1]), 1)
        given = given.to(self.model.dtype) if given.is_floating_point() else given
        found = self.model(given, decoder_input_ids=target, use_cache=False).logits
        return found[:, -NEW:]  # type: ignore[no-any-return]


def start_of(given: Tensor) -> Tensor:
    """Returns the first tokens of the decoder, for sources (B, S) or recordings (B, F, S)."""
    return torch.tensor([_PROMPT if given.dim() > 2 else [START]]).expand(len(given), -1)


class Judge:
    """Checks tokens of a few sources by float64 logits, up to rounding errors.

    Greedy search: no logit is higher than that of the token. Beam search: the tokens are as probable as
    those that transformers finds in float32. The unit of error is the reference's largest error in a
    logit.
    """

    def __init__(self, eager: Generate, reference: Generate, suppressed: Any) -> None:
        self.eager, self.reference, self.suppressed = eager, reference, suppressed
        self.oracle = copy.deepcopy(eager).double()
        self.known: dict[int, Tensor] = {}

    @torch.no_grad()
    def __call__(self, tokens: Tensor, arguments: Arguments) -> Parity:
        given = arguments[0][:2]
        if tokens.shape != (len(arguments[0]), NEW):
            wrong = f"tokens are {list(tokens.shape)}"
            return Parity(float("inf"), 0.0, float("inf"), 0.0, False, wrong)
        tokens = tokens[:2]
        with fast_path(False):
            true, close = (x.logits(given, tokens).double() for x in (self.oracle, self.reference))
            if self.eager.beams > 1 and id(arguments[0]) not in self.known:
                self.known[id(arguments[0])] = self.eager(given)
            unit = (close - true).abs().max().item()
            eps, size = torch.finfo(torch.float32).eps, true.abs().max().item()
            limit = 2 * (OUTPUT_FACTOR * max(unit, eps / 2 * size) + eps * size)
            true[..., self.suppressed] = -torch.inf
            if self.eager.beams == 1:
                error = (true.amax(-1) - _of(tokens, true)).max().item()
            else:
                best = self.known[id(arguments[0])]
                expected = self.oracle.logits(given, best).log_softmax(-1)
                lost = _of(best, expected).sum(-1) - _of(tokens, true.log_softmax(-1)).sum(-1)
                error = max(0.0, lost.max().item() / NEW)
        return Parity(error, unit, error / unit, limit, error <= limit, f"{error:.3g} a token")


def _of(tokens: Tensor, values: Tensor) -> Tensor:
    return values.gather(-1, tokens[..., None])[..., 0]


def _weights_of(model: Any) -> tuple[int, int]:
    """Returns the numbers of weights that are read once, and for each token."""
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
    if batch * beams == 1 and precision == "float32" and not model.config.is_encoder_decoder:

        def adapt(**settings: Any) -> Callable[..., Any]:  # compiling it takes a minute
            return Generate(copy.deepcopy(model), beams, **settings)

        candidates += scope.offered("generate", adapt)
    candidates += scope.offered("search", model, inputs, beams, NEW, precision)
    judge = Judge(eager, eager if precision == "float32" else lower, model.config.suppress_tokens
                  if name.startswith("Whisper") else [])  # fmt: skip
    once, each = _weights_of(model)
    places = batch * (1500 if name.startswith("Whisper") else SOURCE)
    flops = 2.0 * (once * places + each * batch * beams * NEW)
    size = 1 if precision == "int8" else dtype.itemsize
    return BenchmarkCase(
        "generate", str(case), inputs, candidates, judge, flops, size * (once + NEW * each), flops,
        dtype, chosen=ACCELERATED, reference=EAGER, torch=(EAGER, "torch.compile"),
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
