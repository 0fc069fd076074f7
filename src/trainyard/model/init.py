"""Initial weights, each from its own generator, so that every layout starts equal."""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainyard.architecture import ParameterSpec, parameters_of
from trainyard.model.gpt import GPT


@dataclass(frozen=True)
class TensorShard:
    """Which of the equal shards of every sharded layer."""

    rank: int
    n_ranks: int


def initialize(model: GPT, seed: int, tensor: TensorShard = TensorShard(0, 1)) -> None:
    """Initializes every parameter like GPT-2 and Megatron-LM.

    Weights and embeddings are normal with `init_std`, residual outputs with init_std / sqrt(2 L);
    biases are zero, norms one.

    Args:
        model: the model or a stage of it.
        seed: the same seed gives the same weights in every layout.
        tensor: which shard of every layer it has.
    """
    specs = parameters_of(model.layers)

    @torch.no_grad()
    def fill(name: str, parameter: nn.Parameter) -> None:
        spec = specs[name]
        whole = initial_value(name, spec, seed)
        if spec.dimension is not None:
            whole = whole.chunk(tensor.n_ranks, spec.dimension)[tensor.rank]
        parameter.copy_(whole)

    # One core draws 85 million numbers a second: over a minute for a model of 7 billion.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for done in [pool.submit(fill, *named) for named in model.named_parameters()]:
            done.result()


def initial_value(name: str, spec: ParameterSpec, seed: int) -> Tensor:
    """Draws one whole parameter, fp32 on the CPU, from (seed, name) only."""
    if not spec.std:
        return torch.full(spec.shape, spec.mean)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    # torch draws in groups of sixteen, and a remainder differently: whole groups, so that padding
    # rows, whose number depends on the tensor ranks, do not change the rows before them.
    n_elements = math.prod(spec.shape)
    drawn = torch.empty(math.ceil(n_elements / 16) * 16)
    drawn.normal_(spec.mean, spec.std, generator=generator)
    return drawn[:n_elements].view(spec.shape)
