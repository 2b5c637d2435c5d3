"""Replays calls of launchers: only their allocations and launches, without the Python code before.

A launcher is Python code that computes sizes, strides, tiles and constants, allocates results and
launches kernels; it may call PyTorch ops, too. All of that depends only on what
`call_cache.describe` returns for its arguments. When an equal call is made the second time, a
`Recorder` records its steps as the source of a Python function. Later calls run that function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import call_cache

aten = torch.ops.aten
_ALLOCATIONS = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)
#: True to replay calls in the interpreter, too. Off by default, because tests change tiles by hand.
replays_interpreted = False


class _Now(threading.local):
    recorder: Recorder | None = None


_now = _Now()


def recorder() -> Recorder | None:
    """Returns the active recorder of this thread, or None."""
    found = _now.recorder
    return None if found is None or found.paused else found


class Pointer:
    """Placeholder for an argument of a step: the address of a tensor, or a tensor at that address."""

    __slots__ = ("address", "tensor")

    def __init__(self, tensor: Tensor, address: bool = True) -> None:
        self.tensor, self.address = tensor, address


class Live:
    """Placeholder for an argument of a step that a function recomputes at every replay."""

    __slots__ = ("arguments", "function")

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments


class Name(str):
    """Placeholder for an argument of a step: the result of `Recorder.once`."""


class Recorder(TorchDispatchMode):
    """Dispatch mode that records allocations, PyTorch ops and launches."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        super().__init__()
        #: False if a step cannot be replayed.
        self.complete = True
        self._lines: list[tuple[str | None, str]] = []
        self._names: dict[int, str] = {}
        self._views: dict[int, tuple[Tensor, Callable[[], str]]] = {}
        self._made: set[int] = set()
        self._alive: list[Any] = []
        self._globals: dict[str, Any] = {"empty_strided": torch.empty_strided}
        self._used: set[str] = set()
        self.paused = False
        for place, value in enumerate(arguments):
            if isinstance(value, Tensor):
                self._name(value, f"a{place}")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.paused:
            return result
        if func in _ALLOCATIONS:
            self._allocate(result)
        elif isinstance(result, Tensor):
            if func is aten.detach.default and id(args[0]) in self._made:
                # Under a dispatch mode factory functions are followed by a detach.
                self._name(result, self._names[id(args[0])])
            elif id(result) in self._names:  # in place
                self._line(None, self._text(Live(func, *args), kwargs))
            elif (
                args
                and isinstance(args[0], Tensor)
                and not func._schema.is_mutable
                and result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
            ):  # a view
                self._alive.append(result)
                self._views[id(result)] = (
                    args[0],
                    lambda: self._bound("v", Live(func, *args), kwargs),
                )
            else:
                name = self._bound("t", Live(func, *args), kwargs)
                self._name(result, name)
        elif isinstance(result, (tuple, list)) and all(isinstance(r, Tensor) for r in result):
            name = self._bound("r", Live(func, *args), kwargs)
            for place, value in enumerate(result):
                self._name(value, f"{name}[{place}]")
            self._used.add(name)
        else:
            self.complete = False  # a Python value, on which later steps may depend
        return result

    def step(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Records a call that every replay makes."""
        self._line(None, self._text(Live(function, *arguments)))

    def once(self, name: str, function: Callable[..., Any], *arguments: Any) -> Name:
        """Records a function that every replay calls once; returns a placeholder of its result."""
        if name not in self._used:
            self._used.add(name)
            self._line(None, f"{name} = {self._text(Live(function, *arguments))}")
        return Name(name)

    def function(self, count: int, result: Any) -> Callable[..., Any] | None:
        """Returns the recorded steps as a function of ``count`` arguments; None if not complete."""
        returned = self._text(result)
        if not self.complete:
            return None
        lines = [text for name, text in self._lines if name is None or name in self._used]
        head = f"def replay({', '.join(f'a{n}' for n in range(count))}):"
        source = "\n    ".join([head, *lines, f"return {returned}"])
        exec(source, self._globals)
        return self._globals["replay"]  # type: ignore[no-any-return]

    def _allocate(self, result: Tensor) -> None:
        size, strides, dtype = tuple(result.shape), tuple(result.stride()), result.dtype
        text = None
        for other in self._alive:
            name = self._names.get(id(other))
            if name is None or other.dtype != dtype or other.device != result.device:
                continue
            # `empty_like` has the fewest arguments to parse, so it is the fastest.
            self.paused = True
            alike = other.shape == result.shape and torch.empty_like(other).stride() == strides
            self.paused = False
            if alike:
                self._globals["empty_like"] = torch.empty_like
                text = f"empty_like({name})"
            else:
                text = f"{name}.new_empty_strided({size}, {strides})"
            self._used.add(name)
            break
        if text is None:
            where = f"dtype={self._constant(dtype)}, device={self._constant(result.device)}"
            text = f"empty_strided({size}, {strides}, {where})"
        name = f"t{len(self._lines)}"
        self._line(name, f"{name} = {text}")
        self._name(result, name)
        self._made.add(id(result))

    def _name(self, tensor: Tensor, name: str) -> None:
        self._alive.append(tensor)  # so that its id stays unique
        self._names[id(tensor)] = name

    def _line(self, name: str | None, text: str) -> None:
        self._lines.append((name, text))

    def _bound(self, letter: str, live: Live, kwargs: dict[str, Any]) -> str:
        text = self._text(live, kwargs)
        name = f"{letter}{len(self._lines)}"
        self._line(None, f"{name} = {text}")
        return name

    def _constant(self, value: Any) -> str:
        if value is None or type(value) in (int, bool, str):
            return repr(value)
        name = f"c{len(self._globals)}"
        self._globals[name] = value
        return name

    def _text(self, value: Any, kwargs: dict[str, Any] | None = None) -> str:
        """Returns the source of an expression for ``value`` in the replay."""
        if isinstance(value, Live):
            given = [self._text(one) for one in value.arguments]
            given += [f"{k}={self._text(v)}" for k, v in (kwargs or {}).items()]
            return f"{self._constant(value.function)}({', '.join(given)})"
        if isinstance(value, Name):
            return value
        if isinstance(value, Pointer):
            base = value.tensor
            while id(base) not in self._names and id(base) in self._views:
                base = self._views[id(base)][0]
            offset = value.tensor.data_ptr() - base.data_ptr()
            if not value.address:
                return self._text(value.tensor if offset else base)
            return f"{self._text(base)}.data_ptr()" + (f" + {offset}" if offset else "")
        if isinstance(value, Tensor):
            name = self._names.get(id(value))
            if name is None and id(value) in self._views:
                name = self._names[id(value)] = self._views[id(value)][1]()
            if name is None:
                self.complete = False  # it outlives the call, or was created unrecorded
                return "None"
            self._used.add(name)
            return name
        if isinstance(value, (tuple, list)) and any(
            isinstance(v, (Tensor, Pointer, tuple)) for v in value
        ):
            kind = type(value)
            inner = "".join(f"{self._text(one)}, " for one in value)
            if hasattr(kind, "_fields"):
                return f"{self._constant(kind)}({inner})"
            return f"({inner})" if kind is tuple else f"[{inner}]"
        return self._constant(value)


def record(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """Calls the function; returns its result, and a function that replays the call, or None."""
    # A tensor that is passed twice gets two names, because the next call may pass two tensors.
    given: list[Any] = []
    for value in arguments:
        twice = isinstance(value, Tensor) and any(value is other for other in given)
        given.append(value.detach() if twice else value)
    with Recorder(given) as found:
        _now.recorder = found
        try:
            result = function(*given)
        finally:
            _now.recorder = None
    return result, found.function(len(given), result)


_SEEN, _NEVER = object(), object()
#: Set by `runtime` when it is imported: returns True if plans may be replayed now.
allowed: Callable[[], bool] = lambda: False  # noqa: E731


def _on(device: int, plan: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return plan(*arguments)
    return plan(*arguments)


class Replayed:
    """A function that is recorded in its first call and then replayed; all calls must be equal."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.plan: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        if _now.recorder is not None or not allowed():
            return self.function(*arguments)
        if self.plan is None:
            result, plan = record(self.function, arguments)
            self.plan = plan or self.function
            return result
        return _on(arguments[0].get_device(), self.plan, arguments)


class Planned:
    """A function whose calls are recorded the second time, and replayed from then on."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.store = call_cache.new_store()

    def __call__(self, *arguments: Any) -> Any:
        if _now.recorder is not None or not allowed():
            return self.function(*arguments)
        key = call_cache.describe(arguments)
        plan = self.store.get(key)
        if key is None or plan is _NEVER:
            return self.function(*arguments)
        if plan is None:
            call_cache.insert(self.store, key, _SEEN)
            return self.function(*arguments)
        if plan is not _SEEN:
            return _on(arguments[0].get_device(), plan, arguments)
        result, plan = record(self.function, arguments)
        call_cache.insert(self.store, key, plan or _NEVER)
        return result

    def replay(self, arguments: tuple[Any, ...]) -> Any:
        """Replays the call if it is recorded, else returns `NotImplemented`."""
        if not allowed():
            return NotImplemented
        plan = self.store.get(call_cache.describe(arguments))
        if plan is None or plan is _NEVER or plan is _SEEN:
            return NotImplemented
        return _on(arguments[0].get_device(), plan, arguments)
