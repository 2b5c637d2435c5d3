"""Runs PTX on the CPU, so that the output of Triton and nvcc is tested without a GPU.

The threads of all blocks of a launch are lanes of NumPy arrays: a register is an array with one element
per lane. Lanes at the lowest program counter run first, so that divergent lanes reconverge and barriers
hold. The emulator is stricter than a GPU:

- Accesses outside the tensors given to the kernel are errors, and so are misaligned accesses.
- Registers and shared memory start as NaN. The destination of cp.async is NaN until the program waits
  for the copy, and it must wait before it ends.
- If two warps access one address of shared memory and one of them writes, a barrier has to separate them.
- Approximate instructions (ex2, lg2, rcp, div.full, ...) have the maximum error that NVIDIA documents.
  Bits of the result determine its sign.
- Warp-level instructions (mma, ldmatrix, shfl, bar) require all lanes of the warp. All threads of a block
  that have not ended must reach a barrier, though not at the same instruction.

Only the instructions that Triton and nvcc generate for this package's kernels on sm_80 are supported.
Source: NVIDIA, Parallel Thread Execution ISA, chapter 9.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = Any
#: Executes one instruction; takes the machine and the mask of active lanes (None: all).
Step = Callable[["Machine", Any], None]

_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
_FLOAT = {16: np.float16, 32: np.float32, 64: np.float64}
#: Number of lanes at once; at this size NumPy's arrays stay in the CPU's caches.
_LANES = 8192


class EmulationError(AssertionError):
    """The program would fault on a GPU, has a race, or depends on unspecified behaviour."""


def _widen(bf16: Array) -> Array:
    return (bf16.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _narrow(x: Array) -> Array:
    """Rounds fp32 to the nearest bf16, as uint16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded.astype(np.uint16))


def _flush(x: Array) -> Array:
    """The .ftz modifier: flushes denormals to 0."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0.0), x), x)


def _off(x: Array, relative: Array | float) -> Array:
    """Applies an approximation's maximum relative error to fp32 values; a hash of the bits gives
    the sign.
    """
    x = np.asarray(x, np.float32)
    chance = (x.view(np.uint32) * np.uint32(2654435761)) >> np.uint32(31)
    moved = x.astype(np.float64) * (1.0 + np.where(chance == 0, relative, -relative))
    # Hardware is exact here too: powers at 0, 1 / 1, infinities.
    return np.where((x == 1.0) | ~np.isfinite(x), x, moved.astype(np.float32))


def _exp2_error(x: Array) -> Array:
    """Returns the maximum relative error of ex2.

    It is 2^-22. For 0 <= x < 1 it is one unit in the last place: expf uses ex2 in this range, and
    the CUDA programming guide bounds the error of expf by that.
    """
    return np.where((x >= 0) & (x < 1), 2.0**-23 / np.exp2(x), 2.0**-22)


_APPROXIMATIONS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array | float]]] = {
    "ex2": (np.exp2, _exp2_error),
    "rcp": (lambda x: 1.0 / x, lambda x: 2.0**-23),
    "sqrt": (np.sqrt, lambda x: 2.0**-23),
    "rsqrt": (lambda x: 1.0 / np.sqrt(x), lambda x: 2.0**-22.9),
}


def _fits(dtype: Any, value: Array) -> Array:
    """Converts ``value`` to the bits of a register of the unsigned ``dtype``."""
    value = np.asarray(value)
    if dtype is np.bool_:
        return value.astype(bool)
    if value.dtype.kind in "fi":
        return (
            value.view(_UNSIGNED[8 * value.dtype.itemsize])
            if (value.dtype.itemsize == np.dtype(dtype).itemsize)
            else value.astype(_SIGNED[8 * np.dtype(dtype).itemsize]).view(dtype)
        )
    return value.astype(dtype)


def _kind(suffix: str) -> tuple[str, int]:
    """Splits 's32' into ('s', 32)."""
    if suffix == "pred":
        return "p", 1
    found = re.fullmatch(r"([bfsu])(\d+)", suffix)
    if found is None:
        raise NotImplementedError(f"type {suffix}")
    return found[1], int(found[2])


def _typed(kind: str, width: int, bits: Array) -> Array:
    if kind == "p":
        return bits.astype(bool, copy=False)
    if bits.dtype == np.bool_:
        bits = bits.astype(_UNSIGNED[width])
    if bits.dtype.itemsize * 8 != width:
        bits = bits.astype(_UNSIGNED[width])
    if kind == "f":
        return bits.view(_FLOAT[width])
    return bits.view(_SIGNED[width]) if kind == "s" else bits


def _names(operands: str) -> list[str]:
    """Returns the registers of '{%r1, %r2}'."""
    return [name.strip() for name in operands.strip("{} ").split(",")]


def kernels(module: str) -> dict[str, str]:
    """Returns the PTX of each kernel of a module, including the module's declarations."""
    declared, *entries = re.split(r"(?=^\.(?:visible|weak) \.entry )", module, flags=re.MULTILINE)
    return {re.findall(r"\.entry (\w+)", entry)[0]: declared + entry for entry in entries}


class Program:
    """The PTX of one kernel, with each instruction as a closure."""

    def __init__(self, text: str) -> None:
        text = re.sub(r"//[^\n]*", "", text)
        text = re.sub(r"^\s*\.(loc|file|pragma)\b[^\n]*$", "", text, flags=re.MULTILINE)
        head = text.split(".entry")[1].split("{")[0]
        #: Parameter -> its offset in the parameter buffer, in bytes.
        self.parameters: dict[str, int] = {}
        self.parameter_bytes = 0
        for name, size in re.findall(r"\.param [^\n]*?(\w+)(?:\[(\d+)\])?(?=,|\n\))", head):
            self.parameters[name] = self.parameter_bytes
            self.parameter_bytes += -(-int(size or 8) // 8) * 8
        #: Symbol -> address; all shared memory starts at 0.
        self._symbols = {
            **self.parameters,
            **dict.fromkeys(re.findall(r"\.extern \.shared [^\n]*?(\w+)\[", text), 0),
        }
        size = re.search(r"\.(?:req|max)ntid (\d+)", text)
        assert size is not None
        self.threads = int(size[1])
        self.counts: Counter[str] = Counter()
        self._dtype: dict[str, Any] = {}
        self._number: dict[str, int] = {}
        self.steps: list[tuple[str, Step | None, str | None, bool, str]] = []
        self.labels: dict[str, int] = {}
        self._parse(text)

    def _parse(self, text: str) -> None:
        start = text.index("{", text.index("ntid"))
        body = text[start + 1 : text.rindex("}")]
        for statement in re.split(r";|(?<=:)\s", body):
            statement = " ".join(statement.replace("\n", " ").split())
            # Inline assembly has scopes that declare their own registers.
            while statement[:1] in ("{", "}"):
                statement = statement[1:].strip()
            if not statement:
                continue
            if statement.endswith(":"):
                self.labels[statement[:-1]] = len(self.steps)
            elif statement.startswith(".reg"):
                kind, names = statement.split(None, 2)[1:]
                width = 1 if kind == ".pred" else _kind(kind[1:])[1]
                dtype = np.bool_ if width == 1 else _UNSIGNED[width]
                for name in names.split(","):
                    self._dtype[re.sub(r"<\d+>", "", name.strip())] = dtype
            elif not statement.startswith("."):
                self._add(statement)

    def _add(self, statement: str) -> None:
        predicate, wanted, rest = None, True, statement
        if rest[0] == "@":
            guard, rest = rest.split(" ", 1)
            predicate, wanted = guard.lstrip("@!"), guard[1] != "!"
        name, _, operands = rest.partition(" ")
        operands = re.split(r",(?![^\[{]*[\]}])", operands) if operands else []
        operands = [operand.strip() for operand in operands]
        op = name.replace("::cta", "").split(".")  # a block's own shared memory, the default
        if op[0] in ("bra", "ret"):
            self.steps.append((op[0], None, predicate, wanted, operands[0] if operands else ""))
            return
        maker = getattr(self, f"op_{op[0]}", None)
        if maker is None:
            raise NotImplementedError(statement)
        self.steps.append((name, maker(op, operands), predicate, wanted, statement))

    # Operands ---------------------------------------------------------------------------------

    def dtype(self, register: str) -> Any:
        """Returns the unsigned NumPy type of a register."""
        if register in self._dtype:
            return self._dtype[register]
        return self._dtype[re.sub(r"\d+$", "", register)]

    def _read(self, operand: str, kind: str, width: int) -> Callable[[Machine], Array]:
        """Returns a function that reads the operand as an array, or a scalar, of the given type."""
        if operand.startswith("%") or operand in self._dtype:
            if operand.startswith(("%tid.", "%ctaid.", "%nctaid.", "%laneid")):
                return lambda m: _typed(kind, width, m.special[operand])
            return lambda m: _typed(kind, width, m.registers[operand])
        if operand.startswith("0f"):
            value = np.array(int(operand[2:], 16), np.uint32)
        elif operand.startswith("0d"):
            value = np.array(int(operand[2:], 16), np.uint64)
        elif (symbol := operand.partition("+"))[0] in self._symbols:
            value = np.array(self._symbols[symbol[0]] + int(symbol[2] or 0), np.uint64)
        elif operand == "true":
            value = np.array(True)
        else:
            number = int(operand.rstrip("U"), 0)
            value = np.array(number & ((1 << max(width, 8)) - 1), _UNSIGNED[max(width, 8)])
        constant = _typed(kind, width, value)
        return lambda m: constant

    def _reads(self, operands: Sequence[str], kind: str, width: int) -> list[Any]:
        return [self._read(operand, kind, width) for operand in operands]

    def _write(self, register: str) -> Callable[[Machine, Array, Array], None]:
        """Returns a function that writes bits or numbers to the active lanes."""
        if register == "_":
            return lambda m, on, value: None
        dtype = self.dtype(register)

        def put(m: Machine, on: Array, value: Array) -> None:
            bits = _fits(dtype, value)
            if on is not None:
                bits = np.where(on, bits, m.registers[register])
            elif bits.ndim == 0:
                bits = np.full(m.lanes, bits)
            m.registers[register] = bits

        return put

    def _writes(self, operands: str) -> list[Any]:
        return [self._write(name) for name in _names(operands)]

    def _address(self, operand: str) -> Callable[[Machine], Array]:
        base, _, offset = operand.strip("[] ").partition("+")
        read = self._read(base.strip(), "u", 64)
        if not offset.strip():
            return read
        plus = np.uint64(int(offset.strip(), 0) & ((1 << 64) - 1))
        return lambda m: read(m) + plus

    def _apply(self, operands: list[str], function: Any, *types: tuple[str, int]) -> Step:
        """destination = function(sources), with one type per source."""
        put = self._write(operands[0])
        reads = [self._read(one, *kind) for one, kind in zip(operands[1:], types, strict=True)]
        return lambda m, on: put(m, on, function(*[read(m) for read in reads]))

    def _simple(self, operands: list[str], kind: str, width: int, function: Any) -> Step:
        """destination = function(sources), with the same type for all."""
        return self._apply(operands, function, *[(kind, width)] * (len(operands) - 1))

    def _of_warp(self, operands: list[str], function: Any, *types: tuple[str, int]) -> Step:
        """destination = function(sources), where sources have shape [warps, 32]."""
        put = self._write(operands[0])
        reads = [self._read(one, *kind) for one, kind in zip(operands[1:], types, strict=True)]

        def step(m: Machine, on: Array) -> None:
            m.warps(on)
            given = [np.broadcast_to(read(m), m.lanes).reshape(-1, 32) for read in reads]
            put(m, on, np.broadcast_to(function(*given), given[0].shape).reshape(-1))

        return step

    # Data movement ----------------------------------------------------------------------------

    def op_mov(self, op: list[str], operands: list[str]) -> Step:
        kind, width = _kind(op[-1])
        to, source = operands
        if source.startswith("{"):
            parts = _names(source)
            piece = width // len(parts)
            put, reads = self._write(to), self._reads(parts, "b", piece)
            wide = _UNSIGNED[width]

            def pack(m: Machine, on: Array) -> None:
                total = wide(0)
                for i, read in enumerate(reads):
                    total = total | (read(m).astype(wide) << wide(piece * i))
                put(m, on, total)

            return pack
        if to.startswith("{"):
            read, puts = self._read(source, "b", width), self._writes(to)
            piece = width // len(puts)

            def unpack(m: Machine, on: Array) -> None:
                value = read(m)
                for i, put in enumerate(puts):
                    bits = (value >> _UNSIGNED[width](piece * i)).astype(_UNSIGNED[piece])
                    put(m, on, bits)

            return unpack
        return self._simple(operands, kind, width, lambda x: x)

    def op_ld(self, op: list[str], operands: list[str]) -> Step:
        kind, width = _kind(op[-1])
        puts, at = self._writes(operands[0]), self._address(operands[1])
        bits = _UNSIGNED[width]
        signed = _SIGNED[width] if kind == "s" else bits
        load_from = {"param": Machine.load_parameters, "shared": Machine.load_shared}.get(
            op[1], Machine.load
        )

        def load(m: Machine, on: Array) -> None:
            data = load_from(m, at(m), on, bits, len(puts))
            for i, put in enumerate(puts):
                put(m, on, data[:, i].view(signed))

        return load

    def op_st(self, op: list[str], operands: list[str]) -> Step:
        width = _kind(op[-1])[1]
        reads, at = self._reads(_names(operands[1]), "b", width), self._address(operands[0])
        bits, shared = _UNSIGNED[width], op[1] == "shared"

        def store(m: Machine, on: Array) -> None:
            data = np.empty((m.lanes, len(reads)), bits)
            for i, read in enumerate(reads):
                data[:, i] = read(m)
            m.store(at(m), on, data, shared)

        return store

    def op_cvta(self, op: list[str], operands: list[str]) -> Step:
        return self._simple(operands, "b", 64, lambda x: x)

    def op_cp(self, op: list[str], operands: list[str]) -> Step:
        assert op[1] == "async", op
        if op[2] == "commit_group":
            return lambda m, on: m.commit(on)
        if op[2] in ("wait_group", "wait_all"):
            keep = int(operands[0], 0) if operands else 0
            return lambda m, on: m.wait(on, keep)
        to, source = self._address(operands[0]), self._address(operands[1])
        size = int(operands[2], 0)
        count = self._read(operands[3], "u", 32) if len(operands) > 3 else None

        def copy(m: Machine, on: Array) -> None:
            m.copy(to(m), source(m), on, size, None if count is None else count(m))

        return copy

    # Arithmetic -------------------------------------------------------------------------------

    def op_arithmetic(self, op: list[str], operands: list[str]) -> Step:
        name = op[0]
        if op[-1] in ("bf16x2", "f16x2"):
            return self._pairs(op, operands)
        kind, width = _kind(op[-1])
        if "wide" in op:
            big = (_SIGNED if kind == "s" else _UNSIGNED)[2 * width]

            def wide(x: Array, y: Array, plus: Array | int = 0) -> Array:
                return x.astype(big) * y.astype(big) + plus

            types = [(kind, width)] * 2 + [(kind, 2 * width)] * (name == "mad")
            return self._apply(operands, wide, *types)
        if name == "mul" and "hi" in op:
            assert width == 32
            big = np.int64 if kind == "s" else np.uint64
            small = (_SIGNED if kind == "s" else _UNSIGNED)[32]
            return self._simple(
                operands, kind, width,
                lambda x, y: ((x.astype(big) * y.astype(big)) >> big(32)).astype(small),
            )  # fmt: skip
        if kind == "f":
            return self._simple(operands, kind, width, _floating(op, width))
        functions = {
            "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum,
            "max": np.maximum, "mad": lambda x, y, z: x * y + z, "neg": np.negative, "abs": np.abs,
            "div": lambda x, y: _quotient(x, y)[0], "rem": lambda x, y: _quotient(x, y)[1],
        }  # fmt: skip
        return self._simple(operands, kind, width, functions[name])

    op_add = op_sub = op_mul = op_mad = op_fma = op_div = op_rem = op_arithmetic
    op_min = op_max = op_neg = op_abs = op_arithmetic

    def _pairs(self, op: list[str], operands: list[str]) -> Step:
        half = op[-1] == "f16x2"

        def both(*bits: Array) -> Array:
            result = np.uint32(0)
            for shift in (np.uint32(0), np.uint32(16)):
                raw = [((x >> shift) & np.uint32(0xFFFF)).astype(np.uint16) for x in bits]
                parts = [x.view(np.float16) if half else _widen(x) for x in raw]
                one = _floating([op[0], "rn", "f64"], 64)(*(x.astype(np.float64) for x in parts))
                one = one.astype(np.float32)
                one = one.astype(np.float16).view(np.uint16) if half else _narrow(one)
                result = result | (one.astype(np.uint32) << shift)
            return result

        return self._simple(operands, "b", 32, both)

    def op_ex2(self, op: list[str], operands: list[str]) -> Step:
        kind, width = _kind(op[-1])
        function, error = _APPROXIMATIONS[op[0]]
        if "rn" in op:
            return self._simple(operands, kind, width, function)
        assert "approx" in op, op
        flush = _flush if "ftz" in op else (lambda x: x)

        def approximate(x: Array) -> Array:
            x = flush(x)
            return flush(_off(function(x), error(x)))

        return self._simple(operands, kind, width, approximate)

    op_sqrt = op_rcp = op_rsqrt = op_ex2

    def op_lg2(self, op: list[str], operands: list[str]) -> Step:
        def logarithm(x: Array) -> Array:
            x = _flush(x) if "ftz" in op else x
            exact = np.log2(x)
            near = (x > 0.5) & (x < 2.0)
            up = np.where((x.view(np.uint32) & np.uint32(1)) == 0, 1.0, -1.0)
            moved = exact + (up * 2.0**-22 * (x != 1.0)).astype(np.float32)
            return np.where(near, moved, _off(exact, 2.0**-22)).astype(np.float32)

        return self._simple(operands, *_kind(op[-1]), logarithm)

    def op_logic(self, op: list[str], operands: list[str]) -> Step:
        kind, width = _kind(op[-1])
        if kind == "p" and op[0] == "not":
            return self._simple(operands, kind, width, np.logical_not)
        functions = {
            "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert
        }  # fmt: skip
        return self._simple(operands, kind, width, functions[op[0]])

    op_and = op_or = op_xor = op_not = op_logic

    def op_shl(self, op: list[str], operands: list[str]) -> Step:
        kind, width = _kind(op[-1])
        left = op[0] == "shl"

        def shift(x: Array, by: Array) -> Array:
            inside = np.minimum(by, np.uint32(width - 1)).astype(x.dtype)
            moved = x << inside if left else x >> inside
            return moved if kind == "s" else np.where(by >= width, x.dtype.type(0), moved)

        return self._apply(operands, shift, (kind, width), ("u", 32))

    op_shr = op_shl

    def op_bfe(self, op: list[str], operands: list[str]) -> Step:
        kind, width = _kind(op[-1])
        assert width == 32

        def extract(*sources: Array) -> Array:
            x, position, length = (source.astype(np.uint64) for source in sources)
            field = (x >> position) & ((np.uint64(1) << length) - np.uint64(1))
            if kind == "s":
                sign = np.uint64(1) << (length - np.uint64(1))
                field = (field ^ sign).astype(np.int64) - sign.astype(np.int64)
            return field.astype(np.int64).astype(np.int32)

        return self._simple(operands, "u", 32, extract)

    def op_bfi(self, op: list[str], operands: list[str]) -> Step:
        assert op[1] == "b32", op

        def insert(*sources: Array) -> Array:
            field, x, position, length = (source.astype(np.uint64) for source in sources)
            mask = ((np.uint64(1) << length) - np.uint64(1)) << position
            return ((x & ~mask) | ((field << position) & mask)).astype(np.uint32)

        return self._simple(operands, "u", 32, insert)

    def op_copysign(self, op: list[str], operands: list[str]) -> Step:
        return self._simple(operands, *_kind(op[-1]), lambda sign, x: np.copysign(x, sign))

    def op_prmt(self, op: list[str], operands: list[str]) -> Step:
        def permute(*sources: Array) -> Array:
            low, high, choice = (source.astype(np.uint64) for source in sources)
            both = low | (high << np.uint64(32))
            result = np.uint64(0)
            for i in range(4):
                which = (choice >> np.uint64(4 * i)) & np.uint64(15)
                byte = (both >> ((which & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
                sign = np.where((byte & np.uint64(128)) != 0, np.uint64(255), np.uint64(0))
                byte = np.where((which & np.uint64(8)) != 0, sign, byte)
                result = result | (byte << np.uint64(8 * i))
            return result.astype(np.uint32)

        return self._simple(operands, "u", 32, permute)

    def op_setp(self, op: list[str], operands: list[str]) -> Step:
        kind, width = _kind(op[-1])
        name = op[1]
        join = np.logical_and if "and" in op else np.logical_or
        unordered = kind == "f" and len(name) == 3 and name.endswith("u")
        plain = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(name, name)
        compare = {
            "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
            "gt": np.greater, "ge": np.greater_equal, "nan": None, "num": None,
        }[plain[:2] if unordered else plain]  # fmt: skip

        def test(x: Array, y: Array, *joined: Array) -> Array:
            nan = np.isnan(x) | np.isnan(y) if kind == "f" else False
            if compare is None:
                result = nan if name == "nan" else ~nan
            else:
                result = compare(x, y)
                if kind == "f":
                    result = result | nan if unordered else result & ~nan
            return join(result, *joined) if joined else result

        return self._apply(operands, test, *[(kind, width)] * 2, *[("p", 1)] * (len(operands) - 3))

    def op_selp(self, op: list[str], operands: list[str]) -> Step:
        kind = ("b", _kind(op[-1])[1])
        return self._apply(
            operands, lambda x, y, choice: np.where(choice, x, y), kind, kind, ("p", 1)
        )

    def op_cvt(self, op: list[str], operands: list[str]) -> Step:
        types = [part for part in op[1:] if re.fullmatch(r"(bf16x2|f16x2|bf16|[bfsu]\d+)", part)]
        to, source = types[0], types[-1]
        if to in ("bf16x2", "f16x2"):

            def small(x: Array) -> Array:
                x = x.astype(np.float16).view(np.uint16) if to == "f16x2" else _narrow(x)
                return x.astype(np.uint32)

            return self._simple(
                operands, "f", 32, lambda high, low: (small(high) << np.uint32(16)) | small(low)
            )
        if to == "bf16":
            return self._simple(operands, "f", 32, _narrow)
        if source == "bf16":
            return self._simple(operands, "b", 16, _widen)
        kind, width = _kind(to)
        if "sat" in op:
            assert to == source == "f32", op
            convert = lambda x: np.fmin(np.fmax(x, np.float32(0)), np.float32(1))  # noqa: E731
        elif kind == "f":
            convert = lambda x: x.astype(_FLOAT[width])  # noqa: E731
        else:
            whole = (_SIGNED if kind == "s" else _UNSIGNED)[width]
            rounding = (np.trunc if "rzi" in op else np.rint) if source[0] == "f" else np.asarray
            convert = lambda x: rounding(x).astype(whole)  # noqa: E731
        return self._simple(operands, *_kind(source), convert)

    # Warp-level and block-level instructions --------------------------------------------------

    def op_bar(self, op: list[str], operands: list[str]) -> Step:
        return lambda m, on: m.warps(on)

    def op_vote(self, op: list[str], operands: list[str]) -> Step:
        assert op[1:3] == ["sync", "any"], op
        return self._of_warp(operands[:2], lambda x: x.any(1, keepdims=True), ("p", 1))

    def op_shfl(self, op: list[str], operands: list[str]) -> Step:
        mode = op[2]
        lane = np.arange(32, dtype=np.int64)

        def shuffle(value: Array, by: Array) -> Array:
            step = by.astype(np.int64)
            if mode == "bfly":
                source = lane ^ step
            elif mode == "up":
                source = np.where(lane >= step, lane - step, lane)
            elif mode == "down":
                source = np.where(lane + step < 32, lane + step, lane)
            else:
                source = step
            return np.take_along_axis(value, source & 31, 1)

        to = operands[0].split("|")[0]
        return self._of_warp([to, *operands[1:3]], shuffle, ("b", 32), ("u", 32))

    def op_redux(self, op: list[str], operands: list[str]) -> Step:
        reduce = {"add": np.add, "max": np.maximum, "min": np.minimum}[op[2]].reduce

        def across(value: Array) -> Array:
            return reduce(value, axis=1, dtype=value.dtype, keepdims=True)

        return self._of_warp(operands[:2], across, _kind(op[-1]))

    def op_ldmatrix(self, op: list[str], operands: list[str]) -> Step:
        puts, at, transposed = self._writes(operands[0]), self._address(operands[1]), "trans" in op

        def load(m: Machine, on: Array) -> None:
            m.warps(on)
            rows = np.broadcast_to(at(m), m.lanes).reshape(-1, 32)
            for i, put in enumerate(puts):
                # Each lane gets two adjacent elements of matrix i, whose row addresses are in lanes
                # 8 i ... 8 i + 7.
                source = np.repeat(rows[:, 8 * i : 8 * i + 8, None], 4, 2).reshape(-1)
                source = source + np.tile(
                    np.arange(4, dtype=np.uint64) * np.uint64(4), m.lanes // 4
                )
                pairs = m.load_shared(source, on, np.uint32, 1)[:, 0]
                if transposed:
                    matrix = pairs.view(np.uint16).reshape(-1, 8, 8).transpose(0, 2, 1)
                    pairs = np.ascontiguousarray(matrix).view(np.uint32).reshape(-1)
                put(m, on, pairs)

        return load

    def op_mma(self, op: list[str], operands: list[str]) -> Step:
        assert op[3] == "m16n8k16", op
        assert op[4:6] == ["row", "col"], op
        assert op[6] == op[9] == "f32", op
        half = op[7] == "f16"
        a, b, c = (self._reads(_names(group), "b", 32) for group in operands[1:])
        puts = self._writes(operands[0])

        def values(bits: Array) -> Array:
            raw = bits.view(np.uint16)
            wide = raw.view(np.float16).astype(np.float32) if half else _widen(raw)
            return wide.reshape(-1, 8, 8)  # [warp, lane // 4, 2 * (lane % 4) + e]

        def multiply(m: Machine, on: Array) -> None:
            m.warps(on)
            warps = m.lanes // 32
            left = np.empty((warps, 16, 16), np.float32)
            right = np.empty((warps, 16, 8), np.float32)
            total = np.empty((warps, 16, 8), np.float32)
            for i, read in enumerate(a):
                left[:, 8 * (i & 1) : 8 * (i & 1) + 8, 8 * (i >> 1) : 8 * (i >> 1) + 8] = values(
                    read(m)
                )
            for i, read in enumerate(b):
                right[:, 8 * i : 8 * i + 8] = values(read(m)).transpose(0, 2, 1)
            for i, read in enumerate(c):
                rows = total[:, 8 * (i >> 1) : 8 * (i >> 1) + 8, i & 1 :: 2]
                rows[...] = np.broadcast_to(read(m), m.lanes).view(np.float32).reshape(-1, 8, 4)
            total += left @ right
            for i, put in enumerate(puts):
                rows = total[:, 8 * (i >> 1) : 8 * (i >> 1) + 8, i & 1 :: 2]
                put(m, on, np.ascontiguousarray(rows).reshape(-1))

        return multiply


def _quotient(x: Array, y: Array) -> tuple[Array, Array]:
    """Integer division that truncates towards 0; division by 0, in unused lanes, gives 0."""
    some = np.where(y == 0, y.dtype.type(1), y)
    quotient = (np.abs(x) // np.abs(some)) * (np.sign(x) * np.sign(some))
    quotient = quotient.astype(x.dtype)
    return quotient, (x - quotient * some).astype(x.dtype)


def _floating(op: list[str], width: int) -> Callable[..., Array]:
    name = op[0]
    if name == "fma":
        if width != 32:
            return lambda x, y, z: x * y + z

        def multiply_add(x: Array, y: Array, z: Array) -> Array:
            # fp32 products are exact in fp64.
            exact = x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)
            near = exact.astype(np.float32)
            if "rm" not in op:
                return near
            return np.where(near > exact, np.nextafter(near, np.float32(-np.inf)), near)

        return multiply_add
    if name == "div":
        return (lambda x, y: _off(x / y, 2.0**-22)) if "full" in op else np.divide
    if name in ("min", "max"):
        quiet, loud = {"min": (np.fmin, np.minimum), "max": (np.fmax, np.maximum)}[name]
        return loud if "NaN" in op else quiet
    plain: Any = {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs
    }[name]  # fmt: skip
    if "ftz" in op:
        return lambda *x: _flush(plain(*map(_flush, x)))
    return plain


class Registers(dict[str, Array]):
    """Registers of a machine; unwritten ones have all bits set, which is NaN, or true."""

    def __init__(self, program: Program, lanes: int) -> None:
        self._program, self._lanes = program, lanes

    def __missing__(self, name: str) -> Array:
        dtype = self._program.dtype(name)
        return np.full(self._lanes, True if dtype is np.bool_ else np.iinfo(dtype).max, dtype)


class Machine:
    """Some blocks of a launch: their registers and shared memory, and the launch's tensors."""

    def __init__(
        self, program: Program, grid: Sequence[int], blocks: range, parameters: Array,
        memory: Memory, shared: int,
    ) -> None:  # fmt: skip
        self.program, self.memory, self.parameters = program, memory, parameters
        self.threads, self.lanes = program.threads, program.threads * len(blocks)
        self.registers = Registers(program, self.lanes)
        thread = np.tile(np.arange(self.threads, dtype=np.uint32), len(blocks))
        block = np.repeat(np.arange(blocks.start, blocks.stop, dtype=np.uint32), self.threads)
        x, y = grid[0], grid[1] if len(grid) > 1 else 1
        ones = np.ones(self.lanes, np.uint32)
        self.special = {
            "%tid.x": thread, "%ctaid.x": block % np.uint32(x),
            "%ctaid.y": block // np.uint32(x) % np.uint32(y), "%nctaid.x": ones * np.uint32(x),
            "%nctaid.y": ones * np.uint32(y), "%laneid": thread % np.uint32(32),
        }  # fmt: skip
        self.size = shared
        # Aligned for every access width; a block may only access its first ``shared`` bytes.
        self.stride = -(-shared // 128) * 128 + 128
        self.shared = np.full(self.stride * len(blocks), 0xFF, np.uint8)
        local = np.arange(self.lanes) // self.threads
        self.base = (local * self.stride).astype(np.uint64)
        self.warp = (thread // np.uint32(32)).astype(np.int16)
        self.epoch = np.zeros(self.lanes, np.int32)  # number of barriers passed
        words = len(self.shared) // 4 + 1
        # Per word of shared memory: the last warp that wrote or read it, and its epoch at that
        # time.
        self.writer, self.written = np.full(words, -1, np.int16), np.full(words, -1, np.int32)
        self.reader, self.read = np.full(words, -1, np.int16), np.full(words, -1, np.int32)
        self.group = np.zeros(self.lanes, np.int64)
        self.under_way: list[tuple[Array, Array, Array, Array]] = []

    def run(self) -> None:
        steps, labels, counts = self.program.steps, self.program.labels, self.program.counts
        waiting: dict[int, Array] = {0: np.ones(self.lanes, bool)}
        parked: dict[int, Array] = {}  # at a barrier that others of the block have not reached
        ended = np.zeros(self.lanes, bool)

        def join(places: dict[int, Array], at: int, lanes: Array) -> None:
            if lanes.any():
                places[at] = places[at] | lanes if at in places else lanes

        while waiting or parked:
            if parked:
                arrived = np.logical_or.reduce(list(parked.values()))
                whole = (arrived | ended).reshape(-1, self.threads).all(1)
                free = np.repeat(whole, self.threads) & arrived
                self.epoch[free] += 1
                still: dict[int, Array] = {}
                for at, lanes in parked.items():
                    join(waiting, at, lanes & free)
                    join(still, at, lanes & ~free)
                parked = still
                if not waiting:
                    raise EmulationError("a barrier that not all threads of a block reach")
            at = min(waiting)
            here = waiting.pop(at)
            others = min(waiting, default=len(steps))
            on = None if here.all() else here
            while at < others:
                name, step, predicate, wanted, text = steps[at]
                lanes = on
                if predicate is not None:
                    lanes = self.registers[predicate] == wanted
                    lanes = lanes if on is None else lanes & on
                    lanes = None if lanes.all() else lanes
                at += 1
                counts[name] += 1
                if step is not None and (lanes is None or lanes.any()):
                    try:
                        step(self, lanes)
                    except Exception as error:
                        raise EmulationError(f"{error}: {text}") from error
                if step is None or name.startswith("bar.sync"):
                    going = here if lanes is None else lanes
                    if name == "bra":
                        join(waiting, labels[text], going)
                    elif name == "ret":
                        ended = ended | going
                    else:
                        join(parked, at, going)
                    here = here & ~going
                    break
            if at >= len(steps):
                ended = ended | here
            else:
                join(waiting, at, here)
        if self.under_way:
            raise EmulationError("copies are under way when the program ends")

    def warps(self, on: Array) -> None:
        """Raises unless the active lanes form whole warps."""
        if on is not None:
            each = on.reshape(-1, 32)
            if not (each.all(1) == each.any(1)).all():
                raise EmulationError("a warp is not whole")

    # Memory -----------------------------------------------------------------------------------

    def _place(self, at: Array, on: Array, size: int, writing: bool) -> Array:
        """Returns the active lanes' offsets in `shared`; checks bounds and races."""
        at = np.broadcast_to(at, self.lanes)
        lanes = slice(None) if on is None else on
        local = at[lanes]
        if (local > np.uint64(max(0, self.size - size))).any() or (local % np.uint64(size)).any():
            raise EmulationError(f"shared memory at {int(local.max())} of {self.size}")
        place = (local + self.base[lanes]).astype(np.int64)
        if size >= 4:  # smaller accesses may share a word without a race
            warp, epoch = self.warp[lanes], self.epoch[lanes]
            for word in range(0, size, 4):
                self._meet((place + word) // 4, warp, epoch, writing)
        return place

    def _meet(self, word: Array, warp: Array, epoch: Array, writing: bool) -> None:
        if ((self.written[word] == epoch) & (self.writer[word] != warp)).any():
            raise EmulationError("two warps at one place of shared memory, one of them writing")
        if writing:
            if ((self.read[word] == epoch) & (self.reader[word] != warp)).any():
                raise EmulationError("a warp writes where another one reads, without a barrier")
            self.writer[word], self.written[word] = warp, epoch
        else:
            # -2: read by several warps; none of them may then write without a barrier.
            several = (self.read[word] == epoch) & (self.reader[word] != warp)
            self.read[word] = epoch
            self.reader[word] = np.where(several, np.int16(-2), warp)
            self.reader[word[self.reader[word] != warp]] = -2

    def load(self, at: Array, on: Array, bits: Any, count: int) -> Array:
        """Returns [lanes, count] elements; inactive lanes get 0."""
        return self.memory.load(np.broadcast_to(at, self.lanes), on, bits, count)

    def load_parameters(self, at: Array, on: Array, bits: Any, count: int) -> Array:
        size = np.dtype(bits).itemsize * count
        at = np.broadcast_to(at, self.lanes) if on is None else np.where(on, at, np.uint64(0))
        if (at > np.uint64(len(self.parameters) - size)).any():
            raise EmulationError("an access beyond the parameters")
        places = at[:, None].astype(np.int64) + np.arange(size)
        return self.parameters[places].view(bits)

    def load_shared(self, at: Array, on: Array, bits: Any, count: int) -> Array:
        item = np.dtype(bits).itemsize
        place = self._place(at, on, item * count, False) // item
        found = self.shared.view(bits)[place[:, None] + np.arange(count)]
        if on is None:
            return found
        data = np.zeros((self.lanes, count), bits)
        data[on] = found
        return data

    def store(self, at: Array, on: Array, data: Array, shared: bool) -> None:
        if not shared:
            self.memory.store(np.broadcast_to(at, self.lanes), on, data)
            return
        item, count = data.dtype.itemsize, data.shape[1]
        place = self._place(at, on, item * count, True) // item
        data, places = data if on is None else data[on], place[:, None] + np.arange(count)
        seen = self.shared.view(data.dtype)
        seen[places] = data
        if not np.array_equal(seen[places], data):
            raise EmulationError("two lanes write to one place of shared memory")

    def copy(self, to: Array, source: Array, on: Array, size: int, count: Array | None) -> None:
        """cp.async of ``size`` bytes; bytes from ``count`` on are set to 0."""
        on = np.ones(self.lanes, bool) if on is None else on
        place = self._place(to, on, size, True)
        have = np.full(self.lanes, size) if count is None else np.broadcast_to(count, self.lanes)
        if not np.isin(have[on], (0, size)).all():
            raise NotImplementedError("cp.async of a part")
        data = self.memory.load(
            np.broadcast_to(source, self.lanes), on & (have > 0), np.uint8, size
        )
        self._fill(place, np.full((len(place), size), 0xFF, np.uint8))
        self.under_way.append((np.flatnonzero(on), self.group[on], place, data[on]))

    def _fill(self, place: Array, data: Array) -> None:
        words = np.ascontiguousarray(data).view(np.uint32)
        self.shared.view(np.uint32)[place[:, None] // 4 + np.arange(words.shape[1])] = words

    def commit(self, on: Array) -> None:
        if on is None:
            self.group += 1
        else:
            self.group[on] += 1

    def wait(self, on: Array, keep: int) -> None:
        left = []
        for lanes, group, place, data in self.under_way:
            done = group < self.group[lanes] - keep
            if on is not None:
                done &= on[lanes]
            if done.all():
                self._fill(place, data)
            else:
                self._fill(place[done], data[done])
                left.append((lanes[~done], group[~done], place[~done], data[~done]))
        self.under_way = left


class Memory:
    """The tensors of a launch, as (address, bytes); any other access is an error."""

    def __init__(self, places: Sequence[tuple[int, int]]) -> None:
        merged: list[list[int]] = []
        for start, size in sorted(set(places)):
            if merged and start < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], start + size)
            else:
                merged.append([start, start + size])
        self.starts = np.array([start for start, _ in merged], np.uint64)
        self.ends = np.array([end for _, end in merged], np.uint64)
        # The arrays start at an aligned address, so that they can be viewed as elements of every
        # size.
        self.arrays = []
        for start, end in merged:
            first = start // 64 * 64
            raw = (ctypes.c_ubyte * (end - first)).from_address(first)
            self.arrays.append((first, np.ctypeslib.as_array(raw)))

    def _which(self, at: Array, size: int) -> Array:
        """Returns the index of the tensor that contains each address."""
        if (at % np.uint64(size)).any():
            raise EmulationError(f"an access of {size} bytes off its alignment")
        which = np.searchsorted(self.starts, at, side="right") - 1
        outside = (which < 0) | (at + np.uint64(size) > self.ends[which])
        if outside.any():
            raise EmulationError(f"{int(outside.sum())} accesses beyond the tensors")
        return which

    def _groups(self, at: Array, size: int) -> Any:
        which = self._which(at, size)
        if len(which) and (which == which[0]).all():
            yield slice(None), self.arrays[which[0]]
        else:
            for one in np.unique(which):
                yield which == one, self.arrays[one]

    def load(self, at: Array, on: Array, bits: Any, count: int) -> Array:
        item = np.dtype(bits).itemsize
        places = at if on is None else at[on]
        found = np.empty((len(places), count), bits)
        # cp.async loads bytes, but is aligned as a whole.
        for lanes, (first, array) in self._groups(places, item * count):
            index = ((places[lanes] - np.uint64(first)) // np.uint64(item)).astype(np.int64)
            seen = array[: len(array) // item * item].view(bits)
            found[lanes] = seen[index[:, None] + np.arange(count)]
        if on is None:
            return found
        data = np.zeros((len(at), count), bits)
        data[on] = found
        return data

    def store(self, at: Array, on: Array, data: Array) -> None:
        item, count = data.dtype.itemsize, data.shape[1]
        places, data = (at, data) if on is None else (at[on], data[on])
        for lanes, (first, array) in self._groups(places, item * count):
            index = ((places[lanes] - np.uint64(first)) // np.uint64(item)).astype(np.int64)
            seen = array[: len(array) // item * item].view(data.dtype)
            seen[index[:, None] + np.arange(count)] = data[lanes]


def launch(
    program: Program, grid: Sequence[int], shared: int, arguments: Sequence[int | float] | bytes,
    memory: Memory,
) -> None:  # fmt: skip
    """Runs all blocks; ``arguments``: one number or address per PTX parameter, or the parameter
    bytes.
    """
    if not isinstance(arguments, bytes):
        assert len(arguments) == len(program.parameters)
        arguments = b"".join(
            struct.pack("<f4x", value)
            if isinstance(value, float)
            else struct.pack("<Q", int(value) & ((1 << 64) - 1))
            for value in arguments
        )
    parameters = np.frombuffer(arguments, np.uint8)
    assert len(parameters) == program.parameter_bytes
    blocks = int(np.prod(grid))
    each = max(1, _LANES // program.threads)
    with np.errstate(all="ignore"):
        for first in range(0, blocks, each):
            chunk = range(first, min(blocks, first + each))
            Machine(program, grid, chunk, parameters, memory, shared).run()
