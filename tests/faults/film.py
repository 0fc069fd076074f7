"""A run that is killed three ways, as its log shows it, from start to finish.

    python -m tests.faults.film > film.txt

trains 400 steps on two ranks. A rank is killed, a rank is stopped as by a hang, the whole command
is told to end; what is done to it stands between the lines of the log, after `>>>`. Lines are cut
at 150 letters, and of stacks all but the innermost calls is left out.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults.small_run import small_overrides, write_tokens

COMMAND = [sys.executable, "-c", "from trainyard.cli.main import main; main()", "train", "tiny"]
SETTINGS = [
    *("name=film", "checkpoint.interval=40", "log.interval=50", "evaluate.interval=200"),
    *("guard.step_timeout_minutes=0.1", "guard.slow_timeout_minutes=1"),
]


def main() -> None:
    """Runs and prints it."""
    with tempfile.TemporaryDirectory(prefix="trainyard-film-") as folder:
        overrides = small_overrides(write_tokens(Path(folder)), 400)
        command = [*COMMAND, *overrides, *SETTINGS, "--ranks", "2"]
        show(">>> trainyard train tiny name=film ... --ranks 2")
        acts: list[tuple[str, str, Callable[[int], None]]] = [
            (r"step +100 of 400", "kill -KILL rank 1", lambda parent: os.kill(ranks(parent)[1], 9)),
            (
                r"step +200 of 400 ",
                "kill -STOP rank 0 (it hangs; its limit is 6 s)",
                lambda parent: os.kill(ranks(parent)[0], signal.SIGSTOP),
            ),
            (
                r"step +300 of 400",
                "kill -TERM the command, as a scheduler does",
                lambda parent: os.kill(parent, signal.SIGTERM),
            ),
        ]
        code = play(command, folder, acts)
        show(f">>> exit code {code}; the same command again")
        show(f">>> exit code {play(command, folder, [])}")


def play(
    command: list[str], folder: str, acts: list[tuple[str, str, Callable[[int], None]]]
) -> int:
    """Shows a command's log, and does something to it after some lines; gives its exit code."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    acts = list(acts)
    n_calls = 0
    for line in process.stderr:
        # Only of the thread that waits, and as far as a reader wants to know.
        n_calls = n_calls + 1 if line.startswith("      File") else 0
        if n_calls <= 3 and "hread" not in line:
            path = re.compile(r'File ".*/(site-packages|src|python3[.0-9]*)/')
            show(path.sub('File "', line.rstrip()).replace(folder, "."))
        if acts and re.match(acts[0][0], line):
            _, says, act = acts.pop(0)
            time.sleep(0.3)
            show(f">>> {says}")
            act(process.pid)
    return process.wait()


def ranks(parent: int) -> list[int]:
    """Process ids of the workers, by rank."""
    return sorted(map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split()))


def show(line: str) -> None:
    """Prints a line with the second at which it came."""
    sys.stdout.write(f"{time.monotonic() - STARTED:6.1f}  {line[:150]}\n")
    sys.stdout.flush()


STARTED = time.monotonic()

if __name__ == "__main__":
    main()
