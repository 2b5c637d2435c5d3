"""The layers of BART, Marian, BERT, T5 and Llama with their residuals, norms and FFNs in one call each.

Every class here goes between a class of transformers and its methods, as `transformer_fast.nn` does
with torch's: hooked, replaced or parametrised modules inside are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import functional
from ...fast_path import LINEAR, plain
from ...nn import fusion
from ..parts import Example, FusedLayer, Op, Part, dropout_p, parts

#: Ours by the name of theirs.
CLASSES: dict[str, type[FusedLayer]] = {}


def _stands_for(*names: str) -> Callable[[type[FusedLayer]], type[FusedLayer]]:
    def register(ours: type[FusedLayer]) -> type[FusedLayer]:
        CLASSES.update(dict.fromkeys(names, ours))
        return ours

    return register


#: Activation classes of transformers, by name, that compute what our kernels know.
_ACTIVATIONS = {
    "GELUActivation": "gelu",
    "AccurateGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
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


@_stands_for("T5LayerNorm", "LlamaRMSNorm")
class RMSNorm(FusedLayer):
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != self.weight.dtype:
            return super().forward(hidden_states)  # type: ignore[misc, no-any-return]
        return functional.rms_norm(
            hidden_states, self.weight.shape, self.weight, self.variance_epsilon
        )

    def _examples(self, x: Callable[..., Tensor], training: bool) -> list[Example]:
        shape = self.weight.shape
        return [("rms_norm", (x(1, *shape), shape, self.weight), {})]


class _PostNorm(FusedLayer):
    """What the encoder and decoder layers of BART and Marian share."""

    self_attn: Any
    encoder_attn: Any
    fc1: Any
    fc2: Any
    activation_fn: Any
    dropout: float
    activation_dropout: float
    _norms = "self_attn_layer_norm final_layer_norm"

    def _p(self, name: str) -> float:
        return float(getattr(self, name)) if self.training else 0.0

    def _residual(self, x: Tensor, residual: Tensor, norm: str) -> Tensor:
        return _add_norm(x, self._p("dropout"), residual, getattr(self, norm))

    def _whole_feed_forward(self, x: Tensor) -> Tensor:
        p = self._p("activation_dropout")
        y = _feed_forward(x, self.fc1, self.activation_fn, p, self.fc2)
        return self._residual(y, x, "final_layer_norm")

    def _fused(self) -> list[Op]:
        known = "activation_fn", self.activation_fn, activation_name
        linears = parts(self, "fc1 fc2", fusion.LINEAR)
        return [
            Op("add_layer_norm", parts(self, self._norms, fusion.LAYER_NORM), self.dropout),
            Op("feed_forward", linears, self.activation_dropout, known),
        ]


@_stands_for("BartEncoderLayer", "MarianEncoderLayer")
class EncoderLayer(_PostNorm):
    """Attention, then FFN, a norm behind each."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states, attention_mask=attention_mask, **kwargs)
        x = self._residual(attended, hidden_states, "self_attn_layer_norm")
        x = self._whole_feed_forward(x)
        if x.dtype == torch.float16 and not torch.isfinite(x).all():
            most = torch.finfo(x.dtype).max - 1000
            x = torch.clamp(x, min=-most, max=most)
        return x


@_stands_for("BartDecoderLayer", "MarianDecoderLayer")
class DecoderLayer(_PostNorm):
    """Attention, attention to the encoder, FFN, a norm behind each."""

    _norms = f"{_PostNorm._norms} encoder_attn_layer_norm"

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


@_stands_for("BertSelfOutput", "BertOutput")
class Output(FusedLayer):
    """Projection, dropout, residual, norm."""

    dense: Any
    dropout: Any
    LayerNorm: Any

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        x = fusion.linear(self.dense, hidden_states)
        return self._end(x, input_tensor)

    def _end(self, x: Tensor, residual: Tensor) -> Tensor:
        return fusion.add_norm(x, self.dropout, residual, self.LayerNorm)[0]

    def _fused(self) -> list[Op]:
        norm = parts(self, "LayerNorm", fusion.LAYER_NORM) + parts(self, "dropout", fusion.DROPOUT)
        return [Op("add_layer_norm", norm, dropout_p(self.dropout))]


@_stands_for("BertLayer")
class BertLayer(FusedLayer):
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

    def _fused(self) -> list[Op]:
        inner: Any = self.intermediate
        output: Any = self.output
        plain = type(inner).__name__ == "BertIntermediate", isinstance(output, Output)
        found = [
            Part(name, part, (type(part),) if ok else ())
            for name, part, ok in zip(
                ("intermediate", "output"), (inner, output), plain, strict=True
            )
        ]
        if not all(plain):
            return [Op("feed_forward", found, 0.0)]
        found += [Part(f"{name}.dense", part.dense, fusion.LINEAR) for name, part, _ in found]
        known = "intermediate.intermediate_act_fn", inner.intermediate_act_fn, activation_name
        return [Op("feed_forward", found, 0.0, known)]


def _is_untouched(module: Any, name: str) -> bool:
    return type(module).__name__ == name and fusion.is_unhooked(module, (type(module),))


@_stands_for("AccurateGELUActivation", "FastGELUActivation", "NewGELUActivation")
class GELUTanh(FusedLayer):
    """One op in place of the eight of its formula."""

    def forward(self, input: Tensor) -> Tensor:
        if not input.is_floating_point():
            return super().forward(input)  # type: ignore[misc, no-any-return]
        return F.gelu(input, approximate="tanh")


@_stands_for("Conv1D")
class Conv1D(FusedLayer):
    """GPT-2's linear map, whose weight is (in_features, out_features)."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if is_faster_transposed(self, x):
            return functional.linear(x, self.weight.t(), self.bias)
        return super().forward(x)

    def _examples(self, x: Callable[..., Tensor], training: bool) -> list[Example]:
        if training:
            return []
        return [("linear", (x(64, self.weight.shape[0]), self.weight.t(), self.bias), {})]


def is_conv1d(module: Any) -> bool:
    """Whether it is a Conv1D of transformers, swapped or not, and no subclass of the user's."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_faster_transposed(module: Any, x: Any) -> bool:
    """Whether `functional.linear` with the transposed weight of a Conv1D takes less time.

    It does where there is a packed copy: in inference. PyTorch's product of few numbers or of one row
    in float32 was measured to be faster.
    """
    weight, bias = module.weight, module.bias
    if plain(x, weight, bias) is not False or torch.is_autocast_enabled("cpu"):
        return False
    if x.dtype != weight.dtype or weight.dim() != 2:
        return False
    many = weight.numel() > LINEAR.weights and x.numel() > weight.shape[0]
    return many or x.dtype != torch.float32
