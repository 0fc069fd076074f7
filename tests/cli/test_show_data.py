"""`trainyard show PREFIX`: counts, lengths, where the text came from, and harmless samples."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console
from tests.command import peak_bytes

from trainyard.cli.names import without_ending
from trainyard.cli.show_data import count_lengths, printable, show_data, show_dropped
from trainyard.config.corpus import load_corpus
from trainyard.corpus.preparation.prepare import prepare
from trainyard.corpus.preparation.train_tokenizer import train_tokenizer
from trainyard.data.indexed import IndexedDataset, IndexedWriter
from trainyard.data.sidecar import (
    GroupCount,
    SourceRecord,
    StepCount,
    load_sidecar,
    save_sidecar,
)
from trainyard.errors import DataError

TEXTS = ["first words", "", "second", "\x1b[31mred\x1b[0m\nline two", "long " * 200, "the last"]
LONG_PATH = "corpus/" + "folder/" * 20 + "file.jsonl"


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["some words, and more of the same words"], 260, folder)
    return folder


@pytest.fixture
def prefix(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus of the texts, in whose record more happened to them than did."""
    lines = [json.dumps({"text": text}) for text in TEXTS]
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("\n".join(lines) + "\n")
    corpus = {"inputs": ["a.jsonl"], "output": "corpus", "tokenizer": str(tokenizer_folder)}
    prepare(load_corpus(None, corpus))
    prefix = Path("corpus_text_document")
    made = load_sidecar(prefix)
    drops = {"too few letters": 1, "bullets": 2000}
    record = msgspec.structs.replace(
        made,
        steps=[
            StepCount(kind="read", documents_in=9, documents_out=8, bytes_in=4096, bytes_out=2048),
            StepCount(kind="quality", documents_in=8, documents_out=6, dropped=drops),
        ],
        groups={"web": GroupCount(4, 1024, made.tokens // 4), "": GroupCount(2, 9, 7)},
        quarantined={"json": 1200},
        quarantined_places=["a.jsonl:12: not \x1b]0;JSON"],
        sources=[SourceRecord(LONG_PATH, 2048, 0)]
        + [SourceRecord(f"[b]{number}.jsonl", 1, 0) for number in range(30)],
    )
    save_sidecar(record, prefix)
    return prefix


def show(prefix: Path, count: int = 3, tokenizer: Path | None = None) -> list[str]:
    """The lines shown off a terminal, 80 columns wide."""
    console = Console(file=io.StringIO(), soft_wrap=True, width=80)
    show_data(str(prefix), console, count=count, tokenizer_path=tokenizer)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def section(lines: list[str], title: str) -> list[list[str]]:
    """The words of each line below a title, up to the next empty line."""
    below = lines[lines.index(title) + 1 :]
    return [line.split() for line in below[: [*below, ""].index("")]]


def test_counts_and_rates(prefix: Path) -> None:
    shown = [" ".join(line.split()) for line in show(prefix)]
    n_tokens = IndexedDataset(prefix).n_tokens
    text_bytes = sum(map(len, TEXTS))
    rate = f"{text_bytes / n_tokens:.3f} bytes per token, {n_tokens / text_bytes:.4f} tokens"
    facts = ("documents 6", "empty documents 1", f"tokens {n_tokens:,} of uint16")
    assert {*facts, f"rate {rate} per byte"} <= {*shown}


def test_lengths_are_counted_in_powers_of_two(tmp_path: Path) -> None:
    lengths = [0, 1, 2, 3, 4, 7, 8, 8, 8, 1023, 1024]
    with IndexedWriter(tmp_path / "c", np.dtype(np.uint16)) as writer:
        for length in lengths:
            writer.add_document(np.zeros(length, np.uint16))
        writer.add_document(np.zeros(3, np.uint16), np.zeros(2, np.uint16))
        writer.add_document()
    rows = section(show(tmp_path / "c", count=0), "tokens per document")[1:]
    found = {" ".join(row[:-3]): row[-3:] for row in rows if row[-1].startswith("#")}
    assert found == {
        "0": ["2", "15.4%", "#" * 20],
        "1": ["1", "7.7%", "#" * 10],
        "2 to 3": ["2", "15.4%", "#" * 20],
        "4 to 7": ["3", "23.1%", "#" * 30],
        "8 to 15": ["3", "23.1%", "#" * 30],
        "512 to 1,023": ["1", "7.7%", "#" * 10],
        "1,024 to 2,047": ["1", "7.7%", "#" * 10],
    }
    assert ["16", "to", "31", "0", "0.0%"] in rows


def test_lengths_are_counted_in_little_memory(tmp_path: Path) -> None:
    lengths = np.random.default_rng(2).integers(0, 4, 2_000_000)  # several slabs
    with IndexedWriter(tmp_path / "c", np.dtype(np.uint16)) as writer:
        writer.add_documents(np.zeros(lengths.sum(), np.uint16), lengths)
    dataset = IndexedDataset(tmp_path / "c")
    expected = np.bincount(np.array([0, 1, 2, 2])[lengths], minlength=64)
    np.testing.assert_array_equal(count_lengths(dataset), expected)
    assert peak_bytes(lambda: count_lengths(dataset)) < 16 << 20


def test_what_became_of_the_text(prefix: Path) -> None:
    lines = show(prefix)
    groups = section(lines, "groups")
    assert groups[1][:4] == ["web", "4", "1.0", "KiB"]
    assert groups[2][:4] == ["(none)", "2", "9", "B"]
    steps = section(lines, "steps")
    assert steps[1] == ["read", "9", "8", "4.0", "KiB", "2.0", "KiB"]
    dropped = " ".join(word for row in steps[2:] for word in row)
    assert dropped == "quality 8 6 0 B 0 B bullets: 2,000, too few letters: 1"
    assert "unreadable documents" in lines
    assert "  json: 1,200" in lines
    assert r"  a.jsonl:12: not \x1b]0;JSON" in lines
    sources = section(lines, "source files")
    assert "".join(row[0] for row in sources[1:4]).startswith(LONG_PATH)
    assert ["[b]0.jsonl", "1", "B"] in sources
    assert sources[-1] == ["and", "11", "more"]
    assert max(map(len, show(prefix, 0))) <= 80


def test_samples_are_decoded_and_harmless(prefix: Path, tokenizer_folder: Path) -> None:
    lines = show(prefix, 6, tokenizer_folder)
    assert not any("\x1b" in line for line in lines)
    assert "\ndocument 1, 0 tokens\n\n" in "\n".join(lines)
    for text in (
        *("first words<|endoftext|>", r"\x1b[31mred\x1b[0m", "line two<|endoftext|>"),
        *(("long " * 200)[:400] + " ...", "the last<|endoftext|>"),
    ):
        assert f"  {text}" in lines


def test_samples_are_evenly_spaced_and_ids_without_a_tokenizer(prefix: Path) -> None:
    for count, shown in ((0, []), (1, [0]), (2, [0, 5]), (3, [0, 2, 5]), (99, [*range(6)])):
        lines = show(prefix, count)
        titles = [line for line in lines if line.startswith("document ")]
        assert [int(title.split()[1].rstrip(",")) for title in titles] == shown
    dataset = IndexedDataset(prefix)
    assert "  " + " ".join(map(str, dataset.tokens(0))) in lines
    assert "  " + " ".join(map(str, dataset.tokens(3)[:64])) + " ..." in lines


def test_another_tokenizer_is_refused(prefix: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    train_tokenizer(["other words, and more of other words"], 262, tmp_path / "other")
    with pytest.raises(DataError, match=f"was made with the tokenizer {tokenizer_folder.name}"):
        show(prefix, 3, tmp_path / "other")


def test_files_without_a_record_or_a_document(
    prefix: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    Path(f"{prefix}.json").unlink()
    lines = show(prefix, 1, tokenizer_folder)
    assert any("unknown: no .json beside it" in line for line in lines)
    assert "steps" not in lines
    assert "  first words<|endoftext|>" in lines
    with IndexedWriter(tmp_path / "c", np.dtype(np.uint16)):
        pass
    assert "tokens per document" not in show(tmp_path / "c")


def test_what_a_terminal_might_obey_is_escaped() -> None:
    assert printable("a\tb\x07\x9b1m\u202e\u2028\U000e0001 é 漢") == (
        r"a\tb\x07\x9b1m\u202e\u2028\U000e0001 é 漢"
    )


def test_a_file_name_stands_for_its_prefix(prefix: Path) -> None:
    for ending in ("", ".bin", ".idx", ".json"):
        assert without_ending(f"{prefix}{ending}") == str(prefix)
    odd = prefix.with_name("odd.bin")
    Path(f"{odd}.idx").touch()
    assert without_ending(str(odd)) == str(odd)


def test_dropped_documents_are_shown(prefix: Path) -> None:
    console = Console(file=io.StringIO(), width=80, soft_wrap=True)
    with pytest.raises(DataError, match=r"corpus_text_document.json has no dropped documents"):
        show_dropped(str(prefix), console)
    corpus = {"inputs": ["a.jsonl"], "output": "other", "tokenizer": "gpt2"}
    steps = [{"kind": "length", "min_characters": 8, "max_characters": 600}]
    prepare(load_corpus(None, {**corpus, "steps": steps}))
    show_dropped("other_text_document", console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "length: too short, 2 dropped\n  \n" in said
    assert "length: too short, 2 dropped\n  second\n" in said
    assert "length: too long, 1 dropped\n  " + "long " * 100 + "\n" in said
