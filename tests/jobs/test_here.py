"""Scripts in an allocation, with stand-ins for what schedulers install."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.jobs.scripts import build_job, run_job, write_program

# The nth start of the ranks ends with the nth word of `plan`.
STEP = """\
echo "$TRAINYARD_JOB $MASTER_ADDR $MASTER_PORT $*" | head -n 1 >> steps
words=($(cat plan))
exit "${words[$(wc -l < steps) - 1]}"
"""
SQUEUE = 'case $* in *%T*) echo RUNNING;; *%e*) echo "$END";; esac'
SCONTROL = "printf '%s\\n' n1 n2 n3"


def run(
    folder: Path, plan: str, scheduler: str = "slurm", bad: str = "", end: str = "", **launch: Any
) -> tuple[int, list[str]]:
    """Runs two nodes of an allocation of n1, n2 and n3; gives the exit code and the steps."""
    job = build_job(folder, {"scheduler": scheduler, **launch}, n_nodes=2)
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / "bad_nodes").write_text(bad)
    programs = {"srun": STEP, "mpiexec.hydra": STEP, "squeue": SQUEUE, "scontrol": SCONTROL}
    for name, text in programs.items():
        write_program(folder / "bin" / name, text)
    (folder / "plan").write_text(plan)
    (folder / "steps").write_text("")
    (folder / "nodes").write_text("n1.site\nn2.site\nn3.site\n")
    given = {"PBS_JOBID": "1", "PBS_NODEFILE": str(folder / "nodes"), "END": end}
    given["SLURM_JOB_NODELIST"] = "n[1-3]"
    done = run_job(job, "here", programs=folder / "bin", **given)
    steps = (folder / "steps").read_text().splitlines()
    return done.returncode, [each for each in steps if "rm -rf" not in each]


@pytest.mark.parametrize(
    ("end", "n_starts"), [("", 2), ("N/A", 2), ("2000-01-01T00:00:00", 1), ("2100-01-01", 2)]
)
def test_the_end_of_an_allocation(end: str, n_starts: int, tmp_path: Path) -> None:
    """Without an answer of squeue the run goes on while the job does."""
    # Every second word is of the clean-up.
    code, steps = run(tmp_path, "75 0 0 0", end=end)
    assert (code, len(steps)) == ((0, 2) if n_starts == 2 else (75, 1))


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_two_runs_share_an_allocation(scheduler: str, tmp_path: Path) -> None:
    """Each has its own scratch folder, rendezvous id and port."""
    how = {"start": "torchrun"} if scheduler == "slurm" else {}
    jobs, ports = set(), set()
    for number in range(5):
        code, (step,) = run(tmp_path / str(number), "0 0", scheduler, **how)
        assert code == 0
        jobs.add(step.split()[0])
        ports.add(step.split()[2])
        assert re.fullmatch(r"1-0-\d+ n1(\.site)? \d{5} .*", step)
    assert len(jobs) == 5
    assert len(ports) > 1


@pytest.mark.parametrize("how", ["tasks", "torchrun", "pbs"])
def test_spare_nodes_replace_bad_ones(how: str, tmp_path: Path) -> None:
    scheduler, start = ("pbs", "tasks") if how == "pbs" else ("slurm", how)
    code, (step,) = run(tmp_path, "0 0", scheduler, bad="n1 2\nn3 1\n", start=start)
    assert code == 0
    if how == "pbs":
        assert (tmp_path / "runs/run/logs/hosts").read_text() == "n2.site:1\nn3.site:1\n"
    else:
        assert " --exclude=n1 " in step
    assert how == "tasks" or step.split()[1].startswith("n2")


def test_too_few_good_nodes(tmp_path: Path) -> None:
    assert run(tmp_path, "0 0", bad="n1 2\nn3 2\n") == (93, [])


def test_a_refusal_of_an_earlier_start(tmp_path: Path) -> None:
    """A start that was killed left one; this one has its name, and is done."""
    logs = tmp_path / "runs/run/logs"
    logs.mkdir(parents=True)
    (logs / "refused-1-0-7").write_text("93\n")
    assert run(tmp_path, "0 0")[0] == 0
    assert not list(logs.glob("refused-*"))
