"""The smallest changes with which a run fits into the memory of its devices.

Each way to save memory is tried alone, its smallest step first; then, where none is enough, after
`parallel.recompute="block"` with the smallest micro batch; and last of all the search, on as many
devices as it takes. What works is listed by its cost: the device-seconds of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from trainyard.config import rules
from trainyard.config.load import field_value
from trainyard.config.run import Run
from trainyard.plan.hardware import Machine
from trainyard.plan.search import (
    FIELDS,
    RECOMPUTE,
    Candidate,
    fits,
    is_legal,
    least_state_bytes,
    predict,
    search,
    usable_bytes,
)

MOST_TIMES_AS_MANY = 64
"""How many times the devices are tried, before giving up."""


@dataclass(frozen=True)
class Remedy:
    """Something that makes a run fit."""

    change: str
    """As it would stand on the command line."""
    candidate: Candidate

    @property
    def device_seconds(self) -> float:
        """What a step costs."""
        return self.candidate.time.seconds * self.candidate.plan.n_ranks


def smallest_changes(run: Run, machine: Machine, n_devices: int) -> list[Remedy]:
    """Lists what makes a run fit, cheapest first; empty where nothing that is tried does."""
    found = list(_from(run, run, machine, n_devices))
    if not found:
        saved: rules.Changes = {"parallel.recompute": "block", "train.micro_batch_size": 1}
        saved = {name: value for name, value in saved.items() if is_legal_with(run, name, value)}
        sparing = rules.change(run, saved)
        if saved and is_legal(sparing, n_devices):
            found = list(_from(run, sparing, machine, n_devices))
    if not found:
        found = list(_searched(run, machine, n_devices))
    return sorted(found, key=lambda remedy: remedy.device_seconds)


def is_legal_with(run: Run, name: str, value: object) -> bool:
    """Returns whether a run may have another value in one field, whatever the number of devices."""
    return not rules.broken_rules(rules.change(run, {name: value}))


def _from(run: Run, start: Run, machine: Machine, n_devices: int) -> Iterator[Remedy]:
    """Tries `start`, and each way from there; says what differs from `run`."""
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
    """Lists the ways to save memory, each as devices and changes to try, smallest first."""
    parallel, micro = run.parallel, run.train.micro_batch_size

    def of(name: str, values: list[int] | list[str]) -> Iterator[tuple[int, rules.Changes]]:
        return ((n_devices, {name: value}) for value in values)

    yield of("train.micro_batch_size", [n for n in reversed(rules.divisors(micro)) if n < micro])
    yield of("parallel.recompute", list(RECOMPUTE[RECOMPUTE.index(parallel.recompute) + 1 :]))
    yield of("parallel.zero_stage", list(range(parallel.zero_stage + 1, 4)))
    divisors = rules.divisors(n_devices)
    yield (
        (n_devices, {"parallel.tensor": tensor, "parallel.sequence": sequence})
        for tensor in divisors
        if parallel.tensor < tensor <= machine.devices_per_node
        for sequence in (parallel.sequence, True)
    )
    stage = 1 if parallel.zero_stage == 2 else parallel.zero_stage  # which no pipeline has
    yield (
        (n_devices, {"parallel.pipeline": n, "parallel.zero_stage": stage})
        for n in divisors
        if n > parallel.pipeline
    )
    yield of("precision.kind", _smaller_precisions(run, machine))
    yield ((n, {}) for n in _more_devices(machine, n_devices, 2))


def _smaller_precisions(run: Run, machine: Machine) -> list[str]:
    """Lists precisions that keep less, of those the devices multiply in."""
    sizes = ["fp32", "bf16", "fp8_lowbit"]
    kind = run.precision.kind
    place = 0 if kind == "fp32" else sizes.index(kind) if kind in sizes else 1
    peaks = machine.device.peak_flops_per_second
    return [smaller for smaller in sizes[place + 1 :] if peaks(smaller) is not None]


def _searched(run: Run, machine: Machine, n_devices: int) -> Iterator[Remedy]:
    """Finds the fastest layout that fits, on as few times the devices as possible."""
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
    """Lists numbers of devices that fill nodes, or equal parts of one; the same where none does."""
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
