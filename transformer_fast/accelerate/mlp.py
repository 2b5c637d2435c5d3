"""Feed-forward networks in modules of any class, found by tracing their forward with torch.fx.

Gated ones (SwiGLU) keep their own forward. Each Linear inside is swapped, and fusing the activation into
the first was measured to gain no more than 1% over that.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node, Tracer

from .. import functional
from ..nn import fusion
from ..nn.tracing import is_torchs
from . import torch_nn
from .change import ClassChange
from .graph.activation import activation_of
from .hugging_face.layers import activation_name, is_conv1d, is_faster_transposed
from .parts import Example, FusedLayer, Op, Part, dropout_p

_DROPOUT = (*fusion.DROPOUT, torch.nn.Identity)
#: Types of the attributes that a forward may read: equal values make it do the same.
_CONSTANTS = (
    bool, int, float, str, type(None), torch.dtype, types.FunctionType, types.BuiltinFunctionType,
)  # fmt: skip
#: Attributes that each module has, and that PyTorch reads.
_OF_MODULES = frozenset(vars(torch.nn.Module())) - {"training"}


class Network(NamedTuple):
    """``ends(second(dropouts(activation(first(starts(input))))))``: names of children."""

    starts: tuple[str, ...]
    first: str
    #: The name of a child, or the kernels' name of what forward calls.
    activation: str
    is_child: bool
    dropouts: tuple[str, ...]
    second: str
    ends: tuple[str, ...]


class FeedForward(FusedLayer):
    """A feed-forward network; where it cannot be fused, its own forward runs."""

    _network: Network
    #: The name of forward's argument, and how many children there are: containers may get more.
    _input: str
    _count: int
    #: The attributes that forward reads, and their values.
    _names: tuple[str, ...]
    _values: tuple[Any, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        net, modules = self._network, self._modules
        x: Any = args[0] if args else kwargs.get(self._input)
        if (
            len(args) + len(kwargs) != 1
            or x is None
            or is_torchs(x)
            or len(modules) != self._count
            or (*map(self.__dict__.get, self._names),) != self._values
        ):
            return super().forward(*args, **kwargs)
        first, second = _affine(modules[net.first], x), _affine(modules[net.second], x)
        name = activation_name(modules[net.activation]) if net.is_child else net.activation
        dropouts: list[Any] = [modules[n] for n in net.dropouts]
        active = [d.p for d in dropouts if d.training and dropout_p(d)]
        if (
            first is None
            or second is None
            or name is None
            or not all(fusion.is_unhooked(d, _DROPOUT) for d in dropouts)
            or len(active) > 1
            or first[0].dtype != second[0].dtype
            # What starts give is not known yet; of another dtype, their forward fails as well.
            or not (
                net.starts or x.dtype == first[0].dtype or torch.is_autocast_enabled(x.device.type)
            )
        ):
            return super().forward(*args, **kwargs)
        for start in net.starts:
            x = modules[start](x)  # type: ignore[misc]
        p = active[0] if active else 0.0
        x = functional.feed_forward(x, *first, *second, activation=name, dropout_p=p)
        for end in net.ends:
            x = modules[end](x)  # type: ignore[misc]
        return x

    def _fused(self) -> list[Op]:
        net, modules = self._network, self._modules
        found = [Part(n, modules[n], _DROPOUT) for n in net.dropouts]
        for n in (net.second, net.first):
            kinds = (type(modules[n]),) if is_conv1d(modules[n]) else fusion.LINEAR
            found.insert(0, Part(n, modules[n], kinds))
        value: Any = modules[net.activation] if net.is_child else net.activation
        activation = net.activation, value, activation_name if net.is_child else str
        p = max((dropout_p(modules[n]) for n in net.dropouts), default=0.0)
        return [Op("feed_forward", found, p, activation)]

    def _examples(self, x: Callable[..., Tensor], training: bool) -> list[Example]:
        (op,) = self._fused()
        first, second = (part.module for part in op.parts[:2])
        if op.why_not() is not None or (training and (is_conv1d(first) or is_conv1d(second))):
            return []
        one, two = _affine(first), _affine(second)
        if one[0].dtype != two[0].dtype:
            return []
        assert op.activation is not None
        _, value, known = op.activation
        options = {"activation": known(value), "dropout_p": op.dropout_p if training else 0.0}
        rows = x(64, one[0].shape[1])
        return [("feed_forward", (rows, *one, *two), options)]


def _affine(module: Any, x: Tensor | None = None) -> Any:
    """Weight (out_features, in_features) and bias; None: the module is to be called."""
    if fusion.is_unhooked(module, fusion.LINEAR):
        return fusion.affine(module)
    plain = is_conv1d(module) and fusion.is_unhooked(module, (type(module),))
    if plain and (x is None or is_faster_transposed(module, x)):
        return module.weight.t(), module.bias
    return None


#: For a class and what its forward may depend on: the network, and the attributes that it reads.
Cache = dict[Any, "tuple[Network, dict[str, Any]] | None"]


def find(name: str, module: torch.nn.Module, cache: Cache) -> ClassChange | str | None:
    """The change of a feed-forward network, why it stays, or None: it is none."""
    if sum(map(_is_linear, module.children())) < 2:
        return None
    kind, children = type(module), module.named_children()
    parameters = [*inspect.signature(kind.forward).parameters.values()][1:]  # without self
    if [p.kind for p in parameters] != [inspect.Parameter.POSITIONAL_OR_KEYWORD]:
        return None
    key = kind, _constants(module), *((n, type(m), _constants(m)) for n, m in children)
    if key not in cache:
        cache[key] = _trace(module)
    found = cache[key]
    if found is None:
        return None
    net, reads = found
    activation = module._modules[net.activation] if net.is_child else None
    if activation is not None and activation_name(activation) is None:
        return f"its {net.activation} is {torch_nn.a_kind(activation)}, which no kernel has"
    if len({child.weight.dtype for child in module.children() if _is_linear(child)}) > 1:
        return "its weights have different dtypes, which no kernel multiplies"
    reason = (
        torch_nn.sharded(module)
        or torch_nn.parametrised(module)
        or torch_nn.weights(module)
        or torch_nn.replaced_forward(module)
    )
    if reason is not None:
        return reason
    made = torch_nn.subclass(
        kind, (FeedForward, kind), _network=net, _input=parameters[0].name,
        _count=len(module._modules), _names=(*reads,), _values=(*reads.values(),),
    )  # fmt: skip
    return made if isinstance(made, str) else ClassChange(name, module, kind, made)


def _constants(module: torch.nn.Module) -> tuple[Any, ...]:
    return tuple((n, v) for n, v in vars(module).items() if isinstance(v, _CONSTANTS))


def _is_linear(module: Any) -> bool:
    return isinstance(module, torch.nn.Linear) or is_conv1d(module)


def _is_other(module: Any) -> bool:
    return not _is_linear(module)


def _is_activation(module: Any) -> bool:
    kind = type(module).__module__
    return kind in ("torch.nn.modules.activation", "transformers.activations")


class _Tracer(Tracer):
    """Records calls of children, and refuses a forward that switches gradients or autocast."""

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return True

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        if not torch.is_grad_enabled() or _autocasts() != self.autocasts:
            raise RuntimeError("forward switches gradients or autocast")
        return super().create_node(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Graph:
        self.autocasts = _autocasts()
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            return super().trace(*args, **kwargs)


def _autocasts() -> int:
    """How many autocast contexts are entered."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _trace(module: torch.nn.Module) -> tuple[Network, dict[str, Any]] | None:
    """The network that forward computes, and the attributes that it reads."""
    kind, found = type(module), {}

    def get(self: Any, name: str) -> Any:
        value = kind.__getattribute__(self, name)
        if name in vars(module) and name not in _OF_MODULES:
            if name == "training" or not isinstance(value, _CONSTANTS):
                raise RuntimeError(f"forward depends on {name}")
            found[name] = value
        return value

    def set(self: Any, name: str, value: Any) -> None:
        raise RuntimeError(f"forward sets {name}")

    try:
        # A copy under a class that sees what forward reads, and lets it change nothing.
        methods = {"__getattribute__": get, "__setattr__": set}
        copy: Any = object.__new__(types.new_class("", (kind,), {}, lambda n: n.update(methods)))
        vars(copy).update(vars(module))
        net = _read(_Tracer().trace(copy), module._modules)
    except Exception:  # whatever a forward raises that cannot be traced
        return None
    return None if net is None else (net, found)


def _read(graph: Graph, children: Mapping[str, Any]) -> Network | None:
    """The network that the graph computes, if nothing else."""

    def called(node: Any, test: Callable[[Any], bool]) -> tuple[Any, Any]:
        """The child that a node calls and on what; None and the node if it fails the test."""
        is_call = isinstance(node, Node) and node.op == "call_module" and node.target in children
        if is_call and len(node.args) == 1 and not node.kwargs and test(children[node.target]):
            return node.target, node.args[0]
        return None, node

    def chain(node: Any, test: Callable[[Any], bool]) -> tuple[tuple[str, ...], Any]:
        """Children that are called one after the other."""
        name, before = called(node, test)
        if name is None:
            return (), node
        names, before = chain(before, test)
        return (*names, name), before

    ends, node = chain(graph.output_node().args[0], _is_other)
    second, node = called(node, _is_linear)
    dropouts, node = chain(node, lambda m: type(m) in _DROPOUT)
    known = activation_of(node)
    activation, node = called(node, _is_activation) if known is None else known
    first, node = called(node, _is_linear)
    starts, node = chain(node, _is_other)
    calls = sum(n.op.startswith("call") for n in graph.nodes)
    if None in (second, activation, first) or node.op != "placeholder":
        return None
    if calls != len(starts) + len(dropouts) + len(ends) + 3:
        return None
    return Network(starts, first, activation, known is None, dropouts, second, ends)
