"""A stand-in for PBS on machines of `machines.py`: one queue, jobs one after another.

PBS is not packaged for Debian. This takes scripts as qsub does, in any order of options, and runs
each on the first of its nodes with the variables that PBS sets. It knows no limits and no states.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from .machines import Machines

QSUB = """\
#!/bin/sh
for script; do :; done
number=$(($(ls {folder} | wc -l) + 1))
cp "$script" {folder}/$number
echo $number.login
"""


class Pbs:
    """A queue; its `qsub` is in the folder `bin` of the project.

    Args:
        machines: booted.
        project: the folder that jobs are submitted from.
    """

    def __init__(self, machines: Machines, project: Path) -> None:
        self.machines = machines
        self.project = project
        self.folder = machines.folder / "pbs"
        self.folder.mkdir()
        qsub = project / "bin" / "qsub"
        qsub.write_text(QSUB.format(folder=self.folder))
        qsub.chmod(0o755)
        self.n_run = 0

    def run_next(self, run: str, nodes: list[str]) -> subprocess.Popen[bytes]:
        """Starts the job that waits, on these nodes; its log is where PBS writes it."""
        self.n_run += 1
        script = self.folder / str(self.n_run)
        assert script.exists(), f"no job {self.n_run} was submitted"
        hosts = self.machines.folder / "hosts"
        hosts.write_text("".join(f"{node}\n" for node in nodes))
        given = {
            "PBS_NODEFILE": str(hosts),
            "PBS_JOBID": f"{self.n_run}.login",
            "PBS_JOBNAME": run,
            "PBS_O_WORKDIR": str(self.project),
            "PBS_WALLTIME": "3600",
            "PATH": f"{self.project}/bin:{os.environ['PATH']}",
        }
        with (self.project / "runs" / run / f"job-{self.n_run}.log").open("wb") as log:
            return subprocess.Popen(
                self.machines.on(nodes[0], ["bash", str(script)], Path("/root")),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.machines.environment | given,
            )
