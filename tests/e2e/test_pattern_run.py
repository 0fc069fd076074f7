"""A run on a pattern of token files resumes with the same files, to the last bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.command import trainyard
from tests.faults.small_run import differences, read_outcome, small_overrides

from trainyard.config.load import load_run
from trainyard.data.indexed import IndexedWriter

N_STEPS = 6


def write_part(folder: Path, number: int) -> None:
    random = np.random.default_rng(number)
    with IndexedWriter(folder / f"part_{number}_text_document", np.dtype(np.uint16)) as writer:
        for _ in range(20):
            writer.add_document(random.integers(0, 512, 150).astype(np.uint16))


def words(folder: Path, name: str, *more: str) -> list[str]:
    overrides = [
        text
        for text in small_overrides(folder / "x", N_STEPS)
        if not text.startswith(("data.blend", "data.split"))
    ]
    pattern = f"{folder}/part_*_text_document"
    blends = [
        f"data.train.prefixes=['{pattern}[:-1]']",
        f"data.valid.prefixes=['{pattern}[-1:]']",
    ]
    return ["train", "tiny", f"name={name}", *overrides, *blends, *more]


@pytest.mark.exhaustive
def test_a_file_added_later_changes_nothing(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        write_part(tmp_path, number)
    whole = trainyard(*words(tmp_path, "whole"), folder=tmp_path)
    assert whole.returncode == 0, whole.stderr
    part = ["train.stop_after_minutes=1e-9", "checkpoint.interval=1"]
    stopped = trainyard(*words(tmp_path, "small", *part), folder=tmp_path)
    assert stopped.returncode == 75, stopped.stderr
    kept = load_run(str(tmp_path / "runs/small/run.toml")).run.data
    assert kept.train.prefixes == tuple(f"{tmp_path}/part_{n}_text_document" for n in (1, 2))
    assert kept.train.patterns == (f"{tmp_path}/part_*_text_document[:-1]",)

    write_part(tmp_path, 11)
    resumed = trainyard(*words(tmp_path, "small"), folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    said = "data.train.prefixes: the patterns match 3 files now; the run keeps the 2 it started"
    assert said in resumed.stderr
    outcomes = [read_outcome(tmp_path / "runs" / name) for name in ("whole", "small")]
    assert not differences(*outcomes, but=["kept"])

    # Another pattern is another choice of files, and other files are another run.
    chosen = f"data.train.prefixes=['{tmp_path}/part_*_text_document[:3]']"
    last = f"data.valid.prefixes=['{tmp_path}/part_*_text_document[3:]']"
    other = trainyard(*words(tmp_path, "small", chosen, last), folder=tmp_path)
    assert other.returncode == 2
    assert "; data.train.prefixes: 2 files in the checkpoint, now 3" in other.stderr
    wrong = trainyard(*words(tmp_path, "new", chosen.replace("[:3]", "")), folder=tmp_path)
    assert wrong.returncode == 2
    assert "part_11_text_document is in data.train and in data.valid" in wrong.stderr
