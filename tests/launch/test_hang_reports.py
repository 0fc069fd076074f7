"""Of many ranks that stand still, the one is named for which the others wait."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.ranks import call_in_forks

from trainyard.launch import supervise
from trainyard.launch.environment import Process
from trainyard.launch.supervise import (
    HangReports,
    RankStatus,
    describe_hang,
    describe_stack,
    find_culprits,
    name_ranks,
)

IN_COLLECTIVE = """Thread 0x00007f0000000001 (most recent call first):
  File "/x/trainyard/launch/local.py", line 268 in wait_for_end
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f0000000002 (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3017 in all_reduce
  File "/x/trainyard/training/step.py", line 70 in train_step
"""
IN_REGEX = """Thread 0x00007f0000000001 (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3017 in all_reduce

Thread 0x00007f0000000002 (most recent call first):
  File "/usr/lib/python3.11/re/__init__.py", line 166 in match
  File "/x/trainyard/data/loader.py", line 61 in batch
"""
SAVING = """Thread 0x00007f0000000003 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/x/trainyard/checkpoint/save.py", line 121 in save_checkpoint

Thread 0x00007f0000000002 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 1119 in join
  File "/x/trainyard/checkpoint/background.py", line 231 in _join
"""
STUCK_SAVING = SAVING.replace("/x/torch/distributed/distributed_c10d.py", "/x/shard.py")
WAITING = RankStatus(
    *(0, "n1", 12, "forward and backward", 41, 3.2, "waiting"),
    has_ended=False,
    has_failed=False,
    stack=IN_COLLECTIVE,
)
DONE = replace(WAITING, state="ended with code 0", count=30, has_ended=True)


def ranks(**changes: RankStatus) -> list[RankStatus]:
    """Four that wait, but for those that are given as `r2=...`."""
    return [replace(changes.get(f"r{rank}", WAITING), rank=rank) for rank in range(4)]


@pytest.mark.parametrize(
    ("culprit", "others"),
    [
        (replace(WAITING, state="stopped", stack="", count=50), replace(WAITING, count=40)),
        (replace(WAITING, count=40), WAITING),
        (replace(WAITING, count=40), replace(WAITING, stack=IN_REGEX)),
        (replace(WAITING, stack=IN_REGEX), WAITING),
        (replace(WAITING, stack=IN_REGEX), replace(WAITING, state="running")),
        (replace(WAITING, state="running"), WAITING),
        (replace(WAITING, state="running", stack=""), replace(WAITING, stack="")),
        (replace(DONE, has_failed=True), replace(WAITING, state="stopped")),
        (replace(WAITING, stack=IN_REGEX), DONE),
        (replace(WAITING, stack=STUCK_SAVING), replace(WAITING, stack=SAVING)),
    ],
)
def test_who_is_to_blame(culprit: RankStatus, others: RankStatus) -> None:
    seen = ranks(r0=others, r1=others, r2=culprit, r3=others)
    assert find_culprits(seen) == [seen[2]]


def test_one_line_for_each() -> None:
    seen = ranks(r2=replace(WAITING, state="stopped", host="n2"))
    assert describe_hang(seen, 4) == (
        "rank 2 of 4 on n2 has not moved for 3 s (stopped) at step 12, in forward and backward\n"
        "    rank 0 on n1: step 12, forward and backward for 3 s, waiting\n"
        "    rank 1 on n1: step 12, forward and backward for 3 s, waiting\n"
        "    rank 2 on n2: step 12, forward and backward for 3 s, stopped\n"
        "    rank 3 on n1: step 12, forward and backward for 3 s, waiting"
    )
    dead = replace(WAITING, state="was ended by SIGKILL", has_ended=True, has_failed=True)
    assert describe_hang(ranks(r1=dead), 4).startswith(
        "rank 1 of 4 on n1 was ended by SIGKILL at step 12, in forward and backward\n"
    )


def test_nobody_stands_out() -> None:
    says = describe_hang(ranks(), 4)
    assert says.startswith("ranks 0-3 of 4 are hung; cause not isolated\n")


def test_a_machine_is_silent() -> None:
    says = describe_hang(ranks(), 8)
    assert says.startswith("no status from ranks 4-7 of 8, and the others wait\n")
    assert says.endswith("\n    no status from ranks 4-7")
    # The one that is known to be wrong comes first.
    one = describe_hang(ranks(r3=replace(WAITING, state="stopped")), 5)
    assert one.startswith("rank 3 of 5 on n1 has not moved")


def test_stacks() -> None:
    assert describe_stack(WAITING).startswith("rank 0 is in (innermost call first):\n    Thread 0x")
    stopped = replace(WAITING, state="stopped", stack="")
    assert describe_stack(stopped) == "rank 0 is stopped: no stack available"
    deaf = replace(WAITING, stack="")
    assert describe_stack(deaf) == "rank 0 does not respond: no stack available"


def test_names_of_ranks() -> None:
    assert [name_ranks(of) for of in ([3], [0, 1, 2, 7], [0, 2])] == [
        "rank 3",
        "ranks 0-2, 7",
        "ranks 0, 2",
    ]


def test_what_is_told_is_heard(tmp_path: Path) -> None:
    one, other = HangReports(tmp_path / "attempt-0"), HangReports(tmp_path / "attempt-0")
    assert other.find() == {}
    one.write([WAITING])
    assert other.find() == {0: "hang"}
    own = replace(WAITING, rank=2)
    other.write([own])
    assert one.find() == {0: "hang", 2: "hang"}
    assert other.read([own], 2, 0.0) == [WAITING, own]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (WAITING, "hang"),
        (DONE, "ended"),
        (replace(DONE, has_failed=True, state="was ended by SIGKILL"), "failed"),
        (replace(DONE, has_failed=True, state="was ended by SIGABRT"), "aborted"),
    ],
)
def test_the_name_of_a_report_says_what_happened(
    tmp_path: Path, status: RankStatus, kind: str
) -> None:
    HangReports(tmp_path).write([status])
    assert [path.name for path in tmp_path.iterdir()] == [f"rank-00000.{kind}.json"]


def test_what_an_earlier_job_told_is_not_heard(tmp_path: Path) -> None:
    earlier = HangReports(tmp_path)
    earlier.write(ranks())
    earlier.decide("rank 3 hangs")
    now = HangReports(tmp_path)
    assert (now.find(), now.verdict()) == ({}, "")
    now.write([WAITING])
    assert now.find() == {0: "hang"}
    now.decide("rank 3 hangs")
    assert now.verdict() == "rank 3 hangs"
    (tmp_path / "verdict.txt").write_bytes(b"rank 3 \xff")  # damaged: this parent goes on
    assert now.verdict() == "rank 3 \ufffd"


def test_no_report_is_missed_however_soon_it_comes(tmp_path: Path) -> None:
    """Looks between which the folder's time of change may stay the same."""
    one, other = HangReports(tmp_path), HangReports(tmp_path)
    for rank in range(40):
        one.write([replace(WAITING, rank=rank)])
        assert len(other.find()) == rank + 1


def test_one_parent_opens_all_reports_and_the_others_one_file(tmp_path: Path) -> None:
    n_ranks, folder = 100, tmp_path / "attempt-0"
    everyone = [replace(WAITING, rank=rank) for rank in range(n_ranks)]
    everyone[70] = replace(everyone[70], state="stopped")
    leader, follower = HangReports(folder), HangReports(folder)
    HangReports(folder).write(everyone)

    def count(_rank: int) -> list[list[str]]:
        opened: list[str] = []

        def note(event: str, arguments: tuple[object, ...]) -> None:
            if event in ("open", "os.scandir") and str(arguments[0]).startswith(str(folder)):
                opened.append(Path(str(arguments[0])).name)

        sys.addaudithook(note)  # for as long as this process lives
        seen = leader.read([], n_ranks, 0.0)
        assert seen == everyone
        by_leader = [*opened]
        leader.decide(describe_hang(seen, n_ranks).partition("\n")[0])
        opened.clear()
        assert follower.find().keys() == set(range(n_ranks))
        assert follower.verdict().startswith("rank 70 of 100 on n1 has not moved")
        return [by_leader, opened]

    ((by_leader, by_follower),) = call_in_forks(1, count)
    reports = sorted(name for name in by_leader if name != folder.name)
    assert reports == [f"rank-{rank:05d}.hang.json" for rank in range(n_ranks)]
    assert len(by_leader) < n_ranks + 5
    assert by_follower == [folder.name, folder.name, "verdict.txt"]


def test_the_next_parent_decides_where_the_first_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0's parent is stopped or gone; those of 1 and 2 name it, and one of them decides."""
    monkeypatch.setattr(supervise, "REPORT_SECONDS", 0.1)
    monkeypatch.setattr(supervise, "look_at", lambda own: [replace(WAITING, rank=own[0])])
    job = supervise.SupervisedJob(Process(n_ranks=3), 3, tmp_path, lambda _: [])
    logs = tmp_path / "logs"
    of_1, of_2 = HangReports(logs), HangReports(logs)
    HangReports(logs).write([replace(WAITING, rank=2)])
    title = "no status from rank 0 of 3, and the others wait"
    ranks: Any = ([1], [2])
    supervise._Attempt(job, ranks[0], of_1, [])._report_hang()
    assert title + "\n    rank 1 on n1" in caplog.text
    assert of_2.verdict() == title
    caplog.clear()
    supervise._Attempt(job, ranks[1], of_2, [])._report_hang()
    assert caplog.messages[-1] == title


def test_an_unchanged_folder_is_not_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports of an earlier job stay, and every parent looks for new ones as long as it trains."""
    HangReports(tmp_path).write(ranks())
    now = HangReports(tmp_path)
    looks = iter(range(0, 10**6, 60))  # a minute apart
    monkeypatch.setattr(supervise, "time", SimpleNamespace(monotonic=lambda: next(looks)))
    listed: list[str] = []
    scandir = os.scandir

    @contextmanager
    def list_entries(folder: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        with scandir(folder) as entries:
            yield (listed.append(entry.name) or entry for entry in entries)

    monkeypatch.setattr("os.scandir", list_entries)
    for _ in range(9):
        assert now.find() == {}
    assert len(listed) == 2 * len(ranks())
    now.write([replace(WAITING, rank=7)])
    assert now.find() == {7: "hang"}


def test_what_cannot_be_read_or_written_is_left_out(tmp_path: Path) -> None:
    hang_reports = HangReports(tmp_path / "logs")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-00001.hang.json").write_text("{")
    (tmp_path / "logs" / "rank-00002.hang.json").write_text(
        json.dumps(asdict(WAITING) | {"more": 1})
    )
    (tmp_path / "logs" / "rank-00003.hang.json").mkdir()
    (tmp_path / "logs" / "rank-00004.hang.json.partial").write_text("")
    assert hang_reports.read([], 4, 0.0) == []
    HangReports(tmp_path / "logs" / "rank-00001.hang.json").write([WAITING])
