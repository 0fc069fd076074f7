r"""Tasks that models are compared by, read from files in their published formats.

Prompts, choices and their spaces are those of lm-eval (the LM Evaluation Harness of EleutherAI):

    task         context                              continuations
    LAMBADA      all but the last word                " " and the last word
    HellaSwag    activity and context, cleaned        " " and each ending, cleaned
    PIQA         "Question: {goal}\nAnswer:"          " " and each solution
    ARC          "Question: {stem}\nAnswer:"          " " and each choice
    WinoGrande   the sentence up to each option       " " and the rest: the same for both
    BLiMP        empty                                " " and each sentence

Papers: LAMBADA arXiv:1606.06031, HellaSwag 1905.07830, PIQA 1911.11641, ARC 1803.05457, WinoGrande
1907.10641, BLiMP 1912.00582.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError, validate_call

from trainyard.errors import DataError
from trainyard.extras import require
from trainyard.files import parse_json, read_file

_FORMAT = "give a file in its published format, of a split with labels"
_KEYS = {"label", "answer", "answerKey"}


@dataclass(frozen=True)
class Question:
    """What the model chooses from.

    Attributes:
        pairs: context and continuation of each choice; if there is one choice, the model has to
            continue with it by itself.
        gold: the number of the right one.
        lengths: characters of each choice, which normalize its log-likelihood; empty: no
            normalization.
        place: file and line.
    """

    pairs: list[tuple[str, str]]
    gold: int = 0
    lengths: tuple[int, ...] = ()
    place: str = ""


def _lambada(text: str) -> Question:
    """Predict the last word of a passage."""
    context, _, word = text.rpartition(" ")
    return Question([(context, f" {word}")])


def _hellaswag(
    activity_label: str, ctx_a: str, ctx_b: str, endings: list[str], label: int
) -> Question:
    """Choose the end of a text from WikiHow or of a video's captions."""
    context = f"{activity_label}: {ctx_a} {ctx_b.capitalize()}"
    return _choices(_clean(context), map(_clean, endings), label)


def _piqa(goal: str, sol1: str, sol2: str, label: int) -> Question:
    """Choose between two ways to a goal."""
    return _choices(f"Question: {goal}\nAnswer:", (sol1, sol2), label)


def _arc(
    question: dict[str, Any] | str, answerKey: str, choices: dict[str, list[str]] | None = None
) -> Question:
    """Answer a question of an examination; the Hub has its choices in a column of their own."""
    if isinstance(question, str):
        stem, columns = question, choices or {}
    else:
        stem, answers = str(question["stem"]), question["choices"]
        columns = {key: [str(answer[key]) for answer in answers] for key in ("text", "label")}
    texts, letters = columns["text"], columns["label"]
    if answerKey not in letters:
        raise ValueError(f"answerKey {answerKey!r} is not one of {letters}")
    return _choices(f"Question: {stem}\nAnswer:", texts, letters.index(answerKey))


def _winogrande(sentence: str, option1: str, option2: str, answer: Literal["1", "2"]) -> Question:
    """Fill the gap, _, of a sentence: the same rest after either option (partial scoring)."""
    start, gap, rest = sentence.partition("_")
    if not gap:
        raise ValueError(f"the sentence {sentence!r} has no gap _")
    pairs = [(start + option, f" {rest.strip()}") for option in (option1, option2)]
    return Question(pairs, int(answer) - 1)


def _blimp(sentence_good: str, sentence_bad: str) -> Question:
    """Prefer the grammatical sentence, without context."""
    return Question([("", f" {text}") for text in (sentence_good, sentence_bad)])


# The parameters of a kind are the fields of its lines. A file is of the first kind whose required
# fields are all in its first line.
KINDS: dict[str, Callable[..., Question]] = {
    "hellaswag": _hellaswag,
    "piqa": _piqa,
    "arc": _arc,
    "winogrande": _winogrande,
    "blimp": _blimp,
    "lambada": _lambada,
}


@dataclass(frozen=True)
class Task:
    """The questions of a file; its name is its kind and the file's, such as `arc/ARC-Easy-Dev`."""

    name: str
    questions: list[Question]


def read_tasks(sources: Iterable[str | Path]) -> list[Task]:
    """Reads files of questions: JSON lines, or Parquet with the same columns.

    Args:
        sources: each a path, or KIND=PATH where the fields of its lines do not tell.

    Raises:
        DataError: a file cannot be read, is of no known kind, or a line of it is wrong.
    """
    tasks = [_read_task(str(source)) for source in sources]
    names = [task.name for task in tasks]
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"two files are named {twice[0]}", "rename one, or evaluate it by itself")
    return tasks


def _read_task(source: str) -> Task:
    kind, _, named = source.partition("=")
    path = Path(named if kind in KINDS else source)
    rows = list(_read_rows(path))
    if not rows:
        raise DataError(f"{path} has no lines", _FORMAT)
    kind = kind if kind in KINDS else _recognize(rows[0][1], path)
    if kind == "piqa" and "label" not in rows[0][1]:
        rows = _add_labels(rows, path)
    build, fields = validate_call(KINDS[kind]), signature(KINDS[kind]).parameters
    questions = []
    for place, row in rows:
        try:
            question = build(**{field: row[field] for field in fields if field in row})
            if question.gold not in range(len(question.pairs)):
                raise ValueError(f"label {question.gold} of {len(question.pairs)} choices")
            "".join(map("".join, question.pairs)).encode()  # half a character has no bytes
        except (ValueError, KeyError, TypeError) as error:
            problem = f"no field {error}" if isinstance(error, KeyError) else str(error)
            if isinstance(error, ValidationError):
                first = error.errors(include_url=False)[0]
                problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise DataError(f"{place}: not a line of {kind}: {problem}", _FORMAT) from None
        questions.append(replace(question, place=place))
    return Task(f"{kind}/{path.stem}", questions)


def _recognize(row: dict[str, Any], path: Path) -> str:
    for kind, build in KINDS.items():
        # A missing answer has a message of its own; those of PIQA are in another file.
        parameters = signature(build).parameters.values()
        fields = {each.name for each in parameters if each.default is Parameter.empty}
        if fields - _KEYS <= row.keys():
            return kind
    raise DataError(
        f"{path} is of no known kind: its first line has the fields {', '.join(row) or 'none'}",
        f"--tasks KIND=FILE names its kind: {', '.join(KINDS)}",
    )


def _read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the place and the fields of each line that is not empty."""
    if path.suffix == ".parquet":
        require("pyarrow")
        import pyarrow
        import pyarrow.parquet

        try:
            rows = pyarrow.parquet.read_table(path).to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"cannot read {path}: {error}", "name a file of a task") from None
        yield from ((f"{path}:{number}", row) for number, row in enumerate(rows, 1))
        return
    for place, line in _read_lines(path):
        try:
            row = parse_json(line)
        except ValueError as error:
            raise DataError(f"{place}: not JSON: {error}", "give a file of JSON lines") from None
        if not isinstance(row, dict):
            raise DataError(f"{place}: not a JSON object", "give a file of JSON lines")
        yield place, row


def _read_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        lines = read_file(path).split(b"\n")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", "name a file of a task") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield f"{path}:{number}", line


def _add_labels(
    rows: list[tuple[str, dict[str, Any]]], path: Path
) -> list[tuple[str, dict[str, Any]]]:
    """Adds the labels of PIQA, which are lines of another file."""
    labels_path = path.with_name(f"{path.stem}-labels.lst")
    if not labels_path.exists():
        raise DataError(f"{path} has no labels, and {labels_path} does not exist", _FORMAT)
    labels = list(_read_lines(labels_path))
    if len(labels) != len(rows):
        raise DataError(
            f"{labels_path} has {len(labels)} labels for the {len(rows)} lines of {path}",
            "use the files of one split",
        )
    return [
        (place, row | {"label": label.decode(errors="replace").strip()})
        for (place, row), (_, label) in zip(rows, labels, strict=True)
    ]


def _choices(context: str, choices: Iterable[str], gold: int) -> Question:
    texts = list(choices)
    pairs = [(context, f" {text}") for text in texts]
    return Question(pairs, gold, tuple(map(len, texts)))


def _clean(text: str) -> str:
    """Removes what the pages of WikiHow left in HellaSwag: titles and bracketed marks."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")
