"""The lines of each guide's README, typed to the end, as docs/guides-typed.md shows them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from trainyard.jobs.status import read_starts

from .conftest import need_slurm
from .guides import AFTER, GUIDES, N_STEPS, Guide, tell
from .launching import read_losses
from .machines import Machines, why_not

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_the_lines_of_a_readme(
    guide: Guide, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    need_slurm()
    if reason := why_not():
        pytest.skip(reason)
    said: list[str] = []
    with Machines(tmp_path_factory.mktemp("m"), 3) as machines:
        account = tell(guide, tmp_path, machines, said.append)
    log = "\n".join(said)
    # Each line of the README is in it: typed as it is, or above what was typed or why it was not.
    for heading in (*guide.headings, AFTER):
        for line in guide.lines(heading):
            assert f"$ {line}" in said or f"# {line}" in said, log
    folder = account.folder
    assert json.loads((folder / "outcome.json").read_text())["exit_code"] == 0, log
    trained = [step for kind, step in read_losses(folder) if kind == "train"]
    assert trained == list(range(1, len(trained) + 1)), log
    assert len(trained) >= N_STEPS
    # It was ended by force and went on, from a checkpoint.
    resumed = re.findall(r"resumes at step (\d+)", log)
    assert resumed, log
    assert all(int(step) > 0 for step in resumed)
    if guide.cluster:
        starts = read_starts(folder)
        assert len(starts) > 1, log
        assert starts[-1].exit_code == 0, log
    assert re.search(r"^    loss +[0-9.]+ nats per token$", log, re.MULTILINE), log
    assert "transformers loads it" in log
