"""`trainyard prepare` as a user meets it: data files, options before them, status, the summary."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.command import call, trainyard
from tests.waiting import WATCHDOG_SECONDS, wait_until

from trainyard.cli.prepare import prepare as prepare_verb
from trainyard.config.corpus import load_corpus
from trainyard.corpus.preparation.prepare import choose_tokenizer, prepare
from trainyard.corpus.preparation.train_tokenizer import train_tokenizer
from trainyard.corpus.preparation.unit import UnitWorker
from trainyard.data.sidecar import load_sidecar
from trainyard.data.tokenizer import load_tokenizer
from trainyard.errors import DataError

LONG = "x" * 300
DATA_FILE = """
inputs = ["in"]
output = "web"
tokenizer = "small"

[[steps]]
kind = "length"
max_characters = 200

[[steps]]
kind = "deduplicate"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a corpus, a tokenizer and a data file."""
    monkeypatch.chdir(tmp_path)
    train_tokenizer(["the cat sat on the mat with another cat in the hat " * 3], 280, Path("small"))
    Path("in").mkdir()
    texts = ["the cat", "the hat", "the cat", "x" * 300, 7]
    lines = [json.dumps({"text": text}) for text in texts]
    Path("in/a.jsonl").write_text("\n".join(lines) + "\n")
    Path("web.toml").write_text(DATA_FILE)
    return tmp_path


def run_verb(*arguments: str) -> str:
    return call(prepare_verb, *arguments)


def write_texts(*texts: str) -> None:
    Path("in/a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def test_automatic_sizes_shrink(folder: Path) -> None:
    write_texts("One. Two. Three short sentences.")
    run_verb("in", "-o", "web")
    assert 257 <= load_tokenizer(folder / "web_tokenizer").vocabulary_size < 320
    with pytest.raises(DataError, match="tokens, not 320"):
        run_verb("in", "-o", "new", "--train-tokenizer", "320")


def test_what_looks_like_another_format_is_said(folder: Path) -> None:
    write_texts("<!DOCTYPE html>\n<p>the", "  <html lang='en'>", "a,b,c\n" * 6, "a, b\n" * 6, "cat")
    said = trainyard("prepare", "in", "-o", "web", "--tokenizer", "small", folder=folder).stderr
    assert "  2 documents look like HTML; " in said
    assert "  1 documents look like CSV; " in said


def test_special_tokens_within_documents_and_lost_bytes_are_said(folder: Path) -> None:
    path = Path("small/tokenizer.json")
    content = json.loads(path.read_text("utf-8"))
    del content["model"]["vocab"]["Z"]
    path.write_text(json.dumps(content), "utf-8")
    write_texts("the cat<|endoftext|>the ZZ hat\n<|endoftext|>\n")
    command = ("prepare", "in", "-o", "web", "--tokenizer", "small")
    said = " ".join(trainyard(*command, folder=folder).stderr.split())
    assert "special tokens within documents, read as ordinary text: <|endoftext|> 2;" in said
    assert "pass --split-on '<|endoftext|>'; to read them as tokens, --special-tokens par" in said
    assert "2 bytes have no token, and are left out" in said
    for mark, n_documents in (("<|endoftext|>", 2), (r"\n\n", 1)):
        done = trainyard(*command, "--split-on", mark, "--overwrite", folder=folder)
        assert f"web_text_document.bin: {n_documents} document" in done.stdout
        assert ("special tokens" in done.stderr) == (n_documents == 1)
        nothing = r"--split-on '\n\n' split no document: a shell writes line feeds"
        assert (nothing in done.stderr) == (n_documents == 1)


def test_a_data_file_says_everything(folder: Path) -> None:
    wikitext = "The cat. It cost {{inflation|5}}. It is {{age|1969}} now."
    page = f"<page><title>A</title><revision><text>{wikitext}</text></revision></page>"
    Path("in/b.xml").write_text(page)
    done = trainyard("prepare", "web.toml", "--on-error", "quarantine", folder=folder)
    sidecar = load_sidecar("web_text_document")
    assert sidecar.documents == 3
    assert done.stdout.splitlines() == [
        f"web_text_document.bin: 3 documents, {sidecar.tokens} tokens",
        "  read dropped 2 sentences with a template that cannot be rendered: age 1, inflation 1",
        "  length dropped 1: too long",
        "  deduplicate dropped 1: repeats an earlier document",
        "web.toml was not written by prepare: left as it is",
    ]
    assert done.stderr.splitlines() == [
        "quarantined, not a string: 1",
        '  in/a.jsonl:5: the value of "text" is 7, not a string',
        "  all of them: web_text_document.quarantine.jsonl",
    ]
    assert run_verb("web.toml", "--on-error", "quarantine") == done.stdout


def test_options_come_before_the_data_file(folder: Path) -> None:
    Path("b.jsonl").write_text('{"body": "cat"}\n')
    shown = run_verb(
        "web.toml", "b.jsonl", "-o", "other", "--json-key", "body", "--no-append-eod",
        "--special-tokens", "parse",
    )  # fmt: skip
    sidecar = load_sidecar("other_body_document")
    assert shown.splitlines()[0] == f"other_body_document.bin: 1 document, {sidecar.tokens} tokens"
    assert shown.splitlines()[-1] == "train with: trainyard train other.toml --minutes 1"
    assert [source.path for source in sidecar.sources] == ["b.jsonl"]
    assert (sidecar.append_eod, sidecar.tokenizer.special_tokens) == (False, "parse")
    assert [step.kind for step in sidecar.steps] == ["read", "length", "deduplicate"]


def test_several_outputs_are_listed(folder: Path) -> None:
    write_texts("cat")
    Path("in/b.jsonl").write_text('{"text": "hat"}\n{"text": "mat"}\n')
    Path("web.toml").write_text("files_per_output = 1\n" + DATA_FILE)
    shown = run_verb("web.toml").splitlines()
    assert [line.split(",")[0] for line in shown[:-1]] == [
        "web_00_text_document.bin: 1 document",
        "web_01_text_document.bin: 2 documents",
    ]


@pytest.mark.parametrize(
    ("words", "problem", "hint"),
    [
        ("a.jsonl --tokenizer small", "no output given", "pass -o, such as -o data/web"),
        *(
            (f"a.jsonl -o {name}", f"output={name!r} is not the prefix of a file", "end it in")
            for name in (".", "..", "web/", "a/.", "~/web", "~you/web")
        ),
        ("-o x --tokenizer small", "no inputs given", "name at least one file, folder"),
        ("no.toml", "cannot read the data file no.toml: ", ""),
        ("a.toml b.toml", "b.toml is a second data file", "prepare one at a time"),
        (
            "a.jsonl -o x --tokenizer t --train-tokenizer 300",
            *("both --tokenizer and --train-tokenizer given", "to train one"),
        ),
        (f"in -o {LONG}", "tokenizer.json: File name too long", "hint: "),
        (f"in -o o --tokenizer {LONG}", "xxx: File name too long", "hint: "),
        ('in -o o --json-key a"b', "json_key: a key must not have quotes, backslashes", "hint: "),
        (r"in -o o --json-key a\b", "json_key: a key must not have quotes, backslashes", "hint: "),
        (
            "in -o o --json-key a\x07b",
            "json_key: a key must not have quotes, backslashes",
            "hint: ",
        ),
        ("in -o o --json-key a/b", "json_key: it names the token files, so it must not", "hint: "),
        ("in nul.toml", "output: a path must not have a NUL character", "hint: "),
        ("in -o o --fetch http://me:pass@host/x", "--fetch takes the name of a corpus", "hint: "),
        ("field.toml", "input: unknown field; did you mean 'inputs'?  [field.toml]", ""),
        ("list.toml", 'inputs: must be a list, such as ["a", "b"] or [1, 2] (got \'in\')', ""),
        ("type.toml", "json_key: must be a valid string (got 3)  [type.toml]", ""),
    ],
)
def test_a_mistake_is_named(folder: Path, words: str, problem: str, hint: str) -> None:
    Path("nul.toml").write_text('output = "a\\u0000b"\n')
    Path("field.toml").write_text(f'input = ["in"]\n{DATA_FILE}')
    Path("list.toml").write_text(DATA_FILE.replace('["in"]', '"in"'))
    Path("type.toml").write_text(f"json_key = 3\n{DATA_FILE}")
    done = trainyard("prepare", *words.split(" "), folder=folder)
    assert done.returncode == 2
    assert problem in done.stderr and hint in done.stderr
    assert "Traceback" not in done.stderr and "pass@" not in done.stderr


def test_a_bad_document_ends_the_run(folder: Path) -> None:
    with pytest.raises(DataError, match=r'in/a.jsonl:5: the value of "text" is 7, not a string'):
        run_verb("web.toml")
    status = run_verb("web.toml", "--status")
    assert "unit-000000 has an unreadable document" in status
    assert "0 of 1 units, 0 outputs done" in status


def test_no_work_has_no_status(folder: Path) -> None:
    nothing = "no work in progress: it is finished or has not started\n"
    assert run_verb("web.toml", "--status") == nothing
    run_verb("web.toml", "--on-error", "quarantine")
    assert run_verb("web.toml", "--status") == nothing


def test_the_status_of_unfinished_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        Path(f"in/{number}.txt").write_text(f"the cat {number}")
    work = UnitWorker.run

    def run(self: UnitWorker, unit: list[Any], *rest: Any) -> Any:
        if unit[0].path.name == "2.txt":
            raise KeyboardInterrupt
        return work(self, unit, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(UnitWorker, "run", run)
        prepare(load_corpus(Path("web.toml"), {}), on_error="quarantine", unit_bytes=1)
    shown = run_verb("web.toml", "--status").splitlines()
    total = sum(path.stat().st_size for path in Path("in").iterdir())
    assert shown[0] == f"{1800 / total:.1f} % of 0.000 GB of input, 2 of 9 units, 0 outputs done"


def test_the_status_of_work_in_flight(folder: Path) -> None:
    with Path("in/big.jsonl").open("w") as file:
        for number in range(400):
            file.write(json.dumps({"text": f"{number} " + "the cat sat " * 50_000}) + "\n")
    Path("plain.toml").write_text(DATA_FILE.partition("[[")[0])
    command = [sys.executable, "-c", "from trainyard.cli.main import main; main()", "prepare"]
    command += ["plain.toml", "--workers", "2", "--on-error", "quarantine"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        wait_until(lambda: process.poll() or list(Path().glob("web.work/claims/unit-*")))
        shown = run_verb("plain.toml", "--status")
    finally:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=WATCHDOG_SECONDS)
    assert (process.returncode, said.splitlines()[-1:]) == (130, [b"interrupted"])
    assert "% of 0.240 GB of input, " in shown
    assert "documents, " in shown
    assert f"-{process.pid}-" not in shown  # it only waits for its workers
    assert ": waiting, last update " in shown or ": unit-" in shown
    assert not list(Path().glob("web.work/claims/*"))  # given back at once
    assert not Path("web_text_document.bin").exists()


def test_a_tokenizer_is_trained_first(folder: Path) -> None:
    shown = run_verb("in", "-o", "new", "--train-tokenizer", "262", "--on-error", "quarantine")
    sidecar = load_sidecar("new_text_document")
    assert shown.startswith("new_text_document.bin: 4 documents, ")
    assert (sidecar.tokenizer.name, sidecar.tokenizer.eod_id) == ("new_tokenizer", 261)
    tokenizer = load_tokenizer(Path("new_tokenizer"))
    sidecar.check_against(tokenizer.name, tokenizer.fingerprint, "new")
    # Again is no mistake when all is done.
    again = run_verb("in", "-o", "new", "--train-tokenizer", "262", "--on-error", "quarantine")
    assert again == shown


def test_one_file_and_an_output_are_enough(folder: Path) -> None:
    Path("my.txt").write_text(Path(typer.__file__).read_text(encoding="utf-8"))
    Path("in/notes.md").touch()
    done = trainyard("prepare", "my.txt", "-o", "my", folder=folder)
    assert "skipped" not in done.stderr
    shown = done.stdout
    assert shown.endswith("train with: trainyard train my.toml --minutes 1\n")
    assert load_sidecar("my_text_document").tokenizer.vocabulary_size == 320
    assert run_verb("my.txt", "-o", "my") == shown
    assert run_verb("my.txt", "-o", "my", "--status").startswith("no work in progress")


def test_what_is_skipped_is_told(folder: Path) -> None:
    write_texts("the cat sat on the mat")
    for name in ("a.md", "b.MD", "c.pdf", ".d"):
        (Path("in") / name).touch()
    done = trainyard("prepare", "in", "-o", "new", "--tokenizer", "small", folder=folder)
    assert done.stderr.startswith("skipped 2 .md, 1 .pdf, 1 hidden; to read other text files ")
    assert r"\x1b[2J_text_document.bin: 1 document" in run_verb(
        "in", "-o", "\x1b[2J", "--tokenizer", "small"
    )


@pytest.mark.parametrize(
    ("n_bytes", "size"),
    [
        *((100, 320), (30_000, 512), (200_000, 1024), (10**6, 2048), (3 * 10**7, 4096)),
        *((10**9, 16384), (2 * 2**30, 0)),
    ],
)
def test_the_text_decides_the_vocabulary(folder: Path, n_bytes: int, size: int) -> None:
    Path("big.txt").touch()
    os.truncate("big.txt", n_bytes)  # a hole in the file costs no disk
    corpus = load_corpus(None, {"inputs": ["big.txt"], "output": "x"})
    chosen, n_tokens = choose_tokenizer(corpus)
    assert (chosen.tokenizer, n_tokens) == ("x_tokenizer" if size else "gpt2", size)
    assert choose_tokenizer(corpus, 300)[0].tokenizer == "x_tokenizer"


def test_the_trained_tokenizer_lies_where_the_data_file_says(folder: Path) -> None:
    write_texts("the cat sat on the mat")
    text = Path("web.toml").read_text()
    Path("new.toml").write_text(re.sub('tokenizer = ".*"', 'tokenizer = "mine"', text))
    run_verb("new.toml", "--train-tokenizer", "262")
    assert Path("mine/tokenizer.json").exists()
    Path("new.toml").write_text(re.sub('tokenizer = ".*"\n', "", text))
    run_verb("new.toml", "--train-tokenizer", "262", "--overwrite")
    assert Path("web_tokenizer/tokenizer.json").exists()


def test_what_a_step_dropped_is_told_beside_a_fault_of_the_same_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainyard.corpus.sources import documents

    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", 1000)
    with Path("in/a.jsonl").open("a") as file:
        file.write(json.dumps({"text": "y" * 2000}) + "\n" * 2)
    monkeypatch.setattr("trainyard.corpus.sources.blocks.BLOCK_BYTES", 500)
    done = trainyard("prepare", "web.toml", "--on-error", "quarantine", folder=folder)
    assert "quarantined, too long: 1" in done.stderr
    assert "  length dropped 1: too long" in done.stdout
