"""The smallest changes that make a run fit in memory.

It tries each way to save memory alone, its smallest step first; if none is enough, again after
`parallel.recompute="block"` with the smallest micro batch; finally the search, on as many devices
as needed. It lists solutions by cost: the device-seconds of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from trainyard.config import rules
from trainyard.config.load import field_value
from trainyard.config.precisions import FORMATS, PrecisionKind
from trainyard.config.run import Run
from trainyard.planning.hardware import Machine
from trainyard.planning.layout import ways_to_save_memory
from trainyard.planning.search import (
    FIELDS,
    Candidate,
    fits,
    is_legal,
    least_state_bytes,
    predict,
    search,
    usable_bytes,
)

SPARING: rules.Changes = {"parallel.recompute": "block", "train.micro_batch_size": 1}
"""Where no single way is enough, each is tried from here."""
MOST_TIMES_AS_MANY = 64
"""Largest multiple of the device count to try."""


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


def smallest_changes(run: Run, machine: Machine, n_devices: int) -> list[Remedy]:
    """Lists changes that make a run fit, cheapest first; empty if none was found."""
    found = list(_from(run, run, machine, n_devices))
    if not found:
        saved = {
            name: value
            for name, value in SPARING.items()
            if not rules.broken_rules(rules.change(run, {name: value}))
        }
        sparing = rules.change(run, saved)
        if saved and is_legal(sparing, n_devices):
            found = list(_from(run, sparing, machine, n_devices))
    if not found:
        found = list(_searched(run, machine, n_devices))
    return sorted(found, key=lambda remedy: remedy.device_seconds)


def _from(run: Run, start: Run, machine: Machine, n_devices: int) -> Iterator[Remedy]:
    """Tries `start`, and each way from there; describes the changes from `run`."""
    ways = [iter([(n_devices, {})]), *_ways(start, machine, n_devices)]
    for way in ways:
        for n, changes in way:
            changed = rules.change(start, changes)
            if not is_legal(changed, n):
                continue
            candidate = predict(changed, machine, n)
            if fits(candidate.memory, machine):
                yield Remedy(_describe(run, candidate, n_devices), candidate)
                break


def _ways(
    run: Run, machine: Machine, n_devices: int
) -> Iterator[Iterator[tuple[int, rules.Changes]]]:
    """Lists ways to save memory, each as devices and changes to try, smallest first."""
    parallel = run.parallel
    for way in ways_to_save_memory(run):
        yield ((n_devices, changes) for changes in way)
    divisors = rules.divisors(n_devices)
    yield (
        (n_devices, {"parallel.tensor": tensor, "parallel.sequence": sequence})
        for tensor in divisors
        if parallel.tensor < tensor <= machine.devices_per_node
        for sequence in (parallel.sequence, True)
    )
    stage = 1 if parallel.zero_stage == 2 else parallel.zero_stage  # pipelines lack ZeRO 2
    yield (
        (n_devices, {"parallel.pipeline": n, "parallel.zero_stage": stage})
        for n in divisors
        if n > parallel.pipeline
    )
    yield ((n_devices, {"precision.kind": kind}) for kind in _smaller_precisions(run, machine))
    yield ((n, {}) for n in _more_devices(machine, n_devices, 2))


def _smaller_precisions(run: Run, machine: Machine) -> list[PrecisionKind]:
    """Lists precisions with less memory that the devices support."""

    def size(kind: PrecisionKind) -> tuple[int, int]:
        compute = FORMATS[kind].compute.n_bytes
        return compute, least_state_bytes(rules.change(run, {"precision.kind": kind}))

    smaller = [run.precision.kind]
    for kind, formats in FORMATS.items():
        if size(kind) < size(smaller[-1]) and not formats.scales_loss:
            smaller.append(kind)
    peaks = machine.device.peak_flops_per_second
    return [kind for kind in smaller[1:] if peaks(kind) is not None]


def _searched(run: Run, machine: Machine, n_devices: int) -> Iterator[Remedy]:
    """Finds the fastest layout that fits, on the smallest multiple of the devices."""
    usable = usable_bytes(machine)
    if usable is None:
        return
    factor = math.ceil(least_state_bytes(run) / (n_devices * usable))
    last = 0
    for n in _more_devices(machine, n_devices, max(1, factor)):
        if n < 2 * last:
            continue
        found, last = search(run, machine, n, most=1), n
        if found:
            yield Remedy(_describe(run, found[0], n_devices), found[0])
            return


def _more_devices(machine: Machine, n_devices: int, least_factor: int) -> Iterator[int]:
    """Lists numbers of devices that fill nodes, or equal parts of one; else the same number."""
    node = machine.devices_per_node
    for factor in range(least_factor, MOST_TIMES_AS_MANY + 1):
        n = factor * n_devices
        if n % node == 0 or node % n == 0 or factor == 1:
            yield n


def fewest_devices(run: Run, machine: Machine, n_devices: int) -> str:
    """Returns a hint with the number of devices on which a layout of a run fits."""
    without_ramp = rules.change(run, {"train.batch_ramp": None})
    if run.train.batch_ramp and search(without_ramp, machine, n_devices, most=1):
        return "train.batch_ramp=none: its first batches are too small for these ranks"
    remedy = next(_searched(run, machine, n_devices), None)
    if remedy is None:
        return "a smaller model, or devices with more memory"
    return f"one fits on {remedy.change}"


def _describe(run: Run, candidate: Candidate, n_devices: int) -> str:
    fields = (*FIELDS, "precision.kind")
    changes = {name: field_value(candidate.run, name) for name in fields}
    text = rules.describe(run, changes)
    n = candidate.plan.n_ranks
    more = f"{n:,} devices" if n != n_devices else ""
    first, *others = filter(None, (more, *text.split(" with ")))
    return f"{first} with {', '.join(others)}" if others else first
