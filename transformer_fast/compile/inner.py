"""Runs the remaining ops of a rewritten graph: compiled by inductor if possible, else eagerly."""

from __future__ import annotations

import logging
import operator
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .. import memory
from .._context import are_plain_on_cpu, dispatch_modes
from . import run_time
from .aliasing import AliasAnalysis
from .constants import DerivedInputs, lift
from .modes import GraphModes
from .nodes import value
from .ops import is_view
from .sublayers import Sublayers

_log = logging.getLogger("transformer_fast")

#: These functions read the values of masks at run time, which a compiled program cannot do.
_READ_VALUES = frozenset({run_time.prepare_hidden, run_time.prepare_added})
#: Tolerance of the comparison with the eager graph, relative to the largest value.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}

#: The tolerance with 8-bit products, which amplify rounding differences; layers that run in one call
#: have attention in bfloat16, those that inductor compiles do not.
_TOLERANCE_OF_INT8 = _TOLERANCE[torch.bfloat16]

#: Of the ops in calls of several sub-layers and of the others: the ratio from which running the latter
#: eagerly was measured to be faster than dividing the former (vision and text models of two layers).
_STACKED = 4

_FAILED = "inductor could not compile the remaining ops; they run in eager mode: %s"

#: Name of the function that returns ``.data`` in captured graphs.
_DATA = "_get_data_attr"


def compile_rest(module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """Compiles the graph with inductor; calls of this library's operators stay in it.

    Inductor fuses the ops between these calls (rotary embeddings, gates, sums). The graph runs in
    eager mode if inductor fails, or if its result differs from that of the eager graph. Call
    `why_not` first: it returns the reasons not to use inductor.
    """
    try:
        lifted = lift(module, example_inputs)
        program, constants, inputs = (module, None, []) if lifted is None else lifted
        _materialize_shared_views(program)
        inductor = torch._dynamo.lookup_backend("inductor")
        return _Checked(module, inductor(program, [*example_inputs, *inputs]), constants)
    except torch._dynamo.exc.RestartAnalysis:  # Dynamo captures the graph again
        raise
    except Exception as error:
        _log.warning(_FAILED, error)
        return module.forward


def _materialize_shared_views(program: GraphModule) -> None:
    """Adds an `as_strided` to each contiguous view that several calls read.

    Inductor computes the base of an `as_strided` into memory once. For other views of a tensor that
    it has not yet written, it makes a separate copy for each operator call.
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
    """Returns the reason why inductor does not compile the remaining ops, or None."""
    tensors = [x for x in example_inputs if isinstance(x, Tensor)]
    if any(not x.is_cpu for x in tensors):
        return "inductor is used for CPU tensors only"
    with_gradients = GraphModes(module.graph).any(lambda modes: modes.grad)
    if with_gradients and any(x.requires_grad for x in tensors):
        return "inductor is not used in training"
    if _writes_parameters(module.graph, example_inputs):
        return "inductor is not used in programs that write to parameters"
    if any(node.target in _READ_VALUES for node in module.graph.nodes):
        return "inductor is not used with attention masks, whose values are read at run time"
    stacked = sum(len(m.body.graph.nodes) for m in module.children() if isinstance(m, Sublayers))
    if stacked > _STACKED * sum(node.op != "placeholder" for node in module.graph.nodes):
        return "most ops run in calls of several sub-layers, which inductor would divide"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "inductor needs a C++ compiler, and none was found"
    return None


def _writes_parameters(graph: Graph, inputs: Sequence[Any]) -> bool:
    """True if a call writes to the memory of a parameter.

    PyTorch records the write when an inductor program ends, too late for packed copies.
    """
    plain = are_plain_on_cpu(x for x in inputs if isinstance(x, Tensor))
    given = [node for node in graph.nodes if node.op == "placeholder"]
    parameters = [
        node for node, x in zip(given, inputs, strict=False) if isinstance(x, torch.nn.Parameter)
    ]
    return AliasAnalysis(graph, inputs if plain else None).is_written(parameters)


class _Checked:
    """A compiled graph whose result is compared once with that of the eager graph.

    Inductor of PyTorch 2.13 has returned wrong numbers: for a softmax over the second-to-last
    dimension of a product with a transposed matrix. The first call runs eagerly and records the inputs
    that it writes to. Without any, the first call is compared; otherwise the second is, on copies of
    these inputs. Graphs that draw random numbers, or write in other ways, always run in eager mode.
    """

    def __init__(
        self,
        module: GraphModule,
        compiled: Callable[..., Any],
        constants: DerivedInputs | None = None,
    ) -> None:
        self.module, self.compiled, self.constants = module, compiled, constants
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.viewed = [
            index
            for index, node in enumerate(inputs)
            if isinstance(value(node), torch.nn.Parameter) and any(map(_may_be_view, node.users))
        ]
        data = [n for n in module.graph.nodes if getattr(n.target, "__name__", "") == _DATA]
        #: Writes through ``.data`` do not change a tensor's version.
        self.writes_data = AliasAnalysis(module.graph).is_written(data)
        self.run: Callable[..., Any] | None = None
        #: Places of the inputs that the first call wrote to.
        self.written: set[int] = set()
        self.least_tolerance = (
            _TOLERANCE_OF_INT8 if any(map(_multiplies_int8, module.graph.nodes)) else 0.0
        )

    def __call__(self, *inputs: Any) -> Any:
        if dispatch_modes():  # inductor's programs access memory directly
            return self.module.forward(*inputs)
        if self.run is not None:
            return self.run(*inputs)
        before, random = [_state_of(x) for x in inputs], torch.get_rng_state()
        copies = list(inputs)
        can_be_copied = _can_be_copied(inputs, self.written)
        for index in self.written if can_be_copied else ():
            copies[index] = inputs[index].clone()
        expected = self.module.forward(*inputs)
        written = {i for i, x in enumerate(inputs) if not _is_same(_state_of(x), before[i])}
        repeatable = (
            can_be_copied and not self.writes_data and torch.equal(random, torch.get_rng_state())
        )
        if repeatable and written and not self.written and _can_be_copied(inputs, written):
            self.written = written
            return expected
        self.run = self.module.forward
        if (
            repeatable
            and written <= self.written
            and self._agrees(inputs, copies, before, expected)
        ):
            self.run = self._run_compiled if self.constants or self.viewed else self.compiled
        return expected

    def _agrees(
        self,
        inputs: Sequence[Any],
        copies: Sequence[Any],
        before: Sequence[Any],
        expected: Sequence[Any],
    ) -> bool:
        """Compares a run with ``copies`` with a run that returned ``expected`` and wrote to ``inputs``.

        ``before``: the values of the written inputs before the run.
        """
        try:
            if self.constants is not None and self.constants(copies) is None:
                return False  # the run would be eager
            found, wanted = list(self._run_compiled(*copies)), list(expected)
            for index in self.written:
                changed = inputs[index] != before[index]
                # Apart, so that large values of one part do not hide errors of the other. Writing a
                # value again, such as a cache's at the same place, leaves a rounding difference.
                for part in (changed, ~changed):
                    found.append(copies[index][part])
                    wanted.append(inputs[index][part])
            if all(map(partial(_agree, least=self.least_tolerance), found, wanted)):
                return True
        except Exception as error:
            _log.warning(_FAILED, error)
        else:
            _log.warning("inductor's result is wrong; the remaining ops run in eager mode")
        return False

    def _run_compiled(self, *inputs: Any) -> Any:
        found = () if self.constants is None else self.constants(inputs)
        if found is None:  # each product packs its own weight
            return self.module.forward(*inputs)
        viewed = (inputs[index] for index in self.viewed)
        memory.program.parameters = {x.untyped_storage().data_ptr(): x for x in viewed}
        try:
            return self.compiled(*inputs, *found)
        finally:
            memory.program.parameters = {}


def _multiplies_int8(node: Node) -> bool:
    return "int8" in getattr(node.target, "__name__", "") or node.kwargs.get("int8") is True


def _may_be_view(node: Node) -> bool:
    return node.op == "call_method" or node.target is operator.getitem


def _can_be_copied(inputs: Sequence[Any], places: set[int]) -> bool:
    """True if copies of these inputs are laid out like them, and no other input shares their memory."""
    if not places:
        return True
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if not are_plain_on_cpu(tensors):
        return False
    storages = [x.untyped_storage().data_ptr() for x in tensors]
    return all(
        storages.count(inputs[i].untyped_storage().data_ptr()) == 1
        and torch.empty_like(inputs[i]).stride() == inputs[i].stride()
        for i in places
    )


def _state_of(x: Any) -> Any:
    """Returns a value that changes when the tensor is written to: a copy, or a parameter's version.

    Batch norm writes running statistics without a change of their version.
    """
    if not isinstance(x, Tensor):
        return None
    is_buffer = are_plain_on_cpu((x,)) and not isinstance(x, torch.nn.Parameter)
    return x.clone() if is_buffer or x.is_inference() else x._version


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        if not are_plain_on_cpu((one,)):
            return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
        return torch.equal(_bytes_of(one), _bytes_of(other))
    return bool(one == other)


def _bytes_of(x: Tensor) -> Tensor:
    return x.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _agree(found: Any, expected: Any, least: float) -> bool:
    """True if the results are close; ``least``: the smallest tolerance."""
    if not isinstance(expected, Tensor) or not expected.is_floating_point():
        return not isinstance(expected, Tensor) or torch.equal(found, expected)
    one, other = found.double(), expected.double()
    finite = other[other.isfinite()]
    tolerance = max(_TOLERANCE.get(expected.dtype, 0.25), least)
    allowed = tolerance * float(finite.abs().max()) if len(finite) else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=allowed, equal_nan=True)
