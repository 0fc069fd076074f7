"""What to run inside a job of several machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainyard.cli.doctor import command_for


@pytest.mark.parametrize(
    ("cluster", "command"),
    [
        (None, "srun --nodes=2 --ntasks-per-node=8 trainyard doctor --nodes 2"),
        (
            "polaris",
            "export MASTER_ADDR=$(hostname) MASTER_PORT=29500; mpiexec -n 8 -ppn 4 --cpu-bind "
            "list:24-31:16-23:8-15:0-7 trainyard doctor --cluster polaris --nodes 2",
        ),
        (
            "ssh",
            "torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d "
            "--rdzv-endpoint=FIRST:29500 --no-python trainyard doctor --cluster ssh --nodes 2",
        ),
    ],
)
def test_each_launcher(cluster: str | None, command: str) -> None:
    assert command_for(cluster, 2) == command


def test_a_file_of_the_user_with_open_mpi(tmp_path: Path) -> None:
    path = tmp_path / "our nodes.toml"
    path.write_text('extends = "mpi"\ndevices_per_node = 2\n[launch]\nmpiexec = "openmpi"\n')
    command = command_for(str(path), 3)
    assert "mpiexec -n 6 --map-by ppr:2:node -x MASTER_ADDR -x MASTER_PORT trainyard" in command
    assert f"--cluster '{path}' --nodes 3" in command
