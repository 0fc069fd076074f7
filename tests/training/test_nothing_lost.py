"""What is on the disk stays there: damaged, moved or linked checkpoints, and a new beginning."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.conftest import flip_bit
from tests.command import trainyard

from trainyard.checkpoint.format import list_checkpoints
from trainyard.config.load import render_run
from trainyard.config.run import Run
from trainyard.errors import CheckpointError
from trainyard.training.state import State
from trainyard.training.stop import DONE

from .conftest import lines_of, start, with_fields
from .test_stop_and_guard import plant_spike, spiking_run


def tree_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def cut_short(path: Path) -> None:
    os.truncate(path / "model-00000-of-00001.safetensors", 1000)


def flip(path: Path) -> None:
    manifest = bytearray((path / "manifest.json").read_bytes())
    manifest[len(manifest) // 2] ^= 1
    (path / "manifest.json").write_bytes(manifest)


NONE_INTACT = r"none of the 2 checkpoints in .* is intact"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "has 1000 bytes instead of": (cut_short, NONE_INTACT),
    "optimizer-00000-of-00001.safetensors is missing": (
        lambda path: (path / "optimizer-00000-of-00001.safetensors").unlink(),
        NONE_INTACT,
    ),
    "manifest.json is damaged": (flip, NONE_INTACT),
    "it has no manifest.json": (lambda path: (path / "manifest.json").unlink(), NONE_INTACT),
    "checksum": (
        lambda path: flip_bit(path / "model-00000-of-00001.safetensors"),
        r"no checkpoint in .* can be used; last ",
    ),
}


@pytest.mark.parametrize("said", DAMAGES)
def test_damaged_checkpoints_do_not_start_the_run_over(
    tiny_run: Run, copied: Path, said: str
) -> None:
    damage, problem = DAMAGES[said]
    for path in list_checkpoints(copied / "checkpoints"):
        damage(path)
    before = tree_of(copied / "checkpoints")
    for resume in ("auto", "must"):
        with pytest.raises(CheckpointError, match=problem) as e:
            start(copied, with_fields(tiny_run, checkpoint={"interval": 6}), resume)
        assert said in e.value.problem
        assert "from a copy" in e.value.hint or said == "checksum"
    assert tree_of(copied / "checkpoints") == before


@pytest.mark.parametrize("spike", [27, 29])
def test_a_rollback_in_the_last_stretch_goes_on_to_the_end(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spike: int
) -> None:
    # The last line of the log settles what came since the one before.
    run = with_fields(spiking_run(tiny_run, "rollback"), log={"interval": 7})
    plant_spike(monkeypatch, spike, {0})
    assert start(tmp_path, run) == DONE
    assert json.loads((tmp_path / "outcome.json").read_text())["step"] == 30
    assert list_checkpoints(tmp_path / "checkpoints")[0].name == "step-00000030"


def test_a_checkpoint_moved_to_another_disk_stays_there(tiny_run: Run, tmp_path: Path) -> None:
    run = with_fields(tiny_run, checkpoint={"interval": 4, "keep_last": 1})
    other = tmp_path / "other disk"
    start(tmp_path / "run", run)
    folder = tmp_path / "run" / "checkpoints"
    shutil.move(folder / "step-00000012", other)
    for name in ("step-00000012", "step-00000008"):  # one to go on from, one that need not stay
        (folder / name).symlink_to(other)
    moved = tree_of(other)
    assert start(tmp_path / "run", run) == DONE
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000012"]
    assert tree_of(other) == moved
    other.rename(tmp_path / "taken out")
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        start(tmp_path / "run", run)


def test_checkpoints_on_another_disk(tiny_run: Run, tmp_path: Path) -> None:
    (tmp_path / "other disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "other disk")
    run = with_fields(tiny_run, checkpoint={"interval": 4, "keep_last": 1})
    assert start(tmp_path / "run", run) == DONE
    assert start(tmp_path / "run", run, "overwrite") == DONE
    assert [path.name for path in (tmp_path / "other disk").iterdir()] == ["step-00000012"]


def test_overwriting_begins_again_and_only_where_the_new_run_can(
    tiny_run: Run, copied: Path
) -> None:
    (copied / "notes.txt").write_text("mine")
    before = tree_of(copied)
    nowhere = with_fields(tiny_run, data={"blend": {"prefixes": ["nowhere"]}})
    with pytest.raises(Exception, match="nowhere"):
        start(copied, nowhere, "overwrite")
    assert tree_of(copied) == before
    start(copied, with_fields(tiny_run, train={"seed": 2**32 - 1}), "overwrite")
    assert len(lines_of(copied, "train")) == 12
    assert (copied / "notes.txt").read_text() == "mine"


def test_overwriting_from_the_command_line(tiny_run: Run, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "runs" / "test")
    (tmp_path / "run.toml").write_text(render_run(tiny_run))
    done = trainyard("train", "run.toml", "--overwrite", "train.length=2 steps", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "test starts: " in done.stderr


def test_more_steps_skipped_than_done_are_refused() -> None:
    parts: Any = None
    with pytest.raises(CheckpointError, match="of step 12 records 13 skipped steps"):
        State.from_json(parts, 12, {"skipped_steps": 13})
