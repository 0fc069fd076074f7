"""Ladders against the runs that they predict: held-out loss, and the learning rate they recommend.

    python benchmarks/ladder.py novels=novels.jsonl python=python.jsonl --output ladder.json

For each corpus, prepared with a tokenizer of 320 tokens, and for a GPT-3-like and a modern decoder
of 4 blocks of width 80: trains a ladder of five sizes, the largest with about a quarter of the
parameters, then the targets with the recommended learning rates, and with `--rates` times them. The
ladders have seen none of the targets' runs. Two runs at a time, one thread each. With `--folder`,
what is there is not trained again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from measuring import Figures, describe_machine, publish

from trainyard.sweeps.law import Law

VOCABULARY = 320
LADDER = ("--share", "0.3", "--ratio", "1.7")
MODEL = f"""\
[model]
n_layers = 4
d_model = 80
n_heads = 5
sequence_length = 64
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
micro_batch_size = 32
global_batch_size = 32
length = "24M tokens"

[optimizer]
learning_rate = 2e-3

[schedule]
minimum_learning_rate = 2e-4
warmup = "1.2M tokens"
decay = "24M tokens"

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
        record["ladder"] = list(LADDER)
        for corpus, text in corpora.items():
            if not (folder / "data" / f"{corpus}.toml").exists():
                words = ["prepare", str(Path(text).resolve()), "--output", f"data/{corpus}"]
                call([*words, "--train-tokenizer", str(VOCABULARY)], folder)
        pairs = [
            Pair(each, corpus, arguments.length, folder)
            for corpus in corpora
            for each in arguments.families
        ]
        for pair in pairs:
            pair.train_ladder()
        with ThreadPoolExecutor(2) as pool:
            # Those that are predicted come first.
            for factor in sorted(rates, key=lambda rate: abs(math.log(rate))):
                for pair in pairs:
                    pool.submit(pair.train, factor)
        for pair in pairs:
            record[f"{pair.family}, {pair.corpus}"] = found = pair.compare(rates)
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


class Pair:
    """A family on a corpus: a ladder, and its target."""

    def __init__(self, family: str, corpus: str, length: str | None, folder: Path) -> None:
        self.family, self.corpus, self.folder = family, corpus, folder
        self.name, self.file = f"{family}-{corpus}", folder / f"{family}.toml"
        if not self.file.exists():
            self.file.write_text(FAMILIES[family] + REST, encoding="utf-8")
        lengths = [f"{at}={length}" for at in ("train.length", "schedule.decay") if length]
        self.own = [f"data.blend.prefixes=['data/{corpus}_text_document']", *lengths]
        self.ladder: Figures = {}

    def train_ladder(self) -> None:
        words = ["ladder", f"{self.name}-ladder"]
        if not (self.folder / "runs" / f"{self.name}-ladder" / "set.toml").exists():
            words = ["ladder", self.file.name, f"name={self.name}", *self.own, *LADDER]
        self.ladder = json.loads(call([*words, "--at-once", "2", "--json"], self.folder))
        print(json.dumps({**self.ladder, "law": ""}), file=sys.stderr, flush=True)

    def rate(self, factor: float) -> str:
        return f"{self.ladder['learning_rate'][0] * factor:.4g}"

    def train(self, factor: float) -> float:
        """Trains the target with a factor of the recommended rate; returns its held-out loss."""
        rate = self.rate(factor)
        metrics = self.folder / "runs" / f"{self.name}-{rate}" / "metrics.jsonl"
        # The held-out text of the ladder's members: as much of it, in the target's batches.
        sizes = self.folder / "runs" / f"{self.name}-ladder" / "ladder.json"
        run = tomllib.loads(self.file.read_text(encoding="utf-8"))
        batch = run["train"]["global_batch_size"]
        values = [
            f"name={self.name}-{rate}",
            f"optimizer.learning_rate={rate}",
            f"schedule.minimum_learning_rate={float(rate) / 10:.4g}",
            f"evaluate.batches={max(1, json.loads(sizes.read_text())['held_out'] // batch)}",
        ]
        if not metrics.exists() or '"kind": "end"' not in metrics.read_text(encoding="utf-8"):
            call(["train", self.file.name, *values, *self.own], self.folder)
        lines = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
        losses: list[float] = [line["loss"] for line in lines if line["kind"] == "evaluate"]
        return losses[-1]

    def compare(self, rates: list[float]) -> Figures:
        """Compares what the ladder says with what the target does."""
        losses = {self.rate(factor): self.train(factor) for factor in rates}
        truth = losses[self.rate(1.0)]
        law = msgspec.convert(self.ladder["law"], Law)
        run = self.ladder["parameters"], self.ladder["tokens"]
        value, low, high = law.predict(*run)
        member_files = sorted((self.folder / "runs").glob(f"{self.name}-ladder-*/plan.json"))
        plans = [json.loads(path.read_text(encoding="utf-8")) for path in member_files]
        return {
            "predicted": round(value, 4),
            "interval": [round(low, 4), round(high, 4)],
            "problems": law.problems(*run),
            "missed_of_largest": round(law.missed, 4),
            "trained": round(truth, 4),
            "error": round(value / truth - 1, 4),
            "in_interval": low <= truth <= high,
            "parameters": run[0],
            "largest": self.ladder["law"]["largest"],
            "recommended_rate": [float(f"{rate:.3g}") for rate in self.ladder["learning_rate"]],
            "recommended_batch": self.ladder["batch"],
            "held_out_by_rate": {rate: round(loss, 4) for rate, loss in losses.items()},
            "n_runs": len(plans),
            "tokens": sum(plan["n_tokens"] for plan in plans),
        }


if __name__ == "__main__":
    main()
