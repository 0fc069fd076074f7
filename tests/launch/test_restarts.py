"""A run is started again by itself while that brings it forward, and three times when not."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainyard.errors import GuardError, MachineError
from trainyard.launch.restarts import Restarts


def save(folder: Path, step: int) -> None:
    checkpoint = folder / "checkpoints" / f"step-{step:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was logged, as it grows."""
    lines: list[str] = []
    monkeypatch.setattr(
        "trainyard.launch.restarts.logger.warning", lambda text, *given: lines.append(text % given)
    )
    return lines


def test_progress_starts_the_count_again(tmp_path: Path, said: list[str]) -> None:
    for attempt in range(8):
        if attempt in (3, 5):
            save(tmp_path, 10 * attempt)
        (tmp_path / "checkpoints" / f"step-{100 + attempt:08d}").mkdir(parents=True)  # not complete
        (tmp_path / "checkpoints" / "step-new").mkdir(exist_ok=True)
        Restarts(tmp_path).begin(attempt)  # below torchrun each start is a process of its own
    assert said == [
        "restart 1 of 3: from the beginning",
        "restart 2 of 3: from the beginning",
        "restart 1 of 3: from step-00000030",
        "restart 2 of 3: from step-00000030",
        "restart 1 of 3: from step-00000050",
        "restart 2 of 3: from step-00000050",
        "restart 3 of 3: from step-00000050",
    ]
    with pytest.raises(GuardError) as caught:
        Restarts(tmp_path).begin(8)
    assert caught.value.problem == "3 restarts from step-00000050 brought no newer checkpoint"
    assert caught.value.exit_code == 93


@pytest.mark.parametrize("code", [2, 93])
def test_an_end_for_good_stays_one(tmp_path: Path, code: int) -> None:
    Restarts(tmp_path).begin(0)
    Restarts(tmp_path).end(code)
    with pytest.raises(GuardError) as caught:
        Restarts(tmp_path).begin(1)
    assert caught.value.problem == f"the run ended with code {code} and is not restarted"
    assert caught.value.exit_code == code
    Restarts(tmp_path).begin(0)  # a person starts it
    Restarts(tmp_path).begin(1)


@pytest.mark.parametrize("code", [0, 1, 75])
def test_other_ends_are_not_remembered(tmp_path: Path, code: int) -> None:
    Restarts(tmp_path).end(code)
    Restarts(tmp_path).begin(1)


def test_a_damaged_count(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for text in ("", "[1]", '{"other": 1}'):
        (tmp_path / "logs" / "restarts.json").write_text(text)
        Restarts(tmp_path).begin(2)


def test_no_place_for_the_count(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(MachineError, match=r"restarts.json cannot be written: "):
        Restarts(tmp_path).begin(1)
