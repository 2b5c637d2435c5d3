"""Operators of `torch.ops.transformer_fast`: their schemas and rules. From the rules follow fake
results for torch.compile and meta tensors, DTensor sharding, and FLOPs for
torch.utils.flop_counter.

A rule names the dimensions of an operator's tensors by letters, like einsum, and lists the letters
by which a call can be sharded. A tensor with that letter is then sharded in that dimension. An
argument without it is replicated. A result without it is partial: a sum over the shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._on_import import when_imported
from ..recipe import Kind
from ..reference.attention import empty_heads, empty_output


class Rule(NamedTuple):
    """The dimensions of an operator's tensors, and those by which a call can be sharded.

    ``...`` stands for the leading dimensions, whose letters are digits. ``*`` stands for dimensions
    without a letter, a digit for a dimension of that size without a letter. A capital letter is a
    dimension that packed sequences lack; its size is then that of the padded tensor. Suffixes of a
    tensor's dimensions:

        +x   added to the result: partial if the call is sharded by x
        =x   not summed over x: replicated if the call is sharded by x

    Further suffixes of a result's dimensions:

        /x   order of the dimensions in memory, if it differs; ``attention``: that of
             `reference.attention.empty_output`; ``planes``: that of `_empty_planes`
        :d   dtype, if not the first tensor's; ``wide``: that one, but at least float32;
             ``@name``: that of this argument, if given
        ?a   empty unless the argument ``a`` is given (or is True)
    """

    #: ``name:dimensions`` of each argument that can be sharded; for an integer, the dimension whose
    #: size it is.
    arguments: str
    #: ``dimensions`` of each result; ``@name``: those of that argument; with ``/`` its strides,
    #: too.
    results: str
    #: The letters along which a call can be sharded; ``.`` stands for all leading dimensions.
    by: str
    #: The letters that each matrix product iterates over (2 FLOPs per element); ``?a`` as above.
    products: str = ""
    #: The letters of ``by`` along which calls with dropout can be sharded, too: the pattern depends
    #: on the position.
    despite_dropout: str = ""
    #: Letters of ``by`` along which only calls without activation are sharded: an activation
    #: would read partial sums.
    if_linear: str = ""


def _is_packed(given: dict[str, Any]) -> bool:
    """True if the call is attention of packed sequences."""
    return given.get("query_lengths") is not None and bool(given["longest_queries"] >= 0)


class _Tensor(NamedTuple):
    """The letters of a tensor's dimensions in a sharding rule; None: it cannot be sharded."""

    letters: tuple[str | None, ...]
    partial: str = ""
    whole: str = ""

    def placement(self, letter: str, result: bool) -> Any:
        from torch.distributed.tensor import Partial, Replicate, Shard

        if letter in self.letters:
            return Shard(self.letters.index(letter))
        if letter in self.partial or (result and letter not in self.whole):
            return Partial()
        return Replicate()


class _Result(NamedTuple):
    """One result, parsed from a token of `Rule.results`."""

    dims: str
    like: str
    order: str | None
    dtype: str
    condition: str

    def is_there(self, given: dict[str, Any]) -> bool:
        there = not self.condition or given.get(self.condition)
        return there is not None and there is not False


def _result(token: str) -> _Result:
    token, _, condition = token.partition("?")
    token, _, dtype = token.partition(":")
    dims, ordered, order = token.partition("/")
    like = dims[1:] if dims[0] == "@" else ""
    return _Result(dims, like, order if ordered else None, dtype, condition)


def _lead(rule: Rule, given: dict[str, Any]) -> int:
    """Returns the number of leading dimensions."""
    for token in rule.arguments.split():
        name, _, dims = token.partition(":")
        if given.get(name) is None or not dims.startswith("..."):
            continue
        shape, dims = given[name].shape, dims.partition("+")[0][3:]
        return len(shape) - (given["dims"] if dims == "*" else len(dims))
    return 0


def _tensor(dims: str, lead: int, shape: Sequence[int] | None) -> _Tensor:
    dims, _, whole = dims.partition("=")
    dims, _, partial = dims.partition("+")
    letters: list[str | None] = []
    if dims.startswith("..."):
        letters, dims = [str(i) for i in range(lead)], dims[3:]
    if dims == "*":
        letters += [None] * (0 if shape is None else len(shape) - lead)
    else:
        letters += [None if each.isdigit() else each.lower() for each in dims]
    return _Tensor(tuple(letters), partial, whole)


def _cuts(rule: Rule, given: dict[str, Any], lead: int) -> Iterator[str]:
    """Yields the letters of the rule's dimensions along which this call can be sharded."""
    drops = given.get("dropout_p", given.get("p", 0.0)) > 0.0
    linear = given.get("activation") in (0, None)
    leading = map(str, range(lead)) if "." in rule.by else ()
    for letter in (*leading, *rule.by.replace(".", "")):
        if letter == "0" and lead == 0:
            continue
        if _is_packed(given) and letter != "h":
            continue  # all packed sequences share one dimension
        if (linear or letter not in rule.if_linear) and (
            not drops or letter in rule.despite_dropout
        ):
            yield letter


def _letters(rule: Rule, given: dict[str, Any]) -> tuple[dict[str, _Tensor], dict[str, set[int]]]:
    """Returns the tensor arguments by name, and the sizes of each letter's dimensions."""
    lead = _lead(rule, given)
    tensors = {n: _Tensor((None,) * len(t.shape)) for n, t in given.items() if hasattr(t, "shape")}
    for token in rule.arguments.split():
        name, _, dims = token.partition(":")
        # A tensor that was not saved for backward is passed as an empty 1-D tensor.
        if name in tensors and ("..." not in dims or tuple(given[name].shape) != (0,) or lead == 0):
            tensors[name] = _tensor(dims, lead, given[name].shape)
    sizes: dict[str, set[int]] = {}
    for name, tensor in tensors.items():
        for letter, size in zip(tensor.letters, given[name].shape, strict=True):
            if letter is not None:
                sizes.setdefault(letter, set()).add(size)
    return tensors, sizes


def placements(rule: Rule, given: dict[str, Any]) -> list[tuple[list[Any], list[Any]]]:
    """Returns, for each way to shard a call, the placements of its results and arguments.

    ``given``: the arguments by name; only shape and mesh of tensors are used.
    """
    from torch.distributed.tensor import Replicate

    lead = _lead(rule, given)
    tensors, sizes = _letters(rule, given)
    processes = math.prod(next(given[name].mesh for name in tensors).shape)
    # A dimension of size 1 is broadcast if another tensor's is larger; it cannot be sharded.
    for name, tensor in tensors.items():
        letters = tuple(
            None if letter is not None and size == 1 and max(sizes[letter]) > 1 else letter
            for letter, size in zip(tensor.letters, given[name].shape, strict=True)
        )
        tensors[name] = tensor._replace(letters=letters)
    results: list[_Tensor | None] = []
    for token in rule.results.split():
        result = _result(token)
        if not result.is_there(given):
            results.append(None)
        elif result.like:
            results.append(tensors[result.like])
        else:
            results.append(_tensor(result.dims, lead, None))
    ways: list[tuple[list[Any], list[Any]]] = [
        ([Replicate() for _ in results], [Replicate() if n in tensors else None for n in given])
    ]
    for letter in _cuts(rule, given, lead):
        lengths = sizes.get(letter, set()) - {1}
        # Groups of heads stay on one device only if query heads and key heads both divide evenly.
        if len(lengths) > 1 and any(size % processes for size in lengths):
            continue
        ways.append(
            (
                [Replicate() if t is None else t.placement(letter, True) for t in results],
                [tensors[n].placement(letter, False) if n in tensors else None for n in given],
            )
        )
    return ways


def flops(rule: Rule, given: dict[str, Any]) -> int:
    """Returns the FLOPs of a call's products, in the convention of torch.utils.flop_counter."""
    _, sizes = _letters(rule, given)
    if _is_packed(given):  # counted as if they were padded
        sizes["b"] = {given["key_lengths"].shape[0] - 1}
        sizes["t"], sizes["s"] = {given["longest_queries"]}, {given["longest_keys"]}
    leading = math.prod(given["input"].shape[: _lead(rule, given)]) if "input" in given else 1
    total = 0
    for product in rule.products.split():
        letters, _, condition = product.partition("?")
        if not condition or given[condition]:
            total += 2 * math.prod(leading if x == "." else max(sizes[x]) for x in letters)
    return total


def _empty_planes(like: Tensor) -> Tensor:
    """Returns an uninitialised tensor (rows, C) or (N, rows, C), with the dimension order of
    ``like`` in memory."""
    if like.dim() == 3 and like.stride(1) < like.stride(2):
        return like.new_empty(like.mT.shape).mT
    return like.new_empty(like.shape)


def fakes(rule: Rule, given: dict[str, Any]) -> list[Tensor]:
    """Returns tensors with the shapes, strides and dtypes of the call's results."""
    lead = _lead(rule, given)
    first: Tensor | None = None
    sizes: dict[str, Any] = {}
    for token in rule.arguments.split():
        name, _, dims = token.partition(":")
        value = given.get(name)
        if isinstance(value, Tensor):
            first = value if first is None else first
            letters = _tensor(dims, lead, value.shape).letters
            if len(letters) != value.dim():  # a tensor that was not saved for backward
                continue
            for letter, size in zip(letters, value.shape, strict=True):
                sizes.setdefault(letter or "", size)
            if dims.startswith("...*"):
                sizes.setdefault("*", value.shape[lead:])
        elif value is not None:
            sizes.setdefault(dims, value)
    assert first is not None
    leading = [sizes[str(i)] for i in range(lead)]

    def shape(dims: str) -> list[Any]:
        found: list[Any] = []
        if dims.startswith("..."):
            found, dims = [*leading], dims[3:]
        if dims == "*":
            return [*found, *sizes["*"]]
        return found + [int(each) if each.isdigit() else sizes[each] for each in dims]

    sizes |= {letter.upper(): size for letter, size in sizes.items()}
    if _is_packed(given):
        sizes["B"], sizes["T"] = given["key_lengths"].shape[0] - 1, given["longest_queries"]

    dtypes = {"": first.dtype, "wide": torch.promote_types(first.dtype, torch.float32)}
    results = []
    for result in map(_result, rule.results.split()):
        if result.dtype[:1] == "@":
            dtype = getattr(given[result.dtype[1:]], "dtype", first.dtype)
        else:
            dtype = dtypes.get(result.dtype) or getattr(torch, result.dtype)
        if not result.is_there(given):
            found = first.new_empty((0,))
        elif result.like:
            like = given[result.like]
            if result.order == "planes":
                found = _empty_planes(like)
            elif result.order is not None:
                found = empty_heads(like, like.shape[3])
            else:
                found = like.new_empty(like.shape)
        elif result.order == "attention":
            operands = (given["query"], given["key"], given["value"])
            found = empty_output(*operands, given["contiguous"])
        else:
            dims = result.dims.partition("=")[0].partition("+")[0]
            order = result.order or dims
            found = first.new_empty(shape(order), dtype=dtype)
            if order != dims:
                found = found.permute([order.index(each) for each in dims])
        results.append(found)
    return results


def register_fake(operator: Any, rule: Rule) -> None:
    def fake(*given: Any, **named: Any) -> Any:
        results = fakes(rule, _by_name(operator, given, named))
        return results[0] if len(results) == 1 else tuple(results)

    torch.library.register_fake(operator.name(), fake, lib=_library)


def _by_name(
    operator: Any, given: Sequence[Any], named: dict[str, Any] | None = None
) -> dict[str, Any]:
    arguments = operator._schema.arguments
    found = {a.name: a.default_value for a in arguments if a.has_default_value()}
    found |= zip((a.name for a in arguments), given, strict=False)
    return found | (named or {})


_library = torch.library.Library("transformer_fast", "FRAGMENT")


class Operator:
    """An operator, with one overload of the same schema for each backend that has kernels for it:
    ``torch.ops.transformer_fast.<name>.<backend>``."""

    def __init__(self, schema: str, rule: Rule) -> None:
        self.name, _, self._arguments = schema.partition("(")
        self.rule = rule
        #: Backend -> function that runs the operator.
        self.of: dict[str, Callable[..., Any]] = {}
        self.overloads: list[Any] = []
        OPERATORS[self.name] = self

    def define(self, backend: str) -> Any:
        """Adds the overload of a backend, which registers its implementation in Python or C++."""
        _library.define(f"{self.name}.{backend}({self._arguments}")
        overload = getattr(getattr(torch.ops.transformer_fast, self.name), backend)
        register_fake(overload, self.rule)
        self.of[backend] = overload
        self.overloads.append(overload)
        return overload


OPERATORS: dict[str, Operator] = {}

# Operators without a function in `functional`: parts of modules and of generation.
DROPOUT = Operator(
    "dropout(Tensor input, float p, Tensor? seed) -> Tensor", Rule("input:...", "...", ".")
)
#: Gradient of an embedding table with ``rows`` rows, from the gradient of the looked-up rows.
EMBEDDING_BACKWARD = Operator(
    "embedding_backward(Tensor grad, Tensor tokens, int rows, int padding) -> Tensor",
    Rule("grad:...m tokens:... rows:v", "vm", ".m"),
)
#: Index of each row's largest value; the first of equal ones.
ARGMAX = Operator("argmax(Tensor input) -> Tensor", Rule("input:rc", "r:int64", "r"))


def _strategy(operator: Any, rule: Rule) -> Callable[..., Any]:
    return lambda *given: placements(rule, _by_name(operator, given))


def _all() -> Iterator[tuple[Any, Rule]]:
    """Yields every overload, with its operator's rule."""
    for one in OPERATORS.values():
        yield from ((overload, one.rule) for overload in one.overloads)


def _register_sharding(module: ModuleType) -> None:
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    schemas = module.DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    for operator, rule in _all():
        register_sharding(operator)(_strategy(operator, rule))
        # A cached sharding decision holds for calls with equal numbers and flags.
        schemas[operator] = RuntimeSchemaInfo(static_argnum=0, needs_pytree=True)


def _layers_flops(
    input: Any, memory: Any, kinds: Sequence[int], parameters: Sequence[Any], *rest: Any,
    out_val: Any = None,
) -> int:  # fmt: skip
    """Returns the FLOPs of ``layers``."""
    *_, batch_first, _, _, _, _, starts, memory_starts, _, _ = rest
    lengths = _lengths(input, batch_first, starts)
    keys = lengths if memory is None else _lengths(memory, batch_first, memory_starts)
    total, width = 0, input.shape[-1]
    for number in range(len(parameters) // 6):
        first, second = parameters[6 * number], parameters[6 * number + 2]
        kind = Kind(kinds[number % len(kinds)])
        if kind is Kind.QUERIES_AND_KEYS:  # counted with their attention
            continue
        if not kind.is_attention:
            maps = (first,) if kind is Kind.GATE else (first, second)
            total += 2 * sum(lengths) * sum(weight.numel() for weight in maps)
        else:
            seen = lengths if kind is Kind.SELF_ATTENTION else keys
            # Projections: queries and the output; keys and values.
            total += 4 * width * width * (sum(lengths) + sum(seen))
            total += 4 * width * sum(t * s for t, s in zip(lengths, seen, strict=True))
    return total


def _lengths(input: Any, batch_first: bool, starts: Any) -> list[int]:
    if starts is not None:
        return [int(length) for length in starts.diff().tolist()]
    batch, length = input.shape[:2] if batch_first else (input.shape[1], input.shape[0])
    return [int(length)] * int(batch)


def _decode_flops(
    input: Any, cache: Any, start: int, memories: Sequence[Any], kinds: Sequence[int],
    parameters: Sequence[Any], *rest: Any, out_val: Any = None,
) -> int:  # fmt: skip
    """Returns the FLOPs of ``decode_stack``: T tokens of each of R sequences."""
    rows = input.shape[0]
    tokens = rows // max(1, cache.shape[2])
    width = rest[5] * cache.shape[5]  # columns of all heads
    total = sum(
        2 * rows * weight.numel()
        for weight in parameters
        if weight is not None and weight.dim() == 2
    )
    total += 4 * width * rows * (start + tokens) * cache.shape[0]
    return total + sum(4 * width * rows * memory.shape[3] for memory in memories)


def _register_flops(module: ModuleType) -> None:
    def formula(operator: Any, rule: Rule) -> Callable[..., int]:
        return lambda *given, out_val=None: flops(rule, _by_name(operator, given))

    # Overloads of one packet share their schema.
    counts = {o.overloadpacket: formula(o, rule) for o, rule in _all() if rule.products}
    for name, count in (("layers", _layers_flops), ("decode_stack", _decode_flops)):
        if (packet := getattr(torch.ops.transformer_fast, name, None)) is not None:  # it was built
            counts[packet] = count
    for packet, count in counts.items():
        if packet not in module.flop_registry:
            module.register_flop_formula(packet, get_raw=True)(count)


def register_rules() -> None:
    """Registers the rules of all operators with DTensor and the FLOP counter, once these are
    imported."""
    if torch.distributed.is_available():
        when_imported("torch.distributed.tensor", _register_sharding)
    when_imported("torch.utils.flop_counter", _register_flops)
