from __future__ import annotations

import os
from pathlib import Path

import pytest

import trainyard
from trainyard.files import open_file, parse_json, read_file
from trainyard.log import show_progress


def test_an_ordinary_file_and_a_link_to_one_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert read_file(tmp_path / "file", limit_bytes=3) == b"abc"
    assert read_file(tmp_path / "link") == b"abc"


def test_what_is_no_ordinary_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for name in ("pipe", "zeros"):
        with pytest.raises(OSError, match="not an ordinary file") as caught:
            open_file(tmp_path / name)
        assert caught.value.strerror == "not an ordinary file"
        assert caught.value.filename == str(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none")


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(OSError, match="larger than 1,073,741,824 bytes, which no such file is"):
        read_file(tmp_path / "sparse")


@pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 10**6, "9" * 10**5, "{", b"\xff", ""])
def test_json_that_is_none_or_too_much_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_json(text)
    assert parse_json('{"a": [1]}') == {"a": [1]}


def test_a_file_gets_no_bar_where_colours_are_forced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter and CI systems do
    with show_progress("training", plain_lines=False) as update:
        update(1, 2, "step 1 of 2")
    assert capsys.readouterr().err == ""


def test_every_console_is_built_here() -> None:
    """Consoles of rich print control characters of texts."""
    sources = Path(trainyard.__file__).parent.rglob("*.py")
    found = {path.name for path in sources if "Console(" in path.read_text(encoding="utf-8")}
    assert not found, "use build_console of trainyard.log"
