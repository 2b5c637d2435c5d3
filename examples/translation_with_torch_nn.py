"""Translation with nn.Transformer: change one import, and decode with a cache.

Tutorials that build on torch.nn need one changed line: the import of ``nn`` below. torch.nn has no
key-value cache, so such tutorials run the whole decoder for every token. `models.generate` returns the
same tokens and computes each of them once. It also supports models built from torch.nn only.

    python examples/translation_with_torch_nn.py
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from transformer_fast import models, nn

PAD, START, END = 1, 2, 3


class PositionalEncoding(nn.Module):
    def __init__(self, emb_size: int, dropout: float, maxlen: int = 5000) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        position = torch.arange(maxlen)[:, None]
        angle = position * torch.exp(-torch.arange(0, emb_size, 2) * math.log(10000) / emb_size)
        table = torch.stack((angle.sin(), angle.cos()), -1).flatten(1)
        self.register_buffer("table", table[:, None], persistent=False)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        return self.dropout(x + self.table[start : start + x.shape[0]])


class Seq2SeqTransformer(nn.Module):
    """A translation model. Tokens have shape (length, batch), the default of torch.nn.Transformer."""

    def __init__(
        self, layers: int, emb_size: int, nhead: int, src_vocab: int, tgt_vocab: int, d_ff: int
    ) -> None:
        super().__init__()
        self.transformer = nn.Transformer(emb_size, nhead, layers, layers, d_ff)
        self.generator = nn.Linear(emb_size, tgt_vocab)
        self.src_emb = nn.Embedding(src_vocab, emb_size)
        self.tgt_emb = nn.Embedding(tgt_vocab, emb_size)
        self.positional_encoding = PositionalEncoding(emb_size, 0.1)
        self.scale = math.sqrt(emb_size)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = torch.ones(len(target), len(target), dtype=torch.bool).triu(1)
        padding = (source == PAD).T
        output = self.transformer(
            self.positional_encoding(self.src_emb(source) * self.scale),
            self.positional_encoding(self.tgt_emb(target) * self.scale),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.generator(output)


@torch.no_grad()
def translate(
    model: Seq2SeqTransformer, source: Tensor, method: models.BeamSearch | None = None
) -> models.Generated:
    """Translates source (length, batch); the result's tokens are (batch, length).

    ``method=None``: greedy decoding.
    """
    model.eval()
    padding = (source == PAD).T
    memory = model.transformer.encoder(
        model.positional_encoding(model.src_emb(source) * model.scale),
        src_key_padding_mask=padding,
    )

    def embed(tokens: Tensor, start: int) -> Tensor:
        x = model.tgt_emb(tokens.T) * model.scale
        return model.positional_encoding(x, start).transpose(0, 1)

    return models.generate(
        model.transformer,
        memory,
        method,
        embed=embed,
        project=model.generator,
        prefix=START,
        end_token=END,
        pad_token=PAD,
        max_new_tokens=source.shape[0] + 5,
        memory_key_padding_mask=padding,
    )


def main() -> None:
    torch.manual_seed(0)
    model = Seq2SeqTransformer(2, 64, 4, 60, 50, 128)
    source = torch.tensor([[2, 14, 15, 16, 3], [2, 17, 3, PAD, PAD]]).T
    target = torch.tensor([[2, 24, 25, 3], [2, 26, 27, 3]]).T
    logits = model(source, target[:-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), target[1:].flatten())
    loss.backward()
    print("loss of the untrained model", round(loss.item(), 3))
    found = translate(model, source)
    print("greedy", [row[:n].tolist() for row, n in zip(found.tokens, found.lengths, strict=True)])
    found = translate(model, source, models.BeamSearch(4, n_best=2))
    assert found.scores is not None
    for tokens, scores in zip(found.tokens, found.scores, strict=True):
        for row, score in zip(tokens, scores, strict=True):
            print(f"beam   {score:8.3f}", row.tolist())


if __name__ == "__main__":
    main()
