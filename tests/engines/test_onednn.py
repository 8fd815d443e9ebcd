"""Products by oneDNN are those of a linear layer, and are of few shapes."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from rl_core.models.kernels.llama_cpu import num_padding, padded_product


@pytest.mark.parametrize("shape", [(1, 24), (8, 24), (9, 24), (3, 50, 24), (130, 24)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_of_any_number_of_rows_is_that_of_a_linear_layer(shape, has_bias):
    torch.manual_seed(0)
    x, weight = torch.randn(shape), torch.randn(16, 24)
    bias = torch.randn(16) if has_bias else None
    torch.testing.assert_close(padded_product(x, weight, bias), linear(x, weight, bias))


def test_onednn_sees_few_shapes_for_it_keeps_memory_for_each():
    padded = {rows: rows + num_padding(rows) for rows in range(1, 1025)}
    some = [padded[rows] for rows in (1, 8, 9, 128, 129, 1000)]
    assert some == [8, 8, 16, 128, 256, 1024]
    assert len(set(padded.values())) == 16 + 7
