"""The autograd and autocast modes in which each call of a captured graph runs.

In a captured graph, a block under ``torch.no_grad()`` or ``torch.autocast(...)`` is enclosed by two
calls that set the mode. A rewrite may merge or move only calls that run in the same modes.
Otherwise it would change which tensors get gradients, or the dtype of the computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .nodes import value
from .ops import mutates


class Modes(NamedTuple):
    """Autograd and autocast modes. Ops compute the same in modes that compare equal."""

    grad: bool
    inference: bool
    #: Device type, whether autocast is enabled there, and to which dtype it casts.
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    #: The last call that set a mode not modelled here; modes before and after it never compare equal.
    unknown: Node | None = None

    @property
    def has_autocast(self) -> bool:
        return any(enabled for _, enabled, _ in self.autocast)

    def with_autocast(self, device: str, enabled: bool, dtype: torch.dtype | None) -> Modes:
        before = {name: each for name, *each in self.autocast}
        if dtype is None:
            dtype = torch.get_autocast_dtype(device)
        autocast = {**before, device: [enabled, dtype]}
        return self._replace(autocast=tuple((name, *each) for name, each in autocast.items()))  # type: ignore[misc]


def current_modes() -> Modes:
    """Returns the modes of this thread."""
    return Modes(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple(
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
        ),
    )


class GraphModes:
    """The modes of every node, including nodes inserted later."""

    def __init__(self, graph: Graph, start: Modes | None = None) -> None:
        """``start``: the modes in which the graph is run; None: the current ones."""
        setters = [node for node in graph.nodes if _sets_mode(node)]
        self._start = start = start or current_modes()
        #: The modes after each node; empty if no call sets one.
        self._after: dict[Node, Modes] = {}
        self._entered: dict[Node, Modes] = {}
        if setters:
            modes = start
            for node in graph.nodes:
                if node in setters:
                    modes = self._set(node, modes)
                self._after[node] = modes

    def at(self, node: Node) -> Modes:
        """Returns the modes that the node runs in."""
        if self._after:
            # Inserted nodes set no mode.
            while (node := node.prev).op != "root":
                if node in self._after:
                    return self._after[node]
        return self._start

    def same(self, nodes: Iterable[Node | None]) -> bool:
        """True if all of the nodes run in the same modes."""
        return not self._after or len({self.at(node) for node in nodes if node is not None}) <= 1

    def any(self, condition: Callable[[Modes], bool]) -> bool:
        """True if the condition holds anywhere in the graph."""
        return any(map(condition, {self._start, *self._after.values()}))

    def of_body(self, call: Node) -> Modes:
        """Returns the modes in which ``call``, a higher-order operator, runs its subgraphs."""
        modes = self.at(call)
        setter = _SETTERS.get(getattr(call.target, "__name__", "").removeprefix("wrap_with_"))
        return modes if setter is None else setter(modes, *call.args)

    def _set(self, node: Node, modes: Modes) -> Modes:
        """Returns the modes after a node that sets one."""
        name = getattr(node.target, "__name__", "").removeprefix("_").removeprefix("enter_")
        if name in _SETTERS and not node.kwargs:
            self._entered[node] = modes
            return _SETTERS[name](modes, *node.args)
        entered = self._entered.get(node.args[0]) if node.args else None  # type: ignore[arg-type]
        if entered is not None and name == "exit_autocast":
            return modes._replace(autocast=entered.autocast)
        if entered is not None and name == "exit_inference_mode":
            return modes._replace(grad=entered.grad, inference=entered.inference)
        return modes._replace(unknown=node)


def _sets_mode(node: Node) -> bool:
    """True if the call has neither tensor inputs nor a result, so it must have a side effect."""
    return (
        node.op == "call_function"
        and value(node) is None
        and not any(isinstance(value(each), Tensor) for each in node.all_input_nodes)
        and not mutates(node)
        and not getattr(node.target, "__name__", "").startswith(_SET_NOTHING)
    )


#: Prefixes of the names of functions that check or log, which set no mode.
_SET_NOTHING = ("_check", "_assert", "sym_constrain", "_log", "_record_function")
#: Function name -> function of a call's arguments that returns the modes after the call.
_SETTERS: dict[str, Callable[..., Modes]] = {
    "set_grad_enabled": lambda modes, grad, *_: modes._replace(grad=grad),
    "inference_mode": lambda modes, on, *_: modes._replace(grad=not on, inference=on),
    "autocast": lambda modes, device, dtype=None, enabled=True, *_: modes.with_autocast(
        device, enabled, dtype
    ),
    "set_autocast_enabled": lambda modes, device, on: modes.with_autocast(device, on, None),
}
