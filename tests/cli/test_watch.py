"""`trainyard watch`, as a user meets it: off a terminal, and on one."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.command import trainyard
from tests.report.conftest import run_lines, train_line, write_run_folder
from tests.waiting import WATCHDOG_SECONDS, wait_until

from trainyard.launch.lock import hold

COMMAND = [sys.executable, "-c", "from trainyard.cli.main import main; main()", "watch"]


def add(folder: Path, *lines: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def end(folder: Path, reason: str, exit_code: int) -> None:
    facts = {"reason": reason, "exit_code": exit_code, "step": 4}
    (folder / "outcome.json").write_text(json.dumps(facts))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run_folder(tmp_path / "tiny", run_lines(3)[:-3])


def test_once_shows_one_screen(tmp_path: Path) -> None:
    write_run_folder(tmp_path / "tiny", run_lines())
    end(tmp_path / "tiny", "received SIGTERM", 75)
    done = trainyard("watch", "tiny", "--once", folder=tmp_path, COLUMNS="100", LINES="40")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("tiny  ended: received SIGTERM; the same command continues\n")
    for text in ("step 20/50", "40%", "4.0000; held out 4.5000, best 4.5000 at step 20", "3.0 GiB"):
        assert text in done.stdout
    assert "\x1b" not in done.stdout


def test_off_a_terminal_it_prints_lines_until_the_run_has_ended(folder: Path) -> None:
    with hold(folder):
        watching = subprocess.Popen([*COMMAND, str(folder)], stdout=subprocess.PIPE, text=True)
        assert watching.stdout is not None
        first = [watching.stdout.readline() for _ in range(4)]
        assert first[0] == "step 0: started on a <b>GPU</b>\n"
        assert first[3].startswith("step 3/50 | loss 5.7000 | lr 1.00e-03 | grad norm 0.500 | 512 ")
        add(folder, train_line(4, 5.5))
        assert watching.stdout.readline().startswith("step 4/50 | loss 5.5000")
        end(folder, "done", 0)
        add(folder, {"kind": "end", "step": 4, "reason": "done"})
    rest, _ = watching.communicate(timeout=WATCHDOG_SECONDS)
    assert (rest, watching.returncode) == ("step 4: ended: done\nended: done\n", 0)


@pytest.mark.parametrize("stop", ["the run ends", "Ctrl-C"])
def test_on_a_terminal_it_shows_the_run_until_it_ends(folder: Path, stop: str) -> None:
    ours, theirs = pty.openpty()
    seen = ""

    def read() -> str:
        nonlocal seen
        try:
            seen += os.read(ours, 65536).decode(errors="replace")
        except OSError:  # nobody writes any more
            return seen
        return seen

    with hold(folder):
        sized = os.environ | {"COLUMNS": "100", "LINES": "40", "TERM": "xterm"}
        watching = subprocess.Popen(
            [*COMMAND, str(folder)], stdin=theirs, stdout=theirs, stderr=theirs, env=sized
        )
        os.close(theirs)
        wait_until(lambda: "step 3/50" in read())
        assert f"training: process {os.getpid()} on " in seen
        add(folder, train_line(4, 5.5))
        wait_until(lambda: "step 4/50" in read())
        if stop == "Ctrl-C":
            watching.send_signal(signal.SIGINT)
            assert watching.wait(WATCHDOG_SECONDS) == 0
        else:
            end(folder, "done", 0)
    wait_until(lambda: watching.poll() is not None or not read())
    assert watching.wait(WATCHDOG_SECONDS) == 0
    while len(seen) < len(read()):
        pass
    os.close(ours)
    assert "Traceback" not in seen
    assert ("ended: done" in seen) == (stop != "Ctrl-C")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    done = trainyard("watch", ".", folder=tmp_path)
    assert done.returncode == 2
    assert "is not a run folder: it has no run.toml" in done.stderr
