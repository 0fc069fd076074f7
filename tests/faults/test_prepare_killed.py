"""Preparation killed at any moment and run again gives the bytes of a run that was left alone."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from tests.command import Fork
from tests.launch.processes import is_running
from tests.waiting import wait_until

from trainyard.config.corpus import Corpus
from trainyard.corpus.preparation.plan import plan_corpus
from trainyard.corpus.preparation.prepare import prepare, record_tokenizer
from trainyard.data.vocabulary import load_vocabulary

from .conftest import describe_corpus, read_all, write_corpus

pytestmark = pytest.mark.exhaustive

UNIT_BYTES = 60_000
PROGRAM = f"""
import sys
from trainyard.config.corpus import Corpus
from trainyard.corpus.preparation.prepare import prepare

corpus = Corpus.model_validate_json(sys.argv[1])
prepare(corpus, workers=int(sys.argv[2]), unit_bytes={UNIT_BYTES})
"""


def test_killed_at_any_moment(tmp_path: Path, tokenizer_folder: Path) -> None:
    """Moments are spread over the time that a whole run computes, so that all pieces are hit.

    No time counts in which others have the processor. It goes on until enough kills hit unfinished
    work.
    """
    folder = tmp_path / "out"
    write_corpus(tmp_path / "in", n_documents=600)
    for each in (tmp_path / "expected", folder):
        each.mkdir()
    expected = describe_corpus(tmp_path / "in", tokenizer_folder, tmp_path / "expected/c")
    prepare(expected, workers=2, unit_bytes=UNIT_BYTES // 2)
    killed = expected.model_copy(update={"output": str(folder / "c")})

    def run(seconds: float = 0.0) -> None:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF kills as SIGKILL does
        prepare(killed, workers=1, unit_bytes=UNIT_BYTES // 2)

    def run_afresh(seconds: float = 0.0) -> tuple[int, float]:
        shutil.rmtree(folder)
        folder.mkdir()
        before = time_of_children()
        code = Fork(partial(run, seconds)).wait().returncode
        return code, time_of_children() - before

    whole = [run_afresh() for _ in range(2)]
    assert not any(code for code, _ in whole)
    moments = random.Random(1)
    n_runs = in_the_midst = resumed_with_parts = 0
    while n_runs < 30 or in_the_midst < 15 or resumed_with_parts < 10:
        n_runs += 1
        code, _ = run_afresh(moments.uniform(0.1, 0.9) * min(seconds for _, seconds in whole))
        assert code in (0, -signal.SIGPROF), code
        works = list(folder.glob("*.work"))
        in_the_midst += bool(works)
        resumed_with_parts += any(list((work / "done").iterdir()) for work in works)
        again = Fork(run).wait()
        assert again.returncode == 0, (n_runs, again.stderr)
        assert read_all(folder) == read_all(tmp_path / "expected"), n_runs


def time_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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
        [sys.executable, "-c", PROGRAM, description, str(workers)],
        stderr=subprocess.PIPE,
        text=True,
    )


def owners(work: Path) -> dict[str, int]:
    """The processes that work on units."""
    found = {}
    with suppress(FileNotFoundError):  # not begun, or published
        for path in (work / "claims").glob("unit-*"):
            with suppress(FileNotFoundError, IndexError):  # finished, or being written
                found[path.name] = int(path.read_text().rsplit("-", 2)[1])
    return found


def write_and_expect(folder: Path, tokenizer: Path, n_documents: int) -> Corpus:
    """Prepares a corpus into `expected`; gives what would prepare it into `out`."""
    write_corpus(folder / "in", n_files=9, n_documents=n_documents)
    for name in ("expected", "out"):
        (folder / name).mkdir()
    corpus = describe_corpus(folder / "in", tokenizer, folder / "expected/c")
    prepare(corpus, unit_bytes=UNIT_BYTES)
    return corpus.model_copy(update={"output": str(folder / "out/c")})


def test_workers_killed_are_replaced(tmp_path: Path, tokenizer_folder: Path) -> None:
    killed = write_and_expect(tmp_path, tokenizer_folder, 2000)
    running = start_with_workers(killed.model_dump_json(), 3)
    choice = random.Random(2)
    n_killed = 0
    hit = set[str]()
    while running.poll() is None:
        time.sleep(choice.uniform(0.02, 0.1))
        claimed = owners(tmp_path / "out/c.work")
        if (new := sorted(set(claimed) - hit)) and n_killed < 6:  # three deaths end the run
            hit.add(unit := choice.choice(new))
            if claimed[unit] in children_of(running.pid):
                os.kill(claimed[unit], signal.SIGKILL)
                n_killed += 1
    _, error = running.communicate()
    assert running.returncode == 0, error
    assert "a worker was killed by SIGKILL; starting another" in error
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
    record = record_tokenizer(corpus, load_vocabulary(corpus.tokenizer))
    unit = plan_corpus(corpus, record, UNIT_BYTES).stages[0][1]
    running = start_with_workers(corpus.model_dump_json(), 2)
    while running.poll() is None:
        if owner := owners(tmp_path / "out/c.work").get(unit):
            with suppress(ProcessLookupError):
                os.kill(owner, signal.SIGKILL)
        time.sleep(0.0005)
    _, error = running.communicate()
    assert "3 workers died at unit-000001" in error, error
    assert "hint: out of memory is the usual reason: use fewer workers" in error
    assert not list((tmp_path / "out").glob("*.bin"))


def test_workers_end_when_the_one_that_started_them_is_killed(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    corpus = write_and_expect(tmp_path, tokenizer_folder, 1500)
    running = start_with_workers(corpus.model_dump_json(), 2)
    while not list((tmp_path / "out/c.work").glob("done/unit-*")):
        assert running.poll() is None
        time.sleep(0.01)
    workers = children_of(running.pid)
    running.kill()
    running.communicate()
    wait_until(lambda: not any(map(is_running, workers)))
    prepare(corpus, unit_bytes=UNIT_BYTES)
    assert read_all(tmp_path / "out") == read_all(tmp_path / "expected")
