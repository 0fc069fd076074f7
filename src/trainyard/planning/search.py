"""Finds the fastest layouts of a run on a number of devices, and compares them.

A *shape* decides how work is split: tensor, context, pipeline with its schedule, and micro batch. 8
devices in nodes of 4 have, among others:

    tensor 4 x pipeline 2 (1f1b), micro batch 1        tensor 1 x pipeline 4 (interleaved, 2 chunks)
    tensor 2 x context 2 x data 2, micro batch 4       data 8, micro batch 2

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
from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainyard.architecture import matmuls, padded_vocabulary_size, parameter_count
from trainyard.config import rules
from trainyard.config.load import field_value
from trainyard.config.run import Run, default_zero_stage
from trainyard.layout.batches import batch_sizes
from trainyard.layout.flops import matmul_flops
from trainyard.layout.ranks import is_legal, ranks_per_replica, takes_micro_batches
from trainyard.layout.resolve import Plan, resolve
from trainyard.layout.sizes import checkpoint_bytes
from trainyard.planning.hardware import Machine
from trainyard.planning.memory import RankMemory, busiest_memory, rank_memory
from trainyard.planning.time import StepTime, step_time

CHUNKS = (2, 3, 4, 6, 8)
LARGEST_MICRO_BATCH = 16
FEWEST_TOKENS_OF_A_CONTEXT_RANK = 1024
"""Smallest shard of a sequence to propose, unless the run itself uses smaller ones."""
FASTEST: rules.Changes = {"zero_stage": 1, "data_replicate": 1, "recompute": "none"}
"""The fastest variant of a shape."""
USABLE_SHARE = 0.98
"""Share of the nominal memory: drivers reserve up to 2 per cent."""
SURE_SHARE = 0.9
"""Share of a time without data parallel communication: pipelines of one kind differ by less."""
SPARING: rules.Changes = {"zero_stage": 3, "data_replicate": 1, "recompute": "block"}
"""The variant of a shape with least memory."""
FIELDS = (
    *("parallel.tensor", "parallel.sequence"),
    *("parallel.pipeline", "parallel.chunks", "parallel.schedule"),
    *("parallel.context", "parallel.context_method"),
    *("parallel.zero_stage", "parallel.data_replicate"),
    *("parallel.recompute", "train.micro_batch_size"),
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
MORE_RECOMPUTE = {"none": "attention", "attention": "block"}
MOST_TIMES_AS_MANY = 64
"""Largest multiple of the device count to try."""
FAMILY_FIELDS = tuple(
    name for name in FIELDS if name not in ("parallel.sequence", "parallel.chunks")
)
"""Only the fastest of candidates that are equal in these is listed."""


@dataclass(frozen=True)
class Candidate:
    """A run with another layout, and its cost."""

    run: Run
    plan: Plan
    memory: RankMemory
    """Memory of the largest rank."""
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
    families: dict[tuple[object, ...], Candidate] = {}
    for candidate in _Search(run, machine, n_devices).candidates():
        family = tuple(field_value(candidate.run, name) for name in FAMILY_FIELDS)
        families.setdefault(family, candidate)
        if len(families) == most:
            break
    return sorted(families.values(), key=lambda candidate: candidate.time.seconds)


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
    return checkpoint_bytes(run, parameter_count(run.model, padded))


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


def list_shapes(run: Run, machine: Machine, n_devices: int) -> Iterator[Run]:
    """Lists every way to split the work, each as a valid run.

    Tensor ranks stay inside a node, and sequences are not split finely, unless the run itself
    does so.
    """
    model, parallel = run.model, run.parallel
    tensors = rules.divisors(math.gcd(model.most_tensor_ranks, n_devices))
    most_tensor = max(machine.devices_per_node, parallel.tensor)
    for tensor in (tensor for tensor in tensors if tensor <= most_tensor):
        for context, method in _contexts(run, n_devices // tensor):
            for pipeline in rules.divisors(n_devices // tensor // context):
                if pipeline > model.n_layers:
                    break
                changes: rules.Changes = {
                    "tensor": tensor,
                    "context": context,
                    "context_method": method,
                    "pipeline": pipeline,
                    **FASTEST,
                }
                cut = run.model_copy(update={"parallel": parallel.model_copy(update=changes)})
                yield from _shapes_of_cut(cut, n_devices)


def _contexts(run: Run, n_ranks: int) -> list[tuple[int, str]]:
    most = max(run.model.sequence_length // FEWEST_TOKENS_OF_A_CONTEXT_RANK, run.parallel.context)
    degrees = [degree for degree in rules.divisors(n_ranks) if 1 < degree <= most]
    one: list[tuple[int, str]] = [(1, run.parallel.context_method)]
    return one + list(itertools.product(degrees, ("ulysses", "ring")))


def _shapes_of_cut(cut: Run, n_devices: int) -> Iterator[Run]:
    """Lists sequence, schedules, chunks and micro batches of one split."""
    parallel = cut.parallel
    data = n_devices // ranks_per_replica(cut)
    rest, odd = divmod(math.gcd(*rules.batch_fields(cut).values()), data)
    if odd:
        return
    micro_batches = [size for size in rules.divisors(rest) if size <= LARGEST_MICRO_BATCH]
    # Sequence parallelism sends the same bytes and keeps less, so it is used wherever allowed.
    divides = cut.model.sequence_length // parallel.context % parallel.tensor == 0
    sequences = {parallel.tensor > 1 and divides}
    for sequence, (schedule, chunks) in itertools.product(sequences, _schedules(cut)):
        update = {"sequence": sequence, "schedule": schedule, "chunks": chunks}
        parallel = cut.parallel.model_copy(update=update)
        ordered = cut.model_copy(update={"parallel": parallel})
        if rules.broken_rules(ordered, batches=False):
            continue
        for size in micro_batches:
            train = cut.train.model_copy(update={"micro_batch_size": size})
            shape = ordered.model_copy(update={"train": train})
            if all(
                takes_micro_batches(shape, batch // (size * data))
                for batch in batch_sizes(cut.train)
            ):
                yield shape


def _schedules(cut: Run) -> list[tuple[str, int]]:
    """Lists schedules with numbers of chunks, without gpipe, which is 1f1b with more memory."""
    parallel = cut.parallel
    if parallel.pipeline == 1:
        return [(parallel.schedule, 1)]
    most = cut.model.n_layers // parallel.pipeline
    return [
        ("1f1b", 1),
        *(("interleaved", chunks) for chunks in CHUNKS if chunks <= most),
        *(("zero_bubble", chunks) for chunks in (1, 2) if chunks <= most),
    ]


class _Search:
    """Finds variants that fit, fastest first.

    Args:
        run: the run.
        machine: the devices.
        n_devices: their number.
    """

    def __init__(self, run: Run, machine: Machine, n_devices: int) -> None:
        self._run, self._machine, self._n_devices = run, machine, n_devices
        self._queue: list[tuple[float, int, Run, StepTime | None]] = []
        self._numbers = itertools.count()
        self._seen: set[tuple[object, ...]] = set()
        self._can_fit: dict[object, bool] = {}

    def candidates(self) -> Iterator[Candidate]:
        """Yields every variant that fits."""
        self._add_shapes()
        while self._queue:
            _, _, run, time = heapq.heappop(self._queue)
            if time is None:
                for changes in self._first_variants(run):
                    self._add_variant(run, changes)
            elif self._fits(run):
                plan = resolve(run, self._n_devices)
                memory = busiest_memory(run, plan, on_gpu=is_gpu(self._machine))
                yield Candidate(run, plan, memory, time)
            elif self._can_ever_fit(run):
                for changes in _less_memory(run):
                    self._add_variant(run, changes)

    def _add_shapes(self) -> None:
        """Adds shapes, each at an approximate lower bound of its variants' times.

        Shapes that only differ in the pipeline take about as long for a micro batch, so timing one
        bounds all.
        """
        kinds: dict[object, list[Run]] = {}
        for shape in list_shapes(self._run, self._machine, self._n_devices):
            parallel, micro = shape.parallel, shape.train.micro_batch_size
            kind = (parallel.tensor, parallel.context, parallel.context_method, micro)
            kinds.setdefault(kind, []).append(shape)
        for alike in kinds.values():
            bounds = [self._least_seconds(shape) for shape in alike]
            least, example = min(zip(bounds, alike, strict=True), key=lambda pair: pair[0])
            time = self._time(example)
            seconds = time.seconds - time.parts["data"] - time.parts["optimizer"]
            factor = max(1.0, SURE_SHARE * seconds / least)
            for bound, shape in zip(bounds, alike, strict=True):
                heapq.heappush(self._queue, (factor * bound, next(self._numbers), shape, None))

    def _first_variants(self, shape: Run) -> Iterator[rules.Changes]:
        """Lists the variants of a shape without recomputation."""
        data = self._n_devices // ranks_per_replica(shape)
        stages = (1, 3) if shape.parallel.pipeline > 1 and data > 1 else (1,)
        if data * shape.parallel.context == 1:  # nothing to shard
            stages = (default_zero_stage(shape.parallel.pipeline),)
        # Shards inside a node, if there are several of them and nodes.
        inside = self._machine.devices_per_node // shape.parallel.tensor // shape.parallel.context
        has_nodes = 1 < inside < data and data % inside == 0
        for stage in stages:
            for n_replicas in {1, data // inside} if has_nodes else {1}:
                yield {"parallel.zero_stage": stage, "parallel.data_replicate": n_replicas}

    def _least_seconds(self, shape: Run) -> float:
        """Returns the time of only a shape's matmuls and its bubble."""
        model, parallel, train = shape.model, shape.parallel, shape.train
        machine, n_ranks = self._machine, self._n_devices
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

    def _fits(self, run: Run) -> bool:
        """Returns whether every rank has enough memory; most misfits fail at the first."""
        # Host memory for saving does not matter here, and is slow to compute.
        run = rules.change(run, {"checkpoint.background": False})
        plan, on_gpu = resolve(run, self._n_devices), is_gpu(self._machine)
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
            self._can_fit[shape] = self._fits(sparing)
        return self._can_fit[shape]

    def _add_variant(self, run: Run, changes: rules.Changes) -> None:
        changed = rules.change(run, changes)
        key = tuple(field_value(changed, name) for name in FIELDS)
        if key not in self._seen and not rules.broken_rules(changed):
            self._seen.add(key)
            time = self._time(changed)
            heapq.heappush(self._queue, (time.seconds, next(self._numbers), changed, time))

    def _time(self, run: Run) -> StepTime:
        return step_time(run, resolve(run, self._n_devices), self._machine)


def _less_memory(run: Run) -> Iterator[rules.Changes]:
    """Lists the next variants with less memory, which take longer."""
    parallel = run.parallel
    if parallel.recompute in MORE_RECOMPUTE:
        yield {"parallel.recompute": MORE_RECOMPUTE[parallel.recompute]}
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
