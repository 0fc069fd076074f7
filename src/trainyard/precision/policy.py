"""Applies a run's precision to a model, after the table in `config/precisions.py`.

`PrecisionPolicy` changes matmuls, weights and messages of blocks; the messages are below it. FSDP
copies what it sends of a block into one flat message, and passes it to a function that this module
replaces.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

# Private up to torch 2.13 at least: the public names of one collective depend on the version.
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from trainyard.config.precisions import FP32, SCALED_COLUMNS, Stored
from trainyard.config.rules import change
from trainyard.config.run import Run
from trainyard.model.gpt import GPT
from trainyard.model.linear import Linear
from trainyard.precision.block_scaled import E4M3, BlockScaledTensor, torch_dtype
from trainyard.precision.float8 import blocks_in_fp8, convert_to_float8, quiet_import


class PrecisionPolicy:
    """What a precision changes in a model whose weights, gradients and messages are fp32.

    Args:
        run: the run.
        compute_dtype: of activations and most matmuls; absent: the run's. Another, such as fp64 to
            verify a layout, keeps weights, gradients and optimizer states as they are.
    """

    def __init__(self, run: Run, compute_dtype: torch.dtype | None = None) -> None:
        own = torch_dtype(run.precision.formats.compute)
        self.compute_dtype = compute_dtype or own
        self._run = run
        is_own = self.compute_dtype == own
        self._kept = run if is_own else change(run, {"precision.kind": "fp32"})

    def convert_matmuls(self, model: GPT) -> None:
        """Replaces matmuls of blocks."""
        convert_to_float8(model, self._run)

    def convert_weights(self, model: GPT) -> None:
        """Rounds the initial weights of blocks to the format they are kept in."""
        weight = self._kept.precision.formats.matrices.weight
        if weight != FP32:
            model.blocks.to(torch_dtype(weight))

    def convert_messages(self, model: GPT) -> None:
        """Replaces collectives of a model sharded by `apply_fsdp`."""
        if self._kept.precision.formats.reduced.is_scaled:
            for block in model.blocks.values():
                assert isinstance(block, FSDPModule), "without ZeRO, gradients are all-reduced"
                block.set_custom_reduce_scatter(CodedReduceScatter())
        if self._run.precision.fp8.all_gather and self._run.parallel.zero_stage > 0:
            for block in blocks_in_fp8(model, self._run).values():
                assert isinstance(block, FSDPModule)
                block.set_custom_all_gather(Float8AllGather(block))

    def stored(self, name: str, n_dimensions: int) -> Stored:
        """Returns the formats of a parameter between steps."""
        return self._kept.stored(name.startswith("blocks."), n_dimensions)


class Float8AllGather(DefaultAllGather):
    """Gathers the weights of a block in fp8: half the bytes of bf16.

    It casts the weights of fp8 matmuls to fp8 before the gather and back to bf16 after it; biases
    and norms stay bf16:

        bf16    qkv.weight  qkv.bias  out.weight  ...       2 bytes each
        sent    e4m3        bf16      e4m3        ...       1 byte, 2 bytes, 1 byte

    First, ranks reduce the largest magnitude of each whole weight, which decides its scale, in one
    message of four numbers. The matmul then finds the same scale and the same fp8 values as from
    the weight itself. So nothing else changes: neither the mathematics, nor the plain parameter
    that optimizer, checkpoints and comparisons see.

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


class CodedReduceScatter(ReduceScatter):
    """Reduce-scatters the gradients of a block in 8 bits, a quarter of the bytes of fp32.

        rank 0    a0 a1 a2    fp32 gradients               encode        b0 c0  for rank 0
        rank 1    b0 b1 b2    for the parts of all         ------->      b1, .. all-to-all, bytes
        rank 2    c0 c1 c2    three ranks                  decode

        rank 0 ends with a0 + b0 + c0, summed in fp32

    A ring reduction in 8 bits would round at every hop, and needs headroom for the largest sum.
    Here `block_scaled.py` rounds each contribution once, with its own scales; a rank's own is not
    rounded. Non-finite values arrive as infinite or NaN.
    """

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
