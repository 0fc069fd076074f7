from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trainyard.precision.block_scaled import E4M3, FP16, BlockScaledTensor, decode, encode, noise

# Half of the distance to the next number, relative: 3 and 10 bits of mantissa.
HALF_STEP = {E4M3: 2.0**-4, FP16: 2.0**-11}
# Below so much of the largest of 32 numbers, a code has fewer digits: its exponent has an end.
SPAN = {E4M3: 2.0**-14, FP16: 2.0**-28}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [E4M3, FP16])
@pytest.mark.parametrize("power", [-118, -60, 0, 60, 120])
def test_what_comes_back_is_within_half_a_step_at_any_magnitude(
    dtype: torch.dtype, power: int
) -> None:
    values = random(40, 96) * 2.0**power
    found = BlockScaledTensor.of(values, dtype).decode()
    largest = values.view(40, 3, 32).abs().amax(-1, keepdim=True).expand(-1, -1, 32).reshape(40, 96)
    allowed = torch.maximum(values.abs(), largest * SPAN[dtype]) * HALF_STEP[dtype]
    # Scales are normal numbers: what is near the smallest of fp32 has a coarser grid.
    allowed = allowed.clamp(min=2.0**-136 if dtype == E4M3 else 2.0**-151)
    assert ((found - values).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [E4M3, FP16])
def test_codes_of_what_codes_stand_for_stand_for_the_same(dtype: torch.dtype) -> None:
    values = BlockScaledTensor.of(random(64, 64), dtype).decode()
    assert torch.equal(BlockScaledTensor.of(values, dtype).decode(), values)
    assert torch.equal(
        BlockScaledTensor.of(values.bfloat16(), FP16).decode(), values.bfloat16().float()
    )


def test_zeros_stay_zero_and_one_number_among_them_is_exact() -> None:
    values = torch.zeros(3, 64)
    values[1, 40] = -3e-30 * 1.5
    found = BlockScaledTensor.of(values, FP16).decode()
    assert torch.equal(found == 0, values == 0)
    torch.testing.assert_close(found, values, rtol=2**-11, atol=0)
    shape, device = values.shape, values.device
    assert torch.equal(BlockScaledTensor.zeros(shape, E4M3, device).decode(), torch.zeros(3, 64))


@pytest.mark.parametrize("dtype", [E4M3, FP16])
def test_extreme_numbers_stay_finite_and_change_no_other_block(dtype: torch.dtype) -> None:
    values = torch.cat([torch.tensor([[3e38] + [1.0] * 31, [1e-45] * 32]), random(2, 32)])
    found = BlockScaledTensor.of(values, dtype).decode()
    assert found.isfinite().all()
    assert found[0, 0].item() == pytest.approx(values[0, 0].item(), rel=HALF_STEP[dtype])
    assert found[1].abs().max() <= 2e-38
    assert torch.equal(found[2:], BlockScaledTensor.of(values[2:], dtype).decode())


@pytest.mark.parametrize("dtype", [E4M3, FP16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_is_seen_where_it_is(
    bad: float, dtype: torch.dtype, kind: torch.dtype
) -> None:
    values = random(3, 64).to(kind)
    values[1, 40] = bad
    codes = BlockScaledTensor.of(values, dtype)
    assert (~codes.decode().isfinite()).nonzero().tolist() == [[1, c] for c in range(32, 64)]
    assert (~codes.block_norms().isfinite()).nonzero().tolist() == [[3]]
    stochastic = encode(values.float().view(-1, 32), dtype, torch.zeros(6, 32))
    assert (~decode(*stochastic).isfinite()).any(-1).tolist() == [False] * 3 + [True] + [False] * 2


def test_block_norms_are_those_of_what_codes_stand_for() -> None:
    for power in (-100, 0, 100):
        codes = BlockScaledTensor.of(random(7, 96) * 2.0**power)
        expected = codes.decode().double().view(-1, 32).norm(dim=-1)
        torch.testing.assert_close(codes.block_norms().double(), expected, rtol=1e-6, atol=0)
    assert BlockScaledTensor.of(torch.empty(0, 64)).block_norms().shape == (0,)
    assert BlockScaledTensor.of(torch.empty(0, 64)).decode().shape == (0, 64)


@pytest.mark.parametrize("dtype", [E4M3, FP16])
def test_stochastic_rounding_is_right_on_average_and_leaves_codes_alone(
    dtype: torch.dtype,
) -> None:
    n = 40_000
    row = torch.cat([random(31), torch.tensor([1e-7])])
    row[0] = 4.0
    numbers = noise(torch.tensor(77), torch.arange(n)[:, None])
    found = decode(*encode(row.expand(n, 32), dtype, numbers))
    mean, nearest = found.double().mean(0), BlockScaledTensor.of(row[None], dtype).decode()[0]
    step = (found.amax(0) - found.amin(0)).double()  # of two numbers next to each other
    assert all(len(column.unique()) <= 2 for column in found.T)
    # The mean of n numbers that are 0 or 1 is known to half of a standard deviation of n**-0.5.
    assert ((mean - row).abs() <= 5 * 0.5 * n**-0.5 * step + 2**-13 * step).all()
    again = decode(*encode(nearest.expand(n, 32), dtype, numbers))
    assert torch.equal(again, nearest.expand(n, 32))


def test_noise_is_even_and_differs_between_blocks_columns_and_keys() -> None:
    numbers = torch.arange(3000)[:, None]
    one, two = noise(torch.tensor(1), numbers), noise(torch.tensor(2), numbers)
    assert one.min() == 0.0 and one.max() < 1.0
    counts = torch.histc(one, 16, 0, 1)
    assert (counts / one.numel() * 16 - 1).abs().max() < 0.05
    for a, b in ((one, two), (one[1:], one[:-1]), (one[:, 1:], one[:, :-1])):
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(correlation.item()) < 0.015
