"""Token embeddings, position encodings and the output projection."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import functional
from ..nn import Embedding
from ..nn.drop_in import DropIn
from ..nn.fusion import affine
from ..nn.int8 import Int8Weight, run_linear
from .tokens import check_ids

__all__ = ["LearnedPositions", "OutputProjection", "SinusoidalPositions", "TokenEmbedding"]


class Positions(torch.nn.Module):
    """A table (max_len, M) of position vectors; ``forward(length, start)`` returns (length, M).

    Raises:
        ValueError: start + length exceeds max_len.
    """

    table: Tensor

    def __init__(
        self,
        max_len: int,
        d_model: int,
        *,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if max_len < 1:
            raise ValueError(f"max_len must be at least 1, not {max_len}")
        self.max_len, self.d_model = max_len, d_model
        self._keep(torch.empty((max_len, d_model), device=device, dtype=dtype))
        self.reset_parameters()

    def _keep(self, table: Tensor) -> None:
        """Sets the table of the two subclasses below; other subclasses set ``table`` themselves."""

    def reset_parameters(self) -> None:
        """Initialises the table, in subclasses that compute it or draw it at random."""

    def forward(self, length: int, start: int = 0) -> Tensor:
        if start + length > self.max_len:
            raise ValueError(
                f"a sequence of {start + length} tokens is longer than max_len={self.max_len}"
            )
        return self.table[start : start + length]

    def extra_repr(self) -> str:
        return f"max_len={self.max_len}, d_model={self.d_model}"


class SinusoidalPositions(Positions):
    """``PE(p, 2i) = sin(p / 10000^(2i/M))``, ``PE(p, 2i+1) = cos(p / 10000^(2i/M))``.

    The table is computed in fp64 and rounded once. It is not a parameter and not in the state_dict.

    Source: "Attention Is All You Need", section 3.5.
    """

    def _keep(self, table: Tensor) -> None:
        self.register_buffer("table", table, persistent=False)

    def reset_parameters(self) -> None:
        """Compute the table; call it again after ``to_empty`` on a model built on "meta"."""
        if self.table.is_meta:
            return
        position = torch.arange(self.max_len, dtype=torch.float64)[:, None]
        even = torch.arange(0, self.d_model, 2, dtype=torch.float64)
        angle = position * 10000.0 ** (-even / self.d_model)
        waves = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)
        self.table.copy_(waves[:, : self.d_model])


class LearnedPositions(Positions):
    """A learned vector for each position.

    Source: "Attention Is All You Need", section 3.5, the alternative to the sinusoids.
    """

    def _keep(self, table: Tensor) -> None:
        self.table = torch.nn.Parameter(table)

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.table, std=0.02)


def make_positions(
    kind: str | None,
    max_len: int,
    d_model: int,
    device: torch.types.Device,
    dtype: torch.dtype | None,
) -> Positions | None:
    """Returns the module for ``positions="sinusoidal"``, ``"learned"`` or None."""
    if kind is None:
        return None
    kinds = {"sinusoidal": SinusoidalPositions, "learned": LearnedPositions}
    if kind not in kinds:
        raise ValueError(f"positions must be one of {', '.join(kinds)}, or None, not {kind!r}")
    return kinds[kind](max_len, d_model, device=device, dtype=dtype)


class TokenEmbedding(torch.nn.Module):
    """Token ids (B, L) to vectors (B, L, M): ``dropout(scale * table[token] (P) + position)``.

    Args:
        vocab_size: number V of token ids.
        d_model: size M of the vectors.
        embedding_size: size E of the table's rows; if it differs from M, a matrix P (M, E) follows.
            None: M.
        positions: module that returns the position vectors; None: no positions.
        dropout: probability of dropping an element of the sum.
        scale: factor of the table's rows; None: sqrt(E), as in the paper.
        pad_token: token whose row is initialised to zeros and gets no gradient from look-ups; None: no
            such token.

    Source: "Attention Is All You Need", sections 3.4, 3.5 and 5.4.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        embedding_size: int | None = None,
        positions: Positions | None = None,
        dropout: float = 0.1,
        scale: float | None = None,
        pad_token: int | None = None,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        size = d_model if embedding_size is None else embedding_size
        self.table = Embedding(vocab_size, size, pad_token, device=device, dtype=dtype)
        self.projection: torch.nn.Linear | None = None
        if size != d_model:
            self.projection = torch.nn.Linear(size, d_model, False, device=device, dtype=dtype)
        self.positions = positions
        self.dropout = torch.nn.Dropout(dropout)
        self.scale = math.sqrt(size) if scale is None else scale
        self.reset_parameters()

    @property
    def vocab_size(self) -> int:
        return self.table.num_embeddings

    @property
    def pad_token(self) -> int | None:
        return self.table.padding_idx

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.table.weight, std=self.table.embedding_dim**-0.5)
        if self.pad_token is not None:
            with torch.no_grad():
                self.table.weight[self.pad_token] = 0.0
        if self.projection is not None:
            torch.nn.init.xavier_uniform_(self.projection.weight)

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Returns the vectors of tokens (B, L), the first of which is at position ``start``."""
        return self.dropout(self.vectors(tokens, start))

    def vectors(self, tokens: Tensor, start: int = 0) -> Tensor:
        """`forward` without dropout."""
        x = self.table(tokens)
        position = None if self.positions is None else self.positions(tokens.shape[1], start)
        if self.projection is None and position is not None:
            return torch.add(position, x, alpha=self.scale)
        if self.scale != 1.0:
            x = x * self.scale
        if self.projection is not None:
            x = run_linear(x, *affine(self.projection))
        return x if position is None else x + position

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}"


class OutputProjection(DropIn):
    """Vectors (..., M) to logits (..., V): ``x W^T + b``, or ``(x P^T) W^T + b``.

    Called with ``expected``, the correct tokens (...), it returns their losses (...) instead, by
    `functional.linear_cross_entropy`, which never has all logits in memory.

    Args:
        d_model: size M of the vectors.
        vocab_size: number V of token ids.
        tied_to: embedding whose table (V, E) is W, as a shared parameter; P (E, M) exists if E differs
            from M. None: W (V, M) is its own parameter.
        bias: True: there is a bias b.

    Source: "Attention Is All You Need", section 3.4; Press and Wolf 2017 for tied weights.
    """

    def __init__(
        self,
        d_model: int,
        vocab_size: int,
        *,
        tied_to: TokenEmbedding | None = None,
        bias: bool = True,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.tied = tied_to is not None
        self.weight: torch.nn.Parameter
        self.projection: torch.nn.Linear | None = None
        if tied_to is None:
            shape = (vocab_size, d_model)
            self.weight = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        else:
            self.weight = tied_to.table.weight  # type: ignore[assignment]
            size = tied_to.table.embedding_dim
            if size != d_model:
                self.projection = torch.nn.Linear(d_model, size, False, device=device, dtype=dtype)
        self.bias: torch.nn.Parameter | None = None
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(vocab_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if not self.tied:
            torch.nn.init.xavier_uniform_(self.weight)
        if self.projection is not None:
            torch.nn.init.xavier_uniform_(self.projection.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(
        self,
        input: Tensor,
        expected: Tensor | None = None,
        smoothing: float = 0.0,
        ignored: int | None = None,
    ) -> Tensor:
        """Returns logits, or losses if ``expected`` is given.

        Args:
            expected: int64 or int32 (...), tokens in [0, V).
            smoothing: label smoothing in [0, 1].
            ignored: expected token whose loss is 0; None: no such token.
        """
        if self.projection is not None:
            input = run_linear(input, *affine(self.projection))
        weight, bias = affine(self)
        if expected is None:
            return run_linear(input, weight, bias)
        check_ids("expected", expected)
        if expected.shape != input.shape[:-1]:
            raise ValueError(
                f"expected must have the shape of the tokens before it, "
                f"{list(input.shape[:-1])}, not {list(expected.shape)}"
            )
        rows, target = input.reshape(-1, input.shape[-1]), expected.reshape(-1).long()
        ignore_index = -100 if ignored is None else ignored
        if (
            rows.dtype == torch.float32
            and not torch.is_autocast_enabled(rows.device.type)
            and not isinstance(weight, Int8Weight)
        ):
            losses = functional.linear_cross_entropy(
                rows, weight, target, linear_bias=bias, reduction="none",
                ignore_index=ignore_index, label_smoothing=smoothing,
            )  # fmt: skip
        else:  # the op returns losses in the dtype of its input
            logits = run_linear(rows, weight, bias)
            losses = functional.cross_entropy(
                logits.to(torch.promote_types(logits.dtype, torch.float32)), target,
                reduction="none", ignore_index=ignore_index, label_smoothing=smoothing,
            )  # fmt: skip
        return losses.view(expected.shape).clone()  # FSDP2 warns if a module returns a view

    def extra_repr(self) -> str:
        return f"{list(self.weight.shape)}, bias={self.bias is not None}, tied={self.tied}"
