from __future__ import annotations

import torch

from headtrain.layers import RMSNorm


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
