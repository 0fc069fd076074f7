"""Finds the fastest layouts of a run on a number of devices, and compares them.

A *shape* decides how work is split: tensor, context, pipeline with its schedule, and micro batch.
A *variant* of a shape decides memory: ZeRO stage, replicas, recompute. All are in one priority
queue, fastest first; only the front entry is examined:

    a shape, at a lower bound of its time   add its variants, at their predicted times
    a variant that fits                     a result
    a variant that does not                 add the next ones: those with more recomputation or
                                            sharding, which take longer

so most shapes and variants are never evaluated, and the first result is the fastest:

    A 8.0 (bound)  B 9.1 (bound)  ->  A, ZeRO 1 8.8  B 9.1 (bound)  A, ZeRO 3 9.3
    A, ZeRO 1 does not fit        ->  B 9.1 (bound)  A, ZeRO 3 9.3  A, ZeRO 1, attention 9.4  ...
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from trainyard.architecture import matmuls, padded_vocabulary_size, parameter_count
from trainyard.config import rules
from trainyard.config.load import field_value
from trainyard.config.run import Run, default_zero_stage
from trainyard.planning import saving
from trainyard.planning.batches import batch_sizes
from trainyard.planning.flops import matmul_flops, model_flops_per_token
from trainyard.planning.hardware import Machine
from trainyard.planning.layout import (
    RECOMPUTE,
    Stages,
    find_stages,
    ranks_per_replica,
    takes_micro_batches,
)
from trainyard.planning.memory import RankMemory, busiest_memory, rank_memory
from trainyard.planning.resolve import Plan, resolve
from trainyard.planning.shapes import FASTEST, list_shapes
from trainyard.planning.time import StepTime, step_time
from trainyard.topology import Topology

USABLE_SHARE = 0.98
"""Share of the nominal memory: drivers reserve up to 2 per cent."""
SURE_SHARE = 0.9
"""Share of a time without data parallel communication: pipelines of one kind differ by less."""
SPARING: rules.Changes = {"zero_stage": 3, "data_replicate": 1, "recompute": "block"}
"""The variant of a shape with least memory."""
FIELDS = (
    "parallel.tensor",
    "parallel.sequence",
    "parallel.pipeline",
    "parallel.chunks",
    "parallel.schedule",
    "parallel.context",
    "parallel.context_method",
    "parallel.zero_stage",
    "parallel.data_replicate",
    "parallel.recompute",
    "train.micro_batch_size",
)
"""Fields that a search sets."""
SAVINGS: tuple[rules.Fix, ...] = (
    "train.micro_batch_size",
    {"parallel.recompute": "attention"},
    {"parallel.recompute": "block"},
    {"parallel.zero_stage": 3},
    {"train.micro_batch_size": 1, "parallel.recompute": "attention"},
    {"train.micro_batch_size": 1, "parallel.recompute": "block"},
    {"train.micro_batch_size": 1, "parallel.recompute": "block", "parallel.zero_stage": 3},
)
"""Changes that save memory on the same devices, the smallest first."""
MOST_TIMES_AS_MANY = 64
"""Largest multiple of the device count to try."""
FAMILY_FIELDS = tuple(
    name for name in FIELDS if name not in ("parallel.sequence", "parallel.chunks")
)
"""Of candidates equal in these, only the fastest is listed."""


@dataclass(frozen=True)
class Candidate:
    """A run with another layout, and its cost."""

    run: Run
    plan: Plan
    memory: RankMemory
    """Of the largest rank."""
    time: StepTime

    def changes_from(self, run: Run) -> rules.Changes:
        """Returns the fields of a layout that differ from another run's."""
        return rules.differences(run, {name: field_value(self.run, name) for name in FIELDS})


@dataclass(frozen=True)
class Remedy:
    """A change that makes a run fit."""

    change: str
    """As command-line arguments."""
    candidate: Candidate

    @property
    def device_seconds(self) -> float:
        """Cost of a step."""
        return self.candidate.time.seconds * self.candidate.plan.n_ranks


def predict(run: Run, machine: Machine, n_devices: int) -> Candidate:
    """Plans a run on a machine.

    Raises:
        ConfigError: it does not allow this number of devices.
    """
    plan = resolve(run, n_devices)
    memory = busiest_memory(run, plan, on_gpu=is_gpu(machine))
    return Candidate(run, plan, memory, step_time(run, plan, machine))


def is_gpu(machine: Machine) -> bool:
    """Returns whether the devices are accelerators with memory of their own."""
    return machine.device.name != "CPU"


def usable_bytes(machine: Machine) -> int | None:
    """Returns a device's memory without the driver's share; None if unknown."""
    return None if machine.memory_bytes is None else int(USABLE_SHARE * machine.memory_bytes)


def fits(memory: RankMemory, machine: Machine) -> bool:
    """Returns whether a rank fits in memory; True if unknown."""
    usable = usable_bytes(machine)
    return usable is None or memory.peak_bytes <= usable


def search(run: Run, machine: Machine, n_devices: int, most: int = 10) -> list[Candidate]:
    """Finds the layouts that fit with the shortest steps, fastest first.

    Args:
        run: keeps its batch, model and precision.
        machine: the devices.
        n_devices: used by each candidate.
        most: how many to find; those that only differ in chunks or sequence count once.
    """
    usable = usable_bytes(machine)
    if usable is not None and least_state_bytes(run) > n_devices * usable:
        return []
    shapes = list(list_shapes(run, machine, n_devices))
    if not shapes:
        return []
    queue = _Queue(machine, resolve(shapes[0], n_devices))
    queue.add(shapes)
    found: dict[tuple[object, ...], Candidate] = {}
    while queue and len(found) < most:
        candidate = queue.pop()
        if candidate is not None:
            family = tuple(field_value(candidate.run, name) for name in FAMILY_FIELDS)
            found.setdefault(family, candidate)
    return sorted(found.values(), key=lambda candidate: candidate.time.seconds)


def find_remedies(run: Run, machine: Machine, n_devices: int) -> list[Remedy]:
    """Lists changes that make a run fit, cheapest first; empty if none was found.

    They are the smallest change and the fastest layout on the same devices; if none fits there, the
    fastest layout on the smallest multiple of them.
    """

    def works(changed: Run) -> bool:
        return is_legal(changed, n_devices) and fits(
            predict(changed, machine, n_devices).memory, machine
        )

    changes = rules.first_fix(run, SAVINGS, works)
    found = [predict(rules.change(run, changes), machine, n_devices)] if changes else []
    found += search(run, machine, n_devices, most=1) or _on_more_devices(run, machine, n_devices)
    remedies = {_describe(run, candidate, n_devices): candidate for candidate in found}
    return sorted(
        (Remedy(change, candidate) for change, candidate in remedies.items()),
        key=lambda remedy: remedy.device_seconds,
    )


def hint_where_none_fits(run: Run, machine: Machine, n_devices: int) -> str:
    """Returns a hint with the number of devices on which a layout of a run fits."""
    without_ramp = rules.change(run, {"train.batch_ramp": None})
    if run.train.batch_ramp and search(without_ramp, machine, n_devices, most=1):
        return "train.batch_ramp=none: its first batches are too small for these ranks"
    for candidate in _on_more_devices(run, machine, n_devices):
        return f"one fits on {_describe(run, candidate, n_devices)}"
    return "a smaller model, or devices with more memory"


def _on_more_devices(run: Run, machine: Machine, n_devices: int) -> list[Candidate]:
    """Finds the fastest layout that fits on the smallest multiple of the devices, if any.

    The devices fill nodes, or equal parts of one.
    """
    usable, node = usable_bytes(machine), machine.devices_per_node
    if usable is None:
        return []
    factor = math.ceil(least_state_bytes(run) / (n_devices * usable))
    tried = 0
    for n in range(factor * n_devices, MOST_TIMES_AS_MANY * n_devices + 1, n_devices):
        if n < 2 * tried or (n % node and node % n):
            continue
        tried = n
        if found := search(run, machine, n, most=1):
            return found
    return []


def _describe(run: Run, candidate: Candidate, n_devices: int) -> str:
    text = rules.describe(run, candidate.changes_from(run), ", ")
    n = candidate.plan.n_ranks
    more = f"{n:,} devices" if n != n_devices else ""
    return " with ".join(filter(None, [more, text]))


def least_state_bytes(run: Run) -> int:
    """Returns the least memory of weights and optimizer, over all devices."""
    padded = padded_vocabulary_size(run.model)
    return saving.checkpoint_bytes(run, parameter_count(run.model, padded))


def explain_loss(first: Candidate, other: Candidate, most: int = 2) -> str:
    """Describes which parts of a step take longer than in the first, in per cent of its step.

    Also names the largest gain, if any, so that the figures add up.
    """
    more = {
        part: (seconds - first.time.parts.get(part, 0.0)) / first.time.seconds
        for part, seconds in other.time.parts.items()
    }
    worst = sorted(((share, part) for part, share in more.items() if share >= 5e-4), reverse=True)
    texts = [f"{part} +{share:.1%}" for share, part in worst[:most]]
    best, part = min((share, part) for part, share in more.items())
    if texts and best <= -5e-3:
        texts.append(f"though {part} {best:.1%}")
    return ", ".join(texts) or "as fast"


def is_legal(run: Run, n_devices: int) -> bool:
    """Returns whether a run allows this number of devices."""
    data, rest = divmod(n_devices, ranks_per_replica(run))
    if rest or data == 0 or data % run.parallel.data_replicate:
        return False
    step = run.train.micro_batch_size * data
    return (
        all(size % step == 0 for size in rules.batch_fields(run).values())
        and all(takes_micro_batches(run, size // step) for size in batch_sizes(run.train))
        and not rules.broken_rules(run)
    )


@dataclass(order=True)
class _QueueEntry:
    """A shape or a variant in the queue."""

    seconds: float
    """Predicted; for a shape, a lower bound with a small margin."""
    number: int
    """Insertion order, to break ties."""
    run: Run = field(compare=False)
    plan: Plan | None = field(compare=False, default=None)
    """None for a shape."""
    time: StepTime | None = field(compare=False, default=None)


class _Queue:
    """Priority queue of variants that may fit, fastest first.

    Args:
        machine: the devices.
        plan: of any variant; lengths, batches and devices are common to all.
    """

    def __init__(self, machine: Machine, plan: Plan) -> None:
        self._machine, self._any_plan = machine, plan
        self._stages: dict[object, Stages] = {}
        self._entries: list[_QueueEntry] = []
        self._numbers = itertools.count()
        self._seen: set[tuple[object, ...]] = set()
        self._can_fit: dict[object, bool] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, shapes: Iterable[Run]) -> None:
        """Adds shapes, each at an approximate lower bound of its variants' times.

        Shapes that only differ in the pipeline take about as long for a micro batch, so pricing one
        bounds all.
        """
        kinds: dict[object, list[Run]] = {}
        for shape in shapes:
            parallel, micro = shape.parallel, shape.train.micro_batch_size
            kind = (parallel.tensor, parallel.context, parallel.context_method, micro)
            kinds.setdefault(kind, []).append(shape)
        for alike in kinds.values():
            least = [self._least_seconds(shape) for shape in alike]
            place = least.index(min(least))
            example = alike[place]
            time = step_time(example, self._plan(example), self._machine)
            priced = time.seconds - time.parts["data"] - time.parts["optimizer"]
            factor = max(1.0, SURE_SHARE * priced / least[place])
            for seconds, shape in zip(least, alike, strict=True):
                entry = _QueueEntry(factor * seconds, next(self._numbers), shape)
                heapq.heappush(self._entries, entry)

    def pop(self) -> Candidate | None:
        """Pops the first; returns None unless it is a variant that fits."""
        entry = heapq.heappop(self._entries)
        if entry.plan is None or entry.time is None:
            self._add_first_variants(entry.run)
            return None
        if self._fits(entry.run, entry.plan):
            memory = busiest_memory(entry.run, entry.plan, on_gpu=is_gpu(self._machine))
            return Candidate(entry.run, entry.plan, memory, entry.time)
        if self._can_ever_fit(entry.run):
            for changes in _less_memory(entry.run):
                self._add_changed(entry.run, changes)
        return None

    def _add_first_variants(self, shape: Run) -> None:
        """Adds the variants of a shape without recomputation."""
        data = self._any_plan.n_ranks // ranks_per_replica(shape)
        inside = self._shards_inside_a_node(shape, data)
        stages = (1, 3) if shape.parallel.pipeline > 1 and data > 1 else (1,)
        if data * shape.parallel.context == 1:  # nothing to shard
            stages = (default_zero_stage(shape.parallel.pipeline),)
        for stage in stages:
            for n_replicas in {1, data // inside} if inside else {1}:
                changes = {"parallel.zero_stage": stage, "parallel.data_replicate": n_replicas}
                self._add_changed(shape, changes)

    def _least_seconds(self, shape: Run) -> float:
        """Returns the time of only a shape's matmuls and its bubble."""
        model, parallel, train = shape.model, shape.parallel, shape.train
        machine, n_ranks = self._machine, self._any_plan.n_ranks
        peak = machine.device.peak_flops_per_second(shape.precision.kind) or math.inf
        n_tokens = train.global_batch_size * model.sequence_length
        flops = 3.0 * model.n_layers * matmul_flops(matmuls(model))
        shares = machine.efficiencies
        peak *= shares.matmul_share * shares.sustained_share
        seconds = flops * n_tokens / n_ranks / peak
        data = n_ranks // ranks_per_replica(shape)
        n_passes = train.global_batch_size // train.micro_batch_size // data * parallel.chunks
        bubble = (parallel.pipeline - 1) / n_passes
        return seconds * (1 + bubble / (3 if parallel.schedule == "zero_bubble" else 1))

    def _fits(self, run: Run, plan: Plan) -> bool:
        """Returns whether every rank has enough memory; most misfits fail at the first."""
        # Host memory for saving does not matter here, and is slow to compute.
        run = rules.change(run, {"checkpoint.background": False})
        on_gpu = is_gpu(self._machine)
        return all(
            fits(rank_memory(run, plan, rank, on_gpu), self._machine)
            for rank in range(plan.topology.pipeline)
        )

    def _can_ever_fit(self, run: Run) -> bool:
        """Returns whether the smallest variant of a shape fits."""
        shape = (run.train.micro_batch_size, run.parallel.model_copy(update=FASTEST))
        if shape not in self._can_fit:
            parallel = rules.change(run.parallel, SPARING)
            sparing = run.model_copy(update={"parallel": parallel})
            if rules.broken_rules(sparing):  # zero bubble does not allow all of it
                return True
            self._can_fit[shape] = self._fits(sparing, self._plan(sparing))
        return self._can_fit[shape]

    def _add_changed(self, run: Run, changes: rules.Changes) -> None:
        changed = rules.change(run, changes)
        key = tuple(field_value(changed, name) for name in FIELDS)
        if key not in self._seen and not rules.broken_rules(changed):
            self._seen.add(key)
            plan = self._plan(changed)
            time = step_time(changed, plan, self._machine)
            entry = _QueueEntry(time.seconds, next(self._numbers), changed, plan, time)
            heapq.heappush(self._entries, entry)

    def _plan(self, run: Run) -> Plan:
        """Plans a variant like `resolve`, but reuses common values."""
        parallel, n_ranks = run.parallel, self._any_plan.n_ranks
        padded = padded_vocabulary_size(run.model, parallel.tensor)
        key = (parallel.pipeline, parallel.chunks, parallel.recompute, padded)
        if key not in self._stages:
            self._stages[key] = find_stages(run, padded)
        data = n_ranks // ranks_per_replica(run)
        return replace(
            self._any_plan,
            data_parallel_size=data,
            topology=Topology(
                pipeline=parallel.pipeline,
                replicate=parallel.data_replicate,
                shard=data // parallel.data_replicate,
                context=parallel.context,
                tensor=parallel.tensor,
            ),
            stages=self._stages[key],
            padded_vocabulary_size=padded,
            n_parameters=parameter_count(run.model, padded),
            model_flops_per_token=model_flops_per_token(run.model, padded),
        )

    def _shards_inside_a_node(self, shape: Run, data: int) -> int:
        """Returns the data-parallel ranks per node, if there are several and nodes."""
        of_rank = shape.parallel.tensor * shape.parallel.context
        inside = self._machine.devices_per_node // of_rank
        return inside if 1 < inside < data and data % inside == 0 else 0


def _less_memory(run: Run) -> Iterable[rules.Changes]:
    """Lists the next variants with less memory, which take longer."""
    parallel = run.parallel
    place = RECOMPUTE.index(parallel.recompute)
    if place + 1 < len(RECOMPUTE):
        yield {"parallel.recompute": RECOMPUTE[place + 1]}
    if parallel.pipeline == 1 and 1 <= parallel.zero_stage < 3:
        yield {"parallel.zero_stage": parallel.zero_stage + 1}


def rescale(
    candidates: list[Candidate], seconds: dict[int, float]
) -> tuple[float, list[Candidate]]:
    """Calibrates predictions with measured times, and ranks again.

    Args:
        candidates: as predicted.
        seconds: measured step times by index in that list; at least one.

    Returns:
        the factor for predictions, and all candidates with new times, fastest first.
    """
    ratios = [measured / candidates[place].time.seconds for place, measured in seconds.items()]
    scale = math.exp(sum(map(math.log, ratios)) / len(ratios))
    scaled = [
        with_seconds(candidate, seconds.get(place, scale * candidate.time.seconds))
        for place, candidate in enumerate(candidates)
    ]
    return scale, sorted(scaled, key=lambda candidate: candidate.time.seconds)


def with_seconds(candidate: Candidate, seconds: float) -> Candidate:
    """Scales all parts of a candidate's time alike."""
    ratio = seconds / candidate.time.seconds
    time = replace(
        candidate.time,
        seconds=seconds,
        parts={part: ratio * each for part, each in candidate.time.parts.items()},
    )
    return replace(candidate, time=time)
