"""Draws every kind of picture of transformer_fast.viz.

First trains a small model for some seconds to reverse a line of words, so that its attention has a
pattern. Then draws its attention, its layers, position vectors and masks. Writes PNGs to a folder,
and `index.html`, which contains all of them.

    python examples/pictures.py --out build/pictures

Needs matplotlib: pip install matplotlib
"""

from __future__ import annotations

import argparse
import base64
import html
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from transformer_fast import models, viz

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAD, START, END = 0, 1, 2
WORDS = (
    *("<pad>", "<s>", "</s>", "the", "old", "cat", "slept", "on", "a", "warm", "mat", "while"),
    *("rain", "fell", "softly", "and", "birds", "sang", "outside"),
)
LONGEST = 8


def make_model() -> models.Transformer:
    return models.Transformer(
        len(WORDS), d_model=64, nhead=4, num_encoder_layers=2, num_decoder_layers=2,
        dim_feedforward=128, dropout=0.0, max_len=64, tie_output=True,
        pad_token=PAD, start_token=START, end_token=END,
    )  # fmt: skip


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Returns lines of 3 to 8 words, and the reversed lines with start and end tokens."""
    source = torch.full((size, LONGEST), PAD)
    target = torch.full((size, LONGEST + 2), PAD)
    for row, length in enumerate(torch.randint(3, LONGEST + 1, (size,)).tolist()):
        words = torch.randint(3, len(WORDS), (length,))
        source[row, :length] = words
        target[row, 0], target[row, length + 1] = START, END
        target[row, 1 : length + 1] = words.flip(0)
    return source, target


def train(model: models.Transformer, steps: int) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(1, steps + 1):
        source, target = batch(64)
        logits = model(source, target[:, :-1])
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD
        )
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 0:
            print(f"step {step}  loss {loss.item():.3f}")


def sentences() -> Tensor:
    """Returns two lines; the second is shorter, so it is padded."""
    lines = ("the old cat slept on a warm mat", "birds sang outside")
    ids = torch.full((2, LONGEST), PAD)
    for row, line in enumerate(lines):
        words = [WORDS.index(word) for word in line.split()]
        ids[row, : len(words)] = torch.tensor(words)
    return ids


def of_attention(model: models.Transformer) -> Iterator[tuple[str, str, Figure]]:
    source = sentences()
    found = model.generate(source, max_new_tokens=LONGEST + 1)
    target = torch.cat((torch.full((2, 1), START), found.tokens), 1)
    for row in found.tokens:
        print("reversed:", " ".join(WORDS[i] for i in row if i > END))

    yield (
        "attention_cross",
        "Attention of the target (rows) to the source, in each layer and head. The model reverses "
        "lines: at each target word it attends to the word before that one in the source, which "
        "comes next in the target.",
        viz.model_attention(model, source, target, source_vocabulary=WORDS),
    )
    yield (
        "attention_mean",
        "The mean of the heads, for a shorter line of the same batch; its padding is grey.",
        viz.model_attention(model, source, target, index=1, average=True, source_vocabulary=WORDS),
    )
    yield (
        "attention_encoder",
        "Self-attention of the source.",
        viz.model_attention(model, source, kind="encoder", source_vocabulary=WORDS),
    )
    yield (
        "attention_decoder",
        "Self-attention of the target; later words are hidden.",
        viz.model_attention(model, source, target, kind="decoder", source_vocabulary=WORDS),
    )


def of_positions() -> Iterator[tuple[str, str, Figure]]:
    yield (
        "positions",
        "Position vectors, which are added to the embeddings.",
        viz.positional_encoding(models.SinusoidalPositions(5000, 128)),
    )


def of_masks() -> Iterator[tuple[str, str, Figure]]:
    length = 8
    padding = torch.zeros(2, length, dtype=torch.bool)
    padding[1, 5:] = True
    line = sentences()[0]
    yield (
        "masks_padding_and_causal",
        "Padding and causal masks are separate arguments; a key is visible if both allow it.",
        viz.masks(length, key_padding=padding, is_causal=True, index=1),
    )
    window = (torch.arange(length)[:, None] - torch.arange(length)).abs() <= 2
    yield (
        "masks_bool",
        "A bool mask has opposite meanings in transformer_fast.functional and in torch.nn; here True "
        "= may attend.",
        viz.masks(length, attn_mask=window, is_causal=True, query_tokens=[WORDS[i] for i in line]),
    )
    yield (
        "masks_bool_torch_nn",
        "Here True = hidden. The first three queries are fully masked: their output is 0.",
        viz.masks(length, attn_mask=window, is_causal=True, true_means="hidden"),
    )
    distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()
    yield (
        "masks_float",
        "A float mask is added to the scores; here it decreases with distance. key_lengths hides "
        "padding without a mask.",
        viz.masks(
            length,
            attn_mask=-0.5 * distance.float(),
            key_lengths=torch.tensor([8, 6]),
            is_causal=True,
            index=1,
        ),
    )


def of_layers(model: models.Transformer) -> Iterator[tuple[str, str, Figure]]:
    paper = models.Transformer(37000, tie_output=True, output_bias=False, device="meta")
    yield (
        "layers_base",
        "The paper's base model: norms after the sub-layers, one table for both embeddings and the "
        "output.",
        viz.model_diagram(paper),
    )
    annotated = models.Transformer(
        11000, 8000, norm_first=True, norm="annotated", layer_norm_eps=1e-6, device="meta"
    )
    yield (
        "layers_pre_norm",
        "The Annotated Transformer: norms before the sub-layers, and one more at the end.",
        viz.model_diagram(annotated),
    )
    gpt = models.LanguageModel(
        50257, 768, 12, 12, 3072, activation="gelu", norm_first=True, positions="learned",
        embedding_scale=1.0, max_len=1024, tie_output=True, output_bias=False, device="meta",
    )  # fmt: skip
    yield ("layers_decoder_only", "A decoder-only model.", viz.model_diagram(gpt))
    yield ("layers_small", "The model of this page.", viz.model_diagram(model))


def page(pictures: Sequence[tuple[str, str, bytes]]) -> str:
    """Returns an HTML page with embedded pictures."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><meta charset="utf-8"><title>transformer_fast.viz</title>',
        "<style>body { font: 16px sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em }",
        "figure { margin: 3em 0 } img { max-width: 100% } figcaption { margin-bottom: 1em }</style>",
        "<h1>Pictures of Transformers</h1>",
    ]
    for name, caption, png in pictures:
        caption = html.escape(caption)
        data = base64.b64encode(png).decode()
        parts.append(
            f'<figure id="{name}"><figcaption>{caption}</figcaption>'
            f'<img alt="{caption}" src="data:image/png;base64,{data}"></figure>'
        )
    return "\n".join([*parts, "</html>", ""])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/pictures"), help="folder")
    parser.add_argument("--steps", type=int, default=400, help="training steps")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    model = make_model()
    train(model, options.steps)
    done = []
    for pictures in (of_attention(model), of_layers(model), of_positions(), of_masks()):
        for name, caption, figure in pictures:
            file = io.BytesIO()
            figure.savefig(file, format="png", dpi=100, pil_kwargs={"optimize": True})
            (options.out / f"{name}.png").write_bytes(file.getvalue())
            done.append((name, caption, file.getvalue()))
    (options.out / "index.html").write_text(page(done), encoding="utf-8")
    print(f"{len(done)} pictures, and all of them on {options.out / 'index.html'}")


if __name__ == "__main__":
    main()
