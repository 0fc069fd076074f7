"""The work and the parameters of one rank: what memory, traffic and time are counted from."""

from __future__ import annotations

import math

from trainyard.architecture import (
    LayerSpec,
    Shape,
    block_layers,
    head_layer,
    in_rounds,
    matmuls,
    rest_layers,
)
from trainyard.config.rules import fp8_blocks
from trainyard.config.run import Run
from trainyard.layout.resolve import Plan

FP32_BYTES = 4


class Rank:
    """Sizes of a rank; all ranks at one pipeline rank are alike.

    Attributes:
        stages: the first block of each of its pipeline stages, and one past its last.
        n_micro_batches: in a step of train.global_batch_size.
        n_tokens: tokens of a micro batch on this rank.
        n_residual: as `n_tokens`, in the residual stream, which sequence parallelism shards.
        value_bytes: bytes of a number in the compute precision.
        n_copies: ranks with the same parameters, before ZeRO shards them.
        n_shards: ranks over which ZeRO shards parameters, by rows; 1 with ZeRO 0.
        block: the layers of a block, as a tensor rank holds them.
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
        self.n_fp8_blocks = sum(count_fp8_blocks(run, blocks) for blocks in self.stages)
        self.has_first = self.stages[0][0] == 0
        self.has_last = self.stages[-1][1] == model.n_layers
        micro_batch_size = run.train.micro_batch_size
        self.n_micro_batches = run.train.global_batch_size // topology.data // micro_batch_size
        self.n_tokens = micro_batch_size * model.sequence_length // topology.context
        self.n_residual = self.n_tokens // (topology.tensor if run.parallel.sequence else 1)
        self.value_bytes = run.precision.formats.compute.n_bytes
        self.n_copies = topology.shard * topology.context
        self.n_shards = self.n_copies if run.parallel.shards_state else 1
        self.block = block_layers(model, topology.tensor)
        self.matmuls = matmuls(model, tensor=topology.tensor)
        self.outer_layers = [
            rest_layers(model, padded, each, topology.tensor) for each in self.stages
        ]
        self.head = head_layer(model, padded, topology.tensor)

    def share(self, shape: Shape) -> int:
        """Counts the values of a parameter's shard, which has the most rows of all ranks."""
        return math.ceil(shape[0] / self.n_shards) * math.prod(shape[1:])

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
        layers = matmuls(self.model) * self.n_blocks
        n_ranks = self.topology.n_ranks // self.topology.pipeline
        rounds = in_rounds([layer.weight for layer in layers], n_ranks)
        return [[layers[number] for number in numbers] for numbers in rounds]


def count_fp8_blocks(run: Run, blocks: tuple[int, int]) -> int:
    """Counts a stage's blocks with fp8 matmuls."""
    in_fp8 = fp8_blocks(run)
    return max(0, min(blocks[1], in_fp8.stop) - max(blocks[0], in_fp8.start))
