"""Assigns ranks to axes and blocks to pipeline stages.

With 64 ranks, tensor 8 and pipeline 2, the data parallel size is 64 / 16 = 4. A step of 24
sequences in micro batches of 2 then has 24 / (2 x 4) = 3 micro batches for each of the 4, and the
pipeline's schedule must support 3.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from trainyard.architecture import Blocks, head_layer, matmuls, model_of_block
from trainyard.config import rules
from trainyard.config.run import Model, Parallel, Run
from trainyard.errors import ConfigError
from trainyard.layout.batches import batch_sizes
from trainyard.layout.flops import block_flops, matmul_flops, score_flops
from trainyard.topology import Topology
from trainyard.units import format_number

Stages = tuple[tuple[int, int], ...]
FARTHEST = 8
"""Suggest rank counts up to this multiple, or down to this fraction, of the given one."""
EASIEST = ("1f1b", "gpipe")
"""Schedules that take nearly any number of micro batches."""


def find_topology(run: Run, n_ranks: int | None) -> Topology:
    """Assigns ranks to the axes.

    Args:
        run: fixes all axes except the data parallel ones.
        n_ranks: all processes; absent: the fewest that the run allows.

    Raises:
        ConfigError: the ranks, or the batch on them, cannot be divided as asked.
    """
    parallel = run.parallel
    if n_ranks is None:
        fewest = next(iter(_data_sizes(run)), parallel.data_replicate)
        n_ranks = ranks_per_replica(run) * fewest
    problems = _find_problems(run, n_ranks)
    if problems:
        raise ConfigError("\n".join(problems), _fix(run, n_ranks))
    return Topology(
        pipeline=parallel.pipeline,
        replicate=parallel.data_replicate,
        shard=n_ranks // ranks_per_replica(run) // parallel.data_replicate,
        context=parallel.context,
        tensor=parallel.tensor,
        expert=parallel.expert,
    )


def ranks_per_replica(run: Run) -> int:
    """Counts the ranks that work on the same sequences."""
    return run.parallel.tensor * run.parallel.pipeline * run.parallel.context


def takes_micro_batches(run: Run, n_micro_batches: int) -> bool:
    """Returns whether the pipeline's schedule supports this number of micro batches.

    The conditions are those of `torch.distributed.pipelining` 2.11 to 2.14.
    """
    pipeline = run.parallel.pipeline
    if pipeline == 1 or run.parallel.schedule == "gpipe":
        return n_micro_batches >= 1
    if run.parallel.schedule == "1f1b":
        return n_micro_batches >= pipeline
    n_rounds = max(1, n_micro_batches // pipeline)
    return n_micro_batches % n_rounds == 0


def find_stages(run: Run, padded_vocabulary_size: int) -> Stages:
    """Splits the blocks into pipeline stages, by the FLOP of training on one token.

    Returns:
        the first block of each stage and the one after its last; stage s is on pipeline rank
        s % parallel.pipeline.
    """
    model, parallel = run.model, run.parallel
    scores = score_flops(model) // 2  # a token sees half of the sequence on average
    attention = matmul_flops(matmuls(model, "attention")[:-1]) + scores

    def cost(block: Model) -> int:
        forward = block_flops(block) + scores
        again = {"none": 0, "attention": attention, "block": forward}[parallel.recompute]
        return 3 * forward + round(again * parallel.recompute_share)

    has_dense = model.n_experts and model.n_dense_blocks
    costs = Costs(
        first=3 * model.d_model,  # adds the position to an embedding, and to both gradients
        block=cost(model),
        last=3 * matmul_flops([head_layer(model, padded_vocabulary_size)]),
        dense=(model.n_dense_blocks, cost(model_of_block(model, 0))) if has_dense else (0, 0),
    )
    n_stages = parallel.pipeline * parallel.chunks
    return balanced_stages(costs, model.n_layers, n_stages, parallel.pipeline)


def recomputed_blocks(parallel: Parallel, blocks: Blocks) -> set[int]:
    """Returns the blocks of a stage that recompute; its last one is among them."""
    (first, end), share = blocks, parallel.recompute_share
    n = end - first
    n_again = max(1, round(n * share)) if parallel.recompute != "none" else 0
    return {first + i for i in range(n) if (i + 1) * n_again // n > i * n_again // n}


def describe_layout(run: Run, topology: Topology) -> str:
    """Describes a layout: "pipeline 2 (1f1b) x data 2 (ZeRO 1) x tensor 2"."""
    parallel = run.parallel
    chunks = f", {parallel.chunks} chunks" if parallel.chunks > 1 else ""
    details = {
        "pipeline": f"pipeline {topology.pipeline} ({parallel.schedule}{chunks})",
        "replicate": f"replicas {topology.replicate}",
        "shard": f"data {topology.shard} (ZeRO {parallel.zero_stage})",
        "context": f"context {topology.context} ({parallel.context_method})",
        "tensor": f"tensor {topology.tensor}{' (sequence)' if parallel.sequence else ''}",
        "expert": f"expert {topology.expert}",
    }
    cut = [text for axis, text in details.items() if getattr(topology, axis) > 1]
    share = f" {parallel.recompute_share:.0%}" if parallel.recompute_share < 1 else ""
    recompute = "" if parallel.recompute == "none" else f", recompute {parallel.recompute}{share}"
    return (" x ".join(cut) or "one process") + recompute


@dataclass(frozen=True)
class Costs:
    """Cost of stages per token, in any unit."""

    first: int
    """The first stage besides its blocks: the embedding."""
    block: int
    last: int
    """The last stage besides its blocks: the head and the loss."""
    dense: tuple[int, int] = (0, 0)
    """How many first blocks cost something else, and what each costs."""

    def of_stage(self, first: int, end: int, n_layers: int) -> int:
        """Returns the cost of a stage."""
        n_dense, dense = self.dense
        n = min(max(0, n_dense - first), end - first)
        ends = (first == 0) * self.first + (end == n_layers) * self.last
        return n * dense + (end - first - n) * self.block + ends


@cache
def balanced_stages(costs: Costs, n_layers: int, n_stages: int, n_ranks: int) -> Stages:
    """Splits the blocks to minimize the time of the slowest stage.

    Where blocks cost the same, greedily adding each to the cheapest stage is optimal. Ties go to
    the stage on the less loaded rank, then to the later stage, whose rank holds fewer micro batches
    in flight. With costs of 0, 2 and 3:

        8 blocks on 4 stages    [0, 2) [2, 4) [4, 7) [7, 8)    costs 4 4 6 5

    Where the first ones cost something else, each stage, from the last on, gets as many blocks as
    the least time allows that a slowest stage can have.

    Args:
        costs: of blocks, and extra costs of the ends.
        n_layers: blocks, at least one per stage.
        n_stages: on all ranks of a pipeline.
        n_ranks: of a pipeline; stage s is on rank s % n_ranks.
    """
    assert n_layers >= n_stages >= n_ranks
    if costs.dense[0] and costs.dense[1] != costs.block:
        return _filled_stages(costs, n_layers, n_stages)
    n_blocks = [1] * n_stages
    stage_costs = [costs.block] * n_stages
    stage_costs[0] += costs.first
    stage_costs[-1] += costs.last
    rank_costs = [sum(stage_costs[rank::n_ranks]) for rank in range(n_ranks)]
    keys = [(stage_costs[s], rank_costs[s % n_ranks], -s) for s in range(n_stages)]
    heapq.heapify(keys)
    while sum(n_blocks) < n_layers:
        chosen = -keys[0][2]
        key = stage_costs[chosen], rank_costs[chosen % n_ranks], -chosen
        if key == keys[0]:  # costs only grow, so an old key is too small
            n_blocks[chosen] += 1
            stage_costs[chosen] += costs.block
            rank_costs[chosen % n_ranks] += costs.block
        heapq.heapreplace(keys, (stage_costs[chosen], rank_costs[chosen % n_ranks], -chosen))
    return tuple(itertools.pairwise(itertools.accumulate(n_blocks, initial=0)))


def _filled_stages(costs: Costs, n_layers: int, n_stages: int) -> Stages:
    """Splits blocks of different costs, like `balanced_stages`."""

    def fill(most: int) -> Stages | None:
        end, stages = n_layers, []
        for n_before in reversed(range(n_stages)):
            first = end - 1
            while first > n_before and costs.of_stage(first - 1, end, n_layers) <= most:
                first -= 1
            if costs.of_stage(first, end, n_layers) > most:
                return None
            stages.append((first, end))
            end = first
        return tuple(reversed(stages)) if end == 0 else None

    highest = costs.of_stage(0, n_layers, n_layers)
    least = bisect.bisect_left(range(highest), True, key=lambda most: fill(most) is not None)
    stages = fill(least)
    assert stages is not None, "one stage may have all the cost"
    return stages


def is_legal(run: Run, n_ranks: int) -> bool:
    """Returns whether a run allows this number of ranks."""
    return not _find_problems(run, n_ranks) and not rules.broken_rules(run)


def _find_problems(run: Run, n_ranks: int) -> list[str]:
    parallel, micro = run.parallel, run.train.micro_batch_size
    data, rest = divmod(n_ranks, ranks_per_replica(run))
    if rest or data == 0:
        return [
            f"{n_ranks} ranks cannot be divided by parallel.tensor={parallel.tensor} x "
            f"parallel.pipeline={parallel.pipeline} x parallel.context={parallel.context}"
        ]
    problems = []
    if data % parallel.data_replicate:
        problems.append(
            f"{n_ranks} ranks have a data parallel size of {data}, which cannot be divided by "
            f"parallel.data_replicate={parallel.data_replicate}"
        )
    sharing = data // parallel.data_replicate * parallel.context
    if sharing % parallel.expert:
        problems.append(
            f"{n_ranks} ranks have {sharing} data- and context-parallel ranks in a replica, which "
            f"cannot be divided by parallel.expert={parallel.expert}"
        )
    elif run.optimizer.kind == "muon" and parallel.shards_state and run.model.n_experts:
        n_own, n_shards = run.model.n_experts // parallel.expert, sharing // parallel.expert
        if n_own % n_shards:
            problems.append(
                f"the {n_own} experts of a rank cannot be divided by the {n_shards} ranks that "
                "shard them: optimizer.kind='muon' needs whole ones"
            )
    fields = rules.batch_fields(run)
    uneven = {field: size for field, size in fields.items() if size % (micro * data)}
    for field, size in uneven.items():
        problems.append(
            f"{field}={size} cannot be divided by train.micro_batch_size={micro} x {data}, "
            f"the data parallel size of {n_ranks} ranks"
        )
    if not uneven:
        counts = {size: size // (micro * data) for size in batch_sizes(run.train)}
        refused = [size for size, count in counts.items() if not takes_micro_batches(run, count)]
        problems += [_schedule_problem(run, n_ranks, size, counts[size]) for size in refused[:1]]
    return problems


def memory_hint(run: Run) -> str:
    """Suggests ways to save memory that a run has left."""
    left = [
        *(["train.micro_batch_size=1"] if run.train.micro_batch_size > 1 else []),
        *(['parallel.recompute="block"'] if run.parallel.recompute != "block" else []),
        *(["parallel.recompute_share=1"] if run.parallel.recompute_share < 1 else []),
        *(["parallel.zero_stage=3"] if run.parallel.zero_stage < 3 else []),
    ]
    return f"{', or '.join([*left, 'more ranks'])}; trainyard plan says what fits"


def _schedule_problem(run: Run, n_ranks: int, batch_size: int, n_micro_batches: int) -> str:
    pipeline, schedule = run.parallel.pipeline, run.parallel.schedule
    condition = f"needs {pipeline} micro batches or more"
    if schedule != "1f1b":
        condition = f"needs micro batches in {n_micro_batches // pipeline} equal rounds"
    return (
        f"parallel.schedule={schedule!r} on parallel.pipeline={pipeline} {condition}, "
        f"but a batch of {batch_size} on {n_ranks} ranks is {n_micro_batches}"
    )


def _data_sizes(run: Run) -> Iterator[int]:
    """Lists every data parallel size that the run allows, smallest first."""
    micro, sizes = run.train.micro_batch_size, batch_sizes(run.train)
    most, rest = divmod(math.gcd(*rules.batch_fields(run).values()), micro)
    for data in rules.divisors(most) if not rest else []:
        sharing = data // run.parallel.data_replicate * run.parallel.context
        if data % run.parallel.data_replicate == sharing % run.parallel.expert == 0 and all(
            takes_micro_batches(run, size // (micro * data)) for size in sizes
        ):
            yield data


def _fix(run: Run, n_ranks: int) -> str:
    """Suggests the nearest number of ranks, and the nearest change for the given ranks."""
    unit = ranks_per_replica(run)
    numbers = [data * unit for data in _data_sizes(run)]
    nearest = min(numbers, key=lambda n: abs(n - n_ranks), default=0)
    fixes: list[rules.Fix] = []
    if n_ranks % unit == 0:
        fixes = ["parallel.expert"] * bool(run.model.n_experts)
        fixes += ["parallel.data_replicate", "train.global_batch_size", "train.micro_batch_size"]
        fixes += [{"train.batch_ramp": None}, *({"parallel.schedule": kind} for kind in EASIEST)]

    fix = rules.first_fix(run, fixes, lambda changed: is_legal(changed, n_ranks))
    changes = rules.describe(run, fix)
    is_near = 0 < n_ranks <= FARTHEST * nearest <= FARTHEST**2 * n_ranks
    working = [format_number(nearest, "rank")] if is_near else []
    if working or changes:
        return f"{rules.NEAREST}{', or '.join(filter(None, [*working, changes]))}"
    return f"trainyard plan --search lists layouts of {format_number(n_ranks, 'rank')}, if any"
