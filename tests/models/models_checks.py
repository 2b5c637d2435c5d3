"""Reference models in plain PyTorch for the models of this library, and small models to test."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_fast import models

PAD, START, END = 0, 1, 2


#: Options of `small`.
OPTIONS: dict[str, dict[str, Any]] = {
    "paper": {},
    "pre-norm": {"norm_first": True},
    "gelu": {"activation": "gelu"},
    "final norm": {"final_norm": True},
    "pre-norm without final norm": {"norm_first": True, "final_norm": False},
    "shared": {"target_vocab_size": None},
    "tied": {"tie_output": True},
    "shared and tied": {"target_vocab_size": None, "tie_output": True, "output_bias": False},
    "projected": {"embedding_size": 10},
    "projected and tied": {"embedding_size": 10, "tie_output": True},
    "annotated": {"norm": "annotated", "norm_first": True, "layer_norm_eps": 1e-6},
    "annotated post-norm": {"norm": "annotated", "layer_norm_eps": 0.5},
    "no biases": {"bias": False},
    "odd width": {"d_model": 15, "nhead": 3},
    "any activation": {"activation": torch.nn.functional.softplus},
    "learned positions": {"positions": "learned"},
    "one head, four layers": {"nhead": 1, "num_decoder_layers": 4},
}


def small(kind: Any = models.Transformer, **options: Any) -> Any:
    """Returns a small model in evaluation mode; no parameter is zero."""
    arguments: dict[str, Any] = {
        "d_model": 16,
        "nhead": 2,
        "dim_feedforward": 24,
        "max_len": 64,
        "end_token": END,
    }
    if kind is models.Transformer:
        arguments |= {"source_vocab_size": 23, "target_vocab_size": 19, "pad_token": PAD}
        arguments |= {"num_encoder_layers": 2, "num_decoder_layers": 2, "start_token": START}
    else:
        arguments |= {"vocab_size": 19, "num_layers": 2}
    model = kind(**(arguments | options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if (
                parameter.dim() == 1
            ):  # the initial biases (0) and norm weights (1) would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


small_language_model = functools.partial(small, models.LanguageModel)


def varied(model: Any, towards_end: float = 0.0) -> Any:
    """Subtracts the logits' mean over random tokens from the output bias; returns the model.

    The logits then depend mostly on the tokens; other random models generate the same token over
    and over. ``towards_end``: number of standard deviations that are added to the end token's
    logit.
    """
    vocab_size = model.output.weight.shape[0]
    target = torch.randint(0, vocab_size, (40, 12))
    source = torch.randint(3, 23, (40, 7))
    with torch.no_grad():
        crossed = isinstance(model, models.Transformer)
        logits = model(source, target) if crossed else model(target)
        mean = logits.mean((0, 1))
        model.output.bias -= mean
        model.output.bias[END] += towards_end * (logits - mean).std()
    return model


@torch.no_grad()
def recomputed(next_logits: Callable[[Tensor], Tensor], target: Tensor, steps: int) -> Tensor:
    """Greedy decoding without a cache: each step recomputes everything."""
    for _ in range(steps):
        target = torch.cat((target, next_logits(target).argmax(-1, keepdim=True)), 1)
    return target


def tokens(vocab_size: int, lengths: list[int], width: int | None = None) -> Tensor:
    """Returns random tokens above the special ones, padded at the end."""
    width = max(lengths) if width is None else width
    drawn = torch.randint(3, vocab_size, (len(lengths), width))
    return drawn.masked_fill(torch.arange(width) >= torch.tensor(lengths)[:, None], PAD)


class PlainAnnotatedNorm(torch.nn.Module):
    """The norm of the Annotated Transformer, by its formula."""

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(d_model))
        self.bias = torch.nn.Parameter(torch.empty(d_model))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        deviation = (x - x.mean(-1, keepdim=True)).square().sum(-1, keepdim=True)
        deviation = (deviation / (x.shape[-1] - 1)).sqrt()
        centred = x - x.mean(-1, keepdim=True)
        return self.weight * centred / (deviation + self.eps) + self.bias


def plain_stack(half: Any, options: dict[str, Any], layers: int, crossed: bool) -> torch.nn.Module:
    """Returns the equivalent torch.nn stack with the same weights."""
    eps = options["layer_norm_eps"]

    def norm() -> torch.nn.Module:
        if options["norm"] == "annotated":
            return PlainAnnotatedNorm(options["d_model"], eps)
        return torch.nn.LayerNorm(options["d_model"], eps)

    kind = torch.nn.TransformerDecoderLayer if crossed else torch.nn.TransformerEncoderLayer
    layer: Any = kind(
        options["d_model"],
        options["nhead"],
        options["dim_feedforward"],
        0.0,
        options["activation"],
        eps,
        batch_first=True,
        norm_first=options["norm_first"],
        bias=options["bias"],
    )
    for name in ("norm1", "norm2", "norm3")[: 3 if crossed else 2]:
        if options["bias"]:
            setattr(layer, name, norm())
    final = norm() if half.stack.norm is not None else None
    stack: torch.nn.Module
    if crossed:
        stack = torch.nn.TransformerDecoder(layer, layers, final)
    else:
        stack = torch.nn.TransformerEncoder(layer, layers, final, enable_nested_tensor=False)
    stack.load_state_dict(half.stack.state_dict())
    return stack


def plain_positions(length: int, d_model: int) -> Tensor:
    table = torch.zeros(length, d_model, dtype=torch.float64)
    for p in range(length):
        for i in range(d_model):
            angle = p / 10000 ** (2 * (i // 2) / d_model)
            table[p, i] = math.sin(angle) if i % 2 == 0 else math.cos(angle)
    return table


def plain_embedding(embedding: Any, ids: Tensor, dtype: torch.dtype) -> Tensor:
    weight = embedding.table.weight.to(dtype)
    x = weight[ids] * math.sqrt(weight.shape[1])
    if embedding.projection is not None:
        x = x @ embedding.projection.weight.to(dtype).T
    if isinstance(embedding.positions, models.SinusoidalPositions):
        return x + plain_positions(ids.shape[1], x.shape[-1]).to(dtype)
    return x + embedding.positions.table[: ids.shape[1]].to(dtype)


def plain_output(output: Any, x: Tensor) -> Tensor:
    if output.projection is not None:
        x = x @ output.projection.weight.to(x.dtype).T
    bias = None if output.bias is None else output.bias.to(x.dtype)
    return F.linear(x, output.weight.to(x.dtype), bias)


def plain_forward(
    model: models.Transformer,
    source: Tensor,
    target: Tensor,
    dtype: torch.dtype,
    source_mask: Tensor | None = None,
    target_mask: Tensor | None = None,
    memory_mask: Tensor | None = None,
    is_causal: bool = True,
) -> Tensor:
    """Computes `Transformer.forward` with torch.nn modules and fully expanded masks."""
    c = model.config
    encoder = plain_stack(model.encoder, c, c["num_encoder_layers"], False).to(dtype)
    decoder = plain_stack(model.decoder, c, c["num_decoder_layers"], True).to(dtype)
    length = target.shape[1]
    source_hidden = (source == PAD)[:, None, :]
    target_hidden = (target == PAD)[:, None, :].expand(-1, length, -1)
    if is_causal:
        target_hidden = target_hidden | torch.ones(length, length, dtype=torch.bool).triu(1)
    # PyTorch returns NaN for rows in which every key is masked; results at padded positions are not
    # compared.
    heads = c["nhead"]

    def per_head(hidden: Tensor, queries: int, mask: Tensor | None) -> Tensor:
        hidden = hidden.expand(-1, queries, -1).repeat_interleave(heads, 0)
        return hidden if mask is None else hidden | mask

    memory = encoder(
        plain_embedding(model.encoder.embedding, source, dtype),
        mask=per_head(source_hidden, source.shape[1], source_mask),
    )
    hidden = decoder(
        plain_embedding(model.decoder.embedding, target, dtype),
        memory,
        tgt_mask=per_head(target_hidden, length, target_mask),
        memory_mask=per_head(source_hidden, length, memory_mask),
    )
    return plain_output(model.output, hidden)


def in_double(model: Any) -> Any:
    return copy.deepcopy(model).double()
