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
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from trainyard.architecture import (
    block_groups,
    block_layers,
    matmuls,
    padded_vocabulary_size,
    parameter_count,
)
from trainyard.config import rules
from trainyard.config.load import field_value
from trainyard.config.run import Run
from trainyard.layout.batches import batch_sizes
from trainyard.layout.ranks import is_legal, ranks_per_replica, takes_micro_batches
from trainyard.layout.resolve import Plan, resolve
from trainyard.layout.sizes import checkpoint_bytes
from trainyard.planning.hardware import Machine
from trainyard.planning.memory import RankMemory, busiest_memory, rank_memory
from trainyard.planning.time import StepTime, seconds_of_passes, step_time
from trainyard.planning.timeline import bubble_passes
from trainyard.units import format_bytes

CHUNKS = (2, 3, 4, 6, 8)
LARGEST_MICRO_BATCH = 16
FEWEST_TOKENS_OF_A_CONTEXT_RANK = 1024
"""Smallest shard of a sequence to propose, unless the run itself uses smaller ones."""
FASTEST: rules.Changes = {
    **{"zero_stage": 1, "data_replicate": 1, "recompute": "none", "recompute_share": 1.0}
}
"""The fastest variant of a shape."""
MANY = 1024
"""Times as many micro batches, so that what a step does once hardly counts."""
USABLE_SHARE = 0.98
"""Share of the nominal memory: drivers reserve up to 2 per cent."""
SURE_SHARE = 0.9
"""Share of the time of recomputation that it surely adds: its launches may be hidden."""
FIELDS = (
    *("parallel.tensor", "parallel.sequence"),
    *("parallel.pipeline", "parallel.chunks", "parallel.schedule"),
    *("parallel.context", "parallel.context_method", "parallel.expert"),
    *("parallel.zero_stage", "parallel.data_replicate"),
    *("parallel.recompute", "parallel.recompute_share", "train.micro_batch_size"),
)
"""Fields that a search sets."""
_ATTENTION, _BLOCK = (
    {"parallel.recompute": part, "parallel.recompute_share": 1.0} for part in ("attention", "block")
)
SAVINGS: tuple[rules.Fix, ...] = (
    {"checkpoint.background": False},
    "train.micro_batch_size",
    {"parallel.zero_stage": 2},
    _ATTENTION,
    _BLOCK,
    {"parallel.zero_stage": 3},
    {"train.micro_batch_size": 1, **_ATTENTION},
    {"train.micro_batch_size": 1, **_BLOCK},
    {"train.micro_batch_size": 1, "parallel.zero_stage": 3, **_BLOCK},
)
"""Changes that save memory on the same devices, the smallest first."""
RAMP_SLOWDOWN = 1.05
"""Steps at the full batch may be so much slower before a batch ramp is dropped."""
MOST_TIMES_AS_MANY = 64
"""Largest multiple of the device count to try."""
_DETAILS = ("parallel.sequence", "parallel.chunks", "parallel.recompute_share")
FAMILY_FIELDS = tuple(name for name in FIELDS if name not in _DETAILS)
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
        fields = (*FIELDS, "train.batch_ramp", "checkpoint.background")
        return rules.differences(run, {name: field_value(self.run, name) for name in fields})


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
    memory = busiest_memory(run, plan, is_gpu(machine))
    return Candidate(run, plan, memory, step_time(run, plan, machine))


def as_dense(run: Run) -> Run:
    """Returns a run of experts with one MLP in their place, of as many FLOP a token."""
    model = run.model
    plain = rules.change(model, {"n_experts": 0, "n_dense_blocks": 0})
    n_values = sum(
        n * layer.values_per_token
        for kind, n in block_groups(model, (0, model.n_layers))
        for layer in block_layers(kind).values()
        if layer.name.startswith("mlp.")
    )
    of_a_feature = sum(layer.values_per_token for layer in matmuls(plain, "mlp")) // model.d_ff
    multiple = 64 * run.parallel.tensor
    d_ff = max(1, round(n_values / model.n_layers / of_a_feature / multiple)) * multiple
    changes = {"model": plain.model_copy(update={"d_ff": d_ff}), "parallel.expert": 1}
    return rules.change(run, changes)


def is_gpu(machine: Machine) -> bool:
    """Returns whether the devices are accelerators with memory of their own."""
    return machine.device.name != "CPU"


def usable_bytes(machine: Machine) -> int | None:
    """Returns a device's memory without the driver's share; None if unknown."""
    return None if machine.memory_bytes is None else int(USABLE_SHARE * machine.memory_bytes)


def node_bytes(memory: RankMemory, machine: Machine, n_devices: int) -> int:
    """Returns the host memory of a node's processes."""
    n_processes = min(machine.devices_per_node, n_devices)
    return n_processes * memory.process_bytes(on_gpu=is_gpu(machine))


def fits(memory: RankMemory, machine: Machine, n_devices: int) -> bool:
    """Returns whether ranks fit in the memory of devices and of their nodes; True if unknown."""
    usable = usable_bytes(machine)
    fits_device = usable is None or memory.peak_bytes <= usable
    return fits_device and node_bytes(memory, machine, n_devices) <= machine.host_memory_bytes


def search(
    run: Run,
    machine: Machine,
    n_devices: int,
    most: int = 10,
    most_seconds: float = math.inf,
) -> list[Candidate]:
    """Finds the layouts that fit with the shortest steps, fastest first.

    Args:
        run: keeps its batch, model and precision.
        machine: the devices.
        n_devices: used by each candidate.
        most: how many to find; those that only differ in chunks or sequence count once.
        most_seconds: of a step.
    """
    usable = usable_bytes(machine)
    if usable is not None and least_state_bytes(run) > n_devices * usable:
        return []
    families: dict[tuple[object, ...], Candidate] = {}
    for candidate in _Search(run, machine, n_devices).candidates(most_seconds):
        family = tuple(field_value(candidate.run, name) for name in FAMILY_FIELDS)
        families.setdefault(family, candidate)
        if len(families) == most:
            break
    return sorted(families.values(), key=attrgetter("time.seconds"))


def search_with_ramp(run: Run, machine: Machine, n_devices: int, most: int) -> list[Candidate]:
    """Finds layouts like `search`, of the run without its batch ramp if that is much faster.

    The smallest batch of a ramp limits the ranks that share it.
    """
    steady = rules.change(run, {"train.batch_ramp": None})
    found = search(steady, machine, n_devices, most)
    shared = search(run, machine, n_devices, most) if found and run != steady else []
    is_fast = shared and shared[0].time.seconds <= RAMP_SLOWDOWN * found[0].time.seconds
    return shared if is_fast else found


def find_remedies(run: Run, machine: Machine, n_devices: int) -> list[Remedy]:
    """Lists changes that make a run fit, cheapest first; empty if none was found.

    They are the smallest change and the fastest layout on the same devices, or else on the smallest
    multiple of them.
    """

    def works(changed: Run) -> bool:
        return is_legal(changed, n_devices) and fits(
            predict(changed, machine, n_devices).memory, machine, n_devices
        )

    changes = first_saving(run, SAVINGS, works)
    found = [predict(rules.change(run, changes), machine, n_devices)] if changes else []
    found += _on_fewest_devices(run, machine, n_devices)
    remedies = {_describe(run, candidate, n_devices): candidate for candidate in found}
    return sorted(itertools.starmap(Remedy, remedies.items()), key=attrgetter("device_seconds"))


def first_saving(
    run: Run, savings: Sequence[rules.Fix], works: Callable[[Run], bool]
) -> rules.Changes:
    """Returns the first changes that work, with the fewest recomputed blocks; empty if none do."""
    changes = rules.first_fix(run, savings, works)
    return _fewest_recomputed(run, changes, works) if "parallel.recompute" in changes else changes


def _fewest_recomputed(
    run: Run, changes: rules.Changes, works: Callable[[Run], bool]
) -> rules.Changes:
    """Returns changes with the smallest share of recomputed blocks that works; empty if none."""
    n = math.ceil(run.model.n_layers / run.parallel.pipeline / run.parallel.chunks)
    shares = [{**changes, "parallel.recompute_share": round(k / n, 3)} for k in range(1, n + 1)]

    def fewer_work(changes: rules.Changes) -> bool:
        return works(rules.change(run, changes))

    if not fewer_work(shares[-1]):
        return {}
    return shares[bisect_left(shares, True, key=fewer_work)]


def hint_where_none_fits(run: Run, machine: Machine, n_devices: int) -> str:
    """Returns a hint with the number of devices on which a layout of a run fits."""
    for candidate in _on_fewest_devices(run, machine, n_devices):
        if candidate.plan.n_ranks == n_devices:
            return "checkpoint.background=false: its copies do not fit in host memory"
        return f"one fits on {_describe(run, candidate, n_devices)}"
    direct = rules.change(run, {"checkpoint.background": False})
    roomy = replace(machine, host_memory_bytes=math.inf)
    for candidate in search(direct, roomy, n_devices, most=1):
        needed = format_bytes(node_bytes(candidate.memory, machine, n_devices))
        return f"nodes with {needed} of host memory, which the fastest layout needs without copies"
    return "a smaller model, or devices with more memory"


def _on_fewest_devices(run: Run, machine: Machine, n_devices: int) -> list[Candidate]:
    """Finds the fastest layout that fits on the smallest multiple of the devices, if any.

    It fills nodes, or equal parts of one, and saves in the foreground where else host memory is
    short. Where it then still is, more devices would not help.
    """
    usable, node = usable_bytes(machine) or math.inf, machine.devices_per_node
    factor = max(1, math.ceil(least_state_bytes(run) / (n_devices * usable)))
    tried = 0
    for n in range(factor * n_devices, MOST_TIMES_AS_MANY * n_devices + 1, n_devices):
        if n < 2 * tried or (n > n_devices and n % node and node % n):
            continue
        tried = n
        if found := search(run, replace(machine, host_memory_bytes=math.inf), n, most=1):
            if fits(found[0].memory, machine, n):
                return found
            direct = rules.change(run, {"checkpoint.background": False})
            return search(run, machine, n, most=1) or search(direct, machine, n, most=1)
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
    most_tensor = max(machine.devices_per_node, parallel.tensor)
    for tensor in rules.divisors(math.gcd(model.n_heads, model.d_ff, n_devices)):
        if tensor > most_tensor or not model.shards_heads(tensor):
            continue
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
                sharing = n_devices // tensor // pipeline
                for expert in rules.divisors(math.gcd(model.n_experts or 1, sharing)):
                    changes |= {"expert": expert}
                    cut = run.model_copy(update={"parallel": parallel.model_copy(update=changes)})
                    yield from _shapes_of_cut(cut, n_devices)


def _contexts(run: Run, n_ranks: int) -> list[tuple[int, str]]:
    most = max(run.model.sequence_length // FEWEST_TOKENS_OF_A_CONTEXT_RANK, run.parallel.context)
    degrees = [degree for degree in rules.divisors(n_ranks) if 1 < degree <= most]
    return [(1, run.parallel.context_method), *itertools.product(degrees, ("ulysses", "ring"))]


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
    sequence = parallel.tensor > 1 and divides
    for schedule, chunks in _schedules(cut):
        update = {"sequence": sequence, "schedule": schedule, "chunks": chunks}
        ordered = cut.model_copy(update={"parallel": parallel.model_copy(update=update)})
        if rules.broken_rules(ordered, batches=False):
            continue
        for size in micro_batches:
            train = cut.train.model_copy(update={"micro_batch_size": size})
            shape = ordered.model_copy(update={"train": train})
            counts = (batch // (size * data) for batch in batch_sizes(cut.train))
            if all(takes_micro_batches(shape, count) for count in counts):
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
        self._plans: dict[object, Plan] = {}
        self._queue: list[tuple[float, int, Run, StepTime | None]] = []
        self._numbers = itertools.count()
        self._examples: dict[object, Run] = {}
        self._passes: dict[object, float] = {}

    def candidates(self, most_seconds: float) -> Iterator[Candidate]:
        """Yields the variants that fit, with steps up to a time."""
        shapes = list(list_shapes(self._run, self._machine, self._n_devices))
        for shape in sorted(shapes, key=_stage_count):
            self._examples.setdefault(_kind(shape), shape)
        for shape in shapes:
            self._push(self._least_seconds(shape), shape, None)
        while self._queue and self._queue[0][0] <= most_seconds:
            _, _, run, time = heapq.heappop(self._queue)
            if time is None:
                self._examine(run)
            else:
                plan = self._plan(run)
                yield Candidate(run, plan, busiest_memory(run, plan, is_gpu(self._machine)), time)

    def _examine(self, run: Run) -> None:
        """Adds a variant with its time if it fits, and replicas; else those with less memory."""
        parallel = run.parallel
        if self._fits(run):
            time = step_time(run, self._plan(run), self._machine)
            self._push(time.seconds, run, time)
            self._add(run, self._replicas(run))
        elif parallel.recompute != "none":
            self._add(run, _fewest_recomputed(run, {}, self._fits))
        elif self._can_ever_fit(run):
            for all_blocks in (_BLOCK, _ATTENTION):
                fewest = _fewest_recomputed(run, all_blocks, self._seems_to_fit)
                self._add(run, fewest)
                if not fewest:  # attention alone saves less
                    break
            is_shared = self._plan(run).topology.data * parallel.context > 1
            if is_shared and parallel.zero_stage in (1, 2):
                self._add(run, {"parallel.zero_stage": parallel.zero_stage + 1})

    def _add(self, run: Run, changes: rules.Changes) -> None:
        """Adds what changes make of a variant, if they change it and break no rule."""
        changed = rules.change(run, changes)
        if changes and not rules.broken_rules(changed):
            self._push(self._least_seconds(changed), changed, None)

    def _push(self, seconds: float, run: Run, time: StepTime | None) -> None:
        heapq.heappush(self._queue, (seconds, next(self._numbers), run, time))

    def _plan(self, run: Run) -> Plan:
        """Resolves a run; ZeRO and micro batches do not matter."""
        parallel = run.parallel
        sizes = (parallel.tensor, parallel.context, parallel.expert, parallel.pipeline)
        more = (parallel.chunks, parallel.data_replicate, parallel.recompute)
        key = (*sizes, *more, parallel.recompute_share)
        if key not in self._plans:
            self._plans[key] = resolve(run, self._n_devices)
        return self._plans[key]

    def _replicas(self, run: Run) -> rules.Changes:
        """Returns replicas to try, which need more memory: shards inside several nodes, if any."""
        data, parallel = self._n_devices // ranks_per_replica(run), run.parallel
        inside = self._machine.devices_per_node // parallel.tensor // parallel.context
        is_new = parallel.data_replicate == 1 and 1 < inside < data and data % inside == 0
        is_new = is_new and inside * parallel.context % parallel.expert == 0
        return {"parallel.data_replicate": data // inside} if is_new else {}

    def _least_seconds(self, run: Run) -> float:
        """Returns a lower bound of a step: equal pipeline ranks, which send nothing on."""
        parallel, micro = run.parallel, run.train.micro_batch_size
        none, all_blocks = (self._micro_batch(run, each) for each in ("none", parallel.recompute))
        seconds = none + SURE_SHARE * parallel.recompute_share * (all_blocks - none)
        n = run.train.global_batch_size // micro // (self._n_devices // ranks_per_replica(run))
        return seconds * (n + bubble_passes(parallel, n)) / parallel.pipeline

    def _micro_batch(self, run: Run, recompute: str) -> float:
        """Times a micro batch of many through all blocks, which runs of a kind share.

        ZeRO 2 and 3 slow it; what ZeRO 3 gathers again is left out, as is what a step does once.
        """
        parallel = run.parallel
        key = (*_kind(run), recompute, parallel.shards_gradients)
        if key not in self._passes:
            given, zero_stage = self._examples[_kind(run)], min(parallel.zero_stage, 2)
            changes: rules.Changes = {
                "train.global_batch_size": MANY * given.train.global_batch_size,
                "parallel.recompute": recompute,
                "parallel.zero_stage": zero_stage,
            }
            example, plan = rules.change(given, changes), self._plan(given)
            self._passes[key] = seconds_of_passes(example, plan, self._machine)
        return self._passes[key]

    def _seems_to_fit(self, run: Run) -> bool:
        """Returns whether the first pipeline rank, with most in flight, has enough memory."""
        memory = rank_memory(run, self._plan(run), 0, is_gpu(self._machine))
        return fits(memory, self._machine, self._n_devices)

    def _fits(self, run: Run) -> bool:
        if not self._seems_to_fit(run):
            return False
        memory = busiest_memory(run, self._plan(run), is_gpu(self._machine))
        return fits(memory, self._machine, self._n_devices)

    def _can_ever_fit(self, run: Run) -> bool:
        """Returns whether the smallest variant of a shape fits, if this one is its fastest."""
        parallel = run.parallel
        if parallel.zero_stage > 1 or parallel.data_replicate > 1:
            return True
        zero_stage = 1 if parallel.schedule == "zero_bubble" else 3
        sparing = {"parallel.recompute": "block", "parallel.zero_stage": zero_stage}
        return self._seems_to_fit(rules.change(run, sparing))


def _kind(run: Run) -> tuple[object, ...]:
    """Returns what decides the work of a micro batch, besides recomputation."""
    parallel = run.parallel
    sizes = parallel.tensor, parallel.context, parallel.context_method, parallel.expert
    return *sizes, run.train.micro_batch_size, parallel.pipeline > 1


def _stage_count(run: Run) -> tuple[bool, int]:
    parallel = run.parallel
    return parallel.schedule == "zero_bubble", parallel.pipeline * parallel.chunks


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
    return scale, sorted(scaled, key=attrgetter("time.seconds"))


def with_seconds(candidate: Candidate, seconds: float) -> Candidate:
    """Scales all parts of a candidate's time alike."""
    return replace(candidate, time=candidate.time.scaled(seconds / candidate.time.seconds))
