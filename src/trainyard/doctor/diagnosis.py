"""The diagnosis of `trainyard doctor`: judges what all ranks measured, as JSON, a table or a file.

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

`--calibrate` writes measurements to a cluster file, so that `trainyard plan` uses them:

    [efficiencies]
    matmul_share = 0.797          # 788 TFLOP/s in bf16 of the 989 in the datasheet
    link_share = 0.81

For a GPU, the datasheet's figures stay and the shares are measured. A CPU has no known datasheet:
its figures are the measurements, and its shares are 1. If a measurement exceeds the figure
(in-network reduction), the measurement replaces the figure.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w

from trainyard.config.cluster import cluster_names, read_cluster
from trainyard.config.devices import GIGA, TERA, find_device
from trainyard.errors import MachineError, explain_failure
from trainyard.planning.clusters import NODES, find_machine
from trainyard.planning.hardware import Machine
from trainyard.units import format_figure, format_number

PASS, WARN, REPLACE = "pass", "warn", "replace"
ORDER = ("", PASS, WARN, REPLACE)
WARN_BELOW, REPLACE_BELOW = 0.9, 2 / 3

MATMULS, ATTENTION, MEMORY = "matmuls", "attention", "memory copies"
IN_NODE, OF_ALL, BETWEEN_NODES = "all-reduce in a node", "all-reduce of all", "node to node"
LATENCY = "latency of "
WRITE, READ = "checkpoint write", "checkpoint read"
JUDGED_KINDS = ("fp32", "fp16", "bf16")
"""Formats of judged matmuls; the profiles' efficiency holds for these. fp8 reaches less."""
HALF_KINDS = ("bf16", "fp16", "fp32")
"""Formats whose matmul sets the share: the first one measured that has a peak."""
COMPARED_VERSIONS = ("NVIDIA driver", "AMD driver", "torch", "torchao")
MOST_NAMED, MOST_SLOW = 4, 8
NAME_WIDTH = 38

Facts = dict[str, dict[str, str]]
"""Named facts about a machine, by section."""


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


@dataclass
class Examination:
    """The results of one rank."""

    rank: int
    host: str
    device: str = ""
    """Device name in torch; empty without torch."""
    n_devices: int = 0
    """GPUs that it sees."""
    facts: Facts = field(default_factory=dict)
    """Facts of its machine, from the first rank there."""
    findings: list[Finding] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)

    def find(self, findings: Iterable[Finding]) -> None:
        """Records findings of this machine."""
        self.findings += [replace(one, place=one.place or self.host) for one in findings]

    def measure(self, name: str, value: float, unit: str, how: str) -> None:
        """Records a measurement, and the timed operations."""
        self.measurements.append(Measurement(name, value, unit, self.rank, self.host, how))


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


@dataclass(frozen=True)
class Diagnosis:
    """All results on the machines."""

    examinations: Sequence[Examination]
    """The results of all ranks."""
    shape: Shape
    machine: Machine | None
    """The reference of the measurements; None: no figures are known for such a machine."""
    rows: Sequence[Row]
    findings: Sequence[Finding]

    @property
    def verdict(self) -> str:
        """The worst verdict; empty if there is no problem and no measurement had a reference."""
        measured = worst_of(row.verdict for row in self.rows)
        worst = worst_of([measured, *(finding.verdict for finding in self.findings)])
        return worst if measured or worst != PASS else ""

    @property
    def facts(self) -> dict[str, Facts]:
        """The facts of each machine, by host."""
        return {one.host: one.facts for one in self.examinations if one.facts}

    def refuse(self) -> None:
        """Raises if any verdict is replace.

        Raises:
            MachineError: names each item and its host.
        """
        named = [
            f"{row.name} on {', '.join(dict.fromkeys(bad.host for bad in row.slow[:MOST_NAMED]))}"
            for row in self.rows
            if row.verdict == REPLACE
        ]
        bad = [finding for finding in self.findings if finding.verdict == REPLACE]
        named += dict.fromkeys(f"{finding.name} on {finding.place}" for finding in bad)
        if named:
            hints = list(dict.fromkeys(finding.hint for finding in bad if finding.hint))
            slow = "below two thirds of the expected rate: exclude the machine and have it repaired"
            raise MachineError(f"replace: {'; '.join(named)}", "; ".join(hints) or slow)

    def as_json(self) -> dict[str, Any]:
        """Returns the diagnosis as JSON values."""
        measurements = [one for rank in self.examinations for one in rank.measurements]
        return {
            "verdict": self.verdict or None,
            "compared_with": self.machine.name if self.machine else None,
            "hosts": list(self.shape.hosts),
            "device": self.examinations[0].device or None,
            "facts": self.facts,
            "findings": [asdict(finding) for finding in self.findings],
            "measured": [
                {
                    **{"name": row.name, "unit": row.unit, "median": row.median},
                    **{"worst": row.worst.value, "worst_rank": row.worst.rank},
                    **{"worst_host": row.worst.host, "expected": row.expected},
                    **{"verdict": row.verdict or None, "how": row.worst.how},
                    "by_rank": {
                        str(one.rank): one.value for one in measurements if one.name == row.name
                    },
                }
                for row in self.rows
            ],
        }


def verdict_of(share: float) -> str:
    """Returns the verdict for a share of the expected value."""
    if share >= WARN_BELOW:
        return PASS
    return WARN if share >= REPLACE_BELOW else REPLACE


def worst_of(verdicts: Iterable[str]) -> str:
    """Returns the worst of several verdicts; empty for none."""
    return max(verdicts, key=ORDER.index, default="")


def diagnose(
    examinations: Sequence[Examination], profile: Machine | None, n_nodes: int | None = None
) -> Diagnosis:
    """Judges the examinations of all ranks.

    Args:
        examinations: one per rank, in rank order.
        profile: of the expected machine; None: judge by the devices only.
        n_nodes: expected number of machines.
    """
    first = examinations[0]
    shape = Shape([one.host for one in examinations], first.device not in ("", "cpu"))
    findings = [finding for one in examinations for finding in one.findings]
    if n_nodes is not None and shape.n_nodes != n_nodes:
        text = f"{shape.n_nodes} of {n_nodes} (--nodes) joined"
        hint = "check the launcher's options: it must start one process per device on every machine"
        place = ", ".join(dict.fromkeys(shape.hosts))
        findings.append(Finding("machines", text, REPLACE, hint, place))
    machine = profile
    if profile is not None and profile.device.name != "CPU" and first.device:
        for host in dict.fromkeys(shape.hosts):
            on_host = [one for one in examinations if one.host == host]
            findings += _compare_devices(host, on_host, profile)
    elif profile is None and (usual := find_usual_machine(first.device)):
        machine = usual[1]
    versions = {
        one.host: {k: v for k, v in one.facts["versions"].items() if k in COMPARED_VERSIONS}
        for one in examinations
        if one.facts
    }
    findings += compare_nodes(versions)
    measurements = [measurement for one in examinations for measurement in one.measurements]
    rows = judge(measurements, expect(machine, shape) if machine else {}, shape)
    return Diagnosis(examinations, shape, machine, rows, findings)


def find_usual_machine(device: str) -> tuple[str, Machine] | None:
    """Finds the usual node of a GPU by its torch name; a CPU has none."""
    known = find_device(device)
    name = next((name for name, node in NODES.items() if known and node.device == known.name), None)
    return None if name in (None, "cpu") else (name, find_machine(gpu=name))


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
    # A ring over nodes uses the network devices of all its ranks on a node.
    of_all = link if shape.n_nodes == 1 else min(link, network * shape.ranks_per_node)
    return expected | {IN_NODE: link, OF_ALL: of_all, BETWEEN_NODES: network}


def judge(
    measurements: Iterable[Measurement], expected: Mapping[str, float], shape: Shape
) -> list[Row]:
    """Judges all measurements by name, in the order in which the names first occur."""
    by_name: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        by_name.setdefault(measurement.name, []).append(measurement)
    has_peers = shape.has_own_devices or shape.n_nodes > 1
    return [
        _judge_one(measured, expected.get(name), has_peers) for name, measured in by_name.items()
    ]


def _judge_one(measured: list[Measurement], expected: float | None, has_peers: bool) -> Row:
    name, unit = measured[0].name, measured[0].unit
    is_latency, is_disk = name.startswith(LATENCY), name in (WRITE, READ)
    if is_disk:  # the ranks of a machine share its path to the disk
        measured = _sum_by_host(measured)
    values = [measurement.value for measurement in measured]
    worst_first = sorted(measured, key=lambda one: one.value, reverse=is_latency)
    row = Row(name, unit, statistics.median(values), worst_first[0], None, "")
    if is_latency:
        return row
    references = [expected] if expected else []
    if has_peers and len(measured) > 1:
        # If half are slow, such as one of two machines, the others are the reference.
        references.append(statistics.median_high(values))
    if not references:
        return row
    # The larger reference is stricter.
    verdicts = [verdict_of(one.value / max(references)) for one in worst_first]
    if is_disk:  # others may use a shared disk at the same time
        verdicts = [WARN if verdict == REPLACE else verdict for verdict in verdicts]
    slow = tuple(one for one, v in zip(worst_first, verdicts, strict=True) if v != PASS)
    return replace(row, expected=expected, verdict=verdicts[0], slow=slow)


def _sum_by_host(measured: Sequence[Measurement]) -> list[Measurement]:
    sums = []
    for host in dict.fromkeys(measurement.host for measurement in measured):
        first, *others = [measurement for measurement in measured if measurement.host == host]
        value = first.value + sum(other.value for other in others)
        how = f"{1 + len(others)} files of {first.how}" if others else first.how
        sums.append(replace(first, value=value, how=how))
    return sums


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


def _compare_devices(
    host: str, examinations: Sequence[Examination], machine: Machine
) -> Iterator[Finding]:
    """Compares the devices of a node with the cluster's profile."""
    names = [one.device for one in examinations if one.device != "cpu"]
    # A launcher may show each rank only its own device.
    n_devices = max(len(names), *(one.n_devices for one in examinations))
    if n_devices < machine.devices_per_node:
        text = f"{n_devices} of the {machine.devices_per_node} in the cluster's profile"
        hint = "request all from the scheduler; if it granted them, one has failed: drain the node"
        if n_devices == 0:
            hint = "torch sees none: a login node, a job without GPUs, or a CPU-only torch"
        yield Finding("devices", text, REPLACE, hint, host)
    kinds = {device.name if (device := find_device(name)) else name for name in names}
    if others := sorted(kinds - {machine.device.name}):
        text = f"{', '.join(others)}, but the cluster's profile has {machine.device.name}"
        yield Finding("devices", text, REPLACE, "set the right cluster with --cluster", host)


def render(diagnosis: Diagnosis) -> str:
    """Renders facts of the first machine, results of checks, and measurements as a table."""
    shape, machine = diagnosis.shape, diagnosis.machine
    against = f"compared with {machine.name}" if machine else "not compared: set --cluster"
    ranks = format_number(len(shape.hosts), "rank")
    host, facts = next(iter(diagnosis.facts.items()))
    lines = [f"{ranks} on {format_number(shape.n_nodes, 'machine')}, {against}", ""]
    lines.append(host + (" (all machines: --json)" if shape.n_nodes > 1 else ""))
    for section, values in facts.items():
        titles = [section, *[""] * len(values)]
        for title, (name, value) in zip(titles, values.items(), strict=False):
            lines.append(f"  {title:<10} {name:<16} {value}")
    lines += ["", "checks", *_render_findings(diagnosis.findings), ""]
    columns = f"{'median':>9}{'worst':>9}{'expected':>10}{'share':>7}  verdict"
    lines.append(f"{'measured':<{NAME_WIDTH}}{columns}")
    lines += [line for row in diagnosis.rows for line in _render_row(row)]
    if not diagnosis.examinations[0].device:
        lines.append("torch is not installed: matmuls, memory and network are not measured")
    verdict = diagnosis.verdict or "none, no measurement was compared: set --cluster NAME"
    return "\n".join([*lines, "", f"verdict: {verdict}"])


def _render_findings(findings: Sequence[Finding]) -> Iterator[str]:
    """Lists the results of checks, failures first; equal results of several machines once."""
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        # Texts of passed checks differ in timings.
        text = "" if finding.verdict == PASS else finding.text
        alike.setdefault((finding.name, text), []).append(finding)
    for group in sorted(alike.values(), key=lambda group: -ORDER.index(group[0].verdict)):
        first, places = group[0], list(dict.fromkeys(finding.place for finding in group))
        where = places[0] if len(places) == 1 else f"{places[0]} and {len(places) - 1} more"
        yield f"  {first.verdict:<8} {first.name:<20} {where}: {first.text}"
        if first.hint:
            yield f"  {'':<8} {'':<20} hint: {first.hint}"


def _render_row(row: Row) -> Iterator[str]:
    expected = format_figure(row.expected) if row.expected else ""
    share = f"{row.share:.0%} " if row.share is not None else ""
    name = f"  {row.name}, {row.unit}"
    yield (
        f"{name:<{NAME_WIDTH}}{format_figure(row.median):>9}{format_figure(row.worst.value):>9}"
        f"{expected:>10}{share:>7}  {row.verdict or '-':<8} {row.worst.how}".rstrip()
    )
    if row.slow:
        slow = [f"rank {s.rank} on {s.host} {format_figure(s.value)}" for s in row.slow[:MOST_SLOW]]
        more = len(row.slow) - len(slow)
        yield f"    slow: {', '.join(slow)}" + (f" and {more} more" if more else "")


def refuse_file(path: Path) -> None:
    """Rejects a file that cannot be written, before any measurement.

    Raises:
        MachineError: it already exists, has the wrong name, or its folder cannot be written.
    """
    if path.suffix != ".toml":
        raise MachineError(f"--calibrate {path}: a cluster file ends in .toml", "rename it")
    if path.exists():
        raise MachineError(f"--calibrate {path} already exists", "use a new name, or remove it")
    folder = path.resolve().parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise MachineError(
            f"--calibrate {path}: the folder {folder} does not exist, or cannot be written to",
            "choose a file in a writable folder",
        )


def write_cluster(path: Path, base: str | None, gpu: str, values: Mapping[str, Any]) -> None:
    """Writes a cluster file with measured values.

    Args:
        path: the file to write.
        base: the cluster it extends; None: none, only the GPU is known.
        gpu: its name.
        values: the result of `calibrate`.

    Raises:
        MachineError: it cannot be written.
    """
    content: dict[str, Any] = {"gpu": gpu}
    if base in cluster_names():
        content = {"extends": base}
    elif base is not None:  # a file, which may itself extend another
        content = read_cluster(base).model_dump(exclude_defaults=True)
    shares = {**content.get("efficiencies", {}), **values["efficiencies"]}
    content |= {**values, "efficiencies": shares}
    day = time.strftime("%Y-%m-%d")
    text = f"# Measured on {day} by trainyard doctor.\n{tomli_w.dumps(content)}"
    with explain_failure(f"cannot write {path}", "use another file"):
        path.write_text(text, encoding="utf-8")


def calibrate(machine: Machine, rows: Sequence[Row], shape: Shape) -> dict[str, Any]:
    """Returns the fields of a cluster file that make a plan use the medians of all ranks.

    Args:
        machine: its figures stay where a share expresses the measurement.
        rows: the measurements.
        shape: the placement of the measuring ranks on nodes.
    """
    medians = {row.name: row.median for row in rows}
    device, is_cpu = machine.device, machine.device.name == "CPU"
    figures: dict[str, Any] = {"devices_per_node": shape.ranks_per_node} if is_cpu else {}
    shares: dict[str, float] = {}
    matmuls = {
        name.removeprefix(f"{MATMULS} "): rate
        for name, rate in medians.items()
        if name.startswith(MATMULS)
    }
    peaks = {kind: peak / TERA for kind, peak in device.peaks.items()}
    if is_cpu:
        figures["peaks_teraflops"] = {kind: _round(rate) for kind, rate in matmuls.items()}
        peaks = matmuls
    kind = next((kind for kind in HALF_KINDS if kind in matmuls and kind in peaks), None)
    if kind is not None:
        shares["matmul_share"] = _share(matmuls[kind], peaks[kind])
    for kind, peak in peaks.items():
        if f"{ATTENTION} {kind}" in medians:
            shares["attention_share"] = _share(medians[f"{ATTENTION} {kind}"], peak)
    for name, stem, figure in (
        (MEMORY, "memory", device.memory_bytes_per_second),
        (IN_NODE, "link", machine.link_bytes_per_second),
        (BETWEEN_NODES, "network", machine.network_bytes_per_second),
    ):
        if name in medians:
            datasheet = math.inf if is_cpu or figure is None else figure / GIGA
            if is_cpu or medians[name] > datasheet:
                datasheet = medians[name]
                figures[f"{stem}_gigabytes_per_second"] = _round(datasheet)
            shares[f"{stem}_share"] = _share(medians[name], datasheet)
    # Latencies of small all-reduces in hops, the inverse of `planning.time`: a ring inside a node
    # has n - 1, a tree between nodes log2 n; each is passed twice.
    n_hops = shape.ranks_per_node - 1
    inside = medians.get(LATENCY + IN_NODE, 0.0) / 2
    if inside and n_hops:
        figures["link_latency_microseconds"] = _round(inside / n_hops)
    if LATENCY + OF_ALL in medians:
        between = max(0.0, medians[LATENCY + OF_ALL] / 2 - inside)
        figures["network_latency_microseconds"] = _round(between / math.log2(shape.n_nodes))
    return figures | {"efficiencies": shares}


def _share(measured: float, figure: float) -> float:
    return min(1.0, max(1e-4, _round(measured / figure)))


def _round(number: float) -> float:
    return float(f"{number:.3g}")
