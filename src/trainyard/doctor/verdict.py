"""Verdicts: compares measurements with the machine's expected figures and with each other.

A measurement is a rate of one rank: more is better. It is judged twice, and the worse counts:

    against the profile   the cluster's figure x its efficiency (`planning.hardware.Efficiencies`)
    against its peers     the median of all ranks, if each has its own device or node; the higher
                          of two middle values: one of two machines may be slow

    90 % and more         pass
    two thirds and more   warn     it costs time: train, and have it checked
    less                  replace  it slows down all others: exclude it

File rates are summed over the ranks of a machine and never get replace: others may use the disk
too. Example: 352 GB/s in an all-reduce inside a node of H100s, whose links have 450 GB/s in one
direction; collectives reach 85 % of it: 352 / 382 = 92 %, pass.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trainyard.planning.hardware import GIGA, TERA, Machine

PASS, WARN, REPLACE = "pass", "warn", "replace"
ORDER = ("", PASS, WARN, REPLACE)
WARN_BELOW, REPLACE_BELOW = 0.9, 2 / 3

MATMULS, ATTENTION, MEMORY = "matmuls", "attention", "memory copies"
IN_NODE, OF_ALL, BETWEEN_NODES = "all-reduce in a node", "all-reduce of all", "node to node"
LATENCY = "latency of "
WRITE, READ = "checkpoint write", "checkpoint read"
JUDGED_KINDS = ("fp32", "fp16", "bf16")
"""Formats of judged matmuls; the profiles' efficiency holds for these. fp8 reaches less."""


@dataclass(frozen=True)
class Finding:
    """A problem, or the result of a check."""

    name: str
    text: str
    verdict: str
    hint: str = ""
    place: str = ""
    """The host, such as `n2`; empty: this one."""


@dataclass(frozen=True)
class Measurement:
    """A value measured by one rank."""

    name: str
    value: float
    unit: str
    rank: int
    host: str
    how: str = ""
    """Size and number of the timed operations."""


@dataclass(frozen=True)
class Row:
    """All measurements of one name, with a verdict."""

    name: str
    unit: str
    median: float
    worst: Measurement
    expected: float | None
    verdict: str
    """Empty: no reference to compare with."""
    slow: tuple[Measurement, ...] = ()
    """The measurements that do not pass, worst first."""

    @property
    def share(self) -> float | None:
        """The worst measurement as a share of the expected value."""
        return self.worst.value / self.expected if self.expected else None


@dataclass(frozen=True)
class Shape:
    """The placement of the measuring ranks on nodes."""

    hosts: Sequence[str]
    """Host of each rank."""
    has_own_devices: bool = True
    """Each rank has its own device; processes that share a processor slow each other down."""

    @property
    def n_nodes(self) -> int:
        """Number of machines."""
        return len(set(self.hosts))

    @property
    def ranks_per_node(self) -> int:
        """Ranks of the node with the most."""
        return max(self.hosts.count(host) for host in set(self.hosts))


def verdict_of(share: float) -> str:
    """Returns the verdict for a share of the expected value."""
    if share >= WARN_BELOW:
        return PASS
    return WARN if share >= REPLACE_BELOW else REPLACE


def worst_of(verdicts: Iterable[str]) -> str:
    """Returns the worst of several verdicts; empty for none."""
    return max(verdicts, key=ORDER.index, default="")


def expect(machine: Machine, shape: Shape) -> dict[str, float]:
    """Returns the expected value of a rank by measurement name, in its unit."""
    shares, device = machine.efficiencies, machine.device
    expected = {
        f"{MATMULS} {kind}": device.peaks[kind] * shares.matmul_share / TERA
        for kind in JUDGED_KINDS
        if kind in device.peaks
    }
    if device.memory_bytes_per_second:
        expected[MEMORY] = device.memory_bytes_per_second * shares.memory_share / GIGA
    link = machine.link_bytes_per_second * shares.link_share / GIGA
    network = machine.network_bytes_per_second * shares.network_share / GIGA
    expected[IN_NODE] = link
    # A ring over nodes uses the network devices of all its ranks on a node.
    expected[OF_ALL] = link if shape.n_nodes == 1 else min(link, network * shape.ranks_per_node)
    expected[BETWEEN_NODES] = network
    return expected


def judge(
    measurements: Iterable[Measurement], expected: Mapping[str, float], shape: Shape
) -> list[Row]:
    """Judges all measurements by name, in the order in which the names first occur."""
    by_name: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        by_name.setdefault(measurement.name, []).append(measurement)
    has_peers = shape.has_own_devices or shape.n_nodes > 1
    return [
        _judge_one(
            _add_up(measured) if name in (WRITE, READ) else measured,
            None if name.startswith(LATENCY) else expected.get(name),
            has_peers,
        )
        for name, measured in by_name.items()
    ]


def _add_up(measured: Sequence[Measurement]) -> list[Measurement]:
    """Sums the ranks of each machine, which share its path to the disk."""
    sums = []
    for host in dict.fromkeys(measurement.host for measurement in measured):
        first, *others = [measurement for measurement in measured if measurement.host == host]
        value = first.value + sum(other.value for other in others)
        how = f"{1 + len(others)} files of {first.how}" if others else first.how
        sums.append(replace(first, value=value, how=how))
    return sums


def _judge_one(measured: Sequence[Measurement], expected: float | None, has_peers: bool) -> Row:
    name, unit = measured[0].name, measured[0].unit
    is_latency = name.startswith(LATENCY)
    values = [measurement.value for measurement in measured]
    worst_first = sorted(measured, key=lambda each: each.value, reverse=is_latency)
    references = [expected] if expected else []
    if has_peers and len(measured) > 1 and not is_latency:
        # If half are slow, such as one of two machines, the others are the reference.
        references.append(statistics.median_high(values))
    row = Row(name, unit, statistics.median(values), worst_first[0], expected, "")
    if not references:
        return replace(row, expected=None)
    # The larger reference is stricter.
    verdicts = [verdict_of(each.value / max(references)) for each in worst_first]
    if name in (WRITE, READ):  # others may use a shared disk at the same time
        verdicts = [WARN if verdict == REPLACE else verdict for verdict in verdicts]
    slow = tuple(each for each, v in zip(worst_first, verdicts, strict=True) if v != PASS)
    return replace(row, verdict=verdicts[0], slow=slow)


def compare_nodes(facts: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Finds differences between nodes that should be identical.

    Args:
        facts: by host, facts by name, such as driver versions.
    """
    findings = []
    for name in dict.fromkeys(name for names in facts.values() for name in names):
        hosts: dict[str, list[str]] = {}
        for host, values in facts.items():
            hosts.setdefault(values.get(name, "nothing"), []).append(host)
        if len(hosts) > 1:
            text = "; ".join(f"{value} on {', '.join(on)}" for value, on in hosts.items())
            most = max(hosts.values(), key=len)
            others = ", ".join(host for on in hosts.values() if on is not most for host in on)
            findings.append(Finding(name, text, WARN, "nodes of a job should be identical", others))
    return findings
