"""Job scripts for PBS: OpenPBS and PBS Professional, with any mpiexec.

PBS differs from Slurm in these points:

    no signal before the time limit              the script passes the end time to training
    a job that waits for an array starts         it checks for the files of the earlier stage
    even if a task has failed
    -r y requeues a job only after a node        otherwise the script does: qrerun, or a new job if
    failure                                      that is not allowed
    it cannot exclude nodes                      bad_nodes is only for people to read
"""

from __future__ import annotations

from trainyard.jobs import mpi
from trainyard.jobs.job import Job
from trainyard.jobs.script import (
    beginning,
    head,
    judgement,
    options,
    program,
    quote,
    variables,
    verdict,
)


def render(job: Job) -> str:
    """Writes the script."""
    lines = _render_stage(job) if job.is_stage else _render_training(job)
    return "\n".join(lines) + "\n"


def _render_training(job: Job) -> list[str]:
    launch = job.cluster.launch
    return [
        *head(job, quote("qsub", job.script_path)),
        *_directives(job, launch.partition, launch.time),
        *beginning(job),
        "",
        "job=$PBS_JOBID is_warned='' is_ended=''",
        'start=$(cat "$folder/starts.log" 2> /dev/null | grep -cF " start $job ")',
        *_hosts(job),
        *(_end(launch.time) if launch.time else []),
        *mpi.meeting_point(),
        *mpi.rank(job),
        *mpi.mpiexec(job),
        *judgement(_again(job)),
        "",
        "# qdel and preemption also signal the ranks, which save.",
        "trap 'is_ended=yes' TERM",
        "trap 'is_warned=yes' USR1",
        *mpi.run(job),
        *verdict(),
        *mpi.end(job),
    ]


def _again(job: Job) -> list[str]:
    return [
        "# Only for operators on many machines.",
        'qrerun "$job" 2> /dev/null && return',
        "local next",
        f"next=$({quote('qsub', job.script_path)}) || return",
        "# From now on, status queries the new job id.",
        """tell resubmitted "$job" "${next##*$'\\n'}\"""",
    ]


def _hosts(job: Job) -> list[str]:
    n_nodes = job.n_nodes
    return [
        "",
        "# The node file of PBS has one line per chunk or per rank.",
        "mapfile -t hosts < <(awk '!seen[$0]++' \"$PBS_NODEFILE\")",
        f'if [ "${{#hosts[@]}}" != {n_nodes} ]; then',
        f'  echo "error: PBS gave ${{#hosts[@]}} nodes, not {n_nodes}: -l place=scatter?" >&2',
        "  exit 2",
        "fi",
    ]


def _render_stage(job: Job) -> list[str]:
    """An array of tasks that share the work among themselves; each can be run again."""
    prepare, launch = job.cluster.launch.prepare, job.cluster.launch
    partition, time = prepare.partition or launch.partition, prepare.time or launch.time
    return [
        *head(job, quote("qsub", job.script_path)),
        *_directives(job, partition, time),
        *beginning(job),
        "",
        *variables(job),
        f"exec {program(job)}",
    ]


def _directives(job: Job, queue: str, time: str) -> list[str]:
    launch = job.cluster.launch
    given = options(job)
    if not any(each.startswith("-l") and "select=" in each for each in given):
        chunk = f"1:ncpus={launch.prepare.workers}" if job.is_stage else f"{job.n_nodes}"
        given = [f"-l select={chunk}", *given]
    if not job.is_stage and not any("place=" in each for each in given):
        given.append("-l place=scatter")
    log = job.folder / "jobs" if job.is_stage else job.folder
    lines = [f"-N {job.name}", *given]
    lines += [f"-l walltime={time}"] if time else []
    lines += [f"-q {queue}"] if queue else []
    lines += [f"-A {launch.account}"] if launch.account else []
    lines += [f"-J 0-{job.n_nodes - 1}"] if job.is_stage and job.n_nodes > 1 else []
    return [f"#PBS {line}" for line in [*lines, "-j oe", f"-o {log}/", "-r y"]]


def _end(time: str) -> list[str]:
    hours, minutes, seconds = (int(part) for part in time.split(":"))
    limit = 3600 * hours + 60 * minutes + seconds
    return [
        "",
        "# When PBS will end this job, for training; some report another limit here.",
        f"export TRAINYARD_END=$(($(date +%s) + ${{PBS_WALLTIME:-{limit}}}))",
    ]
