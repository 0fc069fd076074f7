"""How ranks and blocks are dealt out: what a number of ranks allows, and the stages of a pipeline.

Of 64 ranks with tensor 8 and pipeline 2, 64 / 16 = 4 are left for data. A step of 24 sequences in
micro batches of 2 then is 24 / (2 x 4) = 3 micro batches for each of the 4, and the schedule of the
pipeline must be able to take 3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trainyard.config import rules
from trainyard.config.run import Run
from trainyard.errors import ConfigError
from trainyard.plan.batches import batch_sizes
from trainyard.topology import Topology
from trainyard.units import format_number

Stages = tuple[tuple[int, int], ...]
FARTHEST = 8
"""How many times the ranks there are, or a part of them, are named in their place."""
MOST_TENSOR = 8
"""Ranks that are proposed to share a layer: those of a usual node."""


def find_topology(run: Run, n_ranks: int | None) -> Topology:
    """Deals ranks out to the axes.

    Args:
        run: which axes but the data parallel ones it fixes.
        n_ranks: all processes; absent: the fewest with which the run can be.

    Raises:
        ConfigError: the ranks, or the batch on them, cannot be divided as asked.
    """
    parallel = run.parallel
    if n_ranks is None:
        fewest = next(iter(_data_sizes(run)), parallel.data_replicate)
        n_ranks = ranks_per_replica(run) * fewest
    problems = _problems(run, n_ranks)
    if problems:
        raise ConfigError("\n".join(problems), _remedies(run, n_ranks))
    return Topology(
        pipeline=parallel.pipeline,
        replicate=parallel.data_replicate,
        shard=n_ranks // ranks_per_replica(run) // parallel.data_replicate,
        context=parallel.context,
        tensor=parallel.tensor,
    )


def ranks_per_replica(run: Run) -> int:
    """Counts the ranks that share the same sequences."""
    return run.parallel.tensor * run.parallel.pipeline * run.parallel.context


def takes_micro_batches(run: Run, n_micro_batches: int) -> bool:
    """Returns whether the pipeline's schedule can order so many micro batches.

    The conditions are those of `torch.distributed.pipelining` 2.11 to 2.13.
    """
    pipeline = run.parallel.pipeline
    if pipeline == 1 or run.parallel.schedule == "gpipe":
        return n_micro_batches >= 1
    if run.parallel.schedule == "1f1b":
        return n_micro_batches >= pipeline
    n_rounds = max(1, n_micro_batches // pipeline)
    return n_micro_batches % n_rounds == 0


def find_stages(run: Run, padded_vocabulary_size: int) -> Stages:
    """Cuts the stack of blocks for the pipeline, by the FLOP of training on one token.

    Returns:
        the first block of each stage and the one after its last; stage s is on pipeline rank
        s % parallel.pipeline.
    """
    model, parallel = run.model, run.parallel
    D, T, V = model.d_model, model.sequence_length, padded_vocabulary_size
    scores = 2 * T * D  # a token sees half of the sequence on average
    forward = 8 * D * D + 4 * D * model.d_ff + scores
    again = {"none": 0, "attention": 6 * D * D + scores, "block": forward}[parallel.recompute]
    costs = Costs(
        first=3 * D,  # adds the position to an embedding, and the gradient to a row of each
        block=3 * forward + again,
        last=3 * 2 * D * V,
    )
    n_stages = parallel.pipeline * parallel.chunks
    return balanced_stages(costs, model.n_layers, n_stages, parallel.pipeline)


@dataclass(frozen=True)
class Costs:
    """What stages do for one token, in any unit."""

    first: int
    """The first stage besides its blocks: the embedding."""
    block: int
    last: int
    """The last stage besides its blocks: the head and the loss."""


def balanced_stages(costs: Costs, n_layers: int, n_stages: int, n_ranks: int) -> Stages:
    """Cuts the stack of blocks so that the slowest stage is as fast as it can be.

    Blocks cost the same, so giving each in turn to the stage that has least is exact. Of stages
    that have the same, the one on the rank with less to do gets it, then the later one, whose rank
    holds fewer micro batches in flight. With costs of 0, 2 and 3:

        8 blocks on 4 stages    [0, 2) [2, 4) [4, 7) [7, 8)    costs 4 4 6 5

    Args:
        costs: of blocks, and of what the ends do besides.
        n_layers: blocks, one for each stage at least.
        n_stages: of all ranks of a pipeline.
        n_ranks: of a pipeline; stage s is on rank s % n_ranks.
    """
    assert n_layers >= n_stages >= n_ranks
    n_blocks = [1] * n_stages
    stage_costs = [costs.block] * n_stages
    stage_costs[0] += costs.first
    stage_costs[-1] += costs.last
    rank_costs = [sum(stage_costs[rank::n_ranks]) for rank in range(n_ranks)]
    for _ in range(n_layers - n_stages):
        chosen = min(range(n_stages), key=lambda s: (stage_costs[s], rank_costs[s % n_ranks], -s))
        n_blocks[chosen] += 1
        stage_costs[chosen] += costs.block
        rank_costs[chosen % n_ranks] += costs.block
    return tuple(itertools.pairwise(itertools.accumulate(n_blocks, initial=0)))


def _problems(run: Run, n_ranks: int) -> list[str]:
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
    """Lists every data parallel size with which the run can be, smallest first."""
    micro, sizes = run.train.micro_batch_size, batch_sizes(run.train)
    most, rest = divmod(math.gcd(*rules.batch_fields(run).values()), micro)
    for data in rules.divisors(most) if not rest else []:
        if data % run.parallel.data_replicate == 0 and all(
            takes_micro_batches(run, size // (micro * data)) for size in sizes
        ):
            yield data


def _remedies(run: Run, n_ranks: int) -> str:
    """Names the nearest number of ranks and the nearest values that work with those there are.

    A number of ranks that is far off is named only where nothing else works.
    """
    unit = ranks_per_replica(run)
    numbers = rules.nearest((data * unit for data in _data_sizes(run)), n_ranks)[:1]
    ranks = [format_number(number, "rank") for number in numbers]
    is_near = bool(numbers) and n_ranks <= FARTHEST * numbers[0] <= FARTHEST**2 * n_ranks
    working = ranks if is_near else []
    data, rest = divmod(n_ranks, unit)
    if not rest:
        working += filter(None, (_first_working(run, n_ranks, way) for way in _ways(run, data)))
        working = working or list(filter(None, [_first_working(run, n_ranks, _cuts(run, data))]))
    working = working or ranks
    if working:
        return f"nearest that works: {', or '.join(working)}"
    data = max(1, round(data / run.parallel.data_replicate)) * run.parallel.data_replicate
    multiple = run.train.micro_batch_size * data * run.parallel.pipeline
    return f"{data * unit} ranks work with batches in multiples of {multiple} sequences"


def _first_working(run: Run, n_ranks: int, way: Iterable[rules.Changes]) -> str:
    for changes in way:
        changed = rules.change(run, changes)
        if not rules.broken_rules(changed) and not _problems(changed, n_ranks):
            return rules.describe(run, changes)
    return ""


def _ways(run: Run, data: int) -> list[Iterable[rules.Changes]]:
    """Lists the ways to fit a run to its ranks, each as changes to try, nearest first."""
    train, parallel = run.train, run.parallel
    replicas = rules.nearest(rules.divisors(data), parallel.data_replicate)
    step = train.micro_batch_size * data
    batches = rules.nearest_multiples(step, train.global_batch_size, n_beyond=parallel.pipeline)
    common = math.gcd(*rules.batch_fields(run).values())
    micro_batches = rules.nearest(rules.divisors(common), train.micro_batch_size)
    return [
        ({"parallel.data_replicate": number} for number in replicas),
        ({"train.global_batch_size": size} for size in batches),
        ({"train.micro_batch_size": size} for size in micro_batches),
        [{"train.batch_ramp": None}] if train.batch_ramp else [],
        ({"parallel.schedule": schedule} for schedule in ("1f1b", "gpipe")),
    ]


def _cuts(run: Run, data: int) -> Iterator[rules.Changes]:
    """Lists ways to share the model among more ranks, the fewest first: fewer share the data.

    Those that need no batch ramp are last.
    """
    model, parallel = run.model, run.parallel
    tensors = [n for n in rules.divisors(data * parallel.tensor) if n <= MOST_TENSOR]
    pipelines = [n for n in rules.divisors(data * parallel.pipeline) if n <= model.n_layers]
    pairs = itertools.product(tensors, pipelines)
    ordered = sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[1]))
    for ramp, (tensor, pipeline) in itertools.product((run.train.batch_ramp, None), ordered):
        if tensor >= parallel.tensor and pipeline >= parallel.pipeline:
            changes = {"parallel.tensor": tensor, "parallel.pipeline": pipeline}
            if pipeline > 1 and parallel.zero_stage == 2:
                changes["parallel.zero_stage"] = 1
            yield {**changes, "train.batch_ramp": ramp}
