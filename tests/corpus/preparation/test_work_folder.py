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

from trainyard.corpus.preparation.progress import read_progress
from trainyard.corpus.preparation.work_folder import Claim, WorkerState, WorkFolder, name_process
from trainyard.errors import MachineError

PIECES = ["unit-000000", "unit-000001", "unit-000002"]
ME = name_process(os.getpid())
FAR = "elsewhere-77-123"  # a process of another machine


def make(path: Path, pieces: list[str] = PIECES) -> WorkFolder:
    WorkFolder.create(path, "the plan", pieces, ME)
    return enter(path, ME)


def enter(path: Path, worker: str, stale_seconds: float = 60.0) -> WorkFolder:
    folder = WorkFolder(path, worker, stale_seconds)
    folder.join()
    return folder


def take(folder: WorkFolder) -> Claim:
    claim = folder.claim(folder.names("todo")[0])
    assert claim is not None
    return claim


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """Another process of this machine."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    folder = make(tmp_path / "x.work")
    assert folder.read_plan() == b"the plan"
    assert folder.names("todo") == [f"{piece}.0" for piece in PIECES]
    assert [path.name for path in tmp_path.iterdir()] == ["x.work"]
    WorkFolder.create(tmp_path / "x.work", "another plan", ["other"], "w-1-1")
    assert folder.read_plan() == b"the plan"
    assert [path.name for path in tmp_path.iterdir()] == ["x.work"]
    with pytest.raises(MachineError, match=r"none/x.work cannot be made: ") as caught:
        WorkFolder.create(Path("/proc/none/x.work"), "plan", PIECES, ME)
    assert "write to another folder" in caught.value.hint


def test_the_way_of_a_piece(tmp_path: Path) -> None:
    folder = make(tmp_path / "x.work")
    claim = take(folder)
    assert (claim.piece, claim.attempt) == (PIECES[0], 0)
    assert folder.names("claimed") == [f"{PIECES[0]}.0@{ME}"]
    assert take(folder).piece == PIECES[1]
    folder.finish(claim, b'{"a": 1}')
    assert (folder.path / "done" / PIECES[0]).read_bytes() == b'{"a": 1}'
    folder.release(take(folder))
    assert folder.names("todo") == [f"{PIECES[2]}.0"]
    folder.stop(take(folder), b"why")
    assert (folder.path / "stopped" / PIECES[2]).read_bytes() == b"why"
    assert folder.names("claimed") == [f"{PIECES[1]}.0@{ME}"]
    assert folder.names("todo") == []
    folder.retry_stopped()
    assert folder.names("stopped") == []
    assert take(folder).piece == PIECES[2]


def test_names_that_others_took_are_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "x.work")
    names = folder.names("todo")
    assert take(enter(folder.path, FAR)).piece == PIECES[0]
    assert folder.claim(names[0]) is None
    claim = folder.claim(names[1])
    assert claim is not None and claim.piece == PIECES[1]


def test_a_folder_that_went_away_is_noticed(tmp_path: Path) -> None:
    folder = make(tmp_path / "x.work")
    names, claim = folder.names("todo"), take(folder)
    enter(folder.path, FAR).remove()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        folder.claim(names[0])
    folder.release(claim)  # is of no use any more, and no error
    folder.leave()
    folder.remove()
    with pytest.raises(FileNotFoundError):
        folder.read_plan()


def test_a_folder_of_another_plan_keeps_pieces_and_loses_its_processes(tmp_path: Path) -> None:
    folder = make(tmp_path / "x.work")
    (folder.parts / f"{PIECES[0]}.bin").write_text("made")
    folder.finish(take(folder), b"{}")
    folder.stop(take(folder), b"why")
    new = WorkFolder(folder.path, FAR)
    for name in ("new plan", "new plan"):  # the second time another process was faster
        new.renew(name, PIECES, lambda _: {PIECES[0]: PIECES[1]})
    assert folder.read_plan() == b"new plan"
    assert (folder.parts / f"{PIECES[1]}.bin").read_text() == "made"
    assert folder.names("done") == [PIECES[1]]
    assert folder.names("todo") == [f"{PIECES[0]}.0", f"{PIECES[2]}.0"]
    assert not folder.is_joined()
    with pytest.raises(MachineError, match="cannot be written: No such file"):
        folder.finish(take(folder), b"{}")


def race(path: Path, seed: int) -> list[str]:
    """Takes pieces until there are none, and gives every fifth back."""
    folder, order, taken = enter(path, name_process(os.getpid())), random.Random(seed), []
    for turn in itertools.count():
        names = folder.names("todo")[:40]
        if not names:
            return taken
        claim = folder.claim(order.choice(names))
        if claim is None:
            continue
        taken.append(claim.piece)
        if turn % 5 == 0:
            taken.append(f"back {claim.piece}")
            folder.release(claim)
        else:
            folder.finish(claim, b"{}")


def test_racing_processes_never_get_the_same_piece(tmp_path: Path) -> None:
    pieces = [f"unit-{number:06d}" for number in range(2000)]
    folder = make(tmp_path / "x.work", pieces)
    prepare_fork()
    fork = multiprocessing.get_context("fork")
    with fork.Pool(4, fork.Barrier(4).wait) as pool:
        runs = [(folder.path, seed) for seed in range(4)]
        shares = pool.starmap_async(race, runs, chunksize=1).get(WATCHDOG_SECONDS)
    taken = Counter(itertools.chain.from_iterable(shares))
    # Taken once more than it was given back, however many processes asked for it.
    assert [taken[piece] - taken[f"back {piece}"] for piece in pieces] == [1] * len(pieces)
    assert sum(len(share) > 0 for share in shares) > 1
    assert folder.names("done") == pieces
    assert folder.names("todo") == folder.names("claimed") == []


def test_a_dead_process_of_this_machine_loses_its_claim(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    folder = make(tmp_path / "x.work")
    theirs = enter(folder.path, name_process(other.pid))
    take(theirs), take(folder)
    folder.take_back()
    assert len(folder.names("claimed")) == 2
    assert [alive for _, alive in folder.read_states().values()] == [True, True]
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    folder.take_back()  # its exit code is still there: a zombie is dead
    assert folder.names("todo") == [f"{PIECES[0]}.1", f"{PIECES[2]}.0"]
    assert folder.names("claimed") == [f"{PIECES[1]}.0@{ME}"]
    other.wait()
    assert [alive for _, alive in folder.read_states().values()].count(False) == 1


def test_neither_a_dead_process_nor_another_of_its_number_keeps_a_claim(tmp_path: Path) -> None:
    folder = make(tmp_path / "x.work")
    machine, pid, start = ME.rsplit("-", 2)
    process = subprocess.Popen(["true"])
    process.wait()
    for worker in (f"{machine}-{pid}-{int(start) - 1}", name_process(process.pid)):
        take(enter(folder.path, worker))
        folder.take_back()
        assert folder.names("claimed") == []


def test_a_far_process_loses_its_claim_when_it_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    clock = SimpleNamespace(monotonic=lambda: now, time=time.time)
    monkeypatch.setattr("trainyard.corpus.preparation.work_folder.time", clock)
    folder = enter(make(tmp_path / "x.work").path, ME)
    far, state = enter(folder.path, FAR), WorkerState()
    take(far)
    folder.take_back()  # the first look says nothing
    for _ in range(3):
        now += 59.0
        far.beat(state)
        folder.take_back()
    assert folder.names("claimed") == [f"{PIECES[0]}.0@{FAR}"]
    assert folder.read_states()[FAR][0].beat == 3
    now += 61.0
    folder.take_back()
    assert folder.names("todo")[0] == f"{PIECES[0]}.1"
    far.release(Claim(PIECES[0], 0, folder.path / "claimed" / f"{PIECES[0]}.0@{FAR}"))
    assert folder.names("todo")[:2] == [f"{PIECES[0]}.1", f"{PIECES[1]}.0"]


def test_what_a_slow_process_finished_after_all_stays_finished(tmp_path: Path) -> None:
    folder = WorkFolder(make(tmp_path / "x.work").path, ME, stale_seconds=0.0)
    far = enter(folder.path, FAR)
    claim = take(far)
    folder.take_back()
    folder.take_back()
    mine = take(folder)
    assert (mine.piece, mine.attempt) == (claim.piece, 1)
    far.finish(claim, b"{}")
    folder.finish(mine, b"{}")
    assert folder.names("done") == [PIECES[0]]
    assert folder.names("claimed") == []


def test_a_claim_left_on_a_finished_piece_is_dropped(tmp_path: Path) -> None:
    folder = make(tmp_path / "x.work")
    far = enter(folder.path, FAR)
    claim = take(far)
    (folder.path / "done" / claim.piece).write_text("{}")  # killed just before the claim went
    folder.take_back(FAR)
    assert folder.names("claimed") == []
    assert folder.names("todo") == [f"{piece}.0" for piece in PIECES[1:]]


def test_a_piece_at_which_three_workers_died_is_named(tmp_path: Path) -> None:
    folder = make(tmp_path / "x.work", PIECES[:1])
    for attempt in range(2):
        assert take(enter(folder.path, FAR)).attempt == attempt
        folder.take_back(FAR)
    take(enter(folder.path, FAR))
    with pytest.raises(MachineError, match=f"3 workers died at {PIECES[0]}, .* {FAR}") as caught:
        folder.take_back(FAR)
    assert "out of memory is the usual reason" in caught.value.hint
    folder.forgive()
    assert take(folder).attempt == 0


def test_a_worker_that_was_ended_is_no_attempt(tmp_path: Path) -> None:
    folder = make(tmp_path / "x.work")
    take(enter(folder.path, FAR))
    folder.take_back(FAR, count=False)
    assert folder.names("todo")[0] == f"{PIECES[0]}.0"


def test_a_piece_finished_during_the_look_is_no_third_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "x.work", PIECES[:1])
    (folder.path / f"todo/{PIECES[0]}.0").rename(folder.path / f"todo/{PIECES[0]}.2")
    far = enter(folder.path, FAR)
    claim = take(far)

    def is_alive(worker: str) -> bool:
        far.finish(claim, b"{}")
        return False

    monkeypatch.setattr(folder, "_is_alive", is_alive)
    folder.take_back()


@pytest.mark.parametrize("place", ["claimed", "workers"])
def test_files_of_the_file_system_are_no_pieces(tmp_path: Path, place: str) -> None:
    folder = make(tmp_path / "x.work")
    (folder.path / place / ".nfs00000000012345").write_text("{}")
    folder.take_back()
    assert list(folder.read_states()) == [ME]


@pytest.mark.parametrize("name", ["a b", "quo'te\"", "new\nline", "[x]*?", "漢", "@", "\udcff"])
def test_the_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path / f"{name}.work")
    claim = take(folder)
    folder.finish(claim, b"{}")
    take(folder)
    folder.take_back(ME)
    assert folder.names("todo") == [f"{PIECES[1]}.1", f"{PIECES[2]}.0"]
    assert list(folder.read_states()) == [ME]
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_machine_with_hyphens_in_its_name(tmp_path: Path) -> None:
    folder = WorkFolder(make(tmp_path / "x.work").path, ME, stale_seconds=0.0)
    take(enter(folder.path, "gpu-a-1.cluster-7-99-1234"))
    folder.take_back()
    assert len(folder.names("claimed")) == 1
    folder.take_back()
    assert folder.names("claimed") == []


def test_progress_counts_no_byte_twice(tmp_path: Path) -> None:
    folder = make(tmp_path / "x.work")
    claim = take(folder)
    folder.beat(WorkerState(piece=claim.piece, piece_bytes=10, started=time.time()))
    folder.finish(claim, b"{}")
    progress = read_progress(folder, [10, 10, 10])
    assert progress is not None
    assert (progress.done_bytes, progress.total_bytes, progress.units_done) == (10, 30, 1)


def test_progress_adds_up_workers(tmp_path: Path) -> None:
    folder = make(tmp_path / "x.work")
    claim, started = take(folder), time.time() - 10
    folder.finish(claim, b"{}")
    folder.stop(take(folder), b"why")
    state = WorkerState(piece_bytes=5, finished_bytes=10, documents=3, tokens=9, started=started)
    folder.beat(state)
    enter(folder.path, FAR).beat(WorkerState(piece_bytes=1, documents=2, started=started))
    dead = f"{ME.rsplit('-', 1)[0]}-1"
    enter(folder.path, dead).beat(WorkerState(piece_bytes=4, documents=1, started=started))
    progress = read_progress(folder, [10, 10, 10])
    assert progress is not None
    assert (progress.done_bytes, progress.units_done, progress.units) == (16, 1, 3)
    assert (progress.documents, progress.tokens) == (6, 9)
    assert progress.stopped == [PIECES[1]]
    assert {name for name, (_, alive) in progress.workers.items() if alive} == {ME, FAR}
    assert progress.bytes_per_second == pytest.approx(1.6, rel=0.2)
    assert progress.seconds_left == pytest.approx(14 / 1.6, rel=0.2)
