"""The op table: its cases can be told apart and repeated, its counts of work are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import DTYPES
from torch import Tensor

from transformer_fast.specs import OPS
from transformer_fast.testing import measure


def arguments_of(op: str, case: str) -> tuple[Any, ...]:
    return OPS[op].case(case).build(torch.float32, "cpu", torch.Generator().manual_seed(0))


@pytest.mark.parametrize("op", OPS)
def test_case_names_are_unique(op):
    names = [case.name for case in (*OPS[op].cases, *OPS[op].bench_cases)]
    assert len(names) == len(set(names))
    with pytest.raises(KeyError, match="has no case 'nothing'"):
        OPS[op].case("nothing")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_cases_have_enough_elements_for_a_fair_ratio(op, dtype, generator):
    for case in OPS[op].cases:
        arguments = case.build(dtype, "cpu", generator)
        result = OPS[op].reference(*arguments)
        first = result[0] if isinstance(result, tuple) else result
        assert first.numel() >= 250, case.name
        wide = torch.promote_types(dtype, torch.float32)
        assert first.dtype == (wide if "losses" in OPS[op].results else dtype), case.name


@pytest.mark.parametrize("op", OPS)
def test_a_case_is_the_same_for_the_same_generator(op):
    for case in OPS[op].cases:
        one, other = (arguments_of(op, case.name) for _ in range(2))
        for a, b in zip(one, other, strict=True):
            if isinstance(a, Tensor):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
            else:
                assert a == b


def test_work_by_hand():
    def made(op, case):
        return OPS[op], arguments_of(op, case)

    spec, arguments = made("linear", "bias")  # 19 x 48 x 40
    assert spec.flops(arguments) == 2 * 19 * 48 * 40
    assert spec.bytes(arguments) == 4 * (19 * 48 + 40 * 48 + 40 + 19 * 40)
    spec, arguments = made("feed_forward", "no bias")  # 19 x 32 x 96 x 32
    assert spec.flops(arguments) == 2 * 19 * 32 * 96 * 2
    assert spec.bytes(arguments) == 4 * (19 * 32 * 2 + 32 * 96 * 2)
    spec, arguments = made("attention", "causal")  # 2, 2, 31, 31, 16
    assert spec.flops(arguments) == 4 * 2 * 2 * 31 * 31 * 16
    assert spec.useful_flops(arguments) == pytest.approx(4 * 2 * 2 * (31 * 32 / 2) * 16)
    assert spec.bytes(arguments) == 4 * (4 * 2 * 2 * 31 * 16)
    spec, arguments = made("attention", "key lengths")
    visible = arguments[4].sum().item() * 2 * 17
    assert spec.useful_flops(arguments) == pytest.approx(4 * visible * 16)
    spec, arguments = made("add_layer_norm", "rows of 64")
    assert spec.bytes(arguments) == 4 * (4 * 9 * 64 + 2 * 64)
    assert spec.useful_flops(arguments) == spec.flops(arguments) == 9 * 64 * 8


def test_expanded_tensors_cost_what_they_store():
    spec = OPS["linear"]
    arguments = arguments_of("linear", "expanded")
    assert spec.bytes(arguments) == 4 * (32 + 40 * 32 + 1 + 40 + 12 * 40)


def test_inputs_are_not_modified(generator):
    for op, spec in OPS.items():
        for case in spec.cases:
            arguments = case.build(torch.float32, "cpu", generator)
            before = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
            measure(op, spec.reference(*arguments), arguments)
            for one, other in zip(before, arguments, strict=True):
                if isinstance(one, Tensor):
                    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
