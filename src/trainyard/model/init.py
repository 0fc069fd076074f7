"""Initial weights, each from its own generator, so that every layout starts equal."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from trainyard.architecture import ParameterSpec, parameters_of
from trainyard.model.gpt import GPT

Store = Callable[[nn.Parameter, ParameterSpec, Tensor], None]
"""Called with a parameter or a shard of it, its description, and the value of the whole."""
MOST_BYTES = 4 * 2**30
"""Limit on the whole parameters drawn at a time; a larger one is drawn alone."""


def store_whole(parameter: nn.Parameter, _spec: ParameterSpec, value: Tensor) -> None:
    """Stores a value in a parameter that is not sharded."""
    parameter.copy_(value)


def initialize(model: GPT, seed: int, store: Store = store_whole) -> None:
    """Initializes every parameter like GPT-2 and Megatron-LM.

    Weights and embeddings are normal with `init_std`, residual outputs with init_std / sqrt(2 L);
    biases are zero, norms one.

    Args:
        model: the model or a part of it.
        seed: the same seed gives the same weights in every layout.
        store: puts a value, or this rank's part of it, into its parameter.
    """
    specs = parameters_of(model.layers)

    @torch.no_grad()
    def fill(name: str, parameter: nn.Parameter) -> None:
        store(parameter, specs[name], initial_value(name, specs[name], seed))

    # One core draws 85 million numbers a second: over a minute for a model of 7 billion.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for names in _batches((name, math.prod(specs[name].shape)) for name in specs):
            for done in [pool.submit(fill, name, model.get_parameter(name)) for name in names]:
                done.result()


def _batches(sizes: Iterable[tuple[str, int]]) -> Iterator[list[str]]:
    """Groups names in order, each group of `MOST_BYTES` of fp32 or of one name."""
    batch: list[str] = []
    n_bytes = 0
    for name, size in sizes:
        if batch and n_bytes + 4 * size > MOST_BYTES:
            yield batch
            batch, n_bytes = [], 0
        batch.append(name)
        n_bytes += 4 * size
    yield batch


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
