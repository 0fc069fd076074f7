"""Several ranks on this machine, as processes of this one: started, watched, and ended together.

    run_ranks(4, [sys.executable, "-m", "trainyard.train.worker", "runs/my-run"], logs)

The ranks meet in a file, so no port is open to anybody. Rank 0 shows what it has to say; the others
write `logs/rank-00003.log`. SIGINT and SIGTERM are passed on to all. When one rank dies, the others
would wait for it for ever: they are ended, and the error names the one that died first.

This process may die itself without a chance to end its ranks (SIGKILL). So it holds the writing end
of a pipe whose reading end every rank has, and which nobody writes to: the pipe comes to its end
when this process does, whatever the reason, and `end_with_parent` in each rank notices.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from trainyard.errors import MachineError
from trainyard.launch.environment import Process, rank_environment

POLL_SECONDS = 0.05
OWN_END_SECONDS, TERM_SECONDS = 1.0, 3.0
N_LINES, N_BYTES = 20, 8192


def run_ranks(n_ranks: int, command: Sequence[str], logs: Path) -> None:
    """Runs a command `n_ranks` times at once as ranks that find each other; waits for their end.

    Args:
        n_ranks: at least 2.
        command: of each rank; it calls `parallel.start.start_ranks`.
        logs: the folder for the output of all ranks but 0; later runs add to its files.

    Raises:
        MachineError: a rank died; tells which, how, and what it said last. The exit code is 1 where
            the rank's tells of a bug.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with (
        _note_signals() as received,
        tempfile.TemporaryDirectory(prefix="trainyard-") as folder,
        _open_pipe() as parent_pipe,
    ):
        ranks: list[_Rank] = []
        try:
            for number in range(n_ranks):
                process = Process(
                    *(number, n_ranks, number, n_ranks),
                    store_file=Path(folder) / "store",
                    parent_pipe=parent_pipe,
                )
                ranks.append(_start_rank(process, command, logs))
            dead = _wait_for_first_death(ranks, received)
        finally:
            _end(ranks)
        if dead is not None:
            # Where all end for the same reason, rank 0 has shown it already.
            all_refuse = dead.running.returncode == ranks[0].running.returncode == 2
            raise _describe_death(ranks[0] if all_refuse else dead, n_ranks)


def end_with_parent(pipe: int) -> None:
    """Ends this process at once when the one that started it has ended, even while it waits.

    Args:
        pipe: `Process.parent_pipe`.
    """

    def wait() -> None:
        with suppress(OSError):
            os.read(pipe, 1)
            # Not by the logger: the main thread may hold its lock for ever.
            os.write(2, b"the process that started this rank has ended, and so does this one\n")
        os._exit(1)

    threading.Thread(target=wait, name="end with parent", daemon=True).start()


@dataclass(frozen=True)
class _Rank:
    number: int
    running: subprocess.Popen[bytes]
    log: Path | None
    log_start: int
    """Size of the log before this run."""


@contextmanager
def _note_signals() -> Iterator[list[signal.Signals]]:
    """Yields a list to which SIGINT and SIGTERM are added as they come."""
    received: list[signal.Signals] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    before = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _open_pipe() -> Iterator[int]:
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def _start_rank(process: Process, command: Sequence[str], logs: Path) -> _Rank:
    assert process.parent_pipe is not None
    n_threads = max(1, _count_cores() // process.n_ranks)
    log = logs / f"rank-{process.rank:05d}.log" if process.rank else None
    output = log.open("ab") if log else None
    try:
        running = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=rank_environment(process, n_threads),
            pass_fds=[process.parent_pipe],
            # Else Ctrl-C on a terminal reaches the ranks twice, and the second means "at once".
            process_group=0,
        )
        return _Rank(process.rank, running, log, output.tell() if output else 0)
    except OSError as error:
        raise MachineError(f"rank {process.rank} cannot start {command[0]}: {error}") from error
    finally:
        if output:
            output.close()


def _count_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _wait_for_first_death(ranks: list[_Rank], received: list[signal.Signals]) -> _Rank | None:
    """Waits until all have ended well, passing signals on, or until one has not: gives that one."""
    while True:
        codes = {rank.number: rank.running.poll() for rank in ranks}
        dead = [rank for rank in ranks if codes[rank.number]]
        if dead:
            # One that a signal killed comes first: the others, whom it left, can be as quick to
            # end as our next look.
            return min(dead, key=lambda rank: (rank.running.returncode > 0, rank.number))
        if None not in codes.values():
            return None
        while received:
            _send(ranks, received.pop(0))
        time.sleep(POLL_SECONDS)


def _end(ranks: list[_Rank]) -> None:
    """Ends what is left; what one rank began, the others cannot go on with or save."""
    _wait(ranks, OWN_END_SECONDS)  # most notice it themselves, and say what they know
    _send(ranks, signal.SIGTERM)
    _wait(ranks, TERM_SECONDS)
    _send(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.running.wait()


def _wait(ranks: list[_Rank], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(rank.running.poll() is None for rank in ranks):
        time.sleep(POLL_SECONDS)


def _send(ranks: list[_Rank], number: signal.Signals) -> None:
    for rank in ranks:
        rank.running.send_signal(number)  # does nothing to one that has ended


def _describe_death(rank: _Rank, n_ranks: int) -> MachineError:
    code = rank.running.returncode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    problem = f"rank {rank.number} of {n_ranks} {how}"
    hint = "what it said is above"
    if rank.log:
        problem += f"; the end of {rank.log}:\n" + _read_end(rank.log, rank.log_start)
        hint = "the message above is that rank's own"
    if code == -signal.SIGKILL:
        hint = "SIGKILL is most often this machine out of memory: train with fewer ranks, or a "
        hint += "smaller train.micro_batch_size"
    elif code in (-signal.SIGINT, -signal.SIGTERM):
        hint = (
            "while training the first of these signals saves; before that, and the second, ends all"
        )
    error = MachineError(problem, hint)
    by_others = (2, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
    error.exit_code = 2 if code in by_others else 1
    return error


def _read_end(log: Path, start: int) -> str:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - N_BYTES))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    return "\n".join(f"    {line}" for line in lines[-N_LINES:]) or "    (nothing)"
