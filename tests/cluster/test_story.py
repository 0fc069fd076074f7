"""A run on a real Slurm, from raw text to the last step, with preemption and lost nodes on the way.

Three machines (machines.py) are the nodes. One command submits the preparation of the corpus, an
array of jobs, and training on two nodes after it. Then a more urgent job takes the nodes away, and
machines die, one of them twice; docs/slurm-story.md has the log of such a run. Slurm is set to give
up a silent node after 15 s, and `SlurmdTimeout` of most clusters is 300.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from trainyard.jobs.status import read_bad_nodes, read_starts, read_submission

from .conftest import need_slurm
from .launching import read_losses, write_commands
from .machines import Machines, why_not
from .project import N_STEPS, write_project
from .slurm import Slurm
from .telling import Told

pytestmark = pytest.mark.exhaustive


def tell(story: Told, slurm: Slurm) -> None:
    """Lets it happen."""
    story.type("trainyard launch run.toml --cluster basement.toml --nodes 2 --stages all")
    story.train_on()
    # Somebody with more urgent work needs all nodes.
    slurm.run(["sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--wrap=sleep 5"])
    story.follow("it has stopped", lambda: story.count("end") > 0)
    story.type("trainyard status story")
    story.follow("it is started again", lambda: story.count("start") > 1)
    story.train_on()
    for node in ("n2", "n3", "n2"):  # each dies under the job, and comes back later
        before = story.count("lost")
        slurm.machines.kill(node)
        story.follow("the job runs again", lambda before=before: story.count("lost") > before)
        slurm.boot(node)
        story.train_on()
    story.follow("it is done", story.is_done)
    submission = read_submission(story.folder)
    assert submission is not None
    slurm.wait(int(submission.job))
    story.show_log()
    story.type("trainyard status story")
    story.type("trainyard train run.toml name=undisturbed --ranks 2")


def test_a_run_is_prepared_preempted_and_loses_nodes(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    need_slurm()
    if reason := why_not():
        pytest.skip(reason)
    said: list[str] = []
    write_project(tmp_path)
    # The path of a socket is 107 characters at most.
    with Machines(tmp_path_factory.mktemp("m"), 3) as machines:
        slurm = Slurm(machines)
        slurm.start()
        tell(Told(tmp_path, machines, said.append, "story", write_commands(tmp_path)), slurm)
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
