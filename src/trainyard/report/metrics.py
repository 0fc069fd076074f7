"""Reads metrics.jsonl of a run folder, even while it is being written.

    {"kind": "start", "time": 0.0, "step": 0, "resumed": false}
    {"kind": "train", "time": 9.0, "step": 10, "tokens": 5120, "loss": 9.1, ...}
    {"kind": "train", "time": 18.0, "step": 20, "tokens": 10240, "loss": 8.0, ...}
    {"kind": "tra

The last line may be incomplete, after a kill or during a write. Any other unreadable line is
counted and skipped, so that the rest can be reported.

A resumed run repeats the steps after its checkpoint, and so does a run that rolls back after a
spike. All lines after the step it continues from are abandoned:

    row   line                       later resumed from    is kept
    0     train step 10, loss 9.1    10                    yes
    1     train step 20, loss 8.0    10                    no: abandoned
          start step 10, resumed
    2     train step 20, loss 7.9    -                     yes

Lines are stored as columns of numbers, not as a million objects.
"""

from __future__ import annotations

import itertools
import math
import statistics
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeGuard

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import DataError, explain_failure
from trainyard.files import open_file, parse_json
from trainyard.units import format_number, format_seconds

COLUMNS = (
    *("step", "tokens", "time", "loss", "learning_rate", "gradient_norm", "loss_scale"),
    *("tokens_per_second_per_device", "tflops_per_second_per_device", "model_flops_utilization"),
    "formula_tflops_per_second_per_device",
    *("memory_bytes", "skipped_steps", "seconds_left", "milliseconds_per_step"),
    "expert_imbalance",
)
EVALUATED = ("tokens", "loss", "perplexity", "bits_per_byte")
N_SAVES = 100
GREATEST = 1e100
"""Far above any real quantity; larger ones only break the arithmetic of drawing."""
LINE_LIMIT_BYTES = 16 * 2**20
BEGINNING_BYTES = 4096
"""They have the time of the first line, and so tell two files apart."""

Line = dict[str, Any]
Curve = NDArray[np.float64]
EventKind = Literal["restart", "rollback", "skipped", "save failed", "dead experts", "stop"]


def is_finite(value: object) -> TypeGuard[int | float]:
    """Whether a JSON value is a usable number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < GREATEST  # False for NaN


@dataclass(frozen=True)
class Table:
    """Train lines as columns of equal length; NaN where a line has no such number."""

    columns: dict[str, Curve]

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, key: str) -> Curve:
        return self.columns[key]

    def pick(self, rows: NDArray[Any]) -> Table:
        """Returns the rows of a mask or of a list of row numbers."""
        return Table({key: values[rows] for key, values in self.columns.items()})

    def finite(self, key: str) -> Curve:
        """Returns the numbers of a column, without the gaps."""
        values = self[key]
        return values[np.isfinite(values)]

    def last(self, key: str) -> float | None:
        """Returns the newest number of a column; None if there is none."""
        values = self.finite(key)
        return float(values[-1]) if len(values) else None

    def median(self, key: str) -> float | None:
        """Returns the median of the numbers of a column; None if there are none."""
        values = self.finite(key)
        return float(np.median(values)) if len(values) else None


@dataclass(frozen=True)
class Event:
    """An interruption of the run.

    Attributes:
        step: where the curve continues, or the last of the skipped steps.
        count: the number of skipped steps; 1 for all other kinds.
    """

    kind: EventKind
    step: int
    text: str
    count: int = 1


@dataclass(frozen=True)
class RunMetrics:
    """The metrics of a run, in step order.

    Attributes:
        train: one row each few steps.
        abandoned: steps that were repeated later, one table per attempt.
        evaluations: held-out losses.
        samples: generated texts.
        events: restarts, rollbacks, skipped steps, failed saves and stops.
        saves: finished saves of checkpoints.
        seconds: time spent, without the time between an end and a restart.
        device: the device it ran on; empty if not recorded.
        reason: why it ended; empty while it runs, or when it was killed.
        damage: says which lines are unreadable; empty if none are.
        test: the final evaluation; empty before.
        expert_loads: tokens of each expert, (blocks, E), by the last step of their interval.
    """

    train: Table
    abandoned: list[Table] = field(default_factory=list)
    evaluations: list[Line] = field(default_factory=list)
    samples: list[Line] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    saves: list[Line] = field(default_factory=list)
    seconds: float = 0.0
    device: str = ""
    reason: str = ""
    damage: str = ""
    test: Line = field(default_factory=dict)
    expert_loads: dict[int, Curve] = field(default_factory=dict)

    def tokens_at(self, steps: list[int]) -> Curve:
        """Returns the tokens consumed at steps, interpolated between logged ones."""
        rows = self.train.pick(np.isfinite(self.train["tokens"]))
        x, y = (np.concatenate([[0.0], rows[key]]) for key in ("step", "tokens"))
        return np.array(np.interp(steps, x, y), float)

    def count(self, kind: EventKind) -> int:
        """Returns how often an event happened; for skipped steps, their number."""
        return sum(event.count for event in self.events if event.kind == kind)

    def median_of_saves(self, key: str) -> float | None:
        """Returns the median of a number of the newest saves; None without any."""
        values = [line[key] for line in self.saves[-N_SAVES:] if is_finite(line.get(key))]
        return statistics.median(values) if values else None

    @property
    def last_loss(self) -> float | None:
        """The loss at the last logged step; None if the steps of its line were skipped."""
        newest = self.train["loss"][-1:]
        return float(newest[0]) if np.isfinite(newest).any() else None

    @property
    def held_out_losses(self) -> list[Line]:
        """The evaluations with a finite loss."""
        return [line for line in self.evaluations if is_finite(line.get("loss"))]

    @property
    def best(self) -> Line:
        """The evaluation with the lowest loss; empty without any."""
        return min(self.held_out_losses, key=lambda line: line["loss"], default={})


class History:
    """Consumes the lines of a run one by one, and separates abandoned ones.

    Args:
        forgotten_steps: steps of an earlier run in the same folder.
    """

    def __init__(self, forgotten_steps: int = 0) -> None:
        self._train = {key: array("d") for key in COLUMNS}
        self._cuts: list[tuple[int, int]] = []
        """For each start and rollback: train lines before it, and the step it goes on from."""
        self._evaluations: dict[int, Line] = {}
        self._test: Line = {}
        self._samples: dict[tuple[int, str], Line] = {}
        self._events: list[Event] = []
        if forgotten_steps:
            text = f"started over; {forgotten_steps:,} earlier steps are not shown"
            self._events.append(Event("restart", 0, text))
        self._is_begun = False
        self._saves: list[Line] = []
        self._loads: dict[int, Curve] = {}
        self._seconds = 0.0
        self._device = self._reason = ""
        self.last_step = 0
        """The last step of the current attempt."""
        self._last_time: float | None = None

    def add(self, line: Line) -> None:
        """Consumes one line, whose numbers are valid."""
        kind, step = line["kind"], int(line["step"])
        time = float(line["time"]) if is_finite(line.get("time")) else None
        passed = 0.0 if time is None or self._last_time is None else time - self._last_time
        if kind != "start":
            self._seconds += max(0.0, passed)
        self._last_time = self._last_time if time is None else time
        self._reason = ""
        if kind == "train":
            for key, column in self._train.items():
                value = line.get(key)
                # This is most of the work on a long file: no call of a function.
                column.append(
                    math.nan if value is None or not -GREATEST < value < GREATEST else value
                )
            if "expert_load" in line:
                self._loads[step] = line["expert_load"]
        elif kind == "evaluate" and line.get("split") == "test":
            self._test = line
        elif kind == "evaluate":
            self._evaluations[step] = line
        elif kind == "sample":
            self._samples[step, str(line.get("prompt", ""))] = line
        elif kind == "save":
            self._saves.append(line)
        elif kind == "start":
            self._start(line, step, passed)
        else:
            self._interrupt(kind, line, step)
        self.last_step = step if kind in ("start", "rollback") else max(self.last_step, step)

    def _start(self, line: Line, step: int, passed: float) -> None:
        if self._is_begun:
            text = f"resumed from step {step:,}"
            if n_again := max(0, self.last_step - step):
                text += f"; repeats {format_number(n_again, 'step')}"
            if passed > 0:
                text += f", {format_seconds(passed)} after the last line"
            self._events.append(Event("restart", step, text))
        self._is_begun = True
        self._cut(step)
        self._device = str(line.get("device") or self._device)

    def _interrupt(self, kind: str, line: Line, step: int) -> None:
        if kind == "save failed":
            text = f"a checkpoint was not saved: {line.get('problem', 'unknown reason')}"
            self._events.append(Event("save failed", step, text))
        elif kind == "dead experts":
            self._events.append(Event("dead experts", step, str(line.get("problem", kind))))
        elif kind == "rollback":
            text = f"rolled back to step {step:,}"
            if is_finite(line.get("from_step")):
                text += f" from step {int(line['from_step']):,}"
            if is_finite(line.get("skipped_sequences")):
                text += f"; the {int(line['skipped_sequences']):,} sequences between are skipped"
            self._events.append(Event("rollback", step, text))
            self._cut(step)
        elif kind == "end":
            self._reason = str(line.get("reason", ""))
            if self._reason != "done":
                self._events.append(Event("stop", step, f"stopped: {self._reason}"))

    def _cut(self, step: int) -> None:
        self._cuts.append((len(self._train["step"]), step))
        self._evaluations = {at: line for at, line in self._evaluations.items() if at <= step}
        self._samples = {key: line for key, line in self._samples.items() if key[0] <= step}
        self._loads = {at: load for at, load in self._loads.items() if at <= step}
        self._test = self._test if self._test.get("step", 0) <= step else {}

    def metrics(self, damage: str = "") -> RunMetrics:
        """Returns the metrics so far."""
        # A copy: an array with a numpy view cannot grow.
        rows = Table({key: np.array(column, float) for key, column in self._train.items()})
        train, abandoned = _separate_abandoned(rows, self._cuts)
        return RunMetrics(
            train,
            abandoned,
            evaluations=[self._evaluations[step] for step in sorted(self._evaluations)],
            samples=sorted(self._samples.values(), key=lambda line: line["step"]),
            events=sorted([*self._events, *_skipped(train)], key=lambda event: event.step),
            saves=list(self._saves),
            seconds=self._seconds,
            device=self._device,
            reason=self._reason,
            damage=damage,
            test=self._test,
            expert_loads=dict(sorted(self._loads.items())),
        )


def _separate_abandoned(rows: Table, cuts: list[tuple[int, int]]) -> tuple[Table, list[Table]]:
    """Separates the rows that count, by step, from those of abandoned attempts."""
    steps = rows["step"]
    # The least step that any later start or rollback went on from: rows after it were repeated.
    went_on_from = np.full(len(rows), math.inf)
    least, end = math.inf, len(rows)
    for position, step in reversed(cuts):
        went_on_from[position:end] = least
        least, end = min(least, step), position
    went_on_from[:end] = least
    is_kept = steps <= went_on_from
    kept = np.flatnonzero(is_kept)
    # The later of two lines of one step counts; unique finds the first, so it searches backwards.
    _, first = np.unique(steps[kept][::-1], return_index=True)
    borders = [0, *(position for position, _ in cuts), len(rows)]
    attempts = (
        np.arange(start, end)[~is_kept[start:end]] for start, end in itertools.pairwise(borders)
    )
    return rows.pick(kept[::-1][first]), [
        rows.pick(attempt) for attempt in attempts if len(attempt)
    ]


def _skipped(train: Table) -> Iterator[Event]:
    """Finds the steps where the skipped count grew."""
    rows = train.pick(np.isfinite(train["skipped_steps"]))
    steps = rows["step"]
    grown = np.diff(rows["skipped_steps"], prepend=0.0)
    before = np.concatenate([[0.0], steps[:-1]])
    for row in np.flatnonzero(grown > 0):
        n, first, last = int(grown[row]), int(before[row]) + 1, int(steps[row])
        where = f"step {last:,}" if first == last else f"steps {first:,} to {last:,}"
        text = f"{n:,} of {where} skipped: a spike or non-finite gradients"
        yield Event("skipped", last, text, n)


def read_metrics(path: str | Path) -> RunMetrics:
    """Reads a metrics.jsonl, or that of a run folder: losses in nats per token, by step.

    Raises:
        DataError: it is missing, or nothing in it can be read.
    """
    path = Path(path)
    file = MetricsFile(path / "metrics.jsonl" if path.is_dir() else path)
    for _ in file.new_lines():
        pass
    return file.metrics()


class MetricsFile:
    """A metrics.jsonl that may still grow.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self._offset = self._n_lines = self._n_damaged = 0
        self._first_damage, self._beginning = "", b""
        self._history = History()

    def new_lines(self) -> Iterator[Line]:
        """Yields the complete lines since the last call, each after processing it.

        Raises:
            DataError: the file is missing.
        """
        hint = "a run folder has a metrics.jsonl once training has started"
        failed = explain_failure(f"cannot read {self._path}", hint, DataError)
        with failed, open_file(self._path) as file:
            beginning = file.read(BEGINNING_BYTES)
            if file.seek(0, 2) < self._offset or not beginning.startswith(self._beginning):
                self._begin()  # the file was replaced
            self._beginning = beginning[: beginning.rfind(b"\n") + 1]
            file.seek(self._offset)
            while (raw := file.readline(LINE_LIMIT_BYTES)).endswith(b"\n") or (
                len(raw) == LINE_LIMIT_BYTES
            ):
                self._offset += len(raw)
                self._n_lines += 1
                line = self._parse(raw)
                if line is not None:
                    yield line

    def metrics(self) -> RunMetrics:
        """Returns the metrics of the lines so far.

        Raises:
            DataError: there are lines, and none of them can be read.
        """
        n = self._n_damaged
        if n and n == self._n_lines:
            raise DataError(
                f"{self._path} has no readable line; {self._first_damage}",
                "restore the file from a copy, or remove it",
            )
        skipped = f"cannot be read and {'is' if n == 1 else 'are'} skipped; {self._first_damage}"
        damage = f"{format_number(n, 'line')} of {self._path.name} {skipped}"
        return self._history.metrics(damage if n else "")

    def _parse(self, raw: bytes) -> Line | None:
        try:
            line = _checked(parse_json(raw.decode("utf-8", errors="replace").rstrip("\n")))
        except ValueError as error:
            self._n_damaged += 1
            self._first_damage = self._first_damage or f"line {self._n_lines}: {error}"
            return None
        if line["kind"] == "start" and not line.get("resumed"):
            self._history = History(self._history.last_step)
        self._history.add(line)
        return line


def _checked(line: Any) -> Line:
    """Returns a line with checked value types.

    Raises:
        ValueError: it is malformed.
    """
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        raise ValueError("it has no kind, such as train or evaluate")
    step = line.get("step")
    if not is_finite(step) or step < 0 or step != int(step):
        raise ValueError(f"step is {str(step)[:40]!r}, not a whole number")
    keys = {"train": COLUMNS, "evaluate": EVALUATED}.get(line["kind"], ())
    for key in ("time", *keys):
        value = line.get(key)
        if value is not None and type(value) not in (int, float):
            raise ValueError(f"{key} is {str(value)[:40]!r}, not a number")
    if "expert_load" in line and line["kind"] == "train":
        line["expert_load"] = _counts(line["expert_load"])
    return line


def _counts(value: Any) -> Curve:
    """Returns the tokens of each expert, (blocks, E).

    Raises:
        ValueError: it is not such a table.
    """
    try:
        table = np.array(value, float)
    except (TypeError, ValueError, OverflowError):
        table = np.empty(0)
    if table.ndim != 2 or not table.size or not ((table >= 0) & (table < GREATEST)).all():
        raise ValueError(f"expert_load is {str(value)[:40]!r}, not a table of tokens")
    return table
