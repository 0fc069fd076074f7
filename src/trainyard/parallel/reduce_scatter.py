"""Reduce-scatters gradients over data-parallel ranks in 8 bits, a quarter of the bytes of fp32.

    rank 0    a0 a1 a2    fp32 gradients               encode        b0 c0  for rank 0
    rank 1    b0 b1 b2    for the parts of all         ------->      b1, .. all-to-all, bytes
    rank 2    c0 c1 c2    three ranks                  decode

    rank 0 ends with a0 + b0 + c0, summed in fp32

A ring reduction in 8 bits would round at every hop, and needs headroom for the largest sum. Here
`precision/block_scaled.py` rounds each contribution once, with its own scales; a rank's own is not
rounded. Non-finite values arrive as infinite or NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from trainyard.config.fp8_rules import SCALED_COLUMNS
from trainyard.model.gpt import GPT
from trainyard.precision.block_scaled import E4M3, BlockScaledTensor


class CodedReduceScatter(ReduceScatter):
    """A reduce-scatter for `FSDPModule.set_custom_reduce_scatter`, of sums."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocates an input or output buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Sums this rank's part over all ranks.

        Args:
            output_tensor: filled with the sum, (n,), fp32.
            input_tensor: this rank's contribution to every rank's part, (ranks x n,), fp32.
            group: the ranks.
            op: must be the sum, as set in FSDP.
            async_op: never set by FSDP.
        """
        assert op == dist.ReduceOp.SUM and not async_op, (op, async_op)
        n_ranks, rank = group.size(), group.rank()
        parts = input_tensor.view(n_ranks, -1)
        n_values = parts.shape[1]
        padded = F.pad(parts, (0, -n_values % SCALED_COLUMNS))
        codes = BlockScaledTensor.of(padded, E4M3)
        sent = torch.cat([codes.values.view(torch.uint8), codes.exponents], dim=1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        output_tensor.copy_(parts[rank])
        for other in range(n_ranks):
            if other != rank:
                message = received[other : other + 1]
                values = message[:, : padded.shape[1]].view(E4M3)
                exponents = message[:, padded.shape[1] :]
                output_tensor += BlockScaledTensor(values, exponents).decode().view(-1)[:n_values]


def reduce_in_fp8(model: GPT) -> None:
    """Makes the sharded blocks of a model reduce gradients in fp8; the rest stays fp32."""
    for block in model.blocks.values():
        assert isinstance(block, FSDPModule), "without ZeRO, gradients are all-reduced"
        block.set_custom_reduce_scatter(CodedReduceScatter())
