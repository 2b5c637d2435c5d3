"""A cache for models of torch.nn's own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models_checks import recomputed
from torch import Tensor

from transformer_fast import models, nn

START, END, V, M = 1, 2, 19, 16


class User(torch.nn.Module):
    """What users write: torch.nn.Transformer between embeddings and a Linear."""

    def __init__(self, transformer: type[torch.nn.Module], **options: Any) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(V, M)
        self.position = torch.nn.Parameter(torch.randn(40, M) * 0.3)
        self.transformer: Any = transformer(M, 2, 2, 2, 24, **options)
        self.out = torch.nn.Linear(M, V)
        self.batch_first = options.get("batch_first", False)

    def embed(self, ids: Tensor, start: int = 0) -> Tensor:
        return self.table(ids) * 4 + self.position[start : start + ids.shape[1]]

    def swap(self, x: Tensor) -> Tensor:
        return x if self.batch_first else x.transpose(0, 1)

    def encode(self, source: Tensor, padding: Tensor | None) -> Tensor:
        return self.transformer.encoder(self.swap(self.embed(source)), src_key_padding_mask=padding)

    def next_logits(self, memory: Tensor, padding: Tensor | None, target: Tensor) -> Tensor:
        mask = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        hidden = self.transformer.decoder(
            self.swap(self.embed(target)),
            memory,
            tgt_mask=mask,
            memory_key_padding_mask=padding,
        )
        return self.out(self.swap(hidden)[:, -1])

    def arguments(self) -> dict[str, Any]:
        return {
            "embed": self.embed,
            "project": self.out,
            "prefix": START,
            "end_token": END,
            "pad_token": 0,
        }


def random_user(transformer: type[torch.nn.Module], **options: Any) -> User:
    user = User(transformer, **options).eval()
    with torch.no_grad():
        for parameter in user.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return user


@pytest.mark.parametrize("transformer", [torch.nn.Transformer, nn.Transformer])
@pytest.mark.parametrize(
    "options",
    [
        {"batch_first": True},
        {"batch_first": False},
        {"batch_first": True, "norm_first": True},
        {"batch_first": False, "norm_first": True, "activation": "gelu"},
        {"activation": torch.nn.functional.softplus, "bias": False},
    ],
    ids=lambda options: ", ".join(options),
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested")
def test_greedy(transformer: Any, options: dict[str, Any]) -> None:
    user = random_user(transformer, **options)
    source = torch.randint(3, V, (4, 6))
    padding = torch.arange(6) >= torch.tensor([6, 2, 5, 1])[:, None]
    with torch.no_grad():
        memory = user.encode(source, padding)
    start = torch.full((4, 1), START)
    target = recomputed(lambda target: user.next_logits(memory, padding, target), start, 12)
    user.train()  # dropout has no part in it
    found = models.generate(
        user.transformer,
        memory,
        max_new_tokens=12,
        memory_key_padding_mask=padding,
        use_cache=True,
        **user.arguments(),
    )
    for row, length, right in zip(found.tokens, found.lengths, target[:, 1:], strict=True):
        ends = (right == END).nonzero()
        assert int(length) == (int(ends[0]) + 1 if len(ends) else 12)
        assert torch.equal(row[:length], right[:length])
    streamed = models.stream(
        user.transformer.decoder,
        memory,
        max_new_tokens=12,
        memory_key_padding_mask=padding,
        **user.arguments(),
    )
    assert torch.equal(torch.stack(list(streamed), 1), found.tokens)


def test_decoder_only_of_torchs_encoder() -> None:
    user = random_user(torch.nn.Transformer, batch_first=True)
    stack = user.transformer.encoder
    arguments = user.arguments() | {"prefix": torch.tensor([[1, 5, 3], [1, 9, 4]])}
    found = models.generate(stack, None, max_new_tokens=9, use_cache=True, **arguments)
    again = models.generate(stack, None, max_new_tokens=9, use_cache=False, **arguments)
    assert torch.equal(found.tokens, again.tokens)
    beams = models.generate(stack, None, models.BeamSearch(3), max_new_tokens=9, **arguments)
    assert beams.scores is not None
    assert (beams.scores < 0).all()


def test_project_may_be_any_function() -> None:
    user = random_user(torch.nn.Transformer, batch_first=True)
    memory = torch.randn(3, 5, M)
    arguments = user.arguments()
    expected = models.generate(user.transformer, memory, max_new_tokens=9, **arguments)
    arguments["project"] = lambda x: user.out(x) * 2 + 1
    found = models.generate(user.transformer, memory, max_new_tokens=9, **arguments)
    assert torch.equal(found.tokens, expected.tokens)


def _appending(layers: Any) -> None:
    for layer in layers:
        layer.self_attn.add_zero_attn = True


def _block(layers: Any) -> None:
    block = layers[0]._ff_block
    layers[0]._ff_block = lambda x: block(x) + 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_appending, r"layers\.0\.self_attn appends keys"),
        (
            lambda layers: layers[1].linear1.register_forward_hook(lambda *_: None),
            r"layers\.1\.linear1 has hooks",
        ),
        (
            lambda layers: setattr(layers[1], "dropout2", torch.nn.AlphaDropout(0.1)),
            r"layers\.1\.dropout2 is an AlphaDropout",
        ),
        (
            lambda layers: setattr(layers[1], "norm_first", True),
            "the layers differ in norm_first",
        ),
        (
            lambda layers: torch.nn.utils.parametrizations.weight_norm(layers[0].linear2),
            r"layers\.0\.linear2 is a ParametrizedLinear",
        ),
        (_block, r"layers\.0\._ff_block is replaced"),
    ],
)
def test_what_cannot_have_a_cache_is_recomputed(change: Any, reason: str) -> None:
    user = random_user(torch.nn.Transformer, batch_first=True)
    change(user.transformer.decoder.layers)
    memory = torch.randn(2, 5, M)
    arguments = user.arguments() | {"end_token": -1, "max_new_tokens": 5}
    with pytest.raises(ValueError, match=f"there can be no cache: {reason}"):
        models.generate(user.transformer, memory, use_cache=True, **arguments)
    found = models.generate(user.transformer, memory, **arguments)
    start = torch.full((2, 1), START)
    target = recomputed(lambda target: user.next_logits(memory, None, target), start, 5)
    assert torch.equal(found.tokens, target[:, 1:])


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"decoder": torch.nn.Linear(2, 2)}, TypeError, r"decoder must be .* not Linear"),
        ({"memory": torch.randn(2, M)}, ValueError, r"memory must have shape \(batch, length, d_m"),
        ({"memory": torch.randn(2, 0, M)}, ValueError, "memory is empty: each source"),
        ({"memory": None}, ValueError, "prefix must be a Tensor .* where there is no memory"),
        ({"prefix": torch.ones(3, 1).long()}, ValueError, "a row for each of the 2 sources, not 3"),
        ({"prefix": [1]}, TypeError, "prefix must be a Tensor of token ids, not list"),
        ({"end_token": None}, ValueError, "end_token must be a token id, or -1"),
        ({"end_token": V}, ValueError, r"end_token must be a token id in \[0, 19\)"),
        (
            {"memory_key_padding_mask": torch.zeros(2, 4, dtype=torch.bool)},
            ValueError,
            r"memory_key_padding_mask must have the shape of memory, \[2, 5\], not \[2, 4\]",
        ),
        (
            {"memory_key_padding_mask": torch.ones(2, 5, dtype=torch.bool)},
            ValueError,
            "memory is empty: row 0 has nothing but padding",
        ),
        ({"prefix": V}, IndexError, "index out of range in self"),
    ],
)
def test_errors(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    user = random_user(torch.nn.Transformer, batch_first=True)
    arguments: dict[str, Any] = {
        "decoder": user.transformer,
        "memory": torch.randn(2, 5, M),
        "max_new_tokens": 4,
        **user.arguments(),
        **changes,
    }
    with pytest.raises(error, match=words):
        models.generate(**arguments)
