"""Start and end of each pass of a micro batch on each rank of a pipeline.

Passes follow the order of `torch.distributed.pipelining`; each starts once its rank is free and the
pass it depends on is done: of the previous stage, or of the next one in the backward pass. Two
ranks, three micro batches, 1f1b, forward 1 s and backward 2 s:

    second   0  1  2  3  4  5  6  7  8  9  10 11
    rank 0   F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
    rank 1   .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .

`zero_bubble` splits the backward pass into two equal ones: the input gradients that the previous
stage waits for (B), and the gradients of weights (W), which fill the gaps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainyard.config.run import Parallel

Kind = Literal["F", "B", "W"]
StageSeconds = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class TimedPass:
    """One pass of a micro batch through a stage."""

    kind: Kind
    """Forward, backward, or the gradients of weights if they are a separate pass."""
    stage: int
    micro_batch: int
    start: float
    end: float


def lay_out(
    schedule: str, n_ranks: int, n_micro_batches: int, stage_seconds: StageSeconds
) -> list[list[TimedPass]]:
    """Returns the passes of a step by rank, in time order.

    Args:
        schedule: as in parallel.schedule.
        n_ranks: of the pipeline.
        n_micro_batches: of the step; the schedule must support it.
        stage_seconds: of a forward and a backward pass, by stage.
    """
    splits = schedule == "zero_bubble" and n_ranks > 1
    n_chunks = len(stage_seconds) // n_ranks
    waiting = [
        deque(_order(schedule, rank, n_ranks, n_chunks, n_micro_batches)) for rank in range(n_ranks)
    ]
    ranks = [_Rank() for _ in range(n_ranks)]
    done: dict[tuple[Kind, int, int], float] = {}
    last = len(stage_seconds) - 1
    while any(waiting):
        moved = False
        for rank, queue in zip(ranks, waiting, strict=True):
            while queue:
                kind, stage, micro = queue[0]
                forward, backward = stage_seconds[stage]
                if kind == "F":
                    needs = 0.0 if stage == 0 else done.get(("F", stage - 1, micro))
                else:
                    before: tuple[Kind, int] = ("F", stage) if stage == last else ("B", stage + 1)
                    needs = done.get((*before, micro))
                if needs is None:
                    break
                queue.popleft()
                seconds = forward if kind == "F" else backward / (2 if splits else 1)
                rank.do(kind, stage, micro, needs, seconds)
                done[kind, stage, micro] = rank.free_at
                if splits and kind == "B":
                    rank.weights.append((stage, micro, backward - seconds))
                moved = True
        assert moved, (schedule, n_ranks, n_micro_batches)
    for rank in ranks:
        rank.do_weights(math.inf)
    return [rank.passes for rank in ranks]


class _Rank:
    """One rank's passes so far."""

    def __init__(self) -> None:
        self.passes: list[TimedPass] = []
        self.weights: deque[tuple[int, int, float]] = deque()
        self.free_at = 0.0

    def do(self, kind: Kind, stage: int, micro_batch: int, needs: float, seconds: float) -> None:
        """Schedules a pass as early as possible, after those that fit before it."""
        self.do_weights(needs)
        self._add(kind, stage, micro_batch, max(self.free_at, needs), seconds)

    def do_weights(self, until: float) -> None:
        """Schedules the waiting gradients of weights that are done by then."""
        while self.weights and self.free_at + self.weights[0][2] <= until:
            stage, micro_batch, seconds = self.weights.popleft()
            self._add("W", stage, micro_batch, self.free_at, seconds)

    def _add(self, kind: Kind, stage: int, micro_batch: int, start: float, seconds: float) -> None:
        self.free_at = start + seconds
        self.passes.append(TimedPass(kind, stage, micro_batch, start, self.free_at))


def _order(
    schedule: str, rank: int, n_ranks: int, n_chunks: int, n_micro_batches: int
) -> list[tuple[Kind, int, int]]:
    """Lists the passes of a rank in order: kind, stage, micro batch."""
    n_passes = n_chunks * n_micro_batches
    in_round = round_size(n_ranks, n_micro_batches)
    forward, backward = [], []
    for number in range(n_passes):
        chunk = number // in_round % n_chunks
        micro = number // (in_round * n_chunks) * in_round + number % in_round
        forward.append((chunk * n_ranks + rank, micro))
        backward.append(((n_chunks - 1 - chunk) * n_ranks + rank, micro))
    n_ahead = _passes_ahead(schedule, rank, n_ranks, n_chunks, n_micro_batches)
    order: list[tuple[Kind, int, int]] = [("F", *each) for each in forward[:n_ahead]]
    for number, each in enumerate(backward):
        if n_ahead + number < n_passes:
            order.append(("F", *forward[n_ahead + number]))
        order.append(("B", *each))
    return order


def _passes_ahead(
    schedule: str, rank: int, n_ranks: int, n_chunks: int, n_micro_batches: int
) -> int:
    """Counts the forward passes before the one that the first backward pass follows."""
    if n_ranks == 1:
        return 0
    n_ahead, n_passes = n_ranks - 1 - rank, n_chunks * n_micro_batches
    if schedule == "gpipe":
        return n_passes
    if schedule == "interleaved":
        n_ahead *= 2
    return min(n_passes, (n_chunks - 1) * round_size(n_ranks, n_micro_batches) + n_ahead)


def round_size(n_ranks: int, n_micro_batches: int) -> int:
    """Counts the micro batches that a rank passes through one of its stages before the next."""
    return n_micro_batches // max(1, n_micro_batches // n_ranks)


def bubble_passes(parallel: Parallel, n_micro_batches: int) -> float:
    """Returns how long a rank idles in a step, in passes of a micro batch through its stages.

    As by `lay_out`, where stages are equal and a backward pass takes two forward ones. With fewer
    micro batches than ranks, a rank also waits between its stages, until they have passed the rest.
    """
    n_ranks, n_chunks, n = parallel.pipeline, parallel.chunks, n_micro_batches
    missing = max(0, n_ranks - n)
    if parallel.schedule != "zero_bubble":
        return ((n_ranks - 1) + (n_chunks - 1) * missing) / n_chunks
    # Of few micro batches, the last passes all stages twice, and weight gradients of one are left.
    exposed = 2 * n_ranks - 3 * n + (2 * n - n_ranks) / n_chunks
    return ((n_ranks - 1) / n_chunks + max(missing, exposed)) / 3


def micro_batches_in_flight(
    schedule: str, rank: int, n_ranks: int, n_chunks: int, n_micro_batches: int
) -> list[int]:
    """Counts, for each stage of a rank, micro batches whose activations are kept at most."""
    n_begun = 1 + _passes_ahead(schedule, rank, n_ranks, n_chunks, n_micro_batches)
    counts, in_round = [0] * n_chunks, round_size(n_ranks, n_micro_batches)
    for number in range(min(n_chunks * n_micro_batches, n_begun)):
        counts[number // in_round % n_chunks] += 1
    return counts
