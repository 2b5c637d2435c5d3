"""Cases of Triton's kernels beyond the op table.

Products: both ways of loading, epilogue slices, tile order, edges. Cross entropy: targets outside
the classes, statistics, large strides. Dropout: compared with Philox4x32-10 as defined for the fuzz
tests.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl
from interpreted import jit
from ops import numbers

import transformer_fast
from transformer_fast.backends.triton import arithmetic, config, matmul, operators, philox
from transformer_fast.backends.triton.cross_entropy import (
    cross_entropy_backward,
    cross_entropy_forward,
)
from transformer_fast.ops.arguments import CrossEntropyArguments
from transformer_fast.ops.linear import CODES
from transformer_fast.reference.dropout import dropout, threshold
from transformer_fast.reference.linear import ACTIVATIONS, activate

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

# Products -----------------------------------------------------------------------------------------

SIZES = (70, 45, 40)  # M, N, K


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def use_tile(monkeypatch, **changes):
    monkeypatch.setattr(config, "few_rows", 0)
    tile = config.ProductTile(32, 32, 16, 2, 4, 1)._replace(**changes)
    monkeypatch.setattr(config, "matmul", lambda *sizes: tile)


@pytest.fixture
def launched(monkeypatch):
    """Returns the kernels that matrix products launch, in order."""
    found, launch = [], matmul.launch
    monkeypatch.setattr(matmul, "launch", lambda *a, **k: (found.append(a[0]), launch(*a, **k))[1])
    return found


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("sideways", [False, True])
def test_epilogue_of_the_forward_matches(
    device, monkeypatch, launched, sideways, descriptors, slices
):
    use_tile(monkeypatch, descriptors=descriptors, slices=slices)
    m, n, k = SIZES
    n = n if sideways else 48  # a row size that descriptors support
    a, bias, residual = drawn(m, k).to(device), drawn(n).to(device), drawn(m, n).to(device)
    b = drawn(n, k).to(device).t() if sideways else drawn(k, n).to(device)
    seed = torch.tensor(2**62 + 5, device=device)
    result = matmul.matmul(
        a,
        b,
        matmul.Epilogue(
            activation=arithmetic.SILU,
            bias=bias,
            residual=residual,
            dropout=philox.dropout_arguments(0.3),
            seed=seed,
            save_z=True,
        ),
    )
    assert launched == [matmul.matmul_descriptor_kernel if descriptors else matmul.matmul_kernel]
    z = a.double() @ b.double() + bias
    expected = dropout(activate(z, "silu"), 0.3, seed) + residual
    torch.testing.assert_close(result.z, z.float())
    torch.testing.assert_close(result.output, expected.float())


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_epilogue_of_the_backward_matches(device, monkeypatch, name, own):
    use_tile(monkeypatch, slices=2)
    m, n, k = SIZES
    if not own:
        monkeypatch.setattr(config, "few_rows", m)
    a, b, z = drawn(m, k).to(device), drawn(k, n).to(device), drawn(m, n).to(device)
    seed = torch.tensor(77, device=device)
    result = matmul.matmul(
        a,
        b,
        matmul.Epilogue(
            activation=CODES[name],
            backward=True,
            saved=z,
            dropout=philox.dropout_arguments(0.4),
            seed=seed,
            make_hidden=True,
            make_sums=True,
        ),
    )
    leaf = z.double().requires_grad_()
    hidden = dropout(activate(leaf, name), 0.4, seed)
    (expected,) = torch.autograd.grad(hidden, leaf, a.double() @ b.double())
    torch.testing.assert_close(result.hidden, hidden.detach().float())
    torch.testing.assert_close(result.output, expected.float())
    torch.testing.assert_close(result.sums, expected.sum(0).float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:, 1:33],  # misaligned
        # The rows' length is no multiple of 16 bytes, but their stride is: supported.
        lambda x: x[:, :38],
        lambda x: x[::2],
        lambda x: x[:1].expand(8, 40),
        lambda x: x.t().contiguous().t(),
    ],
)
def test_unsupported_layouts_are_loaded_through_pointers(device, monkeypatch, change):
    use_tile(monkeypatch, descriptors=True)
    a = change(drawn(16, 40, dtype=torch.bfloat16).to(device))
    b = drawn(24, a.shape[1], dtype=torch.bfloat16).to(device).t()
    result = matmul.matmul(a, b, matmul.Epilogue())
    torch.testing.assert_close(result.output, (a.double() @ b.double()).bfloat16())


def test_few_rows_run_addmm_and_at_most_one_kernel(device, monkeypatch, launched):
    x = drawn(config.few_rows + 1, 40).to(device)
    weight, bias, residual = (
        drawn(24, 40).to(device),
        drawn(24).to(device),
        drawn(65, 24).to(device),
    )
    products = []
    addmm = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *a: (products.append(a), addmm(*a))[1])
    for rows, rest, kernels in (
        (64, {}, []),
        (64, {"activation": arithmetic.RELU, "save_z": True}, [matmul.epilogue_kernel]),
        (64, {"residual": residual[:64]}, [matmul.epilogue_kernel]),
        (65, {"residual": residual}, [matmul.matmul_kernel]),
    ):
        launched.clear()
        products.clear()
        result = matmul.matmul(x[:rows], weight.t(), matmul.Epilogue(bias=bias, **rest))
        z = x[:rows].double() @ weight.t().double() + bias
        expected = z.relu() if "activation" in rest else z + rest.get("residual", 0.0)
        torch.testing.assert_close(result.output, expected.float())
        if "save_z" in rest:
            torch.testing.assert_close(result.z, z.float())
        assert (launched, len(products)) == (kernels, int(rows == 64))


def test_explain_names_cublas_for_few_rows(device):
    x, weight = drawn(65, 40).to(device), drawn(24, 40).to(device)
    for rows, told in ((64, True), (65, False)):
        explained = transformer_fast.explain("linear", x[:rows], weight, backend="triton")
        assert explained.backend == "triton"
        assert ("cuBLAS" in str(explained)) == told


def test_infinity_and_nan_do_not_spread(device, monkeypatch):
    monkeypatch.setattr(config, "few_rows", 0)
    a, b = drawn(40, 24), drawn(24, 40)
    a[3], b[:, 7] = float("nan"), float("inf")
    output = matmul.matmul(a.to(device), b.to(device), matmul.Epilogue()).output.cpu()
    assert torch.equal(output.isfinite(), (a @ b).isfinite())
    relu = matmul.Epilogue(activation=arithmetic.RELU)
    assert matmul.matmul(a.to(device), b.to(device), relu).output[3].isnan().all()


# Cross entropy ------------------------------------------------------------------------------------

IGNORED = -100


def drawn_logits(device, rows=9, classes=150, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows + classes)
    x = 2 * torch.randn(rows, classes, generator=generator)
    target = torch.randint(classes, (rows,), generator=generator)
    return x.to(device, dtype), target.to(device)


def losses_of(x, targets, smoothing):
    return operators.cross_entropy(CrossEntropyArguments(x, targets, IGNORED, smoothing))


@pytest.mark.parametrize("target", [-1, 150, 2**40])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_targets_outside_the_classes_give_nan(device, target, smoothing):
    """The loss is NaN, and is not computed from a logit outside the row."""
    x, targets = drawn_logits(device)
    expected = losses_of(x, targets, smoothing)
    targets[2] = target
    losses = losses_of(x, targets, smoothing)
    assert losses[2].isnan()
    others = torch.arange(9, device=device) != 2
    assert torch.equal(losses[others], expected[others])


@pytest.mark.parametrize("far", ["rows", "columns"])
def test_offsets_beyond_32_bits(device, far):
    """Rows, or columns, are 2^30 elements apart. The memory between them is never accessed."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("12 GiB of free memory are needed")
    apart = 2**30 + 16
    x, target = drawn_logits(device, rows=3, classes=3, dtype=torch.float16)
    place = torch.empty(2 * apart + 3, dtype=torch.float16, device=device)
    strides = (apart, 1) if far == "rows" else (1, apart)
    distant = place.as_strided((3, 3), strides).copy_(x)
    up = torch.ones(3, device=device)
    found = []
    for logits in (x, distant):
        losses, known = cross_entropy_forward(logits, target, IGNORED, 0.1)
        grad = cross_entropy_backward(up, logits, target, known, IGNORED, 0.1)
        found.append((losses, known, grad))
    for near, ours in zip(*found, strict=True):
        assert torch.equal(near, ours)


# Dropout ------------------------------------------------------------------------------------------

SEED = 0x7123456789ABCDEF


def _flags(
    seed_ptr,
    tile_ptr,
    element_ptr,
    first_row,
    first_column,
    limit,
    R: tl.constexpr,  # noqa: N803
    C: tl.constexpr,  # noqa: N803
):
    rows = first_row + tl.arange(0, R).to(tl.int64)
    columns = first_column + tl.arange(0, C)
    seed = tl.load(seed_ptr)
    place = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    tile = philox.keep_tile(seed, rows, first_column, limit, C)
    tl.store(tile_ptr + place, tile.to(tl.int8))
    each = philox.keep_elements(
        seed, rows[:, None] + columns[None, :] * 0, columns[None, :] + rows[:, None] * 0, limit
    )
    tl.store(element_ptr + place, each.to(tl.int8))


_flags_kernel = jit(_flags, do_not_specialize=["limit", "first_row"])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1.0, 1e-9])
@pytest.mark.parametrize("first_row", [0, 2**31 - 2, 2**32 - 1, 2**40 + 3])
def test_dropout_flags_match_philox(p, first_row, device):
    rows, columns, first_column = 4, 32, 24
    drop = philox.dropout_arguments(p)
    seed = torch.tensor(SEED, device=device)
    tile = torch.full((rows, columns), -1, dtype=torch.int8, device=device)
    each = torch.full_like(tile, -1)
    _flags_kernel[(1,)](seed, tile, each, first_row, first_column, drop.limit, rows, columns)
    drawn = numbers(SEED, first_row + np.arange(rows), first_column + columns)[:, first_column:]
    expected = (drawn >= (threshold(p) if p < 1 else 2**16)).tolist()
    assert drop.active
    assert tile.bool().tolist() == expected
    assert each.bool().tolist() == expected


def test_extreme_dropout_probabilities():
    assert not philox.dropout_arguments(0.0).active
    assert philox.dropout_arguments(2.0**-33)[:2] == (True, 0), "one number in 2^16 is dropped"
    assert philox.dropout_arguments(1.0) == (True, 2**16 - 1, 0.0)
    assert philox.dropout_arguments(0.5) == (True, 2**15 - 1, 2.0)
