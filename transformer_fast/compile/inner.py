"""What runs the part of a rewritten graph that is not ours."""

from __future__ import annotations

import logging
import operator
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .. import memory
from . import run_time
from .constants import Constants, lift
from .memory import Memory
from .modes import GraphModes
from .nodes import value
from .ops import is_view

_log = logging.getLogger("transformer_fast")

#: They look at the values of masks while the program runs, which a compiled one cannot.
_LOOK_AT_VALUES = frozenset({run_time.prepare_hidden, run_time.prepare_added})
#: Largest difference to the graph as it is written, relative to the largest value.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}

_FAILED = "inductor could not compile the remaining ops; they run in eager mode: %s"

#: The function that gives ``.data`` in captured graphs.
_DATA = "_get_data_attr"


def compile_rest(module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """The graph as inductor compiles it, with calls of our operators in it.

    It fuses the ops between our calls (rotary embeddings, gates, sums). If inductor fails, or its first
    result differs from that of the graph, the graph runs in eager mode. Call `why_not` before.
    """
    try:
        lifted = lift(module, example_inputs)
        program, constants, inputs = (module, None, []) if lifted is None else lifted
        _name_shared_views(program)
        inductor = torch._dynamo.lookup_backend("inductor")
        return _Checked(module, inductor(program, [*example_inputs, *inputs]), constants)
    except torch._dynamo.exc.RestartAnalysis:  # Dynamo then captures the graph anew
        raise
    except Exception as error:
        _log.warning(_FAILED, error)
        return module.forward


def _name_shared_views(program: GraphModule) -> None:
    """Views that several calls read as `as_strided`, which inductor takes of a tensor in memory.

    Of other views, of what it has not written yet, each call of an operator gets a copy of its own.
    """
    for node in list(program.graph.nodes):
        x = value(node)
        if (
            is_view(node)
            and len(node.users) > 1
            and isinstance(x, Tensor)
            and x.is_contiguous()
            and all(isinstance(size, int) for size in x.shape)
            and all(user.op == "call_function" for user in node.users)
        ):
            with program.graph.inserting_after(node):
                view = program.graph.call_method("as_strided", (node, tuple(x.shape), x.stride()))
            view.meta = dict(node.meta)
            node.replace_all_uses_with(view, lambda user, view=view: user is not view)  # type: ignore[misc]
    program.recompile()


def why_not(module: GraphModule, example_inputs: list[Any]) -> str | None:
    """Why inductor does not compile the rest, as a sentence, or None."""
    tensors = [x for x in example_inputs if isinstance(x, Tensor)]
    if any(not x.is_cpu for x in tensors):
        return "inductor is used for CPU tensors only"
    with_gradients = GraphModes(module.graph).any(lambda modes: modes.grad)
    if with_gradients and any(x.requires_grad for x in tensors):
        return "inductor is not used in training"
    if any(node.target in _LOOK_AT_VALUES for node in module.graph.nodes):
        return "inductor is not used with attention masks, whose values are read at run time"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "inductor needs a C++ compiler, and none was found"
    return None


class _Checked:
    """A compiled graph whose first result is compared with that of the graph as it is.

    Inductor of PyTorch 2.13 has been seen to give wrong numbers (softmax over the last dimension but
    one of a product with a transposed matrix). What cannot be run twice is not compared, and runs as it
    is: graphs that write to their inputs or draw random numbers.
    """

    def __init__(
        self, module: GraphModule, compiled: Callable[..., Any], constants: Constants | None = None
    ) -> None:
        self.module, self.compiled, self.constants = module, compiled, constants
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.viewed = [
            index
            for index, node in enumerate(inputs)
            if isinstance(value(node), torch.nn.Parameter) and any(map(_may_be_view, node.users))
        ]
        data = [n for n in module.graph.nodes if getattr(n.target, "__name__", "") == _DATA]
        #: Versions do not tell of it.
        self.writes_data = Memory(module.graph).is_written(data)
        self.run: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any) -> Any:
        if torch._C._len_torch_dispatch_stack() > 0:  # inductor's programs read memory
            return self.module.forward(*inputs)
        if self.run is not None:
            return self.run(*inputs)
        before, random = [_state_of(x) for x in inputs], torch.get_rng_state()
        expected = self.module.forward(*inputs)
        repeatable = (
            not self.writes_data
            and torch.equal(random, torch.get_rng_state())
            and all(map(_is_same, [_state_of(x) for x in inputs], before))
        )
        self.run = self.module.forward
        if repeatable and self._agrees(inputs, expected):
            self.run = self._run_compiled if self.constants or self.viewed else self.compiled
        return expected

    def _agrees(self, inputs: Sequence[Any], expected: Sequence[Any]) -> bool:
        try:
            if all(map(_agree, self._run_compiled(*inputs), expected)):
                return True
        except Exception as error:
            _log.warning(_FAILED, error)
        else:
            _log.warning("inductor's result is wrong; the remaining ops run in eager mode")
        return False

    def _run_compiled(self, *inputs: Any) -> Any:
        if self.constants is not None:
            found = self.constants(inputs)
            # Without room for all packed copies each product packs its own.
            return self.module.forward(*inputs) if found is None else self.compiled(*inputs, *found)
        viewed = (inputs[index] for index in self.viewed)
        memory.program.parameters = {x.untyped_storage().data_ptr(): x for x in viewed}
        try:
            return self.compiled(*inputs)
        finally:
            memory.program.parameters = {}


def _may_be_view(node: Node) -> bool:
    return node.op == "call_method" or node.target is operator.getitem


def _state_of(x: Any) -> Any:
    """What changes when something is written to the tensor."""
    if not isinstance(x, Tensor):
        return None
    return x.clone() if x.is_inference() else x._version


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=one.is_floating_point())
    return bool(one == other)


def _agree(found: Any, expected: Any) -> bool:
    if not isinstance(expected, Tensor) or not expected.is_floating_point():
        return not isinstance(expected, Tensor) or torch.equal(found, expected)
    one, other = found.double(), expected.double()
    finite = other[other.isfinite()]
    allowed = (
        _TOLERANCE.get(expected.dtype, 0.25) * float(finite.abs().max()) if len(finite) else 0.0
    )
    return torch.allclose(one, other, rtol=0.0, atol=allowed, equal_nan=True)
