"""`trainyard bench` over every preset that fits this machine: one table, one record.

    python -m benchmarks.presets --output record.json [--only tiny,demo] [--list]

Presets whose models are of one shape are measured once. A step is one micro batch of one sequence
here (of the preset's own size, where that is small): throughput of a full batch is a little higher,
since its update comes once for more tokens. On a processor without bf16 products everything runs in
fp32. A preset fits where what `trainyard plan` says it needs is less than nine tenths of the memory
that is free, on a CPU two thirds; with `parallel.recompute=block`, where it does not fit without.
Of the others the record says what they would need.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.commands import Budget, Variant, bench
from benchmarks.measuring import describe_machine, render

from trainyard.config.devices import cpu_multiplies_bf16_natively
from trainyard.config.load import load_run, preset_names
from trainyard.config.run import Model, Run
from trainyard.layout.resolve import resolve
from trainyard.planning.memory import busiest_memory

FREE_SHARE = 0.9
# Memory that was freed stays with a process (M_MMAP_MAX, benchmarks/README.md).
CPU_FREE_SHARE = 2 / 3
OTHER_BYTES = 2**29  # the program and its libraries
LARGE_PARAMETERS = 200e6  # from here on a single step counts, on a CPU
LARGEST_SEQUENCES = 16


@dataclass(frozen=True)
class Row:
    names: list[str]
    """Presets of this shape."""
    run: Run
    n_parameters: int
    recompute: str
    """What makes it fit; empty: nothing does."""
    n_bytes: int
    kind: str
    sequences: int
    """In a step."""


def free_bytes() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    lines = Path("/proc/meminfo").read_text().splitlines()
    facts = dict(line.split(":") for line in lines)
    return int(facts["MemAvailable"].split()[0]) * 1024


def sized(run: Run, recompute: str, kind: str, sequences: int) -> Run:
    """Gives the run with a step of one micro batch of so many sequences."""
    size = {"micro_batch_size": sequences, "global_batch_size": sequences, "batch_ramp": None}
    return run.model_copy(
        update={
            "train": run.train.model_copy(update=size),
            "parallel": run.parallel.model_copy(update={"recompute": recompute}),
            "precision": run.precision.model_copy(update={"kind": kind}),
        }
    )


def needed_bytes(run: Run) -> int:
    """Gives what `trainyard plan` says of memory, and what the program has besides."""
    on_gpu = torch.cuda.is_available()
    return busiest_memory(run, resolve(run, 1), on_gpu).peak_bytes + OTHER_BYTES


def micro_batch(run: Run, n_parameters: int) -> int:
    if n_parameters > LARGE_PARAMETERS and not torch.cuda.is_available():
        return 1
    return min(run.train.micro_batch_size, LARGEST_SEQUENCES)


def list_rows(kind_of: Any, limit: int) -> list[Row]:
    """Groups presets by shape, the smallest first."""
    shapes: dict[tuple[Model, int, str], list[str]] = {}
    runs: dict[str, Run] = {}
    for name in preset_names():
        run = runs[name] = load_run(name).run
        # How weights begin takes no time.
        plain = run.model.model_copy(update={"init_std": 0.02, "layer_norm_epsilon": 1e-5})
        sequences = micro_batch(run, resolve(run, 1).n_parameters)
        shapes.setdefault((plain, sequences, kind_of(run)), []).append(name)
    rows = []
    for (_, sequences, kind), names in shapes.items():
        run = runs[names[0]]
        n_parameters = resolve(run, 1).n_parameters
        sizes = {
            recompute: needed_bytes(sized(run, recompute, kind, sequences))
            for recompute in ("none", "block")
        }
        fits = [recompute for recompute, size in sizes.items() if size < limit]
        recompute = fits[0] if fits else ""
        n_bytes = sizes[recompute or "block"]
        rows.append(Row(names, run, n_parameters, recompute, n_bytes, kind, sequences))
    return sorted(rows, key=lambda row: row.n_parameters * row.run.model.sequence_length)


def measure(row: Row, budget: Budget) -> dict[str, Any]:
    is_large = row.n_parameters > LARGE_PARAMETERS and not torch.cuda.is_available()
    is_quick = row.n_parameters < 20e6 or torch.cuda.is_available()
    steps = 10 if is_quick else 1 if is_large else 2
    overrides = (
        f"precision.kind={row.kind}",
        f"parallel.recompute={row.recompute}",
        f"train.micro_batch_size={row.sequences}",
        f"train.global_batch_size={row.sequences}",
        "train.batch_ramp=none",
    )
    options = ("--steps", str(steps), "--warm-up", "3" if is_quick else "1")
    return bench(Variant(row.names[0], row.names[0], overrides, options), budget)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="presets, with commas")
    parser.add_argument("--list", action="store_true", help="say what fits, and measure nothing")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    wanted = set(filter(None, arguments.only.split(",")))
    has_bf16 = torch.cuda.is_available() or cpu_multiplies_bf16_natively()

    def kind_of(run: Run) -> str:
        return run.precision.kind if has_bf16 else "fp32"

    free = free_bytes()
    limit = int(free * (FREE_SHARE if torch.cuda.is_available() else CPU_FREE_SHARE))
    record = describe_machine(("torch", "numpy"))
    record["command"] = record["command"].replace("benchmarks/presets.py", "-m benchmarks.presets")
    record |= {"free_gib": round(free / 2**30, 1), "presets": [], "do_not_fit": []}
    budget = Budget(time.monotonic() + 60 * arguments.minutes)
    print(
        f"{'preset':<18}{'parameters':>12}{'precision':>10}{'recompute':>10}{'tokens':>8}", end=""
    )
    print(f"{'ms/step':>10}{'tokens/s':>10}{'GFLOP/s':>9}{'MFU':>7}{'GiB':>7}{'of plan':>9}")
    for row in list_rows(kind_of, limit):
        if wanted and not wanted & set(row.names):
            continue
        facts = {"presets": row.names, "n_parameters": row.n_parameters}
        facts["estimated_gib"] = round(row.n_bytes / 2**30, 1)
        if not row.recompute:
            record["do_not_fit"].append(facts)
            continue
        if arguments.list:
            print(
                f"{row.names[0]:<18}{row.n_parameters / 1e6:>10.1f} M  {facts['estimated_gib']} GiB"
            )
            continue
        found = measure(row, budget)
        record["presets"].append(facts | found)
        show(row, found)
        if arguments.output:
            arguments.output.write_text(render(record), encoding="utf-8")
    for facts in record["do_not_fit"]:
        needs = f"would need about {facts['estimated_gib']:,.0f} GiB"
        print(f"does not fit: {', '.join(facts['presets'])}: {needs}")
    if arguments.output:
        arguments.output.write_text(render(record), encoding="utf-8")


def show(row: Row, found: dict[str, Any]) -> None:
    name = row.names[0]
    if "record" not in found:
        print(f"{name:<18} {found['failed']}: {found['said'].splitlines()[:1]}", flush=True)
    else:
        each = found["record"]["candidates"][0]
        share = each["model_flops_utilization"]
        print(
            f"{name:<18}{row.n_parameters / 1e6:>10.1f} M{each['precision']:>10}{row.recompute:>10}"
            f"{row.sequences * row.run.model.sequence_length:>8}"
            f"{each['milliseconds_per_step']['median']:>10.0f}"
            f"{each['tokens_per_second_per_device']:>10.0f}"
            f"{1000 * each['tflops_per_second_per_device']:>9.0f}"
            f"{'-' if share is None else format(share, '.1%'):>7}"
            f"{each['peak_memory_bytes'] / 2**30:>7.2f}"
            f"{each['peak_memory_bytes'] / row.n_bytes:>9.0%}",
            flush=True,
        )
    if len(row.names) > 1:
        print(f"  also: {', '.join(row.names[1:])}")


if __name__ == "__main__":
    main()
