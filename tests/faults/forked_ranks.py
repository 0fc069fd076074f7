"""Ranks of a run, forked from a process that has imported everything: they start at once.

Each runs the real worker and leaves as a process of its own does. This process reads their
heartbeats, as the parent of real ranks would, and may kill them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Literal

from tests.waiting import WATCHDOG_SECONDS, prepare_fork

from trainyard.checkpoint.format import list_checkpoints, step_of
from trainyard.data.loader import Batch, Loader
from trainyard.launch.environment import Process, rank_environment
from trainyard.launch.heartbeat import HeartbeatReader, Phase
from trainyard.launch.watched import leave_after
from trainyard.training import worker


@dataclass(frozen=True)
class Course:
    """One run: its folder, its layout, and the disk it is on."""

    folder: Path
    n_ranks: int
    seconds: float = 0.0
    """That it takes when nothing befalls it."""
    flush_seconds: float = 0.0
    """For which every flush to disk waits."""


@dataclass(frozen=True)
class Aim:
    """When to kill: `delay_seconds` after the start, or after the rank has entered a phase."""

    rank: int
    delay_seconds: float
    phase: Phase | Literal["in flight"] | None
    """"in flight" is while a checkpoint is written in the background."""
    steps_before: int
    """In this attempt, before the phase counts."""


class Attempt:
    """All ranks of a run, forked from this process.

    Args:
        course: the run.
        number: of the attempt, from 0.
    """

    def __init__(self, course: Course, number: int) -> None:
        self.course = course
        self.readers = [HeartbeatReader() for _ in range(course.n_ranks)]
        self._pipe = os.pipe()
        self.started = time.time()
        self.first_step = newest_step(course.folder)
        prepare_fork()
        fork = multiprocessing.get_context("fork")
        self.ranks: list[ForkProcess] = []
        for rank, reader in enumerate(self.readers):
            process = Process(
                *(rank, course.n_ranks, rank, course.n_ranks),
                store_file=course.folder / f"store-{number}",
                parent_pipe=self._pipe[0],
                heartbeat=reader.descriptor,
            )
            forked = fork.Process(target=_be_rank, args=(course, process, self._pipe[1]))
            forked.start()
            self.ranks.append(forked)

    def has_ended(self) -> bool:
        return all(rank.exitcode is not None for rank in self.ranks)

    def wait(self, seconds: float = WATCHDOG_SECONDS) -> bool:
        """Waits until all have ended; says whether they have."""
        deadline = time.monotonic() + seconds
        while not self.has_ended() and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.has_ended()

    def aim(self, aim: Aim) -> bool:
        """Returns at the moment to kill; False if all have ended before."""
        if aim.phase is not None:
            while not self._is_there(aim):
                if self.has_ended():
                    return False
                time.sleep(0.0005)
        return not self.wait(aim.delay_seconds)

    def _is_there(self, aim: Aim) -> bool:
        beat = self.readers[aim.rank].read()
        if aim.phase == "in flight":
            return beat.step >= self.first_step + aim.steps_before and self.save() == "writing"
        in_training = beat.phase not in ("start", "load", "end")
        wanted = self.first_step + aim.steps_before if in_training else 0
        return beat.phase == aim.phase and beat.step >= wanted

    def save(self) -> str:
        """Says what this attempt was doing to the disk, from what it leaves there."""
        for path in (self.course.folder / "checkpoints").glob(".step-*.partial"):
            if path.stat().st_ctime >= self.started:
                return "removing" if path.name.endswith(".old.partial") else "writing"
        return "none"

    def close(self) -> None:
        """Ends what is left."""
        for rank in self.ranks:
            rank.kill()
            rank.join()
        for reader in self.readers:
            reader.close()
        for descriptor in self._pipe:
            os.close(descriptor)


def _be_rank(course: Course, process: Process, writing_end: int) -> None:
    """Runs the real worker in a forked process, which leaves as a process of its own does."""
    os.close(writing_end)  # else the end of the parent would never be noticed
    logs = course.folder / "logs"
    logs.mkdir(exist_ok=True)
    log = os.open(logs / f"rank-{process.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(rank_environment(process, 1))
    if course.flush_seconds:
        _slow_down_flushes(course.flush_seconds)
    _write_down_batches(course.folder / f"order-{process.rank}.jsonl")
    sys.argv = ["worker", str(course.folder)]
    leave_after(worker.main)


def _slow_down_flushes(seconds: float) -> None:
    flush = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(seconds)
        flush(descriptor)

    os.fsync = slow  # type: ignore[assignment]


def _write_down_batches(path: Path) -> None:
    batch = Loader.batch

    def noted(loader: Loader, step: int, offset: int = 0) -> Batch:
        tokens, labels = batch(loader, step, offset)
        read = sha256(tokens.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps([step, read])}\n")
        return tokens, labels

    Loader.batch = noted  # type: ignore[assignment, method-assign]


def newest_step(folder: Path) -> int:
    """Gives the step of the newest checkpoint, or 0."""
    found = list_checkpoints(folder / "checkpoints")
    return (step_of(found[0]) or 0) if found else 0


def read_order(course: Course) -> list[dict[int, str]]:
    """Gives for each rank what it read at each step, when it did the step for the last time."""
    orders = []
    for rank in range(course.n_ranks):
        lines = (course.folder / f"order-{rank}.jsonl").read_text(encoding="utf-8").splitlines()
        orders.append(dict(map(json.loads, lines)))
    return orders
