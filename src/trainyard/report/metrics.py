"""Reads metrics.jsonl of a run folder, as curves over training.

    {"kind": "start", "time": 0.0, "step": 0, "resumed": false}
    {"kind": "train", "time": 9.0, "step": 10, "tokens": 5120, "loss": 9.1, ...}
    {"kind": "train", "time": 18.0, "step": 20, "tokens": 10240, "loss": 8.0, ...}
    {"kind": "start", "time": 60.0, "step": 10, "resumed": true}
    {"kind": "train", "time": 69.0, "step": 20, "tokens": 10240, "loss": 7.9, ...}
    {"kind": "tra

A resumed run does again what its checkpoint did not hold, so everything after the step it starts
from is taken back: the curve above is 9.1, 7.9. The last line may be cut short, as a killed process
leaves it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import DataError

PLOTTED = (
    "loss",
    "learning_rate",
    "gradient_norm",
    "sequences_per_second",
    "perplexity",
    "bits_per_byte",
)
KINDS = ("train", "evaluate", "sample", "start", "end")

Line = dict[str, Any]
Curve = NDArray[np.float64]


@dataclass
class Metrics:
    """What a run said of itself, in the order of its steps.

    Attributes:
        train: one line each few steps.
        evaluations: held-out losses.
        samples: texts it wrote.
        restarts: steps from which it was resumed.
        seconds: time spent, without the time between an end and a restart.
        device: what it ran on, if it said so.
        reason: why it ended; empty while it runs, or when it was killed.
    """

    train: list[Line] = field(default_factory=list)
    evaluations: list[Line] = field(default_factory=list)
    samples: list[Line] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)
    seconds: float = 0.0
    device: str = ""
    reason: str = ""

    def tokens_at(self, steps: list[int]) -> Curve:
        """Gives the tokens consumed at steps, between the logged ones in proportion."""
        known = [line for line in self.train if line.get("tokens") is not None]
        x = [0, *(line["step"] for line in known)]
        y = [0, *(line["tokens"] for line in known)]
        return np.array(np.interp(steps, x, y), float)


def curve(lines: list[Line], key: str) -> tuple[Curve, Curve]:
    """Gives one value over consumed tokens; lines where it is null or no number are left out."""
    pairs = [
        (line["tokens"], line[key])
        for line in lines
        if line.get("tokens") is not None and line.get(key) is not None and math.isfinite(line[key])
    ]
    x, y = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(x, float), np.array(y, float)


def read_metrics(path: Path) -> Metrics:
    """Reads metrics.jsonl.

    Raises:
        DataError: the file is missing, or a line before the last is malformed.
    """
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}",
            "a run folder has its metrics.jsonl as soon as training has started",
        ) from None
    lines = text.split("\n")
    whole, last = lines[:-1], lines[-1]  # what follows the last line end was cut short
    parsed = [_parse(line, f"{path} line {number}") for number, line in enumerate(whole, 1)]
    if last and (complete := _parse_or_none(last)):
        parsed.append(complete)
    return _gather([line for line in parsed if line["kind"] in KINDS])


def _parse_or_none(text: str) -> Line | None:
    try:
        return _parse(text, "")
    except DataError:
        return None


def _parse(text: str, place: str) -> Line:
    hint = "remove the line, or restore the file; only its last line may be cut short"
    try:
        line = json.loads(text)
    except ValueError as error:
        raise DataError(f"{place} is not JSON: {error}", hint) from None
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        raise DataError(f"{place} has no kind, such as {', '.join(KINDS)}", hint)
    if not _is_number(line.get("step")):
        raise DataError(f"{place} has no step, or one that is not a number", hint)
    for key in ("tokens", "time", *(PLOTTED if line["kind"] in ("train", "evaluate") else ())):
        if line.get(key) is not None and not _is_number(line[key]):
            raise DataError(f"{place}: {key} is {line[key]!r}, not a number", hint)
    return line


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _gather(lines: list[Line]) -> Metrics:
    """Sorts lines by kind, taking back what a resumed run does again."""
    metrics = Metrics()
    kept: dict[tuple[str, int, str], Line] = {}
    previous_time: float | None = None
    for line in lines:
        kind, step, time = line["kind"], line["step"], line.get("time")
        if kind == "start":
            if not line.get("resumed"):
                metrics, kept = Metrics(), {}
            elif step:
                metrics.restarts.append(step)
            kept = {key: old for key, old in kept.items() if key[1] <= step}
            metrics.device = str(line.get("device") or metrics.device)
        else:
            kept[kind, step, str(line.get("prompt"))] = line
            if time is not None and previous_time is not None:
                metrics.seconds += max(0.0, time - previous_time)
        metrics.reason = str(line.get("reason", "")) if kind == "end" else ""
        previous_time = previous_time if time is None else time
    by_step = sorted(kept.values(), key=lambda line: line["step"])
    metrics.train = [line for line in by_step if line["kind"] == "train"]
    metrics.evaluations = [line for line in by_step if line["kind"] == "evaluate"]
    metrics.samples = [line for line in by_step if line["kind"] == "sample"]
    return metrics
