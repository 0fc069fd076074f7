"""Job scripts for hosts reached only by ssh, without a scheduler or MPI.

The script has two roles: on the first machine it starts itself on each host (`launch/remote.py`);
there, as `bash job.sh on-host`, it starts the ranks of that host.
"""

from __future__ import annotations

import shlex

from trainyard.jobs import mpi
from trainyard.jobs.job import Job
from trainyard.jobs.script import (
    beginning,
    caches,
    device,
    head,
    heredoc,
    judgement,
    options,
    program,
    quote,
    taskset,
    variables,
    verdict,
)


def render(job: Job) -> str:
    """Writes the script."""
    remote = f"{quote(job.cluster.launch.python, '-P')} -m trainyard.launch.remote"
    scratch = job.cluster.launch.scratch
    own = [word for each in options(job) for word in shlex.split(each)]
    ssh_options = "".join(f"{quote(f'--ssh={word}')} " for word in own)
    lines = [
        *head(job, quote("bash", job.script_path)),
        *beginning(job),
        *variables(job),
        "",
        "# The program of each rank.",
        *heredoc(
            "rank",
            [
                *device(job, "LOCAL_RANK"),
                *caches(job),
                *taskset(job, "LOCAL_RANK"),
                f"exec {program(job)}",
            ],
        ),
        "",
        "# On a host: run its ranks until the starting machine is gone.",
        'if [ "$1" = on-host ]; then',
        "  shift",
        f'  {remote} on-host "$@" -- bash -c "$rank"',
        "  code=$?",
        f'  rm -rf {quote(scratch)}/trainyard-"$TRAINYARD_JOB"',
        '  exit "$code"',
        "fi",
        "",
        "job=$(hostname)-$$ start=${TRAINYARD_START:-0} is_warned='' is_ended=''",
        *judgement(mpi.AGAIN),
        *mpi.choose_hosts(job),
        *mpi.meeting_point(),
        "",
        *mpi.TRAPS,
        "start_ranks() {",
        f"  exec {remote} start --ranks {job.n_ranks_per_node} \\",
        f'    --script {quote(job.script_path)} --job "$TRAINYARD_JOB" --port "$MASTER_PORT" \\',
        f'    --lost "$folder/logs/lost_hosts" {ssh_options}-- "${{hosts[@]}}"',
        "}",
        *mpi.RUN.replace("START", "start_ranks").splitlines(),
        *verdict(),
        'if [ "$then" = requeue ]; then again; fi',
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"
