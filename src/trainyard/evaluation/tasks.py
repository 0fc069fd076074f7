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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

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


class Lambada(msgspec.Struct, frozen=True):
    """A passage whose last word is to be predicted."""

    text: str

    def question(self) -> Question:
        """The last word after all others."""
        context, _, word = self.text.rpartition(" ")
        return Question([(context, f" {word}")])


class HellaSwag(msgspec.Struct, frozen=True):
    """The start of a text from WikiHow or of a video's captions, and endings."""

    activity_label: str
    ctx_a: str
    ctx_b: str
    endings: list[str]
    label: int

    def question(self) -> Question:
        """The endings after activity and context."""
        context = f"{self.activity_label}: {self.ctx_a} {self.ctx_b.capitalize()}"
        return _choices(_clean(context), map(_clean, self.endings), self.label)


class Piqa(msgspec.Struct, frozen=True):
    """A goal and two ways to it."""

    goal: str
    sol1: str
    sol2: str
    label: int

    def question(self) -> Question:
        """The ways as answers."""
        return _choices(f"Question: {self.goal}\nAnswer:", (self.sol1, self.sol2), self.label)


class ArcChoice(msgspec.Struct, frozen=True):
    """An answer and its letter or number."""

    text: str
    label: str


class ArcQuestion(msgspec.Struct, frozen=True):
    """A question of an examination, and its answers."""

    stem: str
    choices: list[ArcChoice]


class ArcColumns(msgspec.Struct, frozen=True):
    """The answers as the Hugging Face Hub has them."""

    text: list[str]
    label: list[str]


class Arc(msgspec.Struct, frozen=True):
    """A question of an examination, with the key to it."""

    asked: ArcQuestion | str = msgspec.field(name="question")
    answer_key: str = msgspec.field(name="answerKey")
    choices: ArcColumns = ArcColumns([], [])

    def question(self) -> Question:
        """The answers."""
        stem, texts, letters = self.asked, self.choices.text, self.choices.label
        if isinstance(stem, ArcQuestion):
            texts = [choice.text for choice in stem.choices]
            letters = [choice.label for choice in stem.choices]
            stem = stem.stem
        if self.answer_key not in letters:
            raise ValueError(f"answerKey {self.answer_key!r} is not one of {letters}")
        return _choices(f"Question: {stem}\nAnswer:", texts, letters.index(self.answer_key))


class Winogrande(msgspec.Struct, frozen=True):
    """A sentence with a gap, _, and two options for it."""

    sentence: str
    option1: str
    option2: str
    answer: Literal["1", "2"]

    def question(self) -> Question:
        """The same rest of the sentence after either option (partial scoring)."""
        start, gap, rest = self.sentence.partition("_")
        if not gap:
            raise ValueError(f"the sentence {self.sentence!r} has no gap _")
        options = (self.option1, self.option2)
        pairs = [(start + option, f" {rest.strip()}") for option in options]
        return Question(pairs, int(self.answer) - 1)


class Blimp(msgspec.Struct, frozen=True):
    """A grammatical sentence and one that is not."""

    sentence_good: str
    sentence_bad: str

    def question(self) -> Question:
        """Both sentences, without context."""
        return Question([("", f" {text}") for text in (self.sentence_good, self.sentence_bad)])


# A file is of the first kind whose fields all are in its first line.
KINDS: dict[str, type[Any]] = {
    "hellaswag": HellaSwag,
    "piqa": Piqa,
    "arc": Arc,
    "winogrande": Winogrande,
    "blimp": Blimp,
    "lambada": Lambada,
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
    questions = []
    for place, row in rows:
        try:
            question: Question = msgspec.convert(row, KINDS[kind], strict=False).question()
            if question.gold not in range(len(question.pairs)):
                raise ValueError(f"label {question.gold} of {len(question.pairs)} choices")
            "".join(map("".join, question.pairs)).encode()  # half a character has no bytes
        except (ValueError, msgspec.ValidationError) as error:
            raise DataError(f"{place}: not a line of {kind}: {error}", _FORMAT) from None
        questions.append(replace(question, place=place))
    return Task(f"{kind}/{path.stem}", questions)


def _recognize(row: dict[str, Any], path: Path) -> str:
    for kind, line in KINDS.items():
        # A missing answer has a message of its own; those of PIQA are in another file.
        fields = {field.encode_name for field in msgspec.structs.fields(line) if field.required}
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
