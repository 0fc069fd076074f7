"""Initial weights, each from its own generator, so that every layout starts equal."""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainyard.config.run import Model
from trainyard.model.sharding import sharded_dimension

RESIDUAL_OUTPUTS = ("attention.out.weight", "mlp.down.weight")


@dataclass(frozen=True)
class TensorShard:
    """Which of the equal shards of every sharded layer."""

    rank: int
    n_ranks: int


def initialise(
    module: nn.Module,
    model: Model,
    seed: int,
    tensor: TensorShard = TensorShard(0, 1),
) -> None:
    """Initialises every parameter like GPT-2 and Megatron-LM.

    Weights and embeddings are normal with `init_std`, residual outputs with init_std / sqrt(2 L);
    biases are zero, norms one.

    Args:
        module: the model or a part of it, with the parameter names of the whole.
        model: the shape of the whole.
        seed: the same seed gives the same weights in every layout.
        tensor: which shard of every layer `module` has.
    """

    @torch.no_grad()
    def fill(name: str, parameter: nn.Parameter) -> None:
        dimension = sharded_dimension(name)
        if dimension is None:
            parameter.copy_(initial_value(name, parameter.shape, model, seed))
            return
        shape = list(parameter.shape)
        shape[dimension] *= tensor.n_ranks
        whole = initial_value(name, torch.Size(shape), model, seed)
        parameter.copy_(whole.chunk(tensor.n_ranks, dimension)[tensor.rank])

    # One core draws 85 million numbers a second: over a minute for a model of 7 billion.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for done in [pool.submit(fill, *named) for named in module.named_parameters()]:
            done.result()


def initial_value(name: str, shape: torch.Size, model: Model, seed: int) -> Tensor:
    """Draws one whole parameter, fp32 on the CPU, from (seed, name) only."""
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if "norm.weight" in name:
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    std = model.init_std
    if name.endswith(RESIDUAL_OUTPUTS):
        std /= math.sqrt(2 * model.n_layers)
    # torch draws in groups of sixteen, and a remainder differently: whole groups, so that padding
    # rows, whose number depends on the tensor ranks, do not change the rows before them.
    n_elements = math.prod(shape)
    drawn = torch.empty(math.ceil(n_elements / 16) * 16).normal_(0.0, std, generator=generator)
    return drawn[:n_elements].view(shape)
