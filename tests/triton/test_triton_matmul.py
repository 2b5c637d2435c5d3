"""The matrix product: both ways of loading, slices of the epilogue, the order of tiles, borders."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from interpreted import jit

import transformer_fast
from transformer_fast.backends.triton import activation, config, matmul, philox
from transformer_fast.functional.linear import CODES
from transformer_fast.reference.dropout import dropout
from transformer_fast.reference.linear import ACTIVATIONS, activate

SIZES = (70, 45, 40)  # M, N, K


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def use_tile(monkeypatch, **changes):
    monkeypatch.setattr(config, "few_rows", 0)
    tile = config.ProductTile(32, 32, 16, 2, 4, 1)._replace(**changes)
    monkeypatch.setattr(config, "matmul", lambda *sizes: tile)


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("sideways", [False, True])
def test_epilogue_forward(device, monkeypatch, launched, sideways, descriptors, slices):
    use_tile(monkeypatch, descriptors=descriptors, slices=slices)
    m, n, k = SIZES
    n = n if sideways else 48  # rows that descriptors can describe
    a, bias, residual = drawn(m, k).to(device), drawn(n).to(device), drawn(m, n).to(device)
    b = drawn(n, k).to(device).t() if sideways else drawn(k, n).to(device)
    seed = torch.tensor(2**62 + 5, device=device)
    result = matmul.matmul(
        a,
        b,
        matmul.Epilogue(
            activation=activation.SILU,
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
def test_epilogue_backward(device, monkeypatch, name, own):
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
        lambda x: x[:, 1:33],  # off alignment
        lambda x: x[:, :38],  # rows that do not end on 16 bytes: fine, their stride does
        lambda x: x[::2],
        lambda x: x[:1].expand(8, 40),
        lambda x: x.t().contiguous().t(),
    ],
)
def test_what_descriptors_cannot_describe_is_loaded_through_pointers(device, monkeypatch, change):
    use_tile(monkeypatch, descriptors=True)
    a = change(drawn(16, 40, dtype=torch.bfloat16).to(device))
    b = drawn(24, a.shape[1], dtype=torch.bfloat16).to(device).t()
    result = matmul.matmul(a, b, matmul.Epilogue())
    torch.testing.assert_close(result.output, (a.double() @ b.double()).bfloat16())


def test_few_rows_are_one_product_of_torch_and_at_most_one_kernel(device, monkeypatch, launched):
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
        (64, {"activation": activation.RELU, "save_z": True}, [matmul.epilogue_kernel]),
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


def test_explain_says_whose_product_it_is(device):
    x, weight = drawn(65, 40).to(device), drawn(24, 40).to(device)
    for rows, told in ((64, True), (65, False)):
        explained = transformer_fast.explain("linear", x[:rows], weight, backend="triton")
        assert explained.backend == "triton"
        assert ("cuBLAS" in str(explained)) == told


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_infinity_and_nan_stay_in_their_rows_and_columns(device, monkeypatch):
    monkeypatch.setattr(config, "few_rows", 0)
    a, b = drawn(40, 24), drawn(24, 40)
    a[3], b[:, 7] = float("nan"), float("inf")
    output = matmul.matmul(a.to(device), b.to(device), matmul.Epilogue()).output.cpu()
    assert torch.equal(output.isfinite(), (a @ b).isfinite())
    relu = matmul.Epilogue(activation=activation.RELU)
    assert matmul.matmul(a.to(device), b.to(device), relu).output[3].isnan().all()


def _places(place_ptr, rows, columns, M: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr):  # noqa: N803
    number = tl.program_id(0)
    m, n = matmul._tile_at(number, rows, columns, M, N, GROUP)
    tl.store(place_ptr + 2 * number, m)
    tl.store(place_ptr + 2 * number + 1, n)


_places_kernel = jit(_places)


@pytest.mark.parametrize(("down", "across", "group"), [(1, 1, 8), (7, 3, 2), (8, 5, 8), (3, 9, 8)])
def test_every_tile_is_made_once(device, down, across, group):
    places = torch.zeros(down * across, 2, dtype=torch.int32, device=device)
    _places_kernel[(down * across,)](places, down * 16 - 3, across * 16 - 5, 16, 16, group)
    found = {tuple(place) for place in places.tolist()}
    assert found == {(m, n) for m in range(down) for n in range(across)}
