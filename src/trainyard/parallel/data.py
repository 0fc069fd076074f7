"""Data parallelism: replicas of the model, with sharded weights, moments or gradients (ZeRO).

    stage    each rank holds                               collectives of a step
    0        everything                                    all-reduce gradients once
    1        its shard of weights and moments              gather once, reduce-scatter once
    2        ... and of gradients between micro batches    gather once, reduce-scatter each
    3        ... and of weights between uses               gather each use, reduce-scatter each

FSDP2 does the work. Gradients are summed, not averaged, because each micro batch's loss is already
divided by the labelled tokens of the whole batch. Context-parallel ranks count as data-parallel
ones: each has gradients of all weights, from its own tokens.

FSDP copies what it sends of a block into one flat message, and passes it to a function that the
classes here replace, to send it in 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

# Private up to torch 2.14 at least: the public names of one collective depend on the version.
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from trainyard.config.precisions import SCALED_COLUMNS
from trainyard.model.gpt import GPT
from trainyard.model.linear import Linear
from trainyard.precision.block_scaled import E4M3, BlockScaledTensor
from trainyard.precision.float8 import quiet_import
from trainyard.precision.policy import PrecisionPolicy


def apply_fsdp(model: GPT, mesh: DeviceMesh, zero_stage: int) -> None:
    """Shards the weights of `model` over the ranks of a mesh.

    Blocks are gathered in the compute precision, everything else in fp32, to match the
    single-device model; gradients are reduced in fp32.

    Args:
        model: on any device; moved to that of the mesh, block by block.
        mesh: one dimension, or two where the first replicates (hybrid sharding).
        zero_stage: 0 to 3.
    """
    precise = in_blocks = MixedPrecisionPolicy(cast_forward_inputs=False)
    if model.compute_dtype.itemsize < torch.float32.itemsize:
        precise = replace(precise, reduce_dtype=torch.float32)
        in_blocks = replace(precise, param_dtype=model.compute_dtype)
    for block in model.blocks.values():
        _share(block, mesh, in_blocks, zero_stage)
    # The loss needs embedding, final norm and head right after the forward pass.
    _share(model, mesh, precise, min(zero_stage, 2))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def _share(
    module: torch.nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, zero_stage: int
) -> None:
    if zero_stage == 0:
        # FSDP2's internals, all-reducing; private up to torch 2.14 at least, the same in 2.11.
        from torch.distributed._composable.replicate_with_fsdp import replicate

        replicate(module, mesh=mesh, mp_policy=policy)
    else:
        fully_shard(module, mesh=mesh, reshard_after_forward=zero_stage == 3, mp_policy=policy)


def prepare_micro_batch(model: GPT, zero_stage: int, *, is_last: bool) -> None:
    """Sets, before a backward pass, whether it is the last micro batch of the step."""
    assert isinstance(model, FSDPModule)
    model.set_is_last_backward(is_last)
    if zero_stage <= 1:
        model.set_requires_gradient_sync(is_last)
    if zero_stage < 3:
        model.set_reshard_after_backward(is_last)
    model.set_requires_all_reduce(is_last)


def convert_messages(model: GPT, policy: PrecisionPolicy) -> None:
    """Replaces collectives of a sharded model by those of its precision."""
    if policy.reduces_in_8_bits:
        for block in model.blocks.values():
            assert isinstance(block, FSDPModule), "without ZeRO, gradients are all-reduced"
            block.set_custom_reduce_scatter(CodedReduceScatter())
    for block in policy.gathered_in_fp8(model):
        assert isinstance(block, FSDPModule)
        block.set_custom_all_gather(Float8AllGather(block))


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
        found = iter(self._scale_of(largest, self._dtype, round_scales_to_power_of_2=True))
        scales = [next(found) if is_fp8 else None for is_fp8 in self._is_fp8]
        sent = [
            part if scale is None else self._encode(part.float() * scale, self._dtype)
            for part, scale in zip(parts, scales, strict=True)
        ]
        message = torch.cat([part.view(torch.uint8) for part in sent])
        received = message.new_empty(n_ranks, len(message))
        super().__call__(received.view(-1), message, group)
        targets = torch.split(output_tensor.view(n_ranks, -1), lengths, dim=1)
        columns = torch.split(received, [part.nbytes for part in sent], dim=1)
        for target, column, scale in zip(targets, columns, scales, strict=True):
            values = column.contiguous()
            if scale is None:
                target.copy_(values.view(input_tensor.dtype))
            else:
                target.copy_(values.view(self._dtype).float() / scale)


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
