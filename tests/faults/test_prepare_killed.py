"""Preparation killed at any moment and run again gives the bytes of a run that was left alone."""

from __future__ import annotations

import fnmatch
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.launch.processes import is_running
from tests.waiting import WATCHDOG_SECONDS, wait_until

from trainyard.data.preparation.prepare import prepare

from .conftest import describe_corpus, read_all, write_corpus

pytestmark = pytest.mark.exhaustive

UNIT_BYTES = 60_000
PREAMBLE = f"""
import os, random, shutil, signal, sys, time
from pathlib import Path
from trainyard.config.corpus import Corpus
from trainyard.data.preparation.prepare import prepare

def run(description, workers, unit_bytes={UNIT_BYTES}):
    prepare(Corpus.model_validate_json(description), workers=workers, unit_bytes=unit_bytes)
"""

# Forks, because a process that has imported everything is ready at once. The moments of the kills
# are spread over the time that a whole run computes, so that every kind of piece is hit: it counts
# no time in which others have the processor. It goes on until enough kills hit unfinished work.
KILLER = """
description, folder, expected = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])

def start(seconds=0.0):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF kills as SIGKILL does
            run(description, 1, int(sys.argv[4]))
            code = 0
        finally:
            os._exit(code)
    return child

def run_afresh(seconds=0.0):
    shutil.rmtree(folder)
    folder.mkdir()
    _, status, used = os.wait4(start(seconds), 0)
    return status, used.ru_utime + used.ru_stime

want = {path.name: path.read_bytes() for path in expected.iterdir()}
whole = [run_afresh() for _ in range(2)]
assert not any(status for status, _ in whole)
shortest = min(seconds for _, seconds in whole)
moments = random.Random(1)
round = in_the_midst = resumed_with_parts = 0
while round < 30 or in_the_midst < 15 or resumed_with_parts < 10:
    round += 1
    status, _ = run_afresh(moments.uniform(0.1, 0.9) * shortest)
    assert status in (0, signal.SIGPROF), status
    works = list(folder.glob("*.work"))
    in_the_midst += bool(works)
    resumed_with_parts += any(list((work / "done").iterdir()) for work in works)
    assert os.waitpid(start(), 0)[1] == 0, round
    got = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert got == want, (round, sorted(got))
"""


def test_killed_at_any_moment(tmp_path: Path, tokenizer_folder: Path) -> None:
    write_corpus(tmp_path / "in", n_documents=600)
    (tmp_path / "expected").mkdir()
    (tmp_path / "out").mkdir()
    description = describe_corpus(tmp_path / "in", tokenizer_folder, tmp_path / "expected/c")
    prepare(description, workers=2, unit_bytes=UNIT_BYTES // 2)
    killed = description.model_copy(update={"output": str(tmp_path / "out/c")})
    result = subprocess.run(
        [
            *(sys.executable, "-c", PREAMBLE + KILLER, killed.model_dump_json()),
            *(str(tmp_path / "out"), str(tmp_path / "expected"), str(UNIT_BYTES // 2)),
        ],
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
    )
    assert result.returncode == 0, result.stderr


def children_of(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            command = (path / "cmdline").read_text()
        except OSError:
            continue
        # Beside the workers there is a tracker of resources, which Python starts.
        if int(fields[1]) == pid and "spawn_main" in command:
            found.append(int(path.name))
    return found


def start_with_workers(description: str, workers: int) -> subprocess.Popen[str]:
    # Not read from the standard input: workers import the main module again.
    return subprocess.Popen(
        [sys.executable, "-c", f"{PREAMBLE}\nrun(sys.argv[1], {workers})", description],
        stderr=subprocess.PIPE,
        text=True,
    )


def claimed_for_the_first_time(work: Path) -> list[str]:
    with suppress(FileNotFoundError):  # not begun, or published
        names = [path.name for path in (work / "claimed").iterdir()]
        return fnmatch.filter(names, "unit-*.0@*")
    return []


def test_workers_killed_are_replaced(tmp_path: Path, tokenizer_folder: Path) -> None:
    write_corpus(tmp_path / "in", n_files=9, n_documents=2000)
    for name in ("expected", "out"):
        (tmp_path / name).mkdir()
    corpus = describe_corpus(tmp_path / "in", tokenizer_folder, tmp_path / "expected/c")
    prepare(corpus, unit_bytes=UNIT_BYTES)
    killed = corpus.model_copy(update={"output": str(tmp_path / "out/c")})
    running = start_with_workers(killed.model_dump_json(), 3)
    choice = random.Random(2)
    n_killed = 0
    while running.poll() is None:
        time.sleep(choice.uniform(0.02, 0.1))
        claimed = claimed_for_the_first_time(tmp_path / "out/c.work")  # three deaths end the run
        if claimed and n_killed < 6:
            owner = int(choice.choice(claimed).rsplit("-", 2)[1])
            if owner in children_of(running.pid):
                os.kill(owner, signal.SIGKILL)
                n_killed += 1
    _, error = running.communicate()
    assert running.returncode == 0, error
    assert "a worker was killed by SIGKILL; another takes its place" in error
    assert read_all(tmp_path / "out") == read_all(tmp_path / "expected")


def test_a_piece_that_kills_its_workers_ends_the_run(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    (tmp_path / "in").mkdir()
    for name, n_words in (("a", 1), ("b", 10**6)):  # that of "b" takes longer than to see its claim
        line = {"text": "the cat " * n_words, "meta": {"set": "web"}}
        (tmp_path / f"in/{name}.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "out").mkdir()
    corpus = describe_corpus(tmp_path / "in", tokenizer_folder, tmp_path / "out/c")
    running = start_with_workers(corpus.model_dump_json(), 2)
    while running.poll() is None:
        for claim in (tmp_path / "out/c.work/claimed").glob("unit-000001.*"):
            with suppress(ProcessLookupError):
                os.kill(int(claim.name.rsplit("-", 2)[1]), signal.SIGKILL)
        time.sleep(0.0005)
    _, error = running.communicate()
    assert "3 workers died at unit-000001" in error, error
    assert "hint: out of memory is the usual reason: use fewer workers" in error
    assert not list((tmp_path / "out").glob("*.bin"))


def test_workers_end_when_the_one_that_started_them_is_killed(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    write_corpus(tmp_path / "in", n_files=9, n_documents=1500)
    for name in ("expected", "out"):
        (tmp_path / name).mkdir()
    corpus = describe_corpus(tmp_path / "in", tokenizer_folder, tmp_path / "out/c")
    running = start_with_workers(corpus.model_dump_json(), 2)
    while not list((tmp_path / "out/c.work").glob("done/unit-*")):
        assert running.poll() is None
        time.sleep(0.01)
    workers = children_of(running.pid)
    running.kill()
    running.communicate()
    wait_until(lambda: not any(map(is_running, workers)))
    prepare(corpus, unit_bytes=UNIT_BYTES)
    expected = corpus.model_copy(update={"output": str(tmp_path / "expected/c")})
    prepare(expected, unit_bytes=UNIT_BYTES)
    assert read_all(tmp_path / "out") == read_all(tmp_path / "expected")
