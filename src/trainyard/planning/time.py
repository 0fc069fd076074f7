"""Predicts the time of an optimizer step on a machine, from what `planning/work.py` counts.

A pipeline stage spends on each pass of a micro batch

    matmuls         FLOP of matmuls / (peak x share), and their operands as memory-bound
    attention       FLOP of fused attention / (peak x share)
    memory-bound    bytes / (bandwidth of the memory x share)
    tensor, context, pipeline
                    bytes sent / (bandwidth of link or network x share), and a latency per hop
    overhead        the host's extra time to launch the kernels

With m micro batches of the slowest of p ranks, which have v stages each, a step takes

    m passes forward and backward through all stages of that rank
    bubble          one through the stages of all other ranks / v; zero bubble: a third of it
    data            data parallel communication that computation does not hide
    optimizer       bytes of states and gradients, as memory-bound, or the launches of its kernels;
                    Muon's matmuls and messages, which nothing hides

So matmuls of small matrices are slow: on an A100, at half of their best speed where rows, columns
and inner size are all about 500. Shares and latencies belong to the machine;
docs/planning-accuracy.md shows their accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from trainyard.architecture import matmuls
from trainyard.config.precisions import MASTER
from trainyard.config.rules import takes_cudnn
from trainyard.config.run import Run
from trainyard.layout.resolve import Plan
from trainyard.planning.hardware import CUDNN_SPEED, FP8_SPEEDS, Machine
from trainyard.planning.rank import FP32_BYTES
from trainyard.planning.traffic import Collective, Traffic
from trainyard.planning.work import Matmul, Program, RankWork, StagePass, Work, count_work

Parts = dict[str, float]
"""Seconds by name."""
BothSeconds = tuple[Parts, Parts]
"""Forward and backward pass of a micro batch through a stage."""
PARTS = (
    "matmuls",
    "attention",
    "memory-bound",
    "tensor",
    "context",
    "pipeline",
    "overhead",
    "bubble",
    "data",
    "optimizer",
)

FROM_FP8_BYTES = 21
"""Moved per weight that arrives as fp8: reordered, cast to fp32, divided, written as bf16."""
FORWARD_SHARE = {"none": 1 / 2, "attention": 2 / 5, "block": 1 / 3}
"""Share of the communication inside layers; the backward pass includes that of recomputation."""


@dataclass(frozen=True)
class StepTime:
    """The time of an optimizer step by part."""

    seconds: float
    """Total."""
    parts: Parts
    """Exposed seconds of the slowest rank, by PARTS; they sum to `seconds`."""
    stage_seconds: tuple[tuple[float, float], ...]
    """Forward and backward pass of one micro batch, by stage."""


def step_time(run: Run, plan: Plan, machine: Machine, program: Program | None = None) -> StepTime:
    """Predicts a step of train.global_batch_size.

    Args:
        run: the run.
        plan: of the run.
        machine: the devices.
        program: the training program; absent: this one.

    Raises:
        MachineError: the device lacks the run's precision, or its figures are unknown.
    """
    return time_of(count_work(run, plan, program), machine)


def time_of(work: Work, machine: Machine) -> StepTime:
    """Predicts a step from its work, like `step_time`."""
    timer = _Timer(work, machine)
    seconds = {rank: timer.stages(rank) for rank in set(work.ranks)}  # most are alike
    ranks = [seconds[rank] for rank in work.ranks]
    loads = [_total(stages) for stages in ranks]
    totals = [sum(load.values()) for load in loads]
    slowest = max(range(len(ranks)), key=totals.__getitem__)
    parts = {name: work.n_micro_batches * part for name, part in loads[slowest].items()}
    n_stages = sum(map(len, ranks))
    parts["bubble"] = (sum(totals) - totals[slowest]) * len(ranks) / n_stages
    if work.run.parallel.schedule == "zero_bubble":
        parts["bubble"] /= 3
    parts["data"] = max(map(timer.data_seconds, work.ranks, totals))
    parts["optimizer"] = timer.update_seconds()
    return StepTime(
        seconds=sum(parts.values()),
        parts={name: parts[name] for name in PARTS},
        stage_seconds=tuple(
            (sum(forward.values()), sum(backward.values()))
            for stages in zip(*ranks, strict=True)
            for forward, backward in stages
        ),
    )


def update_bytes(run: Run) -> int:
    """Returns the bytes an update moves for each weight of a matrix, without scales.

    Clipping reads the gradient; the update scales it in place, reads and writes the states and the
    weight. A weight with a master weight follows from it; another one is cast for the next step.
    """
    stored, compute = run.stored(True, 2), run.precision.formats.compute
    n_bytes = 3 * stored.gradient.n_bytes
    n_bytes += 2 * sum(state.n_bytes for state in stored.states.values())
    if MASTER in stored.states:
        return n_bytes + stored.weight.n_bytes
    cast_bytes = stored.weight.n_bytes + compute.n_bytes
    return n_bytes + 2 * stored.weight.n_bytes + cast_bytes * (stored.weight != compute)


def _total(stages: Iterable[BothSeconds]) -> Parts:
    """Sums the passes through the stages of a rank."""
    totals: Parts = {}
    for parts in (parts for both in stages for parts in both):
        for name, seconds in parts.items():
            totals[name] = totals.get(name, 0.0) + seconds
    return totals


class _Timer:
    """The time of work on one machine."""

    def __init__(self, work: Work, machine: Machine) -> None:
        self.work, self.topology, self.machine = work, work.topology, machine
        self.program, self.run = work.program, work.run
        self.parallel = work.run.parallel
        formats = work.run.precision.formats
        self.value_bytes = formats.compute.n_bytes
        self.dtypes = formats.compute.name, formats.block_matmuls.name
        takes = takes_cudnn(work.run, machine.device.capability)
        self.attention_speed = self.program.attention_speed or (CUDNN_SPEED if takes else 1.0)

    def stages(self, rank: RankWork) -> list[BothSeconds]:
        """Times a micro batch through each stage of a rank, with a share of the rank's messages."""
        n = self.work.n_micro_batches * len(rank.stages)
        exchanged = dict.fromkeys(("tensor", "context", "pipeline"), 0.0)
        for kind in rank.traffic:
            if kind.axis in exchanged and not _is_of_data(kind):
                exchanged[kind.axis] += self.message_seconds(kind) / n
        if self.program.hides_tensor == "all":  # except the first part
            exchanged["tensor"] /= self.topology.tensor
        first = FORWARD_SHARE[self.parallel.recompute]
        shares = {"tensor": first, "context": first, "pipeline": 1 / 2}
        forward = {axis: exchanged[axis] * share for axis, share in shares.items()}
        backward = {axis: exchanged[axis] - seconds for axis, seconds in forward.items()}
        hidden = self._hidden_seconds() if self.program.hides_tensor == "backward" else 0.0
        seconds = {}
        for passes in set(rank.stages):
            hides = {"tensor": backward["tensor"] - passes[1].n_blocks * hidden}
            seconds[passes] = (
                self._pass(passes[0], forward),
                self._pass(passes[1], backward | hides),
            )
        return [seconds[passes] for passes in rank.stages]

    def _hidden_seconds(self) -> float:
        """Times what tensor ranks exchange beside matmuls, in a block's backward pass.

        Of a column-parallel layer, they sum the gradient of the input beside the matmul of the
        weight's gradient, and gather tokens again beside that of the input's.
        """
        run, parallel = self.run, self.parallel
        if self.topology.tensor == 1 or parallel.schedule == "zero_bubble":
            return 0.0
        n_tokens = run.train.micro_batch_size * run.model.sequence_length // self.topology.context
        n_bytes = n_tokens * run.model.d_model * self.value_bytes
        kinds: list[Collective] = ["reduce-scatter" if parallel.sequence else "all-reduce"]
        kinds += ["all-gather"] * parallel.gathers_again
        messages = [self.message_seconds(Traffic("tensor", kind, 1, n_bytes)) for kind in kinds]
        in_fp8, hides = run.precision.formats.multiplies_in_fp8, 1 - self.program.exposed_share
        hidden = 0.0
        for layer in matmuls(run.model, tensor=self.topology.tensor):
            if layer.sharding == "column":
                beside = Matmul(n_tokens, layer.n_inputs, layer.n_outputs, in_fp8=in_fp8)
                seconds = self._matmul_seconds(beside)
                hidden += sum(min(seconds, hides * message) for message in messages)
        return hidden

    def _pass(self, work: StagePass, exchanged: Parts) -> Parts:
        """Times one pass of a micro batch through a stage."""
        machine = self.machine
        parts = {
            "matmuls": sum(map(self._matmul_seconds, work.products)),
            "attention": machine.attention_seconds(
                work.attention_flops, self.dtypes[0], self.attention_speed
            ),
            "memory-bound": machine.memory_seconds(work.memory_bytes),
            **exchanged,
        }
        device_seconds = sum(parts.values())
        n_compiled = work.n_blocks * self.program.is_compiled
        seconds = machine.with_host(device_seconds, work.kernels, n_compiled)
        return parts | {"overhead": seconds - device_seconds}

    def update_seconds(self) -> float:
        """Times the optimizer, with what Muon multiplies and exchanges."""
        work, machine = self.work, self.machine
        n_updated = max(rank.n_updated for rank in work.ranks)
        seconds = sum(map(self._matmul_seconds, work.update_products)) + max(
            sum(self.message_seconds(kind) for kind in rank.traffic if kind.axis == "stage")
            for rank in work.ranks
        )
        seconds = machine.memory_seconds(update_bytes(self.run) * n_updated) + seconds
        return machine.with_host(seconds, work.update_kernels, 0)

    def _matmul_seconds(self, matmul: Matmul) -> float:
        n_bytes = matmul.n_bytes(self.value_bytes, self.program.cast_bytes)
        speed = FP8_SPEEDS[self.run.precision.fp8.scaling] if matmul.in_fp8 else 1.0
        seconds = self.machine.matmul_seconds(matmul.flops, self.dtypes[matmul.in_fp8], speed)
        return seconds + self.machine.memory_seconds(n_bytes)

    def message_seconds(self, kind: Traffic) -> float:
        """Times calls: rings send each part of a buffer past all ranks except one."""
        size, bandwidth, latency = self._link(kind.axis)
        if kind.collective == "send":
            return kind.n_bytes / bandwidth + kind.calls * latency
        n_rounds = 2 if kind.collective == "all-reduce" else 1
        part_bytes = kind.n_bytes / size
        return n_rounds * ((size - 1) * part_bytes / bandwidth + kind.calls * latency)

    def _link(self, axis: str) -> tuple[int, float, float]:
        """Returns ranks, bandwidth per rank and latency per call, of a group along an axis.

        Its position follows from the order of ranks in `topology.py`. Latency is that of rings
        inside a node and of trees between nodes.
        """
        topology, machine = self.topology, self.machine
        shares = machine.efficiencies
        stride, size = {
            "tensor": (1, topology.tensor),
            "context": (topology.tensor, topology.context),
            "shard": (topology.tensor, topology.context * topology.shard),
            "stage": (1, topology.n_ranks // topology.pipeline),
            "replicate": (topology.tensor * topology.context * topology.shard, topology.replicate),
            "pipeline": (topology.n_ranks // topology.pipeline, topology.pipeline),
        }[axis]
        link = machine.link_bytes_per_second * shares.link_share
        network = machine.network_bytes_per_second * shares.network_share
        n_inside = min(size, max(1, machine.devices_per_node // stride))
        n_nodes = math.ceil(size / n_inside)
        latency = machine.link_latency_seconds * (n_inside - 1)
        latency += machine.network_latency_seconds * math.log2(n_nodes)
        if n_nodes == 1:
            return size, link, latency
        # Rings use the network devices of all their ranks in a node; a send uses one.
        return size, min(link, network * (1 if axis == "pipeline" else n_inside)), latency

    def data_seconds(self, rank: RankWork, micro_batch_seconds: float) -> float:
        """Times exposed communication of data ranks and of the pipeline's ends.

        Args:
            rank: one rank's work.
            micro_batch_seconds: its compute time for one micro batch.
        """
        parallel, program = self.parallel, self.program
        seconds = self.machine.memory_seconds(FROM_FP8_BYTES * rank.n_from_fp8)
        for kind in filter(_is_of_data, rank.traffic):
            is_gradient = kind.collective != "all-gather"
            share = program.reduced_bytes / FP32_BYTES if is_gradient else 1
            seconds += share * self.message_seconds(kind)
        if parallel.pipeline > 1 and not parallel.shards_weights and not program.hides_in_pipeline:
            return seconds
        # The first weights and the last gradients have no computation to hide behind.
        n_groups = self.run.model.n_layers // parallel.pipeline + 1
        n_hiding = self.work.n_micro_batches if parallel.shards_gradients else 1
        exposed_share = max(program.exposed_share, 1 / n_groups)
        return max(exposed_share * seconds, seconds - n_hiding * micro_batch_seconds)


def _is_of_data(kind: Traffic) -> bool:
    """Returns whether it belongs to the whole step; in a pipeline, the sum of tied embeddings."""
    is_sum = (kind.axis, kind.collective) == ("pipeline", "all-reduce")
    return is_sum or kind.axis in ("shard", "replicate")
