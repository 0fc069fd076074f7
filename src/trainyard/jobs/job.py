"""A job before it becomes a script: command, nodes and cluster.

There are three kinds. Training takes all nodes at once, one rank per device, and is requeued until
the run is done. A set of runs is an array of such jobs, each of one node with one process, which
trains the runs one after the other. A data stage takes nodes one by one, as an array of equal tasks
that share the work among themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainyard.config.cluster import Cluster, Container, Launch

IMAGE_ENDINGS = (".sif", ".sqsh", ".img")


@dataclass(frozen=True)
class Job:
    """The inputs of a script."""

    name: str
    """Job name in the scheduler."""
    cluster: Cluster
    n_nodes: int
    """For a data stage: number of nodes that work in parallel, each in its own task."""
    n_ranks_per_node: int
    """1 for a data stage."""
    arguments: Sequence[str]
    """Arguments of `trainyard`, for each rank or task."""
    folder: Path
    """Absolute run folder: PROJECT/runs/NAME; jobs start in PROJECT."""
    made_by: str
    """The command that made the script."""
    is_stage: bool = False
    """Whether it is a data stage."""
    n_array_tasks: int = 0
    """For a set of runs: tasks of the array; else 0."""
    after: Sequence[str] = ()
    """Stages that it waits for, of those submitted with it."""
    needs: Sequence[str] = ()
    """Files from earlier stages that must exist when it starts."""

    @property
    def n_ranks(self) -> int:
        """Total number of ranks."""
        return self.n_nodes * self.n_ranks_per_node

    @property
    def launch(self) -> Launch:
        """How to start it; a data stage has settings of its own, and no devices."""
        launch, own = self.cluster.launch, self.cluster.launch.prepare
        if self.n_array_tasks:  # the process of a node starts the ranks there
            return launch.model_copy(
                update={"start": "tasks", "cpu_lists": (), "device_variable": ""}
            )
        if not self.is_stage:
            return launch
        fields = own.container.model_fields_set
        container = launch.container.model_copy(
            update={name: getattr(own.container, name) for name in fields}
        )
        if container.runtime == "none" and "runtime" in fields:
            container = Container()
        changes = {
            "start": "tasks",
            "partition": own.partition or launch.partition,
            "time": own.time or launch.time,
            "options": own.options,
            "environment": launch.environment | own.environment,
            "cpu_lists": (),
            "device_variable": "",
            "python": own.python or launch.python,
            "container": container,
        }
        return launch.model_copy(update=changes)

    @property
    def has_torchrun(self) -> bool:
        """Whether a torchrun on each node starts its ranks."""
        return self.launch.start == "torchrun"

    @property
    def n_tasks_per_node(self) -> int:
        """Processes that a launcher starts per node: one per rank, or one that starts them."""
        return 1 if self.has_torchrun or self.n_array_tasks else self.n_ranks_per_node

    @property
    def project(self) -> Path:
        """Its working folder: paths of the run file are relative to it."""
        return self.folder.parents[1]

    @property
    def run_folder(self) -> str:
        """The run folder relative to `project`."""
        return str(self.folder.relative_to(self.project))

    @property
    def python(self) -> str:
        """The Python that runs it, on its nodes or in its container."""
        is_here = self.launch.container.runtime == "none"
        return self.launch.python or (sys.executable if is_here else "python3")

    @property
    def options(self) -> list[str]:
        """The cluster's options for the scheduler, with the numbers of the job filled in."""
        nodes, options = "1" if self.is_stage else str(self.n_nodes), self.launch.options
        ranks = str(self.n_ranks_per_node)
        return [one.replace("{nodes}", nodes).replace("{ranks}", ranks) for one in options]

    @property
    def image(self) -> str:
        """Container image; a file by its absolute path, since pyxis takes `x.sqsh` for a name."""
        image = self.launch.container.image
        is_file = image.startswith(("/", "./")) or image.endswith(IMAGE_ENDINGS)
        return str(self.project / image) if is_file else image

    @property
    def script_path(self) -> Path:
        """Path of its script."""
        return self.folder / "jobs" / f"{self.name}.sh" if self.is_stage else self.folder / "job.sh"
