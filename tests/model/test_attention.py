from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.model.attention import CausalAttention, _attend_by_cudnn
from trainyard.model.dropout import at_site, dropout, rows_of_heads, sequence_seeds

SEEDS = sequence_seeds(1, 0, 0, 2)


def queries_keys_values(
    dtype: torch.dtype = torch.float64, n_tokens: int = 12
) -> tuple[Tensor, Tensor, Tensor]:
    """(2, 4, T, 8) each, laid out in memory as `Attention` gives them."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, n_tokens, 4, 3, 8, generator=generator, dtype=torch.float64)
    q, k, v = (x.transpose(1, 2).to(dtype).requires_grad_() for x in drawn.unbind(3))
    return q, k, v


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-11), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_a_rate_near_zero_is_attention_without_dropout(dtype: torch.dtype, bound: float) -> None:
    q, k, v = queries_keys_values(dtype)
    found = CausalAttention(8, 1e-13, 1)(q, k, v, SEEDS)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
    upstream = torch.randn_like(found)
    mine = torch.autograd.grad(found, (q, k, v), upstream)
    for one, other in zip(mine, torch.autograd.grad(expected, (q, k, v), upstream), strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


def test_dropout_acts_on_the_attention_weights() -> None:
    q, k, v = queries_keys_values()
    positions = torch.arange(12)
    scores = q @ k.transpose(2, 3) / 8**0.5
    weights = scores.masked_fill(positions > positions[:, None], -torch.inf).softmax(-1)
    rows = rows_of_heads(0, 4, 12, q.device)
    expected = dropout(weights, 0.3, at_site(SEEDS, 5), rows, positions) @ v
    torch.testing.assert_close(CausalAttention(8, 0.3, 5)(q, k, v, SEEDS), expected)


def test_without_keys_there_is_none() -> None:
    q, k, v = queries_keys_values()
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(CausalAttention(8, 0.3, 1)(q, k, v), expected)


def test_attention_of_cudnn_is_called_as_torch_calls_it() -> None:
    q, k, v = (x.to("meta", torch.bfloat16) for x in queries_keys_values(n_tokens=128))
    out = _attend_by_cudnn(q.requires_grad_(), k, v)
    assert out.shape == q.shape
    assert out.stride() == q.contiguous().transpose(1, 2).contiguous().transpose(1, 2).stride()
    assert out.grad_fn is not None and "Cudnn" in out.grad_fn.name()
    operation = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    names = [argument.name for argument in operation._schema.arguments]
    assert names[3:7] == ["attn_bias", "compute_log_sumexp", "dropout_p", "is_causal"]
