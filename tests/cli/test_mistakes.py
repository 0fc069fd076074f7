"""Mistakes of new users (docs/mistakes.md): each is answered as the page says, and leaves nothing.

Times are for benchmarks/mistakes.py.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from benchmarks.mistakes import MISTAKES, PAGE, Mistake, make_run, page, write_files
from tests.command import trainyard

TYPED = {each.typed: each for mistakes in MISTAKES.values() for each in mistakes}
NEED_NO_RUN = ["plan gtp3-13b", "show powershell.toml", "prepare --fetch -o new"]
LEFT = ("lock", "cache", "restarts.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = tmp_path_factory.mktemp("mistakes") / "folder"
    write_files(place)
    return place


@pytest.fixture(scope="module")
def folder_with_run(folder: Path) -> Path:
    def start(words: str) -> None:
        done = trainyard(*shlex.split(words), folder=folder)
        assert done.returncode == 0, done.stderr

    make_run(start)
    return folder


def answers(mistake: Mistake, folder: Path) -> None:
    def files() -> list[Path]:
        found = (path for path in folder.rglob("*") if path.is_file())
        return sorted(path for path in found if not set(path.parts) & set(LEFT))

    before = files()
    done = trainyard(*shlex.split(mistake.typed), folder=folder)
    assert done.returncode == mistake.code, done.stderr
    assert mistake.phrase in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert files() == before


def test_forty_mistakes_or_more_are_on_the_page() -> None:
    assert len(TYPED) == sum(map(len, MISTAKES.values())) >= 40
    assert set(NEED_NO_RUN) <= set(TYPED)
    again = "if so: python -m benchmarks.mistakes --before OTHER_CHECKOUT"
    assert PAGE.read_text(encoding="utf-8") == page(), again


@pytest.mark.parametrize("typed", NEED_NO_RUN)
def test_a_mistake_is_answered(typed: str, folder: Path) -> None:
    answers(TYPED[typed], folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize("typed", sorted(set(TYPED) - set(NEED_NO_RUN)))
def test_every_mistake_is_answered(typed: str, folder_with_run: Path) -> None:
    answers(TYPED[typed], folder_with_run)
