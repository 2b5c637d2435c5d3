"""An encoder with one packed projection and einsum, with our parts.

Some tutorials project to query, key and value at once, each head's three side by side, and let
einsum do the rest:

    qkv = qkv_proj(x).view(batch, length, heads, 3 * d_head)
    q, k, v = qkv.chunk(3, dim=-1)
    scores = einsum("bqhd,bkhd->bhqk", q, k) / sqrt(d_head)
    values = einsum("bhqk,bkhd->bqhd", softmax(scores), v)

Ours is packed too, but has all heads' queries first, then all keys, then all values (as in
torch.nn.MultiheadAttention), so the rows of a trained weight have to be sorted:
``models.load_weights(model, theirs, packed_by_head=True)``.

The tutorial's model is an encoder with a classifier on the mean of its vectors: `Classifier`.

    python examples/packed_projection.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_fast import models


class Classifier(torch.nn.Module):
    """Which class a sequence of tokens belongs to."""

    def __init__(
        self, vocab_size: int, classes: int, d_model: int, heads: int, layers: int, d_ff: int
    ) -> None:
        super().__init__()
        self.encoder = models.Encoder(
            vocab_size, d_model, heads, layers, d_ff, dropout=0.0, activation="gelu", pad_token=0
        )
        self.head = torch.nn.Linear(d_model, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        real = (tokens != 0).unsqueeze(-1)
        vectors = self.encoder(tokens).masked_fill(~real, 0.0)
        return self.head(vectors.sum(1) / real.sum(1))


def main() -> None:
    torch.manual_seed(0)
    # Is there a 7 in the sequence?
    model = Classifier(10, 2, d_model=32, heads=4, layers=1, d_ff=64)
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(1, 91):
        lengths = torch.randint(1, 11, (64, 1))
        tokens = torch.randint(1, 10, (64, 10)).masked_fill(torch.arange(10) >= lengths, 0)
        wanted = (tokens == 7).any(1).long()
        logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits, wanted)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 30 == 0:
            right = (logits.argmax(1) == wanted).float().mean()
            print(f"step {step:2}  loss {loss.item():.3f}  right {right:.0%}")


if __name__ == "__main__":
    main()
