"""FSDP all-gathers of block weights in fp8: half the bytes of bf16.

FSDP copies this rank's shards of a block's parameters, in bf16, into one message, and passes it to
an all-gather function, which this module replaces. It casts the weights of fp8 matmuls to fp8
before the gather and back to bf16 after it; biases and norms stay bf16:

    bf16    qkv.weight  qkv.bias  out.weight  ...       2 bytes each
    sent    e4m3        bf16      e4m3        ...       1 byte, 2 bytes, 1 byte

First, ranks reduce the largest magnitude of each whole weight, which decides its scale, in one
message of four numbers. The matmul then finds the same scale and the same fp8 values as from the
weight itself. So nothing else changes: neither the mathematics, nor the plain parameter that
optimizer, checkpoints and comparisons see.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

# Private up to torch 2.13 at least: the public names of one collective depend on the version.
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from trainyard.config.run import Run
from trainyard.model.gpt import GPT
from trainyard.model.linear import Linear
from trainyard.precision.float8 import blocks_in_fp8, quiet_import


def gather_weights_in_fp8(model: GPT, run: Run) -> None:
    """Makes FSDP gather weights of fp8 blocks in fp8, if so configured.

    Args:
        model: sharded by `apply_fsdp`.
        run: the run; no effect unless it shards weights (ZeRO 1 to 3).
    """
    if not run.precision.fp8.all_gather or run.parallel.zero_stage == 0:
        return
    for block in blocks_in_fp8(model, run).values():
        assert isinstance(block, FSDPModule)
        block.set_custom_all_gather(Float8AllGather(block))


class Float8AllGather(DefaultAllGather):
    """Gathers the parameters of one block, for `torch.distributed.fsdp`.

    Args:
        block: already sharded.
    """

    def __init__(self, block: nn.Module) -> None:
        with quiet_import():
            from torchao.float8 import config, float8_utils

        self._dtype: torch.dtype = config.e4m3_dtype
        self._scale_of, self._encode = float8_utils.amax_to_scale, float8_utils.to_fp8_saturated
        weights = {id(m.weight) for m in block.modules() if isinstance(m, Linear)}
        parameters = list(block.parameters())
        self._shapes = [parameter.shape for parameter in parameters]
        self._is_fp8 = [id(parameter) in weights for parameter in parameters]

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fills `output_tensor`, (ranks x n,), with every rank's `input_tensor`, (n,)."""
        n_ranks = group.size()
        lengths = [-(-shape[0] // n_ranks) * shape[1:].numel() for shape in self._shapes]
        assert sum(lengths) == len(input_tensor), "FSDP pads parts to equal rows"
        parts = torch.split(input_tensor, lengths)
        in_fp8 = [part for part, is_fp8 in zip(parts, self._is_fp8, strict=True) if is_fp8]
        largest = torch.stack([part.abs().max() for part in in_fp8]).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        scales = self._scale_of(largest, self._dtype, round_scales_to_power_of_2=True)
        sent = torch.cat([part.view(torch.uint8) for part in self._made_fp8(parts, scales)])
        received = sent.new_empty(n_ranks, len(sent))
        super().__call__(received.view(-1), sent, group)
        n_bytes = [
            length * (1 if is_fp8 else input_tensor.element_size())
            for length, is_fp8 in zip(lengths, self._is_fp8, strict=True)
        ]
        targets = torch.split(output_tensor.view(n_ranks, -1), lengths, dim=1)
        scale_of = iter(scales)
        columns = torch.split(received, n_bytes, dim=1)
        for target, column, is_fp8 in zip(targets, columns, self._is_fp8, strict=True):
            values = column.contiguous()
            if is_fp8:
                target.copy_(values.view(self._dtype).float() / next(scale_of))
            else:
                target.copy_(values.view(input_tensor.dtype))

    def _made_fp8(self, parts: Sequence[Tensor], scales: Tensor) -> list[Tensor]:
        scale_of = iter(scales)
        return [
            self._encode(part.float() * next(scale_of), self._dtype) if is_fp8 else part
            for part, is_fp8 in zip(parts, self._is_fp8, strict=True)
        ]
