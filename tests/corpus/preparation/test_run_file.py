"""The run file that `prepare` leaves: valid, written once, and never over an edit."""

from __future__ import annotations

import multiprocessing
import shlex
from pathlib import Path

import pytest
from tests.waiting import prepare_fork

from trainyard.config.corpus import Corpus
from trainyard.config.load import load_run
from trainyard.corpus.preparation.prepare import choose_tokenizer, prepare, train_on_inputs
from trainyard.corpus.preparation.run_file import RunFile, write_run_file
from trainyard.data.sidecar import Sidecar
from trainyard.layout.resolve import resolve
from trainyard.planning.hardware import LocalMachine

Prepared = tuple[Corpus, list[Sidecar]]


def build(output: str, *, overwrite: bool = False) -> Prepared:
    corpus, size = choose_tokenizer(Corpus(inputs=("in",), output=output))
    train_on_inputs(corpus, size, overwrite=overwrite)
    return corpus, prepare(corpus, overwrite=overwrite)


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    source = Path(shlex.__file__).read_text(encoding="utf-8")
    for number in range(3):
        Path(f"in/{number}.txt").write_text(source[number * 3000 : (number + 1) * 3000])
    return build("web")


def test_it_is_a_run_that_can_start(prepared: Prepared) -> None:
    found = write_run_file(*prepared)
    assert found.command == "trainyard train web.toml --minutes 1"
    run = load_run("web.toml").run
    assert resolve(run).n_steps >= 20
    assert (run.name, run.tokenizer.path) == ("web", "web_tokenizer")
    assert run.data.blend.prefixes == ("web_text_document",)
    assert run.model.vocabulary_size == prepared[1][0].tokenizer.vocabulary_size
    assert found.note.startswith("web.toml: 0.1M parameters, for ")
    assert list(Path().glob("web.toml*")) == [Path("web.toml")]


def test_it_lists_every_output(prepared: Prepared) -> None:
    corpus = prepared[0].model_copy(update={"files_per_output": 2})
    write_run_file(corpus, prepare(corpus))
    run = load_run("web.toml").run
    assert run.data.blend.prefixes == ("web_00_text_document", "web_01_text_document")


def test_many_processes_write_one_file(prepared: Prepared) -> None:
    prepare_fork()
    with multiprocessing.get_context("fork").Pool(4) as pool:
        found = pool.starmap(write_run_file, [prepared] * 8, chunksize=1)
    assert len({each.command for each in found}) == 1
    assert list(Path().glob("web.toml*")) == [Path("web.toml")]


def test_it_is_written_once_for_the_same_data(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a machine that would get another one: a run may have begun with it."""
    first = write_run_file(*prepared)
    before = Path("web.toml").read_text()
    large = LocalMachine("8 x H100", 8, True, 1e15, "bf16")
    monkeypatch.setattr("trainyard.corpus.preparation.run_file.find_local_machine", lambda: large)
    again = write_run_file(*prepared)
    assert (again.note, bool(again.command)) == (first.note, True)
    assert Path("web.toml").read_text() == before
    Path("web.toml").unlink()
    write_run_file(*prepared)
    assert Path("web.toml").read_text() != before


def edit(old: str, new: str) -> str:
    text = Path("web.toml").read_text()
    assert old in text
    Path("web.toml").write_text(text.replace(old, new))
    return Path("web.toml").read_text()


def prepare_more_text() -> RunFile:
    Path("in/more.txt").write_text("some more text\n" * 50)
    return write_run_file(*build("web", overwrite=True))


def test_other_data_gets_a_new_one(prepared: Prepared) -> None:
    write_run_file(*prepared)
    before = Path("web.toml").read_text()
    assert "parameters" in prepare_more_text().note
    assert Path("web.toml").read_text() != before


@pytest.mark.parametrize("old", ["n_layers = 2", "# Every field", '"web"\n'])
def test_an_edited_one_is_left_alone(prepared: Prepared, old: str) -> None:
    write_run_file(*prepared)
    edited = edit(old, f"\n{old}")
    found = prepare_more_text()
    assert Path("web.toml").read_text() == edited
    assert found.note == "web.toml has been edited: left as it is"
    assert found.command.startswith("trainyard train web.toml --minutes ")


def test_what_is_somebody_elses_is_left_alone(prepared: Prepared) -> None:
    Path("web.toml").mkdir()
    found = write_run_file(*prepared)
    assert found.note == "web.toml cannot be read (Is a directory): left as it is"
    assert found.command == ""
    Path("web.toml").rmdir()
    Path("web.toml").write_text('inputs = ["in"]\n')  # a data file, for instance
    found = write_run_file(*prepared)
    assert Path("web.toml").read_text() == 'inputs = ["in"]\n'
    assert found.note == "web.toml was not written by prepare: left as it is"
    assert found.command == ""


@pytest.mark.parametrize(
    ("output", "name"),
    [("my text", "my-text"), ("sub/.été+1", "t-1"), ("___", "run"), ("a" * 120, "a" * 100)],
)
def test_any_output_gives_a_name_and_a_command(prepared: Prepared, output: str, name: str) -> None:
    Path("sub").mkdir()
    found = write_run_file(*build(output))
    words = shlex.split(found.command)
    assert words[:2] == ["trainyard", "train"]
    assert load_run(words[2]).run.name == name
