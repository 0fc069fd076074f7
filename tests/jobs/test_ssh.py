"""Ranks on hosts of ssh: nothing stays behind, whoever dies first.

The program ssh is a stand-in that runs its command on this machine, in a session of its own; real
machines with sshd are in tests/cluster.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.launch.processes import is_running
from tests.waiting import WATCHDOG_SECONDS, wait_until

LIB = shlex.quote(str(Path(__file__).parents[2] / "src" / "trainyard" / "jobs" / "lib"))
SSH = """#!/bin/bash
while [[ $1 == -* ]]; do shift 2; done
host=$1
shift
[ "$host" = me@nobody ] && exit 255
echo "$host: $*" >> "$FOLDER/said"
exec bash -c "$*"
"""
# python -P PROGRAM, and the check before it.
PYTHON = """#!/bin/bash
[ "$3" = trainyard.launch.installed ] || exec bash -c "$2"
"""
# What the header of a script sets, and hosts.sh.
SCRIPT = f"""
folder=$FOLDER tasks_per_node=2 environment=() ssh_options=() scratch= device_variable=
local_rank=LOCAL_RANK cpus_of_rank=() script=$FOLDER/job.sh
container=() python=$FOLDER/python command=("$PROGRAM") is_stage=
. {LIB}/rank.sh
. {LIB}/ssh.sh
others_seconds=$OTHERS_SECONDS TRAINYARD_JOB=j-1 MASTER_PORT=12345 hosts=("$@")
start_ranks
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("ssh", SSH), ("python", PYTHON), ("job.sh", SCRIPT)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "logs").mkdir()
    return tmp_path


@contextmanager
def started(
    folder: Path, rank: str, *hosts: str, others_seconds: int = 0
) -> Iterator[subprocess.Popen[str]]:
    argv = ["bash", str(folder / "job.sh"), *hosts]
    given = os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PROGRAM": rank,
        "FOLDER": str(folder),
        "OTHERS_SECONDS": str(others_seconds),
    }
    with subprocess.Popen(argv, env=given, stderr=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


def wait_for(folder: Path, pattern: str, count: int) -> list[str]:
    wait_until(lambda: len(list(folder.glob(pattern))) == count, f"{count} {pattern}")
    return sorted(path.name for path in folder.glob(pattern))


WAITS = """
trap 'touch "$FOLDER/asked-$$"; exit 75' USR1 TERM
touch "$FOLDER/rank-$$"
while true; do sleep 0.1; done
"""


def test_each_rank_knows_its_place(folder: Path) -> None:
    rank = "echo $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $TRAINYARD_JOB"
    with started(folder, f'{rank} > "$FOLDER/rank-$RANK"', "me@n1", "me@n2") as running:
        assert running.wait(WATCHDOG_SECONDS) == 0
    places = [(folder / f"rank-{n}").read_text().split() for n in range(4)]
    assert places == [["4", str(n % 2), "2", "n1", "12345", "j-1"] for n in range(4)]
    said = (folder / "said").read_text()
    assert said.count("me@n1: ") == said.count("me@n2: ") == 1


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_signals_reach_all(folder: Path, number: signal.Signals) -> None:
    with started(folder, WAITS, "n1", "n2") as running:
        wait_for(folder, "rank-*", 4)
        running.send_signal(number)
        assert running.wait(WATCHDOG_SECONDS) == 75
    assert len(list(folder.glob("asked-*"))) == 4


def test_nothing_stays_when_the_first_machine_dies(folder: Path) -> None:
    with started(folder, WAITS, "n1", "n2") as running:
        names = wait_for(folder, "rank-*", 4)
        running.kill()
        running.wait(WATCHDOG_SECONDS)
        wait_for(folder, "asked-*", 4)
    pids = [int(name.removeprefix("rank-")) for name in names]
    wait_until(lambda: not any(map(is_running, pids)))


def test_nothing_stays_when_the_process_on_a_host_is_killed(folder: Path) -> None:
    with started(folder, WAITS, "n1") as running:
        names = wait_for(folder, "rank-*", 2)
        pids = [int(name.removeprefix("rank-")) for name in names]
        parents = {Path(f"/proc/{pid}/stat").read_text().split()[3] for pid in pids}
        assert len(parents) == 1
        os.kill(int(parents.pop()), signal.SIGKILL)
        wait_for(folder, "asked-*", 2)
        assert running.wait(WATCHDOG_SECONDS) == 128 + signal.SIGKILL
    wait_until(lambda: not any(map(is_running, pids)))


def test_a_host_that_is_lost(folder: Path) -> None:
    # The ranks of the other host end by themselves, and are not asked to.
    with started(
        folder, "exit 75", "n1", "me@nobody", others_seconds=int(WATCHDOG_SECONDS)
    ) as running:
        assert running.wait(WATCHDOG_SECONDS) == 75
        assert running.stderr is not None
        assert "me@nobody is lost: ssh has ended" in running.stderr.read()
    assert (folder / "logs" / "lost_hosts").read_text() == "nobody\n"


def test_ranks_of_other_hosts_are_asked_to_save_after_a_failure(folder: Path) -> None:
    others_run = '[ "$(find "$FOLDER" -name "rank-*" | wc -l)" = 2 ]'
    fails = f'[ "$RANK" -ge 2 ] || {{ until {others_run}; do sleep 0.1; done; exit 1; }}\n'
    with started(folder, fails + WAITS, "n1", "n2") as running:
        assert running.wait(WATCHDOG_SECONDS) == 1
    assert len(list(folder.glob("asked-*"))) == 2


def test_one_code_for_many() -> None:
    for codes, worst in (("0 0", 0), ("0 75", 75), ("75 1", 1), ("137 2", 2), ("2 93 75", 93)):
        words = f"set --; . {LIB}/ssh.sh; code=0; for each in {codes}; do take_worse $each; done"
        assert subprocess.run(["bash", "-c", f"{words}; exit $code"]).returncode == worst
