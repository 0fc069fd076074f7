"""Ladders against the runs that they predict: held-out loss, and the learning rate they recommend.

    python benchmarks/ladder.py novels=novels.jsonl python=python.jsonl --output ladder.json

For each corpus, prepared with a tokenizer of 320 tokens, and for a GPT-3-like and a modern decoder
of 4 blocks of width 80: trains a ladder of five sizes, the largest with about a quarter of the
parameters, then the target with the recommended learning rate, and with `--rates` times it. The
ladder has seen none of the target's runs. Two runs at a time, one thread each. With `--folder`,
what is there is not trained again.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from measuring import Figures, describe_machine, publish

VOCABULARY = 320
LADDER = ("--share", "0.25", "--ratio", "1.5")
MODEL = f"""\
[model]
n_layers = 4
d_model = 80
n_heads = 10
sequence_length = 128
vocabulary_size = {VOCABULARY}
vocabulary_multiple = 64
"""
FAMILIES = {
    "gpt": MODEL + "d_ff = 320\n",
    "modern": MODEL
    + """\
d_ff = 216
positions = "rotary"
norm = "rms"
mlp = "swiglu"
bias = false
""",
}
REST = """
[train]
micro_batch_size = 16
global_batch_size = 16
length = "16M tokens"

[optimizer]
learning_rate = 2e-3

[schedule]
minimum_learning_rate = 2e-4
warmup = "800k tokens"
decay = "16M tokens"

[precision]
kind = "fp32"

[evaluate]
interval = 0
batches = 100

[checkpoint]
interval = 0

[log]
interval = 50
tensorboard = false

[data]
split = "985,15,0"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("corpora", nargs="+", metavar="NAME=TEXT")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=[*FAMILIES])
    parser.add_argument("--rates", default="0.5,1,2", help="times the recommended rate")
    parser.add_argument("--length", help="of the target, such as '96k tokens', to try the script")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rates = [float(factor) for factor in arguments.rates.split(",")]
    corpora = dict(text.split("=", 1) for text in arguments.corpora)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        record = describe_machine(["torch", "numpy", "scipy"])
        record |= {"runs": {kind: (text + REST).splitlines() for kind, text in FAMILIES.items()}}
        for corpus, text in corpora.items():
            if not (folder / "data" / f"{corpus}.toml").exists():
                words = ["prepare", str(Path(text).resolve()), "--output", f"data/{corpus}"]
                call([*words, "--train-tokenizer", str(VOCABULARY)], folder)
            for family in arguments.families:
                found = compare(family, corpus, rates, arguments.length, folder)
                record[f"{family}, {corpus}"] = found
                print(json.dumps(found), file=sys.stderr, flush=True)
    publish(record, arguments.output)


def call(words: list[str], folder: Path) -> str:
    """Runs a verb; returns what it prints."""
    command = [str(Path(sys.executable).with_name("trainyard")), *words]
    print(f"trainyard {shlex.join(words)}", file=sys.stderr, flush=True)
    # A ladder divides the cores itself.
    own = {} if words[0] == "ladder" else {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, check=True, text=True, env=os.environ | own
    )
    return done.stdout


def compare(
    family: str, corpus: str, rates: list[float], length: str | None, folder: Path
) -> Figures:
    """Trains a ladder and its target; compares what one says with what the other does."""
    name, file = f"{family}-{corpus}", folder / f"{family}.toml"
    if not file.exists():
        file.write_text(FAMILIES[family] + REST, encoding="utf-8")
    lengths = [f"{at}={length}" for at in ("train.length", "schedule.decay") if length]
    own = [f"name={name}", f"data.blend.prefixes=['data/{corpus}_text_document']", *lengths]
    words = ["ladder", f"{name}-ladder"]
    if not (folder / "runs" / f"{name}-ladder" / "set.toml").exists():
        words = ["ladder", file.name, *own, *LADDER]
    ladder = json.loads(call([*words, "--at-once", "2", "--json"], folder))
    expected = json.loads(call(["plan", file.name, *own, "--json"], folder))["expected"]
    recommended = ladder["learning_rate"][0]
    tried = [f"{recommended * factor:.4g}" for factor in rates]
    # The held-out text of the ladder's members: as much of it, in the target's batches.
    sizes = json.loads((folder / "runs" / f"{name}-ladder" / "ladder.json").read_text())
    held_out = [f"evaluate.batches={max(1, sizes['held_out'] // 16)}"]
    own = [*own[1:], *held_out]
    with ThreadPoolExecutor(2) as pool:
        losses = dict(
            zip(
                tried,
                pool.map(lambda rate: train(name, rate, own, file, folder), tried),
                strict=True,
            )
        )
    truth = losses[tried[rates.index(1.0)]]
    low, high = expected["interval"]
    member_files = sorted((folder / "runs").glob(f"{name}-ladder-*/plan.json"))
    plans = [json.loads(path.read_text(encoding="utf-8")) for path in member_files]
    return {
        "predicted": round(expected["loss"], 4),
        "interval": [round(low, 4), round(high, 4)],
        "problems": expected["problems"],
        "trained": round(truth, 4),
        "error": round(expected["loss"] / truth - 1, 4),
        "in_interval": low <= truth <= high,
        "parameters": expected["parameters"],
        "largest": ladder["law"]["largest"],
        "recommended_rate": [float(f"{rate:.3g}") for rate in ladder["learning_rate"]],
        "recommended_batch": ladder["batch"],
        "held_out_by_rate": {rate: round(loss, 4) for rate, loss in losses.items()},
        "n_runs": len(plans),
        "tokens": sum(plan["n_tokens"] for plan in plans),
        "cost_share": round(ladder["cost_share"], 3),
        "vocabulary": tomllib.loads(file.read_text(encoding="utf-8"))["model"]["vocabulary_size"],
    }


def train(name: str, rate: str, own: list[str], file: Path, folder: Path) -> float:
    """Trains the target with a learning rate; returns its held-out loss."""
    lowest = f"schedule.minimum_learning_rate={float(rate) / 10:.4g}"
    values = [f"name={name}-{rate}", f"optimizer.learning_rate={rate}", lowest, *own]
    call(["train", file.name, *values], folder)
    metrics = folder / "runs" / f"{name}-{rate}" / "metrics.jsonl"
    lines = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    losses: list[float] = [line["loss"] for line in lines if line["kind"] == "evaluate"]
    return losses[-1]


if __name__ == "__main__":
    main()
