"""Tests of tokenising: Megatron-LM's bytes, any number of workers, and clean failure."""

from __future__ import annotations

import errno
import json
import multiprocessing
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from trainyard.cli.prepare import prepare as prepare_verb
from trainyard.data.indexed import IndexedDataset
from trainyard.data.prepare import PrepareOptions, output_prefix, prepare, train_on_inputs
from trainyard.data.sidecar import Sidecar, load_sidecar
from trainyard.data.tokenizer import load_tokenizer, train_tokenizer
from trainyard.errors import ConfigError, DataError, MachineError

EOD = 279


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tokens") / "small"
    train_tokenizer(["the cat sat on the mat with another cat in the hat " * 3], EOD + 1, folder)
    return folder


def lines(texts: list[object]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def read_output(prefix: str) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.fixture
def options(tmp_path: Path, tokenizer_folder: Path) -> PrepareOptions:
    """A corpus of three files with bad documents at known places, cut into many units."""
    first = [f"the cat {n} " * (n % 7) for n in range(200)]
    broken: list[object] = [*first]
    broken[50], broken[51], broken[150] = None, 7, "half \ud800"
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(lines(broken) + b'{"body": "no"}\nnot json\n')
    (tmp_path / "in/b.txt").write_bytes(b"a whole file\n")
    (tmp_path / "in/c.txt").write_bytes(b"bad \xff file\n")
    (tmp_path / "in/d.jsonl").write_bytes(lines([*first, "the end"]))
    return PrepareOptions(
        (str(tmp_path / "in"),),
        tmp_path / "out",
        tokenizer_folder,
        on_error="skip",
        overwrite=True,
        unit_bytes=1500,
    )


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "in")


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.dist)])
def test_bytes_are_those_of_megatron(shared_data: Path, tmp_path: Path, workers: int) -> None:
    corpus = shared_data / "corpora" / "novels.jsonl"
    options = PrepareOptions(
        (str(corpus),),
        tmp_path / "novels",
        shared_data / "gpt2",
        workers=workers,
        unit_bytes=5 * 2**20,
    )
    sidecar = prepare(options)
    prefix = output_prefix(options.output, "text")
    assert Path(prefix).name == "novels_text_document"
    assert read_output(prefix) == read_output(str(shared_data / "megatron/novels_text_document"))
    assert (sidecar.documents, sidecar.tokens) == (6578, 7432934 + 6578)
    assert sidecar.text_bytes == 29973099
    assert leftovers(tmp_path) == [f"novels_text_document.{end}" for end in ("bin", "idx", "json")]


def test_an_empty_document_has_no_sequence_but_an_entry(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(["cat", "", "", "hat"]))
    options = PrepareOptions((str(tmp_path / "a.jsonl"),), tmp_path / "out", tokenizer_folder)
    sidecar = prepare(options)
    dataset = IndexedDataset(output_prefix(options.output, "text"))
    assert dataset.document_indices.tolist() == [0, 1, 1, 1, 2]
    assert [dataset.tokens(i)[-1] for i in range(len(dataset))] == [EOD, EOD]
    assert (sidecar.documents, sidecar.empty_documents, sidecar.sequences) == (4, 2, 2)
    assert sidecar.tokens == dataset.n_tokens
    without = prepare(replace(options, append_eod=False, overwrite=True))
    assert without.tokens == sidecar.tokens - 2
    assert EOD not in IndexedDataset(output_prefix(options.output, "text")).stream


def test_an_end_of_document_in_a_text_is_text_or_parsed(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(["cat<|endoftext|>hat"]))
    options = PrepareOptions((str(tmp_path / "a.jsonl"),), tmp_path / "out", tokenizer_folder)
    ends = {}
    for policy in ("text", "parse"):
        sidecar = prepare(replace(options, special_tokens=policy, overwrite=True))
        stream = IndexedDataset(output_prefix(options.output, "text")).stream
        ends[policy] = np.count_nonzero(stream == EOD)
        assert sidecar.tokenizer.special_tokens == policy
    assert ends == {"text": 1, "parse": 2}


def test_a_vocabulary_of_another_key_names_the_files(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"body": "cat"}\n')
    options = PrepareOptions((str(tmp_path),), tmp_path / "out", tokenizer_folder, json_key="body")
    assert prepare(options).json_key == "body"
    assert (tmp_path / "out_body_document.bin").exists()


SKIPPED = {
    "invalid UTF-8": 1,
    "lone surrogate": 1,
    "malformed JSON": 1,
    "missing key": 1,
    "not a string": 2,
}


def test_bad_documents_are_skipped_counted_and_named(options: PrepareOptions) -> None:
    sidecar = prepare(options)
    assert sidecar.skipped == SKIPPED
    source = Path(options.inputs[0])
    places = [place.split(": ")[0] for place in sidecar.skipped_places]
    numbers = [51, 52, 151, 201, 202]
    assert places == [f"{source}/a.jsonl:{number}" for number in numbers] + [f"{source}/c.txt"]
    assert sidecar.documents == 197 + 1 + 201
    expected = [f"the cat {n} " * (n % 7) for n in range(200)]
    good = [text for n, text in enumerate(expected) if n not in (50, 51, 150)]
    tokenizer = load_tokenizer(options.tokenizer)
    dataset = IndexedDataset(output_prefix(options.output, "text"))
    texts = [tokenizer.decode(dataset.tokens(i)[:-1]) for i in range(len(dataset))]
    assert texts == [text for text in [*good, "a whole file\n", *expected, "the end"] if text]


@pytest.mark.dist
def test_the_number_of_workers_changes_nothing(options: PrepareOptions) -> None:
    prefix = output_prefix(options.output, "text")
    results = set()
    for workers in (1, 3):
        prepare(replace(options, workers=workers))
        results.add((*read_output(prefix), Path(f"{prefix}.json").read_bytes()))
    assert len(results) == 1
    messages = set()
    for workers in (1, 3):
        with pytest.raises(DataError) as caught:
            prepare(replace(options, workers=workers, on_error="stop"))
        messages.add(str(caught.value))
    assert len(messages) == 1
    assert 'a.jsonl:51: the value of "text" is null, not a string' in messages.pop()
    assert len(results) == 1 and leftovers(options.output.parent) == [
        f"out_text_document.{end}" for end in ("bin", "idx", "json")
    ]


def test_only_the_first_places_of_a_kind_are_kept(options: PrepareOptions, tmp_path: Path) -> None:
    (tmp_path / "in/a.jsonl").write_bytes(b"bad\n" * 1000 + lines(["cat"]))
    sidecar = prepare(options)
    assert sidecar.skipped["malformed JSON"] == 1000
    places = [place.split(": ")[0] for place in sidecar.skipped_places]
    assert places[:5] == [f"{tmp_path}/in/a.jsonl:{n}" for n in range(1, 6)]
    assert len(places) == 6


@pytest.mark.dist
def test_a_killed_worker_is_named_and_nothing_is_left(options: PrepareOptions) -> None:
    def kill_workers(done_bytes: int, total_bytes: int, documents: int, tokens: int) -> None:
        for process in multiprocessing.active_children():
            process.kill()

    with pytest.raises(MachineError) as caught:
        prepare(replace(options, workers=2), kill_workers)
    assert "a worker was killed by SIGKILL while it tokenised" in caught.value.problem
    assert "in/" in caught.value.problem
    assert "use fewer workers" in caught.value.hint
    assert leftovers(options.output.parent) == []
    assert not multiprocessing.active_children()


@contextmanager
def file_size_limit(n_bytes: int) -> Iterator[None]:
    """Makes every write beyond `n_bytes` fail, as a full disk does, here and in new processes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.dist)])
def test_a_full_disk_leaves_nothing_behind(options: PrepareOptions, workers: int) -> None:
    with file_size_limit(600), pytest.raises(MachineError) as caught:
        prepare(replace(options, workers=workers))
    assert "File too large" in caught.value.problem
    assert "free space or quota" in caught.value.hint
    assert leftovers(options.output.parent) == []


def test_old_files_survive_a_run_that_fails(options: PrepareOptions) -> None:
    prepare(options)
    prefix = output_prefix(options.output, "text")
    before = (*read_output(prefix), Path(f"{prefix}.json").read_bytes())
    with pytest.raises(DataError):
        prepare(replace(options, on_error="stop"))
    assert (*read_output(prefix), Path(f"{prefix}.json").read_bytes()) == before


def test_an_old_record_is_gone_before_new_tokens_come(
    options: PrepareOptions, tmp_path: Path
) -> None:
    prepare(options)
    (tmp_path / "one.jsonl").write_bytes(lines(["cat"]))
    with file_size_limit(300), pytest.raises(MachineError, match=r"document.json cannot be"):
        prepare(replace(options, inputs=(str(tmp_path / "one.jsonl"),)))
    assert leftovers(tmp_path)[-2:] == ["out_text_document.bin", "out_text_document.idx"]


def test_the_output_is_checked_before_the_work(options: PrepareOptions, tmp_path: Path) -> None:
    nowhere = replace(options, output=tmp_path / "no/out")
    with pytest.raises(DataError, match=r"the output folder .*/no does not exist"):
        prepare(nowhere)
    (tmp_path / "out_text_document.idx").touch()
    with pytest.raises(DataError, match=r"out_text_document.idx is there already") as caught:
        prepare(replace(options, overwrite=False))
    assert "--overwrite" in caught.value.hint
    huge = tmp_path / "in/huge.jsonl"
    with huge.open("wb") as file:
        file.truncate(2**43)
    (tmp_path / "in/huge.jsonl").rename(tmp_path / "in/huge.txt")
    with pytest.raises(MachineError, match=r"need 2.0 TiB or more") as full:
        prepare(replace(options, overwrite=True))
    assert "free space" in full.value.hint


@pytest.mark.parametrize("data", [b"", b"\n\n", b'{"text": ""}\n', b"bad\n"])
def test_an_empty_corpus_is_refused(options: PrepareOptions, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(data)
    with pytest.raises(DataError, match="the corpus is empty: ") as caught:
        prepare(replace(options, inputs=(str(path),)))
    assert "json_key" in caught.value.hint


def test_leftovers_of_a_killed_run_are_named(
    options: PrepareOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "out_text_document.parts-abc").mkdir()
    prepare(options)
    assert "parts-abc was left by a run that was killed" in caplog.text


def test_progress_reaches_the_end(options: PrepareOptions) -> None:
    calls: list[tuple[int, int, int, int]] = []
    sidecar = prepare(options, lambda *counts: calls.append(counts))
    assert calls[-1][0] == calls[-1][1] == sum(record.size_bytes for record in sidecar.sources)
    assert calls[-1][2:] == (sidecar.documents, sidecar.tokens)


def test_the_sidecar_refuses_another_tokenizer(
    options: PrepareOptions, tmp_path: Path, tokenizer_folder: Path
) -> None:
    written = prepare(options)
    prefix = output_prefix(options.output, "text")
    sidecar = load_sidecar(prefix)
    assert sidecar == written
    tokenizer = load_tokenizer(tokenizer_folder)
    sidecar.check_against(tokenizer, prefix)
    train_tokenizer(["other words, and more of other words"], 260, tmp_path / "other")
    other = load_tokenizer(tmp_path / "other")
    with pytest.raises(DataError) as caught:
        sidecar.check_against(other, prefix)
    for part in (prefix, "small", "other", tokenizer.fingerprint[:16], other.fingerprint[:16]):
        assert part in caught.value.problem
    assert "name the tokenizer that made the data" in caught.value.hint


def test_the_sidecar_knows_its_files(options: PrepareOptions) -> None:
    sidecar: Sidecar = prepare(options)
    prefix = output_prefix(options.output, "text")
    sidecar.check_files(prefix, full=True)
    path = Path(f"{prefix}.bin")
    data = path.read_bytes()
    path.write_bytes(data[:-2])
    with pytest.raises(DataError, match=rf"has {len(data) - 2} bytes, but {len(data)} were"):
        sidecar.check_files(prefix)
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    sidecar.check_files(prefix)
    with pytest.raises(DataError, match="differs from what was written"):
        sidecar.check_files(prefix, full=True)
    path.unlink()
    with pytest.raises(DataError, match="is missing"):
        sidecar.check_files(prefix)


def test_a_wrong_sidecar_is_refused(options: PrepareOptions, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is missing, so nothing says which tokenizer"):
        load_sidecar(tmp_path / "out_text_document")
    prepare(options)
    path = tmp_path / "out_text_document.json"
    for old, new in (('"format_version": 1', '"format_version": 2'), ('"tokens"', '"n"')):
        text = path.read_text()
        path.write_text(text.replace(old, new))
        with pytest.raises(DataError, match="is not a record of token files"):
            load_sidecar(tmp_path / "out_text_document")
        path.write_text(text)


def run_verb(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(prepare_verb)
    result = CliRunner().invoke(app, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_verb_trains_a_tokenizer_and_prepares(options: PrepareOptions, tmp_path: Path) -> None:
    corpus, output = str(tmp_path / "in/d.jsonl"), str(tmp_path / "new")
    shown = run_verb(corpus, "--output", output, "--train-tokenizer", "262")
    sidecar = load_sidecar(f"{output}_text_document")
    assert f"{sidecar.documents} documents" in shown
    assert (sidecar.tokenizer.name, sidecar.tokenizer.eod_id) == ("new_tokenizer", 261)
    sidecar.check_against(load_tokenizer(Path(f"{output}_tokenizer")), output)
    shown = run_verb(
        str(tmp_path / "in"), "-o", output, "--tokenizer", f"{output}_tokenizer",
        "--on-error", "skip", "--overwrite", "--no-append-eod",
    )  # fmt: skip
    assert "skipped, not a string: 2" in shown
    assert "a.jsonl:51" in shown
    assert not load_sidecar(f"{output}_text_document").append_eod


def test_the_verb_wants_one_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer given"):
        run_verb("a.jsonl", "-o", str(tmp_path / "x"))
    with pytest.raises(ConfigError, match="both --tokenizer and --train-tokenizer given"):
        run_verb("a.jsonl", "-o", "x", "--tokenizer", "t", "--train-tokenizer", "300")


def test_training_names_bad_documents_and_keeps_old_tokenizers(
    options: PrepareOptions, tmp_path: Path
) -> None:
    new = replace(options, tokenizer=tmp_path / "new", on_error="stop")
    with pytest.raises(DataError, match=r"a.jsonl:51: the value of"):
        train_on_inputs(new, 262)
    train_on_inputs(replace(new, on_error="skip"), 262)
    with pytest.raises(DataError, match=r"tokenizer.json is there already"):
        train_on_inputs(replace(new, on_error="skip", overwrite=False), 262)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    from trainyard.data.publish import publish_text

    publish_text(tmp_path / "a.json", "old")
    with (
        file_size_limit(4),
        pytest.raises(MachineError, match=r"a.json cannot be written") as caught,
    ):
        publish_text(tmp_path / "a.json", "longer than four bytes")
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EFBIG
    assert (tmp_path / "a.json").read_text() == "old"
    assert leftovers(tmp_path) == ["a.json"]
