"""ONNX Runtime on the CPU, all graph optimisations on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import isa, onnx_graph
from . import Offer, missing

NAME = "ONNX Runtime"
PACKAGES = ("onnx", "onnxruntime")


def available() -> str | None:
    if (why := missing(*PACKAGES)) is not None:
        return why
    if (name := isa.named()) is not None:
        return f"it cannot be held to {name}"
    return None


def _session(model: bytes, dtype: torch.dtype) -> Callable[..., Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    # Idle threads of its pool must not spin while others are timed.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def run(*inputs: Tensor) -> Tensor:
        feeds = dict(zip(("x", "padding"), (x.numpy() for x in inputs), strict=False))
        return torch.from_numpy(session.run(None, feeds)[0])

    return run


def op(op: str, arguments: tuple[Any, ...]) -> Offer:
    return onnx_graph.op_offer(op, arguments, (torch.float32,), _session)


def encoder_layer(layer: torch.nn.TransformerEncoderLayer, arguments: tuple[Any, ...]) -> Offer:
    return onnx_graph.layer_offer(layer, arguments, (torch.float32,), _session)
