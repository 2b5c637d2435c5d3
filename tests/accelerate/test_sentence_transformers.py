"""sentence-transformers after `accelerate`, and the page examples/embeddings.py."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import transformer_fast
from transformer_fast import _native

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings of packages that it imports
    library = pytest.importorskip("sentence_transformers")
    from examples import embeddings as page

SENTENCE = (
    "padding rows are skipped by every kernel while masks hide keys and queries attend to the others "
    "that remain visible in long batches of short sentences which models embed on machines without "
    "any accelerator so that searching costs little time even if folders hold many different texts"
)
WORDS = SENTENCE.split()
TEXTS = [" ".join(WORDS[start : start + 8 + start % 7]) for start in range(0, 32, 2)]
INT8 = {"quantize": "int8"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a model of 64 dimensions and its tokenizer."""
    path = tmp_path_factory.mktemp("made")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        page.make_model(path, TEXTS, width=64, layers=2)
    return path


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def accelerated(model: Any, **options: Any) -> Any:
    if options and _native.module is None:
        pytest.skip("8-bit products need the native module")
    transformer_fast.accelerate(model, **options)
    return model


@pytest.mark.parametrize("options", [{}, INT8], ids=["float32", "int8"])
def test_embeddings_do_not_depend_on_the_batch(made: Path, options: Any) -> None:
    """`encode` sorts by length, so that a sentence's batch has other sentences and padding."""
    right = page.embed(page.load(made / "model"), TEXTS)
    model = accelerated(page.load(made / "model"), **options)
    with transformer_fast.batch_invariant():
        found = [page.embed(model, TEXTS, batch) for batch in (1, 7, 32)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert page.worst_cosine(found[0], right) > (0.999 if options else 1 - 1e-6)
    transformer_fast.restore(model)
    assert torch.equal(page.embed(model, TEXTS), right)


@pytest.mark.parametrize("options", [{}, INT8], ids=["float32", "int8"])
def test_cross_encoders_predict_the_same(made: Path, tmp_path: Path, options: Any) -> None:
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    torch.manual_seed(1)
    config = BertConfig.from_pretrained(made / "bert", num_labels=1, initializer_range=0.2)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    BertTokenizer.from_pretrained(made / "bert").save_pretrained(tmp_path)
    pairs = list(zip(TEXTS, TEXTS[1:] + TEXTS[:1], strict=True))
    model = library.CrossEncoder(str(tmp_path), device="cpu")
    right = torch.from_numpy(model.predict(pairs, show_progress_bar=False))
    found = accelerated(model, **options).predict(pairs, show_progress_bar=False)
    if not options:
        torch.testing.assert_close(torch.from_numpy(found), right)
    both = torch.stack((torch.from_numpy(found), right))
    assert torch.corrcoef(both)[0, 1] > 0.99
    assert not options or not torch.allclose(*both)


class Encoder(library.SentenceTransformer):  # type: ignore[misc, name-defined]
    """Accelerates itself when unpickled, as docs/guides/accelerate.md recommends for pools."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        transformer_fast.accelerate(self, **INT8)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "options"),
    [(library.SentenceTransformer, {**INT8, "keep_weights": False}), (Encoder, INT8)],
)
def test_processes_of_a_pool_encode(made: Path, kind: type, options: Any) -> None:
    """A pickle without float weights has our classes; `Encoder` is accelerated again."""
    right = torch.from_numpy(page.load(made / "model").encode(TEXTS))
    model = accelerated(kind(str(made / "model"), device="cpu"), **options)
    pool = model.start_multi_process_pool(["cpu"])
    try:
        found = torch.from_numpy(model.encode(TEXTS, pool=pool))
    finally:
        model.stop_multi_process_pool(pool)
    assert torch.cosine_similarity(found, right).min() > 0.999
    assert not torch.allclose(found, right, rtol=1e-4, atol=1e-5)  # the processes run in 8 bits


@pytest.mark.thorough
def test_the_page_searches_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if _native.module is None:
        pytest.skip("8-bit products need the native module")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "all.md").write_text("\n\n".join([*TEXTS, "too short"]), "utf-8")
    arguments = ["--texts", str(tmp_path / "texts"), "--out", str(tmp_path / "out")]
    page.main([*arguments, "--width", "64", "--layers", "2"])
    saved = torch.load(tmp_path / "out" / "vectors.pt")
    assert saved["texts"] == TEXTS
    assert saved["vectors"].shape == (16, 64)
    printed = capsys.readouterr().out
    assert "16 paragraphs" in printed
    assert "accelerated, int8" in printed
    query, best, *_ = printed.partition("query: ")[2].splitlines()
    assert query in TEXTS[8]
    assert best.endswith(TEXTS[8][:90])
    assert "python examples/embeddings.py" in str(page.__doc__)
