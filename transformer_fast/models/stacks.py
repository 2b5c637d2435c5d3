"""Stacks of `transformer_fast.nn` layers, with the norms a model asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import nn
from .annotated_layer_norm import AnnotatedLayerNorm

NORMS = ("layer_norm", "annotated")


@dataclass(frozen=True)
class LayerOptions:
    """What the layers of one model have in common; the names are torch.nn.Transformer's."""

    d_model: int
    nhead: int
    dim_feedforward: int
    dropout: float
    activation: str | Callable[[Tensor], Tensor]
    layer_norm_eps: float
    norm_first: bool
    #: "layer_norm", or "annotated" for `AnnotatedLayerNorm`.
    norm: str
    #: Whether a norm follows the last layer; None: only with norm_first.
    final_norm: bool | None
    bias: bool
    device: torch.types.Device
    dtype: torch.dtype | None

    def check(self) -> None:
        if self.norm not in NORMS:
            raise ValueError(f"norm must be one of {', '.join(NORMS)}, not {self.norm!r}")
        if self.d_model < 1 or self.nhead < 1 or self.d_model % self.nhead:
            raise ValueError(
                f"d_model must be a positive multiple of nhead, not {self.d_model} for "
                f"nhead={self.nhead}"
            )

    def make_norm(self) -> torch.nn.Module:
        to: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        if self.norm == "annotated":
            return AnnotatedLayerNorm(self.d_model, self.layer_norm_eps, **to)
        return nn.LayerNorm(self.d_model, self.layer_norm_eps, bias=self.bias, **to)

    def make_final_norm(self) -> torch.nn.Module | None:
        wanted = self.norm_first if self.final_norm is None else self.final_norm
        return self.make_norm() if wanted else None

    def make_layer(self, kind: type[torch.nn.Module]) -> torch.nn.Module:
        layer = kind(
            self.d_model, self.nhead, self.dim_feedforward, self.dropout, self.activation,
            self.layer_norm_eps, True, self.norm_first, self.bias, self.device, self.dtype,
        )  # fmt: skip
        if self.norm != "layer_norm":
            for name in ("norm1", "norm2", "norm3"):
                if hasattr(layer, name):
                    setattr(layer, name, self.make_norm())
        return layer


def initialise(stack: torch.nn.Module) -> None:
    """Xavier's uniform distribution for all matrices, as in torch.nn.Transformer."""
    for parameter in stack.parameters():
        if parameter.dim() > 1:
            torch.nn.init.xavier_uniform_(parameter)


def encoder_stack(options: LayerOptions, num_layers: int) -> nn.TransformerEncoder:
    """``num_layers`` layers of self-attention and FFN."""
    options.check()
    layer = options.make_layer(nn.TransformerEncoderLayer)
    stack = nn.TransformerEncoder(layer, num_layers, options.make_final_norm())  # type: ignore[arg-type]
    # What stands at padded places reaches no result; without it padding costs nothing.
    stack.skips_padding = True
    initialise(stack)
    return stack


def decoder_stack(options: LayerOptions, num_layers: int) -> nn.TransformerDecoder:
    """``num_layers`` layers of self-attention, attention to the memory, and FFN."""
    options.check()
    layer = options.make_layer(nn.TransformerDecoderLayer)
    stack = nn.TransformerDecoder(layer, num_layers, options.make_final_norm())  # type: ignore[arg-type]
    initialise(stack)
    return stack
