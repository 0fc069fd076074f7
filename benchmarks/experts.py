"""A mixture of experts against dense models: of as many active parameters, and of as much CPU time.

    python benchmarks/experts.py tinyshakespeare.txt --output experts.json

Prepares the text with a tokenizer of 1,024 tokens, then trains with each seed: a dense model; one
of the same length with 8 experts in place of each MLP, 2 active for each token and together as
wide as the dense MLP, balanced by the loss, by the bias, and not at all; and the dense model
once more for as many steps as take the CPU time of the mixture balanced by the loss. One thread a
run, two runs at a time. CPU time is of whole processes, less that of a run of one step: on a CPU,
experts are multiplied one after another, so the price of a step is not that of a GPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measuring import Figures, describe_machine, measure, publish

VOCABULARY = 1024
N_EXPERTS, N_ACTIVE, FEATURES = 8, 2, 256
EXPERTS: dict[str, Any] = {
    "model.n_experts": N_EXPERTS,
    "model.n_active_experts": N_ACTIVE,
    "model.d_expert": FEATURES // N_ACTIVE,
}
DENSE, LONGER, PRICED = "dense", "dense, as much CPU time", "experts, loss"
CANDIDATES: dict[str, dict[str, Any]] = {
    DENSE: {},
    PRICED: EXPERTS | {"model.balance": "loss"},
    "experts, bias": EXPERTS | {"model.balance": "bias"},
    "experts, no balance": EXPERTS | {"model.balance": "none"},
}
RUN = f"""\
[model]
n_layers = 4
d_model = 96
n_heads = 3
d_ff = {FEATURES}
mlp = "swiglu"
positions = "rotary"
norm = "rms"
bias = false
sequence_length = 128
vocabulary_size = {VOCABULARY}
dropout = 0.0

[data]
split = "90,10,0"
blend = {{ prefixes = ["../corpus_text_document"] }}

[train]
micro_batch_size = 8
global_batch_size = 8

[optimizer]
learning_rate = 4e-3

[schedule]
minimum_learning_rate = 4e-4

[precision]
kind = "fp32"

[checkpoint]
interval = 0

[evaluate]
interval = 0
batches = 16

[log]
interval = 10
tensorboard = false
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("corpus", type=Path, help="text that `trainyard prepare` reads")
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        folder, seeds = Path(name), range(1, arguments.seeds + 1)
        prepare = ["prepare", str(arguments.corpus.resolve()), "--output", "corpus"]
        call([*prepare, "--train-tokenizer", str(VOCABULARY)], folder)
        start_seconds = train("start", {}, 1, 1, folder)["cpu_seconds"]
        jobs = {
            kind: [
                pool.submit(train, kind, fields, seed, arguments.steps, folder) for seed in seeds
            ]
            for kind, fields in CANDIDATES.items()
        }
        runs = {kind: [job.result() for job in each] for kind, each in jobs.items()}
        price, dense = (
            statistics.median(run["cpu_seconds"] for run in runs[kind]) - start_seconds
            for kind in (PRICED, DENSE)
        )
        longer = round(arguments.steps * price / dense)
        last = [pool.submit(train, LONGER, {}, seed, longer, folder) for seed in seeds]
        runs[LONGER] = [job.result() for job in last]
    record = describe_machine(["torch", "numpy"]) | {"run": RUN.splitlines(), "experts": EXPERTS}
    record["start_cpu_seconds"] = round(start_seconds, 1)
    publish(record | {kind: summarize(each) for kind, each in runs.items()}, arguments.output)


def call(words: list[str], folder: Path) -> float:
    """Runs a verb; returns its CPU seconds."""
    command = [str(Path(sys.executable).with_name("trainyard")), *words]
    seconds: float = measure(command, 2, folder)["cpu_seconds"]
    print(f"{seconds:6.1f} s  trainyard {shlex.join(words)}", file=sys.stderr, flush=True)
    return seconds


def train(kind: str, fields: dict[str, Any], seed: int, n_steps: int, folder: Path) -> Figures:
    """Trains one run; gives its losses, its price, and how even its experts are at the end."""
    name = f"{kind.replace(',', '').replace(' ', '-')}-{seed}"
    folder = folder / name
    folder.mkdir()
    (folder / "run.toml").write_text(RUN, encoding="utf-8")
    fields = fields | {
        "name": name,
        "schedule.warmup": f"{n_steps // 10} steps",
        "schedule.decay": f"{n_steps} steps",
        "train.length": f"{n_steps} steps",
        "train.seed": seed,
    }
    words = (f"{field}={value}" for field, value in fields.items())
    cpu_seconds = call(["train", "run.toml", "--force", *words], folder)
    text = (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    plan = json.loads((folder / "runs" / name / "plan.json").read_text(encoding="utf-8"))
    newest = [line for line in lines if line["kind"] == "train"][-1]
    return {
        "n_steps": n_steps,
        "n_parameters": plan["n_parameters"],
        "held_out": [line["loss"] for line in lines if line["kind"] == "evaluate"][-1],
        "training": newest["loss"],
        "cpu_seconds": cpu_seconds,
        "imbalance": newest.get("expert_imbalance"),
        "entropy": newest.get("expert_entropy"),
        "dead": sum(
            len(experts)
            for line in lines
            if line["kind"] == "dead experts"
            for experts in line["experts"].values()
        ),
    }


def summarize(runs: list[Figures]) -> Figures:
    """Returns the figures of each seed, and mean and deviation of the held-out loss."""
    losses = [run["held_out"] for run in runs]
    return {
        "steps": runs[0]["n_steps"],
        "parameters": runs[0]["n_parameters"],
        "mean_held_out": round(statistics.mean(losses), 4),
        "deviation": round(statistics.stdev(losses), 4) if len(losses) > 1 else None,
        **{
            key: [None if run[key] is None else round(run[key], 4) for run in runs]
            for key in ("held_out", "training", "cpu_seconds", "imbalance", "entropy", "dead")
        },
    }


if __name__ == "__main__":
    main()
