"""The tables that three guides print, from a record of `trainyard bench`.

    trainyard bench recipes/lumi/13b.toml --flop-formula megatron_deepspeed --output record.json
    python benchmarks/guide_tables.py record.json lumi

Their logs count FLOP by megatron_deepspeed. The 64-GPU benchmark, "tgs", times --steps 5-10.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainyard.units import format_figure

TABLES = ("msamp", "lumi", "tgs")
GIB = 2**30

Cells = list[Any]


def render_guide_table(record: dict[str, Any], name: str) -> str:
    """Formats a record of `bench.record` as the table of a guide, in Markdown.

    Args:
        record: by another formula than that of MFU (`log.flop_formula`).
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


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("record", type=Path, help="what `trainyard bench --output` wrote")
    parser.add_argument("table", choices=TABLES)
    options = parser.parse_args()
    record = json.loads(options.record.read_text(encoding="utf-8"))
    if "flop_formula" not in record["candidates"][0]:
        sys.exit(
            f"error: {options.record} has TFLOP/s by the formula of MFU alone\n"
            "hint: trainyard bench .. --flop-formula megatron_deepspeed, as the guides count"
        )
    print(render_guide_table(record, options.table))


if __name__ == "__main__":
    main()
