"""Data parallelism: replicas of the model, with sharded weights, moments or gradients (ZeRO).

    stage    each rank holds                               collectives of a step
    0        everything                                    all-reduce gradients once
    1        its shard of weights and moments              gather once, reduce-scatter once
    2        ... and of gradients between micro batches    gather once, reduce-scatter each
    3        ... and of weights between uses               gather each use, reduce-scatter each

FSDP2 does the work. Gradients are summed, not averaged, because each micro batch's loss is already
divided by the labelled tokens of the whole batch. Context-parallel ranks count as data-parallel
ones: each has gradients of all weights, from its own tokens.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainyard.model.gpt import GPT


def apply_fsdp(model: GPT, mesh: DeviceMesh, zero_stage: int) -> None:
    """Shards the weights of `model` over the ranks of a mesh.

    Blocks are gathered in the compute precision, everything else in fp32, to match the
    single-device model; gradients are reduced in fp32.

    Args:
        model: on any device; moved to that of the mesh, block by block.
        mesh: one dimension, or two where the first replicates (hybrid sharding).
        zero_stage: 0 to 3.
    """
    precise = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    if model.compute_dtype in (torch.float32, torch.float64):
        precise = MixedPrecisionPolicy(cast_forward_inputs=False)
        in_blocks = precise
    else:
        in_blocks = MixedPrecisionPolicy(
            param_dtype=model.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
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
        # FSDP2's internals, all-reducing; private up to torch 2.13 at least, the same in 2.11.
        from torch.distributed._composable.replicate_with_fsdp import replicate

        replicate(module, mesh=mesh, mp_policy=policy)
    else:
        fully_shard(module, mesh=mesh, reshard_after_forward=zero_stage == 3, mp_policy=policy)


def prepare_micro_batch(model: GPT, zero_stage: int, *, is_last: bool) -> None:
    """Sets, before a backward pass, whether it is the last micro batch of the step."""
    if not isinstance(model, FSDPModule):
        return
    model.set_is_last_backward(is_last)
    if zero_stage <= 1:
        model.set_requires_gradient_sync(is_last)
    if zero_stage < 3:
        model.set_reshard_after_backward(is_last)
    model.set_requires_all_reduce(is_last)
