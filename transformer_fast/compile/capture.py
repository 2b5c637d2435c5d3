"""Captures what a module computes as a graph, by one call on fake tensors.

A `torch.overrides.TorchFunctionMode` records each function of PyTorch that the module calls, in Dynamo's
form, so that the same rewrites and matchers apply. That takes 2 to 10 ms; Dynamo takes 500 to 2000 ms
for a layer, and its caches stay in the process.

The call runs on `shadow`, a copy of the module without hooks, so that it changes no attribute and no
buffer. It draws no random number: dropout is recorded without being run, and other random functions
raise. A graph is valid only while the modules' classes and attributes are those of the capture.
"""

from __future__ import annotations

import copy
import functools
import logging
import operator
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from .._context import PLAIN
from .modes import Modes, current_modes


class NotCapturedError(Exception):
    """Raised with the reason why the call of a module has no graph."""


class Call(NamedTuple):
    """A call of a child of the module."""

    name: str
    #: The child's argument and its result; None if either is not exactly one tensor.
    input: Node | None
    output: Node | None


class Captured(NamedTuple):
    """The graph of one call, in which parameters, buffers and arguments are placeholders."""

    graph: Graph
    #: Name of a tensor argument, or names of a parameter or buffer joined by dots -> its node.
    inputs: dict[str, Node]
    #: The result, with nodes in place of tensors.
    output: Any
    #: The calls of the module's children, in order of their ends.
    calls: list[Call]
    #: The nodes outside of these calls.
    own: list[Node]
    #: The autograd and autocast modes of the whole call.
    modes: Modes


def shadow(
    module: torch.nn.Module, convert: Callable[[Tensor], Tensor], class_of: Callable[[Any], type] = type,
    training: bool | None = None,
) -> Any:  # fmt: skip
    """Returns a copy of the module and its submodules, without hooks, with converted tensors.

    convert: is called once for each parameter and buffer. class_of: the class of each copy. training:
    the mode of all copies; None: as it is.
    """
    copies: dict[int, Any] = {}
    tensors: dict[int, Tensor] = {}

    def converted(given: Any) -> Any:
        if given is None:
            return None
        if id(given) not in tensors:
            tensors[id(given)] = convert(given)
        return tensors[id(given)]

    def copied(one: Any) -> Any:
        if one is None or id(one) in copies:
            return copies.get(id(one))
        new: Any = object.__new__(class_of(one))
        copies[id(one)] = new
        state = {
            name: copy.deepcopy(value) if _is_container(value) else value
            for name, value in vars(one).items()
        }
        for name, value in state.items():
            if name.endswith("_hooks") and isinstance(value, dict):
                state[name] = OrderedDict()
        for name in ("_parameters", "_buffers"):
            state[name] = {key: converted(x) for key, x in vars(one)[name].items()}
        state["_modules"] = {key: copied(child) for key, child in one._modules.items()}
        state["_compiled_call_impl"] = None
        if training is not None:
            state["training"] = training
        new.__dict__.update(state)
        return new

    return copied(module)


def _is_container(value: Any) -> bool:
    """True for a plain list, dict or set without modules and tensors."""
    if type(value) not in (list, dict, set):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return all(
        isinstance(each, (bool, int, float, str, type(None))) or _is_container(each)
        for each in inner
    )


#: Logs each failure of an operator with its traceback. A call that fails is no error of the user's.
_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")


def _discard(_: logging.LogRecord) -> bool:
    return False


def capture(
    module: torch.nn.Module, call: Callable[..., Any], arguments: dict[str, Tensor],
    class_of: Callable[[Any], type] = type, training: bool = False,
    attributes: dict[str, Any] | None = None, dtype: torch.dtype | None = None,
    width: int | None = None,
) -> Captured:  # fmt: skip
    """Returns the graph of ``call(copy of the module, **arguments)``.

    The caller sets the modes of autograd and autocast, and checks that no mode of PyTorch is active.

    Args:
        call, arguments: what is called, and its tensors.
        class_of, training: as in `shadow`.
        dtype: of all floating-point tensors of the call; None: as they are.
        attributes: by name, joined by dots, attributes of the copy that replace the module's.
        width: None: sizes are numbers. Else the sizes of the arguments are symbols, except 0, 1 and a
            floating-point tensor's last dimension of this size. Equal sizes are one symbol, so the
            graph holds for all sizes among which the same ones are equal.

    Raises:
        NotCapturedError: values or symbols decide what runs, an attribute is assigned, random numbers
            are drawn, a tensor is read that is no argument, parameter or buffer, or the call fails.
    """
    state = torch.get_rng_state()
    _FAKE_LOG.addFilter(_discard)
    try:
        shapes = None if width is None else ShapeEnv()
        # With the dispatcher in Python, matmul of PyTorch 2.10 keeps sizes that are symbols.
        with FakeTensorMode(shape_env=shapes) as fake, enable_python_dispatcher():
            copied = shadow(module, lambda x: _faked(fake, x, dtype), class_of, training)
            for name, value in (attributes or {}).items():
                parent, _, last = name.rpartition(".")
                copied.get_submodule(parent).__dict__[last] = value
            recorder = _Recorder()
            given = {name: _faked(fake, x, dtype, name, width) for name, x in arguments.items()}
            for name, x in (*given.items(), *tensors_of(copied).items()):
                recorder.add_input(name, x)
            for name, child in copied.named_children():  # a shared child has its first name
                recorder.note_calls(name, child)
            before = _attributes(copied)
            with recorder:
                output = call(copied, **given)
            if not _are_equal(before, _attributes(copied)):
                raise NotCapturedError("it assigns attributes")
        if shapes is not None and shapes.guards:
            raise NotCapturedError("sizes of its arguments decide what it computes")
    except NotCapturedError:
        raise
    except GuardOnDataDependentSymNode as error:
        raise NotCapturedError("values of tensors decide what it computes") from error
    except Exception as error:
        raise NotCapturedError(f"a trial call failed ({type(error).__name__}: {error})") from error
    finally:
        _FAKE_LOG.removeFilter(_discard)
        draws = not torch.equal(state, torch.get_rng_state())
        if draws:
            torch.set_rng_state(state)
    if draws:
        raise NotCapturedError("it draws random numbers")
    return recorder.finished(output)


def _faked(
    fake: FakeTensorMode, x: Tensor, dtype: torch.dtype | None, name: str = "", width: int | None = None
) -> Tensor:  # fmt: skip
    if type(x) not in PLAIN:
        raise NotCapturedError(f"a {type(x).__name__} is among its tensors")
    if width is None:
        y = fake.from_tensor(x, static_shapes=True)
    else:
        y = fake.from_tensor(x, symbolic_context=_symbols(x, width), source=ConstantSource(name))
    if dtype is None or not y.is_floating_point() or y.dtype == dtype:
        return y
    # Parameters stay parameters, because matchers distinguish them.
    return (
        torch.nn.Parameter(y.detach().to(dtype), y.requires_grad)
        if type(x) is not Tensor
        else y.to(dtype)
    )


def _symbols(x: Tensor, width: int) -> StatelessSymbolicContext:
    kinds = [DimDynamic.DUCK] * x.dim()
    if x.is_floating_point() and x.shape[-1:] == (width,):
        kinds[-1] = DimDynamic.STATIC
    return StatelessSymbolicContext(dynamic_sizes=kinds)


def tensors_of(module: torch.nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers in a module by name; a shared tensor under all its names."""
    return {
        f"{prefix}.{name}".removeprefix("."): x
        for prefix, inner in module.named_modules()
        for name, x in (*inner._parameters.items(), *inner._buffers.items())
        if x is not None
    }


def _attributes(module: torch.nn.Module) -> list[Any]:
    """Returns the attributes of all modules, containers as copies."""
    return [
        {
            name: copy.copy(value) if isinstance(value, (list, dict, set)) else value
            for name, value in vars(inner).items()
            if not name.endswith("_hooks") and not name.startswith("_forward_hooks")
        }
        for inner in module.modules()
    ]


def _are_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except RuntimeError:  # a comparison of tensors: the attribute was replaced
        return False


#: Functions that return no tensor and do not depend on values of tensors.
_OF_METADATA = frozenset({
    "__get__", "__len__", "dim", "element_size", "get_device", "is_complex", "is_conj", "is_contiguous",
    "is_floating_point", "is_inference", "is_neg", "is_same_size", "is_signed", "is_tensor", "ndimension",
    "nelement", "numel", "result_type", "size", "storage_offset", "stride", "type", "__hash__",
})  # fmt: skip
_DROPOUT = frozenset({torch.dropout, torch.nn.functional.dropout})


def _operator(name: str) -> tuple[Callable[..., Any] | None, int]:
    """Returns the function of `operator` that Dynamo writes for a special method, or None, and the
    order of its operands: -1 if they are reversed, else 1."""
    if not name.startswith("__"):
        return None, 1
    if name in ("__div__", "__rdiv__", "__idiv__"):  # PyTorch's names of true division
        name = name.replace("div", "truediv")
    found = getattr(operator, name, None)
    reverse = name.startswith("__r") and found is None
    return (getattr(operator, f"__{name[3:]}", None), -1) if reverse else (found, 1)


class _Recorder(TorchFunctionMode):
    """Writes the functions that are called into a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = Graph()
        self.inputs: dict[str, Node] = {}
        self.calls: list[Call] = []
        self.own: list[Node] = []
        self._begun: list[list[Node | None]] = []
        self.modes = current_modes()
        self._nodes: dict[int, Node] = {}
        #: Symbol -> argument and dimension with this size.
        self._sizes: dict[Any, tuple[Node, int]] = {}
        #: Keeps the tensors alive, so that no other object gets the id of one.
        self._kept: list[Any] = []

    def add_input(self, name: str, x: Tensor) -> None:
        if id(x) in self._nodes:  # a shared tensor's second name
            self.inputs[name] = self._nodes[id(x)]
            return
        self.inputs[name] = self.graph.placeholder(f"input_{len(self.inputs)}")
        self._note(x, self.inputs[name])
        sizes: tuple[Any, ...] = tuple(x.shape)
        for dim, size in enumerate(sizes):
            if isinstance(size, torch.SymInt):
                self._sizes.setdefault(size.node.expr, (self.inputs[name], dim))

    def _note(self, x: Tensor, node: Node) -> None:
        node.meta.setdefault("example_value", x)
        self._nodes[id(x)] = node
        self._kept.append(x)

    def note_calls(self, name: str, child: torch.nn.Module) -> None:
        """Registers hooks that record the child's calls, and which nodes belong to them."""

        def begin(_: Any, given: tuple[Any, ...]) -> None:
            self._begun.append([self._nodes.get(id(x)) for x in given])

        def end(_: Any, __: Any, output: Any) -> None:
            nodes = [*self._begun.pop(), self._nodes.get(id(output))]
            plain = len(nodes) == 2 and None not in nodes
            self.calls.append(Call(name, *(nodes if plain else (None, None))))

        child.register_forward_pre_hook(begin)
        child.register_forward_hook(end)

    def finished(self, output: Any) -> Captured:
        found = map_aggregate(output, self._of)
        self.graph.output(found)
        return Captured(self.graph, self.inputs, found, self.calls, self.own, self.modes)

    def _of(self, x: Any) -> Any:
        if isinstance(x, torch.SymInt):
            return self._number(x, x.node.expr)
        if not isinstance(x, Tensor):
            return x
        if id(x) not in self._nodes:
            raise NotCapturedError("it reads a tensor that is no argument, parameter or buffer")
        return self._nodes[id(x)]

    def _number(self, x: Any, formula: Any) -> Any:
        """Returns a size, or a sum or product of sizes, as a number or a node."""
        if formula.is_Integer:
            return int(formula)
        if formula in self._sizes:
            node = self.graph.call_method("size", self._sizes[formula])
        elif formula.is_Add or formula.is_Mul:
            function = operator.add if formula.is_Add else operator.mul
            parts = [self._number(None, part) for part in formula.args]
            node = functools.reduce(lambda *pair: self.graph.call_function(function, pair), parts)
        else:
            raise NotCapturedError("it computes with its sizes")
        node.meta["example_value"] = x
        return node

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if function in _DROPOUT:  # recorded, but run as the identity on a new tensor
            found = args[0].view_as(args[0]) if args else kwargs["input"].view_as(kwargs["input"])
        else:
            found = function(*args, **kwargs)
        if name == "__get__" and isinstance(found, Tensor):
            args = args[0], function.__self__.__name__
            name, function = "getattr", getattr
        tensors = found if isinstance(found, (tuple, list)) else (found,)
        if not all(isinstance(x, Tensor) for x in tensors) or len(tensors) == 0:
            if name in _OF_METADATA or not self._reads_tensors(args, kwargs):
                return found
            if name != "__setitem__":
                raise NotCapturedError(f"values of tensors decide what it computes ({name})")
        if current_modes() != self.modes:
            raise NotCapturedError("it changes the mode of autograd or autocast")
        self._write(function, name, args, kwargs, found)
        return found

    def _reads_tensors(self, args: Any, kwargs: Any) -> bool:
        found: list[Any] = []
        map_aggregate((args, kwargs), lambda x: found.append(isinstance(x, Tensor)))
        return any(found)

    def _write(self, function: Any, name: str, args: Any, kwargs: Any, found: Any) -> None:
        args, kwargs = map_aggregate((tuple(args), dict(kwargs)), self._of)
        operation, order = _operator(name)
        if operation is not None and not kwargs:
            node = self.graph.call_function(operation, args[::order])
        elif getattr(Tensor, name, None) is function:
            node = self.graph.call_method(name, args, kwargs)
        else:
            node = self.graph.call_function(function, args, kwargs)
        node.meta["example_value"] = found
        if not self._begun:
            self.own.append(node)
        if isinstance(found, (tuple, list)):
            for index, x in enumerate(found):
                item = self.graph.call_function(operator.getitem, (node, index))
                self._note(x, item)
        elif found is not None:
            self._note(found, node)
