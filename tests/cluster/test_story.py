"""The whole story of a run on Slurm, as docs/slurm-story.md tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainyard.launch.status import read_bad_nodes, read_starts

from .conftest import need_slurm
from .launching import read_losses
from .machines import Machines, why_not
from .story import N_STEPS, tell

pytestmark = pytest.mark.exhaustive


def test_a_run_is_prepared_preempted_and_loses_nodes(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    need_slurm()
    if reason := why_not():
        pytest.skip(reason)
    said: list[str] = []
    # The path of a socket is 107 characters at most.
    place = tmp_path_factory.mktemp("m")
    with Machines(place, 3) as machines:
        tell(tmp_path, machines, said.append)
    folder = tmp_path / "runs" / "story"
    starts = read_starts(folder)
    log = "\n".join(said)
    assert [start.lost for start in starts if start.lost] == ["n2", "n3", "n2"], log
    # slurmctld resends a step's SIGTERM 60 s after a dead node missed it. If the node is back by
    # then, it reaches the same step of the job's next start, which saves and is started once more.
    (first, *resent, last) = [start.exit_code for start in starts if not start.lost]
    assert (first, last) == (75, 0), log
    assert set(resent) <= {75, 143}, log
    assert len(resent) <= 3, log
    assert len({start.job for start in starts}) == 1
    assert read_bad_nodes(folder) == {"n2": 2, "n3": 1}
    assert "n2" not in starts[-1].nodes
    losses = read_losses(folder)
    assert len([kind for kind, _ in losses if kind == "train"]) == N_STEPS
    assert losses == read_losses(tmp_path / "runs" / "undisturbed")
    assert "| received SIGUSR1: saved step " in log
    assert "story: waits to be started again: PENDING" in log
    assert "story: ended: done" in log
