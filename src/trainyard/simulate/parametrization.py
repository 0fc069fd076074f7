"""Checks a parametrization with small models: what stays as they grow, and which rate is best.

A model that is wider or deeper should compute activations of the same size, and be changed as much
by a step at the same learning rate. Without rates, `compare_shapes` trains a few steps, and each
size of activations gets the exponent p of size ~ width^p; with rates it trains longer at each.

    complete_p, width     embedding    blocks    change of blocks    change of logits
    64                       0.0298     0.273               0.267               0.402
    128                      0.0297     0.261               0.256               0.385
    256                      0.0297     0.262               0.257               0.378
    exponent                  -0.00     -0.03               -0.03               -0.05

All of it is on one CPU, in fp32, on the run's token files or on random tokens.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainyard.config.load import override_run
from trainyard.config.precisions import Precision
from trainyard.config.rules import Changes, change
from trainyard.config.run import Parallel, Run, Schedule
from trainyard.data.loader import Loader, build_orders
from trainyard.data.patterns import find_token_files
from trainyard.launch.heartbeat import Heartbeat
from trainyard.layout.batches import BatchSchedule
from trainyard.layout.resolve import resolve
from trainyard.parallel.mesh import build_mesh
from trainyard.parallel.model import ParallelModel
from trainyard.planning.ladder import find_minimum, shape_run
from trainyard.simulate.parity import bare_context, build_loader
from trainyard.training.state import State, TrainContext
from trainyard.training.step import train_step
from trainyard.units import Length

N_FIRST_STEPS = 10  # before activations are measured
BOUND = 0.25  # of the exponent of a size that stays; without multipliers it is 0.5 or more
MOST_TOKENS, N_SEQUENCES = 64, 8  # of a sequence, and of a step
SMALLEST = 1e-9  # stands for a size of zero, such as a change at a rate of zero
SIZES = ["embedding", "blocks", "change of blocks", "change of logits"]
Shape = tuple[int, int]  # n_layers and d_model


@dataclass(frozen=True)
class ScalingTable:
    """Measurements of models that grow along an axis, in a row for each.

    Attributes:
        name: parametrization and axis.
        sizes: widths or depths.
        columns: kinds of activations, or learning rates.
    """

    name: str
    sizes: list[int]
    columns: list[str]
    rows: list[list[float]]

    @property
    def exponents(self) -> list[float]:
        """The slope of log value over log size, by column."""
        x, y = np.log(self.sizes), np.log(np.maximum(self.rows, SMALLEST))
        return np.polyfit(x, y, 1)[0].tolist()  # type: ignore[no-any-return]

    @property
    def best(self) -> list[float]:
        """The best learning rate of each size."""
        rates = [*map(float, self.columns)]
        return [find_minimum(dict(zip(rates, losses, strict=True))) for losses in self.rows]

    @property
    def is_beyond(self) -> bool:
        """Whether a size of activations grows or shrinks."""
        return self.columns == SIZES and max(map(abs, self.exponents)) > BOUND

    def __str__(self) -> str:
        rows = [[self.name, *self.columns]]
        rows += [[f"{x:.3g}" for x in row] for row in np.c_[self.sizes, self.rows]]
        if self.columns == SIZES:
            rows += [["exponent", *(f"{n:+.2f}" for n in self.exponents)]]
        else:
            drift = max(self.best) / min(self.best)
            best = ", ".join(f"{rate:.2g}" for rate in self.best)
            rows += [[f"best {best}: drifts by a factor of {drift:.2f}"]]
        lines = (f"{name:<22}" + "".join(f"{x:>18}" for x in row) for name, *row in rows)
        return "\n".join(lines) + "\n"


def compare_shapes(
    run: Run,
    sizes: tuple[Sequence[int], Sequence[int]],
    kinds: Sequence[str],
    rates: Sequence[float],
    n_steps: int,
    progress: Callable[[float, float, str], None],
) -> list[ScalingTable]:
    """Measures models of a run's family that grow in width, and in depth, from the smallest.

    Args:
        run: whose family, optimizer and data they have.
        sizes: widths and depths.
        kinds: parametrizations.
        rates: learning rates to find the final loss at; none: measure activations.
        n_steps: of each model at each rate.
        progress: called with models done, all of them, and the next one.

    Raises:
        UserError: the run has no such shape, or its data is unusable.
    """
    widths, depths = (sorted(set(each)) for each in sizes)
    axes = {"width": [(depths[0], n) for n in widths], "depth": [(n, widths[0]) for n in depths]}
    shapes = dict.fromkeys(axes["width"] + axes["depth"])
    found: dict[tuple[str, Shape], list[float]] = {}
    for kind, shape in itertools.product(kinds, shapes):
        here = f"{kind}, {shape[0]} blocks of width {shape[1]}"
        progress(len(found), len(kinds) * len(shapes), here)
        runs = [change(run, {"optimizer.learning_rate": rate}) for rate in rates] or [run]
        small = [reshape(each, shape, (depths[0], widths[0]), kind, n_steps) for each in runs]
        found[kind, shape] = [*map(final_loss, small)] if rates else measure_sizes(small[0])
    columns = [f"{rate:g}" for rate in rates] or SIZES
    return [
        ScalingTable(f"{kind}, {axis}", n, columns, [found[kind, shape] for shape in axes[axis]])
        for kind in kinds
        for axis, n in (("width", widths), ("depth", depths))
        if len(n) > 1
    ]


def reshape(run: Run, shape: Shape, base: Shape, parametrization: str, n_steps: int) -> Run:
    """Returns a run of the same family in another shape, small enough for a CPU.

    Its learning rate rises for a tenth of the steps, then falls to zero.

    Raises:
        ConfigError: the run has no such shape.
    """
    steps, warmup = Length(n_steps, "steps"), Length(n_steps // 10, "steps")
    length = min(MOST_TOKENS, run.model.sequence_length)
    small: Changes = {
        **{"model.sequence_length": length, "model.parametrization": parametrization},
        **{"model.base_n_layers": base[0], "model.base_d_model": base[1], "data.from_step": 0},
        **dict.fromkeys(("train.micro_batch_size", "train.global_batch_size"), N_SEQUENCES),
        **{"train.batch_ramp": None, "train.length": steps, "train.compile": "never"},
        "schedule": Schedule(kind="linear", minimum_learning_rate=0, warmup=warmup, decay=steps),
        **{"parallel": Parallel(), "precision": Precision(kind="fp32")},
    }
    return override_run(change(shape_run(run, shape, keeps_length=True), small), [])


def measure_sizes(run: Run) -> list[float]:
    """Trains a run; returns the size of activations and of their changes, as `SIZES` names them.

    Sizes are root mean squares over the sequences of the first step.
    """
    context = _build_context(run)
    tokens = context.train_data.batch(0)[0]
    before = _activations(context, tokens)
    _train(context)
    found = _activations(context, tokens)
    found |= {f"change of {name}": found[name] - before[name] for name in before}
    return [float(found[name].double().square().mean().sqrt()) for name in SIZES]


def final_loss(run: Run) -> float:
    """Trains a run; returns its mean loss over the last tenth of steps, infinite if it diverges."""
    losses = _train(_build_context(run))
    loss = float(np.mean(losses[-max(1, len(losses) // 10) :]))
    return loss if math.isfinite(loss) else math.inf


def _build_context(run: Run) -> TrainContext:
    plan = resolve(run, 1)
    model = ParallelModel(run, plan, build_mesh(plan.topology, 0, torch.device("cpu")))
    # Of random tokens few kinds occur, which can be learned.
    few = change(run, {"model.vocabulary_size": max(2, run.model.vocabulary_size // 16)})
    if not run.data.blend.prefixes + run.data.train.prefixes:
        return bare_context(run, plan, model, build_loader(few, plan, (0, 1)), Heartbeat())
    with tempfile.TemporaryDirectory(prefix="trainyard-") as folder:
        own = change(find_token_files(run), {"data.cache_folder": folder})
        order = build_orders(own, plan, ["train"])["train"]
    assert order is not None, "there is a train split"
    loader = Loader(order, BatchSchedule(run), run.model.vocabulary_size)
    return bare_context(run, plan, model, loader, Heartbeat())


def _train(context: TrainContext) -> list[float]:
    state, losses = State.at_start(context), []
    for state.step in range(context.plan.n_steps):
        losses.append(train_step(context, state).loss.item())
    return losses


@torch.no_grad()
def _activations(context: TrainContext, tokens: Tensor) -> dict[str, Tensor]:
    gpt: Any = context.model.whole_model
    blocks, found = [*gpt.blocks.values()], dict[str, Tensor]()
    hooks = [
        blocks[0].register_forward_pre_hook(lambda _, x: found.update(embedding=x[0])),
        blocks[-1].register_forward_hook(lambda _, x, out: found.update(blocks=out)),
    ]
    found["logits"] = gpt.logits(gpt(tokens))  # without seeds there is no dropout
    for hook in hooks:
        hook.remove()
    return found
