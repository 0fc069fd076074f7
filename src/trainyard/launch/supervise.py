"""The parent of training processes: names a rank that dies or hangs, and restarts all ranks.

Every worker of a run with several ranks has a parent that watches it, under any launcher:

    trainyard train --ranks 4      one parent, four workers
    torchrun, srun, mpiexec        each rank they start is a parent with one worker

    a worker ..                                    the parent ..
    ends with 0, 2, 75 or 93                       ends with the same code once all have ended
    dies by a signal, or ends with another code    names it, with the end of its log; of several
                                                   one that NCCL did not abort (SIGABRT)
    makes no progress within its limit             shows all stacks, names the culprit, kills
    lost another rank                              leaves the report to that rank's parent

After a death or a hang, a parent of all ranks restarts them from the newest checkpoint; a parent of
one rank ends with a nonzero code, so that its launcher restarts them. `Restarts` counts both.

Parents of one rank each communicate only through files (`HangReports`). They need them to agree
which rank hangs, and to detect a worker that waits for a dead rank without noticing: it can neither
train nor save, and would ignore a launcher's SIGTERM until it is killed.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainyard.errors import EXIT_HOLD, EXIT_REQUEUE
from trainyard.launch.environment import Process
from trainyard.launch.hang_reports import (
    HangReports,
    RankStatus,
    describe_hang,
    describe_stack,
    look_at,
    status_of_dead,
)
from trainyard.launch.heartbeat import HeartbeatReader
from trainyard.launch.local import (
    OWN_END_SECONDS,
    Worker,
    describe_death,
    end,
    find_first_death,
    kill,
    note_signals,
    open_pipe,
    open_places,
    send,
    start_worker,
    wait,
)
from trainyard.launch.restarts import FINAL_CODES, Restarts
from trainyard.launch.signals import STOP

logger = logging.getLogger("trainyard")

POLL_SECONDS, LISTEN_SECONDS = 0.05, 1.0
AT_ONCE_SECONDS = 1.0
"""From the second signal to the kill of the remaining workers."""
STUCK_SECONDS = 8.0
"""For a worker to notice and report that another has died or left."""
TESTIMONY_SECONDS = 5.0
INTENDED_CODES = (0, EXIT_REQUEUE, EXIT_HOLD)


@dataclass(frozen=True)
class SupervisedJob:
    """The job to run."""

    process: Process
    """This process, as started by its launcher."""
    n_ranks: int
    folder: Path
    """The run folder."""
    command: Callable[[int], Sequence[str]]
    """Command of each `watched` worker, given the number of earlier attempts."""
    inherited: Sequence[int] = ()
    """File descriptors that workers keep open."""

    @property
    def is_launched(self) -> bool:
        """Whether each rank has its own parent."""
        return self.process.n_ranks > 1


def supervise(job: SupervisedJob) -> int:
    """Runs a job to its end, with restarts while it makes progress.

    Returns:
        the exit code for this process.

    Raises:
        GuardError: restarts made no progress.
        MachineError: a worker cannot be started.
    """
    restarts, attempt = Restarts(job.folder), job.process.attempt
    with note_signals(STOP) as received:
        while True:
            if job.process.rank == 0:
                restarts.begin(attempt)
            with _Attempt.start(job, attempt, received) as running:
                outcome = running.watch()
            if job.process.launcher_restarts and not outcome.is_failure:
                restarts.end(outcome.exit_code)
            helps = outcome.is_failure and outcome.exit_code not in FINAL_CODES
            if job.is_launched or not helps or received:
                return exit_code_below(job.process, outcome.exit_code, outcome.is_failure)
            attempt += 1


def exit_code_below(process: Process, exit_code: int, is_failure: bool = False) -> int:
    """Returns the exit code for the launcher, which may restart on any nonzero code."""
    is_stop = exit_code == EXIT_REQUEUE and not is_failure
    return 0 if is_stop and process.launcher_restarts else exit_code


@dataclass(frozen=True)
class _Outcome:
    exit_code: int
    is_failure: bool
    """A machine or program failed, so that another start may help."""


@dataclass
class _Attempt:
    """One start of all workers of this process."""

    job: SupervisedJob
    hang_reports: HangReports
    received: list[signal.Signals]
    """Signals received so far."""
    workers: list[Worker] = field(default_factory=list)
    told_at: list[float] = field(default_factory=list)
    """When each signal was forwarded."""
    counts: dict[int, int] = field(default_factory=dict)
    """Heartbeat count by rank."""
    still_since: dict[int, float] = field(default_factory=dict)
    """Time of the last heartbeat by rank."""
    heard: list[RankStatus] = field(default_factory=list)
    """Reports of other parents."""
    listened_at: float = 0.0
    parted_since: float = 0.0
    """When the first worker ended on purpose."""
    failed_since: float = 0.0
    """When the death of a rank was first reported."""

    @classmethod
    @contextmanager
    def start(
        cls, job: SupervisedJob, attempt: int, received: list[signal.Signals]
    ) -> Iterator[_Attempt]:
        """Starts the workers; kills all that remain at the end of the block."""
        new = cls(job, HangReports(job.folder / "logs" / f"attempt-{attempt}"), received)
        with _open_own_places(job) as places:
            logs = None if job.is_launched else job.folder / "logs"
            try:
                for place in places:
                    heartbeat = HeartbeatReader()
                    new.workers.append(
                        start_worker(place, job.command(attempt), logs, heartbeat, job.inherited)
                    )
                yield new
            finally:
                kill(new.workers)
                for worker in new.workers:
                    if worker.heartbeat is not None:
                        worker.heartbeat.close()

    def watch(self) -> _Outcome:
        """Waits until all workers have ended, for any reason."""
        while any(worker.running.poll() is None for worker in self.workers):
            now = time.monotonic()
            self._pass_signals(now)
            self._take_heartbeats(now)
            dead = self._find_dead()
            if dead is not None:
                break
            self._listen(now)
            if self._is_stuck(now):
                return _Outcome(EXIT_REQUEUE, is_failure=True)
            if self._is_hang(now):
                self._report_hang()
                return _Outcome(EXIT_REQUEUE, is_failure=True)
            if self._is_left_behind(now):
                kill(self.workers)
                return self._agree_on_code()
            time.sleep(POLL_SECONDS)
        dead = self._find_dead()
        return self._agree_on_code() if dead is None else self._report_failure(dead)

    def _find_dead(self) -> Worker | None:
        """Finds the worker that failed first, unless its end was intended."""
        dead = find_first_death(self.workers)
        if dead is None or dead.running.returncode in INTENDED_CODES:
            return None
        was_told = -dead.running.returncode in self.received
        return None if was_told or len(self.told_at) > 1 else dead

    def _is_left_behind(self, now: float) -> bool:
        """Whether some workers have ended as intended, and the rest neither end nor save."""
        if not any(worker.running.poll() for worker in self.workers):
            return False
        self.parted_since = self.parted_since or now
        for worker in self.workers:
            if worker.running.poll() is None and worker.beat.phase in ("save", "end"):
                return False
        return now - max(self.parted_since, *self.still_since.values()) > STUCK_SECONDS

    def _report_failure(self, dead: Worker) -> _Outcome:
        """Reports the dead worker, and ends the others."""
        if dead.running.returncode == -signal.SIGABRT:
            if self._another_died_otherwise():
                return _Outcome(EXIT_REQUEUE, is_failure=True)
            dead = find_first_death(self.workers) or dead
        code = dead.running.returncode
        if self.job.is_launched:
            self.hang_reports.write([status_of_dead(dead)])
        if code == 2:
            wait(self.workers, OWN_END_SECONDS)
        self._name(dead)
        end(self.workers)
        return _Outcome(EXIT_REQUEUE if code < 0 else code, is_failure=code != 2)

    def _another_died_otherwise(self) -> bool:
        """Waits for the death that made NCCL abort a worker; returns if another parent reports it.

        NCCL aborts the ranks that lose another, often before that one has ended.
        """
        deadline = time.monotonic() + TESTIMONY_SECONDS
        while time.monotonic() < deadline:
            if self.job.is_launched:
                reports = self.hang_reports.read()
                if any(seen.has_failed and "SIGABRT" not in seen.state for seen in reports):
                    return True
            else:
                dead = find_first_death(self.workers)
                if dead is not None and dead.running.returncode != -signal.SIGABRT:
                    return False
            time.sleep(POLL_SECONDS)
        return False

    def _name(self, dead: Worker) -> None:
        """Logs how a worker ended, unless its own output shows it."""
        code = dead.running.returncode
        is_on_screen = dead.log is None or self.workers[0].running.poll() == code
        if not (is_on_screen and code in (*INTENDED_CODES, 2)):
            logger.error("%s", describe_death(dead))

    def _agree_on_code(self) -> _Outcome:
        codes = {worker.running.returncode for worker in self.workers}
        is_failure = any(worker.beat.is_victim for worker in self.workers)
        if is_failure:
            self._let_the_culprit_speak()
        if self.received and min(codes) < 0:  # it ended at once
            code = EXIT_HOLD if signal.SIGINT in self.received else EXIT_REQUEUE
            return _Outcome(code, is_failure=False)
        code = max(codes)
        first = next(each for each in self.workers if each.running.returncode == code)
        if not first.beat.is_victim:
            self._name(first)
        return _Outcome(code, is_failure and code != EXIT_HOLD)

    def _let_the_culprit_speak(self) -> None:
        """Waits for another parent's report: a launcher ends all ranks when one ends."""
        deadline = time.monotonic() + TESTIMONY_SECONDS
        while self.job.is_launched and not self.received and time.monotonic() < deadline:
            if any(seen.has_ended for seen in self.hang_reports.read()):
                return
            time.sleep(POLL_SECONDS)

    def _pass_signals(self, now: float) -> None:
        while len(self.told_at) < len(self.received):
            send(self.workers, self.received[len(self.told_at)])
            self.told_at.append(now)
        if len(self.told_at) > 1 and now - self.told_at[1] > AT_ONCE_SECONDS:
            send(self.workers, signal.SIGKILL)

    def _take_heartbeats(self, now: float) -> None:
        for worker in self.workers:
            count = worker.beat.count
            if self.counts.get(worker.rank) != count:
                self.counts[worker.rank] = count
                self.still_since[worker.rank] = now

    def _is_hang(self, now: float) -> bool:
        """Whether a worker makes no progress within its limit, here or under another parent."""
        if self.failed_since:
            return False
        for worker in self.workers:
            still = now - self.still_since[worker.rank]
            if worker.running.poll() is None and still > worker.beat.limit_seconds:
                return True
        return any(not seen.has_ended for seen in self.heard)

    def _is_stuck(self, now: float) -> bool:
        """Whether the worker waits for a dead rank."""
        if not any(seen.has_ended for seen in self.heard):
            return False
        self.failed_since = self.failed_since or now
        return now - max(self.failed_since, *self.still_since.values()) > STUCK_SECONDS

    def _listen(self, now: float) -> None:
        if self.job.is_launched and now - self.listened_at > LISTEN_SECONDS:
            self.listened_at = now
            self.heard = self.hang_reports.read()

    def _report_hang(self) -> None:
        """Logs which rank hangs, with all known details."""
        own = look_at(self.workers, self.still_since)
        self.hang_reports.write(own)
        deadline = time.monotonic() + TESTIMONY_SECONDS
        all_seen = own
        while len(all_seen) < self.job.n_ranks and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            ranks = {seen.rank for seen in own}
            others = [seen for seen in self.hang_reports.read() if seen.rank not in ranks]
            all_seen = sorted([*own, *others], key=lambda seen: seen.rank)
        for seen in own:
            logger.error("%s", describe_stack(seen))
        says = describe_hang(all_seen, self.job.n_ranks)
        # The table is the same for all.
        is_first = own[0] is all_seen[0]
        logger.error("%s", says if is_first else says.partition("\n")[0])


@contextmanager
def _open_own_places(job: SupervisedJob) -> Iterator[list[Process]]:
    if not job.is_launched:
        with open_places(job.n_ranks) as places:
            yield places
        return
    with open_pipe() as pipe:
        yield [replace(job.process, parent_pipe=pipe)]
