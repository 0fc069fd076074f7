"""Pieces of work in a folder: nobody has one twice, and nobody's death loses one."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.waiting import WATCHDOG_SECONDS, prepare_fork

from trainyard.config.corpus import Corpus
from trainyard.corpus.preparation.plan import PreparationPlan, plan_corpus
from trainyard.corpus.preparation.work_folder import (
    WorkerState,
    WorkFolder,
    name_process,
    read_progress,
)
from trainyard.data.sidecar import TokenizerRecord
from trainyard.errors import MachineError

PIECES = ["unit-a", "unit-b", "unit-c"]
ME = name_process(os.getpid())
FAR = "gpu-a-1.cluster-7-99-1234"  # a process of another machine


def make(path: Path) -> WorkFolder:
    folder = WorkFolder(path, ME)
    folder.create(b"the plan")
    folder.join()
    return folder


def enter(path: Path, worker: str, stale_seconds: float = 60.0) -> WorkFolder:
    folder = WorkFolder(path, worker, stale_seconds)
    folder.join()
    return folder


def take_over(folder: WorkFolder, pieces: list[str] = PIECES) -> str | None:
    return folder.take_over(
        [piece for piece in pieces if piece in folder.list_names("claims")], str
    )


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """Another process of this machine."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    folder = make(tmp_path / "x.work")
    WorkFolder(folder.path, FAR).create(b"another plan")
    assert folder.read_plan() == b"the plan"
    assert [path.name for path in tmp_path.iterdir()] == ["x.work"]
    with pytest.raises(MachineError, match=r"none/x.work cannot be made: ") as caught:
        WorkFolder(Path("/proc/none/x.work"), ME).create(b"plan")
    assert "write to another folder" in caught.value.hint


def test_the_way_of_a_piece(tmp_path: Path) -> None:
    folder = make(tmp_path / "x.work")
    assert all(map(folder.claim, PIECES))
    assert folder.list_names("claims") == PIECES
    folder.finish(PIECES[0], b'{"a": 1}')
    assert (folder.path / "done" / PIECES[0]).read_bytes() == b'{"a": 1}'
    folder.release(PIECES[1])
    folder.stop(PIECES[2], b"why")
    assert (folder.path / "stopped" / PIECES[2]).read_bytes() == b"why"
    assert folder.list_names("claims") == []
    folder.clear()
    assert folder.list_names("stopped") == []
    assert not folder.claim(PIECES[0]), "it is done"
    assert folder.claim(PIECES[2])


def test_a_folder_that_went_away_is_noticed(tmp_path: Path) -> None:
    folder = make(tmp_path / "x.work")
    folder.claim(PIECES[0])
    enter(folder.path, FAR).remove()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        folder.claim(PIECES[1])
    with pytest.raises(MachineError, match="cannot be written: No such file"):
        folder.finish(PIECES[0], b"{}")
    folder.release(PIECES[0])  # is of no use any more, and no error
    folder.leave()
    folder.remove()
    assert not folder.is_joined()
    with pytest.raises(FileNotFoundError):
        folder.read_plan()


def test_a_folder_of_another_plan_keeps_its_pieces(tmp_path: Path) -> None:
    folder = make(tmp_path / "x.work")
    for piece in PIECES[:2]:
        (folder.parts / f"{piece}.bin").write_text(piece)
        folder.finish(piece, b"{}")
    assert WorkFolder(folder.path, FAR).replace_plan(b"new plan", [*PIECES[1:], "unit-d"]) == 1
    assert folder.read_plan() == b"new plan"
    assert [path.name for path in folder.parts.iterdir()] == [f"{PIECES[1]}.bin"]
    assert folder.list_names("done") == [PIECES[1]]


def race(path: Path, pieces: list[str], seed: int) -> list[str]:
    """Takes pieces until all are done, and gives every fifth back."""
    folder, order, taken = enter(path, name_process(os.getpid())), random.Random(seed), []
    for turn in itertools.count():
        claimed, done = set(folder.list_names("claims")), set(folder.list_names("done"))
        if len(done) == len(pieces):
            return taken
        free = [piece for piece in pieces if piece not in claimed | done][:40]
        if not free or not folder.claim(piece := order.choice(free)):
            continue
        taken.append(piece)
        if turn % 5 == 0:
            taken.append(f"back {piece}")
            folder.release(piece)
        else:
            folder.finish(piece, b"{}")


def test_racing_processes_never_get_the_same_piece(tmp_path: Path) -> None:
    pieces = [f"unit-{number:06d}" for number in range(300)]
    folder = make(tmp_path / "x.work")
    prepare_fork()
    fork = multiprocessing.get_context("fork")
    with fork.Pool(4, fork.Barrier(4).wait) as pool:
        runs = [(folder.path, pieces, seed) for seed in range(4)]
        shares = pool.starmap_async(race, runs, chunksize=1).get(WATCHDOG_SECONDS)
    taken = Counter(itertools.chain.from_iterable(shares))
    # Taken once more than it was given back, however many processes asked for it.
    assert [taken[piece] - taken[f"back {piece}"] for piece in pieces] == [1] * len(pieces)
    assert sum(len(share) > 0 for share in shares) > 1
    assert folder.list_names("done") == pieces
    assert folder.list_names("claims") == []


def test_a_dead_process_of_this_machine_loses_its_claim(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    folder = make(tmp_path / "x.work")
    theirs = enter(folder.path, name_process(other.pid))
    assert theirs.claim(PIECES[0]) and folder.claim(PIECES[1])
    assert take_over(folder) is None
    assert [alive for _, alive in folder.read_states().values()] == [True, True]
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert take_over(folder) == PIECES[0]  # its exit code is still there: a zombie is dead
    assert folder.list_names("scratch") == [ME]
    other.wait()
    assert take_over(folder) is None
    assert [alive for _, alive in folder.read_states().values()].count(False) == 1


def test_neither_a_dead_process_nor_another_of_its_number_keeps_a_claim(tmp_path: Path) -> None:
    folder = make(tmp_path / "x.work")
    machine, pid, start = ME.rsplit("-", 2)
    process = subprocess.Popen(["true"])
    process.wait()
    for worker in (f"{machine}-{pid}-{int(start) - 1}", name_process(process.pid)):
        for release in (folder.release_dead, folder.clear, lambda: take_over(folder)):
            enter(folder.path, worker).claim(PIECES[0])
            release()
            assert worker not in folder.list_names("scratch")
            assert folder.claim(PIECES[0]) or (folder.path / "claims/unit-a").read_text() == ME
            folder.release(PIECES[0])


def test_a_far_process_loses_its_claim_when_it_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    clock = SimpleNamespace(monotonic=lambda: now, time=time.time)
    monkeypatch.setattr("trainyard.corpus.preparation.work_folder.time", clock)
    folder = enter(make(tmp_path / "x.work").path, ME)
    far, state = enter(folder.path, FAR), WorkerState()
    far.claim(PIECES[0])
    assert take_over(folder) is None  # the first look says nothing
    for _ in range(3):
        now += 59.0
        far.beat(state)
        assert take_over(folder) is None
    assert folder.read_states()[FAR][1], "it is alive"
    folder.clear()
    assert folder.list_names("claims") == PIECES[:1], "it lives as far as another machine can tell"
    now += 61.0
    assert take_over(folder) == PIECES[0]
    assert (folder.path / "claims" / PIECES[0]).read_text() == ME


def test_a_claim_without_a_name_is_taken_over_after_a_while(tmp_path: Path) -> None:
    folder = WorkFolder(make(tmp_path / "x.work").path, ME, stale_seconds=0.0)
    (folder.path / "claims" / PIECES[0]).touch()  # killed before it was written, or a crash
    assert take_over(folder) is None
    assert take_over(folder) == PIECES[0]


def test_what_a_slow_process_finished_after_all_stays_finished(tmp_path: Path) -> None:
    folder = enter(make(tmp_path / "x.work").path, ME, stale_seconds=0.0)
    far = enter(folder.path, FAR)
    far.claim(PIECES[0])
    assert take_over(folder) is None
    assert take_over(folder) == PIECES[0]
    far.finish(PIECES[0], b"{}")
    assert not far.claim(PIECES[0])
    folder.finish(PIECES[0], b"{}")
    assert folder.list_names("done") == [PIECES[0]]
    assert folder.list_names("claims") == []


def test_a_claim_left_on_a_finished_piece_is_no_death(tmp_path: Path) -> None:
    folder = enter(make(tmp_path / "x.work").path, ME, stale_seconds=0.0)
    enter(folder.path, FAR).claim(PIECES[0])
    (folder.path / "done" / PIECES[0]).write_text("{}")  # killed just before the claim went
    assert [take_over(folder) for _ in range(2)] == [None, None]
    assert folder.list_names("deaths") == []
    assert not folder.claim(PIECES[0])


def test_a_piece_at_which_three_workers_died_is_named(tmp_path: Path) -> None:
    folder = enter(make(tmp_path / "x.work").path, ME, stale_seconds=0.0)
    for number in range(2):
        assert enter(folder.path, f"{FAR}{number}").claim(PIECES[0])
        take_over(folder)
        assert take_over(folder) == PIECES[0]
        folder.release(PIECES[0])
    enter(folder.path, FAR).claim(PIECES[0])
    take_over(folder)
    for _ in range(2):  # every process says so
        with pytest.raises(
            MachineError, match=rf"3 workers died at {PIECES[0]}, .* {FAR}\n"
        ) as died:
            take_over(folder)
    assert "out of memory is the usual reason" in died.value.hint
    folder.clear()
    assert take_over(folder) == PIECES[0]


@pytest.mark.parametrize("place", ["claims", "workers"])
def test_files_of_the_file_system_are_no_pieces(tmp_path: Path, place: str) -> None:
    folder = make(tmp_path / "x.work")
    (folder.path / place / ".nfs00000000012345").write_text("{}")
    folder.clear()
    assert folder.list_names("claims") == []
    assert list(folder.read_states()) == [ME]


@pytest.mark.parametrize("name", ["a b", "quo'te\"", "new\nline", "[x]*?", "漢", "@", "\udcff"])
def test_the_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path / f"{name}.work")
    folder.claim(PIECES[0])
    folder.finish(PIECES[0], b"{}")
    assert list(folder.read_states()) == [ME]
    folder.remove()
    left = tmp_path / f"{name}.work.done-{FAR}"  # killed in the middle
    left.mkdir()
    folder.sweep()
    assert list(tmp_path.iterdir()) == []


def plan(folder: Path) -> PreparationPlan:
    """A plan of three units of 10 bytes."""
    for name in "abc":
        (folder / f"{name}.txt").write_bytes(b"123456789\n")
    corpus = Corpus(inputs=(f"{folder}/*.txt",), output=str(folder / "x"), tokenizer="gpt2")
    return plan_corpus(corpus, TokenizerRecord("gpt2", "f", 50257, 50256, "text"), 10)


def test_progress_adds_up_workers(tmp_path: Path) -> None:
    folder, made, started = make(tmp_path / "x.work"), plan(tmp_path), time.time() - 10
    units = made.stages[0]
    folder.claim(units[0])
    state = WorkerState(piece=units[0], piece_bytes=10, documents=3, tokens=9, started=started)
    folder.beat(state)
    folder.finish(units[0], b"{}")  # whose bytes count once
    folder.stop(units[1], b"why")
    far = WorkerState(piece=units[2], piece_bytes=1, finished_bytes=4, documents=2, started=started)
    enter(folder.path, FAR).beat(far)
    dead = f"{ME.rsplit('-', 1)[0]}-1"
    enter(folder.path, dead).beat(WorkerState(piece_bytes=4, documents=1, started=started))
    progress = read_progress(folder, made)
    assert progress is not None
    assert (progress.done_bytes, progress.total_bytes) == (10 + 1, 30)
    assert (progress.units_done, progress.units) == (1, 3)
    assert (progress.documents, progress.tokens) == (6, 9)
    assert progress.stopped == ["unit-000001"]
    alive = {name: state.piece for name, (state, is_alive) in progress.workers.items() if is_alive}
    assert alive == {ME: "unit-000000", FAR: "unit-000002"}
    assert progress.bytes_per_second == pytest.approx(1.5, rel=0.2)
    assert progress.seconds_left == pytest.approx(19 / 1.5, rel=0.2)
