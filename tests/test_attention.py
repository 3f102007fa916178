"""Attention of the training-time test by another kernel than the CPU's, which test_eagle3 holds against a reference."""

from __future__ import annotations

import pytest
import torch

from headtrain import attention
from headtrain.attention import Runs, training_time_test


def case(kv_heads: int, dtype: torch.dtype):
    """Two documents of 9 and 6 positions; queries in two runs of the first, one of the second, and own keys of two
    later steps, of fewer queries each."""
    g = torch.Generator().manual_seed(0)
    positions = torch.tensor([2, 3, 4, 7, 8, 10, 11, 12, 13, 14])
    runs = Runs.of(positions, torch.tensor([0] * 5 + [9] * 5))
    heads, dim = 4, 8

    def made(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

    q, k, v = made(9, heads, dim), made(15, kv_heads, dim), made(15, kv_heads, dim)
    own = [(made(9, kv_heads, dim), made(9, kv_heads, dim)) for _ in range(2)]
    weigh = torch.randn(9, heads, dim, generator=g, dtype=torch.float64).to(dtype)
    return runs, q, k, v, own, weigh


def run(runs, q, k, v, own, weigh):
    out = training_time_test(q, k, v, own, runs, 0.3)
    leaves = [q, k, v, *(x for pair in own for x in pair)]
    return [out, *torch.autograd.grad((out * weigh).sum(), leaves)]


@pytest.mark.parametrize("rows", [2, 256])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_plain_kernel_is_the_flash_one(monkeypatch, kv_heads, steps, rows):
    runs, q, k, v, own, weigh = case(kv_heads, torch.float64)
    expected = run(runs, q, k, v, own[:steps], weigh)
    monkeypatch.setattr(attention._Plain, "ROWS", rows)
    monkeypatch.setattr(attention, "_kernel", lambda runs, q: attention._Plain(runs, q.shape[0]))
    for mine, theirs in zip(run(runs, q, k, v, own[:steps], weigh), expected, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)  # float64: sums in another order


def test_it_is_taken_where_there_is_no_flash_kernel():
    runs, q = case(4, torch.float32)[:2]
    assert isinstance(attention._kernel(runs, q), attention._CpuFlash)
    assert isinstance(attention._kernel(runs, q.to("meta")), attention._Plain)
