"""Processes of one job on this machine: starts, signals and ends them together.

    run_ranks(4, watched_command("trainyard.simulate.layout_check", FOLDER), logs)

The rendezvous of the ranks is a file, so no port is open. Rank 0 writes to this process's output,
the others to `logs/rank-00003.log`. SIGINT, SIGTERM and SIGHUP are forwarded to all. If a rank
dies, this process ends the others, which would wait for it forever, and names the one that died
first.

If this process is killed (SIGKILL), it cannot end its workers. So every worker has the reading end
of a pipe whose writing end only this process holds: when it dies, the pipe reaches its end, and
`end_with_parent` ends the worker.

`supervise.py` adds hang detection and restarts for training.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from trainyard.errors import EXIT_HOLD, EXIT_REQUEUE, MachineError
from trainyard.launch.environment import Process, bound_to, rank_environment
from trainyard.launch.heartbeat import HeartbeatReader, HeartbeatState
from trainyard.launch.signals import STOP, note_signals

POLL_SECONDS = 0.05
OWN_END_SECONDS, TERM_SECONDS = 1.0, 3.0
N_LINES, N_BYTES = 20, 8192
SAVES = "while training the first of these signals saves; before that, and the second, ends all"
HINTS: dict[int, str] = {
    **dict.fromkeys(STOP, SAVES),
    signal.SIGKILL: "SIGKILL is most often this machine out of memory: train with fewer ranks, or "
    "a smaller train.micro_batch_size",
    signal.SIGBUS: "SIGBUS is most often a file that was cut short while it was read, such as "
    "token files under rsync --inplace, or a full /dev/shm; stacks are in the rank's output",
}


@dataclass
class Worker:
    """A process started by this one, with its known state."""

    process: Process
    """Its rank and peers."""
    running: subprocess.Popen[bytes]
    log: Path | None
    """File of its output; None: the output of this process."""
    log_start: int
    """Size of the log before."""
    heartbeat: HeartbeatReader | None
    n_beats: int = -1
    """Its heartbeat count when it was last looked at."""
    beat_at: float = 0.0
    """When its count was first seen, on the monotonic clock."""

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.running.poll() is None

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.process.rank

    @property
    def name(self) -> str:
        """Such as `rank 3 of 4 on n1`."""
        host = f" on {socket.gethostname()}" if self.heartbeat else ""
        return f"rank {self.rank} of {self.process.n_ranks}{host}"

    @property
    def beat(self) -> HeartbeatState:
        """Its last report."""
        return self.heartbeat.read() if self.heartbeat else HeartbeatState()

    def note_heartbeat(self) -> None:
        """Notes when its heartbeat count has changed."""
        count = self.beat.count
        if self.n_beats != count:
            self.n_beats, self.beat_at = count, time.monotonic()

    def describe_end(self) -> str:
        """Such as `was ended by SIGKILL`."""
        code = self.running.returncode
        return f"was ended by {signal_name(-code)}" if code < 0 else f"ended with code {code}"


def watched_command(*words: str) -> list[str]:
    """Returns the command of a rank that its parent can watch: a module and its arguments."""
    return [sys.executable, "-P", "-m", "trainyard.launch.watched", *words]


def run_ranks(ranks: int | Process, command: Sequence[str], logs: Path | None = None) -> None:
    """Runs a command as connected ranks, and waits until they end.

    Args:
        ranks: their number, at least 2; or this process, which runs it as its own rank.
        command: of each rank; it calls `parallel.start.start_ranks`.
        logs: the folder for the output of all ranks but 0; later runs append to its files.

    Raises:
        MachineError: a rank died; names it, how, and the end of its output. The exit code is 1 if
            the rank's indicates a bug.
        KeyboardInterrupt: Ctrl-C, which reaches all ranks, ended one.
    """
    is_interrupted = False
    with (
        note_signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)) as received,
        start_workers(ranks, command, logs) as workers,
    ):
        try:
            while any(worker.is_running for worker in workers):
                if find_first_death(workers) is not None:
                    break
                while received:
                    is_interrupted |= received[0] == signal.SIGINT
                    send(workers, received.pop(0))
                time.sleep(POLL_SECONDS)
            dead = find_first_death(workers)
        finally:
            end(workers)
    if dead is not None and is_interrupted:
        raise KeyboardInterrupt
    if dead is not None:
        # If all end for the same reason, rank 0 has already shown it.
        all_refuse = dead.running.returncode == workers[0].running.returncode == 2
        raise describe_death(workers[0] if all_refuse else dead)


@contextmanager
def start_workers(
    ranks: int | Process,
    command: Sequence[str],
    logs: Path | None,
    *,
    with_heartbeats: bool = False,
    inherited: Sequence[int] = (),
) -> Iterator[list[Worker]]:
    """Starts ranks, and kills those that remain at the end of the block.

    Args:
        ranks: their number on this machine, where they meet in a file; or one that has its place.
        command: what each runs.
        logs: the folder for the output of all ranks but 0; None: the output of this process.
        with_heartbeats: give each memory for its heartbeats.
        inherited: file descriptors that they keep open.

    Raises:
        MachineError: the program is missing, or no more processes can be started.
    """
    workers: list[Worker] = []
    with ExitStack() as stack:
        reading, writing = os.pipe()
        stack.callback(os.close, reading)
        stack.callback(os.close, writing)
        if isinstance(ranks, Process):
            places = [ranks]
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="trainyard-"))
            store = Path(folder) / "store"
            places = [Process(n, ranks, n, ranks, store_file=store) for n in range(ranks)]
        try:
            for place in places:
                place, heartbeat = replace(place, parent_pipe=reading), None
                if with_heartbeats:
                    heartbeat = HeartbeatReader()
                    stack.callback(heartbeat.close)
                    place = replace(place, heartbeat=heartbeat.descriptor)
                workers.append(_start_worker(place, command, logs, heartbeat, inherited))
            yield workers
        finally:
            kill(workers)


def _start_worker(
    process: Process,
    command: Sequence[str],
    logs: Path | None,
    heartbeat: HeartbeatReader | None,
    inherited: Sequence[int],
) -> Worker:
    log = logs / f"rank-{process.rank:05d}.log" if logs is not None and process.rank else None
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    own = (process.parent_pipe, process.heartbeat)
    with log.open("ab") if log else nullcontext() as output:
        try:
            running = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=rank_environment(process, max(1, len(bound_to()) // process.n_ranks)),
                pass_fds=[*inherited, *(number for number in own if number is not None)],
                # Else Ctrl-C on a terminal reaches it twice, and the second means "at once".
                process_group=0,
            )
        except OSError as error:
            problem = f"rank {process.rank} cannot start {command[0]}: {error}"
            raise MachineError(problem) from error
        return Worker(process, running, log, output.tell() if output else 0, heartbeat)


def find_first_death(workers: Sequence[Worker]) -> Worker | None:
    """Finds the worker that failed by itself, not because of another; None if none failed."""
    dead = [each for each in workers if each.running.poll() and not each.beat.is_victim]
    # Other workers may end before the next poll: the worst end was the first.
    return min(dead, key=lambda each: (_severity(each.running.returncode), each.rank), default=None)


def end(workers: Sequence[Worker]) -> None:
    """Ends the remaining workers, which can neither continue nor save without the lost rank."""
    wait(workers, OWN_END_SECONDS)  # most notice it themselves, and report what they know
    send(workers, signal.SIGTERM)
    wait(workers, TERM_SECONDS)
    kill(workers)


def kill(workers: Sequence[Worker]) -> None:
    """Kills all workers immediately."""
    send(workers, signal.SIGKILL)
    for worker in workers:
        worker.running.wait()


def wait_until(condition: Callable[[], bool], seconds: float, poll: float = POLL_SECONDS) -> bool:
    """Waits until a condition holds, or the time is up; returns whether it holds."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(poll)
    return holds


def wait(workers: Sequence[Worker], seconds: float) -> None:
    """Waits until all have ended, or until the timeout."""
    wait_until(lambda: not any(worker.is_running for worker in workers), seconds)


def send(workers: Sequence[Worker], number: signal.Signals) -> None:
    """Sends a signal to those that have not ended."""
    for worker in workers:
        worker.running.send_signal(number)


def describe_death(worker: Worker) -> MachineError:
    """Describes how a worker ended, its step and phase, and the end of its output."""
    code = worker.running.returncode
    problem, hint = f"{worker.name} {worker.describe_end()}", "see its output above"
    if worker.heartbeat is not None:
        problem += f" at step {worker.beat.step}, in {worker.beat.phase}"
    if worker.log:
        problem += f"; the end of {worker.log}:\n" + read_end(worker.log, worker.log_start)
        hint = "the message above is from that rank"
    error = MachineError(problem, HINTS.get(-code, hint))
    error.exit_code = 2 if code == 2 or -code in (signal.SIGKILL, *STOP) else 1
    return error


def signal_name(number: int) -> str:
    """Returns a name such as SIGKILL, also for unnamed numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _severity(code: int) -> int:
    if code < 0 and code != -signal.SIGABRT:
        return 0
    # NCCL aborts ranks that lose another.
    return {-signal.SIGABRT: 2, 2: 3, EXIT_HOLD: 4, EXIT_REQUEUE: 5}.get(code, 1)


def read_end(log: Path, start: int) -> str:
    """Returns the last lines that a process has written to its log, indented.

    Args:
        log: its file.
        start: size of the file before.
    """
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - N_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError as error:  # somebody has removed it
        lines = [f"({error.strerror})"]
    return "\n".join(f"    {line}" for line in lines[-N_LINES:]) or "    (nothing)"
