"""Hang reports: parents share the state of their workers to find the rank that hangs.

A hung rank makes all others wait, so every parent sees a worker without progress. Each writes its
report to a file in the run folder, and reads those of the others:

    runs/my-run/logs/attempt-0/rank-00002.json     {"rank": 2, "host": "n1", "step": 12,
        "phase": "forward and backward", "count": 41, "seconds": 1201.3, "state": "stopped", ..}

Then all parents name the same rank: the stopped one; else the one whose heartbeat is farthest
behind, since no rank can overtake a collective operation; and if several are equally far behind,
the one that is not inside communication.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trainyard.errors import EXIT_HOLD, EXIT_REQUEUE, MachineError
from trainyard.files import publish_text
from trainyard.launch.environment import read_process_state
from trainyard.launch.heartbeat import STACK_SIGNAL
from trainyard.launch.local import POLL_SECONDS, Worker, send
from trainyard.topology import name_ranks

STACK_SECONDS, QUIET_SECONDS = 2.0, 0.2
N_LOOKS = 6
MEANT_CODES = (0, 2, EXIT_REQUEUE, EXIT_HOLD)
STATES = {"R": "running", "S": "waiting", "D": "waiting for a disk or device", "T": "stopped"}
# Code in which a thread waits for others: in a collective, behind one, or in the rendezvous.
OF_THE_WAIT, OF_A_SAVE = "/checkpoint/background.py", "/checkpoint/save.py"
OF_COMMUNICATION = re.compile(
    r"/torch/(distributed/|autograd/|cuda/streams\.py|_ops\.py)|/trainyard/parallel/start\.py"
)


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
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # An earlier job may have left some; new reports come later.
        self._known: dict[Path, tuple[tuple[int, int], RankStatus | None]] = {
            path: (identity, None) for path, identity in self._list().items()
        }

    def write(self, statuses: Iterable[RankStatus]) -> None:
        """Writes this process's reports; a failing disk must not keep it from ending."""
        with suppress(OSError, MachineError):
            self._folder.mkdir(parents=True, exist_ok=True)
            for each in statuses:
                path = self._folder / f"rank-{each.rank:05d}.json"
                publish_text(path, json.dumps(asdict(each), indent=2) + "\n")

    def read(self) -> list[RankStatus]:
        """Returns all reports written since this object was created, by rank.

        Opens only files that changed since the last call: n parents that wait for each other would
        open n^2 files at each look.
        """
        listed, nothing = self._list(), ((0, 0), None)
        for path, identity in listed.items():
            if self._known.get(path, nothing)[0] != identity:
                with suppress(OSError, ValueError, TypeError):
                    status = RankStatus(**json.loads(path.read_text(encoding="utf-8")))
                    self._known[path] = (identity, status)
        statuses = (self._known.get(path, nothing)[1] for path in sorted(listed))
        return [status for status in statuses if status]

    def _list(self) -> dict[Path, tuple[int, int]]:
        listed = {}
        with suppress(OSError):
            for path in self._folder.glob("rank-*.json"):
                with suppress(OSError):
                    status = path.stat()
                    listed[path] = (status.st_ino, status.st_mtime_ns)
        return listed


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
        has_failed=has_ended and worker.running.returncode not in MEANT_CODES,
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
