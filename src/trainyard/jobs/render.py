"""Renders the script of a job: the only module that knows all schedulers."""

from __future__ import annotations

from trainyard.jobs import mpi, pbs, slurm, ssh
from trainyard.jobs.job import Job
from trainyard.jobs.script import beginning, caches, head, program, quote, variables


def render(job: Job) -> str:
    """Renders the script of a job."""
    scheduler = job.cluster.launch.scheduler
    writers = {"slurm": slurm, "pbs": pbs, "mpi": mpi, "ssh": ssh}
    return writers[scheduler].render(job) if scheduler in writers else _render_local(job)


def _render_local(job: Job) -> str:
    """The script of one process, which starts and restarts the others of this machine."""
    lines = [
        *head(job, quote("bash", job.script_path)),
        *beginning(job),
        "",
        *variables(job),
        "TRAINYARD_JOB=$(hostname)-$$",
        *caches(job),
        f"{program(job)} &",
        *END.splitlines(),
    ]
    return "\n".join(lines) + "\n"


END = """
step=$!
trap : INT # of a terminal it reaches both
trap 'kill -TERM "$step"' TERM
trap 'kill -USR1 "$step"' USR1
while kill -0 "$step" 2> /dev/null; do wait "$step"; done
wait "$step"
code=$?
rm -rf "$caches"
exit "$code"
""".strip()
