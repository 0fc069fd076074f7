"""Tokens to a held-out loss, for models and optimizers at their best learning rates of one grid.

    python benchmarks/learning.py novels.jsonl --output record.json

Prepares the corpus with a tokenizer of 1,024 tokens. GPT-3's architecture and the modern one
(rotary positions, RMSNorm, SwiGLU, no biases; as many parameters) train with AdamW and with Muon,
with the same data, schedule and number of steps: once at every learning rate of the grid with the
first seed; then with all seeds at the rate of the lowest final held-out loss. The target is the
loss that all seeds of GPT-3 with AdamW reach: how many tokens does each run take to it, with linear
interpolation between two evaluations? If the best rate is at an end of the grid, the record says
so.

Losses do not depend on the machine's load. Milliseconds per step do; they are the medians of runs
of all candidates in turn, on one core. At this size a step has few tokens for the size of its
matrices, so the iterations of Muon take a far larger share of it than in a real run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import Figures, describe_machine, measure, publish

MODERN = {
    "model.positions": "rotary",
    "model.norm": "rms",
    "model.mlp": "swiglu",
    "model.bias": "false",
    "model.d_ff": 176,  # three matrices with as many values as the two of GPT-3
}
MUON: dict[str, Any] = {"optimizer.kind": "muon"}
BASELINE = "gpt3 adamw"
CANDIDATES: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "gpt3 muon": MUON,
    "modern adamw": MODERN,
    "modern muon": MODERN | MUON,
}
VOCABULARY = 1024
RUN = f"""\
[model]
n_layers = 4
d_model = 64
n_heads = 4
d_ff = 256
sequence_length = 64
vocabulary_size = {VOCABULARY}
dropout = 0.0

[data]
split = "95,5,0"
blend = {{ prefixes = ["corpus_text_document"] }}

[train]
micro_batch_size = 32
global_batch_size = 32

[precision]
kind = "fp32"

[checkpoint]
interval = 0

[evaluate]
interval = 10
batches = 4

[log]
interval = 10
tensorboard = false
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("corpus", type=Path, help="text that `trainyard prepare` reads")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    runs: dict[tuple[str, float, int], Figures] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.toml").write_text(RUN, encoding="utf-8")
        prepare = ["prepare", str(arguments.corpus.resolve()), "--output", "corpus"]
        call([*prepare, "--train-tokenizer", str(VOCABULARY)], folder)
        for rate in arguments.rates:
            for kind in CANDIDATES:
                runs[kind, rate, 1] = train(kind, rate, 1, arguments.steps, folder)
        best = {kind: best_rate(kind, runs) for kind in CANDIDATES}
        for seed in range(2, arguments.seeds + 1):
            for kind in CANDIDATES:
                runs[kind, best[kind], seed] = train(
                    kind, best[kind], seed, arguments.steps, folder
                )
    record = describe_machine(["torch", "numpy"]) | {"run": RUN.splitlines()}
    record["steps"] = arguments.steps
    publish(record | summarize(runs, best), arguments.output)


def call(words: list[str], folder: Path) -> None:
    command = [str(Path(sys.executable).with_name("trainyard")), *words]
    seconds = measure(command, 1, folder)["wall_seconds"]
    print(f"{seconds:6.1f} s  trainyard {shlex.join(words)}", file=sys.stderr, flush=True)


def train(kind: str, rate: float, seed: int, n_steps: int, folder: Path) -> Figures:
    """Trains one run; gives its held-out losses by tokens, and the time of its steps."""
    name = f"{kind.replace(' ', '-')}-{rate:g}-{seed}"
    fields = CANDIDATES[kind] | {
        "name": name,
        "optimizer.learning_rate": rate,
        "schedule.minimum_learning_rate": rate / 10,
        "schedule.warmup": f"{n_steps // 10} steps",
        "schedule.decay": f"{n_steps} steps",
        "train.length": f"{n_steps} steps",
        "train.seed": seed,
    }
    call(["train", "run.toml", *(f"{field}={value}" for field, value in fields.items())], folder)
    text = (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    steps = [line["milliseconds_per_step"] for line in lines if line["kind"] == "train"]
    return {
        "held_out": [(e["tokens"], e["loss"]) for e in lines if e["kind"] == "evaluate"],
        "milliseconds_per_step": statistics.median(steps),
    }


def best_rate(kind: str, runs: dict[tuple[str, float, int], Figures]) -> float:
    """Returns the learning rate of the lowest final held-out loss."""
    finals = {rate: final_loss(run) for (k, rate, _), run in runs.items() if k == kind}
    return min(finals, key=finals.__getitem__)


def final_loss(run: Figures) -> float:
    return float(run["held_out"][-1][1])


def tokens_to(target: float, held_out: list[tuple[int, float]]) -> float | None:
    """Returns the tokens at which the loss first is at the target; None if it never is."""
    before: tuple[int, float] | None = None
    for tokens, loss in held_out:
        if loss <= target:
            if before is None:
                return float(tokens)
            share = (before[1] - target) / (before[1] - loss)
            return before[0] + share * (tokens - before[0])
        before = tokens, loss
    return None


def summarize(runs: dict[tuple[str, float, int], Figures], best: dict[str, float]) -> Figures:
    """Returns what a record says of the runs."""
    chosen = {
        kind: [run for (k, rate, _), run in runs.items() if (k, rate) == (kind, best[kind])]
        for kind in CANDIDATES
    }
    target = max(map(final_loss, chosen[BASELINE]))
    found: Figures = {"target_loss": round(target, 4)}
    for kind in CANDIDATES:
        grid = {
            rate: final_loss(run) for (k, rate, seed), run in runs.items() if (k, seed) == (kind, 1)
        }
        tokens = [tokens_to(target, run["held_out"]) for run in chosen[kind]]
        row: dict[str, Any] = {
            "final_loss_by_learning_rate": {
                f"{rate:g}": round(loss, 4) for rate, loss in grid.items()
            },
            "learning_rate": best[kind],
            "at_an_end_of_the_grid": best[kind] in (min(grid), max(grid)),
            "final_losses": [round(final_loss(run), 4) for run in chosen[kind]],
            "tokens_to_target": [None if n is None else round(n) for n in tokens],
            "milliseconds_per_step": round(
                statistics.median(
                    run["milliseconds_per_step"] for (k, _, _), run in runs.items() if k == kind
                ),
                1,
            ),
            "held_out": [
                [(n, round(loss, 4)) for n, loss in run["held_out"]] for run in chosen[kind]
            ],
        }
        found[kind] = row
    for kind in CANDIDATES:
        reached = [found[name]["tokens_to_target"] for name in (kind, BASELINE)]
        if None not in (reached[0] + reached[1]):
            mine, baseline = map(statistics.mean, reached)
            found[kind]["tokens_over_baseline"] = round(mine / baseline, 3)
    return found


if __name__ == "__main__":
    main()
