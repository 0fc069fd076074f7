"""The work and the parameters of one rank: what memory, traffic and time are counted from."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache

from trainyard.architecture import (
    Blocks,
    Layers,
    LayerSpec,
    Shape,
    block_groups,
    block_layers,
    count_pieces,
    expert_layers,
    head_layer,
    in_rounds,
    matmuls,
    model_of_block,
    rest_layers,
    shard_dimension,
)
from trainyard.config.precisions import BF16, Stored
from trainyard.config.rules import fp8_blocks
from trainyard.config.run import Model, Run
from trainyard.layout.ranks import recomputed_blocks
from trainyard.layout.resolve import Plan
from trainyard.topology import Topology

FP32_BYTES = 4
Kind = tuple[str, bool, bool]
"""What a block recomputes, whether it is in fp8, and whether it has experts."""
Kinds = tuple[tuple[Kind, int], ...]
"""Kinds of blocks with their number."""


@dataclass(frozen=True, eq=False)
class EqualBlocks:
    """Blocks of a rank that have the same layers."""

    model: Model
    """Their shape."""
    layers: Layers
    """As a rank of tensors and of experts holds them."""
    matmuls: tuple[LayerSpec, ...]
    """Those of all tokens, which experts are not."""
    experts: tuple[LayerSpec, ...]
    """Router and experts, if any."""
    number: int
    """How many of them the rank has."""


class Rank:
    """Sizes of a rank; all ranks at one pipeline rank are alike.

    Attributes:
        stages: the first block of each of its pipeline stages, and one past its last.
        kinds: of the blocks of each stage, from `kinds_of_blocks`.
        n_recomputed: blocks that recompute all or a part.
        n_passes: forward and backward passes through attention of a micro batch, also recomputed.
        n_micro_batches: in a step of train.global_batch_size.
        n_tokens: tokens of a micro batch on this rank.
        n_pieces: in which tensor ranks exchange them beside matmuls of these pieces.
        n_gathers: in which they gather them at once: sequences together.
        n_residual: as `n_tokens`, in the residual stream, which sequence parallelism shards.
        value_bytes: bytes of a number in the compute precision.
        n_copies: ranks with the same parameters, before ZeRO shards them.
        is_shared: whether other ranks have the same parameters, or ZeRO shards them.
        n_shards: ranks over which ZeRO shards parameters, by rows; 1 with ZeRO 0.
        sent_gradient_bytes: bytes of a gradient that ZeRO's ranks sum, if it is not block-scaled.
        n_expert_shards: as `n_shards`, of those with the same experts.
        n_rows: of tokens for experts: exact in total, equal on all ranks by assumption.
        blocks: by whether they have experts; those that the rank has none of are absent.
        block: the layers of its largest block.
        outer_layers: those outside the blocks, by stage.
        head: the output matrix, which is in `outer_layers` if the rank has the last stage.
    """

    def __init__(self, run: Run, plan: Plan, pipeline_rank: int) -> None:
        model, topology, padded = run.model, plan.topology, plan.padded_vocabulary_size
        self.run, self.model, self.parallel = run, model, run.parallel
        self.topology, self.pipeline_rank = topology, pipeline_rank
        self.is_piped = topology.pipeline > 1
        self.stages = plan.stages[pipeline_rank :: topology.pipeline]
        self.n_blocks = sum(end - first for first, end in self.stages)
        self.kinds = [kinds_of_blocks(run, blocks) for blocks in self.stages]
        self.n_fp8_blocks = sum(n for kinds in self.kinds for (_, in_fp8, _), n in kinds if in_fp8)
        self.n_recomputed = sum(
            n for each in self.kinds for (part, *_), n in each if part != "none"
        )
        self.n_passes = 2 * self.n_blocks + self.n_recomputed
        self.has_first = self.stages[0][0] == 0
        self.has_last = self.stages[-1][1] == model.n_layers
        micro_batch_size = run.train.micro_batch_size
        self.n_micro_batches = run.train.global_batch_size // topology.data // micro_batch_size
        n_local = model.sequence_length // topology.context
        self.n_tokens = micro_batch_size * n_local
        self.n_pieces = count_pieces(n_local, micro_batch_size, topology.tensor)
        self.n_gathers = self.n_pieces if micro_batch_size == 1 else 1
        self.n_residual = self.n_tokens // (topology.tensor if run.parallel.sequence else 1)
        self.value_bytes = run.precision.formats.compute.n_bytes
        self.n_copies = topology.shard * topology.context
        self.is_shared = topology.data * topology.context > 1
        self.n_shards = self.n_copies if run.parallel.shards_state else 1
        rounds = run.parallel.reduce_format == "bf16"
        self.sent_gradient_bytes = BF16.n_bytes if rounds else FP32_BYTES
        self.n_expert_shards = max(1, self.n_shards // topology.expert)
        self.n_rows = self.n_tokens * model.n_active_experts * bool(model.n_experts)
        numbers = Counter[bool]()
        for (_, _, has_experts), n in itertools.chain.from_iterable(self.kinds):
            numbers[has_experts] += n
        self.blocks = {has: self._block_of(model, has, n) for has, n in sorted(numbers.items())}
        largest = self.blocks[max(self.blocks)]
        self.block, self.matmuls = largest.layers, largest.matmuls
        self.outer_layers = [
            rest_layers(model, padded, blocks, topology.tensor) for blocks in self.stages
        ]
        self.head = head_layer(model, padded, topology.tensor)

    def _block_of(self, model: Model, has_experts: bool, number: int) -> EqualBlocks:
        tensor, expert = self.topology.tensor, self.topology.expert
        kind = model if has_experts else model_of_block(model, 0)
        experts = expert_layers(kind, tensor, expert)
        layers = block_layers(kind, tensor, expert)
        return EqualBlocks(kind, layers, matmuls(kind, tensor=tensor), experts, number)

    def share(self, shape: Shape, *, of_experts: bool = False) -> int:
        """Counts the values of a parameter's shard, which has the most rows of all ranks."""
        return _share(shape, self.n_expert_shards if of_experts else self.n_shards)

    def count_shared(self, layers: Layers) -> int:
        """Counts the values of the shards of layers that have gradients."""
        parameters = (p for layer in layers.values() for p in layer.parameters.values())
        return sum(self.share(p.shape, of_experts=p.of_experts) for p in parameters if p.is_trained)

    @cached_property
    def parameter_counts(self) -> list[tuple[bool, Stored, int, int]]:
        """Values of its parameters in a block or outside, by formats: before ZeRO, and held."""
        outer = filter(None, self.outer_layers)
        groups = [(block.layers, block.number) for block in self.blocks.values()]
        groups += [(layers, 0) for layers in outer]
        n_shards = self.n_shards, self.n_expert_shards
        return [
            (n > 0, self._stored(n > 0, size), max(1, n) * whole, max(1, n) * held)
            for layers, n in groups
            for size, whole, held in _count_values(tuple(layers.values()), n_shards)
        ]

    def _stored(self, in_block: bool, n_dimensions: int) -> Stored:
        return self.run.stored(in_block, n_dimensions) if n_dimensions else Stored()

    def saved_bytes(self) -> int:
        """Returns the bytes that one of its ranks writes to a checkpoint: the first writes most."""
        n_bytes = sum(stored.saved_bytes(held) for _, stored, _, held in self.parameter_counts)
        if self.model.tied_embeddings and self.has_last and not self.has_first:  # a copy
            n_bytes -= self.run.stored(False, 2).saved_bytes(self.share(self.head.weight))
        return n_bytes

    def block_gathers(self) -> int:
        """Counts how often the weights of a block are gathered in a step."""
        if self.n_shards == 1:
            return 0
        if not self.parallel.shards_weights:
            return 1
        return self.n_micro_batches + 1 if self.is_piped else 2 * self.n_micro_batches

    def update_rounds(self) -> list[list[LayerSpec]]:
        """Lists the whole matrices of blocks that ranks orthogonalize in each round of Muon."""
        if self.run.optimizer.kind != "muon":
            return []
        groups = [block_groups(self.model, blocks) for blocks in self.stages]
        layers = [e for group in groups for kind, n in group for e in _alone(kind) * n]
        n_ranks = self.topology.n_ranks // self.topology.pipeline
        rounds = in_rounds([layer.weight for layer in layers], n_ranks)
        return [[layers[number] for number in numbers] for numbers in rounds]

    def expert_updates(self) -> list[tuple[Shape, int, int]]:
        """Lists the matrices of experts that Muon orthogonalizes in a batch, layer by layer.

        Returns:
            the shape of one, those that the rank orthogonalizes, and the values that it holds.
        """
        if self.run.optimizer.kind != "muon":
            return []
        updates, tensor = [], self.topology.tensor
        for block in self.blocks.values():
            for layer in expert_layers(block.model):
                if layer.kind == "experts":
                    n_own = layer.weight[0] // self.topology.expert // self.n_expert_shards
                    n = math.ceil(n_own / tensor) * math.prod(layer.weight[1:-2])
                    held = n_own * math.prod(layer.weight[1:]) // tensor
                    updates += [(layer.weight[-2:], n, held)] * block.number
        return updates


def _alone(model: Model) -> list[LayerSpec]:
    """Lists the matrices of a block that are orthogonalized by themselves."""
    routers = [each for each in expert_layers(model) if each.kind == "router"]
    return [*matmuls(model), *routers]


def sums_each(run: Run, topology: Topology) -> bool:
    """Returns whether ranks sum the gradients of each micro batch: those of ZeRO 2 and 3."""
    return run.parallel.shards_gradients and topology.data * topology.context > 1


def count_waiting(
    run: Run, topology: Topology, n_micro_batches: int, recompute: str, in_fp8: bool
) -> int:
    """Counts the micro batches of a step in which weight gradients wait for tensor ranks.

    Matmuls that add to gradients can: see `add_to_gradients` and `add_to_accumulated`.
    """
    if in_fp8 or sums_each(run, topology):
        return 0
    if topology.pipeline > 1:
        return n_micro_batches
    if topology.n_ranks > topology.tensor:
        return n_micro_batches - 1
    return 0 if n_micro_batches == 1 or recompute == "block" else n_micro_batches


def _share(shape: Shape, n_shards: int) -> int:
    n_rows = shape[shard_dimension(shape, n_shards)]
    return math.ceil(n_rows / n_shards) * (math.prod(shape) // n_rows)


@lru_cache(maxsize=1024)
def _count_values(
    layers: tuple[LayerSpec, ...], n_shards: tuple[int, int]
) -> list[tuple[int, int, int]]:
    """Counts parameters of each number of dimensions: all values, and those of a shard.

    Those that are not trained count as of no dimension; each rank has them whole.
    """
    whole, held = Counter[int](), Counter[int]()
    for each in (each for layer in layers for each in layer.parameters.values()):
        size, n_values = len(each.shape) * each.is_trained, math.prod(each.shape)
        whole[size] += n_values
        held[size] += _share(each.shape, n_shards[each.of_experts]) if size else n_values
    return [(size, n, held[size]) for size, n in whole.items()]


def likeness(run: Run, blocks: Blocks) -> tuple[object, ...]:
    """Returns what stages of equal work have in common: blocks, ends, and fp8 at either end."""
    (first, end), in_fp8 = blocks, fp8_blocks(run)
    kinds = tuple((kind.n_experts, n) for kind, n in block_groups(run.model, blocks))
    return kinds, first == 0, end == run.model.n_layers, first in in_fp8, end - 1 in in_fp8


def kinds_of_blocks(run: Run, blocks: Blocks) -> Kinds:
    """Counts a stage's blocks by kind."""
    again, in_fp8 = recomputed_blocks(run.parallel, blocks), fp8_blocks(run)
    part, model = run.parallel.recompute, run.model
    kinds: Counter[Kind] = Counter(
        (part if n in again else "none", n in in_fp8, model_of_block(model, n).n_experts > 0)
        for n in range(*blocks)
    )
    return tuple(sorted(kinds.items()))
