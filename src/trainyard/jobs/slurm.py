"""Job scripts for Slurm: one task for each rank, or one torchrun on each node.

before the time limit     Slurm sends SIGUSR1 only to this script; it asks the ranks to save,
                          and requeues the job
a node fails              Slurm itself requeues the job (--requeue)
a rank fails              the step ends, and the script requeues the job: three times, unless
                          checkpoints got newer
scancel, preemption       SIGTERM also reaches the script: it leaves the job to Slurm
"""

from __future__ import annotations

import shlex

from trainyard.config.cluster import cpu_mask
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
    variables,
    verdict,
)

WARNING_SECONDS = 180
"""Before the time limit; Slurm checks every 30 s."""


def render(job: Job) -> str:
    """Writes the script."""
    lines = _render_stage(job) if job.is_stage else _render_training(job)
    return "\n".join(lines) + "\n"


def _render_training(job: Job) -> list[str]:
    return [
        *head(job, quote("sbatch", job.script_path)),
        *_directives(job),
        "# Save before the time limit; requeue after a node failure.",
        f"#SBATCH --signal=B:USR1@{WARNING_SECONDS}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        *beginning(job),
        "",
        "job=$SLURM_JOB_ID start=${SLURM_RESTART_COUNT:-0} is_warned='' is_ended=''",
        'export TRAINYARD_JOB="$job-$start"',
        *(_torchrun(job) if job.cluster.launch.start == "torchrun" else _tasks(job)),
        *_step(job),
        *judgement(AGAIN),
        "",
        *LOST.splitlines(),
        "",
        *RUN.splitlines(),
        *verdict(),
        *END.splitlines(),
    ]


CPUS = (
    "# Since Slurm 22.05, srun no longer inherits these from sbatch.",
    'if [ -n "$SLURM_CPUS_PER_TASK" ]; then step+=(--cpus-per-task="$SLURM_CPUS_PER_TASK"); fi',
)
AGAIN = (
    "local bad",
    "bad=$(bad_hosts | paste -sd,)",
    "# Only a queued job accepts excluded nodes; requeueing sends SIGTERM to this script.",
    "trap '' TERM",
    'scontrol requeue "$job" || return',
    '[ -z "$bad" ] || scontrol update JobId="$job" ExcNodeList="$bad"',
)
LOST = r"""
# Nodes of the previous start that are down now have failed during it.
find_lost_nodes() {
  local last
  last=$(grep " start $job " "$folder/starts.log" 2> /dev/null | tail -n 1)
  if [ -n "$last" ]; then
    sinfo --noheader --Node --nodes="${last##* }" --states=down,fail,drain --format=%N | sort -u \
      > "$folder/logs/lost_hosts"
    if [ -s "$folder/logs/lost_hosts" ]; then
      tell lost "$job" "$(paste -sd, "$folder/logs/lost_hosts")"
      blame
    fi
    rm -f "$folder/logs/lost_hosts"
  fi
  if [ -n "$(bad_hosts)" ] &&
    scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -xF "$(bad_hosts)"; then
    echo "failed twice and is excluded" >&2
    again
    exit 75
  fi
}
""".strip()

RUN = r"""
# Only the ranks can save. A signal ends `wait`, not the step.
trap 'is_warned=yes; scancel --signal=USR1 "$job"' USR1
trap '[ -n "$is_warned" ] || is_ended=yes' TERM
begin
find_lost_nodes
tell start "$job" "$start" "$SLURM_JOB_NODELIST"
srun "${step[@]}" bash -c "$rank" &
step_process=$!
while kill -0 "$step_process" 2> /dev/null; do wait "$step_process"; done
wait "$step_process"
code=$?
""".strip()

END = r"""
timeout 10 srun "${each_node[@]}" rm -rf "$scratch/trainyard-$TRAINYARD_JOB" 2> /dev/null
if [ "$then" = requeue ]; then again; fi
exit "$code"
""".strip()


def _render_stage(job: Job) -> list[str]:
    """An array of tasks that share the work among themselves; each can be run again."""
    return [
        *head(job, quote("sbatch", job.script_path)),
        *_directives(job),
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        *beginning(job),
        "",
        *heredoc("task", [*variables(job), f"exec {program(job)}"]),
        "",
        *_words("step", ["--nodes=1", "--ntasks=1", "--export=ALL"], _container(job)),
        *CPUS,
        'exec srun "${step[@]}" bash -c "$task"',
    ]


def _directives(job: Job) -> list[str]:
    launch, prepare = job.cluster.launch, job.cluster.launch.prepare
    given: dict[str, object] = {"job-name": job.name}
    # A % of the path is not one of sbatch's.
    log = str(job.folder).replace("%", "%%")
    if job.is_stage:
        is_array = job.n_nodes > 1
        log += f"/jobs/{job.name}-{'%A_%a' if is_array else '%j'}.log"
        given |= {"array": f"0-{job.n_nodes - 1}"} if is_array else {}
        given |= {"nodes": 1, "ntasks-per-node": 1}
        if not any(each.startswith(("-c", "--cpus-per-task")) for each in prepare.options):
            given |= {"cpus-per-task": prepare.workers}
        partition, time = prepare.partition or launch.partition, prepare.time or launch.time
    else:
        log += "/job-%j.log"
        n_tasks = 1 if launch.start == "torchrun" else job.n_ranks_per_node
        given |= {"nodes": job.n_nodes, "ntasks-per-node": n_tasks}
        partition, time = launch.partition, launch.time
    given |= {"account": launch.account, "partition": partition, "time": time, "output": log}
    return [
        *(f"#SBATCH {quote(f'--{name}={value}')}" for name, value in given.items() if value != ""),
        *(f"#SBATCH {each}" for each in options(job)),
    ]


def _tasks(job: Job) -> list[str]:
    """The program that srun starts once per rank."""
    return [
        "",
        "# The program of each rank.",
        *heredoc(
            "rank",
            [
                *variables(job),
                *device(job, "SLURM_LOCALID"),
                *caches(job),
                f"exec {program(job)}",
            ],
        ),
    ]


def _torchrun(job: Job) -> list[str]:
    """The program that srun starts once per node; torchrun restarts its ranks at most 3 times."""
    words = [
        "-m torch.distributed.run",
        f"--nnodes={job.n_nodes} --nproc-per-node={job.n_ranks_per_node} --max-restarts=3",
        # Else SIGUSR1 would end torchrun itself.
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        '--rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"',
        '--rdzv-id="$TRAINYARD_JOB"',
    ]
    return [
        "",
        "# Rendezvous on the first node, at a port of this start.",
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "export MASTER_ADDR MASTER_PORT=$((12000 + (SLURM_JOB_ID + start) % 18000))",
        "",
        "# The program of each node.",
        *heredoc(
            "rank",
            [
                *variables(job),
                *caches(job),
                "# Without it gloo's ranks look for those of the previous start.",
                "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
                f"exec {program(job, words)}",
            ],
        ),
    ]


def _step(job: Job) -> list[str]:
    launch = job.cluster.launch
    n_tasks = 1 if launch.start == "torchrun" else job.n_ranks_per_node
    nodes, each = f"--nodes={job.n_nodes}", f"--ntasks-per-node={n_tasks}"
    lines = [
        "",
        "# Start the ranks: all end when one fails.",
        f"scratch={quote(launch.scratch)}",
        f"each_node=({nodes} --ntasks={job.n_nodes} --ntasks-per-node=1)",
        *_words(
            "step",
            [nodes, f"--ntasks={job.n_nodes * n_tasks}", each],
            ["--export=ALL", "--kill-on-bad-exit=1"],
            _container(job),
        ),
        *CPUS,
    ]
    if launch.cpu_lists:
        lists = launch.cpu_lists[: job.n_ranks_per_node]
        masks = ",".join(cpu_mask(cpus) for cpus in lists)
        lines += [
            f"# CPUs of the ranks of a node: {' '.join(lists)}",
            f"step+=({quote('--cpu-bind=mask_cpu:' + masks)})",
        ]
    return lines


def _words(name: str, *groups: list[str]) -> list[str]:
    """Defines an array, with one line per group, and one per word of the last group."""
    rows = [quote(*group) for group in groups[:-1]] + [quote(word) for word in groups[-1]]
    return [f"{name}=(", *(f"  {row}" for row in rows), ")"]


def _container(job: Job) -> list[str]:
    """Options of pyxis; none without it."""
    container = job.cluster.launch.container
    if container.runtime != "pyxis":
        return []
    scratch = job.cluster.launch.scratch
    mounts = [f"{job.project}:{job.project}", f"{scratch}:{scratch}", *job.mounts]
    words = [
        f"--container-image={job.image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={job.project}",
        *(word for each in container.options for word in shlex.split(each)),
    ]
    if container.environment and not job.is_stage:
        words.append(f"--container-env={','.join(container.environment)}")
    return words
