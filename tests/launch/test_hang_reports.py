"""Of many ranks that stand still, the one is named for which the others wait."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

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
    assert other.read() == []
    one.write([WAITING])
    assert other.read() == [WAITING]
    other.write([replace(WAITING, rank=2)])
    assert [seen.rank for seen in one.read()] == [0, 2]


def test_what_an_earlier_job_told_is_not_heard(tmp_path: Path) -> None:
    HangReports(tmp_path).write(ranks())
    now = HangReports(tmp_path)
    assert now.read() == []
    now.write([WAITING])
    assert now.read() == [WAITING]


def test_each_report_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def read_text(path: Path, encoding: str = "utf-8") -> str:
        opened.append(path.name)
        return path.read_bytes().decode(encoding)

    monkeypatch.setattr(Path, "read_text", read_text)
    one, other = HangReports(tmp_path), HangReports(tmp_path)
    one.write([WAITING, replace(WAITING, rank=2)])
    for _ in range(3):
        assert [seen.rank for seen in other.read()] == [0, 2]
    assert sorted(opened) == ["rank-00000.json", "rank-00002.json"]
    one.write([replace(WAITING, rank=2, step=13)])
    assert [seen.step for seen in other.read()] == [WAITING.step, 13]
    assert opened[2:] == ["rank-00002.json"]


def test_what_cannot_be_read_or_written_is_left_out(tmp_path: Path) -> None:
    hang_reports = HangReports(tmp_path / "logs")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-00001.json").write_text("{")
    (tmp_path / "logs" / "rank-00002.json").write_text(json.dumps(asdict(WAITING) | {"more": 1}))
    (tmp_path / "logs" / "rank-00003.json").mkdir()
    assert hang_reports.read() == []
    HangReports(tmp_path / "logs" / "rank-00001.json").write([WAITING])
