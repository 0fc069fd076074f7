"""A run that grows: longer, cooler, on new data; its film is the end of docs/growing.md.

python -m tests.e2e.growing
"""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
from tests.command import trainyard

from trainyard.data.indexed import IndexedWriter

PAGE = Path(__file__).parents[2] / "docs" / "growing.md"
TITLE = "## A run that grew\n"
RUN_FILE = """\
extends = "tiny"
name = "base"
[data.blend]
prefixes = ["data/old"]
[data]
split = "90,10,0"
[train]
length = "200 steps"
[schedule]
kind = "warmup_stable_decay"
warmup = "20 steps"
decay = "10_000 steps"
cooldown = "100 steps"
[log]
interval = 20
tensorboard = false
[checkpoint]
interval = 100
keep_every = 100
[evaluate]
interval = 100
batches = 2
"""
# Each with what it shows.
LINES = (
    ("The base run, at a constant rate after its warmup.", "train base.toml"),
    ("It goes on beyond its end.", 'train base train.length="300 steps"'),
    (
        "A branch from step 200 cools down, on the data that the base run read from there on.",
        "train base name=decay train.start_from=base@200 train.start_with=weights_and_optimizer "
        'data.skip="200 steps" schedule.warmup="0 steps" schedule.decay="100 steps" '
        'train.length="100 steps"',
    ),
    (
        "The base run changes to new data at step 300, from its first sequence.",
        'train base train.length="400 steps" data.from_step=300 '
        "\"data.blend.prefixes=['data/new']\"",
    ),
    (
        "It cools down too, in place.",
        'train base train.length="500 steps" schedule.decay="500 steps"',
    ),
    ("What was asked of the base run, and when.", "show runs/base"),
    ("Where the branch comes from.", "status decay"),
    ("Both on one page.", "report runs/base runs/decay --output compare.html"),
)


class Seam(NamedTuple):
    """Mean losses of 20 steps on both sides of a step, and of the 20 steps before those."""

    name: str
    earlier: float
    before: float
    after: float


def play(folder: Path) -> list[tuple[str, str]]:
    """Types the lines in a folder; returns each with all that it printed."""
    (folder / "data").mkdir()
    for name, seed in (("old", 7), ("new", 8)):
        _write_tokens(folder / "data" / name, seed)
    (folder / "base.toml").write_text(RUN_FILE, encoding="utf-8")
    typed = []
    for _, line in LINES:
        ended = trainyard(*shlex.split(line), folder=folder)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        typed.append((f"trainyard {line}", ended.stderr + ended.stdout))
    return typed


def find_seams(folder: Path) -> list[Seam]:
    """Reads the losses at each seam from the metrics of both runs."""
    base, decay = (_losses(folder / "runs" / name) for name in ("base", "decay"))
    seams = [
        Seam(name, base[step - 20], base[step], base[step + 20])
        for name, step in (("length, 200", 200), ("data, 300", 300), ("schedule, 400", 400))
    ]
    return [*seams, Seam("branch, 200", base[180], base[200], decay[20])]


def usual_changes(folder: Path) -> list[float]:
    """Returns how much the base run's loss changes from line to line after step 100."""
    base = [loss for step, loss in _losses(folder / "runs" / "base").items() if step >= 100]
    return [abs(after - before) for before, after in pairwise(base)]


def _losses(folder: Path) -> dict[int, float]:
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


def _write_tokens(prefix: Path, seed: int) -> None:
    """Writes a text whose next token mostly follows from the last."""
    random = np.random.default_rng(seed)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(1500):
            steps = random.choice([1, 1, 1, 2, 7], size=random.integers(50, 400))
            writer.add_document((np.cumsum(steps) % 512).astype(np.uint16))


def render(folder: Path) -> str:
    """Plays it, and describes it in Markdown."""
    parts = [TITLE, f"`base.toml`:\n\n```toml\n{RUN_FILE}```\n"]
    for (meaning, _), (line, output) in zip(LINES, play(folder), strict=True):
        output = re.sub(r"\n versions .*?(?=\n data fingerprint)", "", output, flags=re.DOTALL)
        shown = "\n".join(text.rstrip() for text in output.splitlines())
        parts.append(f"{meaning}\n\n```\n$ {line}\n{shown}\n```\n")
    parts.append(
        "Training losses, each the mean of 20 steps. From line to line the loss of the base run "
        f"changes by {mean(usual_changes(folder)):.3f} on average after step 100.\n\n"
        "| change, at step | 20 steps earlier | last before | first after |\n|---|---|---|---|\n"
        + "".join(
            f"| {name} | {earlier:.3f} | {before:.3f} | {after:.3f} |\n"
            for name, earlier, before, after in find_seams(folder)
        )
    )
    return "\n".join(parts)


def main() -> None:
    """Plays it anew and replaces the end of the page."""
    with tempfile.TemporaryDirectory() as folder:
        film = render(Path(folder))
    page, _, _ = PAGE.read_text(encoding="utf-8").partition(TITLE)
    PAGE.write_text(page + film, encoding="utf-8")


if __name__ == "__main__":
    main()
