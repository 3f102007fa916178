from __future__ import annotations

import pytest
import torch
from torch import nn

from headtrain.few_rows import FewRowsLinear, linear, use_few_rows


@pytest.mark.parametrize("shape", [(1, 8), (3, 8), (4, 8), (6, 8), (1, 64, 8), (2, 3, 8), (65, 8), (0, 8)])
def test_any_number_of_rows_gives_the_product(shape):
    x, weight = torch.randn(shape), torch.randn(5, 8)
    found = linear(x, weight)
    assert found.shape == (*shape[:-1], 5) and found.is_contiguous()
    torch.testing.assert_close(found, x @ weight.t(), rtol=1e-5, atol=1e-5)


def test_only_plain_linear_layers_are_taken_over():
    class Own(nn.Linear):
        pass

    body = nn.Sequential(nn.Linear(4, 4), Own(4, 4), nn.ReLU())
    use_few_rows(body)
    assert [type(m) for m in body] == [FewRowsLinear, Own, nn.ReLU]
    x = torch.randn(5, 4)
    torch.testing.assert_close(body[0](x), nn.functional.linear(x, body[0].weight, body[0].bias))
