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
train nor save, and would ignore a launcher's SIGTERM until it is killed. A hung rank makes all
others wait, so every parent sees a worker without progress, or another's report. Each writes its
own to a file in the run folder, whose name says what happened:

    runs/my-run/logs/attempt-0/rank-00002.hang.json     {"rank": 2, "host": "n1", "step": 12,
        "phase": "forward and backward", "count": 41, "seconds": 1201.3, "state": "stopped", ..}

One parent, that of the first rank that has one, reads all files and writes its verdict to another
file, so that n parents open 2 n files and not n^2. It names the stopped rank; else the one whose
heartbeat is farthest behind, since no rank can overtake a collective operation; and if several are
equally far behind, the one that is not inside communication.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trainyard.errors import EXIT_HOLD, EXIT_REQUEUE, MachineError
from trainyard.files import publish_text
from trainyard.launch.environment import Process, read_process_state
from trainyard.launch.heartbeat import STACK_SIGNAL
from trainyard.launch.local import (
    OWN_END_SECONDS,
    POLL_SECONDS,
    Worker,
    describe_death,
    end,
    find_first_death,
    kill,
    send,
    start_workers,
    wait,
    wait_until,
)
from trainyard.launch.restarts import FINAL_CODES, Restarts
from trainyard.launch.signals import STOP, note_signals
from trainyard.topology import name_ranks

logger = logging.getLogger("trainyard")

LISTEN_SECONDS = 1.0
LOOKS_A_SECOND = 4_000
"""By all parents together, at the reports of others: each costs the file system three calls."""
SETTLED_SECONDS = 2.0
"""A folder's time of change may be in whole seconds."""
AT_ONCE_SECONDS = 1.0
"""From the second signal to the kill of the remaining workers."""
STUCK_SECONDS = 8.0
"""For a worker to notice and report that another has died or left."""
REPORT_SECONDS = 5.0
"""For the reports of other parents to arrive."""
INTENDED_CODES = (0, EXIT_REQUEUE, EXIT_HOLD)
STACK_SECONDS, QUIET_SECONDS = 2.0, 0.2
N_LOOKS = 6
HANG, FAILED, ABORTED, ENDED = "hang", "failed", "aborted", "ended"
VERDICT = "verdict.txt"
N_READERS = 16
"""Files opened at once: each may take a network file system a millisecond."""
STATES = {"R": "running", "S": "waiting", "D": "waiting for a disk or device", "T": "stopped"}
# Code in which a thread waits for others: in a collective, behind one, or in the rendezvous.
OF_THE_WAIT, OF_A_SAVE = "/checkpoint/background.py", "/checkpoint/save.py"
OF_COMMUNICATION = re.compile(
    r"/torch/(distributed/|autograd/|cuda/streams\.py|_ops\.py)|/trainyard/parallel/start\.py"
)


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
            hang_reports = HangReports(job.folder / "logs" / f"attempt-{attempt}")
            with start_workers(
                job.process if job.is_launched else job.n_ranks,
                job.command(attempt),
                None if job.is_launched else job.folder / "logs",
                with_heartbeats=True,
                inherited=job.inherited,
            ) as workers:
                outcome = _Attempt(job, workers, hang_reports, received).watch()
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


_FAILURE = _Outcome(EXIT_REQUEUE, is_failure=True)


@dataclass
class _Attempt:
    """One start of all workers of this process."""

    job: SupervisedJob
    workers: list[Worker]
    hang_reports: HangReports
    received: list[signal.Signals]
    """Signals received so far."""
    n_forwarded: int = 0
    """Signals forwarded so far."""
    kill_at: float = float("inf")
    looked_at: float = 0.0
    """When it last looked for reports of other parents."""
    parted_since: float = 0.0
    """When the first worker ended on purpose."""
    failed_since: float = 0.0
    """When the death of a rank was first reported."""

    @property
    def _interval(self) -> float:
        """Time between two looks at the reports of others."""
        return max(POLL_SECONDS, self.job.n_ranks / LOOKS_A_SECOND)

    def watch(self) -> _Outcome:
        """Waits until all workers have ended, for any reason."""
        while any(worker.is_running for worker in self.workers):
            now = time.monotonic()
            self._forward_signals(now)
            for worker in self.workers:
                worker.note_heartbeat()
            if self._find_dead() is not None:
                break
            if self.job.is_launched and now - self.looked_at > max(LISTEN_SECONDS, self._interval):
                self.looked_at = now
                self.hang_reports.find()
            if self._is_stuck(now):
                return _FAILURE
            if self._is_hang(now):
                self._report_hang()
                return _FAILURE
            if self._is_left_behind(now):
                kill(self.workers)
                return self._agree_on_code()
            time.sleep(POLL_SECONDS)
        dead = self._find_dead()
        return self._agree_on_code() if dead is None else self._report_failure(dead)

    def _forward_signals(self, now: float) -> None:
        for number in self.received[self.n_forwarded :]:
            send(self.workers, number)
            self.n_forwarded += 1
            if self.n_forwarded == 2:
                self.kill_at = now + AT_ONCE_SECONDS
        if now > self.kill_at:
            send(self.workers, signal.SIGKILL)

    def _find_dead(self) -> Worker | None:
        """Finds the worker that failed first, unless its end was intended."""
        dead = find_first_death(self.workers)
        if dead is None or dead.running.returncode in INTENDED_CODES or self.n_forwarded > 1:
            return None
        return None if -dead.running.returncode in self.received else dead

    def _last_beat_at(self) -> float:
        return max(worker.beat_at for worker in self.workers)

    def _is_left_behind(self, now: float) -> bool:
        """Whether some workers have ended as intended, and the rest neither end nor save."""
        if not any(worker.running.poll() for worker in self.workers):
            return False
        self.parted_since = self.parted_since or now
        if any(each.is_running and each.beat.phase in ("save", "end") for each in self.workers):
            return False
        return now - max(self.parted_since, self._last_beat_at()) > STUCK_SECONDS

    def _is_stuck(self, now: float) -> bool:
        """Whether the worker waits for a dead rank."""
        if {HANG}.issuperset(self.hang_reports.found.values()):
            return False
        self.failed_since = self.failed_since or now
        return now - max(self.failed_since, self._last_beat_at()) > STUCK_SECONDS

    def _is_hang(self, now: float) -> bool:
        """Whether a worker makes no progress within its limit, here or under another parent."""
        if self.failed_since:
            return False
        return bool(self.hang_reports.found) or any(
            worker.is_running and now - worker.beat_at > worker.beat.limit_seconds
            for worker in self.workers
        )

    def _report_hang(self) -> None:
        """Logs which rank hangs, with all known details."""
        reports, own = self.hang_reports, look_at(self.workers)
        reports.write(own)
        for seen in own:
            logger.error("%s", describe_stack(seen))
        quiet_seconds = REPORT_SECONDS + self._interval
        leader, silent = 0, set[int]()
        while leader != own[0].rank:
            if wait_until(lambda: bool(reports.verdict()), 2 * quiet_seconds, self._interval):
                logger.error("%s", reports.verdict())
                return
            silent.add(leader)
            leader = min({own[0].rank, *reports.find()} - silent)
        text = describe_hang(reports.read(own, self.job.n_ranks, quiet_seconds), self.job.n_ranks)
        reports.decide(text.partition("\n")[0])
        logger.error("%s", text)

    def _report_failure(self, dead: Worker) -> _Outcome:
        """Reports the dead worker, and ends the others."""
        if dead.running.returncode == -signal.SIGABRT:
            # NCCL aborts the ranks that lose another, often before that one has ended.
            found = wait_until(self._has_another_cause, REPORT_SECONDS, self._interval)
            if found and self.job.is_launched:
                return _FAILURE
            dead = find_first_death(self.workers) or dead
        code = dead.running.returncode
        if self.job.is_launched:
            self.hang_reports.write([status_of(dead)])
        if code == 2:
            wait(self.workers, OWN_END_SECONDS)
        self._name(dead)
        end(self.workers)
        return _Outcome(EXIT_REQUEUE if code < 0 else code, is_failure=code != 2)

    def _has_another_cause(self) -> bool:
        """Whether a rank, here or under another parent, died otherwise than by NCCL's abort."""
        if self.job.is_launched:
            return FAILED in self.hang_reports.find().values()
        dead = find_first_death(self.workers)
        return dead is not None and dead.running.returncode != -signal.SIGABRT

    def _name(self, dead: Worker) -> None:
        """Logs how a worker ended, unless its own output shows it."""
        code = dead.running.returncode
        is_on_screen = dead.log is None or self.workers[0].running.poll() == code
        if not (is_on_screen and code in (*INTENDED_CODES, 2)):
            logger.error("%s", describe_death(dead))

    def _agree_on_code(self) -> _Outcome:
        codes = {worker.running.returncode for worker in self.workers}
        is_failure = any(worker.beat.is_victim for worker in self.workers)
        if is_failure and self.job.is_launched:
            # A launcher ends all ranks when one ends: the parent of the first reports it before.
            wait_until(
                lambda: (
                    bool(self.received) or not {HANG}.issuperset(self.hang_reports.find().values())
                ),
                REPORT_SECONDS,
                self._interval,
            )
        if self.received and min(codes) < 0:  # it ended at once
            code = EXIT_HOLD if signal.SIGINT in self.received else EXIT_REQUEUE
            return _Outcome(code, is_failure=False)
        code = max(codes)
        first = next(each for each in self.workers if each.running.returncode == code)
        if not first.beat.is_victim:
            self._name(first)
        return _Outcome(code, is_failure and code != EXIT_HOLD)


@dataclass(frozen=True)
class RankStatus:
    """The observed state of one worker."""

    rank: int
    host: str
    step: int
    phase: str
    count: int
    """Its heartbeat count."""
    seconds: float
    """Time since its last heartbeat."""
    state: str
    """State of the process, or how it ended."""
    has_ended: bool
    has_failed: bool
    """It ended abnormally."""
    stack: str
    """Stacks of all its threads, innermost call first; empty if not available."""

    @property
    def kind(self) -> str:
        """What it reports: a hang, a failure of its own or because of another, or another end."""
        if not self.has_failed:
            return ENDED if self.has_ended else HANG
        return ABORTED if signal.SIGABRT.name in self.state else FAILED

    @property
    def is_waiting_for_others(self) -> bool:
        """Whether its main thread, or the save it waits for, is inside communication."""
        *others, main = ["", *self.stack.split("hread 0x")]
        saving = [each for each in others if OF_A_SAVE in each] if OF_THE_WAIT in main else []
        lines = (saving or [main])[0].splitlines()
        return len(lines) > 1 and bool(OF_COMMUNICATION.search(lines[1]))

    def __str__(self) -> str:
        """Returns one line of text."""
        stands = "" if self.has_ended else f" for {self.seconds:.0f} s"
        return (
            f"rank {self.rank} on {self.host}: step {self.step}, {self.phase}{stands}, {self.state}"
        )


class HangReports:
    """The files in which the parents of one start of a run share their reports.

    Args:
        folder: the same for all parents; created with the first report.

    Attributes:
        found: what `find` returned last.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.found: dict[int, str] = {}
        self._changed: tuple[int, float] = (0, 0.0)
        self._is_settled = False
        self._earlier: dict[str, int] = {}
        # An earlier job may have left some; new reports come later.
        with suppress(OSError), os.scandir(folder) as entries:
            self._earlier = {entry.name: entry.inode() for entry in entries}
        self._earlier_verdict = self._read_verdict()

    def write(self, statuses: Iterable[RankStatus]) -> None:
        """Writes this process's reports; a failing disk must not keep it from ending."""
        for each in statuses:
            self._publish(_name(each.rank, each.kind), json.dumps(asdict(each), indent=2) + "\n")

    def find(self) -> Mapping[int, str]:
        """Returns the kinds of all reports written since this object was created, by rank.

        Reads the names of files only, and those only where a file is new.
        """
        # Opened first, as only then a network file system asks for the time of change.
        with suppress(OSError), os.scandir(self._folder) as entries:
            now, time_ns = time.monotonic(), self._folder.stat().st_mtime_ns
            if time_ns != self._changed[0]:
                self._changed, self._is_settled = (time_ns, now), False
            if not self._is_settled:
                inodes = {entry.name: entry.inode() for entry in entries}
                new = [name for name in inodes if inodes[name] != self._earlier.get(name)]
                found = filter(None, map(_NAME.fullmatch, new))
                self.found = {int(match[1]): match[2] for match in found}
                self._is_settled = now - self._changed[1] > SETTLED_SECONDS
        return self.found

    def read(self, own: Sequence[RankStatus], n_ranks: int, seconds: float) -> list[RankStatus]:
        """Reads the reports of all other ranks, once all are there, or none came for `seconds`."""
        by_rank = {seen.rank: seen for seen in own}
        while missing := set(range(n_ranks)) - by_rank.keys() - self.find().keys():
            if not wait_until(lambda: not missing.isdisjoint(self.find()), seconds):
                break
        with ThreadPoolExecutor(N_READERS) as pool:
            others = [item for item in self.find().items() if item[0] not in by_rank]
            by_rank |= {seen.rank: seen for seen in pool.map(self._read_one, others) if seen}
        return [by_rank[rank] for rank in sorted(by_rank)]

    def _read_one(self, found: tuple[int, str]) -> RankStatus | None:
        with suppress(OSError, ValueError, TypeError):
            text = (self._folder / _name(*found)).read_text(encoding="utf-8")
            return RankStatus(**json.loads(text))
        return None

    def decide(self, verdict: str) -> None:
        """Writes which rank hangs, for all other parents."""
        self._publish(VERDICT, verdict)

    def verdict(self) -> str:
        """Returns which rank hangs; empty while no parent has written it."""
        found = self._read_verdict()
        return "" if found == self._earlier_verdict else found[1]

    def _read_verdict(self) -> tuple[int, str]:
        path = self._folder / VERDICT
        with suppress(OSError), os.scandir(self._folder), path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns, file.read().decode(errors="replace")
        return 0, ""

    def _publish(self, name: str, text: str) -> None:
        with suppress(OSError, MachineError):
            self._folder.mkdir(parents=True, exist_ok=True)
            publish_text(self._folder / name, text)


def _name(rank: int, kind: str) -> str:
    return f"rank-{rank:05d}.{kind}.json"


_NAME = re.compile(rf"rank-(\d+)\.({HANG}|{FAILED}|{ABORTED}|{ENDED})\.json")


def look_at(workers: Sequence[Worker]) -> list[RankStatus]:
    """Returns the state of workers, with the stacks of all that can write them."""
    looks = []
    for _ in range(N_LOOKS):
        looks.append([status_of(worker) for worker in workers])
        time.sleep(POLL_SECONDS)
    # A waiting process runs for a moment now and then.
    statuses = [
        next((seen for seen in of_worker if seen.state != "running"), of_worker[-1])
        for of_worker in zip(*looks, strict=True)
    ]
    asked = [
        worker
        for worker, seen in zip(workers, statuses, strict=True)
        # Before its first heartbeat it cannot answer.
        if seen.count > 0 and not seen.has_ended and seen.state != "stopped"
    ]
    send(asked, STACK_SIGNAL)
    stacks = _wait_for_stacks(asked)
    return [replace(seen, stack=stacks.get(seen.rank, "")) for seen in statuses]


def find_culprits(statuses: Sequence[RankStatus]) -> list[RankStatus]:
    """Finds the ranks that the others wait for; all ranks if the cause is not isolated."""
    failed = [each for each in statuses if each.has_failed]
    stopped = [each for each in statuses if each.state == "stopped"]
    if failed or stopped:
        return failed or stopped
    running = [each for each in statuses if not each.has_ended] or list(statuses)
    least = min(each.count for each in running)
    behind = [each for each in running if each.count == least]
    busy = [each for each in behind if not each.is_waiting_for_others] or behind
    return [each for each in busy if each.state == "running"] or busy


def describe_hang(statuses: Sequence[RankStatus], n_ranks: int) -> str:
    """Names the hung rank, followed by one line per rank."""
    culprits = find_culprits(statuses)
    missing = sorted(set(range(n_ranks)) - {each.rank for each in statuses})
    if len(culprits) == 1:
        (one,) = culprits
        how = one.state if one.has_ended else f"has not moved for {one.seconds:.0f} s ({one.state})"
        title = f"rank {one.rank} of {n_ranks} on {one.host} {how}"
        title += f" at step {one.step}, in {one.phase}"
    elif len(culprits) == len(statuses) and missing:
        title = f"no status from {name_ranks(missing)} of {n_ranks}, and the others wait"
    else:
        which = name_ranks([each.rank for each in culprits])
        title = f"{which} of {n_ranks} are hung; cause not isolated"
    lines = [f"    {each}" for each in statuses]
    if missing:
        lines.append(f"    no status from {name_ranks(missing)}")
    return "\n".join([title, *lines])


def describe_stack(seen: RankStatus) -> str:
    """Shows the stacks of a worker, or why they are not available."""
    if seen.stack:
        lines = "".join(f"\n    {line}" for line in seen.stack.splitlines())
        return f"rank {seen.rank} is in (innermost call first):{lines}"
    why = "is stopped" if seen.state == "stopped" else "does not respond"
    return f"rank {seen.rank} {why}: no stack available"


def status_of(worker: Worker) -> RankStatus:
    """Returns the known state of a worker, without its stacks."""
    beat, has_ended = worker.beat, not worker.is_running
    letter = "".join(read_process_state(worker.running.pid)[:1]).upper()  # none on macOS
    return RankStatus(
        rank=worker.rank,
        host=socket.gethostname(),
        step=beat.step,
        phase=beat.phase,
        count=beat.count,
        seconds=0.0 if has_ended else time.monotonic() - worker.beat_at,
        state=worker.describe_end() if has_ended else STATES.get(letter, "running"),
        has_ended=has_ended,
        has_failed=has_ended and worker.running.returncode not in (*INTENDED_CODES, 2),
        stack="",
    )


def _wait_for_stacks(asked: Sequence[Worker]) -> dict[int, str]:
    """Waits until every stack is complete, that is until no more output arrives."""
    stacks = {worker.rank: "" for worker in asked}
    deadline = quiet_from = time.monotonic() + STACK_SECONDS
    while time.monotonic() < min(deadline, quiet_from):
        time.sleep(POLL_SECONDS)
        now = {each.rank: each.heartbeat.read_stacks() for each in asked if each.heartbeat}
        if now != stacks or not all(now.values()):
            quiet_from = time.monotonic() + (QUIET_SECONDS if all(now.values()) else STACK_SECONDS)
        stacks = now
    return stacks
