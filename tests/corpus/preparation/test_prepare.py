"""Tests of tokenizing: Megatron-LM's bytes, any number of workers, faults, and taking up again."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.command import Fork
from tests.waiting import WATCHDOG_SECONDS, wait_until

from trainyard.config.corpus import Corpus, output_prefixes
from trainyard.corpus.preparation import worker
from trainyard.corpus.preparation.plan import PreparationPlan, plan_corpus
from trainyard.corpus.preparation.prepare import (
    prepare,
    read_status,
    record_tokenizer,
    train_on_inputs,
    work_path,
)
from trainyard.corpus.preparation.unit import UnitWorker
from trainyard.corpus.preparation.work_folder import Progress, WorkFolder, name_process
from trainyard.corpus.preparation.worker import CorpusWorker
from trainyard.corpus.sources.files import Segment
from trainyard.data.indexed import IndexedDataset
from trainyard.data.sidecar import Sidecar, load_sidecar
from trainyard.data.tokenizer import load_tokenizer
from trainyard.data.vocabulary import load_vocabulary
from trainyard.errors import DataError, MachineError

EOD = 279
FILES = [f"out_text_document.{end}" for end in ("bin", "idx", "json")]


def lines(texts: list[object]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def prefix_of(corpus: Corpus) -> str:
    return output_prefixes(corpus, 1)[0]


def read_output(prefix: str) -> tuple[bytes, ...]:
    return tuple(Path(f"{prefix}.{end}").read_bytes() for end in ("bin", "idx", "json"))


def zeros(content: bytes) -> bytes:
    return bytes(len(content))


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def change(corpus: Corpus, **values: Any) -> Corpus:
    return Corpus.model_validate({**corpus.model_dump(), **values})


@pytest.fixture
def small(tmp_path: Path, tokenizer_folder: Path) -> Corpus:
    """A corpus of the file `in/a.jsonl`, which the test writes."""
    (tmp_path / "in").mkdir()
    return Corpus(
        inputs=(str(tmp_path / "in"),),
        output=str(tmp_path / "out"),
        tokenizer=str(tokenizer_folder),
    )


@pytest.fixture
def corpus(small: Corpus, tmp_path: Path) -> Corpus:
    """A corpus of four files with bad documents at known places."""
    first = [f"the cat {n} " * (n % 7) for n in range(200)]
    broken: list[object] = [*first]
    broken[50], broken[51], broken[150] = None, 7, "half \ud800"
    (tmp_path / "in/a.jsonl").write_bytes(lines(broken) + b'{"body": "no"}\nnot json\n')
    (tmp_path / "in/b.txt").write_bytes(b"a whole file\n")
    (tmp_path / "in/c.txt").write_bytes(b"bad \xff file\n")
    (tmp_path / "in/d.jsonl").write_bytes(lines([*first, "the end"]))
    return small


def run(corpus: Corpus, **arguments: Any) -> Sidecar:
    """Prepares one pair of token files, cut into many units, with bad documents set aside."""
    return prepare(corpus, **{"on_error": "quarantine", "unit_bytes": 1500, **arguments})[0]


def run_and_forget(corpus: Corpus, **arguments: Any) -> tuple[bytes, ...]:
    """Prepares a corpus and removes what was made; gives its bytes."""
    run(corpus, **arguments)
    made = read_output(prefix_of(corpus))
    for path in Path(corpus.output).parent.glob("out_*"):
        path.unlink()
    return made


def plan_of(corpus: Corpus) -> PreparationPlan:
    """The plan that `run` follows."""
    tokenizer = record_tokenizer(corpus, load_vocabulary(corpus.tokenizer))
    return plan_corpus(corpus, tokenizer, 1500)


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "in")


@pytest.mark.parametrize("workers", [1, 2])
def test_bytes_are_those_of_megatron(shared_data: Path, tmp_path: Path, workers: int) -> None:
    novels = Corpus(
        inputs=(str(shared_data / "corpora/novels.jsonl"),),
        output=str(tmp_path / "novels"),
        tokenizer=str(shared_data / "gpt2"),
    )
    sidecar = prepare(novels, workers=workers, unit_bytes=5 * 2**20)[0]
    prefix = prefix_of(novels)
    assert Path(prefix).name == "novels_text_document"
    for end in ("bin", "idx"):
        theirs = shared_data / f"megatron/novels_text_document.{end}"
        assert Path(f"{prefix}.{end}").read_bytes() == theirs.read_bytes()
    assert (sidecar.documents, sidecar.tokens) == (6578, 7432934 + 6578)
    assert sidecar.text_bytes == 29973099
    assert leftovers(tmp_path) == [f"novels_text_document.{end}" for end in ("bin", "idx", "json")]


def test_an_empty_document_has_no_sequence_but_an_entry(small: Corpus, tmp_path: Path) -> None:
    (tmp_path / "in/a.jsonl").write_bytes(lines(["cat", "", "", "hat"]))
    sidecar = run(small)
    dataset = IndexedDataset(prefix_of(small))
    assert dataset.document_indices.tolist() == [0, 1, 1, 1, 2]
    assert [dataset.tokens(i)[-1] for i in range(len(dataset))] == [EOD, EOD]
    assert (sidecar.documents, sidecar.empty_documents, sidecar.sequences) == (4, 2, 2)
    assert sidecar.tokens == dataset.n_tokens
    without = run(change(small, append_eod=False), overwrite=True)
    assert without.tokens == sidecar.tokens - 2
    assert EOD not in IndexedDataset(prefix_of(small)).stream


@pytest.mark.parametrize("workers", [1, 2])
def test_special_tokens_in_texts_are_counted_or_split_on(
    small: Corpus, tmp_path: Path, workers: int
) -> None:
    texts: list[object] = ["cat<|endoftext|>hat<|endoftext|>\n", "the <|endoftext|>", "<|end"] * 90
    (tmp_path / "in/a.jsonl").write_bytes(lines(texts))
    (tmp_path / "in/b.txt").write_text("<|endoftext|>".join(["the mat\n"] * 50))
    sidecar = run(small, workers=workers)
    assert (sidecar.special_texts, sidecar.documents) == ({"<|endoftext|>": 90 * 3 + 49}, 271)
    assert (sidecar.split_on, sidecar.lost_bytes) == (msgspec.UNSET, msgspec.UNSET)
    assert b"split_on" not in Path(f"{prefix_of(small)}.json").read_bytes(), "as before the option"
    assert np.count_nonzero(IndexedDataset(prefix_of(small)).stream == EOD) == 271
    parsed = run(change(small, special_tokens="parse"), overwrite=True)
    assert np.count_nonzero(IndexedDataset(prefix_of(small)).stream == EOD) == 271 + 90 * 3 + 49
    assert parsed.tokenizer.special_tokens == "parse"

    split = change(small, split_on="<|endoftext|>")
    sidecar = run(split, workers=workers, overwrite=True)
    assert (sidecar.special_texts, sidecar.documents) == (msgspec.UNSET, 90 * 4 + 50)
    assert sidecar.split_on == "<|endoftext|>"
    dataset = IndexedDataset(prefix_of(small))
    decode = load_tokenizer(small.tokenizer).decode
    first = [decode(dataset.tokens(number)[:-1]) for number in range(5)]
    assert first == ["cat", "hat", "the ", "<|end", "cat"]
    with pytest.raises(DataError, match=r"with split_on=None, not split_on='x'"):
        plan_corpus(change(small, split_on="x"), sidecar.tokenizer).identity.check_equal(
            plan_corpus(small, sidecar.tokenizer).identity, "x was begun", ""
        )


def test_another_key_names_the_files(small: Corpus, tmp_path: Path) -> None:
    (tmp_path / "in/a.jsonl").write_bytes(b'{"body": "cat"}\n')
    assert run(change(small, json_key="body")).json_key == "body"
    assert (tmp_path / "out_body_document.bin").exists()


QUARANTINED = {
    "invalid UTF-8": 1,
    "lone surrogate": 1,
    "malformed JSON": 1,
    "missing key": 1,
    "not a string": 2,
}


@pytest.mark.parametrize("unit_bytes", [700, 1500, 10**9])
def test_bad_documents_are_set_aside_counted_and_named(
    corpus: Corpus, tmp_path: Path, unit_bytes: int
) -> None:
    sidecar = run(corpus, unit_bytes=unit_bytes)
    assert sidecar.quarantined == QUARANTINED
    source = Path(corpus.inputs[0])
    places = [place.split(": ")[0] for place in sidecar.quarantined_places]
    numbers = [51, 52, 151, 201, 202]
    assert places == [f"{source}/a.jsonl:{number}" for number in numbers] + [f"{source}/c.txt"]
    assert sidecar.documents == 197 + 1 + 201
    expected = [f"the cat {n} " * (n % 7) for n in range(200)]
    good = [text for n, text in enumerate(expected) if n not in (50, 51, 150)]
    tokenizer = load_tokenizer(Path(corpus.tokenizer))
    dataset = IndexedDataset(prefix_of(corpus))
    texts = [tokenizer.decode(dataset.tokens(i)[:-1]) for i in range(len(dataset))]
    assert texts == [text for text in [*good, "a whole file\n", *expected, "the end"] if text]
    aside = (tmp_path / "out_text_document.quarantine.jsonl").read_bytes().splitlines()
    found = [msgspec.json.decode(line) for line in aside]
    assert [Path(one["file"]).name for one in found] == ["a.jsonl"] * 5 + ["c.txt"]
    assert [one["position"] for one in found] == [*numbers, 0]
    originals = (source / "a.jsonl").read_text().splitlines()
    assert [one["raw"] for one in found[:5]] == [originals[number - 1] for number in numbers]
    assert found[5]["raw"] == "base64:YmFkIP8gZmlsZQo="
    assert {one["kind"] for one in found} == set(QUARANTINED)
    assert found[1]["detail"] == 'the value of "text" is 7, not a string'


def test_the_number_of_workers_changes_nothing(corpus: Corpus, tmp_path: Path) -> None:
    results, messages = set(), set()
    corpus = change(corpus, steps=[{"kind": "deduplicate"}, {"kind": "near_deduplicate"}])
    for workers in (1, 3):
        run(corpus, workers=workers, overwrite=True)
        results.add(read_output(prefix_of(corpus)))
    assert leftovers(tmp_path) == [*FILES, "out_text_document.quarantine.jsonl"]
    for workers in (1, 3):
        with pytest.raises(DataError) as caught:
            run(corpus, workers=workers, on_error="stop", overwrite=True)
        messages.add(str(caught.value))
    assert len(results) == len(messages) == 1
    assert 'a.jsonl:51: the value of "text" is null, not a string' in messages.pop()


def test_several_commands_share_the_work(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_and_forget(corpus, unit_bytes=4000)
    log = tmp_path / "log"
    work = UnitWorker.run

    def run_unit(self: UnitWorker, unit: list[Segment], *rest: Any) -> Any:
        with log.open("a") as file:
            file.write(f"{os.getpid()} {unit[0].path.name} {unit[0].start}\n")
        wait_until(lambda: len({line.split()[0] for line in log.read_text().splitlines()}) == 3)
        return work(self, unit, *rest)

    monkeypatch.setattr(UnitWorker, "run", run_unit)
    forks = [Fork(lambda: run(corpus, unit_bytes=4000)) for _ in range(3)]
    assert [fork.wait().returncode for fork in forks] == [0, 0, 0]
    units = [line.split()[1:] for line in log.read_text().splitlines()]
    assert len(set(map(tuple, units))) == len(units), "no unit is done twice"
    assert read_output(prefix_of(corpus)) == expected
    log.unlink()
    assert leftovers(tmp_path) == [*FILES, "out_text_document.quarantine.jsonl"]


def test_only_the_first_places_of_a_kind_are_kept(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "in/a.jsonl").write_bytes(b"bad\n" * 1000 + lines(["cat"]))
    sidecar = run(corpus)
    assert sidecar.quarantined["malformed JSON"] == 1000
    places = [place.split(": ")[0] for place in sidecar.quarantined_places]
    assert places[:5] == [f"{tmp_path}/in/a.jsonl:{n}" for n in range(1, 6)]
    assert len(places) == 6
    assert (tmp_path / "out_text_document.quarantine.jsonl").read_bytes().count(b"\n") == 1001


def test_a_mended_document_lets_the_same_work_go_on(corpus: Corpus, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(DataError, match=r"a.jsonl:51: "):
            run(corpus, on_error="stop")
    assert run(corpus).quarantined == QUARANTINED
    assert leftovers(tmp_path) == [*FILES, "out_text_document.quarantine.jsonl"]


def test_a_finished_corpus_is_left_alone(corpus: Corpus, tmp_path: Path) -> None:
    first = run(corpus)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = run(corpus)
    assert again == first == load_sidecar(prefix_of(corpus))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"append_eod": False}, "with append_eod=True, not append_eod=False"),
        ({"special_tokens": "parse"}, "with special_tokens='text', not "),
        ({"tokenizer": "gpt2"}, "with another tokenizer"),
        ({"inputs": ("in/a.jsonl",)}, "with .*in/b.txt, which is not an input now"),
        ({"steps": [{"kind": "length"}]}, "with other steps"),
    ],
)
def test_a_corpus_of_other_options_is_refused(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: Any, what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    corpus = change(corpus, inputs=("in",))
    run(corpus)
    before = read_output(prefix_of(corpus))
    with pytest.raises(DataError, match=rf"out_text_document.bin was made {what}") as caught:
        run(change(corpus, **values))
    assert "--overwrite" in caught.value.hint
    assert read_output(prefix_of(corpus)) == before


def test_old_files_survive_a_run_that_fails(corpus: Corpus, tmp_path: Path) -> None:
    run(corpus)
    before = read_output(prefix_of(corpus))
    other = change(corpus, append_eod=False)
    with pytest.raises(DataError):
        run(other, on_error="stop", overwrite=True)
    assert read_output(prefix_of(corpus)) == before
    assert run(other, overwrite=True).append_eod is False
    assert leftovers(tmp_path) == [*FILES, "out_text_document.quarantine.jsonl"]


def interrupt(corpus: Corpus, monkeypatch: pytest.MonkeyPatch, number: int | None) -> list[int]:
    """Presses Ctrl-C at a unit, counted from 0; gives the start of each unit that is run."""
    begun: list[int] = []
    work = UnitWorker.run

    def run_unit(self: UnitWorker, unit: list[Segment], *rest: Any) -> Any:
        begun.append(unit[0].start)
        if len(begun) - 1 == number:
            raise KeyboardInterrupt
        return work(self, unit, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(UnitWorker, "run", run_unit)
        with nullcontext() if number is None else pytest.raises(KeyboardInterrupt):
            run(corpus)
    return begun


def test_work_that_was_interrupted_goes_on(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_and_forget(corpus)
    begun = interrupt(corpus, monkeypatch, 4)
    done = work_path(corpus) / "done"
    units = plan_of(corpus).stages[0]
    assert {path.name for path in done.iterdir()} == set(units[:4])
    assert not list((work_path(corpus) / "scratch").iterdir())
    status = read_status(corpus)
    assert status is not None
    assert (status.units_done, status.outputs_done, status.stopped) == (4, 0, [])
    assert 0 < status.done_bytes < status.total_bytes
    with pytest.raises(DataError, match="was begun with append_eod=True, not append_eod=False"):
        run(change(corpus, append_eod=False))
    rest = interrupt(corpus, monkeypatch, None)
    assert len(rest) == status.units - 4
    assert rest[0] == begun[4]
    assert read_output(prefix_of(corpus)) == expected
    assert read_status(corpus) is None


def stop_before_the_join(corpus: Corpus, monkeypatch: pytest.MonkeyPatch, n_joins: int = 0) -> Path:
    """Prepares a corpus until so many outputs are made; gives the work folder."""
    join, made = CorpusWorker._join, []

    def join_some(self: CorpusWorker, number: int) -> bool:
        if len(made) == n_joins:
            raise KeyboardInterrupt
        made.append(number)
        return join(self, number)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(CorpusWorker, "_join", join_some)
        run(corpus)
    return work_path(corpus)


@pytest.mark.parametrize("harm", [zeros, half, flipped, None])
@pytest.mark.parametrize(
    "name",
    [
        *("done/{unit}", "parts/{unit}.bin", "parts/{unit}.idx"),
        *("parts/{unit}.keys-0.npy", "parts/{unit}.documents.npy"),
        *("parts/*.quarantine", "done/compare-000-*"),
        *("parts/compare-000-*.mask", "parts/compare-000-*.ends.npy"),
    ],
)
def test_what_was_damaged_between_two_commands_is_made_anew(
    corpus: Corpus,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    harm: Callable[[bytes], bytes] | None,
) -> None:
    corpus = change(corpus, steps=[{"kind": "deduplicate"}])
    expected = run_and_forget(corpus)
    stop_before_the_join(corpus, monkeypatch)
    plan = plan_of(corpus)
    path = next(work_path(corpus).glob(name.format(unit=plan.stages[0][1])))
    if harm is None:
        path.unlink()
    else:
        path.write_bytes(harm(path.read_bytes()))
    run(corpus)
    assert read_output(prefix_of(corpus)) == expected
    label = plan.label(path.name.partition(".")[0])
    assert f"{label} is damaged or lost" in caplog.text or "done" in name


def test_an_output_that_went_away_is_made_anew(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = change(corpus, files_per_output=2)
    stop_before_the_join(corpus, monkeypatch, 1)
    (made,) = Path(corpus.output).parent.glob("out_*.bin")
    content = made.read_bytes()
    made.unlink()
    run(corpus)
    assert made.read_bytes() == content


def test_a_part_without_tokens_that_went_away_is_made_anew(
    small: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in/a.jsonl").write_bytes(lines(["", "a"]))
    (tmp_path / "in/b.jsonl").write_bytes(lines([""] * 400))
    work = stop_before_the_join(small, monkeypatch)
    for path in (work / "parts").glob("*.bin"):
        path.unlink()
    assert run(small).sequences == 1


def test_a_damaged_record_does_not_hide_an_unreadable_document(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError) as first:
        run(corpus, on_error="stop")
    done = work_path(corpus) / "done" / plan_of(corpus).stages[0][0]
    done.write_bytes(zeros(done.read_bytes()))
    with pytest.raises(DataError) as again:
        run(corpus, on_error="stop")
    assert again.value.problem == first.value.problem


def test_a_command_that_is_killed_may_be_given_again_any_number_of_times(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(corpus, monkeypatch, 0)
    folder = work_path(corpus)
    machine, pid, _ = name_process(os.getpid()).rsplit("-", 2)
    for _ in range(4):
        claim = folder / "claims" / plan_of(corpus).stages[0][0]
        claim.write_text(f"{machine}-{pid}-1")  # as if killed there
        assert interrupt(corpus, monkeypatch, 0) == [0]


def test_an_input_that_changed_in_the_middle_is_named(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = UnitWorker.run

    def append(self: UnitWorker, *arguments: Any) -> Any:
        with (tmp_path / "in/d.jsonl").open("ab") as file:
            file.write(b"\n")
        return work(self, *arguments)

    monkeypatch.setattr(UnitWorker, "run", append)
    with pytest.raises(DataError, match=r"d.jsonl changed while it was read: \d+ bytes") as caught:
        run(corpus)
    assert "it reads changed files again" in caught.value.hint


@pytest.mark.parametrize("edit", ["touched", "longer", "shorter"])
@pytest.mark.parametrize("steps", [[], [{"kind": "deduplicate"}]])
def test_an_input_that_changed_voids_its_own_units_alone(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: str, steps: list[Any]
) -> None:
    corpus = change(corpus, steps=steps)
    (tmp_path / "in/0.jsonl").write_bytes(lines([f"the hat {n}" for n in range(200)]))
    path = tmp_path / "in/b.txt"
    path.write_bytes(b"the hat " * 500)
    stop_before_the_join(corpus, monkeypatch)
    data = path.read_bytes()
    path.write_bytes({"touched": data, "longer": data * 2, "shorter": b"the hat"}[edit])
    os.utime(path, ns=(0, 0))
    again = interrupt(corpus, monkeypatch, None)
    assert again == [0]
    found = read_output(prefix_of(corpus))
    run(change(corpus, output=str(tmp_path / "new")))
    assert found == read_output(str(tmp_path / "new_text_document"))


def test_a_process_of_a_plan_that_was_replaced_publishes_nothing(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace_plan(*_: Any) -> None:
        (work_path(corpus) / "plan.json").write_bytes(b"{}")

    monkeypatch.setattr(worker, "join_output", replace_plan)
    with pytest.raises(MachineError, match=r"removed or replaced the work folder .*out.work"):
        run(corpus)
    assert leftovers(tmp_path) == ["out.work"]


def test_the_output_is_checked_before_the_work(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"the output folder /proc/no cannot be made: No such"):
        run(change(corpus, output="/proc/no/out"))
    run(change(corpus, output=str(tmp_path / "no/out")))  # which is made
    (tmp_path / "out_text_document.idx").touch()
    with pytest.raises(DataError, match=r"t.idx exists but is incomplete: .*json is") as caught:
        run(corpus)
    assert "--overwrite" in caught.value.hint
    with (tmp_path / "in/huge.txt").open("wb") as file:
        file.truncate(2**43)
    with pytest.raises(MachineError, match=r"need 4.0 TiB or more") as full:
        run(corpus, overwrite=True)
    assert "free space" in full.value.hint
    assert not work_path(corpus).exists()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "the inputs hold no document"),
        (b"\n\n", "the inputs hold no document"),
        (b'{"text": ""}\n', "1 without text"),
        (b"[]\nbad\n", r"read dropped 2: malformed JSON\n  .*/in/a.jsonl:1: expected.*\n  .*:2: "),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_an_empty_corpus_publishes_nothing(
    small: Corpus, tmp_path: Path, data: bytes, why: str, workers: int
) -> None:
    (tmp_path / "in/b.jsonl").write_bytes(b"\n")
    (tmp_path / "in/a.jsonl").write_bytes(data)
    with pytest.raises(DataError, match=f"the corpus is empty: .*{why}") as caught:
        run(small, workers=workers, unit_bytes=1)
    assert "json_key" in caught.value.hint
    with pytest.raises(DataError, match=f"the corpus is empty: .*{why}") as caught:
        train_on_inputs(change(small, tokenizer="new"), 260, overwrite=False, on_error="quarantine")
    assert leftovers(tmp_path) == []
    (tmp_path / "in/a.jsonl").write_bytes(lines(["cat"]))
    assert run(small).documents == 1


def test_progress_is_told(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "BEAT_SECONDS", 0.001)
    monkeypatch.setattr("trainyard.corpus.preparation.prepare.STATES_PER_SECOND", 1000)
    seen: list[Progress] = []
    told, finish = threading.Event(), WorkFolder.finish

    def note(progress: Progress) -> None:
        seen.append(progress)
        told.set()

    def finish_and_wait(*arguments: Any) -> None:
        finish(*arguments)
        told.clear()
        assert told.wait(WATCHDOG_SECONDS)

    monkeypatch.setattr(WorkFolder, "finish", finish_and_wait)
    run(corpus, on_progress=note)
    assert seen[-1].units_done > seen[0].units_done
    assert seen[-1].done_bytes > seen[0].done_bytes
    assert len(seen[-1].workers) == 1


def test_training_names_bad_documents_and_keeps_old_tokenizers(
    corpus: Corpus, tmp_path: Path
) -> None:
    new = change(corpus, tokenizer=str(tmp_path / "new"))
    with pytest.raises(DataError, match=r"a.jsonl:51: the value of"):
        train_on_inputs(new, 262, overwrite=False)
    new = change(new, inputs=(str(tmp_path / "in/d.jsonl"),))
    train_on_inputs(new, 262, overwrite=False)
    train_on_inputs(new, 262, overwrite=False)  # as another process, or after a kill
    with pytest.raises(DataError, match=r"a different tokenizer exists already: .*tokenizer.json"):
        train_on_inputs(new, 261, overwrite=False)
    assert load_tokenizer(tmp_path / "new").vocabulary_size == 262
    train_on_inputs(new, 261, overwrite=True)
    assert not list(tmp_path.glob("new.*"))
    assert load_tokenizer(tmp_path / "new").vocabulary_size == 261
