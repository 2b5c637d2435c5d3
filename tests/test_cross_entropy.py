"""`functional.cross_entropy` and its variants: supported and invalid calls, and calls that run on
PyTorch.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import math

import numpy
import pytest
import torch
import torch.nn.functional as TF
from functorch.compile import make_boxed_func
from harness import DTYPES, Operators, Watch, kernel_of, since_torch
from module_checks import assert_same_numbers, check_budget, error_of, tensors
from module_checks import gradients as gradients_of
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from transformer_fast import fast_path, nn, reference, strict
from transformer_fast import functional as F
from transformer_fast.measure.calls import record
from transformer_fast.specs.spec import Draw
from transformer_fast.testing import (
    GRADIENT_FACTOR,
    Truth,
    check,
    check_gradients,
    gradients,
    nan_memory,
    promote,
)

chunked_loss = importlib.import_module("transformer_fast.ops.chunked_loss")
SHAPES = [(7,), (5, 7), (3, 7, 4), (2, 7, 3, 2), (0, 7)]


def logits_and_target(*shape: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(0)
    places = shape[:1] + shape[2:] if len(shape) > 1 else ()
    x = torch.randn(shape, generator=generator).to(dtype)
    classes = shape[1] if len(shape) > 1 else shape[0]
    return x, torch.randint(0, classes, places, generator=generator)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_matches_pytorch(shape, reduction):
    x, target = logits_and_target(*shape)
    for smoothing, ignored in ((0.0, -100), (0.2, 3)):
        options = {
            "reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored,
        }  # fmt: skip
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        with record() as found:
            one = F.cross_entropy(ours, target, **options)
        other = TF.cross_entropy(theirs, target, **options)
        assert [op for op, _ in found.calls] == ["cross_entropy"]
        torch.testing.assert_close(one, other, equal_nan=True)
        one.sum().backward()
        other.sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad, equal_nan=True)


def test_images_are_read_in_place():
    """No copy makes the classes adjacent, neither of logits nor of gradients; PyTorch's strides are
    kept.
    """
    x, target = logits_and_target(3, 5, 8, 9)
    leaf = x.clone().requires_grad_()
    gradient_strides = []
    image = leaf * 1
    image.register_hook(lambda grad: gradient_strides.append(grad.stride()))
    with Operators() as operators:
        F.cross_entropy(image, target, backend="cpu").backward()
    assert operators.ours == ["cross_entropy.cpu", "cross_entropy_backward.cpu"]
    assert not [func for func in operators.seen if "clone" in str(func) or "copy" in str(func)]
    assert gradient_strides == [x.stride()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_results_have_the_dtype_of_the_logits(dtype):
    x, target = logits_and_target(50, 200, dtype=dtype)
    x.requires_grad_()
    loss = F.cross_entropy(x, target)
    loss.backward()
    true = TF.cross_entropy(x.detach().double(), target)
    assert (loss.dtype, x.grad.dtype) == (dtype, dtype)
    assert (loss.double() - true).abs() <= torch.finfo(dtype).eps * true
    with torch.autocast("cpu", torch.bfloat16):
        assert F.cross_entropy(x, target).dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_losses_of_few_rows_are_added_in_float32(dtype, reduction, weighted, small_calls):
    """On the CPU PyTorch's op rounds the log-probabilities, and adds up the losses, in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(9, generator=generator).to(dtype) + 0.5 if weighted else None
    sure = torch.zeros(9)
    sure[2] = 8.0  # losses of 0.003
    for rows in (65, 500, 1000):
        for x in (torch.randn(rows, 9, generator=generator), sure.expand(rows, 9)):
            x = x.to(dtype, copy=True)
            target = torch.randint(0, 9, (rows,), generator=generator)
            target = torch.where(x[:, 2] == 8.0, 2, target)
            leaf, wide = x.requires_grad_(), x.detach().double().requires_grad_()
            wide_weight = None if weight is None else weight.double()
            found = F.cross_entropy(leaf, target, weight, reduction=reduction)
            true = TF.cross_entropy(wide, target, wide_weight, reduction=reduction)
            check_budget(found, None, true)
            [gradient], [exact] = gradients_of(found, [leaf]), gradients_of(true, [wide])
            check_budget(gradient, None, exact, GRADIENT_FACTOR)


@pytest.mark.filterwarnings("ignore:size_average and reduce")
def test_other_calls_run_on_pytorch():
    x, target = logits_and_target(6, 7)
    weight, probable = torch.rand(7), torch.softmax(torch.randn(6, 7), 1)
    calls = [((x, target, weight), {}), ((x, probable), {}), ((x, target), {"reduce": False})]
    for arguments, options in calls:
        with record() as found, strict():
            result = F.cross_entropy(*arguments, **options)
        assert not found.calls
        torch.testing.assert_close(result, TF.cross_entropy(*arguments, **options))
        with pytest.raises(NotImplementedError, match="backend must be None"):
            F.cross_entropy(*arguments, **options, backend="cpu")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"target": torch.tensor([0, 7, 1])}, IndexError),
        ({"target": torch.tensor([0, -1, 1])}, IndexError),
        ({"target": torch.tensor([0, 1])}, ValueError),
        ({"target": torch.tensor([0, 1, 2], dtype=torch.int32)}, RuntimeError),
        ({"target": "next"}, TypeError),
        ({"input": torch.zeros(3, 7, dtype=torch.int64)}, (RuntimeError, ValueError)),
        ({"reduction": "median"}, ValueError),
        ({"label_smoothing": 1.5}, RuntimeError),
        ({"label_smoothing": "some"}, TypeError),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_invalid_calls_raise_as_in_pytorch(change, error):
    arguments = {"input": torch.randn(3, 7), "target": torch.tensor([0, 6, 1])} | change
    for function in (F.cross_entropy, TF.cross_entropy):
        with pytest.raises(error):
            function(**arguments)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_logits_of_other_dtypes_raise_as_in_pytorch(shape, dtype):
    x, target = logits_and_target(*shape)
    x = x.to(dtype)
    calls = (
        (TF.cross_entropy, F.cross_entropy),
        (torch.nn.CrossEntropyLoss(reduction="none"), nn.CrossEntropyLoss(reduction="none")),
    )
    for theirs, ours in calls:
        assert error_of(lambda: ours(x, target)) == error_of(lambda: theirs(x, target))  # noqa: B023
    if len(shape) == 2:
        weight, zeros = torch.ones(3, shape[1]).to(dtype), torch.zeros_like(target)
        expected = error_of(lambda: TF.cross_entropy(TF.linear(x, weight), zeros))
        assert expected[0] is NotImplementedError
        assert error_of(lambda: F.linear_cross_entropy(x, weight, zeros)) == expected


@pytest.mark.parametrize("devices", [("meta", "cpu"), ("cpu", "meta")])
def test_a_target_on_another_device_raises(devices):
    x, target = logits_and_target(5, 7)
    x, target = x.to(devices[0]), target.to(devices[1])
    assert error_of(lambda: F.cross_entropy(x, target)) == error_of(
        lambda: TF.cross_entropy(x, target)
    )


def trained(target, x, classes, up):
    """Returns the losses, and the gradient of the logits."""
    leaf = x.clone().to(target.device).requires_grad_()
    losses = target.kernel.run(leaf, classes.to(target.device), -100, 0.1)
    (gradient,) = torch.autograd.grad(losses, leaf, up.to(target.device))
    return losses.detach(), gradient


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("values", "column"), [((math.nan,), 0), ((math.inf,), 149), ((-math.inf,) * 150, 70)]
)
def test_garbage_affects_only_its_row(backend, column, values):
    """As in PyTorch, only these rows become NaN; garbage in the gradient of an ignored row does not."""
    x, target = logits_and_target(9, 150)
    x[3, torch.arange(column, column + len(values)) % 150] = torch.tensor(values)
    up = torch.ones(9)
    target[5], up[5] = -100, values[0]
    losses, gradient = trained(backend.of("cross_entropy"), x, target, up)
    assert not gradient[5].any()
    assert torch.equal(losses.isnan().cpu(), torch.arange(9) == 3)
    assert torch.equal(gradient.isnan().all(1).cpu(), torch.arange(9) == 3)
    assert gradient.isfinite().all(1).sum() == 8


@pytest.mark.parametrize("small", [False, True], ids=["kernels", "small calls"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ignored_rows_have_zero_gradients(dtype, value, small, request):
    """PyTorch multiplies the gradients of ignored rows by zero, which gives NaN."""
    if small:
        request.getfixturevalue("small_calls")
    reductions, backends = ("mean", "sum", "none"), (None, "reference", "torch")
    for ignored, reduction, backend in itertools.product((-100, 2), reductions, backends):
        x, target = torch.randn(5, 7, dtype=dtype), torch.tensor([1, ignored, 6, 0, 3])
        x[1, 2:] = value
        kept = target != ignored
        alone = x[kept].requires_grad_()
        expected = TF.cross_entropy(alone, target[kept], reduction=reduction).sum()
        expected.backward()
        how = {"reduction": reduction, "ignore_index": ignored}
        for loss in (lambda *given, b=backend, h=how: F.cross_entropy(*given, backend=b, **h),
                     nn.CrossEntropyLoss(**how)):  # fmt: skip
            leaf = x.clone().requires_grad_()
            found = loss(leaf, target).sum()
            found.backward()
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(leaf.grad[kept], alone.grad)
            assert torch.equal(leaf.grad[1], torch.zeros_like(leaf.grad[1]))


def test_long_rows_match_pytorch():
    """Rows of several blocks of classes, and a vocabulary of several chunks."""
    generator = torch.Generator().manual_seed(0)
    for classes in (1, 5003, 4096, 4097, 12289):
        x = torch.randn(3, 16, generator=generator)
        weight = torch.randn(classes, 16, generator=generator)
        x[0] *= 30
        target = torch.tensor([0, classes - 1, classes // 2])
        options = {"reduction": "none", "label_smoothing": 0.3}
        plain = TF.linear(x, weight).requires_grad_()
        assert_same_numbers(F.cross_entropy, TF.cross_entropy, (plain, target), options, grad=True)
        true = TF.cross_entropy(TF.linear(x.double(), weight.double()), target, **options)
        fused = F.linear_cross_entropy(x, weight, target, **options)
        check_budget(fused, TF.cross_entropy(plain, target, **options), true)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_linear_cross_entropy_matches_pytorch(reduction, bias):
    x, w, b = torch.randn(9, 16), torch.randn(4100, 16) / 4, torch.randn(4100) if bias else None
    target = torch.randint(0, 4100, (9,))
    target[4] = -100
    given = tuple(t.requires_grad_() for t in (x, w, b) if t is not None)

    def ours(x, w, b=None):
        return F.linear_cross_entropy(x, w, target, linear_bias=b, reduction=reduction)

    def theirs(*given):
        return TF.cross_entropy(TF.linear(*given), target, reduction=reduction)

    assert_same_numbers(ours, theirs, given, {}, grad=True)


@pytest.mark.skipif(not hasattr(TF, "linear_cross_entropy"), reason="PyTorch has it from 2.13 on")
def test_linear_cross_entropy_has_pytorchs_arguments():
    theirs = inspect.signature(TF.linear_cross_entropy).parameters
    ours = dict(inspect.signature(F.linear_cross_entropy).parameters)
    assert ours.pop("backend").default is None
    assert [*ours] == [*theirs]
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]


def test_linear_cross_entropy_without_a_batch():
    x, w, target = torch.randn(16), torch.randn(30, 16), torch.tensor(4)
    loss = F.linear_cross_entropy(x, w, target, reduction="none")
    assert loss.shape == ()
    torch.testing.assert_close(loss, TF.cross_entropy(w @ x, target))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"linear_weight": torch.randn(30, 15)}, ValueError, "16 features"),
        ({"linear_bias": torch.randn(29)}, ValueError, "linear_bias"),
        ({"target": torch.tensor([0, 30])}, IndexError, "Target 30 is out of bounds"),
        ({"target": torch.tensor([0])}, ValueError, "target"),
        ({"target": torch.tensor([0.0, 1.0]).int()}, ValueError, "int32"),
        ({"input": torch.randn(2, 2, 16)}, ValueError, "input"),
        ({"linear_weight": None}, TypeError, "linear_weight"),
        ({"linear_weight": torch.randn(30, 16).double()}, ValueError, "float64"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_invalid_calls_of_linear_cross_entropy_raise(change, error, match):
    arguments = {
        "input": torch.randn(2, 16),
        "linear_weight": torch.randn(30, 16),
        "target": torch.tensor([0, 1]),
    }
    with pytest.raises(error, match=match):
        F.linear_cross_entropy(**(arguments | change))


def test_the_module_matches_pytorchs():
    x, target = logits_and_target(6, 7)
    options = {"ignore_index": 2, "label_smoothing": 0.1, "reduction": "sum"}
    ours, theirs = nn.CrossEntropyLoss(**options), torch.nn.CrossEntropyLoss(**options)
    assert isinstance(ours, torch.nn.CrossEntropyLoss)
    torch.testing.assert_close(ours(x, target), theirs(x, target))
    weighted = torch.rand(7)
    torch.testing.assert_close(
        nn.CrossEntropyLoss(weighted)(x, target), torch.nn.CrossEntropyLoss(weighted)(x, target)
    )


class Largest(Watch):
    """Records the number of elements of the largest result of an operator."""

    elements = 0

    def see(self, func, arguments, result):
        for one in tensors(result):
            self.elements = max(self.elements, one.untyped_storage().nbytes() // one.itemsize)


OP = "linear_cross_entropy"


def built(dtype, rows, inputs, classes):
    """Returns arguments of `linear_cross_entropy`; a fifth of the rows is ignored."""
    draw = Draw(dtype, "cpu", torch.Generator().manual_seed(0))
    x, weight, bias = draw.normal(rows, inputs), draw.weight(classes, inputs), draw.normal(classes)
    target = torch.randint(0, classes, (rows,))
    return x, weight, bias, target.masked_fill(target % 5 == 0, -100), -100, 0.1


@pytest.fixture(params=["cpu", "torch", "reference"])
def kernel(request):
    if request.param == "triton":
        request.getfixturevalue("triton")
    found = kernel_of(OP, request.param)
    if found.unavailable is not None:
        pytest.skip(found.unavailable)
    return found


@pytest.fixture
def in_parts(monkeypatch):
    """Returns a wrapper that limits chunks to ``logits`` elements. The checks themselves compute
    all logits at once.
    """

    def wrapped(run, logits, *more):
        def part(*arguments):
            with monkeypatch.context() as patch:
                patch.setattr(chunked_loss, "MOST_LOGITS", logits)
                return run(*arguments, *more)

        return part

    return wrapped


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("at_once", [96, 250])
@pytest.mark.parametrize(
    "kernel",
    ["cpu", "torch", "reference", pytest.param("triton", marks=pytest.mark.sampled(0, 20))],
    indirect=True,
)
def test_memory_is_one_chunk_of_logits(in_parts, at_once, kernel, dtype):
    """Results and gradients computed in chunks are within the budget, too."""
    sizes = (300, 8, 50) if kernel.backend == "triton" else (1000, 24, 700)
    *_, classes = sizes
    arguments, run = built(dtype, *sizes), in_parts(kernel.run, at_once * classes)
    with Largest() as seen, torch.no_grad():
        result = run(*arguments)
    check(OP, result, arguments)
    assert seen.elements <= 2 * at_once * classes
    with Largest() as seen:
        gradients(OP, run, arguments)
    assert seen.elements <= 2 * at_once * classes
    check_gradients(OP, run, arguments)


@since_torch(2, 13, why="PyTorch 2.10 gives a program in float16 no gradient")
@pytest.mark.thorough
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_of_compiled_programs_is_one_chunk(monkeypatch, in_parts, dtype, kernel, summed):
    """The forward computes nothing that only the backward needs."""
    arguments = built(dtype, 1000, 24, 700)
    seen, flops = Largest(), []

    def measured(graph, _):
        def run(*given):
            with seen, FlopCounterMode(display=False) as counter:
                results = graph(*given)
            flops.append(counter.get_total_flops())
            return results

        return make_boxed_func(run)

    def in_operator(*arguments, original=chunked_loss._gradients):
        with seen:
            return original(*arguments)

    monkeypatch.setattr(chunked_loss, "_gradients", in_operator)
    torch._dynamo.reset()  # each dtype and flag is recompiled, and dynamo limits recompilations
    compiled = torch.compile(
        kernel.run, fullgraph=True, backend=aot_autograd(fw_compiler=measured), dynamic=False
    )

    run = in_parts(compiled, 96 * 700, summed)
    with torch.no_grad():
        check(OP, run(*arguments), arguments)
    gradients(OP, run, arguments)
    once = 2 * 1000 * 700 * 24
    assert flops == [once, once, 3 * once]
    assert 0 < seen.elements <= 2 * 96 * 700
    check_gradients(OP, run, arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_summed_losses_match(in_parts, kernel, dtype, isa):
    """The forward computes the gradients together with the losses. If losses have unequal weights,
    the backward recomputes them.
    """
    arguments, parts = built(dtype, 333, 37, 301), in_parts(kernel.run, 96 * 301, True)

    def run(*arguments):
        with nan_memory():
            return parts(*arguments)

    def total(run):
        return lambda *arguments: run(*arguments).sum()

    expected, true = (
        gradients(OP, total(reference.linear_cross_entropy), given)
        for given in (arguments, promote(arguments))
    )
    truth = Truth(expected, true, dict.fromkeys(true, 0.0))
    check_gradients(OP, total(run), arguments, truth=truth)
    check_gradients(OP, run, arguments)
    found = gradients(OP, total(run), arguments)
    for name, gradient in gradients(OP, total(run), arguments).items():
        assert torch.equal(gradient, found[name])


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_chunks_of_ignored_rows_have_zero_gradients(monkeypatch, backend, dtype):
    """Zero as in PyTorch, although the mean loss is NaN, and also for infinite incoming gradients."""
    monkeypatch.setattr(chunked_loss, "MOST_LOGITS", 1)
    x, weight = torch.randn(200, 8).to(dtype).requires_grad_(), torch.randn(9, 8).to(dtype)
    weight.requires_grad_()
    loss = F.linear_cross_entropy(x, weight, torch.full((200,), -100), backend=backend)
    assert loss.isnan()
    for gradient in torch.autograd.grad(loss, (x, weight)):
        assert torch.equal(gradient, torch.zeros_like(gradient))
    target = torch.arange(200) % 9
    target[70:90] = -100
    loss = F.linear_cross_entropy(x, weight, target, backend=backend)
    (gradient,) = torch.autograd.grad(loss, x, torch.tensor(math.inf, dtype=dtype))
    assert torch.equal(gradient[70:90], torch.zeros_like(gradient[70:90]))
    assert not gradient[:70].isfinite().any()


class Alive(Watch):
    """Records the peak number of elements in results of operators of more than 100 elements."""

    def __init__(self):
        super().__init__()
        self.elements = 0
        self.storages = {}

    def see(self, func, arguments, result):
        for one in tensors(result):
            if one.numel() > 100:
                storage = one.untyped_storage()
                known = StorageWeakRef(storage)
                self.storages[known.cdata] = known, storage.nbytes() // one.itemsize
        self.storages = {k: s for k, s in self.storages.items() if not s[0].expired()}
        self.elements = max(self.elements, sum(size for _, size in self.storages.values()))


def all_derivatives():
    """Returns derivatives of a loss of 1280 x 70 logits: functions of (x, w, b, directions)."""
    target = torch.randint(0, 70, (1280,), generator=torch.Generator().manual_seed(0))
    target[::5] = -100

    def loss(x, w, b, target=target, **options):
        return F.linear_cross_entropy(
            x, w, target, linear_bias=b, label_smoothing=0.1, backend="reference", **options
        )

    def derived(function, times):
        """Returns the gradient of the squared derivative of order ``times`` along ``moves``."""

        def once(x, w, b, moves):
            values = [t.detach().requires_grad_() for t in (x, w, b)]
            result = function(*values)
            for _ in range(times):
                found = torch.autograd.grad(result, values, create_graph=True)
                result = sum((g * m).sum() for g, m in zip(found, moves, strict=True))
            return torch.autograd.grad(result.square(), values)

        return once

    def dual(x, w, b, moves):
        values = [t.detach().requires_grad_() for t in (x, w, b)]
        with forward_ad.dual_level():
            moved = [forward_ad.make_dual(*pair) for pair in zip(values, moves, strict=True)]
            found = torch.autograd.grad(loss(*moved), values, create_graph=True)
            return [forward_ad.unpack_dual(one).tangent for one in found]

    def one(w, x, t):
        return loss(x, w, None, t)

    def some(x):
        return x.unflatten(0, (8, 160)), target.unflatten(0, (8, 160))

    func = torch.func
    return {
        "second": derived(loss, 1),
        "second, offloaded": lambda *given: offloaded(derived(loss, 1), given),
        "forward": dual,
        "jvp of grad": lambda x, w, b, moves: func.jvp(
            func.grad(loss, (0, 1, 2)), (x, w, b), moves
        ),
        "grad of jvp": lambda x, w, b, moves: func.grad(
            lambda *p: func.jvp(loss, p, moves)[1], (0, 1, 2)
        )(x, w, b),
        "losses, vmap": lambda x, w, b, moves: torch.vmap(
            lambda x, t: loss(x, w, b, t, reduction="none")
        )(*some(x)),
        "weights, vmap": lambda x, w, b, moves: torch.vmap(loss, (None, 0, None))(
            x, torch.stack([w, -w, 2 * w]), b
        ),
        "grad, vmap": lambda x, w, b, moves: torch.vmap(func.grad(one), (None, 0, 0))(w, *some(x)),
        "vmap, grad": lambda x, w, b, moves: func.grad(
            lambda w: torch.vmap(one, (None, 0, 0))(w, *some(x)).sum()
        )(w),
        "batched": lambda x, w, b, moves: batched(loss, x, w, b),
    }


def offloaded(function, given):
    with torch.autograd.graph.save_on_cpu():
        return function(*given)


def batched(loss, x, w, b):
    b = b.detach().requires_grad_()
    grads = torch.linspace(-1, 1, 3 * len(x), dtype=x.dtype).view(3, -1)
    return torch.autograd.grad(loss(x, w, b, reduction="none"), b, grads, is_grads_batched=True)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("name", all_derivatives())
def test_memory_of_derivatives_is_one_chunk(monkeypatch, name):
    """Covers derivatives of any order and mode, also under transforms of torch.func."""
    draw = Draw(torch.float64, "cpu", torch.Generator().manual_seed(0))
    shapes = (1280, 3), (70, 3), (70,)
    arguments = *(draw.normal(*s) for s in shapes), tuple(draw.normal(*s) for s in shapes)
    function = all_derivatives()[name]
    expected = function(*arguments)
    monkeypatch.setattr(chunked_loss, "MOST_LOGITS", 32 * 70)
    monkeypatch.setattr(chunked_loss, "_LEAST_ROWS", 1)
    with Alive() as alive:
        found = function(*arguments)
    torch.testing.assert_close(found, expected)
    assert alive.elements < 1280 * 70 / 2


@pytest.mark.thorough
def test_data_dependent_numbers_of_rows_compile(monkeypatch):
    monkeypatch.setattr(chunked_loss, "MOST_LOGITS", 1)
    x, target = logits_and_target(200, 7)
    weight = torch.randn(9, 7)

    def loss(x, target):
        kept = target > 2
        return F.linear_cross_entropy(x[kept], weight, target[kept], backend="torch")

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.testing.assert_close(compiled(x, target), loss(x, target))


@pytest.mark.parametrize("smoothing", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("likely", [False, True])
@pytest.mark.parametrize("classes", [40, 1025])
def test_gradients_of_targets_keep_their_digits(isa, smoothing, likely, classes):
    """With much smoothing an unlikely target's gradient is a difference of two small numbers.

    Rows of classes that are not adjacent, and few classes, run on tiles.
    """
    generator = torch.Generator().manual_seed(classes)
    for x in (torch.randn(16, classes, generator=generator),
              torch.randn(classes, 16, generator=generator).t()):  # fmt: skip
        target = torch.arange(16) * 2
        x[torch.arange(16), target] += 30.0 if likely else 0.0
        found, expected = (
            torch.autograd.grad(
                F.cross_entropy(
                    logits, target, reduction="sum", label_smoothing=smoothing, backend=backend
                ),
                logits,
            )[0].gather(1, target[:, None])
            for logits, backend in (
                (x.detach().requires_grad_(), "cpu"),
                (x.double().requires_grad_(), "reference"),
            )
        )
        p = x.double().softmax(1).gather(1, target[:, None])
        assert ((found - expected).abs() <= 1e-6 * (p + expected.abs())).all()


@pytest.mark.parametrize("ignored", [-100, 3], ids=str)
@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_small_linear_losses_with_ignored_targets(
    small_calls: None, ignored: int, bad: float | None
) -> None:
    """NaN and infinity of ignored rows reach neither the loss nor the gradients of other rows."""
    x, weight = torch.randn(9, 8), torch.randn(12, 8, requires_grad=True)
    target = torch.randint(4, 12, (9,))
    target[::4] = ignored
    kept = target != ignored
    if bad is not None:
        x[0, 2] = bad
    x.requires_grad_()
    F.linear_cross_entropy(x, weight, target, ignore_index=ignored).backward()
    alone, other = (t.detach().clone().requires_grad_() for t in (x[kept], weight))
    TF.cross_entropy(TF.linear(alone, other), target[kept]).backward()
    torch.testing.assert_close(x.grad[kept], alone.grad)
    if bad is None:
        torch.testing.assert_close(weight.grad, other.grad)


def test_an_ignore_index_of_numpy_is_a_number():
    target = torch.tensor([0, -100, 7])
    assert fast_path.count_targets(target, 5, numpy.int64(-100)) == (1, 7)
    assert fast_path.count_targets(target, 8, 2**70) == (None, None)
