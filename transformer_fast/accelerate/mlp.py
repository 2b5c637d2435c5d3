"""Finds feed-forward networks in modules of any class by parsing the source of ``forward``.

The source is used only if it compiles to the code that runs, because files change after import and
methods are replaced. One fused call takes up to 22 % less time than two replaced linear layers and
an activation (1 to 13 % in inference and 0 to 9 % in training at 512 features and 2048 hidden).
Gated networks (SwiGLU) keep their own forward; the gain there was at most 1 %.
"""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..nn import fusion
from ..nn.drop_in import runs_torch_forward
from ..nn.int8 import INT8, run_feed_forward
from . import classes
from .classes import ClassChange
from .hugging_face_layers import activation_name, is_conv1d, is_faster_transposed
from .parts import Example, FusedLayer, Op, Part, dropout_p, example_of

_DROPOUT = (*fusion.DROPOUT, torch.nn.Identity)


class Network(NamedTuple):
    """Names of children: ``ends(second(dropouts(activation(first(starts(input))))))``."""

    starts: tuple[str, ...]
    first: str
    #: Name of a child or of a function attribute, or "." and the kernels' name of a PyTorch function.
    activation: str
    dropouts: tuple[str, ...]
    second: str
    ends: tuple[str, ...]


class FeedForward(FusedLayer):
    """A feed-forward network; its own forward runs where it cannot be fused."""

    _network: Network
    #: The class whose forward was parsed, and the code object of that forward.
    _theirs: type[torch.nn.Module]
    _code: types.CodeType
    #: Number of children when the network was read: users may append to containers later.
    _count: int

    def _run_network(self, input: Any) -> Any:
        x, net, modules = input, self._network, self._modules
        dropouts: list[Any] = [modules.get(n) for n in net.dropouts]
        if (
            not isinstance(x, Tensor)
            or runs_torch_forward(x, self._theirs)
            or getattr(self._theirs.forward, "__code__", None) is not self._code
            or len(modules) != self._count
            or not all(fusion.is_unhooked(d, _DROPOUT) for d in dropouts)
            or None in map(modules.get, (*net.starts, *net.ends))
        ):
            return super().forward(input)
        first = _affine(modules.get(net.first), x)
        if first is None:
            return super().forward(input)
        second = _affine(modules.get(net.second), x)
        name = _activation(self, net)[1]
        active = [d.p for d in dropouts if d.training and dropout_p(d)]
        if (
            second is None
            or name is None
            or len(active) > 1
            or first[0].dtype != second[0].dtype
            # The dtype after ``starts`` is unknown; a mismatch fails in the original forward, too.
            or not (
                net.starts or x.dtype == first[0].dtype or torch.is_autocast_enabled(x.device.type)
            )
        ):
            return super().forward(input)
        for start in net.starts:
            x = modules[start](x)  # type: ignore[misc]
        p = active[0] if active else 0.0
        x = run_feed_forward(x, first[0], first[1], second[0], second[1], name, p)
        for end in net.ends:
            x = modules[end](x)  # type: ignore[misc]
        return x

    def _fused(self) -> list[Op]:
        net, modules = self._network, self._modules
        found = [Part(n, modules[n], _DROPOUT) for n in net.dropouts]
        for n in (net.second, net.first):
            kinds = (type(modules[n]),) if is_conv1d(modules[n]) else fusion.LINEAR
            found.insert(0, Part(n, modules[n], kinds))
        value, name = _activation(self, net)
        p = max((dropout_p(modules[n]) for n in net.dropouts), default=0.0)
        return [Op("feed_forward", found, p, (net.activation, value, lambda _: name))]

    def _examples(self, x: Callable[..., Tensor], training: bool) -> list[Example]:
        (op,) = self._fused()
        first, second = (part.module for part in op.parts[:2])
        if op.why_not() is not None or (training and (is_conv1d(first) or is_conv1d(second))):
            return []
        one, two = _affine(first), _affine(second)
        if one[0].dtype != two[0].dtype:
            return []
        assert op.activation is not None
        _, value, name_of = op.activation
        options = {"activation": name_of(value), "dropout_p": op.dropout_p if training else 0.0}
        return [example_of("feed_forward", x, options, one, two)]


@functools.cache
def _forward(name: str) -> Callable[..., Any]:
    """Returns a forward whose argument has this name, as keyword callers and torch.fx require."""
    found: dict[str, Any] = {"__name__": __name__}  # `is_of_others` reads it
    exec(f"def forward(self, {name}):\n    return self._run_network({name})", found)
    return found["forward"]  # type: ignore[no-any-return]


def _affine(module: Any, x: Tensor | None = None) -> Any:
    """Returns weight (out_features, in_features) and bias; None if the module must be called."""
    if fusion.is_unhooked(module, fusion.LINEAR):
        return fusion.affine(module)
    plain = is_conv1d(module) and fusion.is_unhooked(module, (type(module),))
    if plain and INT8 in module.__dict__:
        return fusion.affine(module)
    if plain and (x is None or is_faster_transposed(module, x)):
        return module.weight.t(), module.bias
    return None


def _activation(module: Any, net: Network) -> tuple[Any, str | None]:
    """Returns the activation and our kernels' name of it, None if no kernel supports it."""
    if net.activation[0] == ".":
        return net.activation, net.activation[1:]
    own: Any = module._modules.get(net.activation) or vars(module).get(net.activation)
    return own, activation_name(own)


#: Parsed networks, keyed by the forward function and the types of the names that it may use.
Cache = dict[Any, "Network | None"]


def find(name: str, module: torch.nn.Module, cache: Cache) -> ClassChange | str | None:
    """Returns the change of a feed-forward network, the reason not to, or None if it is not one."""
    if sum(map(_is_linear, module.children())) < 2:
        return None
    kind = type(module)
    parameters = [*inspect.signature(kind.forward).parameters.values()][1:]  # without self
    if [p.kind for p in parameters] != [inspect.Parameter.POSITIONAL_OR_KEYWORD]:
        return None
    children = ((n, type(m)) for n, m in module._modules.items())
    functions = (n for n, value in vars(module).items() if inspect.isroutine(value))
    key = (kind.forward, *children, *functions)
    if key not in cache:
        cache[key] = _read(module)
    net = cache[key]
    if net is None:
        return None
    value, supported = _activation(module, net)
    if supported is None:
        if not isinstance(value, torch.nn.Module):
            return None
        return f"its {net.activation} is {fusion.a_kind(value)}, which no kernel supports"
    if len({child.weight.dtype for child in module.children() if _is_linear(child)}) > 1:
        return "its weights have different dtypes, which no kernel supports"
    reason = (
        classes.sharded(module)
        or classes.parametrised(module)
        or classes.weights(module)
        or classes.replaced_forward(module)
    )
    if reason is not None:
        return reason
    made = classes.subclass(
        kind, (FeedForward, kind), forward=_forward(parameters[0].name), _network=net,
        _theirs=kind, _code=kind.forward.__code__, _count=len(module._modules),
        __signature__=inspect.signature(kind),
    )  # fmt: skip
    return made if isinstance(made, str) else ClassChange(name, module, kind, made)


def _is_linear(module: Any) -> bool:
    return isinstance(module, torch.nn.Linear) or is_conv1d(module)


def _read(module: torch.nn.Module) -> Network | None:
    """Returns the feed-forward network if forward computes that and nothing else, else None."""
    steps = [*module._modules]
    if type(module).forward is not torch.nn.Sequential.forward:
        try:
            steps = _Reader(module).steps()
        except (_UnknownError, OSError, TypeError, SyntaxError, ValueError):
            return None  # no source available, or statements other than calls
    children = module._modules

    def take(test: Callable[[Any], bool]) -> Iterator[str]:
        while steps and test(children.get(steps[0])):
            yield steps.pop(0)

    starts = tuple(take(lambda m: not _is_linear(m)))
    if len(steps) < 3:
        return None
    first, activation = steps.pop(0), steps.pop(0)
    dropouts = tuple(take(lambda m: type(m) in _DROPOUT))
    if not steps or not _is_linear(children.get(steps[0])) or _is_linear(children.get(activation)):
        return None
    second = steps.pop(0)
    if not all(n in children and not _is_linear(children[n]) for n in (*starts, *steps)):
        return None
    if type(children.get(activation)) in _DROPOUT:
        return None
    return Network(starts, first, activation, dropouts, second, tuple(steps))


class _UnknownError(Exception):
    """Raised if forward contains anything that the parser does not support."""


def _compiles_to(tree: ast.Module, code: types.CodeType) -> bool:
    """True if the function in ``tree`` compiles to this code; line numbers may differ."""
    features = (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
    flags = code.co_flags & sum(features)
    compiled = compile(tree, code.co_filename, "exec", flags, dont_inherit=True).co_consts
    found = (c for c in compiled if isinstance(c, types.CodeType) and c.co_name == code.co_name)
    return any(map(_meaning(code).__eq__, map(_meaning, found)))


def _meaning(code: types.CodeType) -> tuple[object, ...]:
    """Returns the parts of a code object that determine its behaviour; without nested functions."""
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, repr(code.co_consts), *names, code.co_argcount


class _Reader:
    """Parses a forward that only chains calls of children and functions."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, forward = module, type(module).forward
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
        (function,) = tree.body
        if not isinstance(function, ast.FunctionDef) or function.decorator_list:
            raise _UnknownError
        if not _compiles_to(tree, forward.__code__):  # type: ignore[attr-defined]
            raise _UnknownError
        self.globals: dict[str, Any] = forward.__globals__  # type: ignore[attr-defined]
        self.self, input = (argument.arg for argument in function.args.args)
        self.body = function.body
        #: Local variable -> the names of the calls that computed it.
        self.locals: dict[str, list[str]] = {input: []}

    def steps(self) -> list[str]:
        """Returns the names of children and functions in the order of their calls."""
        calls = 0
        for statement in self.body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # the docstring
            if self._is_idle(statement):
                continue
            calls += sum(isinstance(node, ast.Call) for node in ast.walk(statement))
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name != self.self:
                    self.locals[name] = self._value(value)
                case ast.Return(value=ast.expr() as value) if statement is self.body[-1]:
                    steps = self._value(value)
                    if len(steps) == calls:
                        return steps
                    break
                case _:
                    break
        raise _UnknownError

    def _is_idle(self, statement: ast.stmt) -> bool:
        """True for T5's ``if ... and x.dtype != self.wo.weight.dtype: x = x.to(...)``.

        It has no effect here, because the dtypes are equal.
        """
        match statement:
            case ast.If(
                test=ast.BoolOp(op=ast.And(), values=values),
                body=[
                    ast.Assign(
                        targets=[ast.Name(id=name)],
                        value=ast.Call(func=ast.Attribute(value=ast.Name(id=cast), attr="to")),
                    )
                ],
                orelse=[],
            ) if name == cast and name in self.locals:
                maps = (n for n, m in self.module._modules.items() if _is_linear(m))
                idle = {f"{name}.dtype != {self.self}.{n}.weight.dtype" for n in maps}
                return any(ast.unparse(value) in idle for value in values)
        return False

    def _value(self, node: ast.expr | None) -> list[str]:
        match node:
            case ast.Name(id=name) if name in self.locals:
                return self.locals[name]
            case ast.Call(func=ast.Attribute(value=ast.Name(id=self.self), attr=name), args=[x]):
                if node.keywords or not self._is_own(name):
                    raise _UnknownError
                return [*self._value(x), name]
            case ast.Call(func=ast.Attribute(value=value, attr=name), args=[], keywords=[]):
                if name in ("relu", "relu_"):
                    return [*self._value(value), ".relu"]
            case ast.Call(func=function, args=[x]):
                options = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
                return [*self._value(x), self._function(function, options)]
        raise _UnknownError

    def _is_own(self, name: str) -> bool:
        """True if the name is a child, or a function stored on the instance."""
        if hasattr(type(self.module), name):
            return False
        own = self.module._modules.get(name) or vars(self.module).get(name)
        return isinstance(own, torch.nn.Module) or inspect.isroutine(own)

    def _function(self, node: ast.expr, options: dict[str | None, Any]) -> str:
        """Returns "." + our kernels' name of a PyTorch function."""
        function: Any = None
        match node:
            case ast.Name(id=name) if name not in self.locals:
                function = self.globals.get(name)
            case ast.Attribute():
                names = ast.unparse(node).split(".")
                function = None if names[0] in self.locals else self.globals.get(names[0])
                for name in names[1:]:
                    is_module = isinstance(function, types.ModuleType)
                    function = getattr(function, name, None) if is_module else None
        activation = activation_name(function)
        if activation == "gelu" and options in ({"approximate": "tanh"}, {"approximate": "none"}):
            return ".gelu_tanh" if options["approximate"] == "tanh" else ".gelu"
        if activation is None or options not in ({}, {"inplace": True}, {"inplace": False}):
            raise _UnknownError
        return "." + activation
