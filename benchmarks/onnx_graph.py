"""Encoder layers and feed-forward networks as ONNX graphs, for peers that read ONNX."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

_OPSET = 17


class _Graph:
    """Nodes and constants, named as they come."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, value: Tensor | list[int] | float) -> str:
        from onnx import numpy_helper

        if isinstance(value, Tensor):
            array = value.detach().float().contiguous().numpy()
        else:
            array = np.array(value, dtype=np.int64 if isinstance(value, list) else np.float32)
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        from onnx import helper

        name = f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def linear(self, x: str, weight: Tensor, bias: Tensor) -> str:
        product = self.node("MatMul", x, self.constant(weight.t()))
        return self.node("Add", product, self.constant(bias))

    def norm(self, x: str, norm: torch.nn.LayerNorm) -> str:
        return self.node(
            "LayerNormalization", x, self.constant(norm.weight), self.constant(norm.bias),
            axis=-1, epsilon=norm.eps,
        )  # fmt: skip

    def finished(self, inputs: list[tuple[str, str, list[Any]]], output: str) -> bytes:
        """The serialised model; inputs are (name, 'float' or 'bool', shape)."""
        from onnx import TensorProto, helper

        kinds = {"float": TensorProto.FLOAT, "bool": TensorProto.BOOL}
        graph = helper.make_graph(
            self.nodes,
            "graph",
            [helper.make_tensor_value_info(n, kinds[kind], shape) for n, kind, shape in inputs],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
            self.constants,
        )
        opset = [helper.make_opsetid("", _OPSET)]
        model = helper.make_model(graph, opset_imports=opset, ir_version=8)
        return model.SerializeToString()


def feed_forward(
    shape: list[int], weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
) -> bytes:
    """relu(x W1^T + b1) W2^T + b2."""
    graph = _Graph()
    hidden = graph.node("Relu", graph.linear("x", weight1, bias1))
    return graph.finished([("x", "float", shape)], graph.linear(hidden, weight2, bias2))


def _attention(
    graph: _Graph, attention: torch.nn.MultiheadAttention, batch: int, length: int, masked: bool
) -> str:
    model, heads = attention.embed_dim, attention.num_heads
    split = graph.constant([batch, length, heads, model // heads])
    names = []
    weights, biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
    for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = graph.node("Reshape", graph.linear("x", weight, bias), split)
        # Keys straight to (B, H, D, T).
        names.append(graph.node("Transpose", x, perm=[0, 2, 3, 1] if number == 1 else [0, 2, 1, 3]))
    query, key, value = names
    scale = graph.constant(1.0 / math.sqrt(model // heads))
    scores = graph.node("Mul", graph.node("MatMul", query, key), scale)
    if masked:
        axes = graph.constant([1, 2])
        hidden = graph.node("Unsqueeze", "padding", axes)
        scores = graph.node("Where", hidden, graph.constant(-math.inf), scores)
    mixed = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), value)
    joined = graph.node("Transpose", mixed, perm=[0, 2, 1, 3])
    flat = graph.node("Reshape", joined, graph.constant([batch, length, model]))
    return graph.linear(flat, attention.out_proj.weight, attention.out_proj.bias)


def encoder_layer(
    layer: torch.nn.TransformerEncoderLayer, batch: int, length: int, masked: bool
) -> bytes:
    """A post-norm relu layer on x (B, T, M), with padding (B, T), True = hidden, if ``masked``."""
    graph = _Graph()
    attended = _attention(graph, layer.self_attn, batch, length, masked)
    x = graph.norm(graph.node("Add", "x", attended), layer.norm1)
    hidden = graph.node("Relu", graph.linear(x, layer.linear1.weight, layer.linear1.bias))
    y = graph.linear(hidden, layer.linear2.weight, layer.linear2.bias)
    inputs: list[tuple[str, str, list[Any]]] = [
        ("x", "float", [batch, length, layer.self_attn.embed_dim])
    ]
    if masked:
        inputs.append(("padding", "bool", [batch, length]))
    return graph.finished(inputs, graph.norm(graph.node("Add", x, y), layer.norm2))


#: Makes of a graph, whose first input and whose output are of that dtype, what runs it.
Runner = Callable[[bytes, torch.dtype], Callable[..., Tensor]]


def _refuses(x: Tensor, dtypes: Collection[torch.dtype]) -> str | None:
    if x.device.type == "cpu" and x.dtype in dtypes:
        return None
    names = " or ".join(str(dtype)[6:] for dtype in dtypes)
    return f"the graph given to it is for {names} on the CPU"


def op_offer(
    op: str, arguments: tuple[Any, ...], dtypes: Collection[torch.dtype], runner: Runner
) -> Callable[..., Any] | str | None:
    """What a peer's `op` gives."""
    if op != "feed_forward":
        return None
    x, weight1, bias1, weight2, bias2, activation, dropout_p, _ = arguments
    if activation != "relu" or dropout_p:
        return "the graph given to it has relu and no dropout"
    if (reason := _refuses(x, dtypes)) is not None:
        return reason
    run = runner(feed_forward(list(x.shape), weight1, bias1, weight2, bias2), x.dtype)
    return lambda x, *rest: run(x)


def layer_offer(
    layer: torch.nn.TransformerEncoderLayer,
    arguments: tuple[Any, ...],
    dtypes: Collection[torch.dtype],
    runner: Runner,
) -> Callable[..., Any] | str:
    """What a peer's `encoder_layer` gives."""
    x, _, padding = arguments
    if (reason := _refuses(x, dtypes)) is not None:
        return reason
    run = runner(encoder_layer(layer, x.shape[0], x.shape[1], padding is not None), x.dtype)
    return lambda x, mask, padding: run(x) if padding is None else run(x, padding)
