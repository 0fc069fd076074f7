"""Training's output: a log line, metrics.jsonl, TensorBoard, and Weights & Biases if configured.

Throughput counts only the time of steps, not evaluation or saving: on a GPU the device's time, from
events in its stream, as the host only queues a step there and is done long before.
TFLOP/s is model FLOP per token x tokens per second (`layout.flops.model_flops_per_token`;
recomputation is not counted); MFU is that over the device's peak for the precision in use.

The load of an expert is the number of tokens that chose it. With 4 experts of which a token uses 1:

    load         10  20  30  40     mean 25
    imbalance    40 / 25 = 1.6      that of the block with the greatest
    entropy      1.28 / log 4 = 0.92, 1 where all are equal; the mean of the blocks
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from trainyard.config.devices import find_device
from trainyard.config.run import Run
from trainyard.files import parse_json, publish_text
from trainyard.layout.flops import (
    describe_formula,
    figures_by_formula,
    model_flops_utilization,
    tflops_per_second_per_gpu,
)
from trainyard.layout.resolve import Plan
from trainyard.parallel.mesh import build_clock, device_name
from trainyard.topology import Coordinates
from trainyard.training.run_folder import WANDB_ID
from trainyard.training.state import State, TrainContext
from trainyard.training.step import StepResult
from trainyard.units import format_bytes, format_figure, format_large, format_seconds

logger = logging.getLogger("trainyard")

LogLines = Literal["short", "full"]
DeadExperts = dict[int, list[int]]
"""Experts by block."""
LOSSES = ["train/loss", "evaluate/loss"]
SPEEDS_IN_ETA = 20
"""The time left follows from the median speed of so many newest intervals."""
EXPERT_TABLES = 500
"""Most lines of a run with the load of every expert: with 15,000 experts one has 100 kB."""
DEAD_TOKENS = 10_000
"""An expert is dead when it got no token while its equal share was so many. That is the least
noisy: an interval has few tokens in a small run, and early steps choose few experts by chance."""
MOST_NAMED = 8
# No curves in TensorBoard.
COUNTERS = ("step", "sequences", "tokens", "n_tokens", "n_bytes", "seconds_left")


class Metrics:
    """Collects step results and writes them every `log.interval` steps.

    Losses stay on the device between log lines, so logging does not slow the steps. Every rank
    collects; the first writes.
    """

    def __init__(self, context: TrainContext, log: LogLines = "short") -> None:
        self._context = context
        self._render = {"short": render_short_line, "full": render_full_line}[log]
        self._outputs = Outputs(context.folder, context.run) if context.is_first_rank else None
        self._peak_flops = _peak_flops_per_second(context.run, context.device)
        self._loss_sum = torch.zeros((), device=context.device)
        self._skipped = torch.zeros((), device=context.device)
        self._experts = ExpertLoad(context)
        self._clock = build_clock(context.device)
        self._steps: list[tuple[Any, Any]] = []
        self._tokens = 0
        self._speeds = deque[float](maxlen=SPEEDS_IN_ETA)

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Times the step of its block, without waiting for the device."""
        start = self._clock.mark()
        yield
        self._steps.append((start, self._clock.mark()))

    def add(self, result: StepResult, n_sequences: int) -> None:
        """Adds the step that was timed last."""
        finite = result.skipped == 0
        self._loss_sum += torch.where(finite, result.loss, torch.zeros_like(result.loss))
        self._skipped += result.skipped
        self._experts.add()
        self._tokens += n_sequences * self._context.run.model.sequence_length

    def write_steps(self, state: State, result: StepResult) -> str:
        """Writes the metrics of the steps since the last line; returns that line, and warnings."""
        values, warning = self._values(state, result), ""
        if self._context.run.model.n_experts:
            found, dead = self._experts.read()
            values |= found
            if dead:
                problem = describe_dead_experts(dead)
                warning = f"\nwarning: {problem}"
                event = {"step": state.step, "experts": dead, "problem": problem}
                self.write("dead experts", event)
        self.write("train", values)
        self.forget_steps()
        return self._render(values, self._context.plan) + warning

    def forget_steps(self) -> None:
        """Leaves the steps since the last line out of the next."""
        self._loss_sum.zero_()
        self._skipped.zero_()
        self._experts.forget()
        self._steps.clear()
        self._tokens = 0

    def write(self, kind: str, values: dict[str, Any]) -> None:
        """Writes an event that is not a step: evaluate, sample, start or end."""
        if self._outputs is not None:
            self._outputs.write(kind, values)

    def close(self) -> None:
        """Flushes and closes everything."""
        if self._outputs is not None:
            self._outputs.close()

    def _values(self, state: State, result: StepResult) -> dict[str, Any]:
        context = self._context
        n_finite = len(self._steps) - int(self._skipped.item())  # waits for the device
        loss = self._loss_sum.item() / n_finite if n_finite else math.nan
        seconds = max(sum(self._clock.seconds(*step) for step in self._steps), 1e-9)
        tokens_per_second = self._tokens / seconds
        self._speeds.append(tokens_per_second)
        per_device = tokens_per_second / context.plan.n_ranks
        flops_per_token = context.plan.model_flops_per_token
        consumed = context.batches.consumed(state.step)
        tokens_left = context.plan.n_tokens - consumed * context.run.model.sequence_length
        return {
            "step": state.step,
            "sequences": consumed,
            "tokens": consumed * context.run.model.sequence_length,
            "learning_rate": result.learning_rate,
            "loss": loss,
            "gradient_norm": float(result.gradient_norm.item()),
            "loss_scale": 1.0 if state.scaler is None else state.scaler.scale.item(),
            "milliseconds_per_step": 1000 * seconds / len(self._steps),
            "sequences_per_second": tokens_per_second / context.run.model.sequence_length,
            "tokens_per_second_per_device": per_device,
            "tflops_per_second_per_device": tflops_per_second_per_gpu(
                flops_per_token, tokens_per_second, context.plan.n_ranks
            ),
            "model_flops_utilization": model_flops_utilization(
                flops_per_token, per_device, self._peak_flops
            ),
            **figures_by_formula(
                context.run, context.plan.padded_vocabulary_size, per_device, self._peak_flops
            ),
            "memory_bytes": peak_memory_bytes(context.device),
            "skipped_steps": state.skipped.total,
            "seconds_left": tokens_left / statistics.median(self._speeds),
        }


class ExpertLoad:
    """Counts the tokens of each expert, if any, on the device until a log line."""

    def __init__(self, context: TrainContext) -> None:
        model = context.run.model
        self._mesh, self._routers = context.model.mesh, context.model.routers
        self._first = model.n_dense_blocks if model.n_experts else 0
        n_blocks = model.n_layers - self._first
        self._table = self._zeros(n_blocks, model.n_experts)
        self._sums = self._zeros(len(self._routers), model.n_experts)
        self._missed = np.zeros((n_blocks, model.n_experts))
        """Equal share of the tokens since each expert's last one; minus infinity once named."""
        n_lines = context.plan.n_steps // max(1, context.run.log.interval)
        self._n_lines, self._lines_per_table = 0, max(1, math.ceil(n_lines / EXPERT_TABLES))

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self._mesh.device)

    def add(self) -> None:
        """Adds those of the newest step."""
        if self._routers:
            self._sums += torch.stack([router.load for router in self._routers.values()])

    def forget(self) -> None:
        """Leaves out the steps since the last line."""
        self._sums.zero_()

    def read(self) -> tuple[dict[str, Any], DeadExperts]:
        """Returns the load in the steps since the last line, and the experts found dead.

        Every rank must call it, of a model with experts, and gets the same.
        """
        self._table.zero_()
        here = self._mesh.coordinates
        if self._routers and here == Coordinates(pipeline=here.pipeline):  # others have the same
            self._table[[number - self._first for number in self._routers]] = self._sums
        self._mesh.all_reduce(self._table)
        load = self._table.cpu().numpy()
        misses = (load == 0) | np.isinf(self._missed)
        self._missed = np.where(misses, self._missed + load.mean(), 0)
        dead: DeadExperts = {}
        for block, expert in np.argwhere(self._missed >= DEAD_TOKENS).tolist():
            dead.setdefault(self._first + block, []).append(expert)
            self._missed[block, expert] = -np.inf
        tables = {"expert_load": load.astype(int).tolist()}
        has_table = self._n_lines % self._lines_per_table == 0
        self._n_lines += 1
        return summarize_load(load) | (tables if has_table else {}), dead


def summarize_load(load: NDArray[np.float64]) -> dict[str, Any]:
    """Returns imbalance and entropy of the tokens of each expert, (blocks, E)."""
    n_experts = load.shape[1]
    share = load / np.maximum(load.sum(1, keepdims=True), 1)
    to_uniform = n_experts * share
    excess = (share * np.log(np.where(share > 0, to_uniform, 1))).sum(1).mean()
    return {
        "expert_imbalance": float(to_uniform.max()),
        "expert_entropy": 1 - float(excess) / math.log(max(2, n_experts)),
    }


def describe_dead_experts(dead: DeadExperts) -> str:
    """Names experts that no token chooses."""
    names = [
        f"expert {each} of block {block}" for block, experts in dead.items() for each in experts
    ]
    more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
    return (
        f"no token chose {', '.join(names[:MOST_NAMED])}{more} while its equal share was "
        f"{DEAD_TOKENS:,} tokens; model.balance and its coefficient prevent it in a new run"
    )


class Outputs:
    """The files and services that metrics go to."""

    def __init__(self, folder: Path, run: Run) -> None:
        # Later times count from here, so that a clock set meanwhile adds no hours to the run.
        self._epoch = time.time() - _seconds_since_boot()
        self._wandb = _start_wandb(folder, run) if run.log.wandb_project else None
        self._lines = _Lines(folder / "metrics.jsonl")
        self._tensorboard = _start_tensorboard(folder, run) if run.log.tensorboard else None

    def write(self, kind: str, values: dict[str, Any]) -> None:
        """Writes one object to every output; numbers that are not finite become null."""
        finite = {k: v for k, v in values.items() if not isinstance(v, float) or math.isfinite(v)}
        now = self._epoch + _seconds_since_boot()
        record = {"kind": kind, "time": now, **dict.fromkeys(values), **finite}
        self._lines.add(json.dumps(record) + "\n")
        group = "test" if values.get("split") == "test" else kind
        numbers = {f"{group}/{k}": v for k, v in finite.items() if isinstance(v, int | float)}
        step = values.get("step", 0)
        with self._without_tensorboard_if_it_fails():
            if self._tensorboard is not None:
                for name, value in numbers.items():
                    if kind in ("train", "evaluate") and name.split("/")[1] not in COUNTERS:
                        self._tensorboard.add_scalar(name, value, step)
                if kind == "sample":
                    self._tensorboard.add_text("sample", values["text"], step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def close(self) -> None:
        """Flushes and closes everything."""
        with self._without_tensorboard_if_it_fails():
            if self._tensorboard is not None:
                self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    @contextmanager
    def _without_tensorboard_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            logger.warning("cannot write TensorBoard files, and stopped: %s", error)
            self._tensorboard = None


def _seconds_since_boot() -> float:
    """Seconds that also pass while a laptop sleeps, where the system counts them."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class _Lines:
    """A file of appended lines; a full disk does not stop training.

    Removes a partial line left by a killed run; ends a whole one that an editor left without end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_failing = False
        with path.open("ab", buffering=0) as file:
            content = path.read_bytes()
            end = content.rfind(b"\n") + 1
            with suppress(ValueError):
                parse_json(content[end:])
                end = len(content) + file.write(b"\n")
            file.truncate(end)

    def add(self, line: str) -> None:
        """Appends a line, or drops it with one warning until a write succeeds again."""
        encoded = line.encode()
        try:
            # Opened each time: an editor, or whatever rotates logs, puts another file there.
            with self._path.open("ab", buffering=0) as file:
                end = file.seek(0, os.SEEK_END)
                if file.write(encoded) < len(encoded):
                    file.truncate(end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._is_failing:
                logger.warning("stopped writing %s: %s", self._path, error.strerror)
            self._is_failing = True
        else:
            self._is_failing = False


def render_short_line(values: dict[str, Any], plan: Plan) -> str:
    """Renders the essential metrics."""
    columns = [
        f"step {values['step']:>{len(f'{plan.n_steps:,}')},} of {plan.n_steps:,}",
        _describe_loss(values, ".3f"),
        f"{values['tokens_per_second_per_device'] * plan.n_ranks:,.0f} tokens/s",
    ]
    if values["model_flops_utilization"] is not None:
        columns.append(f"MFU {values['model_flops_utilization']:.1%}")
    if "expert_imbalance" in values:
        columns.append(f"imbalance {values['expert_imbalance']:.2f}")
    if values["skipped_steps"]:
        columns.append(f"{values['skipped_steps']} skipped")
    return " | ".join([*columns, f"{format_seconds(values['seconds_left'])} left"])


def _describe_loss(values: dict[str, Any], style: str) -> str:
    """Describes the mean loss of the steps of a line; without one, why they were skipped."""
    if math.isfinite(values["loss"]):
        return f"loss {values['loss']:{style}}"
    scale = values["loss_scale"]
    if scale == 1.0:
        return "skipped: loss or gradients not finite"
    return f"skipped: gradients overflowed, loss scale now {scale:g}"


def render_full_line(values: dict[str, Any], plan: Plan) -> str:
    """Renders every metric."""
    utilization = values["model_flops_utilization"]
    columns = [
        f"step {values['step']:>6}/{plan.n_steps}",
        f"sequences {format_large(values['sequences']):>6}",
        f"tokens {format_large(values['tokens']):>6}",
        f"lr {values['learning_rate']:.3e}",
        _describe_loss(values, "7.4f"),
        f"grad norm {values['gradient_norm']:6.3f}",
        f"loss scale {values['loss_scale']:g}",
        f"{values['milliseconds_per_step']:.1f} ms/step",
        f"{values['sequences_per_second']:.2f} sequences/s",
        f"{values['tokens_per_second_per_device']:.0f} tokens/s/GPU",
        f"{format_figure(values['tflops_per_second_per_device'])} TFLOP/s/GPU (model)",
        "MFU -" if utilization is None else f"MFU {utilization:.1%}",
        describe_formula(values),
        f"expert imbalance {values['expert_imbalance']:.3f}, entropy {values['expert_entropy']:.4f}"
        if "expert_imbalance" in values
        else "",
        f"memory {format_bytes(values['memory_bytes'])}",
        f"skipped {values['skipped_steps']}",
        f"ETA {format_seconds(values['seconds_left'])}",
    ]
    return " | ".join(filter(None, columns))


def _peak_flops_per_second(run: Run, device: torch.device) -> float | None:
    found = find_device(device_name(device))
    return found.peak_flops_per_second(run.precision.kind) if found else None


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the peak memory of tensors on a GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _start_tensorboard(folder: Path, run: Run) -> SummaryWriter:
    """Opens TensorBoard's file, with one chart of both losses and the run's settings."""
    writer = SummaryWriter(str(folder / "tensorboard"))
    writer.add_custom_scalars({"loss": {"training and held out": ["Multiline", LOSSES]}})
    settings = {
        f"{section}.{key}": value
        for section in ("model", "train", "optimizer", "schedule", "precision", "parallel")
        for key, value in run.model_dump(mode="json")[section].items()
        if isinstance(value, str | int | float)
    }
    file: Any = writer.file_writer
    for summary in hparams(settings, dict.fromkeys(LOSSES, 0.0)):  # type: ignore[no-untyped-call]
        file.add_summary(summary)
    return writer


def _start_wandb(folder: Path, run: Run) -> Any:
    import wandb

    # One run there for all starts here.
    known = folder / WANDB_ID
    if not known.exists():
        publish_text(known, token_hex(4) + "\n")
    return wandb.init(
        project=run.log.wandb_project,
        name=run.name,
        id=known.read_text(encoding="utf-8").strip(),
        resume="allow",
        dir=str(folder),
        config=run.model_dump(mode="json"),
    )
