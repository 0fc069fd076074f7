"""A benchmark's output: a record with everything its figures depend on, and a table."""

from __future__ import annotations

import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainyard.bench.figures import FORMULAS, compute_figures, recomputed_flops_per_token
from trainyard.bench.rounds import BenchOptions, BenchResult
from trainyard.launch.environment import find_commit, hide_secrets, read_versions
from trainyard.planning.flops import MODEL_FLOPS
from trainyard.planning.hardware import find_device
from trainyard.planning.resolve import resolve
from trainyard.planning.traffic import busiest_rank
from trainyard.units import format_bytes, format_figure

LABEL_WIDTH, COLUMN_WIDTH = 30, 18
HOW_SPLIT = {
    "cpu": "timers of the host",
    "cuda": "events between the kernels; data wait is the device's",
}
HOW_COMMUNICATION = (
    "share of each part in which the first rank only communicates, from a trace of more steps; "
    "waiting for a slower rank counts"
)

Record = dict[str, Any]


def build_record(outcomes: Sequence[BenchResult], order: BenchOptions, data: str) -> Record:
    """Builds the record of results and conditions.

    Args:
        outcomes: of all candidates.
        order: the request.
        data: describes the data.
    """
    run = outcomes[0].candidate.run
    plan = resolve(run, order.n_ranks)
    device = outcomes[0].results[0]["device"]
    versions = read_versions()
    machine = versions.pop("machine")
    del versions["command"]  # the command line of this process, whatever its verb
    return {
        "benchmark": "trainyard bench",
        "date": time.strftime("%Y-%m-%d"),
        "command": _command(),
        "commit": find_commit(),
        "machine": {
            "processor": machine,
            "memory": format_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
            "device": device,
            "peak_flops_per_second": _peaks(device),
        },
        "packages": versions,
        "run": {
            "name": run.name,
            **{
                section: getattr(run, section).model_dump(mode="json")
                for section in ("model", "parallel")
            },
            "micro_batch_size": run.train.micro_batch_size,
            "global_batch_size": run.train.global_batch_size,
            "compile": run.train.compile,
            "n_parameters": plan.n_parameters,
            "model_flops_per_token": plan.model_flops_per_token,
            "recomputed_flops_per_token": recomputed_flops_per_token(run),
        },
        "n_ranks": plan.n_ranks,
        "layout": asdict(plan.topology),
        "data": data,
        "steps": {**asdict(order.steps), "rounds": order.n_rounds},
        "formulas": FORMULAS,
        "candidates": [_describe(outcome, outcomes[0], order) for outcome in outcomes],
    }


def _describe(outcome: BenchResult, first: BenchResult, order: BenchOptions) -> dict[str, Any]:
    run, results, n_ranks = outcome.candidate.run, outcome.results, order.n_ranks
    device = results[0]["device"]
    plan = resolve(run, n_ranks)
    figures = compute_figures(run, plan, outcome.step_seconds, device)
    ratios = outcome.speed_over(first)
    split = results[0]["split"]
    startup = [result["startup_seconds"] for result in results]
    starts = {name: statistics.median(each[name] for each in startup) for name in startup[0]}
    return {
        "name": outcome.candidate.name,
        "baseline": outcome.candidate.baseline or None,
        "precision": run.precision.kind,
        **figures.as_json(),
        "exchanged_weight_bytes": sum(
            each.n_bytes for each in busiest_rank(run, plan) if each.axis in ("shard", "replicate")
        ),
        "peak_memory_bytes": max(result["peak_memory_bytes"] for result in results),
        "split": split
        | {
            "steps": order.steps.taken_apart,
            "overhead": split["milliseconds_per_step"] / split["milliseconds_of_other_steps"] - 1,
            "measured_by": HOW_SPLIT["cpu" if device == "cpu" else "cuda"],
            "communication_measured_by": HOW_COMMUNICATION if n_ranks > 1 else "one rank: none",
        },
        "startup_seconds": starts | {"total": sum(starts.values())},
        "speed_over_first": {
            "median": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
        },
        "first_loss": results[0]["first_loss"],
        "last_loss": results[0]["last_loss"],
        "n_threads": results[0]["n_threads"],
        "profile": results[0]["profile"],
        "rounds": [
            {"step_milliseconds": [1000 * seconds for seconds in result["step_seconds"]]}
            for result in results
        ],
    }


def _command() -> str:
    # Keep the user's paths private.
    arguments = [Path(each).name if Path(each).is_absolute() else each for each in sys.argv[1:]]
    return hide_secrets(shlex.join(["trainyard", *arguments]))


def _peaks(device_name: str) -> dict[str, float]:
    device = find_device(device_name)
    return device.peaks if device else {}


def render_table(record: Record) -> str:
    """Formats a record as a table: a row per figure, a column per candidate."""
    machine, run, steps = record["machine"], record["run"], record["steps"]
    ranks = f"{record['n_ranks']} rank{'' if record['n_ranks'] == 1 else 's'}"
    batch = f"{run['global_batch_size']} sequences of {run['model']['sequence_length']} tokens"
    rounds = f" in each of {steps['rounds']} rounds" if steps["rounds"] > 1 else ""
    lines = [
        f"{run['name']}: {run['n_parameters']:,} parameters, {batch} a step, "
        f"micro batches of {run['micro_batch_size']}, {record['data']}",
        f"{ranks} on {machine['device']}; {machine['processor']}",
        f"{steps['timed']} steps after {steps['warm_up']} of warm-up{rounds}",
        "",
    ]
    candidates = record["candidates"]
    lines.append(_row("", [each["name"] for each in candidates]))
    for label, show in _rows(candidates):
        lines.append(_row(label, [show(each) for each in candidates]))
    lines += ["", *_notes(record)]
    return "\n".join(line.rstrip() for line in lines)


def _rows(candidates: list[Any]) -> list[tuple[str, Callable[[Any], str]]]:
    rows: list[tuple[str, Callable[[Any], str]]] = []
    if len(candidates) > 1:
        rows.append(("times as fast as the first", _show_ratio))
        rows.append(("  lowest - highest round", _show_ratio_range))
    rows += [
        ("ms/step, median", lambda c: f"{c['milliseconds_per_step']['median']:.2f}"),
        ("  10 % - 90 %", _show_spread),
        ("samples/s", lambda c: format_figure(c["samples_per_second"], 4)),
        ("tokens/s/GPU", lambda c: format_figure(c["tokens_per_second_per_device"], 5)),
        ("TFLOP/s/GPU", lambda c: format_figure(c["tflops_per_second_per_device"], 4)),
        ("MFU", lambda c: _show_share(c["model_flops_utilization"])),
        ("HFU", lambda c: _show_share(c["hardware_flops_utilization"])),
    ]
    if "flop_formula" in candidates[0]:
        name = candidates[0]["flop_formula"]
        rows += [
            (
                f"TFLOP/s, {name}",
                lambda c: format_figure(c["formula_tflops_per_second_per_device"], 4),
            ),
            ("  of the peak", lambda c: _show_share(c["formula_share_of_peak"], digits=2)),
        ]
    rows += [
        ("peak memory", lambda c: format_bytes(c["peak_memory_bytes"])),
        ("loss, first and last", lambda c: f"{c['first_loss']:.4f}  {c['last_loss']:.4f}"),
    ]
    for part in candidates[0]["split"]["milliseconds"]:
        rows.append((part, lambda c, part=part: _show_part(c["split"], part)))  # type: ignore[misc]
    rows.append(("  overhead of the breakdown", lambda c: f"{c['split']['overhead']:+.1%}"))
    for name in candidates[0]["startup_seconds"]:
        title = "start in all" if name == "total" else f"start: {name}"
        rows.append((title, lambda c, name=name: f"{c['startup_seconds'][name]:.2f} s"))  # type: ignore[misc]
    if candidates[0]["profile"] is not None:
        waits, reads = "host_waits_per_step", "host_reads_per_step"
        rows.append(("host waits a step", lambda c: f"{sum(c['profile'][waits].values()):g}"))
        rows.append(("host reads a step", lambda c: f"{sum(c['profile'][reads].values()):g}"))
    return rows


def _notes(record: Record) -> list[str]:
    notes = [f"TFLOP/s and MFU: model FLOP by {MODEL_FLOPS}; HFU: with recomputation"]
    if not record["machine"]["peak_flops_per_second"]:
        notes.append("MFU, HFU: the peak of this device is not known")
    for each in record["candidates"]:
        profile = each["profile"]
        for kind, words in (("waits", "waits for the device"), ("reads", "reads a number")):
            for name, count in (profile[f"host_{kind}_per_step"] if profile else {}).items():
                notes.append(f"{each['name']}: the host {words} {count:g} x a step: {name}")
    return notes


def _row(label: str, cells: Sequence[str]) -> str:
    return f"{label:<{LABEL_WIDTH}}" + "".join(f"{cell:>{COLUMN_WIDTH}}" for cell in cells)


def _show_ratio(candidate: Any) -> str:
    return f"{candidate['speed_over_first']['median']:.3f}"


def _show_ratio_range(candidate: Any) -> str:
    ratio = candidate["speed_over_first"]
    return f"{ratio['lowest']:.3f} - {ratio['highest']:.3f}"


def _show_spread(candidate: Any) -> str:
    spread = candidate["milliseconds_per_step"]
    return f"{spread['p10']:.2f} - {spread['p90']:.2f}"


def _show_share(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{share:.{digits}%}"


def _show_part(split: Any, part: str) -> str:
    milliseconds = split["milliseconds"][part]
    return f"{milliseconds:.2f} ms {milliseconds / split['milliseconds_per_step']:>6.1%}"
