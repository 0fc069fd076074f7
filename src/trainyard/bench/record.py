"""A benchmark's output: figures, a record with everything they depend on, and a table.

    tokens/s/GPU     tokens of the timed steps / their time / ranks
    TFLOP/s/GPU      tokens/s/GPU x model FLOP per token (`layout.flops`, "megatron_causal")
    MFU              that over the device's peak for the precision
    HFU              the same, with the matmuls that parallel.recompute repeats

HFU does not count recomputation inside attention kernels. Recomputation stops at the last value
that the backward pass needs, so the last matmul of a block or an attention layer is not repeated
(with dropout, that of a block is).
"""

from __future__ import annotations

import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from trainyard.architecture import block_groups, matmuls
from trainyard.bench.rounds import BenchRun, Rounds
from trainyard.config.devices import find_device
from trainyard.config.run import Run
from trainyard.launch.environment import find_commit, hide_secrets, read_versions
from trainyard.layout.flops import (
    MODEL_FLOPS,
    block_flops,
    figures_by_formula,
    matmul_flops,
    model_flops_utilization,
    score_flops,
    tflops_per_second_per_gpu,
)
from trainyard.layout.resolve import Plan, resolve
from trainyard.planning.traffic import busiest_rank
from trainyard.units import format_bytes, format_figure, format_number

LABEL_WIDTH, COLUMN_WIDTH = 30, 18
FORMULAS = {
    "tokens_per_second_per_device": "tokens of the timed steps / their time / ranks",
    "tflops_per_second_per_device": f"model FLOP a token ({MODEL_FLOPS}) x tokens/s/device / 1e12",
    "model_flops_utilization": "that / the device's peak for the precision",
    "hardware_flops_utilization": "the same with the matmuls that parallel.recompute repeats",
}
HOW_SPLIT = {
    "cpu": "timers of the host",
    "cuda": "events between the kernels; data wait is the device's",
}
HOW_COMMUNICATION = (
    "share of each part in which the first rank only communicates, from a trace of more steps; "
    "waiting for a slower rank counts"
)

Record = dict[str, Any]


def build_record(timed: Sequence[BenchRun], rounds: Rounds, data: str) -> Record:
    """Builds the record of results and conditions.

    Args:
        timed: all runs with their results.
        rounds: the request.
        data: describes the data.
    """
    run = timed[0].run
    plan = resolve(run, rounds.n_ranks)
    device_name = timed[0].results[0]["device"]
    device = find_device(device_name)
    versions = read_versions()
    machine = versions.pop("machine")
    del versions["command"]  # the command line of this process, whatever its verb
    # Keep the user's paths private.
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return {
        "benchmark": "trainyard bench",
        "date": time.strftime("%Y-%m-%d"),
        "command": hide_secrets(shlex.join(["trainyard", *words])),
        "commit": find_commit(),
        "machine": {
            "processor": machine,
            "memory": format_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
            "device": device_name,
            "peak_flops_per_second": device.peaks if device else {},
        },
        "packages": versions,
        "run": {
            "name": run.name,
            "model": run.model.model_dump(mode="json"),
            "parallel": run.parallel.model_dump(mode="json"),
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
        "steps": {**asdict(rounds.job.steps), "rounds": rounds.n_rounds},
        "formulas": FORMULAS,
        "candidates": [_describe(each, timed[0], rounds) for each in timed],
    }


def _describe(timed: BenchRun, first: BenchRun, rounds: Rounds) -> dict[str, Any]:
    run, results = timed.run, timed.results
    device = results[0]["device"]
    plan = resolve(run, rounds.n_ranks)
    ratios = timed.speed_over(first)
    split = results[0]["split"]
    parts = [result["startup_seconds"] for result in results]
    startup = {name: statistics.median(seconds[name] for seconds in parts) for name in parts[0]}
    return {
        "name": timed.name,
        "precision": run.precision.kind,
        **compute_figures(run, plan, timed.step_seconds, device),
        "exchanged_weight_bytes": sum(
            call.n_bytes for call in busiest_rank(run, plan) if call.axis in ("shard", "replicate")
        ),
        "peak_memory_bytes": max(result["peak_memory_bytes"] for result in results),
        "split": split
        | {
            "steps": rounds.job.steps.breakdown,
            "overhead": split["milliseconds_per_step"] / split["milliseconds_of_other_steps"] - 1,
            "measured_by": HOW_SPLIT["cpu" if device == "cpu" else "cuda"],
            "communication_measured_by": HOW_COMMUNICATION
            if rounds.n_ranks > 1
            else "one rank: none",
        },
        "startup_seconds": startup | {"total": sum(startup.values())},
        "speed_over_first": {
            "median": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
        },
        **{name: results[0][name] for name in ("first_loss", "last_loss", "n_threads", "profile")},
        "rounds": [
            {"step_milliseconds": [1000 * seconds for seconds in result["step_seconds"]]}
            for result in results
        ],
    }


def compute_figures(
    run: Run, plan: Plan, step_seconds: Sequence[float], device_name: str
) -> dict[str, Any]:
    """Computes the throughput of timed steps of full batches, as in a record.

    Args:
        run: what was timed.
        plan: of the ranks it was timed on.
        step_seconds: of each step, on its slowest rank.
        device_name: torch's name, or "cpu".

    Returns:
        the figures by name; utilizations are None if the device's peak is unknown.
    """
    samples_per_second = run.train.global_batch_size * len(step_seconds) / sum(step_seconds)
    tokens_per_second = samples_per_second * run.model.sequence_length
    per_device = tokens_per_second / plan.n_ranks
    device = find_device(device_name)
    peak = device.peak_flops_per_second(run.precision.kind) if device else None
    flops = plan.model_flops_per_token
    milliseconds = [1000 * seconds for seconds in step_seconds]
    p10, median, p90 = map(float, np.percentile(milliseconds, [10, 50, 90]))
    mean = statistics.fmean(milliseconds)
    return {
        "milliseconds_per_step": {"median": median, "p10": p10, "p90": p90, "mean": mean},
        "samples_per_second": samples_per_second,
        "tokens_per_second_per_device": per_device,
        "tflops_per_second_per_device": tflops_per_second_per_gpu(
            flops, tokens_per_second, plan.n_ranks
        ),
        "model_flops_utilization": model_flops_utilization(flops, per_device, peak),
        "hardware_flops_utilization": model_flops_utilization(
            flops + recomputed_flops_per_token(run), per_device, peak
        ),
        **figures_by_formula(run, plan.padded_vocabulary_size, per_device, peak),
    }


def recomputed_flops_per_token(run: Run) -> float:
    """Counts the FLOP of matmuls that the backward pass repeats, per token."""
    model, recompute = run.model, run.parallel.recompute
    if recompute == "none":
        return 0.0
    repeated = matmuls(model, "attention" if recompute == "attention" else "")
    if recompute == "attention" or not model.dropout:
        repeated = repeated[:-1]  # nothing needs its output
    # A token sees half of the others on average.
    per_block = matmul_flops(repeated) + score_flops(model) // 2
    if recompute == "block" and model.n_experts:  # all of it, as what follows needs outputs
        groups = block_groups(model, (0, model.n_layers))
        n_flops = sum(n * block_flops(kind) for kind, n in groups)
        per_block = n_flops // model.n_layers + score_flops(model) // 2
    return model.n_layers * run.parallel.recompute_share * per_block


def render_table(record: Record) -> str:
    """Formats a record as a table: a row per figure, a column per candidate."""
    machine, run, steps = record["machine"], record["run"], record["steps"]
    batch = f"{run['global_batch_size']} sequences of {run['model']['sequence_length']} tokens"
    rounds = f" in each of {steps['rounds']} rounds" if steps["rounds"] > 1 else ""
    lines = [
        f"{run['name']}: {run['n_parameters']:,} parameters, {batch} a step, "
        f"micro batches of {run['micro_batch_size']}, {record['data']}",
        f"{format_number(record['n_ranks'], 'rank')} on {machine['device']}; "
        f"{machine['processor']}",
        f"{steps['timed']} steps after {steps['warm_up']} of warm-up{rounds}",
        "",
        *_rows(record["candidates"]),
        "",
        f"TFLOP/s and MFU: model FLOP by {MODEL_FLOPS}; HFU: with recomputation",
    ]
    if not machine["peak_flops_per_second"]:
        lines.append("MFU, HFU: the peak of this device is not known")
    for candidate in record["candidates"]:
        for kind, words in (("waits", "waits for the device"), ("reads", "reads a number")):
            counts = candidate["profile"][f"host_{kind}_per_step"] if candidate["profile"] else {}
            for name, n in counts.items():
                lines.append(f"{candidate['name']}: the host {words} {n:g} x a step: {name}")
    return "\n".join(line.rstrip() for line in lines)


def _rows(candidates: Sequence[Any]) -> Iterator[str]:
    def row(label: str, show: Callable[[Any], str] | str) -> str:
        """Formats a row, by a function of a candidate or a template."""
        return _row(
            label, [show.format(**c) if isinstance(show, str) else show(c) for c in candidates]
        )

    yield row("", "{name}")
    if len(candidates) > 1:
        yield row("times as fast as the first", "{speed_over_first[median]:.3f}")
        ends = "{speed_over_first[lowest]:.3f} - {speed_over_first[highest]:.3f}"
        yield row("  lowest - highest round", ends)
    yield row("ms/step, median", "{milliseconds_per_step[median]:.2f}")
    ends = "{milliseconds_per_step[p10]:.2f} - {milliseconds_per_step[p90]:.2f}"
    yield row("  10 % - 90 %", ends)
    yield row("samples/s", lambda c: format_figure(c["samples_per_second"], 4))
    yield row("tokens/s/GPU", lambda c: format_figure(c["tokens_per_second_per_device"], 5))
    yield row("TFLOP/s/GPU", lambda c: format_figure(c["tflops_per_second_per_device"], 4))
    yield row("MFU", lambda c: _show_share(c["model_flops_utilization"]))
    yield row("HFU", lambda c: _show_share(c["hardware_flops_utilization"]))
    first = candidates[0]
    if "flop_formula" in first:
        by_formula = [c["formula_tflops_per_second_per_device"] for c in candidates]
        yield _row(f"TFLOP/s, {first['flop_formula']}", [format_figure(n, 4) for n in by_formula])
        yield row("  of the peak", lambda c: _show_share(c["formula_share_of_peak"], digits=2))
    yield row("peak memory", lambda c: format_bytes(c["peak_memory_bytes"]))
    yield row("loss, first and last", "{first_loss:.4f}  {last_loss:.4f}")
    for part in first["split"]["milliseconds"]:
        yield _row(part, [_show_part(c["split"], part) for c in candidates])
    yield row("  overhead of the breakdown", "{split[overhead]:+.1%}")
    for name in first["startup_seconds"]:
        title = "start in all" if name == "total" else f"start: {name}"
        yield row(title, f"{{startup_seconds[{name}]:.2f}} s")
    if first["profile"] is not None:
        for kind in ("waits", "reads"):
            profiles = [c["profile"][f"host_{kind}_per_step"] for c in candidates]
            yield _row(f"host {kind} a step", [f"{sum(counts.values()):g}" for counts in profiles])


def _row(label: str, cells: Iterable[str]) -> str:
    return f"{label:<{LABEL_WIDTH}}" + "".join(f"{cell:>{COLUMN_WIDTH}}" for cell in cells)


def _show_share(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{share:.{digits}%}"


def _show_part(split: Any, part: str) -> str:
    milliseconds = split["milliseconds"][part]
    return f"{milliseconds:.2f} ms {milliseconds / split['milliseconds_per_step']:>6.1%}"
