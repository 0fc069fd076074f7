"""Trains a small run for three steps in any layout, and compares it with the single device.

It compares every number: the loss, the gradient norm and all gradients of each step, and all final
weights. Shards are assembled into whole tensors; shards that several ranks hold must be equal on
all. A weight of 4 rows, split in two halves, each held by two ranks:

    rank 0, rank 2    Piece(shape=(4, 8), offsets=(0, 0), value of (2, 8))
    rank 1, rank 3    Piece(shape=(4, 8), offsets=(2, 0), value of (2, 8))
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor

from trainyard.config.precisions import FORMATS
from trainyard.config.rules import Changes, change
from trainyard.config.run import Blend, Data, Run
from trainyard.data.indexed import IndexedWriter
from trainyard.data.loader import Loader, build_orders
from trainyard.launch.heartbeat import Heartbeat, Phase
from trainyard.layout.batches import BatchSchedule
from trainyard.layout.resolve import Plan, resolve
from trainyard.model.loss import IGNORE_INDEX
from trainyard.optim.optimizer import build_optimizer
from trainyard.parallel.mesh import build_mesh
from trainyard.parallel.model import ParallelModel
from trainyard.parallel.placement import local_part
from trainyard.precision.block_scaled import BlockScaledTensor
from trainyard.simulate.shrink import N_STEPS
from trainyard.training.state import State, TrainContext
from trainyard.training.step import train_step

Array = NDArray[Any]
_LISTS = ("gradients", "weights")
"""Fields of an outcome that hold pieces."""

BOUNDS = {"fp64": 1e-10} | {kind: formats.rounding for kind, formats in FORMATS.items()}
"""Largest relative difference that another summation order explains."""
LOSS_SCALE = 2.0**10
"""For fp16 here: nothing overflows in a small model, and almost nothing underflows."""


@dataclass
class Piece:
    """One rank's shard of a tensor."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    value: Array


@dataclass
class Outcome:
    """One rank's results of three steps."""

    losses: list[float]
    norms: list[float]
    gradients: list[Piece]
    """All steps', before clipping."""
    weights: list[Piece]


class IncompleteError(Exception):
    """The ranks together do not hold the whole model."""


class PartlyLabelled(Loader):
    """Training's loader without a fifth of the labels, so that ranks have unequal work."""

    def batch(self, step: int, offset: int = 0) -> tuple[Tensor, Tensor]:
        """Returns this rank's sequences of a step."""
        tokens, labels = super().batch(step, offset)
        return tokens, labels.masked_fill(labels % 5 == 0, IGNORE_INDEX)


def build_loader(run: Run, plan: Plan, share: tuple[int, int]) -> Loader:
    """Writes token files of random ids, the same in every layout, and opens them as training does.

    Args:
        run: the run.
        plan: its plan.
        share: data-parallel rank and size.
    """
    chance = np.random.default_rng(1000)
    n_sequences, n_tokens = plan.order_sequences[0], run.model.sequence_length
    with tempfile.TemporaryDirectory(prefix="trainyard-") as folder:
        prefix = f"{folder}/ids"
        with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
            for length in chance.integers(1, 2 * n_tokens, n_sequences + 1):
                ids = chance.integers(0, run.model.vocabulary_size, length)
                writer.add_document(ids)
        data = Data(train=Blend(prefixes=(prefix,)), cache_folder=f"{folder}/cache")
        order = build_orders(run.model_copy(update={"data": data}), plan, ["train"])["train"]
        assert order is not None, "the train split is the whole file"
        return PartlyLabelled(order, BatchSchedule(run), run.model.vocabulary_size, share)


def train_three_steps(run: Run, rank: int, n_ranks: int, precision: str) -> Outcome:
    """Trains on the CPU as one rank of `n_ranks`.

    Args:
        run: a small run of three steps.
        rank: of this process.
        n_ranks: if above one, the process group must exist.
        precision: the `precision.kind` to train in; or fp64 for weights and computation, except
            for the loss scale and fp8 matmuls of the run's own kind.
    """
    if precision != "fp64":
        run = _in_precision(run, precision)
    plan = resolve(run, n_ranks)
    mesh = build_mesh(plan.topology, rank, torch.device("cpu"))
    dtype = torch.float64 if precision == "fp64" else None
    with _weights_in(dtype or torch.float32):
        parallel_model = ParallelModel(run, plan, mesh, dtype)
        recorder = _GradientRecorder(parallel_model)
        loader = build_loader(run, plan, mesh.data_rank_and_size)
        context = bare_context(run, plan, parallel_model, loader, recorder)
        state = State.at_start(context)
        results = []
        for step in range(N_STEPS):
            state.step = step
            results.append(train_step(context, state))
    return Outcome(
        losses=[result.loss.item() for result in results],
        norms=[result.gradient_norm.item() for result in results],
        gradients=recorder.gradients,
        weights=_copy(parallel_model, "parameter"),
    )


def bare_context(
    run: Run, plan: Plan, model: ParallelModel, train_data: Loader, heartbeat: Heartbeat
) -> TrainContext:
    """Builds what `train_step` needs, and no more."""
    return TrainContext(
        folder=Path(),
        run=run,
        plan=plan,
        batches=BatchSchedule(run),
        model=model,
        optimizer=build_optimizer(model, run),
        train_data=train_data,
        valid_order=None,
        tokenizer=None,
        data_fingerprint="",
        heartbeat=heartbeat,
    )


class _GradientRecorder(Heartbeat):
    """Copies the gradients of each step, before clipping."""

    def __init__(self, parallel_model: ParallelModel) -> None:
        super().__init__()
        self._parallel_model = parallel_model
        self.gradients: list[Piece] = []

    def enter(self, phase: Phase, step: int) -> None:
        """Begins a phase of a step; gradients are complete when the update begins."""
        super().enter(phase, step)
        if phase == "update":
            for piece in _copy(self._parallel_model, "gradient"):
                self.gradients.append(replace(piece, name=f"{piece.name} in step {step}"))


def _in_precision(run: Run, kind: str) -> Run:
    """Returns a run of another kind; if it computes in fp8, it does so in every block."""
    fp8: Changes = {"precision.fp8.emulate": True, "precision.fp8.precise_blocks": 0}
    return change(run, fp8 | {"precision.kind": kind, "precision.loss_scale.initial": LOSS_SCALE})


@contextmanager
def _weights_in(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _copy(parallel_model: ParallelModel, what: str) -> list[Piece]:
    """Copies this rank's shard of every parameter or gradient."""
    found = []
    weights = parallel_model.saved_tensors
    for local in weights if what == "parameter" else parallel_model.local_parameters:
        placement = local.placement
        part = getattr(local, what)
        value = part.decode() if isinstance(part, BlockScaledTensor) else local_part(part)
        copy = value.double().numpy().copy()
        found.append(Piece(local.name, placement.shape, placement.offsets, copy))
    return found


def save_outcome(outcome: Outcome, path: Path) -> None:
    """Writes an outcome as one safetensors file."""
    facts = asdict(outcome)
    values = [piece.pop("value") for name in _LISTS for piece in facts[name]]
    save_file({str(n): value for n, value in enumerate(values)}, path, {"": json.dumps(facts)})


def load_outcome(path: Path) -> Outcome:
    """Reads what `save_outcome` wrote."""
    with safe_open(path, "numpy") as file:
        facts = json.loads(file.metadata()[""])
        for n, piece in enumerate(piece for name in _LISTS for piece in facts[name]):
            piece["value"] = file.get_tensor(str(n))
    for name in _LISTS:
        facts[name] = [
            Piece(each["name"], tuple(each["shape"]), tuple(each["offsets"]), each["value"])
            for each in facts[name]
        ]
    return Outcome(**facts)


@dataclass(frozen=True)
class Difference:
    """Worst relative difference between a layout and the single device, over steps and tensors."""

    loss: float
    norm: float
    gradient: float
    weight: float
    between_ranks: float
    """The largest absolute difference between two ranks' copies of the same number."""

    @property
    def worst(self) -> float:
        """The largest of all, NaN if any is."""
        return _worst([self.loss, self.norm, self.gradient, self.weight])

    def is_within(self, bound: float) -> bool:
        """Returns whether a layout computes the same; NaN never does."""
        return self.worst <= bound and self.between_ranks == 0.0

    def __str__(self) -> str:
        numbers = (self.loss, self.norm, self.gradient, self.weight)
        names = ("loss", "norm", "gradients", "weights")
        return "  ".join(f"{name} {n:.1e}" for name, n in zip(names, numbers, strict=True))


def compare(reference: Outcome, ranks: list[Outcome]) -> Difference:
    """Compares all ranks of a layout with the single device.

    Raises:
        IncompleteError: no rank holds a tensor, or part of one.
    """
    gradient, apart = _compare_tensors(reference, ranks, "gradients")
    weight, weights_apart = _compare_tensors(reference, ranks, "weights")
    losses, norms = ([getattr(each, name) for each in ranks] for name in ("losses", "norms"))
    return Difference(
        loss=_worst(np.abs(np.subtract(losses, reference.losses)) / np.abs(reference.losses)),
        norm=_worst(np.abs(np.subtract(norms, reference.norms)) / np.abs(reference.norms)),
        gradient=gradient,
        weight=weight,
        between_ranks=_worst([apart, weights_apart]),
    )


def _compare_tensors(reference: Outcome, ranks: list[Outcome], what: str) -> tuple[float, float]:
    expected, _ = assemble([getattr(reference, what)])
    found, apart = assemble([getattr(outcome, what) for outcome in ranks])
    if odd := expected.keys() ^ found.keys():
        raise IncompleteError(f"no rank holds {', '.join(sorted(odd))}")
    return _worst([_distance(found[name], expected[name]) for name in expected]), apart


def assemble(ranks: list[list[Piece]]) -> tuple[dict[str, Array], float]:
    """Assembles the pieces of all ranks.

    Returns:
        the whole tensors, and the largest difference between two ranks' copies of the same number.

    Raises:
        IncompleteError: no rank holds part of a tensor.
    """
    whole: dict[str, Array] = {}
    is_known: dict[str, Array] = {}
    differences = [0.0]
    for piece in (piece for pieces in ranks for piece in pieces):
        target = whole.setdefault(piece.name, np.zeros(piece.shape))
        known = is_known.setdefault(piece.name, np.zeros(piece.shape, dtype=bool))
        window = tuple(
            slice(start, start + length)
            for start, length in zip(piece.offsets, piece.value.shape, strict=True)
        )
        both = known[window]
        if both.any():
            differences.append(float(np.abs(target[window][both] - piece.value[both]).max()))
        target[window], known[window] = piece.value, True
    for name, known in is_known.items():
        if not known.all():
            raise IncompleteError(f"no rank holds part of {name}")
    return whole, _worst(differences)


def _worst(numbers: ArrayLike) -> float:
    """The largest, NaN if any is, which Python's `max` may miss."""
    return float(np.max(numbers))


def _distance(found: Array, expected: Array) -> float:
    """The norm of the difference over the norm; zero padding rows may be missing."""
    n_rows = max(len(found), len(expected))
    found, expected = (
        np.pad(each, [(0, n_rows - len(each)), *[(0, 0)] * (each.ndim - 1)])
        for each in (found, expected)
    )
    size = float(np.linalg.norm(expected))
    return float(np.linalg.norm(found - expected)) / (size or 1.0)
