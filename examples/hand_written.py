"""Uses a hand-written Transformer as it is, and converts its weights to `models.Transformer`.

The classes are short versions of those of The Annotated Transformer (Rush 2018; Huang et al. 2022),
without dropout and in plain PyTorch. The example uses:

    functional.padding_mask and causal_mask    masks, True = may attend
    models.HandWritten                         beam search instead of the tutorial's greedy_decode
    models.attention_weights                   the weights of each head; viz.attention_maps draws them
    models.load_weights                        loads the trained weights into models.Transformer

    python examples/hand_written.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_fast import functional, models

START, END, BLANK = 0, 1, 2


class LayerNorm(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.a_2, self.b_2 = (
            nn.Parameter(torch.ones(features)),
            nn.Parameter(torch.zeros(features)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.a_2 * (x - x.mean(-1, True)) / (x.std(-1, keepdim=True) + 1e-6) + self.b_2


class MultiHeadedAttention(nn.Module):
    def __init__(self, heads: int, d_model: int) -> None:
        super().__init__()
        self.heads = heads
        self.linears = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            linear(x).view(x.shape[0], -1, self.heads, x.shape[-1] // self.heads).transpose(1, 2)
            for linear, x in zip(self.linears, (query, key, value), strict=False)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        self.attn = scores.softmax(-1)
        return self.linears[3]((self.attn @ v).transpose(1, 2).flatten(2))


class PositionwiseFeedForward(nn.Module):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(self.w_1(x).relu())


class SublayerConnection(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.norm = LayerNorm(d_model)

    def forward(self, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        return x + run(self.norm(x))


class Layer(nn.Module):
    def __init__(self, heads: int, d_model: int, d_ff: int, crossed: bool) -> None:
        super().__init__()
        self.self_attn = MultiHeadedAttention(heads, d_model)
        if crossed:
            self.src_attn = MultiHeadedAttention(heads, d_model)
        self.feed_forward = PositionwiseFeedForward(d_model, d_ff)
        self.sublayer = nn.ModuleList(SublayerConnection(d_model) for _ in range(2 + crossed))

    def forward(self, x: Tensor, mask: Tensor, *memory: Tensor) -> Tensor:
        x = self.sublayer[0](x, lambda y: self.self_attn(y, y, y, mask))
        if memory:
            x = self.sublayer[1](x, lambda y: self.src_attn(y, memory[0], memory[0], memory[1]))
        return self.sublayer[-1](x, self.feed_forward)


class Stack(nn.Module):
    def __init__(self, layers: int, *shape: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(*shape) for _ in range(layers))
        self.norm = LayerNorm(shape[1])

    def forward(self, x: Tensor, mask: Tensor, *memory: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask, *memory)
        return self.norm(x)


class Embeddings(nn.Module):
    def __init__(self, vocab: int, d_model: int) -> None:
        super().__init__()
        self.lut = nn.Embedding(vocab, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.lut(x) * math.sqrt(self.lut.embedding_dim)


class PositionalEncoding(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        position = torch.arange(0, 60)[:, None]
        div_term = torch.exp(torch.arange(0, d_model, 2) * -(math.log(10000.0) / d_model))
        pe = torch.zeros(60, d_model)
        pe[:, 0::2], pe[:, 1::2] = torch.sin(position * div_term), torch.cos(position * div_term)
        self.register_buffer("pe", pe[None])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pe[:, : x.shape[1]]


class Generator(nn.Module):
    def __init__(self, d_model: int, vocab: int) -> None:
        super().__init__()
        self.proj = nn.Linear(d_model, vocab)

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.proj(x), -1)


class EncoderDecoder(nn.Module):
    def __init__(self, src: int, tgt: int, layers: int, d_model: int, d_ff: int, h: int) -> None:
        super().__init__()
        self.encoder = Stack(layers, h, d_model, d_ff, False)
        self.decoder = Stack(layers, h, d_model, d_ff, True)
        self.src_embed = nn.Sequential(Embeddings(src, d_model), PositionalEncoding(d_model))
        self.tgt_embed = nn.Sequential(Embeddings(tgt, d_model), PositionalEncoding(d_model))
        self.generator = Generator(d_model, tgt)

    def encode(self, src: Tensor, src_mask: Tensor) -> Tensor:
        return self.encoder(self.src_embed(src), src_mask)

    def decode(self, memory: Tensor, src_mask: Tensor, tgt: Tensor, tgt_mask: Tensor) -> Tensor:
        return self.decoder(self.tgt_embed(tgt), tgt_mask, memory, src_mask)

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Tensor, tgt_mask: Tensor) -> Tensor:
        return self.decode(self.encode(src, src_mask), src_mask, tgt, tgt_mask)


def masks(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the masks (B, 1, S) and (B, T, T), without a dimension for the heads."""
    source_mask = functional.padding_mask(source, BLANK)[:, 0]
    target_mask = functional.padding_mask(target, BLANK)[:, 0]
    return source_mask, target_mask & functional.causal_mask(target.shape[1])


def main() -> None:
    torch.manual_seed(0)
    model = EncoderDecoder(11, 11, 2, 64, 128, 4)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(1, 151):  # the task is to copy the source
        source = torch.randint(3, 11, (24, 8))
        target = torch.cat((torch.full((24, 1), START), source[:, :-1]), 1)
        log_p = model.generator(model(source, target, *masks(source, target)))
        loss = F.nll_loss(log_p.flatten(0, 1), source.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 50 == 0:
            print(f"step {step:3}  loss {loss.item():.3f}")

    source = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10]])
    by_hand = models.HandWritten(model, pad_token=BLANK, start_token=START, end_token=END)
    read = {"read": lambda module, output: module.attn}
    with models.attention_weights(model, "decoder.layers.*.src_attn", **read) as weights:
        found = by_hand.generate(source, models.BeamSearch(3), max_new_tokens=8)
    print("attention of each copied token to the source, last layer, mean of the heads:")
    print(weights["decoder.layers.1.src_attn"][0].mean(0).numpy().round(1))

    ours = models.Transformer(
        11, 11, 64, 4, 2, 2, 128, 0.0, layer_norm_eps=1e-6, norm_first=True, norm="annotated",
        pad_token=BLANK, start_token=START, end_token=END,
    )  # fmt: skip
    models.load_weights(ours, model.state_dict())
    same = ours.generate(source, models.BeamSearch(3), max_new_tokens=8)
    print("source        ", source[0].tolist())
    print("by hand       ", found.tokens[0].tolist())
    print("converted     ", same.tokens[0].tolist())


if __name__ == "__main__":
    main()
