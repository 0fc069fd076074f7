"""How far the best learning rate drifts as a model grows, by parametrization.

    python benchmarks/parametrization.py novels.jsonl --output parametrization.json

Prepares the text with a tokenizer of 1,024 tokens, then trains GPTs wider and deeper than 2 blocks
of width 64 at several learning rates: standard; "held embedding", standard with AdamW's rate of
matrices of blocks divided by the growth of the width, so that embeddings and norms keep theirs; and
complete_p. The second is what arXiv:2605.21486 finds to be most of the gain of mu-P under AdamW.
Every cell is the mean training loss of the last tenth of the steps, of one seed, on one thread.
Shapes are trained in the order given; cells that would begin after --seconds are left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from measuring import describe_machine, publish

from trainyard import prepare
from trainyard.architecture import UNSCALED, Multipliers
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.optim.adamw import AdamW
from trainyard.planning.ladder import find_minimum
from trainyard.simulate import parametrization as checking

VOCABULARY = 1024
BASE = (2, 64)
STANDARD, HELD, COMPLETE = "standard", "standard, held embedding", "complete_p"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("corpus", type=Path, help="text that `trainyard prepare` reads")
    parser.add_argument("--widths", default="64,128,256")
    parser.add_argument("--depths", default="2,4,8")
    parser.add_argument("--rates", default="1e-3,2e-3,4e-3,8e-3,1.6e-2,3.2e-2")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    widths, depths = (
        [int(word) for word in text.split(",")] for text in (given.widths, given.depths)
    )
    rates = [float(word) for word in given.rates.split(",")]
    shapes = {"width": [(BASE[0], n) for n in widths], "depth": [(n, BASE[1]) for n in depths]}
    cells = [
        (kind, shape, rate)
        for shape in dict.fromkeys(shapes["width"] + shapes["depth"])
        for kind in (STANDARD, HELD, COMPLETE)
        for rate in rates
        if kind != HELD or shape in shapes["width"]
    ]
    start = time.monotonic()
    losses: dict[tuple[str, tuple[int, int], float], float] = {}
    left_out = []
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(given.corpus, f"{folder}/text", vocabulary_size=VOCABULARY)
        run = load_run(str(prepared.run_file), ["optimizer.weight_decay=0.1"]).run
        for kind, shape, rate in cells:
            if time.monotonic() - start > given.seconds:
                left_out.append(f"{kind}, {shape[0]} x {shape[1]}, rate {rate:g}")
                continue
            parametrization = COMPLETE if kind == COMPLETE else STANDARD
            small = checking.reshape(run, shape, BASE, parametrization, given.steps)
            settings = small.optimizer.model_copy(update={"learning_rate": rate})
            small = small.model_copy(update={"optimizer": settings})
            losses[kind, shape, rate] = train(small, held=kind == HELD)
            print(
                kind, shape, rate, f"{losses[kind, shape, rate]:.3f}", file=sys.stderr, flush=True
            )
    record = describe_machine(["torch", "numpy"])
    record |= {"cpu_seconds": round(time.process_time()), "steps": given.steps, "rates": rates}
    for axis, wanted in shapes.items():
        for kind in (STANDARD, HELD, COMPLETE):
            wanted = sorted(wanted)
            whole = [s for s in wanted if all((kind, s, rate) in losses for rate in rates)]
            found = [[losses[kind, shape, rate] for rate in rates] for shape in whole]
            best = [find_minimum(dict(zip(rates, row, strict=True))) for row in found]
            if len(best) > 1:
                record[f"{kind}, {axis}"] = {
                    "losses": {
                        f"{shape[0]} x {shape[1]}": [round(loss, 4) for loss in row]
                        for shape, row in zip(whole, found, strict=True)
                    },
                    "best": [float(f"{rate:.3g}") for rate in best],
                    "drift": round(max(best) / min(best), 2),
                    "price": price(rates, found, best),
                }
    publish(record | {"left_out": left_out}, given.output)


def price(rates: list[float], losses: list[list[float]], best: list[float]) -> list[float]:
    """Returns what each shape loses by the best rate of the smallest, between measured rates."""
    return [
        round(float(np.interp(np.log(best[0]), np.log(rates), row)) - min(row), 4) for row in losses
    ]


def train(run: Run, *, held: bool) -> float:
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
    return float(np.mean(losses[-max(1, len(losses) // 10) :]))


if __name__ == "__main__":
    main()
