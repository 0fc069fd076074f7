"""The same run in ten layouts: how far the losses of fifty steps are from those of one device.

    python benchmarks/layouts.py wikitext2_valid.txt --output layouts.json --picture layouts.svg

Prepares the corpus with a tokenizer of 4,096 tokens, then runs `trainyard train --ranks N` once for
each layout, in fp32 on the CPU, and reads the loss and the gradient norm of each step from
metrics.jsonl. Nothing here is a timing: the same machine gives the same figures whatever else it
does. The runs have no dropout, since ring attention has none; then all but the ring run again with
dropout, whose masks do not depend on the layout either. Needs 1 GB of memory and a few minutes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import Figures, describe_machine, measure, render

# Fields of [parallel] that differ from the run below, and the number of ranks.
LAYOUTS: dict[str, tuple[str, int]] = {
    "dp1": ("", 1),
    "dp4": ("", 4),
    "tp2 x pp2": ("tensor=2 pipeline=2", 4),
    "dp2 x tp2 x pp2": ("tensor=2 pipeline=2", 8),
    "cp2, Ulysses": ("context=2", 2),
    "cp2, ring": ("context=2 context_method=ring", 2),
    "dp2, ZeRO 0": ("", 2),
    "dp2, ZeRO 1": ("zero_stage=1", 2),
    "dp2, ZeRO 2": ("zero_stage=2", 2),
    "dp2, ZeRO 3": ("zero_stage=3", 2),
}
REFERENCE, WITHOUT_DROPOUT = "dp1", "cp2, ring"
N_STEPS = 50
RUN = f"""\
[model]
n_layers = 4
d_model = 128
n_heads = 4
d_ff = 512
sequence_length = 128
vocabulary_size = 4096

[data]
split = "100,0,0"
blend = {{ prefixes = ["corpus_text_document"] }}

[train]
micro_batch_size = 2
global_batch_size = 16
length = "{N_STEPS} steps"

[optimizer]
learning_rate = 3e-3

[schedule]
warmup = "10 steps"
decay = "{N_STEPS} steps"

[precision]
kind = "fp32"

[parallel]
zero_stage = 0

[checkpoint]
interval = 0

[evaluate]
batches = 0

[log]
interval = 1
tensorboard = false
"""
# Colour and marker of every layout but the first.
STYLES = (
    ("#c2570a", "s"),
    ("#11805a", "D"),
    ("#9b4a8a", "^"),
    ("#8a6d00", "v"),
    ("#3b8ea5", "P"),
    ("#0b6bb3", "x"),
    ("#c0273d", "+"),
    ("#4d8b2f", "*"),
    ("#1d2430", "1"),
)
EQUAL = 1e-8  # where the picture shows a difference of zero


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("corpus", type=Path, help="text that `trainyard prepare` reads")
    parser.add_argument(
        "--dropout", type=float, default=0.1, help="of the second set of runs; 0: none"
    )
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("layouts.json"))
    parser.add_argument("--picture", type=Path, default=Path("layouts.svg"))
    arguments = parser.parse_args()
    sets = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.toml").write_text(RUN, encoding="utf-8")
        prepare = ["prepare", str(arguments.corpus.resolve()), "--output", "corpus"]
        call([*prepare, "--train-tokenizer", "4096"], folder, arguments.cores)
        for dropout in sorted({0.0, arguments.dropout}):
            chosen = [each for each in LAYOUTS if not (dropout and each == WITHOUT_DROPOUT)]
            sets[dropout] = {each: train(each, dropout, folder, arguments.cores) for each in chosen}
    record = describe_machine(["torch", "numpy"]) | {"run": RUN.splitlines()}
    for dropout, runs in sets.items():
        record[f"dropout {dropout:g}"] = compare(runs)
    arguments.output.write_text(render(record), encoding="utf-8")
    draw({name: run["losses"] for name, run in sets[0.0].items()}, arguments.picture)


def call(arguments: list[str], folder: Path, cores: int) -> None:
    command = [str(Path(sys.executable).with_name("trainyard")), *arguments]
    seconds = measure(command, cores, folder)["wall_seconds"]
    print(f"{seconds:6.1f} s  trainyard {shlex.join(arguments[:1] + arguments[2:])}", flush=True)


def train(layout: str, dropout: float, folder: Path, cores: int) -> Figures:
    """Trains one layout; gives the command's own words and the numbers of each step."""
    fields, n_ranks = LAYOUTS[layout]
    overrides = [f"parallel.{field}" for field in fields.split()]
    name = f"{layout.replace(', ', '-').replace(' ', '-')}-{dropout:g}"
    command = ["train", "run.toml", f"name={name}", f"model.dropout={dropout}", *overrides]
    call([*command, "--ranks", str(n_ranks)], folder, cores)
    lines = (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps: list[dict[str, Any]] = [json.loads(line) for line in lines]
    steps = [step for step in steps if step["kind"] == "train"]
    assert [step["step"] for step in steps] == list(range(1, N_STEPS + 1)), layout
    return {
        "arguments": shlex.join([*overrides, "--ranks", str(n_ranks)]),
        "losses": [step["loss"] for step in steps],
        "gradient_norms": [step["gradient_norm"] for step in steps],
    }


def compare(runs: dict[str, Figures]) -> Figures:
    """Gives the largest differences from the reference, relative and at whatever step."""
    expected = runs[REFERENCE]
    rows = {}
    for name, run in runs.items():
        row: Figures = {"arguments": run["arguments"], "last_loss": round(run["losses"][-1], 6)}
        for key in ("losses", "gradient_norms"):
            pairs = zip(run[key], expected[key], strict=True)
            differences = [abs(found / wanted - 1) for found, wanted in pairs]
            row[f"{key}_differ_by"] = float(f"{max(differences):.3g}")
            row[f"{key}_differ_most_at_step"] = differences.index(max(differences)) + 1
        rows[name] = row
    worst = max(rows, key=lambda name: rows[name]["losses_differ_by"])
    print(f"largest relative difference of a loss: {rows[worst]['losses_differ_by']:.1e}, {worst}")
    return {
        "largest_relative_difference_of_a_loss": rows[worst]["losses_differ_by"],
        "of_layout": worst,
        "losses_of_dp1": [round(loss, 6) for loss in expected["losses"]],
        "layouts": rows,
    }


def draw(losses: dict[str, list[float]], path: Path) -> None:
    """Draws all losses on top of each other, and how far each is from the reference."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams |= {"font.family": "DejaVu Sans", "font.size": 9, "svg.hashsalt": "layouts"}
    figure = Figure(figsize=(7.6, 6.4), layout="constrained", facecolor="white")
    curves, differences = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    steps = range(1, N_STEPS + 1)
    expected = losses[REFERENCE]
    curves.plot(steps, expected, color="#c9d1dc", linewidth=9, label=REFERENCE)
    others = [name for name in losses if name != REFERENCE]
    for number, (name, (colour, marker)) in enumerate(zip(others, STYLES, strict=True)):
        look: Any = {"color": colour, "marker": marker, "markersize": 3.5}
        # Later curves are thinner, with gaps, for the earlier ones to be seen below.
        look["linewidth"] = 2.6 - 0.2 * number
        curves.plot(
            steps, losses[name], label=name, markevery=(number, 9), dashes=(3, 0.3 * number), **look
        )
        apart = [abs(a / b - 1) for a, b in zip(losses[name], expected, strict=True)]
        look["linewidth"] = 0.7
        differences.plot(steps, [max(difference, EQUAL) for difference in apart], **look)
    curves.set_ylabel("loss, nats per token")
    curves.legend(frameon=False, ncols=2, handlelength=3)
    differences.set_yscale("log")
    differences.set_ylim(EQUAL / 1.6, 1e-4)
    ticks = {EQUAL: "equal", **{10.0**power: f"$10^{{{power}}}$" for power in range(-7, -3)}}
    differences.set_yticks(list(ticks), list(ticks.values()))
    differences.set_yticks([], minor=True)
    differences.set_ylabel("relative difference from dp1")
    differences.set_xlabel("optimizer step")
    differences.axhline(2**-23, color="#5b6675", linewidth=0.9, linestyle=":")
    differences.text(0.3, 2**-23, "last bit of fp32", va="bottom", color="#5b6675", fontsize=8)
    for axes in (curves, differences):
        axes.grid(color="#dde1e7", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, N_STEPS + 1)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=160, metadata=metadata)


if __name__ == "__main__":
    main()
