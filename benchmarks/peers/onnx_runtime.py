"""ONNX Runtime on the CPU, all graph optimisations on."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from .. import isa, onnx_graph
from . import Offer

NAME = "ONNX Runtime"
PACKAGES = ("onnx", "onnxruntime")


def available() -> str | None:
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed (pip install {package})"
    if (name := isa.named()) is not None:
        return f"it cannot be held to {name}"
    return None


def _session(model: bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    # Idle threads of its pool must not spin while others are timed.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _refuses(x: Tensor) -> str | None:
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return "the graph given to it is for float32 on the CPU"
    return None


def op(op: str, arguments: tuple[Any, ...]) -> Offer:
    if op != "feed_forward":
        return None
    x, weight1, bias1, weight2, bias2, activation, dropout_p, _ = arguments
    if activation != "relu" or dropout_p:
        return "the graph given to it has relu and no dropout"
    if (reason := _refuses(x)) is not None:
        return reason
    session = _session(onnx_graph.feed_forward(list(x.shape), weight1, bias1, weight2, bias2))
    return lambda x, *rest: torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


def encoder_layer(layer: torch.nn.TransformerEncoderLayer, arguments: tuple[Any, ...]) -> Offer:
    x, _, padding = arguments
    if (reason := _refuses(x)) is not None:
        return reason
    session = _session(onnx_graph.encoder_layer(layer, x.shape[0], x.shape[1], padding is not None))

    def run(x: Tensor, mask: None, padding: Tensor | None) -> Tensor:
        feeds = {"x": x.numpy()}
        if padding is not None:
            feeds["padding"] = padding.numpy()
        return torch.from_numpy(session.run(None, feeds)[0])

    return run
