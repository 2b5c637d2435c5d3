"""Runs the remaining ops of a rewritten graph: compiled by inductor if possible, else eagerly."""

from __future__ import annotations

import logging
import operator
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

from .. import memory
from .._context import are_plain_on_cpu, dispatch_modes
from .._native import TORCH_VERSION
from . import run_time
from .aliasing import AliasAnalysis
from .constants import DerivedInputs, lift
from .modes import GraphModes
from .nodes import rank, value
from .ops import Op, calls

_log = logging.getLogger("transformer_fast")

#: Functions that read the values of masks at run time. A compiled program cannot do that.
_READ_VALUES = frozenset({run_time.prepare_hidden, run_time.prepare_added})
#: (ops in calls of several sub-layers) / (other ops): above this ratio it is faster to run the
#: other ops eagerly than to split these calls (measured on vision and text models of two layers).
_STACKED = 2.4

_FAILED = "inductor could not compile the remaining ops; they run in eager mode: %s"

#: The ops into which inductor decomposes a softmax.
_SOFTMAX = ("softmax", "amax")

#: Inductor of PyTorch 2.10 computes wrong values if a program writes to an input. That of 2.13 does not.
_MAY_WRITE_INPUTS = TORCH_VERSION >= (2, 13)

#: Name of the function that returns ``.data`` in captured graphs.
_DATA = "_get_data_attr"


def compile_rest(module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """Compiles the graph with inductor; calls of this library's operators stay in it.

    Inductor fuses the ops between these calls (rotary embeddings, gates, sums). The graph runs in
    eager mode if inductor fails. Call `why_not` first: it returns the reasons not to use inductor.
    """
    try:
        lifted = lift(module, example_inputs)
        program, constants, inputs = (module, None, []) if lifted is None else lifted
        inductor = torch._dynamo.lookup_backend("inductor")
        return _Compiled(module, inductor(program, [*example_inputs, *inputs]), constants)
    except torch._dynamo.exc.RestartAnalysis:  # not an error: Dynamo will capture the graph again
        raise
    except Exception as error:
        _log.warning(_FAILED, error)
        return module.forward


def why_not(
    module: GraphModule, example_inputs: list[Any], stacked: Collection[Node] = ()
) -> str | None:
    """Returns the reason why inductor does not compile the remaining ops, or None.

    ``stacked``: the nodes that otherwise run in calls of several sub-layers.
    """
    tensors = [x for x in example_inputs if isinstance(x, Tensor)]
    if any(not x.is_cpu for x in tensors):
        return "inductor is used for CPU tensors only"
    with_gradients = GraphModes(module.graph).any(lambda modes: modes.grad)
    if with_gradients and any(x.requires_grad for x in tensors):
        return "inductor is not used in training"
    if _writes_refused(module.graph, example_inputs):
        what = "parameters" if _MAY_WRITE_INPUTS else "their inputs"
        return f"inductor is not used in programs that write to {what} or through .data"
    if any(node.target in _READ_VALUES for node in module.graph.nodes):
        return "inductor is not used with attention masks, whose values are read at run time"
    others = sum(node.op != "placeholder" for node in module.graph.nodes) - len(stacked)
    if len(stacked) > _STACKED * others:
        return "most ops run in calls of several sub-layers, which inductor would divide"
    graphs = [each.graph for each in module.modules() if isinstance(each, GraphModule)]
    # Inductor's attention patterns ignore the softmax's dimension. Before a product, a softmax not
    # over the last dimension gets wrong results (pytorch issue 196468, in 2.13.0 and 2.14.1).
    reductions = (op for graph in graphs for name in _SOFTMAX for _, op in calls(graph, name))
    if not all(map(_is_over_last, reductions)):
        return "inductor may take a softmax over another dimension than the last for attention"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "inductor needs a C++ compiler, and none was found"
    if _draws(module):
        return "inductor draws other random numbers"
    return None


def _writes_refused(graph: Graph, inputs: Sequence[Any]) -> bool:
    """True if a call writes to a parameter, or through ``.data``; see also `_MAY_WRITE_INPUTS`.

    PyTorch records the write when an inductor program ends, too late for packed copies, or not at all.
    """
    plain = are_plain_on_cpu(x for x in inputs if isinstance(x, Tensor))
    given = [node for node in graph.nodes if node.op == "placeholder"]
    watched = [
        node
        for node, x in zip(given, inputs, strict=False)
        if isinstance(x, torch.nn.Parameter) or not _MAY_WRITE_INPUTS
    ]
    data = [node for node in graph.nodes if getattr(node.target, "__name__", "") == _DATA]
    return AliasAnalysis(graph, inputs if plain else None).is_written([*watched, *data])


def _is_over_last(op: Op) -> bool:
    """True if the op reduces the last dimension only."""
    dim, dimensions = op["dim"], rank(op["input"])
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    return isinstance(dim, int) and dimensions is not None and dim in (-1, dimensions - 1)


class _Draws(TorchDispatchMode):
    """Notes whether an operator draws random numbers."""

    found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            names = [argument.name for argument in func._schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            # PyTorch's attention has the tag, but draws numbers only with dropout. Initialising
            # modules on the meta device draws none.
            drops = "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0
            devices = (getattr(x, "device", None) for x in args)
            self.found |= drops and torch.device("meta") not in devices
        return func(*args, **kwargs)


def _draws(module: GraphModule) -> bool:
    """True if the program draws random numbers; found by a run on tensors without data."""
    given = [value(node) for node in module.graph.nodes if node.op == "placeholder"]
    fake = next((x.fake_mode for x in given if isinstance(x, FakeTensor)), None)
    if fake is None:
        return False
    with fake, _Draws() as draws:
        module.forward(*[x.clone() if isinstance(x, Tensor) else x for x in given])
    return draws.found


class _Compiled:
    """Runs a compiled graph, with the inputs that are derived from parameters."""

    def __init__(
        self, module: GraphModule, compiled: Callable[..., Any], constants: DerivedInputs | None
    ) -> None:
        self.module, self.compiled, self.constants = module, compiled, constants
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.viewed = [
            index
            for index, node in enumerate(inputs)
            if isinstance(value(node), torch.nn.Parameter) and any(map(_may_be_view, node.users))
        ]

    def __call__(self, *inputs: Any) -> Any:
        if dispatch_modes():  # inductor's kernels bypass dispatch modes
            return self.module.forward(*inputs)
        found = () if self.constants is None else self.constants(inputs)
        if found is None:  # each product packs its own weight
            return self.module.forward(*inputs)
        viewed = (inputs[index] for index in self.viewed)
        before = memory.program.parameters  # set by an enclosing program
        memory.program.parameters = {x.untyped_storage().data_ptr(): x for x in viewed}
        try:
            return self.compiled(*inputs, *found)
        finally:
            memory.program.parameters = before


def _may_be_view(node: Node) -> bool:
    return node.op == "call_method" or node.target is operator.getitem
