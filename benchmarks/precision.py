"""Every precision's loss against fp32: on one device, and in every kind of layout.

    python benchmarks/precision.py novels.jsonl --output precision.json --picture precision.svg

Prepares the corpus with a tokenizer of 2,048 tokens, then runs `trainyard train` once for each
precision on one device, and a smaller model once for each precision and layout; fp8 is emulated.
Reads the loss of each step from metrics.jsonl and the held-out loss at the end. Nothing here is a
timing: the same machine gives the same figures whatever else it does. Takes about an hour on
two cores, most of it for fp16, of which few processors have products.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

from measuring import Figures, describe_machine, measure, render

EMULATED = "precision.fp8.emulate=true"
REFERENCE = "fp32"
PRECISIONS: dict[str, list[str]] = {
    REFERENCE: ["precision.kind=fp32"],
    "bf16": ["precision.kind=bf16"],
    "fp16": ["precision.kind=fp16", "precision.loss_scale.initial=65536"],
    "fp8 tensorwise": ["precision.kind=fp8", EMULATED],
    "fp8 rowwise": ["precision.kind=fp8", EMULATED, "precision.fp8.scaling=rowwise"],
    "fp8_lowbit": ["precision.kind=fp8_lowbit", EMULATED],
}
# Fields of [parallel], and the number of ranks.
ALONE = "one device"
LAYOUTS: dict[str, tuple[str, int]] = {
    "dp2, ZeRO 1": ("zero_stage=1", 2),
    "tp2, sequence": ("tensor=2 sequence=true", 2),
    "pp2": ("pipeline=2", 2),
    "cp2, Ulysses": ("context=2", 2),
    "dp2, ZeRO 3": ("zero_stage=3", 2),
    "cp2, ring": ("context=2 context_method=ring", 2),
    "dp2 x tp2, ZeRO 1": ("tensor=2 zero_stage=1", 4),
    "dp2, ZeRO 2": ("zero_stage=2", 2),
}
RUN = """\
[model]
n_layers = {layers}
d_model = {width}
n_heads = 4
d_ff = {inner}
sequence_length = 64
vocabulary_size = 2048
dropout = 0.0

[data]
split = "90,10,0"
blend = {{ prefixes = ["{corpus}"] }}

[train]
micro_batch_size = 4
global_batch_size = 8
length = "{steps} steps"
compile = "never"

[optimizer]
learning_rate = 1e-3

[schedule]
minimum_learning_rate = 1e-4
warmup = "100 steps"
decay = "{steps} steps"

[checkpoint]
interval = 0

[evaluate]
interval = 0
batches = 32

[log]
interval = 1
tensorboard = false
"""
ALL_BLOCKS = """
[precision]
fp8.precise_blocks = 0
"""
METRICS = Path("runs", "run", "metrics.jsonl")
LAST = 50  # steps whose mean is a run's final loss
STYLES = {
    "bf16": ("#0b6bb3", "s"),
    "fp16": ("#11805a", "D"),
    "fp8 tensorwise": ("#c2570a", "^"),
    "fp8 rowwise": ("#9b4a8a", "v"),
    "fp8_lowbit": ("#b3261e", "o"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("corpus", type=Path, help="text that `trainyard prepare` reads")
    parser.add_argument("--folder", type=Path, help="keeps the runs: what is done is not repeated")
    parser.add_argument("--finished", action="store_true", help="leave out layouts not done yet")
    parser.add_argument("--steps", type=int, default=600, help="on one device")
    parser.add_argument("--layout-steps", type=int, default=500)
    parser.add_argument("--output", type=Path, default=Path("precision.json"))
    parser.add_argument("--picture", type=Path, default=Path("precision.svg"))
    arguments = parser.parse_args()
    record = describe_machine(["torch", "torchao", "numpy"])
    with ExitStack() as closing:
        folder = arguments.folder or Path(closing.enter_context(tempfile.TemporaryDirectory()))
        prepare = ["prepare", str(arguments.corpus.resolve()), "--output", "corpus"]
        if not (folder / "corpus_text_document.json").exists():
            call([*prepare, "--train-tokenizer", "2048"], folder)
        corpus = folder / "corpus_text_document"
        large = RUN.format(layers=4, width=128, inner=512, steps=arguments.steps, corpus=corpus)
        steps = arguments.layout_steps
        small = RUN.format(layers=2, width=64, inner=256, steps=steps, corpus=corpus) + ALL_BLOCKS
        texts = {"large": large, "small": small}
        runs = [(size, kind, ALONE) for kind in PRECISIONS for size in texts]
        runs += [("small", kind, layout) for layout in LAYOUTS for kind in STYLES]
        with ThreadPoolExecutor(2) as pool:
            jobs = {
                each: pool.submit(train, texts[each[0]], *each[1:], place(folder, each))
                for each in runs
                if not arguments.finished or each[2] == ALONE or is_done(place(folder, each))
            }
            done = {each: job.result() for each, job in jobs.items()}
    curves = {kind: done["large", kind, ALONE] for kind in PRECISIONS}
    references = {kind: done["small", kind, ALONE] for kind in PRECISIONS}
    cut = {
        kind: {
            layout: done[each] for layout in LAYOUTS if (each := ("small", kind, layout)) in done
        }
        for kind in STYLES
    }
    record["one device"] = {"run": shown(large)} | {
        kind: against(run, curves[REFERENCE]) for kind, run in curves.items()
    }
    record["layouts"] = {"run": shown(small)} | {
        kind: {
            "one device": against(references[kind], references[REFERENCE]),
            **{layout: against(run, references[kind]) for layout, run in runs.items()},
        }
        for kind, runs in cut.items()
    }
    arguments.output.write_text(render(record), encoding="utf-8")
    draw(curves, cut, references, arguments.picture)


def shown(run: str) -> list[str]:
    return [line for line in run.splitlines() if not line.startswith("blend")]


def call(arguments: list[str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(Path(sys.executable).with_name("trainyard")), *arguments]
    seconds = measure(command, 2, folder)["wall_seconds"]
    print(f"{seconds:6.1f} s  trainyard {shlex.join(arguments[:1] + arguments[2:])}", flush=True)


def place(folder: Path, run: tuple[str, str, str]) -> Path:
    return folder / "-".join(run).replace(" ", "-")


def is_done(folder: Path) -> bool:
    metrics = folder / METRICS
    return metrics.exists() and '"reason": "done"' in metrics.read_text(encoding="utf-8")


def train(text: str, kind: str, layout: str, folder: Path) -> Figures:
    """Trains one run; gives the loss of each step and on held-out text at the end."""
    fields, n_ranks = LAYOUTS.get(layout, ("", 1))
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text(text, encoding="utf-8")
    overrides = [*PRECISIONS[kind], *(f"parallel.{field}" for field in fields.split())]
    if not is_done(folder):
        call(["train", "run.toml", "name=run", *overrides, "--ranks", str(n_ranks)], folder)
    lines = (folder / METRICS).read_text(encoding="utf-8").splitlines()
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]
    # A run that was started again tells of its first steps again.
    steps = list({event["step"]: event for event in events if event["kind"] == "train"}.values())
    return {
        # Not a number where fp16 overflowed; such steps are skipped.
        "losses": [math.nan if step["loss"] is None else step["loss"] for step in steps],
        "held_out": [event["loss"] for event in events if event["kind"] == "evaluate"][-1],
        "skipped": steps[-1]["skipped_steps"],
    }


def against(run: Figures, reference: Figures) -> Figures:
    """Gives a run's final losses, and how far they are from the reference's, in per cent."""
    final, expected = (fmean(each["losses"][-LAST:]) for each in (run, reference))
    pairs = zip(run["losses"], reference["losses"], strict=True)
    apart = [abs(a / b - 1) for a, b in pairs if math.isfinite(a)]
    return {
        f"loss_of_last_{LAST}_steps": round(final, 5),
        "differs_by_per_cent": round(100 * (final / expected - 1), 3),
        "held_out_loss": round(run["held_out"], 5),
        "held_out_differs_by_per_cent": round(
            100 * (run["held_out"] / reference["held_out"] - 1), 3
        ),
        "a_step_differs_at_most_by_per_cent": round(100 * max(apart), 3),
        "skipped_steps": run["skipped"],
    }


def draw(
    curves: dict[str, Figures],
    cut: dict[str, dict[str, Figures]],
    references: dict[str, Figures],
    path: Path,
) -> None:
    """Draws all curves on top of each other, their distance from fp32, and that of the layouts."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams |= {"font.family": "DejaVu Sans", "font.size": 9, "svg.hashsalt": "precision"}
    figure = Figure(figsize=(7.6, 9.0), layout="constrained", facecolor="white")
    above, middle, below = figure.subplots(3, 1, height_ratios=(4, 3, 3))
    expected = curves[REFERENCE]["losses"]
    above.plot(range(1, len(expected) + 1), expected, color="#c9d1dc", linewidth=7, label=REFERENCE)
    for number, (kind, (colour, marker)) in enumerate(STYLES.items()):
        losses = curves[kind]["losses"]
        look: Any = {"color": colour, "linewidth": 1.1, "marker": marker, "markersize": 3.5}
        steps = range(1, len(losses) + 1)
        above.plot(steps, losses, label=kind, markevery=(9 * number, 61), **look)
        ratio = [100 * (a / b - 1) for a, b in zip(smooth(losses), smooth(expected), strict=True)]
        middle.plot(steps, ratio, label=kind, markevery=(9 * number, 61), **look)
        for run in cut[kind].values():
            pairs = zip(smooth(run["losses"]), smooth(references[REFERENCE]["losses"]), strict=True)
            ratio = [100 * (a / b - 1) for a, b in pairs]
            below.plot(range(1, len(ratio) + 1), ratio, color=colour, linewidth=0.8)
    above.set_ylabel("loss, nats per token")
    above.legend(frameon=False, ncols=2)
    middle.set_title("difference from fp32, one device", loc="left", fontsize=9)
    below.set_title(
        f"the same of a smaller model in {len(LAYOUTS)} layouts; a colour has a line for each",
        loc="left",
        fontsize=9,
    )
    for axes in (middle, below):
        axes.set_ylabel(f"per cent, mean of {LAST} steps")
        axes.axhline(0, color="#5b6675", linewidth=0.8, linestyle=":")
    below.set_xlabel("optimizer step")
    for axes in (above, middle, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def smooth(losses: list[float]) -> list[float]:
    """Gives the mean of each loss and those before it, up to `LAST`."""
    means = []
    for end in range(1, len(losses) + 1):
        known = [loss for loss in losses[max(0, end - LAST) : end] if math.isfinite(loss)]
        means.append(fmean(known) if known else math.nan)
    return means


if __name__ == "__main__":
    main()
