"""`trainyard check data`, as a user meets it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.command import trainyard

from trainyard.config.corpus import load_corpus
from trainyard.corpus.preparation.prepare import prepare
from trainyard.corpus.preparation.train_tokenizer import train_tokenizer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two good corpora, and the tokenizer `tok` that made them."""
    monkeypatch.chdir(tmp_path)
    train_tokenizer(["the words of a small corpus"], 260, Path("tok"))
    for name in ("first", "second"):
        Path(f"{name}.jsonl").write_text('{"text": "some words"}\n{"text": "and more"}\n')
        corpus = {"inputs": [f"{name}.jsonl"], "output": name, "tokenizer": "tok"}
        prepare(load_corpus(None, corpus))
        for path in Path().glob(f"{name}_text_document.*"):
            path.rename(path.name.replace("_text_document", ""))
    return tmp_path


def test_good_files_with_and_without_ending(folder: Path) -> None:
    result = trainyard(
        "check", "data", "first.bin", "second.json", "--tokenizer", "tok", folder=folder
    )
    assert result.returncode == 0, result.stderr
    facts = {line[:15].strip(): line[15:].strip() for line in result.stdout.splitlines()}
    assert "first: OK" in result.stdout
    assert "second: OK" in result.stdout
    assert facts["checksums"].startswith("all 2 blocks match")
    assert facts["documents"] == "2"
    assert facts["token ids"] == "0 to 259"
    assert facts["document ends"] == "every document that is not empty has one"
    assert facts["tokenizer"] == "made by tok"


def test_every_prefix_is_checked_and_one_bad_one_is_enough(folder: Path) -> None:
    path = folder / "first.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\1\0")
    result = trainyard("check", "data", "first", "nothing", "second", folder=folder)
    assert result.returncode == 2
    assert "second: OK" in result.stdout
    assert "first: OK" not in result.stdout
    assert "error: first: 2 problems\n  first.bin: bytes 0 to " in result.stderr
    assert "the first is document 1, which ends with 1" in result.stderr
    assert "nothing: 2 problems\n  nothing.bin: No such file or directory" in result.stderr
    assert "hint: copy .bin, .idx and .json again" in result.stderr
    assert "Traceback" not in result.stderr


def test_without_a_record_it_says_what_it_cannot_know(folder: Path) -> None:
    (folder / "first.json").unlink()
    result = trainyard("check", "data", "first", folder=folder)
    assert result.returncode == 0, result.stderr
    assert "none: without a .json the bytes cannot be verified" in result.stdout
    assert "0 or more; the vocabulary is unknown" in result.stdout
