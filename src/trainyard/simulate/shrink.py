"""Shrinks a run to try its layout on any machine, in a minute, before the real job.

The layout keeps its axes, schedule, chunks, ZeRO, sequence and context parallelism, recomputation,
accumulation, tied weights, dropout and optimizer. Every degree becomes 2; blocks become few and
narrow. 1,024 ranks as pipeline 16 x shard 8 x tensor 8 become 8 processes, pipeline 2 x shard 2 x
tensor 2. Of the ranks that shard, 2 share experts if those of the run do. Four or five axes would
take 16 or 32 processes; instead several layouts of 8 processes together cover every pair of axes:

    pipeline, replicate, shard, tensor  pipeline x replicate x shard
                                        pipeline x replicate x tensor
                                        pipeline x shard x tensor

A ring of 2 ranks shifts keys once. Rings of 3 and 4 reveal faults of later shifts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainyard.config.load import all_fields, build_run, field_value
from trainyard.config.precisions import SCALED_COLUMNS, Precision
from trainyard.config.run import BatchRamp, Model, Optimizer, Parallel, Run, Schedule, Train
from trainyard.layout.resolve import Plan, resolve
from trainyard.topology import AXES, Topology
from trainyard.units import Length

N_STEPS = 3
DEGREE, MOST_AXES = 2, 3
RING_DEGREES = (3, 4)
MOST_BLOCKS = 4
MOST_MICRO_BATCHES, MOST_SEQUENCES = 4, 2


@dataclass(frozen=True)
class LayoutCheck:
    """A small run, and the layouts to compare with the single device."""

    topology: Topology
    """Ranks along each axis of the run itself."""
    alone: Run
    """The small run on a single device."""
    layouts: tuple[Run, ...]
    """The same, sharded."""
    topologies: tuple[Topology, ...]
    """Ranks along each axis of each layout."""
    changes: dict[str, str]
    """The reductions, in words, by section of the run file."""

    @property
    def n_ranks(self) -> int:
        """Processes of each layout except the final rings."""
        return self.topologies[0].n_ranks

    @property
    def n_rings(self) -> int:
        """How many layouts at the end are rings of more than two ranks."""
        return sum(topology.context > DEGREE for topology in self.topologies)


def plan_layout_check(run: Run, n_ranks: int | None = None) -> LayoutCheck:
    """Shrinks a run to at most 8 processes, and its model to train in seconds.

    Args:
        run: the run.
        n_ranks: the layout's ranks; absent: the fewest that the run allows, plus one more to
            shard over if it shards.

    Raises:
        ConfigError: the run does not allow this number of ranks.
    """
    plan = resolve(run, n_ranks)
    axes = [axis for axis in AXES if getattr(plan.topology, axis) > 1]
    if n_ranks is None and run.parallel.shards_state and "shard" not in axes:
        axes = [axis for axis in AXES if axis in (*axes, "shard")]
    # The same batch in every layout, so that there is one run on a single device.
    n_data = DEGREE ** len({"replicate", "shard"}.intersection(axes))
    alone = Run(
        model=_shrink_model(run, plan),
        train=_shrink_train(run, plan, n_data),
        optimizer=_shrink_optimizer(run),
        schedule=_shrink_schedule(run),
        parallel=Parallel(zero_stage=0),
        precision=Precision(kind="fp32", fp8=run.precision.fp8),
    )
    cuts = [(cut, DEGREE) for cut in cover_pairs(axes)]
    if _has_ring(run):
        cuts += [(("context",), degree) for degree in RING_DEGREES]
    layouts = [alone.model_copy(update={"parallel": _cut(run, *cut)}) for cut in cuts]
    # Validated, as a copy is not.
    layouts = [build_run(layout.model_dump()) for layout in layouts]
    return LayoutCheck(
        topology=plan.topology,
        alone=alone,
        layouts=tuple(layouts),
        topologies=tuple(
            resolve(layout, degree ** len(cut)).topology
            for layout, (cut, degree) in zip(layouts, cuts, strict=True)
        ),
        changes=_changes(run, alone),
    )


def cover_pairs(axes: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns the fewest sets of three axes that cover every pair; few axes are one set."""
    if len(axes) <= MOST_AXES:
        return [tuple(axes)]
    wanted = [set(pair) for pair in itertools.combinations(axes, 2)]
    candidates = list(itertools.combinations(axes, MOST_AXES))
    for n_sets in range(2, len(candidates) + 1):
        for chosen in itertools.combinations(candidates, n_sets):
            if all(any(pair <= set(each) for each in chosen) for pair in wanted):
                return list(chosen)
    raise AssertionError("all sets together have every pair")


def _has_ring(run: Run) -> bool:
    return run.parallel.context > 1 and run.parallel.context_method == "ring"


def _cut(run: Run, axes: tuple[str, ...], degree: int) -> Parallel:
    """Keeps some axes, and removes settings of the others."""
    parallel = run.parallel
    kept = ("zero_stage", "recompute", "recompute_share")
    chosen: dict[str, Any] = {name: getattr(parallel, name) for name in kept}
    if "pipeline" in axes:
        chunks = min(parallel.chunks, DEGREE)
        chosen |= {"pipeline": degree, "chunks": chunks, "schedule": parallel.schedule}
    if "replicate" in axes:
        chosen |= {"data_replicate": degree}
    if "context" in axes:
        chosen |= {"context": degree, "context_method": parallel.context_method}
    if parallel.expert > 1 and degree == DEGREE and {"shard", "context"}.intersection(axes):
        chosen |= {"expert": degree}
    if "tensor" in axes:
        chosen |= {"tensor": degree, "sequence": parallel.sequence}
    return Parallel(**chosen)


def _shrink_model(run: Run, plan: Plan) -> Model:
    # Large initial weights, so that every path matters to the loss; a vocabulary with padding.
    width = SCALED_COLUMNS * (DEGREE if run.precision.formats.scales_columns else 1)
    length = 24 if _has_ring(run) else 16  # in each ring, two equal parts a rank
    small = {"d_model": width, "d_ff": 64, "sequence_length": length, "init_std": 0.2}
    # Enough heads to shard keys and values over two axes, or one that tensor ranks share.
    model, n_heads = run.model, 4 if run.model.n_key_value_heads == run.model.n_heads else 8
    is_plain = model.n_heads * model.d_head == model.d_model
    d_head = width // n_heads if is_plain else 2 * width // n_heads
    n_shared = 1 if run.parallel.tensor > model.n_key_value_heads else 4
    small |= {"n_heads": n_heads, "n_key_value_heads": n_shared, "d_head": d_head}
    vocabulary = {"vocabulary_size": 90, "vocabulary_multiple": 8}
    if model.attention_within_documents:  # of few kinds of tokens, many end a document
        vocabulary |= {"vocabulary_size": 10, "end_of_document_id": 3}
    small |= {"n_layers": _few_layers(run, plan), **_few_experts(model)}
    if model.parametrization != "standard":  # all multipliers differ from 1
        small |= {"base_d_model": width // 2, "base_n_layers": 1}
    return model.model_copy(update=small | vocabulary)


def _few_experts(model: Model) -> dict[str, Any]:
    """Returns 8 experts, in groups if the model's are, and one dense block if it has any."""
    if not model.n_experts:
        return {}
    groups = 4 if model.n_expert_groups > 1 else 1
    is_limited = model.n_active_groups < model.n_expert_groups
    return {
        "n_experts": 8,
        "n_active_experts": min(model.n_active_experts, 2),
        "d_expert": 32,
        "n_shared_experts": min(model.n_shared_experts, 2),
        "n_dense_blocks": min(model.n_dense_blocks, 1),
        "n_expert_groups": groups,
        "n_active_groups": 2 if is_limited else groups,
    }


def _few_layers(run: Run, plan: Plan) -> int:
    """Counts at least one block per stage, as uneven as the run's; 5 blocks at most.

    With more, bf16 would exceed the bound of decision 013; so would some seeds, so the seed is
    fixed.
    """
    parallel, n_layers = run.parallel, run.model.n_layers
    n_stages = min(parallel.pipeline, DEGREE) * min(parallel.chunks, DEGREE)
    few = max(n_stages, min(2 * n_stages, MOST_BLOCKS))
    if len({end - start for start, end in plan.stages}) == 1:
        return min(n_layers, few)
    return few - 1 if few > n_stages else few + 1


def _shrink_train(run: Run, plan: Plan, n_data: int) -> Train:
    train = run.train
    micro = min(train.micro_batch_size, MOST_SEQUENCES)
    n_natural = train.global_batch_size // (train.micro_batch_size * plan.data_parallel_size)
    ramp = train.batch_ramp
    ramp = ramp if ramp and ramp.start < train.global_batch_size else None
    n_micro_batches = MOST_MICRO_BATCHES if ramp else min(n_natural, MOST_MICRO_BATCHES)
    batch = micro * n_data * n_micro_batches
    if ramp:  # two steps with half the batch, then the whole
        length = Length(batch, "sequences")
        ramp = BatchRamp(start=batch // 2, increment=batch // 2, length=length)
    return Train(
        micro_batch_size=micro,
        global_batch_size=batch,
        batch_ramp=ramp,
        length=Length(N_STEPS, "steps"),
        compile="never",
        z_loss=train.z_loss,
    )


def _shrink_optimizer(run: Run) -> Optimizer:
    # The gradient of the key bias is zero except for rounding; with a usual epsilon AdamW would
    # take a full step in the direction of that noise.
    clip_norm = run.optimizer.clip_norm
    clip_norm = min(clip_norm, 0.5) if math.isfinite(clip_norm) else clip_norm
    return run.optimizer.model_copy(
        update={"learning_rate": 1e-2, "epsilon": 1e-3, "clip_norm": clip_norm}
    )


def _shrink_schedule(run: Run) -> Schedule:
    return Schedule(
        kind="linear" if run.schedule.kind == "points" else run.schedule.kind,
        minimum_learning_rate=1e-3,
        warmup=Length(2, "steps"),
        decay=Length(10, "steps"),
        cooldown=Length(1, "steps"),
    )


def _changes(run: Run, small: Run) -> dict[str, str]:
    changes: dict[str, list[str]] = {}
    for field in all_fields():
        section, _, name = field.partition(".")
        old, new = field_value(run, field), field_value(small, field)
        if section in ("model", "train", "optimizer", "schedule") and old != new:
            texts = [f"{x:,}" if isinstance(x, int) else str(x) for x in (old, new)]
            changes.setdefault(section, []).append(f"{name} {' -> '.join(texts)}")
    return {section: ", ".join(texts) for section, texts in changes.items()}
