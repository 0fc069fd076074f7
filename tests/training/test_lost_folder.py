"""A run folder that fails, goes or is replaced while it trains; strange entries in it at the start.

Nothing waits for a moment: each fault comes with the look after a step.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.training.conftest import start, with_fields

from trainyard.checkpoint.format import list_checkpoints
from trainyard.config.run import Run
from trainyard.errors import EXIT_HOLD, GuardError, MachineError
from trainyard.launch.supervise import HangReports
from trainyard.training.run_folder import FILES, FOLDERS, check_entries
from trainyard.training.stop import SAVE, LostFolderError, Stop


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("call", ["stat", "unlink"])
def test_a_look_that_fails_is_no_request(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    number: int,
) -> None:
    def fail(path: object, *_args: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    stop = Stop(tmp_path)
    (tmp_path / SAVE).touch()
    with monkeypatch.context() as patch:
        patch.setattr(f"pathlib.Path.{call}", fail)
        assert [stop.stop_request() for _ in range(3)] == [None] * 3
    assert caplog.text.count("cannot look for STOP and SAVE") == 1
    assert stop.stop_request() == SAVE


def test_a_folder_save_is_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stop = Stop(tmp_path)
    (tmp_path / SAVE).mkdir()
    assert [stop.stop_request() for _ in range(3)] == [None] * 3
    assert caplog.text.count("Is a directory") == 1


def move(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


def replace(folder: Path) -> None:
    """The same command, started again, begins in a new folder of the same name."""
    move(folder)
    shutil.copytree(folder.with_name("moved"), folder)
    (folder / "mine").touch()


@pytest.mark.parametrize("how", [shutil.rmtree, move, replace])
def test_a_run_whose_folder_is_gone_ends_and_writes_nothing(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Callable[[Path], None]
) -> None:
    folder, looks, after = tmp_path / "run", [0], []
    look = Stop.stop_request

    def lose(stop: Stop) -> str | None:
        looks[0] += 1
        if looks[0] == 8:
            how(folder)
            after.extend(sorted(folder.rglob("*")))
        return look(stop)

    monkeypatch.setattr(Stop, "stop_request", lose)
    with pytest.raises(LostFolderError, match="was removed, moved or replaced while") as caught:
        start(folder, with_fields(tiny_run, checkpoint={"interval": 5, "background": False}))
    assert caught.value.exit_code == EXIT_HOLD
    assert sorted(folder.rglob("*")) == after
    if how is not shutil.rmtree:
        names = [path.name for path in list_checkpoints(tmp_path / "moved" / "checkpoints")]
        assert names == ["step-00000005"]


def test_a_guard_that_cannot_write_its_outcome_still_speaks(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_stop: Stop) -> None:
        (tmp_path / "outcome.json").mkdir()
        raise GuardError("the loss is not finite")

    monkeypatch.setattr(Stop, "stop_request", stop)
    with pytest.raises(GuardError, match="the loss is not finite"):
        start(tmp_path, tiny_run)


def test_a_parent_reads_no_reports_from_a_failing_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object) -> None:
        raise OSError(errno.EIO, "")

    reports = HangReports(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("os.scandir", fail)
        assert reports.find() == {}


@pytest.mark.parametrize("name", [*FILES, "logs/rank-00001.log"])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_a_pipe_or_folder_in_the_place_of_a_file(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    (tmp_path / "logs").mkdir()
    make(tmp_path / name)
    with pytest.raises(MachineError, match=f"{name} is not a file, where training") as caught:
        check_entries(tmp_path)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", [*FOLDERS, ""])
def test_a_file_or_broken_link_in_the_place_of_a_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    with pytest.raises(MachineError, match=f"{path} is not a folder, where training"):
        check_entries(folder)
    path.unlink()
    path.symlink_to("nowhere")
    with pytest.raises(MachineError, match=f"{path} is a broken link, where training"):
        check_entries(folder)


def test_a_file_with_the_name_of_an_unfinished_save(tiny_run: Run, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".step-00000012.partial").touch()
    start(tmp_path, tiny_run)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000012"]
