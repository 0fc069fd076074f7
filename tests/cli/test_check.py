"""`trainyard check data`, as a user meets it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from tests.command import trainyard

from trainyard.data.file_record import Block, FileRecord
from trainyard.data.indexed import IndexedDataset, IndexedWriter, token_paths
from trainyard.data.sidecar import Sidecar, TokenizerRecord, save_sidecar
from trainyard.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer


def write_record(prefix: Path, tokenizer: Tokenizer) -> None:
    dataset = IndexedDataset(prefix)
    files = [path.read_bytes() for path in token_paths(prefix)]
    made = [FileRecord([Block(len(f), hashlib.sha256(f).hexdigest())]) for f in files]
    size, eod = tokenizer.vocabulary_size, tokenizer.eod_id
    record = Sidecar(
        recipe="",
        tokenizer=TokenizerRecord("tok", tokenizer.fingerprint, size, eod, "text"),
        json_key="text",
        append_eod=True,
        dtype=dataset.dtype.name,
        documents=len(dataset.document_indices) - 1,
        empty_documents=0,
        sequences=len(dataset),
        tokens=dataset.n_tokens,
        text_bytes=0,
        steps=[],
        groups={},
        quarantined={},
        quarantined_places=[],
        bin=made[0],
        idx=made[1],
        sources=[],
    )
    save_sidecar(record, prefix)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two good corpora, and the tokenizer `tok` that made them."""
    train_tokenizer(["the words of a small corpus"], 260, tmp_path / "tok")
    tokenizer = load_tokenizer(tmp_path / "tok")
    for name in ("first", "second"):
        with IndexedWriter(tmp_path / name, np.dtype(np.uint16)) as writer:
            for text in ("some words", "and more"):
                writer.add_document(np.array([*tokenizer.encode(text), tokenizer.eod_id]))
        write_record(tmp_path / name, tokenizer)
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
    assert facts["tokenizer"] == "tok made them"


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
    assert "none: there is no .json, so nothing vouches for the bytes" in result.stdout
    assert "0 or more; which vocabulary is unknown" in result.stdout


def test_help_has_an_example_and_no_prefix_is_a_mistake(folder: Path) -> None:
    shown = trainyard("check", "data", "--help", folder=folder)
    assert "Example: trainyard check data data/web_text_document" in shown.stdout
    assert "data " in trainyard("check", "--help", folder=folder).stdout
    assert trainyard("check", "data", folder=folder).returncode == 2
