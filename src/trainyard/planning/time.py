"""Predicts the time of an optimizer step on a machine, from what `planning/work.py` counts.

A pipeline stage spends on each pass of a micro batch

    matmuls         FLOP of matmuls / (peak x share), and their operands as memory-bound
    attention       FLOP of fused attention / (peak x share)
    memory-bound    bytes / (bandwidth of the memory x share)
    tensor, context, pipeline, expert
                    bytes sent / (bandwidth of link or network x share), and a latency per hop
    overhead        the host's extra time to launch the kernels, and to wait for counts of rows

With m micro batches of the slowest of p ranks, which have v stages each, a step takes

    m passes forward and backward through all stages of that rank
    bubble          one through the stages of all other ranks / v; zero bubble: a third of it;
                    more where m < p
    data            data parallel communication that computation does not hide
    optimizer       bytes of states and gradients, as memory-bound, or the launches of its kernels;
                    Muon's matmuls and messages, which nothing hides

So matmuls of small matrices are slow: on an A100, at half of their best speed where rows, columns
and inner size are all about 500. Shares and latencies belong to the machine;
docs/planning-accuracy.md shows their accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainyard.architecture import count_pieces, matmuls
from trainyard.config.precisions import MASTER
from trainyard.config.rules import takes_cudnn
from trainyard.config.run import Run
from trainyard.layout.resolve import Plan
from trainyard.planning.hardware import ALONE, CAST_SPEEDS, CUDNN_SPEED, Machine
from trainyard.planning.rank import FP32_BYTES, count_waiting, sums_each
from trainyard.planning.timeline import bubble_passes
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
    "expert",
    "overhead",
    "bubble",
    "data",
    "optimizer",
)

RANGES = {"step": 0.1, "several devices": 0.3, "unmeasured device": 0.25, "fp8": 0.15, "ring": 0.2}
"""How far steps are from predictions, as a share, by what adds to it."""
FROM_FP8_BYTES = 21
"""Moved per weight that arrives as fp8: reordered, cast to fp32, divided, written as bf16."""
WAIT_SECONDS = 20e-6
"""From the end of what the host waits for to the first kernel after it; assumed."""
RECOMPUTED = {"none": 0, "attention": 1 / 2, "block": 1}
"""Part of the communication inside layers that recomputation repeats."""


@dataclass(frozen=True)
class StepTime:
    """The time of an optimizer step by part."""

    seconds: float
    """Total."""
    parts: Parts
    """Exposed seconds of the slowest rank, by PARTS; they sum to `seconds`."""
    stage_seconds: tuple[tuple[float, float], ...]
    """Forward and backward pass of one micro batch, by stage."""

    def scaled(self, factor: float) -> StepTime:
        """Multiplies all times."""
        parts = {name: factor * seconds for name, seconds in self.parts.items()}
        stages = tuple((factor * one, factor * other) for one, other in self.stage_seconds)
        return StepTime(factor * self.seconds, parts, stages)


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
    load_of = {rank: _total(stages) for rank, stages in seconds.items()}
    ranks = [seconds[rank] for rank in work.ranks]
    loads = [load_of[rank] for rank in work.ranks]
    totals = [sum(load.values()) for load in loads]
    slowest = max(range(len(ranks)), key=totals.__getitem__)
    parts = {name: work.n_micro_batches * part for name, part in loads[slowest].items()}
    of_others = (sum(totals) - totals[slowest]) / max(1, len(ranks) - 1)
    parts["bubble"] = of_others * bubble_passes(work.run.parallel, work.n_micro_batches)
    different = set(zip(work.ranks, totals, strict=True))
    parts["data"] = max(timer.data_seconds(*each) for each in different)
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


def seconds_of_passes(run: Run, plan: Plan, machine: Machine) -> float:
    """Times a micro batch through all stages, without what pipeline and data ranks exchange."""
    work = count_work(run, plan)
    timer = _Timer(work, machine)
    loads = [_total(timer.stages(rank)) for rank in work.ranks]
    return sum(sum(load.values()) - load["pipeline"] for load in loads)


def find_extremes(
    run: Run, plan: Plan, machine: Machine, time: StepTime
) -> tuple[StepTime, StepTime]:
    """Returns the fastest and the slowest step that a prediction may stand for.

    The range holds 9 of 10 published steps; sources of error are independent, so their squares add
    up (RANGES).
    """
    source = machine.efficiencies.sources["matmul_share"]
    applies = {
        "step": True,
        "several devices": plan.n_ranks > 1,
        "unmeasured device": source.startswith("assumed"),
        "fp8": run.precision.formats.multiplies_in_fp8,
        "ring": plan.topology.context > 1 and run.parallel.context_method == "ring",
    }
    spread = math.hypot(*(RANGES[name] for name, is_so in applies.items() if is_so))
    return time.scaled(1 / (1 + spread)), time.scaled(1 + spread)


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


def _hidden_backward(
    layers: Sequence[tuple[bool, float]],
    messages: tuple[float, float, float, float],
    n_pieces: int,
    *,
    waits: bool,
    splits: bool,
) -> float:
    """Returns the seconds that matmuls hide of what tensor ranks exchange in a backward pass.

    Args:
        layers: whether outputs are sharded, and the seconds of a matmul, in order of the block.
        messages: seconds to gather a gradient in pieces and at once, to gather an input again, and
            to sum a gradient in pieces.
        n_pieces: of these.
        waits: whether matmuls of weight gradients wait for the next layer's exchange.
        splits: whether they are in another part of a zero bubble.
    """
    first, gather, again, sum_up = messages
    in_pieces = 1 - 1 / n_pieces
    hidden, waiting = 0.0, layers[0][1] * (not splits)
    for is_column, seconds in reversed(layers):
        of_weights = seconds * (not splits)
        if is_column:
            of_inputs = min(seconds, again)
            beside = waiting if waits else of_weights
            beside += min(in_pieces * sum_up, seconds - of_inputs)
            hidden += of_inputs + min(sum_up, beside)
        elif gather:
            hidden += min(gather, waiting) if waits else in_pieces * min(first, seconds)
        waiting = of_weights + (0.0 if is_column or gather else waiting)
    return hidden


class _Timer:
    """The time of work on one machine."""

    def __init__(self, work: Work, machine: Machine) -> None:
        self.work, self.topology = work, work.topology
        self.program, self.run = work.program, work.run
        self.parallel = work.run.parallel
        formats = work.run.precision.formats
        self.value_bytes = formats.compute.n_bytes
        self.dtypes = formats.compute.name, formats.block_matmuls.name
        cast_speed = CAST_SPEEDS[work.run.precision.fp8.scaling]
        self.cast_bytes = tuple(n / cast_speed for n in work.program.cast_bytes)
        takes = takes_cudnn(work.run, machine.device.capability)
        self.attention_speed = self.program.attention_speed or (CUDNN_SPEED if takes else 1.0)
        topology = work.topology
        speed = self.program.shared_speed if topology.n_ranks > 1 else ALONE
        self.sums_each = sums_each(work.run, topology)
        if self.sums_each and topology.shard * topology.context > 1:
            speed *= self.program.sharded_speed
        self.machine = machine.at_speed(speed)

    def stages(self, rank: RankWork) -> list[BothSeconds]:
        """Times a micro batch through each stage of a rank, with a share of the rank's messages."""
        n = self.work.n_micro_batches * len(rank.stages)
        exchanged = dict.fromkeys(("tensor", "context", "pipeline", "expert"), 0.0)
        for kind in rank.traffic:
            if kind.axis in exchanged and not _is_of_data(kind):
                exchanged[kind.axis] += self.message_seconds(kind) / n
        exposed_share = self.program.exposed_tensor_share
        if exposed_share is not None:  # the first part at least
            exchanged["tensor"] *= max(exposed_share, 1 / self.topology.tensor)
        exchanged["tensor"] += self._copy_seconds(rank) / n
        n_passes = 2 + RECOMPUTED[self.parallel.recompute] * self.parallel.recompute_share
        is_ring = self.parallel.context_method == "ring"  # sends gradients back too, in fp32
        n_more = FP32_BYTES / self.value_bytes if is_ring else 0
        again = (self.parallel.recompute == "block") * self.parallel.recompute_share
        shares = {"tensor": 1 / n_passes, "context": 1 / (n_passes + n_more), "pipeline": 1 / 2}
        shares["expert"] = 1 / (2 + again)
        forward = {axis: exchanged[axis] * share for axis, share in shares.items()}
        backward = {axis: exchanged[axis] - seconds for axis, seconds in forward.items()}
        hidden = self._hidden_seconds() if exposed_share is None else (0.0, 0.0)
        sent, seconds = (forward["context"], backward["context"]), {}
        for passes in set(rank.stages):
            if is_ring:  # which computes on the keys of one rank while it receives the next ones
                share = 1 - 1 / self.topology.context
                beside = (share * self._attention_seconds(each) for each in passes)
                exposed = (max(0.0, a - b) for a, b in zip(sent, beside, strict=True))
                forward["context"], backward["context"] = exposed
            seconds[passes] = (
                self._pass(passes[0], forward, hidden[0]),
                self._pass(passes[1], backward, hidden[1]),
            )
        return [seconds[passes] for passes in rank.stages]

    def _copy_seconds(self, rank: RankWork) -> float:
        """Times the concatenation of gathered pieces, for the gradient of a weight."""
        if self.run.train.micro_batch_size == 1 or not self.program.copies_tokens:
            return 0.0
        gathers = ("tensor", "all-gather")
        sent = (kind for kind in rank.traffic if (kind.axis, kind.collective) == gathers)
        return self.machine.memory_seconds(2 * sum(kind.n_bytes for kind in sent))

    def _hidden_seconds(self) -> tuple[float, float]:
        """Times what tensor ranks exchange beside matmuls, in a block's forward and backward pass.

        In a forward pass, a matmul of n pieces hides all but 1/n of the shorter of the two, itself
        or its messages.
        """
        run, parallel, topology = self.run, self.parallel, self.topology
        if topology.tensor == 1:
            return 0.0, 0.0
        n_sequences = run.train.micro_batch_size
        n_tokens = run.model.sequence_length // topology.context
        n_pieces = count_pieces(n_tokens, n_sequences, topology.tensor)
        n_bytes = n_sequences * n_tokens * run.model.d_model * self.value_bytes

        def in_messages(collective: Collective, n: int) -> float:
            return self.message_seconds(Traffic("tensor", collective, n, n_bytes))

        first = gather = 0.0
        sum_up = in_messages("reduce-scatter" if parallel.sequence else "all-reduce", n_pieces)
        if parallel.sequence:
            first = in_messages("all-gather", n_pieces)
            gather = first if n_sequences == 1 else in_messages("all-gather", 1)
        in_fp8 = run.precision.formats.multiplies_in_fp8
        layers = []
        for layer in matmuls(run.model, tensor=topology.tensor):
            beside = Matmul(n_sequences * n_tokens, layer.n_inputs, layer.n_outputs, in_fp8=in_fp8)
            layers.append((layer.sharding == "column", self._matmul_seconds(beside)))
        forward = sum(min(seconds, first if column else sum_up) for column, seconds in layers)
        forward *= 1 - 1 / n_pieces
        recomputed = parallel.recompute_share * (parallel.recompute == "block")
        n = self.work.n_micro_batches
        once, again = (
            count_waiting(run, topology, n, kind, in_fp8) / n for kind in ("none", "block")
        )
        waiting = (1 - recomputed) * once + recomputed * again
        messages = first, gather, gather * (1 - recomputed), sum_up
        splits = topology.pipeline > 1 and parallel.schedule == "zero_bubble"
        here, later = (
            _hidden_backward(layers, messages, n_pieces, waits=waits, splits=splits)
            for waits in (splits, True)  # nothing waits in a zero bubble
        )
        return forward, here + waiting * (later - here) + recomputed * forward

    def _pass(self, work: StagePass, exchanged: Parts, hidden_by_block: float) -> Parts:
        """Times one pass of a micro batch through a stage."""
        machine = self.machine
        parts = {
            "matmuls": sum(map(self._matmul_seconds, work.products)),
            "attention": self._attention_seconds(work),
            "memory-bound": machine.memory_seconds(work.memory_bytes),
            **exchanged,
        }
        parts["tensor"] -= work.n_blocks * hidden_by_block
        device_seconds = sum(parts.values())
        n_compiled = work.n_blocks * self.program.is_compiled
        seconds = machine.with_host(device_seconds, work.kernels, n_compiled)
        seconds += WAIT_SECONDS * work.n_waits
        return parts | {"overhead": seconds - device_seconds}

    def _attention_seconds(self, work: StagePass) -> float:
        return self.machine.attention_seconds(
            work.attention_flops, self.dtypes[0], self.attention_speed
        )

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
        n_bytes = matmul.n_bytes(self.value_bytes, self.cast_bytes)
        dtype = "fp32" if matmul.in_fp32 else self.dtypes[matmul.in_fp8]
        seconds = self.machine.matmul_seconds(matmul.flops, dtype)
        return seconds + self.machine.memory_seconds(n_bytes)

    def message_seconds(self, kind: Traffic) -> float:
        """Times calls: rings send each part of a buffer past all ranks except one."""
        is_ring = kind.collective in ("all-gather", "reduce-scatter")
        size, bandwidth, latency = self._link(kind.axis, is_ring=is_ring)
        if kind.collective == "send":
            return kind.n_bytes / bandwidth + kind.calls * latency
        n_rounds = 2 if kind.collective == "all-reduce" else 1
        part_bytes = kind.n_bytes / size
        if kind.axis == "expert":  # to each rank straight, over links and network at once
            n_inside, link, network = self._inside(*self._group("expert"))
            outside = (size - n_inside) / network
            return part_bytes * max((n_inside - 1) / link, outside) + kind.calls * latency
        return n_rounds * ((size - 1) * part_bytes / bandwidth + kind.calls * latency)

    def _group(self, axis: str) -> tuple[int, int]:
        """Returns the distance of neighbours on an axis, and their number."""
        topology = self.topology
        n_near = topology.tensor * topology.context
        return {
            "tensor": (1, topology.tensor),
            "context": (topology.tensor, topology.context),
            "shard": (topology.tensor, topology.context * topology.shard),
            "expert": (topology.tensor, topology.expert),
            "same experts": (
                topology.tensor * topology.expert,
                topology.context * topology.shard // topology.expert,
            ),
            "stage": (1, topology.n_ranks // topology.pipeline),
            "replicate": (n_near * topology.shard, topology.replicate),
            "pipeline": (topology.n_ranks // topology.pipeline, topology.pipeline),
        }[axis]

    def _inside(self, stride: int, size: int) -> tuple[int, float, float]:
        """Returns the ranks of a group in one node, and bandwidths inside and between nodes."""
        machine, shares = self.machine, self.machine.efficiencies
        link = machine.link_bytes_per_second * shares.link_share
        network = machine.network_bytes_per_second * shares.network_share
        return min(size, max(1, machine.devices_per_node // stride)), link, network

    def _link(self, axis: str, *, is_ring: bool) -> tuple[int, float, float]:
        """Returns ranks, bandwidth per rank and latency per call, of a group along an axis.

        Its position follows from the order of ranks in `topology.py`. NCCL has only rings for
        gathers and reductions to shards: each part passes all other ranks, one after the other.
        Else latency is that of rings inside a node and of trees between nodes.
        """
        machine = self.machine
        stride, size = self._group(axis)
        n_inside, link, network = self._inside(stride, size)
        n_nodes = math.ceil(size / n_inside)
        latency = machine.link_latency_seconds * (size - n_nodes if is_ring else n_inside - 1)
        n_hops = n_nodes - 1 if is_ring else math.log2(n_nodes)
        latency += machine.network_latency_seconds * n_hops
        if n_nodes == 1:
            return size, link, latency
        if axis == "pipeline":  # of two neighbours at most one is in another node
            n_linked = min(n_inside, 2) - 1
            return size, 2 / (n_linked / link + (2 - n_linked) / min(link, network)), latency
        # Rings use the network devices of all their ranks in a node.
        return size, min(link, network * n_inside), latency

    def data_seconds(self, rank: RankWork, micro_batch_seconds: float) -> float:
        """Times exposed communication of data ranks and of the pipeline's ends.

        Args:
            rank: one rank's work.
            micro_batch_seconds: its compute time for one micro batch.
        """
        parallel, program, n = self.parallel, self.program, self.work.n_micro_batches
        # The first weights and the last gradients, of a block or the embedding, have no computation
        # to hide behind. At stage 2 those of earlier micro batches have the next one's.
        n_groups = self.run.model.n_layers // parallel.pipeline + 1
        share_alone = max(1 / n_groups, rank.n_first / rank.n_parameters)
        sums_early = self.sums_each and not parallel.shards_weights
        alone, seconds = 0.0, self.machine.memory_seconds(FROM_FP8_BYTES * rank.n_from_fp8)
        for kind in filter(_is_of_data, rank.traffic):
            is_sum = kind.collective != "all-gather"
            sent = self.message_seconds(kind)
            sent *= program.reduced_bytes / FP32_BYTES if is_sum else 1
            seconds += sent
            alone += share_alone * sent / (n if is_sum and sums_early else 1)
        beside = (n if self.sums_each else 1) * micro_batch_seconds
        return max(alone, seconds - beside) if program.hides_data else seconds


def _is_of_data(kind: Traffic) -> bool:
    """Returns whether it belongs to the whole step; in a pipeline, the sum of tied embeddings."""
    is_sum = (kind.axis, kind.collective) == ("pipeline", "all-reduce")
    return is_sum or kind.axis in ("shard", "replicate", "same experts")
