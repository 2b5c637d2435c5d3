"""Bad input to the models: clear errors, of torch's type where torch has one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models_ruler import small, small_language_model, tokens

from transformer_fast import models

SOURCE, TARGET = torch.tensor([[3, 4, 5]]), torch.tensor([[1, 6]])


@pytest.mark.parametrize(
    ("source", "target", "error", "words"),
    [
        ([[3]], TARGET, TypeError, "source must be a Tensor of token ids, not list"),
        (SOURCE.float(), TARGET, TypeError, r"source .* int64 or int32, not torch\.float32"),
        (SOURCE.bool(), TARGET, TypeError, r"source .* int64 or int32, not torch\.bool"),
        (SOURCE[0], TARGET, ValueError, r"source must have shape \(batch, length\), not \[3\]"),
        (SOURCE[:, :0], TARGET, ValueError, "source is empty"),
        (SOURCE, TARGET[:, :0], ValueError, "target is empty"),
        (SOURCE + 18, TARGET, IndexError, r"source must hold token ids in \[0, 23\), .* holds 23"),
        (-SOURCE, TARGET, IndexError, r"source must hold token ids in \[0, 23\), but holds -5"),
        (SOURCE, TARGET + 13, IndexError, r"target must hold token ids in \[0, 19\), .* holds 19"),
        (SOURCE.repeat(1, 22), TARGET, ValueError, "source has 66 tokens, more than max_len=64"),
        (SOURCE, TARGET.repeat(1, 33), ValueError, "target has 66 tokens, more than max_len=64"),
        (SOURCE, TARGET.repeat(2, 1), ValueError, r"memory must have shape .* batch 2, as target"),
    ],
)
def test_tokens(source: Any, target: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        small()(source, target)


def test_masks() -> None:
    model = small()
    with pytest.raises(TypeError, match=r"padding must be a bool Tensor, .* not torch\.float32"):
        model(SOURCE, TARGET, source_padding=torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"padding must have the shape of source, \[1, 3\], not"):
        model(SOURCE, TARGET, source_padding=torch.zeros(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"memory_padding must have the shape of memory, \[1, 3\]"):
        model.decode(TARGET, model.encode(SOURCE), torch.zeros(1, 2, dtype=torch.bool))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"norm": "batch"}, "norm must be one of layer_norm, annotated, not 'batch'"),
        ({"nhead": 3}, "d_model must be a positive multiple of nhead, not 16 for nhead=3"),
        ({"positions": "rotary"}, "positions must be one of sinusoidal, learned, or None"),
        ({"max_len": 0}, "max_len must be at least 1, not 0"),
        ({"pad_token": 19}, r"pad_token must be a token id in \[0, 19\), not 19"),
        ({"end_token": -1}, r"end_token must be a token id in \[0, 19\), not -1"),
        ({"start_token": 40}, r"start_token must be a token id in \[0, 19\), not 40"),
    ],
)
def test_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        small(**options)


@pytest.mark.parametrize(
    ("options", "arguments", "error", "words"),
    [
        ({"end_token": None}, {}, ValueError, "the end token is missing"),
        ({"start_token": None}, {}, ValueError, "the start token is missing"),
        ({}, {"end_token": 19}, ValueError, r"end_token must be a token id in \[0, 19\), or -1"),
        ({}, {"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1, not 0"),
        ({}, {"max_new_tokens": 2.5}, TypeError, "max_new_tokens must be an int, not float"),
        ({}, {"max_new_tokens": 65}, ValueError, "65 behind 1 tokens is longer than max_len=64"),
        ({}, {"method": models.BeamSearch(20)}, ValueError, "beams must be at most .* 19, not 20"),
        ({}, {"method": "beam"}, TypeError, r"method must be Greedy\(\).* not str"),
        ({}, {"prefix": TARGET[:, :0]}, ValueError, "prefix is empty"),
        ({}, {"prefix": TARGET.repeat(2, 1)}, ValueError, "a row for each of the 1 sources, not 2"),
        ({}, {"prefix": TARGET + 13}, IndexError, "prefix must hold token ids"),
    ],
)
def test_generate(
    options: dict[str, Any], arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        small(**options).generate(SOURCE, **arguments)


def test_sources_of_padding_only() -> None:
    source = tokens(23, [3, 0, 2])
    with pytest.raises(ValueError, match="source is empty: row 1 has nothing but padding"):
        small().generate(source)
    with pytest.raises(ValueError, match="source is empty: each sequence must have at least one"):
        small().generate(source[:, :0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: models.Sampling(0.0), "temperature must be above 0, not 0.0"),
        (lambda: models.Sampling(float("nan")), "temperature must be above 0"),
        (lambda: models.Sampling(top_k=0), "top_k must be at least 1, or None, not 0"),
        (lambda: models.Sampling(top_p=0.0), r"top_p must lie in \(0, 1\]"),
        (lambda: models.Sampling(top_p=1.5), r"top_p must lie in \(0, 1\]"),
        (lambda: models.BeamSearch(0), "beams must be at least 1, not 0"),
        (lambda: models.BeamSearch(3, n_best=4), "n_best must lie between 1 and beams=3"),
    ],
)
def test_methods(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"prompt_lengths": torch.tensor([0])}, ValueError, r"must lie in \[1, 3\], .* 0 to 0"),
        ({"prompt_lengths": torch.tensor([4])}, ValueError, r"must lie in \[1, 3\], .* 4 to 4"),
        ({"prompt_lengths": torch.tensor([1, 1])}, ValueError, r"must have shape \[1\]"),
        ({"prompt_lengths": torch.tensor([1.0])}, TypeError, "must be an integer Tensor"),
        ({"max_new_tokens": 63}, ValueError, "63 behind 3 tokens is longer than max_len=64"),
    ],
)
def test_prompts(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments = {"max_new_tokens": 4} | arguments
    with pytest.raises(error, match=words):
        small_language_model().generate(SOURCE, **arguments)


def test_beam_search_refuses_what_it_cannot_do() -> None:
    model = small_language_model()
    prompt = torch.tensor([[3, 4], [5, 6]])
    with pytest.raises(ValueError, match="beam search needs prompts of one length"):
        model.generate(
            prompt, models.BeamSearch(2), max_new_tokens=2, prompt_lengths=torch.tensor([1, 2])
        )
    with pytest.raises(ValueError, match="beam search cannot stream"):
        model.stream(prompt, models.BeamSearch(2), max_new_tokens=2)


def test_streams_check_at_once() -> None:
    with pytest.raises(ValueError, match="source is empty"):
        small().stream(SOURCE[:, :0])


def test_nothing_is_changed_by_an_error() -> None:
    model = small().train()
    source = SOURCE.clone()
    with pytest.raises(ValueError, match="beams must be at most"):
        model.generate(source, models.BeamSearch(20))
    assert all(part.training for part in model.modules())
    assert torch.equal(source, SOURCE)
