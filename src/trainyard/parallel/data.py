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
classes here replace, to send it in 16 or 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

# Private up to torch 2.14 at least: the public names of one collective depend on the version.
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.tensor import Shard

from trainyard.architecture import shard_dimension
from trainyard.config.precisions import SCALED_COLUMNS
from trainyard.model.experts import ExpertMLP
from trainyard.model.gpt import GPT
from trainyard.model.linear import Linear
from trainyard.precision.block_scaled import E4M3, BlockScaledTensor
from trainyard.precision.float8 import quiet_import
from trainyard.precision.policy import PrecisionPolicy


def apply_fsdp(
    model: GPT, mesh: DeviceMesh, zero_stage: int, same_experts: DeviceMesh | None = None
) -> None:
    """Shards the weights of `model` over the ranks of a mesh.

    Weights are gathered in the compute precision, in which their layers use them, and gradients
    reduced in fp32: each block, final norm and head, and the embeddings are messages of their own.
    A tied head is in that of the embeddings.

    Args:
        model: on any device; moved to that of the mesh, block by block.
        mesh: one dimension, or two where the first replicates (hybrid sharding).
        zero_stage: 0 to 3.
        same_experts: the ranks of the mesh with the same experts, if not all have them.
    """
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if model.compute_dtype.itemsize < torch.float32.itemsize:
        policy = replace(policy, param_dtype=model.compute_dtype, reduce_dtype=torch.float32)
    for block in model.blocks.values():
        mlp: Any = block.mlp
        if same_experts is not None and isinstance(mlp, ExpertMLP):
            _share(mlp.experts, same_experts, policy, zero_stage)
        _share(block, mesh, policy, zero_stage)
    first: Any = next(iter(model.blocks.values()))
    # Nothing follows its backward pass. FSDP would gather what it used in the micro batch before.
    first.set_modules_to_backward_prefetch([first])
    kept_stage = min(zero_stage, 2)  # the backward pass uses both ends right after the forward pass
    norm, elsewhere = model.final_norm, set[nn.Parameter]()
    if norm is not None and not (model.takes_tokens and model.head is None):
        # The loss reads the head outside any forward pass: it comes and goes with the norm.
        norm.add_module("head", model.output_layer)
        _share(norm, mesh, policy, kept_stage)
        elsewhere = set(norm.parameters())
        del norm.head
    _share(model, mesh, policy, kept_stage, elsewhere)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def _share(
    module: nn.Module,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    zero_stage: int,
    elsewhere: set[nn.Parameter] | None = None,
) -> None:
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "ignored_params": elsewhere}
    if zero_stage == 0:
        # FSDP2's internals, all-reducing; private up to torch 2.14 at least, the same in 2.11.
        from torch.distributed._composable.replicate_with_fsdp import replicate

        replicate(module, **options)
    else:
        n_ranks = mesh.shape[-1]

        def cut(parameter: nn.Parameter) -> Shard:
            return Shard(shard_dimension(parameter.shape, n_ranks))

        options |= {"shard_placement_fn": cut}
        fully_shard(module, reshard_after_forward=zero_stage == 3, **options)


def prepare_micro_batch(model: nn.Module, zero_stage: int, *, is_last: bool) -> None:
    """Sets, before a backward pass, whether it is the last micro batch of the step."""
    assert isinstance(model, FSDPModule)
    model.set_is_last_backward(is_last)
    if zero_stage <= 1:
        model.set_requires_gradient_sync(is_last)
        add_to_accumulated(model, is_last=is_last)
    if zero_stage < 3:
        model.set_reshard_after_backward(is_last)
    model.set_requires_all_reduce(is_last)


def add_to_accumulated(model: nn.Module, *, is_last: bool = False) -> None:
    """Makes matmuls add weight gradients to those that FSDP keeps until it reduces them.

    Args:
        model: with ZeRO 0 or 1, before a forward pass.
        is_last: they no longer do: FSDP frees what it has reduced, block by block.
    """
    for module in model.modules():
        group: Any = isinstance(module, FSDPModule) and module._get_fsdp_state()._fsdp_param_group
        for each in group.fsdp_params if group else ():
            layer = each._module_info.module
            if isinstance(layer, Linear) and each._module_info.param_name == "weight":
                layer.sums = None
                if is_last:
                    continue
                if each.unsharded_accumulated_grad is None:
                    dtype = torch.promote_types(each.sharded_param.dtype, torch.float32)
                    total = torch.zeros(each._orig_size, dtype=dtype, device=group.device)
                    each.unsharded_accumulated_grad = total
                layer.sums = each.unsharded_accumulated_grad.data, None


def convert_messages(model: GPT, policy: PrecisionPolicy) -> None:
    """Replaces collectives of a sharded model by those of its precision."""
    if policy.reduces_in_8_bits:
        for block in model.blocks.values():
            assert isinstance(block, FSDPModule), "without ZeRO, gradients are all-reduced"
            block.set_custom_reduce_scatter(CodedReduceScatter())
    if policy.reduces_in_bf16:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(Bf16ReduceScatter())
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


class Bf16ReduceScatter(DefaultReduceScatter):
    """Reduce-scatters gradients in bf16.

    FSDP's own reduce_dtype would also add up the gradients of micro batches in bf16: here they are
    rounded when they are sent. Of n ranks, a sum has an error of at most n 2^-8 of the sum of all
    magnitudes: each contribution is rounded once, and each of n - 1 sums.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Sums this rank's part over all ranks, with the arguments of `CodedReduceScatter`."""
        assert not async_op, "FSDP never sets it"
        total = torch.empty_like(output_tensor, dtype=torch.bfloat16)
        super().__call__(total, input_tensor.to(total.dtype), group, op)
        output_tensor.copy_(total)


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
