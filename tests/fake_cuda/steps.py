"""Training steps on the fake device, and what is demanded of each."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.baselines import build_baseline
from tests.fake_cuda.device import Counts, build_on_device
from torch import Tensor
from torch._dynamo.utils import counters as dynamo
from triton.backends.nvidia.compiler import CUDABackend

from trainyard.bench.measure import OurTraining, TimedTraining, Timeline
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.launch.environment import Process
from trainyard.parallel.mesh import DeviceClock, choose_device
from trainyard.parallel.start import start_ranks
from trainyard.training.state import TrainContext

SMALL = (
    *("model.n_layers=3", "model.d_model=256", "model.n_heads=4", "model.d_ff=1024"),
    *("model.sequence_length=256", "train.micro_batch_size=4", "train.global_batch_size=8"),
)
LAUNCHES = Path(__file__).parent / "launches.json"
LAUNCHES_OF_THIS_TORCH = LAUNCHES.with_name(f"launches-{torch.__version__.partition('+')[0]}.json")
"""Rows with more launches than in launches.json, which is of the torch of constraints.txt."""
MORE_LAUNCHES = 1.02
DEVICE = torch.device("cuda", 0)
WARM_UP_STEPS = 2
"""The optimizer makes its state in the first; the second is the first that is like all later."""


@dataclass(frozen=True)
class Measured:
    """What a step after the warm-up took."""

    counts: Counts
    places: list[str]
    """Kinds of devices that hold weights, gradients and the optimizer's state."""
    graph_breaks: list[str]
    late_graphs: int
    """Compiled after the warm-up."""
    refused_kernels: list[str]
    """Configurations that ptxas refused, by its words."""

    def judge(self, n_waits: int = 0) -> None:
        """Fails unless the step is as every step must be, with so many waits of the host."""
        assert self.places == ["cuda"], f"tensors are on {self.places}"
        waits = self.counts.waits
        assert waits == n_waits, f"the host waits {waits} times in a step, not {n_waits}"
        assert self.graph_breaks == [], f"graph breaks: {self.graph_breaks}"
        assert self.late_graphs == 0, f"{self.late_graphs} graphs compiled after the warm-up"
        assert self.refused_kernels == [], f"ptxas refuses: {self.refused_kernels}"


def measure_run(overrides: Sequence[str]) -> Measured:
    """Trains a small model and evaluates it, on one device."""
    run = load_run("tiny", [*SMALL, *overrides]).run
    device = choose_device(Process(), run)
    context = build_on_device(run, device)
    return measure_steps(context, OurTraining(context))


def count_calls(overrides: Sequence[str]) -> int:
    """Counts the calls of Python and C functions in a step, as the host pays for each."""
    run = load_run("tiny", [*SMALL, *overrides]).run
    training = OurTraining(build_on_device(run, choose_device(Process(), run)))
    calls = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    # The backward pass too, which has a thread of its own.
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(WARM_UP_STEPS + 1):
            training.step()
        sys.setprofile(note)
        training.step()
        sys.setprofile(None)
    return calls


def train_once(overrides: Sequence[str]) -> TrainContext:
    """Does a step and computes a loss without gradients, on one device."""
    run = load_run("tiny", [*SMALL, *overrides]).run
    context = build_on_device(run, choose_device(Process(), run))
    OurTraining(context).step()
    ids = torch.zeros(run.train.global_batch_size, run.model.sequence_length, dtype=torch.long)
    context.model.held_out_loss(ids, ids)
    return context


def measure_rank(run: Run, rank: int, n_ranks: int, store: Path) -> Measured:
    """Trains as one rank of several, each on a device of its own; they meet in a file."""
    process = Process(rank, n_ranks, rank, n_ranks, store_file=store)
    device = choose_device(process, run)
    with start_ranks(process, device, dict):
        context = build_on_device(run, device, rank, n_ranks)
        return measure_steps(context, OurTraining(context))


def train_baseline(name: str, overrides: Sequence[str]) -> None:
    """Trains another project's model on the same data; it may wait, as transformers does."""
    context = build_on_device(load_run("tiny", [*SMALL, *overrides]).run, DEVICE)
    timeline = Timeline(DeviceClock())
    baseline = build_baseline(name, context.run, context.plan, context.device, timeline)
    for _ in range(WARM_UP_STEPS):
        baseline.step()


def measure_steps(context: TrainContext, training: TimedTraining) -> Measured:
    """Does steps, of which the one after the warm-up counts, and computes a loss without gradients.

    Raises:
        RuntimeError: torch refuses a tensor on another device, or a wait for the device.
    """
    with note_refused_kernels() as refused:
        for _ in range(WARM_UP_STEPS):
            training.step()
        n_graphs = dynamo["stats"]["unique_graphs"]
        before = Counts.now()
        with no_waiting():
            training.step()
        counts = Counts.now().since(before)
        late_graphs = dynamo["stats"]["unique_graphs"] - n_graphs
        run = context.run
        ids = torch.zeros(run.train.global_batch_size, run.model.sequence_length, dtype=torch.long)
        context.model.held_out_loss(ids, ids)
    locals_ = context.model.local_parameters
    tensors: list[Tensor] = [local.parameter for local in locals_]
    tensors += [t for local in locals_ for t in context.optimizer.state_of(local).values()]
    breaks = [re.sub(r"\s+", " ", str(reason))[:300] for reason in dynamo["graph_break"]]
    places = sorted({tensor.device.type for tensor in tensors})
    return Measured(counts, places, breaks, late_graphs, refused)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Lets torch refuse what waits for the device, where it knows."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def note_refused_kernels() -> Iterator[list[str]]:
    """Yields a list of the errors of ptxas: Inductor goes on while another configuration works."""
    refused: list[str] = []
    original = CUDABackend.make_cubin

    def noted(*arguments: Any) -> Any:
        try:
            return original(*arguments)
        except Exception as error:
            refused.append(str(error)[-300:])
            raise

    CUDABackend.make_cubin = noted
    try:
        yield refused
    finally:
        CUDABackend.make_cubin = original


def read_launches() -> dict[str, int]:
    """Reads how many launches a step of each row has, with this torch."""
    found: dict[str, int] = json.loads(LAUNCHES.read_text(encoding="utf-8"))
    if LAUNCHES_OF_THIS_TORCH.exists():
        found |= json.loads(LAUNCHES_OF_THIS_TORCH.read_text(encoding="utf-8"))
    return found


def record_launches(found: dict[str, int], path: Path) -> None:
    """Writes the launches of rows: all to launches.json, to another torch's file those above it."""
    budgets = json.loads(LAUNCHES.read_text(encoding="utf-8"))
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows = known | found
    if path != LAUNCHES:
        rows = {row: n for row, n in rows.items() if n > MORE_LAUNCHES * budgets.get(row, 0)}
    path.write_text(json.dumps(rows, indent=0, sort_keys=True) + "\n", encoding="utf-8")


def judge_rows(rows: Iterable[str]) -> None:
    """Fails where one has no budget of launches: tables run in parts, this before any of them."""
    missing = sorted(set(rows) - read_launches().keys())
    assert not missing, f"no budget, RECORD_LAUNCHES=1 make test-cuda: {missing}"


def judge_launches(row: str, n: int) -> None:
    """Fails where a step has more launches than before."""
    budget = read_launches()[row]
    assert n <= MORE_LAUNCHES * budget, f"{n} launches a step, not {budget}"
