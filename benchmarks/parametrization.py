"""How far the best learning rate drifts as a model grows, by parametrization.

    python benchmarks/parametrization.py novels.jsonl --output parametrization.json

Prepares the text with a tokenizer of 320 tokens, then trains GPTs wider and deeper than 2 blocks of
width 64: standard; "held", standard with AdamW's rate of matrices of blocks divided by the growth
of the width, so that embeddings and norms keep theirs, which arXiv:2605.21486 finds to be most of
the gain of mu-P under AdamW; and complete_p. Each shape tries the best rate of the smallest, and
rates by factors of two from the best of the shape before, until the best has both neighbours. The
loss is the mean training loss of the last tenth of the steps, of one seed, two models at a time on
one thread each. `price` is what a shape loses by the best rate of the smallest.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from measuring import Figures, describe_machine, publish

from trainyard import prepare
from trainyard.architecture import UNSCALED, Multipliers
from trainyard.config.load import load_run
from trainyard.config.rules import change
from trainyard.config.run import Run
from trainyard.optim.adamw import AdamW
from trainyard.planning.ladder import find_minimum
from trainyard.report.pictures import draw_sweeps
from trainyard.simulate import parametrization as checking

VOCABULARY = 320
BASE = (2, 64)
STANDARD, HELD, COMPLETE = "standard", "standard, held embedding", "complete_p"
FIRST_LOG2, MOST_LOG2 = -8, 6
"""The rate at which the search begins; and the farthest that it goes from there."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("corpus", type=Path, help="text that `trainyard prepare` reads")
    parser.add_argument("--widths", default="64,128,256,512,1024")
    parser.add_argument("--depths", default="2,4,8,16")
    parser.add_argument("--kinds", nargs="+", default=[STANDARD, HELD, COMPLETE])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--picture", type=Path, help="rates.svg: draws rates-width.svg and rates-depth.svg"
    )
    given = parser.parse_args()
    widths, depths = (
        [int(word) for word in text.split(",")] for text in (given.widths, given.depths)
    )
    shapes = {"depth": [(n, BASE[1]) for n in depths], "width": [(BASE[0], n) for n in widths]}
    started, record = time.monotonic(), describe_machine(["torch", "numpy"])
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(
            2, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)
        ) as pool,
    ):
        prepared = prepare(given.corpus, f"{folder}/text", vocabulary_size=VOCABULARY)
        run = load_run(str(prepared.run_file), ["optimizer.weight_decay=0.1"]).run
        for axis, wanted in shapes.items():
            kinds = [kind for kind in given.kinds if axis == "width" or kind != HELD]
            searches = [Search(run, kind, given.steps) for kind in kinds]
            for shape in wanted:
                for search in searches:
                    search.begin(shape)
                # The kinds take turns: what one waits for, another trains.
                while asked := [(s, log2) for s in searches for log2 in s.missing()]:
                    runs = [search.build(log2) for search, log2 in asked]
                    held = [search.kind == HELD for search, _ in asked]
                    for (search, log2), loss in zip(
                        asked, pool.map(train, runs, held), strict=True
                    ):
                        search.losses[shape][log2] = loss
                        print(search.kind, shape, 2.0**log2, f"{loss:.4f}", file=sys.stderr)
                for search in searches:
                    record[f"{search.kind}, {axis}"] = search.describe()
                seconds = round(time.monotonic() - started)
                publish(record | {"steps": given.steps, "seconds": seconds}, given.output)
    for axis in shapes if given.picture else ():
        draw(record, axis, given.picture.with_stem(f"{given.picture.stem}-{axis}"))


class Search:
    """The best rate of one kind, shape after shape."""

    def __init__(self, run: Run, kind: str, n_steps: int) -> None:
        self.run, self.kind, self.n_steps = run, kind, n_steps
        self.losses: dict[checking.Shape, dict[int, float]] = {}
        """By shape and log2 of the rate."""
        self.around = FIRST_LOG2

    def begin(self, shape: checking.Shape) -> None:
        self.around = self.best(self.shape) if self.losses else FIRST_LOG2
        self.losses[shape] = {}

    @property
    def shape(self) -> checking.Shape:
        """The one that is searched now."""
        return [*self.losses][-1]

    def best(self, shape: checking.Shape) -> int:
        found = self.losses[shape]
        return min(found, key=found.__getitem__)

    def missing(self) -> list[int]:
        """Lists the rates to try next, by their log2."""
        found = self.losses[self.shape]
        middle = self.best(self.shape) if found else self.around
        wanted = [middle - 1, middle, middle + 1]
        wanted += [self.best(shape) for shape in [*self.losses][:1] if self.losses[shape]]
        wanted = [n for n in dict.fromkeys(wanted) if n not in found]
        return [n for n in wanted if abs(n - FIRST_LOG2) <= MOST_LOG2]

    def build(self, log2: int) -> Run:
        parametrization = COMPLETE if self.kind == COMPLETE else STANDARD
        small = checking.reshape(self.run, self.shape, BASE, parametrization, self.n_steps)
        return change(small, {"optimizer.learning_rate": 2.0**log2})

    def describe(self) -> Figures:
        best, prices, lowest = [], [], []
        first = self.best(next(iter(self.losses)))
        for found in self.losses.values():
            tried = sorted(found)
            rates = [2.0**log2 for log2 in tried]
            best.append(
                float(
                    f"{find_minimum(dict(zip(rates, (found[n] for n in tried), strict=True))):.3g}"
                )
            )
            lowest.append(round(min(found.values()), 4))
            prices.append(round(found[first] - min(found.values()), 4))
        table = {
            f"{shape[0]} x {shape[1]}": {f"{2.0**n:.2g}": round(found[n], 4) for n in sorted(found)}
            for shape, found in self.losses.items()
        }
        return {
            "losses": table,
            "best": best,
            "drift": round(max(best) / min(best), 2),
            "lowest": lowest,
            "price": prices,
        }


def draw(record: Figures, axis: str, path: Path) -> None:
    """Draws the losses over rates along an axis, a panel for each kind."""
    tables = []
    for name, found in record.items():
        if name.endswith(f", {axis}"):
            rates = sorted({rate for row in found["losses"].values() for rate in row}, key=float)
            # Depth x width: the one that grows.
            sizes = [int(key.split(" x ")[axis == "width"]) for key in found["losses"]]
            rows = [[row.get(rate, math.inf) for rate in rates] for row in found["losses"].values()]
            tables.append(checking.ScalingTable(name, sizes, rates, rows))
    draw_sweeps(tables, path)


def train(run: Run, held: bool) -> float:
    """Trains a run, and returns its loss; `held`: with rates of matrices of blocks by width."""
    context = checking._build_context(run)
    if held:
        scaled = Multipliers(rate=BASE[1] / run.model.d_model, decay=run.model.d_model / BASE[1])
        parameters = context.model.local_parameters
        in_block = [p.name.startswith("blocks.") and p.parameter.ndim > 1 for p in parameters]
        optimizer = AdamW(
            [each.parameter for each in parameters],
            run.optimizer,
            [scaled if inside else UNSCALED for inside in in_block],
        )
        context = replace(context, optimizer=optimizer)
    losses = checking._train(context)
    loss = float(np.mean(losses[-max(1, len(losses) // 10) :]))
    return loss if math.isfinite(loss) else math.inf


if __name__ == "__main__":
    main()
