"""Job scripts for hosts with an mpiexec and no scheduler, and the mpiexec line that PBS shares.

    Open MPI    sets ranks in OMPI_COMM_WORLD_*; does not forward variables by itself
    MPICH       PMI_* and MPI_LOCALRANKID; also Intel MPI and others with Hydra
    PALS        PMI_* and PMI_LOCAL_RANK, on HPE Cray machines; the only one with our CPU binding

All end a job when a rank is killed; if a rank only fails, Hydra lets the others continue until
their own parents notice (`launch/hang_reports.py`). None of them notices a silent host.
"""

from __future__ import annotations

import shlex

from trainyard.jobs.job import MPIEXECS, Job
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

LOCAL_RANKS = {
    "openmpi": "OMPI_COMM_WORLD_LOCAL_RANK",
    "mpich": "MPI_LOCALRANKID",
    "pals": "PMI_LOCAL_RANK",
}
HOST_LINES = {"openmpi": "$host slots=$per_node", "mpich": "$host:$per_node", "pals": "$host"}


def render(job: Job) -> str:
    """Writes the script."""
    lines = [
        *head(job, quote("bash", job.script_path)),
        *beginning(job),
        "",
        "job=$(hostname)-$$ start=${TRAINYARD_START:-0} is_warned='' is_ended=''",
        *judgement(AGAIN),
        *choose_hosts(job),
        *meeting_point(),
        *rank(job),
        *mpiexec(job),
        "",
        *TRAPS,
        *run(job),
        *verdict(),
        *end(job),
    ]
    return "\n".join(lines) + "\n"


TRAPS = (
    "# Stopped by a person: the ranks save. Their own process group keeps Ctrl-C from them.",
    "set -m",
    "trap 'is_ended=yes; kill -USR1 \"$step\"' INT TERM USR1",
)
AGAIN = (
    "# Start this script again, on hosts that are not bad.",
    "sleep 1",
    'TRAINYARD_START=$((start + 1)) exec bash "$0"',
)


def end(job: Job) -> list[str]:
    """Cleans up the nodes, and restarts or records the result."""
    caches = f'{quote(job.cluster.launch.scratch)}/trainyard-"$TRAINYARD_JOB"'
    return [
        f"(start_ranks {job.n_nodes} 1 rm -rf {caches}) 2> /dev/null",
        'if [ "$then" = requeue ]; then again; fi',
        'exit "$code"',
    ]


def choose_hosts(job: Job) -> list[str]:
    """Sets $hosts to one host per node, without hosts that failed twice."""
    return [
        "",
        "# Hosts that failed twice are excluded; the last ones are spares.",
        "hosts=()",
        f"for host in {quote(*job.cluster.launch.hosts)}; do",
        "  name=${host#*@}",
        '  bad_hosts | grep -qxF -e "$name" -e "${name%%.*}" || hosts+=("$host")',
        "done",
        f'hosts=("${{hosts[@]:0:{job.n_nodes}}}")',
        f'if [ "${{#hosts[@]}}" -lt {job.n_nodes} ]; then',
        f'  echo "error: {job.n_nodes} hosts are needed: see $folder/bad_nodes" >&2',
        "  exit 93",
        "fi",
    ]


def meeting_point() -> list[str]:
    """Sets the rendezvous of the ranks, and the id of this start."""
    return [
        "",
        "# Rendezvous of the ranks.",
        'export MASTER_ADDR="${hosts[0]#*@}" MASTER_PORT=$((12000 + RANDOM % 18000))',
        'export TRAINYARD_JOB="${job//[^A-Za-z0-9]/_}-$start"',
    ]


def rank(job: Job) -> list[str]:
    """Sets $rank, the program that mpiexec starts once per rank."""
    launch = job.cluster.launch
    local_rank = LOCAL_RANKS[launch.mpiexec]
    binds = launch.mpiexec != "pals" and taskset(job, local_rank)
    return [
        "",
        "# The program of each rank.",
        *heredoc(
            "rank",
            [
                *variables(job),
                *device(job, local_rank),
                *caches(job),
                *(binds or []),
                f"exec {program(job)}",
            ],
        ),
    ]


def mpiexec(job: Job) -> list[str]:
    """Defines `start_ranks N PER_NODE COMMAND`, which starts N processes on $hosts."""
    launch = job.cluster.launch
    own = [word for each in options(job) for word in shlex.split(each)]
    words = ['exec "$mpiexec" -n "$n"', OPTIONS[launch.mpiexec], '"$@"']
    if launch.scheduler == "mpi" and own:
        words.insert(2, quote(*own))
    return [
        "",
        "# Start the ranks: start_ranks N PER_NODE COMMAND ..",
        f"mpiexec=$({' || '.join(f'command -v {name}' for name in MPIEXECS[launch.mpiexec])})",
        "start_ranks() {",
        "  local n=$1 per_node=$2 host",
        "  shift 2",
        '  for host in "${hosts[@]}"; do',
        f'    echo "{HOST_LINES[launch.mpiexec]}"',
        '  done > "$folder/logs/hosts"',
        *(EXPORTS.splitlines() if launch.mpiexec == "openmpi" else []),
        "  " + " \\\n    ".join(words),
        "}",
    ]


OPTIONS = {
    "openmpi": '--hostfile "$folder/logs/hosts" --map-by "ppr:$per_node:node" --bind-to none '
    '"${passed[@]}"',
    "mpich": '-f "$folder/logs/hosts" -ppn "$per_node" -genvall',
    "pals": '--hostfile "$folder/logs/hosts" --ppn "$per_node" --envall',
}
EXPORTS = """\
  local name passed=()
  for name in PATH LD_LIBRARY_PATH PYTHONPATH MASTER_ADDR MASTER_PORT TRAINYARD_{JOB,END}; do
    if [ -n "${!name}" ]; then passed+=(-x "$name"); fi
  done"""


def run(job: Job) -> list[str]:
    """Starts the ranks, waits for them, and sets $code."""
    launch = job.cluster.launch
    binding: list[str] = []
    if launch.mpiexec == "pals" and launch.cpu_lists:
        lists = launch.cpu_lists[: job.n_ranks_per_node]
        binding = ["--cpu-bind", f"list:{':'.join(lists)}"]
    start = f"start_ranks {job.n_ranks} {job.n_ranks_per_node} {quote(*binding)}".rstrip()
    return RUN.replace("START", f'{start} bash -c "$rank"').splitlines()


RUN = r"""
begin
tell start "$job" "$start" "$(IFS=,; echo "${hosts[*]}")"
START &
step=$!
while kill -0 "$step" 2> /dev/null; do wait "$step"; done
wait "$step"
code=$?
""".strip()
