"""A stand-in for Slurm and PBS on this machine: it takes jobs as they do, and really runs them.

    queue = Queue(folder)      # writes sbatch, qsub, srun, mpiexec, singularity into folder/bin
    ...                        # `trainyard launch`, with PATH=queue.path
    queue.run()                # each job after those it waits for; the tasks of an array at once
    queue.log                  # ["download-web: 1 task, ended with 0", ..]

It needs no privileges and no daemons. Nodes are this machine, images are its own files, and what
sites' own lines call (module, conda) does nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PROGRAMS = ("sbatch", "qsub", "srun", "mpiexec", "singularity", "module", "conda", "sinfo")
ARRAY = re.compile(r"^#(?:SBATCH --array=|PBS -J )0-(\d+)$", re.MULTILINE)


class Queue:
    """Jobs that wait, and what became of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log: list[str] = []
        programs = folder / "bin"
        programs.mkdir(parents=True)
        self.path = f"{programs}:{os.environ['PATH']}"
        for name in PROGRAMS:
            text = f'#!/bin/sh\nexec {sys.executable} -I {__file__} {name} "$@"\n'
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)

    def run(self) -> None:
        """Runs what waits, in order; a job whose forerunner failed never starts."""
        codes: dict[str, list[int]] = {}
        for line in (self.folder / "jobs").read_text().splitlines():
            job = json.loads(line)
            script = Path(job["script"])
            name = "train" if script.name == "job.sh" else script.stem
            if any(any(codes[before]) for before in job["after"]):
                codes[job["id"]] = [-1]
                self.log.append(f"{name}: cancelled")
                continue
            codes[job["id"]] = self._run_tasks(job["id"], script, name)
            ends = ", ".join(map(str, sorted(set(codes[job["id"]]))))
            n_tasks = len(codes[job["id"]])
            tasks = "1 task" if n_tasks == 1 else f"{n_tasks} tasks"
            self.log.append(f"{name}: {tasks}, ended with {ends}")

    def said(self) -> str:
        """What all tasks have said."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def _run_tasks(self, job: str, script: Path, name: str) -> list[int]:
        array = ARRAY.search(script.read_text())
        nodes = self.folder / "nodes"
        nodes.write_text("localhost\n")
        given = {
            **os.environ,
            "PATH": self.path,
            "SLURM_JOB_ID": job,
            "SLURM_JOB_NODELIST": "localhost",
            "PBS_JOBID": job,
            "PBS_NODEFILE": str(nodes),
        }
        running = []
        for task in range(int(array[1]) + 1 if array else 1):
            with (self.folder / f"{name}-{task}.log").open("w") as log:
                argv = ["bash", str(script)]
                running.append(subprocess.Popen(argv, cwd="/", env=given, stdout=log, stderr=log))
        return [process.wait() for process in running]


def submit(arguments: Sequence[str], folder: Path) -> str:
    """What sbatch and qsub do: they take a script down, and answer with a number."""
    path = folder / "jobs"
    number = str(os.getpid() * 10 + (len(path.read_text().splitlines()) if path.exists() else 0))
    after = re.findall(r"afterok:([\d:]+)", " ".join(arguments))
    job = {"id": number, "script": arguments[-1], "after": after[0].split(":") if after else []}
    with path.open("a") as file:
        file.write(json.dumps(job) + "\n")
    return number


def start_ranks(arguments: Sequence[str], command: Sequence[str]) -> int:
    """What srun and mpiexec do: a process for each rank, all ended when one fails."""
    words = " ".join(arguments)
    n_ranks = int(re.findall(r"(?:--ntasks=|-n )(\d+)", words)[0])
    per_node = int((re.findall(r"(?:--ntasks-per-node=|--ppn )(\d+)", words) or [n_ranks])[0])
    running = []
    for rank in range(n_ranks):
        node, local_rank = divmod(rank, per_node)
        slurm = {
            "PROCID": rank, "LOCALID": local_rank, "NODEID": node, "STEP_ID": 0,
            "STEP_NUM_TASKS": n_ranks, "STEP_TASKS_PER_NODE": f"{per_node}(x{n_ranks // per_node})",
        }  # fmt: skip
        pmi = {"RANK": rank, "SIZE": n_ranks, "LOCAL_RANK": local_rank, "LOCAL_SIZE": per_node}
        given = {f"SLURM_{name}": value for name, value in slurm.items()}
        if not arguments[0].startswith("--n"):
            given = {f"PMI_{name}": value for name, value in pmi.items()}
        texts = {name: str(value) for name, value in given.items()}
        running.append(subprocess.Popen(command, env=os.environ | texts))
    codes = []
    for process in running:
        codes.append(process.wait())
        if codes[-1]:
            for other in running:
                other.terminate()
    return next((code for code in codes if code), 0)


def main() -> int:
    """Is the program that the first word names."""
    name, *words = sys.argv[1:]
    if name in ("sbatch", "qsub"):
        sys.stdout.write(submit(words, Path(os.environ["PATH"].partition(":")[0]).parent) + "\n")
    elif name in ("srun", "mpiexec"):
        first = next(place for place, word in enumerate(words) if word in ("bash", "rm"))
        return start_ranks(words[:first], words[first:])
    elif name == "singularity":
        inside = words.index("--pwd") + 3  # after the folder and the image
        os.execvp(words[inside], words[inside:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
