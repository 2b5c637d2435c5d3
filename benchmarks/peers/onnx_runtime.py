"""ONNX Runtime on the CPU, all graph optimisations on; and the graphs, for peers that read ONNX."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from transformer_fast.measure.modules import fast_path

from .. import named_isa
from . import Offer, missing

NAME = "ONNX Runtime"
PACKAGES = ("onnx", "onnxscript", "onnxruntime")

#: Makes of a graph, whose first input and whose output are of that dtype, what runs it.
Runner = Callable[[bytes, torch.dtype], Callable[..., Tensor]]


def available() -> str | None:
    if (why := missing(*PACKAGES)) is not None:
        return why
    if (name := named_isa()) is not None:
        return f"it cannot be held to {name}"
    return None


def _graph(module: nn.Module, x: Tensor, **others: Tensor) -> bytes:
    """The module as PyTorch exports it, in fp32, on inputs of these shapes."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # that there is no torchvision
    module, file = copy.deepcopy(module).float(), io.BytesIO()
    with fast_path(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch about itself
        torch.onnx.export(
            module, (x.float(),), file, kwargs=others, input_names=["x", *others], dynamo=True,
            external_data=False, verbose=False,
        )  # fmt: skip
    return file.getvalue()


def _refuses(x: Tensor, dtypes: Collection[torch.dtype]) -> str | None:
    if x.device.type == "cpu" and x.dtype in dtypes:
        return None
    names = " or ".join(str(dtype)[6:] for dtype in dtypes)
    return f"the graph given to it is for {names} on the CPU"


def op_offer(
    op: str, arguments: tuple[Any, ...], dtypes: Collection[torch.dtype], runner: Runner
) -> Offer:
    """What a peer's `op` gives."""
    if op != "feed_forward":
        return None
    x, weight1, bias1, weight2, bias2, activation, dropout_p, _ = arguments
    if activation != "relu" or dropout_p:
        return "the graph given to it has relu and no dropout"
    if (reason := _refuses(x, dtypes)) is not None:
        return reason
    hidden, size = weight1.shape
    network = nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, size))
    for parameter, value in zip(
        network.parameters(), (weight1, bias1, weight2, bias2), strict=True
    ):
        parameter.data = value
    run = runner(_graph(network, x), x.dtype)
    return lambda x, *rest: run(x)


def layer_offer(
    layer: nn.Module,
    arguments: tuple[Any, ...],
    dtypes: Collection[torch.dtype],
    runner: Runner,
) -> Offer:
    """What a peer's `encoder_layer` gives."""
    x, _, padding = arguments
    if (reason := _refuses(x, dtypes)) is not None:
        return reason
    others = {} if padding is None else {"src_key_padding_mask": padding}
    run = runner(_graph(layer, x, **others), x.dtype)
    return lambda x, mask, padding: run(x) if padding is None else run(x, padding)


def _session(model: bytes, dtype: torch.dtype) -> Callable[..., Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    # Idle threads of its pool must not spin while others are timed.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def run(*inputs: Tensor) -> Tensor:
        feeds = dict(zip(names, (x.numpy() for x in inputs), strict=True))
        return torch.from_numpy(session.run(None, feeds)[0])

    return run


def op(op: str, arguments: tuple[Any, ...]) -> Offer:
    return op_offer(op, arguments, (torch.float32,), _session)


def encoder_layer(layer: nn.Module, arguments: tuple[Any, ...]) -> Offer:
    return layer_offer(layer, arguments, (torch.float32,), _session)
