"""Simulates the real training step of any rank of any layout, without its device.

Model, sharding, optimizer and step are those of training; only tensors, messages and other ranks
are fake. So it finds a rank's memory to the byte, the moment of its peak, and all its messages,
to verify the formulas of `plan`.

Fp8 matmuls are those of a GPU with fp8, whatever this machine has:

    counted as there    fp8 copies and scales of inputs, and of the transposes that the kernel
                        needs; FLOP of `_scaled_mm`; codes that are sent and kept
    more than there     nothing is compiled: fp32 sources of fp8 copies, and temporaries of the
                        update of low-precision state, briefly take memory here
    less than there     workspace of kernels
    as configured       with precision.fp8.emulate = true, the fp32 matmuls that emulate it
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainyard.config.rules import change
from trainyard.config.run import Run
from trainyard.data.loader import Loader
from trainyard.launch.heartbeat import Heartbeat, Phase
from trainyard.layout.resolve import Plan, resolve
from trainyard.optim.optimizer import LocalOptimizer
from trainyard.parallel.mesh import Mesh, build_mesh
from trainyard.parallel.model import ParallelModel
from trainyard.parallel.placement import local_part
from trainyard.planning.timeline import round_size
from trainyard.planning.traffic import Axis, Collective, Traffic
from trainyard.precision.float8 import build_product
from trainyard.simulate.accounting import Accounting
from trainyard.simulate.fake_world import fake_tensors, fake_world
from trainyard.simulate.parity import bare_context
from trainyard.training.run_folder import refuse_unsupported
from trainyard.training.state import State
from trainyard.training.step import train_step

MessageKind = tuple[Axis, Collective]
N_LARGEST = 12
FEWEST_MICRO_BATCHES = 3
"""The first, the last and a middle one can differ in memory and messages."""


@dataclass(frozen=True)
class Simulation:
    """Resources of one optimizer step of a rank."""

    rank: int
    n_ranks: int
    peak_bytes: int
    """Memory of all live tensors; without that of kernels and libraries."""
    moment: str
    """When memory is at its peak, in words."""
    largest: tuple[tuple[str, int], ...]
    """The largest tensors then: parameters by name, others by the operation that made them."""
    held_bytes: int
    """Between two steps: weights and optimizer state."""
    flops: dict[str, int]
    """FLOP of matmuls and attention by operation, including recomputation; attention counts as if
    every token saw all others."""
    messages: tuple[Traffic, ...]
    n_micro_batches: int
    """In a step; those beyond `n_simulated` are extrapolated."""
    n_simulated: int
    seconds: float
    """How long the simulation took."""
    differences: tuple[str, ...] = ()
    """Differences from the step on the device, in words."""


@dataclass(frozen=True)
class Counts:
    """Counts of a step."""

    n_micro_batches: int
    peak_bytes: int
    held_bytes: int
    """After it."""
    batch_bytes: int
    """Bytes of tokens and labels."""
    flops: Counter[str]
    calls: Counter[MessageKind]
    message_bytes: Counter[MessageKind]

    def extrapolate(self, fewer: Counts, n_micro_batches: int) -> Counts:
        """Extrapolates linearly from this step and one of fewer micro batches."""
        n_apart = max(1, self.n_micro_batches - fewer.n_micro_batches)
        n_beyond = n_micro_batches - self.n_micro_batches

        def extend(more: int, less: int) -> int:
            return more + n_beyond * (more - less) // n_apart

        def extend_all(more: Counter[Any], less: Counter[Any]) -> Counter[Any]:
            return Counter({key: extend(n, less[key]) for key, n in more.items()})

        # The peak may become linear later: at first there are no gradients yet.
        n_held, n_batch = self.held_bytes, self.batch_bytes
        growth = n_held - fewer.held_bytes + n_batch - fewer.batch_bytes
        return Counts(
            n_micro_batches,
            extend(self.peak_bytes, self.peak_bytes - growth),
            extend(n_held, fewer.held_bytes),
            extend(n_batch, fewer.batch_bytes),
            extend_all(self.flops, fewer.flops),
            extend_all(self.calls, fewer.calls),
            extend_all(self.message_bytes, fewer.message_bytes),
        )

    def messages(self) -> tuple[Traffic, ...]:
        """Lists the messages, most bytes first."""
        return tuple(
            Traffic(*kind, self.calls[kind], n_bytes)
            for kind, n_bytes in self.message_bytes.most_common()
        )


def simulate(run: Run, n_ranks: int, rank: int, *, on_gpu: bool = True) -> Simulation:
    """Runs the training step of one rank on fake tensors.

    Args:
        run: the run.
        n_ranks: all processes.
        rank: the rank to simulate.
        on_gpu: simulate GPU behavior.

    Raises:
        ConfigError: the run does not fit `n_ranks`, or cannot be trained.
    """
    started = time.monotonic()
    plan = prepare_simulation(run, n_ranks)
    n_micro_batches = micro_batches_per_step(run, plan)
    numbers = _shorten(run, n_micro_batches)
    accounts = Accounting()
    with fake_world(rank, n_ranks):
        mesh = build_mesh(plan.topology, rank, torch.device("cpu"))
        with fake_tensors(on_gpu=on_gpu), accounts:
            fewer, counts = count_steps(run, plan, mesh, accounts, numbers)
    total = counts.extrapolate(fewer, n_micro_batches)
    return Simulation(
        rank,
        n_ranks,
        total.peak_bytes,
        accounts.peak_moment,
        tuple(accounts.live_at_peak().most_common(N_LARGEST)),
        total.held_bytes,
        dict(total.flops),
        total.messages(),
        n_micro_batches,
        numbers[1],
        time.monotonic() - started,
        tuple(_differences(run)),
    )


def prepare_simulation(run: Run, n_ranks: int) -> Plan:
    """Checks and plans a run, before tensors are fake.

    Raises:
        ConfigError: the run does not fit `n_ranks`, or cannot be trained.
    """
    # As with emulation, no device needs fp8 here.
    refuse_unsupported(change(run, {"precision.fp8.emulate": True}))
    if run.precision.formats.multiplies_in_fp8:
        build_product(run.precision.fp8)  # loads torchao, whose own tensors must not be fake
    return resolve(run, n_ranks)


def _differences(run: Run) -> Iterator[str]:
    is_compiled = run.train.compile != "never"
    if is_compiled:
        yield "nothing is compiled here; compiled blocks and losses keep other values"
    if run.precision.formats.multiplies_in_fp8 and run.precision.fp8.emulate:
        yield "precision.fp8.emulate=true: fp8 matmuls are emulated with fp32 copies"
    elif run.precision.formats.multiplies_in_fp8:
        yield "workspace of fp8 matmuls is not counted"
    if run.precision.formats.scales_columns and is_compiled:
        yield "nor is the update of low-precision state compiled, which needs temporaries then"


def micro_batches_per_step(run: Run, plan: Plan) -> int:
    """Counts the micro batches of a rank in a step of train.global_batch_size."""
    return run.train.global_batch_size // plan.topology.data // run.train.micro_batch_size


def count_steps(
    run: Run, plan: Plan, mesh: Mesh, accounts: Accounting, numbers: Sequence[int]
) -> list[Counts]:
    """Trains from the start, on real or fake tensors, and counts each step.

    Args:
        run: the run.
        plan: of the run.
        mesh: of this rank.
        accounts: active; at the end they hold the last step's peak.
        numbers: micro batches of each step.
    """
    run = change(run, {"train.compile": "never"})
    parallel_model = ParallelModel(run, plan, mesh)
    labels = PhaseLabels(accounts, parallel_model)
    steps = FakeSteps(run, plan, parallel_model, labels)
    counts = []
    for n in numbers:
        labels.begin_step(n, steps.optimizer)
        steps.take(n)
        calls, n_bytes = Counter[MessageKind](), Counter[MessageKind]()
        for (group, kind), n_calls in accounts.calls.items():
            key = _axis_and_kind(group, kind, mesh, run)
            if key is not None:
                calls[key] += n_calls
                n_bytes[key] += accounts.message_bytes[group, kind]
        memory = accounts.peak_bytes, accounts.live_bytes, steps.batch_bytes
        counts.append(Counts(n, *memory, accounts.flops.copy(), calls, n_bytes))
    return counts


def _shorten(run: Run, n_micro_batches: int) -> tuple[int, int]:
    """Returns two numbers of micro batches from which on all counts are linear."""
    pipeline, schedule = run.parallel.pipeline, run.parallel.schedule
    if pipeline == 1:
        fewer, more = FEWEST_MICRO_BATCHES - 1, FEWEST_MICRO_BATCHES
    elif schedule == "gpipe":  # all are in flight
        return n_micro_batches, n_micro_batches
    elif schedule == "1f1b":
        fewer, more = pipeline, pipeline + 2  # rank 0 has `pipeline` of them in flight
    else:
        fewer = round_size(pipeline, n_micro_batches)
        more = 2 * fewer
    if more >= n_micro_batches:
        return n_micro_batches, n_micro_batches
    return fewer, more


def _axis_and_kind(group: str, kind: str, mesh: Mesh, run: Run) -> MessageKind | None:
    """Finds the axis of a group; None for that of all ranks, which carries single numbers."""
    axes: dict[Axis, list[Any]] = {
        "tensor": [mesh.tensor],
        "context": [mesh.context],
        "pipeline": [mesh.pipeline, mesh.first_and_last_stage],
        "stage": [vars(mesh).get("stage")],  # None before an optimizer asks for it
        "shard": [mesh.data.get_group(mesh.data.ndim - 1)] if mesh.data is not None else [],
        "replicate": [mesh.data.get_group(0)] if mesh.topology.replicate > 1 and mesh.data else [],
        "expert": [mesh.expert],
        "same experts": [mesh.same_experts.get_group("shard")] if mesh.same_experts else [],
    }
    several = [(g, axis) for axis, groups in axes.items() for g in groups if g and g.size() > 1]
    names = {group.group_name: axis for group, axis in several}
    axis = names.get(group)
    if axis is None:
        return None
    # Shards circulate in a ring by all-to-all calls that send to one neighbour only.
    is_ring = axis == "context" and run.parallel.context_method == "ring" and kind == "all-to-all"
    return axis, "send" if is_ring else cast(Collective, kind)


class FakeSteps:
    """Trains a rank from the start on constant tokens, with any number of micro batches a step."""

    def __init__(
        self, run: Run, plan: Plan, parallel_model: ParallelModel, heartbeat: Heartbeat
    ) -> None:
        self._run, self._n_sequences = run, 0
        loader = cast(Loader, self)
        self._context = bare_context(run, plan, parallel_model, loader, heartbeat)
        self.optimizer = self._context.optimizer
        self.optimizer.prepare_state(0)  # which every step but the first has
        self._state = State.at_start(self._context)

    def take(self, n_micro_batches: int) -> None:
        """Runs the next step."""
        self._n_sequences = n_micro_batches * self._run.train.micro_batch_size
        train_step(self._context, self._state)
        self._state.step += 1

    @property
    def batch_bytes(self) -> int:
        """Bytes of a step's tokens and labels."""
        return 2 * self._n_sequences * self._run.model.sequence_length * torch.int64.itemsize

    def batch(self, _step: int, _offset: int) -> tuple[Tensor, Tensor]:
        """Returns constant tokens and labels, in place of a loader."""
        tokens = torch.zeros(self._n_sequences, self._run.model.sequence_length, dtype=torch.int64)
        return tokens, torch.zeros_like(tokens)


class PhaseLabels(Heartbeat):
    """Receives phases of a step like the parent process, and blocks by hooks on them.

    Args:
        accounts: the accounts to label.
        parallel_model: whose blocks to watch.
    """

    def __init__(self, accounts: Accounting, parallel_model: ParallelModel) -> None:
        super().__init__()
        self._accounts = accounts
        self._parallel_model = parallel_model
        self._n_micro_batches = 0
        self._n_forwards: dict[str, int] = {}
        for model in parallel_model.stages.values():
            if model.takes_tokens and model.embedding is not None:
                self._watch(model.embedding, "the embedding")
            for number, block in model.blocks.items():
                self._watch(block, f"block {number}")
            if model.cross_entropy is not None:
                self._watch(model.cross_entropy, "the loss")

    def begin_step(self, n_micro_batches: int, optimizer: LocalOptimizer) -> None:
        """Starts new accounts, and names the memory that persists between steps."""
        self._n_micro_batches = n_micro_batches
        self._n_forwards.clear()
        for local in self._parallel_model.local_parameters:
            named = [(f"weights: {local.name}", local_part(local.parameter))]
            for key, value in optimizer.state_of(local).items():
                named.append((f"{key}: {local.name}", value))
            self._accounts.name(named)
        self._accounts.start_over()

    def enter(self, phase: Phase, step: int) -> None:
        """Records a phase."""
        super().enter(phase, step)
        self._accounts.moment = phase
        # The only all-reduce of an update is that of the norm of all gradients.
        self._accounts.counts_all_reduces = phase != "update"

    def _watch(self, module: nn.Module, name: str) -> None:
        def before(_module: nn.Module, _arguments: Any) -> None:
            if _is_in_backward():  # recomputed
                return
            self._n_forwards[name] = self._n_forwards.get(name, 0) + 1
            self._say("forward of", name, self._n_forwards[name])

        def after(_module: nn.Module, _arguments: Any, out: Tensor) -> None:
            if out.grad_fn is None or _is_in_backward():
                return
            number = self._n_forwards[name]
            out.grad_fn.register_prehook(lambda _: self._say("backward of", name, number))

        module.register_forward_pre_hook(before, prepend=True)
        module.register_forward_hook(after)

    def _say(self, what: str, name: str, number: int) -> None:
        n = self._n_micro_batches
        self._accounts.moment = f"{what} {name}, micro batch {number} of {n}"


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
