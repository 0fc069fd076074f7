"""Reads metrics.jsonl of a run folder, even while it is being written.

    {"kind": "start", "time": 0.0, "step": 0, "resumed": false}
    {"kind": "train", "time": 9.0, "step": 10, "tokens": 5120, "loss": 9.1, ...}
    {"kind": "train", "time": 18.0, "step": 20, "tokens": 10240, "loss": 8.0, ...}
    {"kind": "tra

The last line may be incomplete, after a kill or during a write. Any other unreadable line is
counted and skipped, so that the rest can be reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainyard.errors import DataError, explain_failure
from trainyard.files import open_file, parse_json
from trainyard.report.history import COLUMNS, History, Line, RunMetrics, is_finite

EVALUATED = ("tokens", "loss", "perplexity", "bits_per_byte")
LINE_LIMIT_BYTES = 16 * 2**20
BEGINNING_BYTES = 4096
"""They have the time of the first line, and so tell two files apart."""


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
        if self._n_damaged and self._n_damaged == self._n_lines:
            raise DataError(
                f"{self._path} has no readable line; {self._first_damage}",
                "restore the file from a copy, or remove it",
            )
        damage = ""
        if self._n_damaged:
            n = self._n_damaged
            damage = f"{n} line{'s' if n > 1 else ''} of {self._path.name} cannot be read and "
            damage += f"{'are' if n > 1 else 'is'} skipped; {self._first_damage}"
        return self._history.metrics(damage)

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
        ValueError: it is none.
    """
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        raise ValueError("it has no kind, such as train or evaluate")
    step = line.get("step")
    if not is_finite(step) or step < 0 or step != int(step):  # type: ignore[operator,arg-type]
        raise ValueError(f"step is {str(step)[:40]!r}, not a whole number")
    keys = COLUMNS if line["kind"] == "train" else EVALUATED if line["kind"] == "evaluate" else ()
    for key in ("time", *keys):
        value = line.get(key)
        if value is not None and type(value) not in (int, float):
            raise ValueError(f"{key} is {str(value)[:40]!r}, not a number")
    return line
