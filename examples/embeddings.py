"""Embeds a folder of text files with sentence-transformers, and searches it.

The paragraphs of all .md, .txt and .rst files of a folder become a matrix of vectors, before and after
`transformer_fast.accelerate`, and the query's nearest paragraphs are printed. Nothing is downloaded:
unless `--model` names a folder with a model of yours, a tokenizer is trained on the texts, and a model
of MiniLM's size gets random weights. Its vectors show speed and precision, but only a query from a
paragraph finds that paragraph.

    python examples/embeddings.py --texts docs

Needs sentence-transformers: pip install sentence-transformers
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import BertWordPieceTokenizer
from torch import Tensor
from transformers import BertConfig, BertModel, BertTokenizer

import transformer_fast

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 128


def paragraphs(folder: Path) -> list[str]:
    """Returns the paragraphs of a folder's text files that have at least eight words."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".md", ".txt", ".rst"))
    parts = (part for path in files for part in re.split(r"\n\s*\n", path.read_text("utf-8")))
    found = [" ".join(part.split()) for part in parts]
    return [part for part in found if len(part.split()) >= 8]


def make_model(path: Path, texts: list[str], width: int = 384, layers: int = 6) -> None:
    """Saves a model with random weights and its tokenizer, in the layout of sentence-transformers."""
    words = BertWordPieceTokenizer()
    words.train_from_iterator(texts, vocab_size=4000, show_progress=False)
    tokenizer = BertTokenizer(words.get_vocab(), model_max_length=LONGEST)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=4 * width,
        num_hidden_layers=layers, num_attention_heads=width // 32, max_position_embeddings=LONGEST,
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertModel(config)
    # Words, not their positions, make the vectors of a model that has not been trained.
    model.embeddings.position_embeddings.weight.data *= 0.1
    model.embeddings.token_type_embeddings.weight.data.zero_()
    for part in (tokenizer, model):
        part.save_pretrained(path / "bert")
    modules = Transformer(str(path / "bert")), Pooling(width, pooling_mode="mean")
    SentenceTransformer(modules=[*modules], device="cpu").save(str(path / "model"))


def load(path: Path) -> SentenceTransformer:
    return SentenceTransformer(str(path), device="cpu")


def embed(model: SentenceTransformer, texts: list[str], batch: int = 32) -> Tensor:
    """Returns unit vectors (texts, width). The library sorts the texts by length."""
    found = model.encode(
        texts, batch_size=batch, convert_to_tensor=True, normalize_embeddings=True,
        show_progress_bar=False,
    )  # fmt: skip
    return found.float()


def timed(model: SentenceTransformer, texts: list[str]) -> tuple[Tensor, float]:
    """Returns the vectors, and sentences a second: the best of three runs."""
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        vectors = embed(model, texts)
        best = max(best, len(texts) / (time.perf_counter() - start))
    return vectors, best


def worst_cosine(vectors: Tensor, others: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(vectors.double(), others.double()).min().item()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--texts", type=Path, default=ROOT / "docs", help="folder of text files")
    parser.add_argument("--model", type=Path, help="folder of a model of sentence-transformers")
    parser.add_argument("--query", help="(default: words from the middle of one of the paragraphs)")
    parser.add_argument("--out", type=Path, default=Path("build/embeddings"), help="folder")
    parser.add_argument("--width", type=int, default=384, help="of the model that is made")
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args(arguments)
    texts = paragraphs(options.texts)
    if not texts:
        parser.error(f"argument --texts: there are no paragraphs in {options.texts}")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.model
    if path is None:
        make_model(options.out, texts, options.width, options.layers)
        path = options.out / "model"

    model = load(path)
    before, rate = timed(model, texts)
    threads = torch.get_num_threads()
    print(f"{len(texts)} paragraphs of {options.texts}, {threads} thread{'s' * (threads > 1)}")
    print(f"PyTorch                {rate:6.0f} sentences a second")
    found = {}
    for precision, settings in (("float32", {}), ("int8", {"quantize": "int8"})):
        model = load(path)
        transformer_fast.accelerate(model, **settings)
        found[precision], faster = timed(model, texts)
        print(
            f"accelerated, {precision:9} {faster:6.0f} sentences a second, {faster / rate:.2f} times "
            f"as fast; cosine of the worst {worst_cosine(found[precision], before):.6f}"
        )
    vectors = found["int8"]
    torch.save({"texts": texts, "vectors": vectors}, options.out / "vectors.pt")
    print(f"written: {options.out / 'vectors.pt'}, a matrix {list(vectors.shape)}\n")
    words = texts[len(texts) // 2].split()
    query = options.query or " ".join(words[len(words) // 4 : -(len(words) // 4)])
    # The mean is subtracted: all texts share it, so it does not tell them apart.
    centre = vectors.mean(0)
    wanted = embed(model, [query])[0] - centre
    scores = torch.nn.functional.cosine_similarity(vectors - centre, wanted)
    print(f"query: {query}")
    for place in scores.topk(min(3, len(texts))).indices.tolist():
        print(f"  {scores[place]:.3f}  {texts[place][:90]}")


if __name__ == "__main__":
    main()
