"""Ranks on hosts reached only by ssh: no process is left behind, whichever dies first.

    on the first machine    python -m trainyard.launch.remote start .. -- n1 n2
    on each host            python -m trainyard.launch.remote on-host .. -- bash -c "$rank"

The first one runs the program `ssh` for each host and keeps its standard input open. The other
starts the ranks there, each with the variables of torchrun (RANK, WORLD_SIZE, ..), and reads:

    USR1        a line with the name of a signal: forwarded to the ranks
    (the end)   the first machine, or the connection, is gone: the ranks save and end, or are killed

ssh itself does not forward signals, and leaves its remote command running when it is killed. If the
process on a host is killed, the kernel signals its ranks to save and end.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trainyard.errors import EXIT_HOLD, EXIT_REQUEUE
from trainyard.launch.local import note_signals

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=2")
POLL_SECONDS = 0.05
SAVE_SECONDS = 60.0
"""For ranks to save once no process waits for them."""
OTHERS_SECONDS = 20.0
"""For ranks on other hosts to notice that one host has ended."""
PR_SET_PDEATHSIG = 1
"""Linux (sys/prctl.h): the signal sent to a process when its parent dies."""
EXIT_LOST = 255
"""Exit code of ssh itself: the host is unreachable, or the connection broke."""


@dataclass(frozen=True)
class Start:
    """The commands to run, and their hosts."""

    hosts: Sequence[str]
    n_ranks_per_host: int
    script: Path
    """`bash SCRIPT on-host ..` starts the ranks of a host."""
    job: str
    """Identifies this start."""
    port: int
    """Port of rank 0, on the first host."""
    ssh_options: Sequence[str] = ()

    def command(self, number: int) -> list[str]:
        """Returns the command that starts the ranks of a host."""
        words = ["env", f"TRAINYARD_JOB={self.job}", "bash", str(self.script), "on-host"]
        words += ["--first", str(number * self.n_ranks_per_host)]
        words += ["--ranks", str(self.n_ranks_per_host)]
        words += ["--of", str(len(self.hosts) * self.n_ranks_per_host)]
        # Hosts may not know each other by the name this machine logs in with.
        words += ["--address", self.hosts[0].rpartition("@")[2]]
        words += ["--port", str(self.port)]
        return [*SSH, *self.ssh_options, self.hosts[number], shlex.join(words)]


def start_on_hosts(start: Start) -> tuple[int, list[str]]:
    """Runs the ranks of all hosts until all have ended.

    Returns:
        the exit code, and hosts that were lost.
    """
    with note_signals(SIGNALS) as received, _run_each(start) as running:
        n_told, failed_at, is_closed = 0, 0.0, False
        while any(each.poll() is None for each in running):
            now = time.monotonic()
            while n_told < len(received):
                for each in running:
                    _tell(each, received[n_told].name.removeprefix("SIG"))
                n_told += 1
            if not failed_at and any(each.poll() for each in running):
                failed_at = now
            if failed_at and not is_closed and now - failed_at > OTHERS_SECONDS:
                is_closed = True
                for each in running:
                    _close(each)
            time.sleep(POLL_SECONDS)
    codes = [_as_shells_do(each.returncode) for each in running]
    lost = [host for host, code in zip(start.hosts, codes, strict=True) if code == EXIT_LOST]
    return worst(EXIT_REQUEUE if code == EXIT_LOST else code for code in codes), lost


def obey(command: Sequence[str], places: Sequence[dict[str, str]]) -> int:
    """Runs a command for each place on this host, as standard input says.

    Args:
        command: of every rank.
        places: variables that tell each rank which one it is.

    Returns:
        the exit code.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # not on macOS

    def end_with_parent() -> None:
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    running = [
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **place},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        for place in places
    ]
    threading.Thread(target=_listen, args=(running,), daemon=True).start()
    try:
        return worst(_as_shells_do(each.wait()) for each in running)
    finally:
        _send(running, signal.SIGKILL)


def worst(codes: Iterator[int] | Sequence[int]) -> int:
    """Combines exit codes: first those that need attention, then a failure, then a stop."""
    order = {0: 0, EXIT_REQUEUE: 1, 2: 3, EXIT_HOLD: 4}
    return max(codes, key=lambda code: order.get(code, 2))


@contextmanager
def _run_each(start: Start) -> Iterator[list[subprocess.Popen[bytes]]]:
    running = [
        subprocess.Popen(
            start.command(number),
            stdin=subprocess.PIPE,
            # Ctrl-C is for this process, which forwards it to the ranks.
            start_new_session=True,
        )
        for number in range(len(start.hosts))
    ]
    try:
        yield running
    finally:
        for each in running:
            _close(each)


def _listen(running: Sequence[subprocess.Popen[bytes]]) -> None:
    for line in sys.stdin:
        if hasattr(signal, f"SIG{line.strip()}"):
            _send(running, signal.Signals[f"SIG{line.strip()}"])
    _send(running, signal.SIGTERM)
    time.sleep(SAVE_SECONDS)
    _send(running, signal.SIGKILL)


def _send(running: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    """Signals what ranks have started as well only where nobody else will: with SIGKILL."""
    for each in running:
        with suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(each.pid, number)
            elif each.poll() is None:
                each.send_signal(number)


def _tell(ssh: subprocess.Popen[bytes], line: str) -> None:
    assert ssh.stdin is not None
    with suppress(OSError, ValueError):
        ssh.stdin.write(f"{line}\n".encode())
        ssh.stdin.flush()


def _close(ssh: subprocess.Popen[bytes]) -> None:
    assert ssh.stdin is not None
    with suppress(OSError):
        ssh.stdin.close()


def _as_shells_do(code: int) -> int:
    return 128 - code if code < 0 else code


def _read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="trainyard.launch.remote")
    roles = parser.add_subparsers(dest="role", required=True)
    start, on_host = roles.add_parser("start"), roles.add_parser("on-host")
    start.add_argument("--script", type=Path, required=True)
    start.add_argument("--job", required=True)
    start.add_argument("--ssh", action="append", default=[], help="an option of ssh")
    start.add_argument("--lost", type=Path, required=True, help="a file for hosts that were lost")
    on_host.add_argument("--first", type=int, required=True)
    on_host.add_argument("--of", type=int, required=True)
    on_host.add_argument("--address", required=True)
    for role in (start, on_host):
        role.add_argument("--ranks", type=int, required=True, help="of a host")
        role.add_argument("--port", type=int, required=True)
        role.add_argument("words", nargs="+", help="hosts; the command of a rank")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Runs one of the two roles; returns the exit code."""
    given = _read_arguments(arguments)
    if given.role == "start":
        start = Start(
            given.words, given.ranks, given.script, given.job, given.port, tuple(given.ssh)
        )
        code, lost = start_on_hosts(start)
        for host in lost:
            print(f"{host} is lost: ssh has ended", file=sys.stderr)  # noqa: T201
        given.lost.write_text("".join(f"{host}\n" for host in lost), encoding="utf-8")
        return code
    places = [
        {
            "RANK": str(given.first + number),
            "WORLD_SIZE": str(given.of),
            "LOCAL_RANK": str(number),
            "LOCAL_WORLD_SIZE": str(given.ranks),
            "MASTER_ADDR": given.address,
            "MASTER_PORT": str(given.port),
        }
        for number in range(given.ranks)
    ]
    return obey(given.words, places)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
