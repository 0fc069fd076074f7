"""The text and the JSON of `trainyard plan RUN`."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text

from trainyard.architecture import block_groups, block_layers, count_values, rest_layers
from trainyard.config.run import Run
from trainyard.layout.flops import (
    active_parameter_count,
    describe_formula,
    describe_parameters,
    figures_by_formula,
    model_flops_utilization,
)
from trainyard.layout.ranks import describe_layout
from trainyard.layout.resolve import Plan
from trainyard.layout.sizes import checkpoint_bytes
from trainyard.planning import saving
from trainyard.planning.cost import CorpusUse, Cost
from trainyard.planning.hardware import Machine
from trainyard.planning.memory import RankMemory, largest_of
from trainyard.planning.search import Candidate, Remedy, fits, node_bytes, usable_bytes
from trainyard.planning.time import StepTime
from trainyard.planning.traffic import Traffic, busiest_rank
from trainyard.topology import AXES
from trainyard.units import format_bytes, format_figure, format_large, format_number, format_seconds

BAR_WIDTH, TEXT_WIDTH = 30, 52
WIDEST = BAR_WIDTH + TEXT_WIDTH
RAMP_DROPPED = "dropped: its first batches are too small for the fastest layouts"
MOST_CORPORA = 8
LONG_EVALUATION = 0.2
"""Share of a run from which a plan says how to leave evaluation out."""


@dataclass(frozen=True)
class Report:
    """The plan of a run on a machine; without a machine, no times and no memory limit."""

    run: Run
    plan: Plan
    memories: Sequence[RankMemory]
    """By pipeline rank."""
    corpora: Sequence[CorpusUse]
    machine: Machine | None = None
    time: StepTime | None = None
    cost: Cost | None = None
    remedies: Sequence[Remedy] = ()
    extremes: Sequence[tuple[StepTime, Cost]] = ()
    """The fastest and the slowest step of its range, with their costs; empty without a machine."""
    arguments: str | None = None
    """Those for the layout that was chosen, as the run states none; else None."""
    dense: Candidate | None = None
    """The dense model of as many FLOP a token, of a run with experts, in the same layout."""
    expected: tuple[Mapping[str, Any], Sequence[str]] = ({}, ())
    """The held-out loss to expect of a run whose family has a ladder, and the same in lines."""
    better_saving: tuple[str, float] | None = None
    """A change that leaves more useful time, and its share of the time, where too little is."""

    @property
    def busiest(self) -> RankMemory:
        """Memory of the rank that needs most."""
        return largest_of(self.memories)

    @property
    def spare_bytes(self) -> int | None:
        """Free memory of a device; negative if the run does not fit."""
        usable = usable_bytes(self.machine) if self.machine else None
        return None if usable is None else usable - self.busiest.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory, as far as known."""
        return self.machine is None or fits(self.busiest, self.machine, self.plan.n_ranks)

    @property
    def node_bytes(self) -> int:
        """Host memory of a node's processes."""
        assert self.machine is not None
        return node_bytes(self.busiest, self.machine, self.plan.n_ranks)

    def __str__(self) -> str:
        return render_plan(self).plain


def render_plan(report: Report) -> Text:
    """Renders a plan as a table."""
    devices = describe_devices(report.machine, report.plan.n_ranks)
    text = Text.assemble((report.run.name, "bold"), f" on {devices}")
    sections = (_size, _memory, _traffic, _time, _dense, _whole_run, _expected, _data, _remedies)
    for section in sections:
        for title, line in section(report):
            text.append(f"\n{title:<15}", "cyan").append(line)
    if report.arguments:
        text.append("\narguments for it: ", "cyan").append(report.arguments)
    return text


def describe_devices(machine: Machine | None, n_devices: int) -> str:
    """Describes the devices of a plan."""
    count = format_number(n_devices, "device")
    if machine is None:
        return f"{count}; choose their type with --cluster or --gpu"
    nodes = format_number(math.ceil(n_devices / machine.devices_per_node), "node")
    return f"{count} ({machine.device.name}) in {nodes} of {machine.name}"


def _size(report: Report) -> Iterator[tuple[str, str]]:
    run, plan = report.run, report.plan
    topology, train = plan.topology, run.train
    is_chosen = report.arguments is not None
    how = ": the fastest that fits, as the run states none" if is_chosen else ""
    yield "layout", describe_layout(run, topology) + how
    if "train.batch_ramp" in (report.arguments or ""):
        yield "batch ramp", RAMP_DROPPED
    n_micro = train.global_batch_size // train.micro_batch_size // topology.data
    batches = "micro batch" if n_micro == 1 else "micro batches"
    each = f" on each of {topology.data:,} data parallel ranks" if topology.data > 1 else ""
    yield (
        "batch",
        f"{format_number(train.global_batch_size, 'sequence')}: {n_micro:,} {batches} of "
        f"{train.micro_batch_size}{each}",
    )
    held = held_parameters(run, plan)
    of_rank = f"; {max(held):,} on a rank" if max(held) < plan.n_parameters else ""
    yield "parameters", f"{describe_parameters(run.model, plan.padded_vocabulary_size)}{of_rank}"
    if len(held) > 1:
        counts = _repeats([format_large(n * topology.tensor) for n in held])
        yield "", f"by pipeline rank, all tensor ranks together: {counts}"


def held_parameters(run: Run, plan: Plan) -> list[int]:
    """Counts the parameters that a rank computes with, before ZeRO, by pipeline rank."""
    padded, topology = plan.padded_vocabulary_size, plan.topology
    shards = topology.tensor, topology.expert
    by_stage = [
        count_values(rest_layers(run.model, padded, blocks, topology.tensor))
        + sum(
            n * count_values(block_layers(e, *shards)) for e, n in block_groups(run.model, blocks)
        )
        for blocks in plan.stages
    ]
    return [sum(by_stage[rank :: topology.pipeline]) for rank in range(topology.pipeline)]


def _repeats(texts: Sequence[str]) -> str:
    """Joins texts, with a count for consecutive repeats."""
    runs = [(text, len(list(equal))) for text, equal in itertools.groupby(texts)]
    return ", ".join(f"{n} x {text}" if n > 1 else text for text, n in runs)


def _memory(report: Report) -> Iterator[tuple[str, str]]:
    busiest, spare = report.busiest, report.spare_bytes
    verdict = format_bytes(busiest.peak_bytes)
    if spare is not None:
        usable = format_bytes(busiest.peak_bytes + spare)
        fits = f"fits, {format_bytes(spare)} to spare"
        too_much = f"DOES NOT FIT, {format_bytes(-spare)} too much"
        verdict += f" of {usable}: {fits if spare >= 0 else too_much}"
    yield "memory", verdict
    if len(report.memories) > 1:
        others = _repeats([f"{memory.peak_bytes / 2**30:.1f}" for memory in report.memories])
        yield "", f"of pipeline rank {busiest.pipeline_rank}; by pipeline rank: {others} GiB"
    yield from _bars(busiest.items, format_bytes)
    if busiest.host_bytes:
        yield "", f"  and {format_bytes(busiest.host_bytes)} of host memory for saving"
    if report.machine:
        most, needed = report.machine.host_memory_bytes, report.node_bytes
        there = "host memory at least"
        if most < math.inf:
            there = f"{format_bytes(int(most))}: {'fits' if needed <= most else 'DOES NOT FIT'}"
        yield "", f"  processes of a node: {format_bytes(needed)} of {there}"


def _bars(values: Mapping[str, float], form: Any) -> Iterator[tuple[str, str]]:
    """Draws amounts as bars; the longest has the full width."""
    most = max(values.values(), default=0)
    width = min(BAR_WIDTH, max(4, shutil.get_terminal_size((WIDEST, 0)).columns - TEXT_WIDTH))
    for name, value in values.items():
        if value > 0:
            bar = "█" * max(1, round(width * value / most))
            yield "", f"  {name:<22} {form(value):>10}  {bar}"


def _traffic(report: Report) -> Iterator[tuple[str, str]]:
    title = "traffic"
    kinds = busiest_rank(report.run, report.plan)
    width = max([9, *(len(each.axis) for each in kinds)])
    for each in kinds:
        link = link_of(each, report.plan, report.machine)
        size = format_bytes(each.n_bytes)
        kind = f"{each.axis:<{width}} {each.collective:<15}"
        yield title, f"{kind} {each.calls:>7,} calls {size:>10}{link}"
        title = ""


def link_of(traffic: Traffic, plan: Plan, machine: Machine | None) -> str:
    """Describes the link that an axis communicates over."""
    if machine is None:
        return ""
    topology, outermost = plan.topology, {"stage": "replicate", "same experts": "shard"}
    n_ranks = topology.tensor * topology.expert
    if traffic.axis != "expert":
        place = AXES.index(outermost.get(traffic.axis, traffic.axis))
        n_ranks = math.prod(getattr(topology, axis) for axis in AXES[place:])
    inside = n_ranks <= machine.devices_per_node
    speed = machine.link_bytes_per_second if inside else machine.network_bytes_per_second
    return f"  {'inside nodes' if inside else 'across nodes'}, {speed / 1e9:g} GB/s"


def speeds(report: Report) -> dict[str, Any]:
    """Returns the throughput figures of a step by name."""
    assert report.time is not None
    assert report.machine is not None
    run, plan = report.run, report.plan
    samples = run.train.global_batch_size / report.time.seconds
    tokens = samples * run.model.sequence_length / plan.n_ranks
    peak = report.machine.device.peak_flops_per_second(run.precision.kind)
    return {
        "samples_per_second": samples,
        "tokens_per_second_per_device": tokens,
        "tflops_per_second_per_device": plan.model_flops_per_token * tokens / 1e12,
        "model_flops_utilization": model_flops_utilization(
            plan.model_flops_per_token, tokens, peak
        ),
        **figures_by_formula(run, plan.padded_vocabulary_size, tokens, peak),
    }


def _time(report: Report) -> Iterator[tuple[str, str]]:
    run, plan, time = report.run, report.plan, report.time
    batch_tokens = run.train.global_batch_size * run.model.sequence_length
    flops = plan.model_flops_per_token * batch_tokens
    yield "compute", f"{flops:.3e} model FLOP per step, {flops / plan.n_ranks:.3e} per device"
    if time is None:
        return
    found = speeds(report)
    rates = ("samples_per_second", "tokens_per_second_per_device", "tflops_per_second_per_device")
    samples, tokens, tflops = (format_figure(found[rate], 4) for rate in rates)
    mfu = found["model_flops_utilization"]
    fast, slow = (extreme.seconds for extreme, _ in report.extremes)
    of_peak = ""
    if mfu is not None:
        low, high = mfu * time.seconds / slow, mfu * time.seconds / fast
        of_peak = f" (MFU {mfu:.1%}; {low:.0%} to {high:.0%})"
    yield (
        "step",
        f"{describe_step(time.seconds)} ({describe_step(fast)} to {describe_step(slow)}): "
        f"{samples} samples/s, {tokens} tokens/s and {tflops} TFLOP/s per device{of_peak}",
    )
    if by_formula := describe_formula(found):
        yield "", by_formula
    shares = {part: seconds for part, seconds in time.parts.items() if seconds > 0}
    yield from _bars(shares, lambda seconds: f"{seconds / time.seconds:.1%}")


def _dense(report: Report) -> Iterator[tuple[str, str]]:
    dense, time = report.dense, report.time
    if dense is None or time is None:
        return
    n, peak = dense.plan.n_parameters, dense.memory.peak_bytes
    yield (
        "against dense",
        f"{format_large(n)} parameters of the same FLOP a token (d_ff {dense.run.model.d_ff:,}): "
        f"{describe_step(dense.time.seconds)} per step, {format_bytes(peak)}",
    )
    yield (
        "",
        f"so experts have {report.plan.n_parameters / n:.1f} times the parameters for "
        f"{time.seconds / dense.time.seconds:.2f} times the time and "
        f"{report.busiest.peak_bytes / peak:.2f} times the memory",
    )


def _whole_run(report: Report) -> Iterator[tuple[str, str]]:
    plan, cost = report.plan, report.cost
    yield "length", f"{plan.n_steps:,} steps, {format_large(plan.n_tokens)} tokens"
    yield "checkpoint", format_bytes(checkpoint_bytes(report.run, plan.n_parameters))
    if cost is None:
        return
    for each in cost.savings:
        yield (
            "",
            f"  {each.storage_bytes_per_second / 1e9:g} GB/s: written in "
            f"{format_seconds(each.write_seconds)}, training stalls for "
            f"{format_seconds(each.stall_seconds)}",
        )
    worst, best = cost.useful_shares
    yield (
        "failures",
        f"one in {format_seconds(cost.seconds_between_failures)}, saves every "
        f"{format_seconds(cost.interval_seconds)}: {cost.useful_share:.1%} of the time is "
        f"useful ({worst:.1%} to {best:.1%}); "
        f"every {format_seconds(cost.savings[0].best_interval_seconds)} is optimal",
    )
    if report.better_saving:
        change, share = report.better_saving
        lost = saving.RESTART_SECONDS / cost.seconds_between_failures
        better = f"{change} makes it {share:.1%}" if change else "no way of saving loses less"
        yield "", f"warning: this is under 95%; {better}; restarts alone cost {lost:.1%}"
    if math.isinf(cost.seconds):
        yield "whole run", "never ends: failures undo more work than is done between them"
        return
    fast, slow = (extreme for _, extreme in report.extremes)
    hours = f"{format_figure(fast.device_hours)} to {format_figure(slow.device_hours)}"
    price = ""
    if cost.price is not None and fast.price is not None and slow.price is not None:
        between = f" ({fast.price:,.0f} to {slow.price:,.0f})"
        price = f", {cost.price:,.0f}{between} at the price given"
    yield (
        "whole run",
        f"{format_seconds(cost.seconds)} ({format_seconds(fast.seconds)} to "
        f"{format_seconds(slow.seconds)}), {format_figure(cost.device_hours)} ({hours}) "
        f"device-hours{price}; steps alone {format_seconds(cost.step_seconds)}, evaluation "
        f"{format_seconds(cost.evaluation_seconds)}, {cost.n_failures:.1f} failures",
    )

    share = cost.evaluation_seconds / cost.seconds
    if share > LONG_EVALUATION:
        yield "", f"evaluation takes {share:.0%} of that: evaluate.batches=0 leaves it out"


def _expected(report: Report) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(report.expected[1]):
        yield "" if number else "expected loss", line


def _data(report: Report) -> Iterator[tuple[str, str]]:
    title = "data"
    if not report.corpora:
        yield title, "the run names no data"
    known = [use for use in report.corpora if use.epochs is not None]
    unknown = [use for use in report.corpora if use.epochs is None]
    for use in known[:MOST_CORPORA]:
        yield (
            title,
            f"{use.prefix}: {use.share:.1%} of the tokens read, {format_figure(use.epochs or 0)} "
            f"epochs of the training split of its {format_large(use.tokens or 0)}",
        )
        title = ""
    if len(known) > MOST_CORPORA:
        yield "", f"and {len(known) - MOST_CORPORA} more"
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        yield title, f"{unknown[0].prefix}{more}: epochs unknown, some token files are missing"


def _remedies(report: Report) -> Iterator[tuple[str, str]]:
    if report.remedies:
        yield "to make it fit", "cheapest step first:"
    for remedy in report.remedies:
        candidate = remedy.candidate
        step, n = describe_step(candidate.time.seconds), candidate.plan.n_ranks
        more = f" on {n:,} devices" if n != report.plan.n_ranks else ""
        left = format_bytes(candidate.memory.peak_bytes)
        yield "", f"  {remedy.change}: {step} per step{more}, {left}"


def describe_step(seconds: float) -> str:
    """Formats the time of a step, with more digits than a duration."""
    is_long = seconds >= 0.1
    return f"{format_figure(seconds)} s" if is_long else f"{format_figure(1000 * seconds)} ms"


def plan_as_json(report: Report) -> dict[str, Any]:
    """Returns the report as JSON values; sizes in bytes, times in seconds."""
    run, plan, machine = report.run, report.plan, report.machine
    found: dict[str, Any] = {
        "run": run.name,
        "plan": plan.as_json(),
        "machine": machine
        and {
            "name": machine.name,
            "device": machine.device.name,
            "devices_per_node": machine.devices_per_node,
        },
        "chosen": report.arguments,
        "fits": report.fits,
        "usable_bytes": usable_bytes(machine) if machine else None,
        "parameters_active": active_parameter_count(run.model, plan.padded_vocabulary_size),
        "parameters_held": held_parameters(run, plan),
        "memory": [memory_as_json(memory) for memory in report.memories],
        "traffic": [asdict(each) for each in busiest_rank(run, plan)],
        "checkpoint_bytes": checkpoint_bytes(run, plan.n_parameters),
        "data": [asdict(use) for use in report.corpora],
        "expected": report.expected[0] or None,
    }
    if report.time is not None:
        between = [time.seconds for time, _ in report.extremes] or None
        found["step"] = asdict(report.time) | speeds(report) | {"seconds_between": between}
    if report.dense is not None:
        found["dense"] = {
            "d_ff": report.dense.run.model.d_ff,
            "parameters": report.dense.plan.n_parameters,
            "peak_bytes": report.dense.memory.peak_bytes,
            "seconds": report.dense.time.seconds,
        }
    if report.cost is not None:
        found["cost"] = {name: _finite(value) for name, value in asdict(report.cost).items()}
        between = [_finite(cost.seconds) for _, cost in report.extremes] or None
        found["cost"]["seconds_between"] = between
        found["cost"]["better_saving"] = report.better_saving
    if report.remedies:
        found["remedies"] = [
            {
                "change": remedy.change,
                "n_devices": remedy.candidate.plan.n_ranks,
                "seconds": remedy.candidate.time.seconds,
                "peak_bytes": remedy.candidate.memory.peak_bytes,
            }
            for remedy in report.remedies
        ]
    return found


def _finite(value: Any) -> Any:
    return None if value == math.inf else value


def memory_as_json(memory: RankMemory) -> dict[str, Any]:
    """Returns the memory of a rank as JSON values."""
    return asdict(memory) | {"peak_bytes": memory.peak_bytes}
