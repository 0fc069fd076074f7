"""A run folder is self-contained: moved, without its tokenizer and data, every verb reads it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.command import call, trainyard

from trainyard.api import checkpoints as api
from trainyard.checkpoint.format import TOKENIZER, read_manifest
from trainyard.checkpoint.resume import find_checkpoint, newest_checkpoint
from trainyard.cli.check import checkpoint as check_checkpoint
from trainyard.cli.evaluate import evaluate
from trainyard.cli.export import export
from trainyard.cli.generate import generate
from trainyard.cli.report import report
from trainyard.cli.show import show
from trainyard.config.corpus import Corpus
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.corpus.preparation.prepare import prepare
from trainyard.corpus.preparation.train_tokenizer import train_tokenizer
from trainyard.data.vocabulary import load_vocabulary
from trainyard.errors import CheckpointError
from trainyard.training.run_folder import open_run, write_run_folder
from trainyard.training.worker import run_worker

TEXT = "It was a dark and stormy night, and the café 漢 was closed; it was late. "


def run_of(folder: Path, length: str = "4 steps") -> Run:
    shape = ["model.d_model=16", "model.d_ff=32", "model.vocabulary_size=280"]
    paths = [f"data.blend.prefixes=['{folder}/web_text_document']", f"tokenizer.path={folder}/tok"]
    length = [f"train.length={length}", "schedule.decay=4 steps", "schedule.warmup=1 steps"]
    split = ["data.split=80,10,10", "evaluate.batches=1", "evaluate.sample_prompts=['It was']"]
    quiet = ["log.tensorboard=false", f"data.cache_folder={folder}/cache", "name=web"]
    return load_run("tiny", [*shape, *paths, *length, *split, *quiet]).run


def prepare_in(folder: Path) -> None:
    folder.mkdir()
    (folder / "a.jsonl").write_text(f"{json.dumps({'text': TEXT * 3})}\n" * 60)
    train_tokenizer([TEXT] * 3, 280, folder / "tok")
    corpus = Corpus(
        inputs=(f"{folder}/a.jsonl",), output=f"{folder}/web", tokenizer=f"{folder}/tok"
    )
    prepare(corpus)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run; its tokenizer was deleted before any rank read it."""
    folder = tmp_path_factory.mktemp("here")
    prepare_in(folder / "data")
    run = run_of(folder / "data")
    write_run_folder(open_run(folder / "web", run=run), "auto")
    (folder / "data/tok").rename(folder / "tok")
    run_worker(open_run(folder / "web"))
    (folder / "tok").rename(folder / "data/tok")
    return folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def moved(copied: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run folder alone, elsewhere, in a process that cannot reach where it was made."""
    monkeypatch.chdir(tmp_path)
    Path("elsewhere").mkdir()
    shutil.move(copied / "web", "elsewhere/web")
    shutil.rmtree(copied)
    hidden = trained.rename(trained.with_name("hidden"))
    try:
        yield Path("elsewhere/web")
    finally:
        hidden.rename(trained)


def test_several_prompts_are_continued_in_one_batch(moved: Path) -> None:
    few = ("--tokens", "8", "--temperature", "0")
    alone = [call(generate, moved, "--prompt", text, *few) for text in ("It was", "a")]
    both = call(generate, moved, "--prompt", "It was", "--prompt", "a", *few)
    assert both == f"--- prompt 1 of 2\n{alone[0]}--- prompt 2 of 2\n{alone[1]}"
    checkpoint = api.SavedCheckpoint(moved)
    texts = api.generate(checkpoint, ["It was", "a"], tokens=8, temperature=0)
    assert [f"{text}\n" for text in texts] == alone
    samples = call(generate, moved, "--prompt", "a", "--prompt", "b", "--samples", "2", *few)
    assert "--- prompt 2 of 2, sample 1 of 2\nb" in samples
    assert api.generate(checkpoint, []) == []


def test_every_verb_reads_a_moved_run(moved: Path) -> None:
    text = call(generate, moved, "--prompt", "It was", "--tokens", "8")
    assert text.startswith("It was")
    Path("book.txt").write_text(TEXT, encoding="utf-8")
    found = json.loads(call(evaluate, moved, "--data", "book.txt", "--json"))
    assert found["n_bytes"] == len(TEXT.encode())
    call(report, moved, "--output", "report.html")
    assert "It was" in Path("report.html").read_text(encoding="utf-8")
    call(export, moved, "--output", "hf", "--no-verify")
    copy = load_vocabulary(moved / "tokenizer")
    assert load_vocabulary("hf/tokenizer.json").fingerprint == copy.fingerprint
    call(check_checkpoint, moved)
    assert f"a copy, fingerprint {copy.fingerprint[:16]}" in call(show, moved)
    assert "280" in call(show, moved / "tokenizer")


def test_ctrl_c_ends_the_line_of_the_text(moved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> Iterator[str]:
        yield " a dark"
        raise KeyboardInterrupt

    terminal = SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("trainyard.cli.generate.sys", terminal)
    monkeypatch.setattr("trainyard.cli.generate.stream_text", interrupted)
    done = trainyard("generate", str(moved), "--prompt", "It was", folder=Path.cwd())
    assert (done.returncode, done.stdout) == (130, "It was a dark\n"), done.stderr
    assert done.stderr == "interrupted\n"


def test_a_checkpoint_alone_is_enough(moved: Path) -> None:
    checkpoint = find_checkpoint(moved)
    shutil.move(checkpoint, "step-00000004")
    shutil.rmtree(moved)
    assert call(generate, "step-00000004", "--prompt", "It was").startswith("It was")
    assert "a copy, fingerprint" in call(show, "step-00000004")


def test_copies_are_of_the_same_tokenizer(trained: Path) -> None:
    fingerprint = load_vocabulary(trained / "data/tok").fingerprint
    assert load_vocabulary(trained / "web/tokenizer").fingerprint == fingerprint
    checkpoint = find_checkpoint(trained / "web")
    manifest = read_manifest(checkpoint)
    assert manifest.tokenizer is not None
    assert manifest.tokenizer.fingerprint == fingerprint
    assert (checkpoint / TOKENIZER).read_bytes() == (trained / "data/tok" / TOKENIZER).read_bytes()


def test_another_tokenizer_is_refused_before_it_is_copied(copied: Path) -> None:
    (copied / "data/web_text_document.json").unlink()  # as token files of Megatron-LM have none
    train_tokenizer([TEXT[::-1]] * 3, 280, copied / "data/tok")
    before = (copied / "web/tokenizer" / TOKENIZER).read_bytes()
    with pytest.raises(CheckpointError, match=r"tokenizer.path='.*tok': the tokenizer has finger"):
        write_run_folder(open_run(copied / "web", run=run_of(copied / "data")), "auto")
    assert (copied / "web/tokenizer" / TOKENIZER).read_bytes() == before


def test_a_run_goes_on_with_its_own_copy(copied: Path) -> None:
    run = run_of(copied / "data")
    shutil.rmtree(copied / "data/tok")
    newest = newest_checkpoint(copied / "web/checkpoints")
    own = {"path": str(copied / "web/tokenizer")}
    run = run.model_copy(update={"tokenizer": run.tokenizer.model_copy(update=own)})
    write_run_folder(open_run(copied / "web", run=run), "must")
    run_worker(open_run(copied / "web"), "must")
    assert newest_checkpoint(copied / "web/checkpoints") == newest
