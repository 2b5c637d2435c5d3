"""Every kernel that can run here, on every case, size and gradient."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import (
    BACKENDS,
    BUILDS,
    CPU,
    CUBLAS,
    CUDA,
    DTYPES,
    EVERY_KERNEL,
    ISAS,
    SATURATED,
    TRITON,
    Backend,
    Target,
    Watch,
    check_one_graph,
    check_target,
    check_trained,
    drawn,
    each_op,
    in_nan,
    in_use,
    kernel_of,
    name_of,
    on,
    operator_calls,
    targets,
    targets_and_cases,
)
from ops import ROWS

from transformer_fast import _native, dispatch, functional, use_backend
from transformer_fast.measure.calls import record
from transformer_fast.reference import DIFFERENTIABLE
from transformer_fast.specs import OPS
from transformer_fast.specs.spec import Case, Draw
from transformer_fast.testing import (
    Truth,
    call_of,
    check_gradients,
    gradients,
    nan_memory,
    require_grad,
    truth_of,
    upstream,
)
from transformer_fast.testing.oracle import as_results

pytestmark = [
    pytest.mark.sampled(40),
    pytest.mark.usefixtures("two_threads"),
    # Fully masked rows and intended infinities make NumPy warn in the interpreter.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

#: The gradient of a norm over a single value is 0; PyTorch computes it as a difference of large
#: numbers.
GRADIENT_CASES = [
    param
    for param in targets_and_cases(all_isas=False)
    if param.values[0].kernel.backend == "torch"
    and param.values[1] not in {"one column", *SATURATED}
]


@pytest.mark.parametrize(("target", "case"), targets_and_cases())
def test_outputs(target, case):
    arguments = drawn(target.op, case, target.dtype)
    check_target(target, arguments)


@pytest.mark.sampled(15)
@pytest.mark.parametrize(("target", "case"), GRADIENT_CASES)
def test_gradients_through_autograd(target, case):
    arguments = drawn(target.op, case, target.dtype)
    names = tuple(name for name in OPS[target.op].gradients_of if name != "attn_mask")
    reason = target.refusal(require_grad(target.op, arguments, names))
    if reason:
        pytest.skip(reason)
    check_gradients(target.op, target.kernel.run, on(target, arguments), names=names)


class NoProducts(Watch):
    """Raises if PyTorch multiplies matrices."""

    ENDS = ("mm", "mv", "dot", "linear", "matmul", "attention", "convolution", "einsum")

    def see(self, func, arguments, result):
        if func.namespace != "transformer_fast":
            product = any(word.endswith(self.ENDS) for word in name_of(func).split("_"))
            assert not product, f"PyTorch's {name_of(func)} was called"


@pytest.mark.parametrize("op", ["mm", "addmm", "bmm", "baddbmm", "addmv", "dot", "linear", "sdpa"])
def test_the_check_detects_matrix_products(op):
    x = torch.randn(2, 3, 3)
    call = {
        "mm": lambda: x[0] @ x[1],
        "addmm": lambda: torch.addmm(x[0], x[0], x[1]),
        "bmm": lambda: x @ x,
        "baddbmm": lambda: torch.baddbmm(x, x, x),
        "addmv": lambda: torch.addmv(x[0, 0], x[0], x[0, 0]),
        "dot": lambda: x[0, 0] @ x[0, 0],
        "linear": lambda: torch.nn.functional.linear(x[0].bfloat16(), x[0].bfloat16()),
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(x, x, x),
    }[op]
    with NoProducts(), pytest.raises(AssertionError, match="was called"):
        call()


def _few_rows(dtype):
    """Yields calls for which the dispatcher selects PyTorch's product on some CPUs."""
    for rows in (1, 17, 100):
        x, wide = torch.randn(rows, 512, dtype=dtype), torch.randn(2048, 512, dtype=dtype)
        bias = torch.randn(2048, dtype=dtype)
        yield "linear", (x, wide, bias, None, None)
        seed = torch.tensor(1)
        yield "feed_forward", (x, wide, bias, wide.t(), bias[:512], "relu", 0.1, seed)
    x, wide = torch.randn(40, 33, dtype=dtype), torch.randn(9000, 33, dtype=dtype)
    yield "linear", (x, wide, None, None, None)


@pytest.mark.parametrize(
    "target", [param for param in targets() if param.values[0].kernel.backend == "cpu"]
)
def test_cpu_kernels_never_call_pytorchs_products(target):
    """Forward and backward, on every case of the op table, and for few rows of large weights."""
    cases = [
        (case.name, drawn(target.op, case.name, target.dtype)) for case in OPS[target.op].cases
    ]
    cases += [("few rows", more) for op, more in _few_rows(target.dtype) if op == target.op]
    with in_use(target.isa):
        for name, arguments in cases:
            if target.refusal(arguments):
                continue
            with NoProducts(), torch.no_grad():
                target.kernel.run(*arguments)
            learns = target.op in DIFFERENTIABLE
            if not learns or target.refusal(require_grad(target.op, arguments)):
                continue
            with NoProducts():
                assert gradients(target.op, target.kernel.run, arguments), name


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_cpu_kernel(op):
    """If the table of kernels were empty, all tests above would pass."""
    assert any(k.backend == "cpu" for k in dispatch.kernels(op))
    assert len(targets(op)) >= 1


@pytest.mark.parametrize("op", OPS)
def test_ordinary_calls_do_not_run_on_the_reference(op, generator):
    """On a CPU with the native module, fp32 inference does not run on the reference."""
    reasons = [k.unavailable for k in dispatch.kernels(op) if k.backend == "cpu"]
    if reasons[0]:
        pytest.skip(reasons[0])
    arguments = OPS[op].cases[0].build(torch.float32, "cpu", generator)
    assert dispatch.select(call_of(op, arguments)).backend in ("cpu", "torch")


#: Bytes per vector.
VECTOR = {
    **dict.fromkeys(("baseline", "neon", "neon_dot", "neon_i8mm"), 16),
    "avx2": 32,
    "avx_vnni": 32,
}
#: Sizes around the panels, tiles and blocks of the kernels, and a prime beyond all of them.
FAR = (47, 48, 49, 55, 56, 57, 63, 64, 65, 111, 112, 113, 127, 128, 129, 191, 223, 224, 225, 255,
       256, 257, 511, 513, 521)  # fmt: skip
OFFSETS = (0, 1, 3)
ALL = [
    pytest.param(*param.values, what, id=f"{param.id}-{what}", marks=param.marks)
    for op, row in ROWS.items()
    for what in row.sweeps
    for param in targets(op)
    if param.values[0].kernel.backend != "torch"  # no sweeps of PyTorch's own ops
]


@functools.cache
def call(op: str, what: str, n: int, dtype: torch.dtype) -> tuple[tuple[Any, ...], Truth]:
    arguments = ROWS[op].sweeps[what](Draw(dtype, "cpu", torch.Generator().manual_seed(n)), n)
    return arguments, truth_of(op, arguments)


@pytest.mark.sampled(20, 30)  # half a second each
@pytest.mark.parametrize(("target", "what"), ALL)
def test_sizes_and_offsets(target, what):
    lanes = VECTOR.get(target.isa, 64) // target.dtype.itemsize
    refused = None
    for n in (*range(2 * lanes + 2), *FAR):
        arguments, truth = call(target.op, what, n, target.dtype)
        refused = target.refusal(arguments)
        if refused:
            continue
        for offset in OFFSETS if n < 2 * lanes + 2 else (1,):
            try:
                check_target(target, arguments, offset, truth)
            except AssertionError as error:
                raise AssertionError(f"{what} = {n}, {offset} off alignment: {error}") from None
    if refused:
        pytest.skip(refused)


@functools.cache
def refused(op: str, case: str) -> bool:
    """True if the CPU backend does not support the gradients of a case."""
    arguments = require_grad(op, drawn(op, case, torch.float32))
    return _native.module is not None and bool(
        dispatch.why_not(kernel_of(op), call_of(op, arguments))
    )


def test_most_gradients_are_supported() -> None:
    """Gradients that a backend refuses are not tested here, so refusals must be rare, apart from soft
    caps, which no kernel differentiates."""
    names = [(op, case.name) for op in DIFFERENTIABLE for case in OPS[op].cases]
    assert sum(refused(op, name) for op, name in names if "soft cap" not in name) <= 2


def trained() -> Iterator[Any]:
    """Yields every case on every backend; in Triton's interpreter, which is slow, one dtype per
    case.
    """
    turn = itertools.cycle(DTYPES)
    for op, case in ((each, case.name) for each in DIFFERENTIABLE for case in OPS[each].cases):
        ways = [*BACKENDS, *([CUBLAS] if op in ("linear", "feed_forward") else [])]
        one = next(turn)
        for backend in (b for b in ways if b.has(op)):
            cpu = backend.name == "cpu"
            slow = backend.name == "triton" and not torch.cuda.is_available()
            for dtype in (one,) if slow else DTYPES:
                if not cpu or ((dtype, backend.isa) in BUILDS and not refused(op, case)):
                    name = f"{op}: {case}-{str(dtype)[6:]}-{backend}"
                    yield pytest.param(op, case, dtype, backend, id=name)


def arguments_for(target: Target, case: str, logits: int = 2**12) -> tuple[Any, ...]:
    """Returns the arguments of a case, limited to ``logits`` logits in Triton's interpreter, which
    takes 0.1 s per row of many classes.
    """
    spec, arguments = OPS[target.op], drawn(target.op, case, target.dtype)
    interpreted = target.kernel.backend == "triton" and target.device == "cpu"
    if not interpreted or "target" not in spec.arguments:
        return arguments
    place = spec.arguments.index("target")
    rows = logits // (arguments[0].shape[1] if place == 1 else arguments[1].shape[0]) or 1
    return tuple(x[:rows] if i in (0, place) else x for i, x in enumerate(arguments))


@pytest.mark.sampled(12, 20)
@pytest.mark.parametrize(("op", "case", "dtype", "backend"), [*trained()], indirect=["backend"])
def test_training_is_within_the_budget(op, case, dtype, backend):
    """Checks the results of the training path and the gradients."""
    target = backend.of(op, dtype)
    arguments = arguments_for(target, case, 2**14)
    few = case == "scores of deviation 300, few queries"
    if few and dtype == torch.float16 and backend.name == "cpu":
        pytest.skip("one row is just outside the budget: its largest probability is below 1 - 2^-5")
    saturated = backend.name == "triton" and case in SATURATED and dtype != torch.float32
    # In float32 the backward's exponents are differences of numbers around 1000, so their errors are
    # 1e-4.
    saturated |= backend.name == "triton" and case == "scores of deviation 300"
    arguments = in_nan(target, arguments, int(backend != CUDA))
    check_trained(target.kernel, arguments, gradients=not saturated)


def cases_of(op: str, backend: Backend) -> list[Case]:
    """Returns all cases on the CPU, and three on slow backends."""
    cases = OPS[op].cases
    return [*cases] if backend == CPU else [cases[0], OPS[op].case(ROWS[op].sample), cases[-1]]


def every_call() -> Iterator[Any]:
    for op in DIFFERENTIABLE:
        for backend in (b for b in (CPU, TRITON, CUDA) if b.has(op)):
            for case in dict.fromkeys(case.name for case in cases_of(op, backend)):
                if not refused(op, case):
                    yield pytest.param(op, case, backend, id=f"{op}: {case}-{backend}")


EVERY_CALL = pytest.mark.parametrize(
    ("op", "case", "backend"), [*every_call()], indirect=["backend"]
)


assert_same = functools.partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


def check_requested_gradients(target: Target, arguments: tuple[Any, ...]) -> None:
    """Gradients are bitwise equal if only one or all but one are requested, and with one thread."""
    run, op = target.kernel.run, target.op
    arguments = on(target, arguments)
    found = gradients(op, run, arguments)
    for name in found:
        for names in ((name,), tuple(n for n in found if n != name)):
            with nan_memory():
                alone = gradients(op, run, arguments, names) if names else {}
            assert_same(alone, {name: found[name] for name in alone})
    torch.set_num_threads(1)
    assert_same(gradients(op, run, arguments), found)


@pytest.mark.sampled(30, 30)
@EVERY_CALL
def test_gradients_do_not_depend_on_which_are_requested(
    op: str, case: str, backend: Backend
) -> None:
    if (op, case) == ("feed_forward", "strided") and "amx" in ISAS and backend == CPU:
        pytest.skip("there the gradient of weight1 alone is taken by a product of another order")
    dtype = torch.float32 if backend == CPU else torch.bfloat16
    target = backend.of(op, dtype)
    check_requested_gradients(target, arguments_for(target, case))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_large_gradients_do_not_depend_on_which_are_requested(op: str, dtype: torch.dtype) -> None:
    for arguments in ROWS[op].large(Draw(dtype, "cpu", torch.Generator().manual_seed(0))):
        check_requested_gradients(CPU.of(op, dtype), arguments)


@pytest.mark.sampled(30, 40)
@EVERY_CALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_second_derivatives_are_within_the_budget(
    op: str, case: str, backend: Backend, dtype: torch.dtype
) -> None:
    """The reference's formula computes them from the tensors that the kernel's forward saved."""
    target = backend.of(op, dtype)
    check_gradients(op, target.kernel.run, on(target, drawn(op, case, dtype)), twice=True)


@pytest.mark.sampled(0, 60)
@EVERY_KERNEL
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(op: str, backend: Backend, dtype: torch.dtype) -> None:
    target = backend.of(op, dtype)
    cases = [arguments_for(target, case.name) for case in cases_of(op, backend)]
    calls = operator_calls(target.kernel, [on(target, arguments) for arguments in cases])
    backward = any("_backward" in operator.__name__ for operator, _ in calls)
    assert backward or backend == TRITON or op not in DIFFERENTIABLE
    # The other tests compile. They do not depend on the dtype, so they run once per operator.
    few = {"test_utils": ("test_schema", "test_faketensor")}
    compiled = set() if backend == CPU and dtype == torch.float32 else {one for one, _ in calls}
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments, **(few if operator in compiled else {}))
        compiled.add(operator)


@pytest.mark.sampled(15)
@EVERY_KERNEL
def test_calls_compile_to_one_graph(op: str, backend: Backend) -> None:
    target = backend.of(op)
    arguments = on(target, drawn(op, ROWS[op].sample, torch.float32))
    check_one_graph(op, target.kernel.run, arguments)


#: Ops whose programs differ most: two results, an optional result with saved statistics, a loss.
COMPILED = ("add_layer_norm", "attention", "linear_cross_entropy")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "op",
    [*COMPILED, *(pytest.param(o, marks=pytest.mark.exhaustive) for o in OPS if o not in COMPILED)],
)
def test_inductor_compiles_calls(op: str) -> None:
    """Inductor asserts the strides that an operator's fake implementation promises."""
    if _native.module is None:
        pytest.skip(str(_native.why_not))
    arguments = drawn(op, ROWS[op].sample, torch.float32)
    check_one_graph(op, CPU.of(op).kernel.run, arguments, "inductor")


@EVERY_KERNEL
def test_empty_calls_match_the_reference(op: str, backend: Backend) -> None:
    target = backend.of(op)
    for case in cases_of(op, backend):
        arguments = on(target, drawn(op, case.name, torch.float32))
        rows = len(arguments[0]) if arguments[0].dim() > 1 else -1
        empty = tuple(
            x[:0] if isinstance(x, torch.Tensor) and x.shape[:1] == (rows,) else x
            for x in arguments
        )
        if target.refusal(empty):
            continue
        pairs = zip(
            *(as_results(f(*empty)) for f in (target.kernel.run, OPS[op].reference)), strict=True
        )
        assert all(ours is theirs or ours.shape == theirs.shape for ours, theirs in pairs)


@EVERY_KERNEL
def test_public_functions_run_the_named_kernel(op: str, backend: Backend) -> None:
    arguments = on(backend.of(op), OPS[op].tiny.build(torch.float32, "cpu", None))
    with use_backend(backend.name), record() as found:
        OPS[op].public_function(functional)(*arguments)
    assert list(found.calls) == [(op, backend.name)]


#: Layouts of the incoming gradient, (..., rows, columns), of a kernel's backward.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded": lambda grad: grad[..., :1].expand(grad.shape),
    "one number": lambda grad: grad.flatten()[0].expand(grad.shape),
    "transposed": lambda grad: grad.permute(*range(grad.dim())[::-1]).contiguous().permute(
        *range(grad.dim())[::-1]
    ),
    "apart": lambda grad: torch.stack([grad, grad], -1)[..., 1],
}  # fmt: skip


@pytest.mark.sampled(40, 50)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_op(BACKENDS, DIFFERENTIABLE)
def test_upstream_gradients_of_any_layout(op: str, backend: Backend, dtype: torch.dtype) -> None:
    target = backend.of(op, dtype)
    calls = [arguments_for(target, ROWS[op].sample)]
    if backend.name == "cpu":
        calls += ROWS[op].large(Draw(dtype, "cpu", torch.Generator().manual_seed(0)))[:3]
    for arguments in calls:
        given = require_grad(op, on(target, arguments))
        leaves = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
        results = [y for y in as_results(target.kernel.run(*given)) if y is not None]
        for name, change in LAYOUTS.items():
            grads = [change(upstream(y, number)) for number, y in enumerate(results)]
            before = [x.detach().clone() for x in (*leaves, *grads)]
            found, expected = (
                torch.autograd.grad(results, leaves, ups, retain_graph=True)
                for ups in (grads, [grad.contiguous() for grad in grads])
            )
            # On GPUs some products are PyTorch's, whose summation order depends on strides.
            close = 0.0 if backend.name == "cpu" else 1e-2
            torch.testing.assert_close(found, expected, rtol=close, atol=close, msg=name)
            assert_same([x.detach() for x in (*leaves, *grads)], before)


def test_norm_gradients_of_rows_far_from_zero(float_isa: str) -> None:
    """The mean's rounding error is half a unit, up to 1e-5 of the centred values, and equal in all
    of a row.
    """
    x = 100.0 + 0.5 * torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    check_gradients("layer_norm", kernel_of("layer_norm").run, (x, (4,), None, None, 1e-12))
