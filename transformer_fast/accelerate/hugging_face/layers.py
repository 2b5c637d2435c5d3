"""The layers of BART, Marian, BERT, T5 and Llama with their residuals, norms and FFNs in one call each.

Every class here goes between a class of transformers and its methods, as `transformer_fast.nn` does
with torch's: hooked, replaced or parametrised modules inside are called.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import functional
from ...nn import fusion
from ...nn.drop_in import DropIn

#: Activation classes of transformers, by name, that compute what our kernels know.
_ACTIVATIONS = {
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "SiLUActivation": "silu",
}


def activation_name(activation: Any) -> str | None:
    """The name by which kernels know an activation of transformers."""
    kind = type(activation)
    if kind.__module__ == "transformers.activations" and fusion.is_unhooked(activation, (kind,)):
        return _ACTIVATIONS.get(kind.__name__)
    return fusion.activation_name(activation)


def _feed_forward(x: Tensor, first: Any, activation: Any, dropout_p: float, second: Any) -> Tensor:
    name = activation_name(activation)
    if name is not None and all(fusion.is_unhooked(m, fusion.LINEAR) for m in (first, second)):
        return functional.feed_forward(
            x, first.weight, first.bias, second.weight, second.bias, activation=name,
            dropout_p=dropout_p,
        )  # fmt: skip
    return second(F.dropout(activation(first(x)), dropout_p))


def _add_norm(x: Tensor, dropout_p: float, residual: Tensor, norm: Any) -> Tensor:
    if fusion.is_unhooked(norm, fusion.LAYER_NORM) and x.shape == residual.shape:
        return functional.add_layer_norm(
            x, residual, norm.normalized_shape, norm.weight, norm.bias, norm.eps,
            dropout_p=dropout_p,
        )[0]  # fmt: skip
    return norm(residual + F.dropout(x, dropout_p))


class RMSNorm(DropIn):
    """T5LayerNorm and LlamaRMSNorm."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != self.weight.dtype:
            return super().forward(hidden_states)  # type: ignore[misc, no-any-return]
        return functional.rms_norm(
            hidden_states, self.weight.shape, self.weight, self.variance_epsilon
        )


class _PostNorm(DropIn):
    """What the encoder and decoder layers of BART and Marian share."""

    self_attn: Any
    encoder_attn: Any
    fc1: Any
    fc2: Any
    activation_fn: Any

    def _p(self, name: str) -> float:
        return float(getattr(self, name)) if self.training else 0.0

    def _residual(self, x: Tensor, residual: Tensor, norm: str) -> Tensor:
        return _add_norm(x, self._p("dropout"), residual, getattr(self, norm))

    def _whole_feed_forward(self, x: Tensor) -> Tensor:
        p = self._p("activation_dropout")
        y = _feed_forward(x, self.fc1, self.activation_fn, p, self.fc2)
        return self._residual(y, x, "final_layer_norm")


class EncoderLayer(_PostNorm):
    """Of BART and Marian: attention, then FFN, a norm behind each."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states, attention_mask=attention_mask, **kwargs)
        x = self._residual(attended, hidden_states, "self_attn_layer_norm")
        x = self._whole_feed_forward(x)
        if x.dtype == torch.float16 and not torch.isfinite(x).all():
            most = torch.finfo(x.dtype).max - 1000
            x = torch.clamp(x, min=-most, max=most)
        return x


class DecoderLayer(_PostNorm):
    """Of BART and Marian: attention, attention to the encoder, FFN, a norm behind each."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = True,
        **kwargs: Any,
    ) -> Tensor:
        attended, _ = self.self_attn(
            hidden_states,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            **kwargs,
        )
        x = self._residual(attended, hidden_states, "self_attn_layer_norm")
        if encoder_hidden_states is not None:
            attended, _ = self.encoder_attn(
                x,
                key_value_states=encoder_hidden_states,
                attention_mask=encoder_attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
            x = self._residual(attended, x, "encoder_attn_layer_norm")
        return self._whole_feed_forward(x)


class Output(DropIn):
    """BertSelfOutput and BertOutput: projection, dropout, residual, norm."""

    dense: Any
    dropout: Any
    LayerNorm: Any

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        x = fusion.linear(self.dense, hidden_states)
        return self._end(x, input_tensor)

    def _end(self, x: Tensor, residual: Tensor) -> Tensor:
        return fusion.add_norm(x, self.dropout, residual, self.LayerNorm)[0]


class BertLayer(DropIn):
    """Its FFN is spread over two modules, which are called if anybody could tell."""

    def feed_forward_chunk(self, attention_output: Tensor) -> Tensor:
        inner: Any = self.intermediate
        output: Any = self.output
        plain = _is_untouched(inner, "BertIntermediate") and _is_untouched(output, "BertOutput")
        name = activation_name(inner.intermediate_act_fn) if plain else None
        if name is None or not isinstance(output, Output):
            return output(inner(attention_output), attention_output)
        y = _feed_forward(
            attention_output, inner.dense, inner.intermediate_act_fn, 0.0, output.dense
        )
        return output._end(y, attention_output)


def _is_untouched(module: Any, name: str) -> bool:
    return type(module).__name__ == name and fusion.is_unhooked(module, (type(module),))


class T5DenseActDense(DropIn):
    """T5's FFN, without biases."""

    wi: Any
    wo: Any
    act: Any
    dropout: Any

    def forward(self, hidden_states: Tensor) -> Tensor:
        wi, wo, dropout = self.wi, self.wo, self.dropout
        same = hidden_states.dtype == wi.weight.dtype == wo.weight.dtype
        if not (same and fusion.is_unhooked(dropout, fusion.DROPOUT)):
            return super().forward(hidden_states)
        p = dropout.p if dropout.training else 0.0
        return _feed_forward(hidden_states, wi, self.act, float(p), wo)
