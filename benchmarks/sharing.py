"""Counts what a thousand workers ask of a file system: our own taking of pieces on a virtual clock.

    python benchmarks/sharing.py --workers 1024 --units 7400 --joins 72 --output record.json

Every worker is a `CorpusWorker` that takes, finishes and waits as in `prepare`, in a real work
folder; only the pieces themselves are not done, but take 45 to 75 seconds of a clock that jumps.
What the folder lists is up to a second old, as on a shared file system, so that workers do collide.
All begin within a second, and a few die on the way. Calls of the file system are counted by
Python's audit hook; lists, which may come from the clients' memory, count as well. Heartbeats, of
two calls every two seconds, are written every twenty seconds here, and added afterwards.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from measuring import describe_machine, publish

from trainyard.config.corpus import Corpus
from trainyard.corpus.preparation import work_folder
from trainyard.corpus.preparation.plan import Identity, Output, PreparationPlan
from trainyard.corpus.preparation.prepare import STATES_PER_SECOND
from trainyard.corpus.preparation.work_folder import WorkerState, WorkFolder, read_progress
from trainyard.corpus.preparation.worker import BEAT_SECONDS, CorpusWorker
from trainyard.corpus.sources.files import Segment
from trainyard.data.sidecar import SourceRecord

OLD_SECONDS = 1.0
BEAT_INTERVAL = 20.0
LONG_SECONDS = 30.0
EVENTS = {"open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}


class Clock:
    """Time that is what the simulation says, and calls of the file system so far."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.n_calls = 0
        self.failed: Counter[str] = Counter()
        self.lists: dict[str, tuple[float, list[str]]] = {}

    def count(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Counts a call if it is of the work folder."""
        if event in EVENTS and ".work" in str(arguments[0]):
            self.n_calls += 1


class OldFolder(WorkFolder):
    """A work folder whose lists may be old."""

    clock: Clock

    def list_names(self, folder: str) -> list[str]:
        """Lists what was there a moment ago."""
        self.clock.n_calls += 1
        since, names = self.clock.lists.get(folder, (float("-inf"), []))
        if self.clock.now - since >= OLD_SECONDS:
            before = self.clock.n_calls
            names = super().list_names(folder)
            self.clock.n_calls = before
            self.clock.lists[folder] = (self.clock.now, names)
        return names

    def claim(self, piece: str) -> bool:
        """Takes a piece, and counts what others had taken."""
        is_mine = super().claim(piece)
        self.clock.failed[piece] += not is_mine
        return is_mine


@dataclass
class Worker:
    """A worker, what it has at the moment, and what it has asked of the file system at rest."""

    folder: OldFolder
    product: CorpusWorker
    piece: str = ""
    is_dead: bool = False
    rest_calls: int = 0
    rest_seconds: float = 0.0
    state: WorkerState = field(default_factory=WorkerState)


class Simulation:
    """Workers on a virtual clock, until all pieces are done."""

    def __init__(self, path: Path, n_workers: int, n_units: int, n_joins: int) -> None:
        self.clock = clock = Clock()
        sys.addaudithook(clock.count)
        virtual = SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.now)
        cast(Any, work_folder).time = virtual
        OldFolder.clock = clock
        corpus = Corpus(inputs=("x",), output=str(path / "out"), tokenizer="gpt2")
        units = [[Segment(Path("x"), n, n + 1)] for n in range(n_units)]
        per_join = -(-n_units // n_joins)
        outputs = [
            Output(f"o{n}", range(n * per_join, min((n + 1) * per_join, n_units)), range(1))
            for n in range(n_joins)
        ]
        identity = Identity(
            version="", options={}, unit_bytes=1, tokenizer="", sources=[SourceRecord("x", 1, 1)]
        )
        self.plan = plan = PreparationPlan(corpus, cast(Any, None), identity, units, outputs)
        self.path = path / "out.work"
        WorkFolder(self.path, "first-1-1").create(plan.text)
        self.workers = [self._build(plan, n) for n in range(n_workers)]
        self.events: list[tuple[float, int, Callable[[], float | None]]] = []
        self.n_events = 0

    def _build(self, plan: PreparationPlan, number: int) -> Worker:
        folder = OldFolder(self.path, f"node{number // 32}.4026-{number}-7")
        return Worker(folder, CorpusWorker(plan, folder, cast(Any, None), quarantine=False))

    def run(self, n_dead: int) -> dict[str, float]:
        """Lets all of it happen; gives the counts."""
        dying = random.sample(self.workers, n_dead)
        for worker in self.workers:
            worker.folder.join()
            self._add(random.random(), partial(self._step, worker, worker in dying))
            self._add(BEAT_INTERVAL * random.random(), partial(self._beat, worker))
        self._add(0.5, self._read_progress)
        started, progress_calls = self.clock.now, 0
        while self.events:
            self.clock.now, _, act = heapq.heappop(self.events)
            before = self.clock.n_calls
            again = act()
            if act == self._read_progress:
                progress_calls += self.clock.n_calls - before
            if again is not None:
                self._add(again, act)
        seconds = self.clock.now - started
        own_beats = 2 / BEAT_SECONDS
        rested = [worker for worker in self.workers if worker.rest_seconds > LONG_SECONDS]
        rates = [worker.rest_calls / worker.rest_seconds + own_beats for worker in rested]
        n_units = len(self.plan.units)
        return {
            "workers": len(self.workers),
            "units": n_units,
            "died": n_dead,
            "virtual_seconds": round(seconds, 1),
            "calls_per_second_at_rest_mean": round(statistics.fmean(rates), 2),
            "calls_per_second_at_rest_max": round(max(rates), 2),
            "failed_claims_per_unit_mean": round(self.clock.failed.total() / n_units, 4),
            "failed_claims_per_unit_max": max(self.clock.failed.values(), default=0),
            "progress_calls_per_second": round(progress_calls / seconds, 2),
        }

    def _add(self, delay: float, act: Callable[[], float | None]) -> None:
        self.n_events += 1
        heapq.heappush(self.events, (self.clock.now + delay, self.n_events, act))

    def _step(self, worker: Worker, dies: bool) -> float | None:
        """What a worker does next; gives how long until it acts again."""
        if worker.piece:
            worker.folder.finish(worker.piece, b"{}")
            worker.piece = ""
        before = self.clock.n_calls
        taken = worker.product.take()
        if isinstance(taken, str):
            worker.piece = taken
            worker.is_dead = dies
            return None if dies else random.uniform(45, 75)
        if taken is None:
            worker.is_dead = True
            return None
        worker.rest_calls += self.clock.n_calls - before
        worker.rest_seconds += taken
        return taken

    def _beat(self, worker: Worker) -> float | None:
        if worker.is_dead:
            return None
        before = self.clock.n_calls
        worker.folder.beat(worker.state)
        self.clock.n_calls = before
        return BEAT_INTERVAL

    def _read_progress(self) -> float | None:
        """As the parent of the workers of a node does."""
        read_progress(self.workers[0].folder, self.plan)
        pause = max(0.5, len(self.workers) / STATES_PER_SECOND)
        return None if all(worker.is_dead for worker in self.workers) else pause


def main() -> None:
    """Simulates, prints, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1024)
    parser.add_argument("--units", type=int, default=7400)
    parser.add_argument("--joins", type=int, default=72)
    parser.add_argument("--dead", type=int, default=8)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    random.seed(1)
    with tempfile.TemporaryDirectory() as folder:
        simulation = Simulation(Path(folder), arguments.workers, arguments.units, arguments.joins)
        record = describe_machine(()) | simulation.run(arguments.dead)
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
