"""The tables that the guides print, from a record: `trainyard bench --table NAME`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from trainyard.config.run import FlopFormula
from trainyard.errors import ConfigError
from trainyard.planning.flops import MODEL_FLOPS
from trainyard.units import format_figure

TABLES = ("msamp", "lumi", "tgs")
FORMULA: FlopFormula = "megatron_deepspeed"
"""What the logs of all three guides print."""
TGS_STEPS = "5-10"
GIB = 2**30

Cells = list[Any]


def refuse_table(name: str, formula: str | None) -> None:
    """Rejects a name that is not in `TABLES`, and a formula that no guide prints.

    Raises:
        ConfigError: with the nearest name, or the formulas.
    """
    if formula == MODEL_FLOPS:
        raise ConfigError(
            f"--table {name} --flop-formula {formula}: the guides' tables are by another formula",
            f"omit --flop-formula for {FORMULA}, or omit --table: MFU is by {formula}",
        )
    if name not in TABLES:
        close = difflib.get_close_matches(name, TABLES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"--table {name}: no guide has this table", f"{hint}tables: {', '.join(TABLES)}"
        )


def render_guide_table(record: dict[str, Any], name: str) -> str:
    """Formats a record of `bench.record` as the table of a guide, in Markdown.

    Args:
        record: with `log.flop_formula` set.
        name: one of `TABLES`. "msamp": a row per precision; memory and exchanged weights are in
            GiB, like the GB there. "lumi": a row per candidate. "tgs": a row per timed step of
            the first round; TGS is tokens per GPU and second.
    """
    heads, rows = {"msamp": _msamp, "lumi": _lumi, "tgs": _tgs}[name](record)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _msamp(record: dict[str, Any]) -> tuple[Cells, Iterator[Cells]]:
    heads = ["model", "TP/PP/DP", "micro batch", "precision", "GPU memory, GiB", "samples/s"]
    heads += ["TFLOPS", "MFU, %", "communication, %", "weights exchanged, GiB"]
    return heads, (
        [
            record["run"]["name"],
            _layout(record, "tensor", "pipeline"),
            record["run"]["micro_batch_size"],
            each["name"],
            f"{each['peak_memory_bytes'] / GIB:.1f}",
            *_speed(each),
            f"{100 * _communication(each['split']):.1f}",
            f"{each['exchanged_weight_bytes'] / GIB:.1f}",
        ]
        for each in record["candidates"]
    )


def _lumi(record: dict[str, Any]) -> tuple[Cells, Iterator[Cells]]:
    heads = ["model", "precision", "GPUs", "PP/TP/DP", "ZeRO", "samples/s"]
    heads += ["TFLOPs/GPU", "% of the peak"]
    return heads, (
        [
            record["run"]["name"],
            each["name"],
            record["n_ranks"],
            _layout(record, "pipeline", "tensor"),
            record["run"]["parallel"]["zero_stage"],
            *_speed(each),
        ]
        for each in record["candidates"]
    )


def _tgs(record: dict[str, Any]) -> tuple[Cells, Iterator[Cells]]:
    return ["step", "ms/iter", "samples/s", "TGS", "TFLOPs"], _tgs_rows(record)


def _tgs_rows(record: dict[str, Any]) -> Iterator[Cells]:
    run, n_ranks = record["run"], record["n_ranks"]
    for each in record["candidates"]:
        tflop_per_sample = each["formula_tflops_per_second_per_device"] / each["samples_per_second"]
        milliseconds = each["rounds"][0]["step_milliseconds"]
        mean = sum(milliseconds) / len(milliseconds)
        steps = enumerate(milliseconds, start=record["steps"]["warm_up"] + 1)
        for name, step in [*steps, ("mean", mean)]:
            samples = run["global_batch_size"] * 1000 / step
            tgs = samples * run["model"]["sequence_length"] / n_ranks
            label = str(name) if len(record["candidates"]) == 1 else f"{each['name']}, {name}"
            tflops = format_figure(samples * tflop_per_sample, 4)
            yield [label, f"{step:.1f}", f"{samples:.3f}", f"{tgs:.1f}", tflops]


def _layout(record: dict[str, Any], *first: str) -> str:
    layout = record["layout"]
    data = layout["replicate"] * layout["shard"]
    return "/".join(str(n) for n in [*(layout[axis] for axis in first), data])


def _speed(candidate: dict[str, Any]) -> Iterator[str]:
    """Yields samples/s, TFLOP/s by the guide's formula, and their share of the peak."""
    share = candidate["formula_share_of_peak"]
    yield f"{candidate['samples_per_second']:.3f}"
    yield format_figure(candidate["formula_tflops_per_second_per_device"], 4)
    yield "-" if share is None else f"{100 * share:.2f}"


def _communication(split: dict[str, Any]) -> float:
    return float(split["milliseconds"]["communication"] / split["milliseconds_per_step"])
