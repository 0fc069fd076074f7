"""A set of runs as training leaves it, made up."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.report.conftest import PLAN, dump, train_line

from trainyard.config.load import render_run
from trainyard.sweeps.sets import RunSet, build_set, write_set

MakeSet = Callable[..., RunSet]


def write_member(folder: Path, held_out: Mapping[int, float | None], exit_code: int) -> None:
    """Makes up what a run of a set has logged: held-out losses by step; its exit code."""
    last = max(held_out, default=1)
    lines: list[dict[str, Any]] = [
        {"kind": "start", "time": 1000.0, "step": 0, "resumed": False, "device": "a GPU"}
    ]
    for step in range(1, last + 1):
        lines.append(train_line(step, 6.0 - step / 20))
        if step in held_out:
            found = {"step": step, "tokens": 512 * step, "split": "valid", "loss": held_out[step]}
            lines.append({"kind": "evaluate", "time": 1000.0 + step} | found)
    (folder / "metrics.jsonl").write_text(dump(lines))
    (folder / "plan.json").write_text(json.dumps(PLAN | {"n_steps": 40}))
    reason = {"reason": "done" if exit_code == 0 else "a reason", "exit_code": exit_code}
    (folder / "outcome.json").write_text(json.dumps(reason))


@pytest.fixture
def make_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeSet:
    """Makes sets in a folder that becomes the working folder.

    The losses are those at step 40, by member: None: not started; NaN: none; a negative one: it has
    been stopped at step 20 with this loss.
    """
    monkeypatch.chdir(tmp_path)

    def make(overrides: Sequence[str], losses: Sequence[float | None], n_seeds: int = 1) -> RunSet:
        run_set, runs = build_set("tiny", overrides, "web", n_seeds)
        write_set(run_set, runs)
        for member, loss in zip(run_set.members, losses, strict=True):
            if loss is None:
                continue
            member.folder.mkdir()
            (member.folder / "run.toml").write_text(render_run(runs[member.name]))
            if loss < 0:
                write_member(member.folder, {20: -loss}, exit_code=75)
            else:
                last = None if math.isnan(loss) else loss
                write_member(member.folder, {20: 5.5, 40: last}, exit_code=0)
        return run_set

    return make
