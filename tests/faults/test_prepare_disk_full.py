"""A disk that is full at any stage: one message, nothing half-written, and a resume that works."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainyard.corpus.preparation.prepare import prepare
from trainyard.errors import MachineError

from .conftest import describe_corpus, read_all, write_corpus

pytestmark = pytest.mark.exhaustive

UNIT_BYTES = 100_000
FINAL_NAMES = ("*.bin", "*.idx", "*.json")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 8 MiB until it is given another size."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize(("workers", "growth"), [(1, 60_000), (2, 120_000)])
def test_the_disk_fills_up_at_every_stage(
    disk: Path, tmp_path: Path, tokenizer_folder: Path, workers: int, growth: int
) -> None:
    write_corpus(tmp_path / "in")
    (tmp_path / "expected").mkdir()
    expected = describe_corpus(tmp_path / "in", tokenizer_folder, tmp_path / "expected/c")
    prepare(expected, unit_bytes=UNIT_BYTES)
    corpus = describe_corpus(tmp_path / "in", tokenizer_folder, disk / "c")
    prepare(corpus, unit_bytes=UNIT_BYTES)
    assert read_all(disk) == read_all(tmp_path / "expected")
    result_bytes = shutil.disk_usage(disk).used
    for path in disk.iterdir():
        path.unlink()

    # From a disk that cannot hold the first part to one that cannot hold the last join. The disk
    # grows by a little after each failure, and what was done stays done.
    failures = []
    size = 40_000
    while True:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)
        try:
            prepare(corpus, workers=workers, unit_bytes=UNIT_BYTES)
        except MachineError as error:
            assert "No space left on device" in error.problem
            assert "then run the same command again" in error.hint or "free space" in error.hint
            failures.append(
                sorted((disk / "c.work/done").glob("*")) if (disk / "c.work").exists() else []
            )
            for pattern in FINAL_NAMES:
                for path in disk.glob(pattern):
                    # An output may be finished before another one fails: then it is whole.
                    assert path.read_bytes() == (tmp_path / "expected" / path.name).read_bytes()
            assert not list(disk.glob("**/*.partial"))
            size += growth  # to start two processes at each size takes a second
        else:
            break
    assert read_all(disk) == read_all(tmp_path / "expected")
    n_done = [len(done) for done in failures]
    assert n_done == sorted(n_done)
    assert n_done[0] == 0
    assert n_done[-1] >= 6, "no failure came as late as the joins"
    assert size > result_bytes
