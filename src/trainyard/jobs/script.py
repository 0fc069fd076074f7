"""The common parts of all job scripts: header, the program of a rank, and the exit handling.

Users read job scripts and start them again by hand. From top to bottom a script has

    its job, and the command that made it
    the options of the scheduler
    the working folder, and the cluster's setup lines (modules)
    the program of each rank: a text that the launcher passes to bash on every node
    the start of the ranks
    the result: finish, hold or requeue

Every value is quoted by shlex, so that a shell reads it as one word, and has no control character,
so that it cannot end a heredoc. Only the `setup` lines of the cluster file are shell code.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from trainyard.config.cluster import CONTROL, Container
from trainyard.errors import LaunchError
from trainyard.jobs.job import Job
from trainyard.launch.environment import PROMISE, hide_secrets


def quote(*words: object) -> str:
    """Quotes words for a shell.

    Raises:
        LaunchError: a word has a control character.
    """
    texts = [str(word) for word in words]
    for text in texts:
        if re.search(CONTROL, text):
            raise LaunchError(
                f"{text!r} has a control character, and would be a word of a job script",
                "rename the file or folder, or start in another one",
            )
    return shlex.join(texts)


def head(job: Job, by_hand: str) -> list[str]:
    """Returns the header comment of a script."""
    what = f"{job.n_nodes} {'task' if job.is_stage else 'node'}{'s' if job.n_nodes > 1 else ''}"
    if not job.is_stage:
        what += f" of {job.n_ranks_per_node} rank{'s' if job.n_ranks_per_node > 1 else ''}"
    if job.cluster.launch.scheduler == "local":
        what = "on this machine"
    return [
        # PBS starts scripts without the login environment, such as modules.
        "#!/bin/bash -l" if job.cluster.launch.scheduler == "pbs" else "#!/bin/bash",
        f"# {job.name}: {what}. Made by",
        f"#     {hide_secrets(re.sub(rf'({CONTROL}| )+', ' ', job.made_by))}",
        "# Started again by hand, it continues the run:",
        f"#     {by_hand}",
    ]


def options(job: Job) -> list[str]:
    """Returns the cluster's scheduler options with the numbers of the job filled in."""
    launch = job.cluster.launch
    given = launch.prepare.options if job.is_stage else launch.options
    nodes = "1" if job.is_stage else str(job.n_nodes)
    ranks = str(job.n_ranks_per_node)
    return [each.replace("{nodes}", nodes).replace("{ranks}", ranks) for each in given]


def beginning(job: Job) -> list[str]:
    """Changes to the project folder, runs the cluster's setup, and checks required files."""
    lines = ["", f"cd {quote(job.project)} || exit 2"]
    if not job.is_stage and job.cluster.launch.scheduler != "local":
        lines.append(f"folder={quote(job.run_folder)}")
    if job.cluster.launch.setup:
        lines += ["", "# Setup of the cluster.", *job.cluster.launch.setup]
    if job.needs:
        lines += [
            "",
            "# Made by earlier stages.",
            "for file in \\",
            *(f"  {quote(each)} \\" for each in job.needs[:-1]),
            f"  {quote(job.needs[-1])}",
            "do",
            '  [ -e "$file" ] || { echo "error: $file is missing: is its stage done?"; exit 2; }',
            "done",
        ]
    return lines


def heredoc(name: str, lines: Iterable[str]) -> list[str]:
    """Stores lines verbatim in a variable, which a separate bash runs."""
    end = name.upper()
    return [f"IFS= read -r -d '' {name} <<'{end}'", *lines, end]


def variables(job: Job) -> list[str]:
    """Exports the environment of the cluster file and the promised number of devices."""
    launch = job.cluster.launch
    given: dict[str, str] = {}
    if not job.is_stage and job.cluster.gpu != "cpu":
        given = {PROMISE: "1" if launch.device_variable else str(job.n_ranks_per_node)}
    given |= launch.environment
    return [f"export {name}={quote(value)}" for name, value in given.items()]


def caches(job: Job) -> list[str]:
    """Sets the folders of compiled kernels; TRAINYARD_JOB differs between starts."""
    return [
        "# Compiled kernels go to the node's local disk, in a new folder per start: no stale lock.",
        f'caches={quote(job.cluster.launch.scratch)}/trainyard-"$TRAINYARD_JOB"',
        "# Code is loaded from there: this user must own the folder.",
        'mkdir -p -m 700 "$caches"',
        'if [ ! -O "$caches" ] || [ -L "$caches" ]; then',
        '  echo "error: $HOSTNAME: $caches belongs to another user, or cannot be created" >&2',
        "  exit 2",
        "fi",
        'mkdir -p "$caches/miopen"',
        'export TORCHINDUCTOR_CACHE_DIR="$caches/inductor" TRITON_CACHE_DIR="$caches/triton"',
        'export MIOPEN_USER_DB_PATH="$caches/miopen" MIOPEN_CUSTOM_CACHE_DIR="$caches/miopen"',
    ]


def device(job: Job, local_rank: str) -> list[str]:
    """Restricts each rank to its own device if the cluster file names the variable."""
    variable = job.cluster.launch.device_variable
    return [f'export {variable}="${local_rank}"'] if variable else []


def taskset(job: Job, local_rank: str) -> list[str]:
    """Binds a rank to its CPUs if its launcher cannot."""
    lists = job.cluster.launch.cpu_lists
    if not lists:
        return []
    return [f"cpus=({quote(*lists)})", f'taskset --cpu-list --pid "${{cpus[{local_rank}]}}" $$']


def program(job: Job, launcher: Sequence[str] = ()) -> str:
    """Returns the command of each rank or task, in the container if there is one.

    Args:
        job: the job.
        launcher: a module that starts the ranks, and its options, as lines of shell.
    """
    python = quote(job.cluster.launch.python, "-P")
    trainyard = f"-m trainyard.cli {quote(*job.arguments)}"
    inside = _container(job.cluster.launch.container, job)
    if launcher:
        lines = [*inside, f"{python} {launcher[0]}", *launcher[1:], trainyard]
    else:
        lines = [*inside, f"{python} {trainyard}"]
    return " \\\n  ".join(lines)


def _container(container: Container, job: Job) -> list[str]:
    """Returns the command that enters a container, line by line; pyxis needs none."""
    if container.runtime in ("none", "pyxis"):
        return []
    own = [word for each in container.options for word in shlex.split(each)]
    scratch = job.cluster.launch.scratch
    mounts = [f"{job.project}:{job.project}", *job.mounts]
    if scratch != "/tmp" and not job.is_stage:  # containers always mount /tmp
        mounts.insert(1, f"{scratch}:{scratch}")
    return [
        quote(container.runtime, "exec", *own),
        *(quote("--bind", mount) for mount in mounts),
        quote("--pwd", job.project, job.image),
    ]


def judgement(again: Sequence[str]) -> list[str]:
    """Defines the functions that log the end of a run, blame a host, and requeue the job.

    Args:
        again: the body of the function that requeues the job.
    """
    return [*FUNCTIONS.splitlines(), "", "again() {", *(f"  {line}" for line in again), "}"]


def verdict() -> list[str]:
    """Sets $then from $code, the exit code of the launcher of the ranks."""
    return VERDICT.splitlines()


FUNCTIONS = r"""
# A line for `trainyard status`.
tell() { echo "$(date -u +%Y-%m-%dT%H:%M:%SZ) $*" >> "$folder/starts.log"; }

# Files of an earlier start must not be taken for this one's.
begin() {
  mkdir -p "$folder/logs" && touch "$folder/logs/started" && rm -f "$folder/outcome.json" && return
  echo "error: $(hostname) cannot write to $PWD/$folder" >&2
  exit 2
}

# At most three starts in a row without a newer checkpoint.
is_worth_it() {
  local count=0 before="" newest
  newest=$(find "$folder/checkpoints" -path '*/step-*/manifest.json' 2> /dev/null | sort)
  newest=${newest##*$'\n'}
  [ -f "$folder/logs/vain" ] && IFS=' ' read -r count before < "$folder/logs/vain"
  [ "$newest" = "$before" ] || count=0
  echo "$((count + 1)) $newest" > "$folder/logs/vain"
  [ "$count" -lt 3 ]
}

# Lost hosts, and hosts where a rank failed by itself in this start, as its parent recorded.
failing_hosts() {
  local file
  cat "$folder/logs/lost_hosts" 2> /dev/null
  for file in "$folder"/logs/attempt-*/rank-*.json; do
    [ "$file" -nt "$folder/logs/started" ] && grep -q '"has_failed": true' "$file" &&
      sed -n 's/.*"host": "\([A-Za-z0-9_-]*\).*/\1/p' "$file"
  done
}

# Exclude a host that fails twice. If several fail, the host is not the cause.
blame() {
  local host
  host=$(failing_hosts | sort -u)
  [ "$(echo "$host" | grep -c .)" = 1 ] || return 0
  { cat "$folder/bad_nodes" 2> /dev/null; echo "$host 1"; } |
    awk '{ count[$1] += $2 } END { for (host in count) print host, count[host] }' |
    sort > "$folder/bad_nodes.new"
  mv "$folder/bad_nodes.new" "$folder/bad_nodes"
}
bad_hosts() { awk '$2 >= 2 { print $1 }' "$folder/bad_nodes" 2> /dev/null; }
"""

VERDICT = r"""
# Training's own exit code has priority: launchers end ranks, with exit codes of their own.
said=$(sed -n 's/.*"exit_code": *\([0-9]*\).*/\1/p' "$folder/outcome.json" 2> /dev/null)
said=${said:-$(cat "$folder/logs/refused-$TRAINYARD_JOB" 2> /dev/null)}
rm -f "$folder/logs/refused-$TRAINYARD_JOB"
code=${said:-$code}
# Hydra may exit with 0 after it forwards a signal, however its ranks ended.
if [ "$code" = 0 ] && [ -z "$said" ] && [ -n "$is_ended$is_warned" ]; then code=75; fi
case $code in
  0) then=finish ;;
  2 | 93 | 126 | 127) then=stay ;; # needs attention
  *) then=requeue && blame ;;      # 75, or it was killed
esac
[ "$then" = requeue ] && [ -n "$is_ended" ] && then=cancelled
if [ "$then" = requeue ] && ! is_worth_it; then
  echo "three starts brought no newer checkpoint: not started again" >&2
  then=stay code=93
fi
if [ "$then" != requeue ]; then rm -f "$folder/logs/vain"; fi
tell end "$job" "$code" "$then"
"""
