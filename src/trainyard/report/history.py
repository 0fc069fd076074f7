"""The history of a run from its metrics: valid lines, repeated lines and events.

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
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainyard.units import format_number, format_seconds

COLUMNS = (
    *("step", "tokens", "time", "loss", "learning_rate", "gradient_norm", "loss_scale"),
    *("tokens_per_second_per_device", "tflops_per_second_per_device", "model_flops_utilization"),
    "formula_tflops_per_second_per_device",
    *("memory_bytes", "skipped_steps", "seconds_left", "milliseconds_per_step"),
)
N_SAVES = 100
GREATEST = 1e100
"""Far above any real quantity; larger ones only break the arithmetic of drawing."""

Line = dict[str, Any]
Curve = NDArray[np.float64]
EventKind = Literal["restart", "rollback", "skipped", "save failed", "stop"]


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

    def last(self, key: str) -> float | None:
        """Returns the newest number of a column; None if there is none."""
        values = self[key][np.isfinite(self[key])]
        return float(values[-1]) if len(values) else None

    def median(self, key: str) -> float | None:
        """Returns the median of the numbers of a column; None if there are none."""
        values = self[key][np.isfinite(self[key])]
        return float(np.median(values)) if len(values) else None


@dataclass(frozen=True)
class Event:
    """An interruption of the run.

    Attributes:
        step: where the curve goes on, or where the steps in question end.
        count: of skipped steps; 1 for all else.
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
        samples: texts it wrote.
        events: restarts, rollbacks, skipped steps, failed saves and stops.
        saves: of checkpoints, finished ones.
        seconds: time spent, without the time between an end and a restart.
        device: what it ran on, if it said so.
        reason: why it ended; empty while it runs, or when it was killed.
        damage: says which lines could not be read; empty where all could.
        test: the final evaluation; empty before.
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

    def tokens_at(self, steps: list[int]) -> Curve:
        """Returns the tokens consumed at steps, interpolated between logged ones."""
        known = np.isfinite(self.train["tokens"])
        x = np.concatenate([[0.0], self.train["step"][known]])
        y = np.concatenate([[0.0], self.train["tokens"][known]])
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


def is_finite(value: object) -> bool:
    """Whether a JSON value is a usable number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) < GREATEST  # type: ignore[arg-type]  # False for NaN


class History:
    """Consumes the lines of a run one by one, and separates abandoned ones.

    Args:
        forgotten_steps: of a run that was in the same folder, and is not this one.
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
            self._note("restart", 0, text)
        self._is_begun = False
        self._saves: list[Line] = []
        self._seconds = 0.0
        self._device = self._reason = ""
        self.last_step = 0
        """Of the current attempt."""
        self._last_time: float | None = None

    def add(self, line: Line) -> None:
        """Consumes one line, whose numbers are valid."""
        kind, step = line["kind"], int(line["step"])
        time = float(line["time"]) if is_finite(line.get("time")) else None
        if kind == "start":
            self._start(line, step, time)
        elif time is not None and self._last_time is not None:
            self._seconds += max(0.0, time - self._last_time)
        self._last_time = self._last_time if time is None else time
        self._reason = ""
        if kind == "train":
            for key, column in self._train.items():
                value = line.get(key)
                # This is most of the work on a long file: no call of a function.
                column.append(
                    math.nan if value is None or not -GREATEST < value < GREATEST else value
                )
        elif kind == "evaluate":
            if line.get("split") == "test":
                self._test = line
            else:
                self._evaluations[step] = line
        elif kind == "sample":
            self._samples[step, str(line.get("prompt", ""))] = line
        else:
            self._take_event(kind, line, step)
        self.last_step = step if kind in ("start", "rollback") else max(self.last_step, step)

    def _take_event(self, kind: str, line: Line, step: int) -> None:
        if kind == "save":
            self._saves.append(line)
        elif kind == "save failed":
            problem = line.get("problem", "unknown reason")
            self._note("save failed", step, f"a checkpoint was not saved: {problem}")
        elif kind == "rollback":
            self._roll_back(line, step)
        elif kind == "end":
            self._reason = str(line.get("reason", ""))
            if self._reason != "done":
                self._note("stop", step, f"stopped: {self._reason}")

    def _note(self, kind: EventKind, step: int, text: str) -> None:
        self._events.append(Event(kind, step, text))

    def _start(self, line: Line, step: int, time: float | None) -> None:
        if self._is_begun:
            text = f"resumed from step {step:,}"
            if n_again := max(0, self.last_step - step):
                text += f"; repeats {format_number(n_again, 'step')}"
            if time is not None and self._last_time is not None and time > self._last_time:
                text += f", {format_seconds(time - self._last_time)} after the last line"
            self._note("restart", step, text)
        self._is_begun = True
        self._cut(step)
        self._device = str(line.get("device") or self._device)

    def _roll_back(self, line: Line, step: int) -> None:
        text = f"rolled back to step {step:,}"
        if is_finite(line.get("from_step")):
            text += f" from step {int(line['from_step']):,}"
        if is_finite(line.get("skipped_sequences")):
            text += f"; the {int(line['skipped_sequences']):,} sequences between are skipped"
        self._note("rollback", step, text)
        self._cut(step)

    def _cut(self, step: int) -> None:
        self._cuts.append((len(self._train["step"]), step))
        self._evaluations = {at: line for at, line in self._evaluations.items() if at <= step}
        self._samples = {key: line for key, line in self._samples.items() if key[0] <= step}
        self._test = self._test if self._test.get("step", 0) <= step else {}

    def metrics(self, damage: str) -> RunMetrics:
        """Returns the metrics so far."""
        # A copy: an array with a numpy view cannot grow.
        rows = Table({key: np.array(column, float) for key, column in self._train.items()})
        kept, abandoned = _tell_apart(rows, self._cuts)
        events = [*self._events, *_skipped(kept)]
        return RunMetrics(
            kept,
            abandoned,
            [self._evaluations[step] for step in sorted(self._evaluations)],
            sorted(self._samples.values(), key=lambda line: line["step"]),
            sorted(events, key=lambda event: event.step),
            list(self._saves),
            self._seconds,
            self._device,
            self._reason,
            damage,
            self._test,
        )


def _tell_apart(rows: Table, cuts: list[tuple[int, int]]) -> tuple[Table, list[Table]]:
    """Separates the rows that count, by step, from those of abandoned attempts."""
    steps = rows["step"]
    # The least step that any later start or rollback went on from: rows after it were repeated.
    went_on_from = np.full(len(rows), math.inf)
    least = math.inf
    end = len(rows)
    for position, step in reversed(cuts):
        went_on_from[position:end] = least
        least, end = min(least, step), position
    went_on_from[:end] = least
    is_kept = steps <= went_on_from
    kept = np.flatnonzero(is_kept)
    # The later of two lines of one step counts; unique finds the first, so it searches backwards.
    _, first = np.unique(steps[kept][::-1], return_index=True)
    train = rows.pick(kept[::-1][first])
    borders = [0, *(position for position, _ in cuts), len(rows)]
    ways = (
        np.arange(start, end)[~is_kept[start:end]] for start, end in itertools.pairwise(borders)
    )
    return train, [rows.pick(way) for way in ways if len(way)]


def _skipped(train: Table) -> list[Event]:
    """Finds the steps where the skipped count grew."""
    known = np.isfinite(train["skipped_steps"])
    steps, counts = train["step"][known], train["skipped_steps"][known]
    grown = np.diff(counts, prepend=0.0)
    before = np.concatenate([[0.0], steps[:-1]])
    events = []
    for row in np.flatnonzero(grown > 0):
        n, first, last = int(grown[row]), int(before[row]) + 1, int(steps[row])
        where = f"step {last:,}" if first == last else f"steps {first:,} to {last:,}"
        text = f"{n:,} of {where} skipped: a spike or non-finite gradients"
        events.append(Event("skipped", last, text, n))
    return events
