"""Tasks: the scores of lm-eval, item by item; files that are wrong; what the verb leaves."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tests.command import call, trainyard
from tests.evaluation.lm_eval_scores import GOLDEN, ITEMS, ROOT, TASKS, save_model, their_rows

from trainyard.api.checkpoints import evaluate_tasks
from trainyard.cli.evaluate import evaluate
from trainyard.errors import DataError
from trainyard.evaluation.tasks import read_tasks

FILES = [str(ITEMS / f"{name}.jsonl") for name in TASKS]
LARGEST_DIFFERENCE = 1e-4  # nats
NAMES = {"acc": "accuracy", "acc_norm": "normalized_accuracy", "perplexity": "perplexity"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run, `tiny`, of random weights, at step 3."""
    parent = tmp_path_factory.mktemp("tasks")
    save_model(parent / "runs" / "tiny")
    return parent


@pytest.fixture(scope="module")
def evaluated(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What `evaluate --tasks --json` prints, and the items it writes."""
    run, items = str(folder / "runs" / "tiny"), folder / "items.jsonl"
    printed = call(evaluate, run, *FILES[1:], "--tasks", FILES[0], "--json", "--items", str(items))
    lines = [json.loads(line) for line in items.read_text().splitlines()]
    return json.loads(printed)["tasks"], lines


def test_every_item_has_the_log_likelihoods_and_decisions_of_lm_eval(
    evaluated: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    scores, items = evaluated
    golden = json.loads(GOLDEN.read_text())
    expected = [item for task in golden.values() for item in task["items"]]
    assert len(items) == len(expected) == 53
    for found, theirs in zip(items, expected, strict=True):
        assert found["log_likelihoods"] == pytest.approx(
            theirs["log_likelihoods"], rel=0, abs=LARGEST_DIFFERENCE
        ), found["place"]
        assert found["greedy"] == theirs["greedy"], found["place"]
        decisions = (found["correct"], found["correct_normalized"])
        assert decisions == (theirs["acc"], theirs.get("acc_norm")), found["place"]
    for name, task in golden.items():
        for key, value in task["scores"].items():
            ours = NAMES[key.removesuffix("_stderr")] + ("_stderr" if "_stderr" in key else "")
            assert scores[f"{name}/{name}"].get(ours) == pytest.approx(value), (name, key)


@pytest.mark.exhaustive
def test_lm_eval_still_says_so(tmp_path: Path) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm-eval is not installed: pip install 'lm-eval[hf]'")
    command = [sys.executable, "-m", "tests.evaluation.lm_eval_scores", str(tmp_path / "now.json")]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    found, expected = (json.loads(path.read_text()) for path in (tmp_path / "now.json", GOLDEN))
    for name, task in expected.items():
        for now, then in zip(found[name]["items"], task["items"], strict=True):
            assert now.pop("log_likelihoods") == pytest.approx(
                then.pop("log_likelihoods"), rel=0, abs=LARGEST_DIFFERENCE
            )
            assert now == then


def test_the_scores_stay_beside_those_of_held_out_text(
    folder: Path, evaluated: tuple[dict[str, Any], list[dict[str, Any]]]
) -> None:
    run = folder / "runs" / "tiny"
    (folder / "text.txt").write_text("One short text.", encoding="utf-8")
    call(evaluate, str(run), "--data", str(folder / "text.txt"))
    known = json.loads((run / "evaluation.json").read_text())
    assert known["tasks"] == evaluated[0]
    shown = call(evaluate, str(run), "--tasks", FILES[-1])
    again = json.loads((run / "evaluation.json").read_text())
    assert again == known
    assert known["n_tokens"] == 4
    assert "blimp/blimp accuracy 16.67% ± 16.67% (6 items, step 3)\n" in shown
    scores = evaluate_tasks(run, [f"lambada={FILES[0]}"])["lambada/lambada"]
    assert scores.as_dict() == pytest.approx(known["tasks"]["lambada/lambada"])


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def test_files_of_the_hub_are_read_too(tmp_path: Path) -> None:
    (published,) = read_tasks([ITEMS / "arc.jsonl"])
    rows = their_rows("arc")
    path = tmp_path / "test-00000-of-00001.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    (found,) = read_tasks([path])
    assert found.name == "arc/test-00000-of-00001"
    for ours, theirs in zip(found.questions, published.questions, strict=True):
        assert (ours.pairs, ours.gold, ours.lengths) == (theirs.pairs, theirs.gold, theirs.lengths)
    labelled = {"goal": "g", "sol1": "a", "sol2": "b", "label": 1}
    assert read_tasks([write(tmp_path / "piqa.jsonl", labelled)])[0].questions[0].gold == 1


WINOGRANDE = {"sentence": "a _ b", "option1": "x", "option2": "y", "answer": "1"}
PIQA = {"goal": "g", "sol1": "a", "sol2": "b"}
HELLASWAG = {"activity_label": "a", "ctx_a": "b", "ctx_b": "c", "endings": ["d"], "label": 0}
ARC = {"question": {"stem": "q", "choices": [{"text": "t", "label": "A"}]}, "answerKey": "A"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            '{"text": "a b"}\n\n{"text": 3}\n',
            "f.jsonl:3: not a line of lambada: text: Input should",
        ),
        ('{"text": "a b"}\n{"text": \n', "f.jsonl:2: not JSON: Expecting value"),
        ("[1]\n", "f.jsonl:1: not a JSON object"),
        ("\n", "f.jsonl has no lines"),
        ('{"texts": ""}\n', "f.jsonl is of no known kind: its first line has the fields texts"),
        ('{"text": "\\ud800 b"}\n', "f.jsonl:1: not a line of lambada: 'utf-8' codec"),
        (
            WINOGRANDE | {"answer": ""},
            "not a line of winogrande: answer: Input should be '1' or '2'",
        ),
        (WINOGRANDE | {"sentence": "ab"}, "winogrande: the sentence 'ab' has no gap _"),
        (HELLASWAG | {"label": 1}, "f.jsonl:1: not a line of hellaswag: label 1 of 1 choices"),
        (HELLASWAG | {"label": ""}, "f.jsonl:1: not a line of hellaswag: label: Input should"),
        (ARC | {"answerKey": "B"}, "arc: answerKey 'B' is not one of ['A']"),
        ({"question": "q", "answerKey": "A"}, "f.jsonl:1: not a line of arc: no field 'text'"),
        (PIQA, "f.jsonl has no labels, and "),
    ],
)
def test_a_wrong_line_is_named(text: object, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
    with pytest.raises(DataError) as raised:
        read_tasks([path])
    assert problem in raised.value.problem
    assert raised.value.hint


def test_labels_of_piqa_are_those_of_its_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "valid.jsonl", PIQA, PIQA)
    (tmp_path / "valid-labels.lst").write_text("0\n")
    with pytest.raises(DataError, match=r"labels.lst has 1 labels for the 2 lines of .*valid"):
        read_tasks([path])
    (tmp_path / "valid-labels.lst").write_text("0\nx\n")
    with pytest.raises(DataError, match=r"valid.jsonl:2: not a line of piqa: label: Input"):
        read_tasks([path])


def test_words_that_are_wrong_are_refused_before_the_model_is_read(folder: Path) -> None:
    short = write(folder / "short.jsonl", {"text": "one two"})
    for words, problem in [
        (["--tasks", "no.jsonl"], "cannot read no.jsonl: No such file or directory"),
        (["--tasks", short, short], "two files are named lambada/short"),
        (["--tasks", short, "--data", short], "--data and --tasks are two evaluations"),
        (["--items", "items"], "--items needs --tasks"),
        (["--tasks", f"piqa={short}"], "short.jsonl has no labels"),
    ]:
        ended = trainyard("evaluate", "tiny", *words, folder=folder)
        assert ended.returncode == 2
        assert problem in ended.stderr


def test_what_the_model_cannot_predict_is_named(folder: Path) -> None:
    long = write(folder / "long.jsonl", {"text": "a b"}, {"text": "a " + "b" * 2000})
    with pytest.raises(DataError, match=r"long.jsonl:2: a choice has \d+ tokens; the model .* 128"):
        evaluate_tasks(folder / "runs" / "tiny", [long])


@pytest.mark.exhaustive
def test_ctrl_c_leaves_nothing_half_written(folder: Path) -> None:
    pair = {"sentence_good": "one two three four", "sentence_bad": "four three two one"}
    many = write(folder / "many.jsonl", *[pair] * 100_000)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    command = [sys.executable, "-m", "trainyard.cli", "evaluate", "tiny", "--tasks", many]
    with subprocess.Popen(
        [*command, "--items", "all.jsonl"], cwd=folder, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert "evaluate " in process.stderr.readline()  # a line of progress
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == "interrupted\n"
    assert process.returncode == 130
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
