"""What this machine has no room for does not start, and nothing is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.command import trainyard

from trainyard.config.load import load_run
from trainyard.plan import room
from trainyard.plan.memory import busiest_memory
from trainyard.plan.resolve import resolve
from trainyard.plan.room import free_memory_bytes

LARGE = ["train.micro_batch_size=4194304", "train.global_batch_size=4194304", "precision.kind=fp32"]
MANY = ["train.length=10M steps", "checkpoint.interval=1", "checkpoint.keep_last=10000000"]


@pytest.mark.parametrize(
    ("changes", "problem", "hint"),
    [
        (
            LARGE,
            r"tiny does not fit in memory: a rank needs about .* TiB",
            "train.micro_batch_size=",
        ),
        (
            MANY,
            r"tiny keeps up to 10000000 checkpoints of .* more, and ",
            "checkpoint.keep_last=1, or",
        ),
    ],
)
def test_a_run_without_room_does_not_start(
    tmp_path: Path, changes: list[str], problem: str, hint: str
) -> None:
    done = trainyard("train", "tiny", *changes, folder=tmp_path)
    assert done.returncode == 2
    assert re.search(problem, done.stderr)
    assert f"hint: {hint}" in done.stderr
    assert list(tmp_path.iterdir()) == []
    forced = trainyard("train", "tiny", *changes, "--force", folder=tmp_path)
    assert "needs training data" in forced.stderr or "prefixes" in forced.stderr, forced.stderr


def test_all_ranks_of_a_machine_share_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load_run("tiny").run
    needed = busiest_memory(run, resolve(run, 1), on_gpu=False).peak_bytes
    monkeypatch.setattr(room, "free_memory_bytes", lambda: needed * 3 // 2)
    two = trainyard("train", "tiny", "--ranks", "2", folder=tmp_path)
    assert "tiny does not fit in memory: 2 ranks need about" in two.stderr
    assert "does not fit" not in trainyard("train", "tiny", folder=tmp_path).stderr


def test_the_least_of_what_a_machine_and_a_job_have(tmp_path: Path) -> None:
    assert free_memory_bytes(tmp_path) is None
    for name, text in {
        "proc/meminfo": "MemTotal:  9 kB\nMemAvailable:   2048 kB\n",
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": "max\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory_bytes(tmp_path) == 2**21
    (tmp_path / "sys/fs/cgroup/job/memory.max").write_text("1000000\n")
    assert free_memory_bytes(tmp_path) == 1_000_000


def test_a_gpu_has_what_its_driver_leaves() -> None:
    assert room.gpu_bytes("NVIDIA A100-SXM4-80GB") == int(0.98 * 80 * 2**30)
    assert room.gpu_bytes("some other") is None
