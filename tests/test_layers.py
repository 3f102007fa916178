from __future__ import annotations

import pytest
import torch

from headtrain.layers import RMSNorm, Rope, rotate
from headtrain.types import TargetShape


def test_rms_norm_equals_autograd_of_its_definition():
    norm = RMSNorm(24, 1e-5).double()
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    x = torch.randn(7, 24, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(7, 24, dtype=torch.float64)
    plain = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * norm.weight
    expected = torch.autograd.grad(plain, (x, norm.weight), grad)
    found = torch.autograd.grad(norm(x), (x, norm.weight), grad)
    torch.testing.assert_close(norm(x), plain, rtol=1e-14, atol=1e-14)
    for a, b in zip(found, expected, strict=True):  # float64: only the order of sums differs
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(norm(x), plain, rtol=1e-14, atol=1e-14)
    frozen = x.detach()
    assert torch.allclose(torch.autograd.grad(norm(frozen), norm.weight, grad)[0], expected[1])


def test_rms_norm_of_bf16_is_computed_in_fp32():
    norm = RMSNorm(64, 1e-6)
    x = (torch.randn(3, 64) * 100).bfloat16()
    exact = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
    assert torch.equal(norm(x), exact)


@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}])
def test_a_partial_rotary_factor_turns_the_first_part_of_a_head(factor, scaling):
    """As engines do with the exported config: pair (j, j + d/2) of the first d = factor * head_dim entries is turned by
    position * theta^(-2j/d), the rest stays."""
    rope = scaling | {"rope_theta": 100.0} | ({} if factor == 1 else {"partial_rotary_factor": factor})
    shape = TargetShape(
        architecture="A", model_type="a", hidden_size=64, intermediate_size=8, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=32, vocab_size=8, rope=rope,
    )  # fmt: skip
    x, positions, d = torch.randn(3, 2, 32), torch.tensor([0, 5, 11]), int(32 * factor)
    expected = x.clone()
    for n, position in enumerate(positions.tolist()):
        for j in range(d // 2):
            angle = torch.tensor(position / scaling.get("factor", 1.0) * 100.0 ** (-2 * j / d))
            a, b = x[n, :, j], x[n, :, j + d // 2]
            expected[n, :, j] = a * angle.cos() - b * angle.sin()
            expected[n, :, j + d // 2] = b * angle.cos() + a * angle.sin()
    found = rotate(x, *Rope(shape)(positions))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # angles in another order of operations
    assert torch.equal(found[..., d:], x[..., d:])
