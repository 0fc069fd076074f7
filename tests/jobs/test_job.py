from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainyard.config.cluster import Cluster, Launch
from trainyard.errors import LaunchError
from trainyard.jobs.job import Job
from trainyard.jobs.script import check_job, check_machine


def job(folder: str = "/project/runs/run", n_nodes: int = 2, ranks: int = 4, **launch: Any) -> Job:
    table = Launch.model_validate({"scheduler": "slurm", **launch})
    cluster = Cluster(gpu="h100", launch=table)
    return Job("run", cluster, n_nodes, ranks, ("train",), Path(folder), "trainyard launch")


def refusal(wrong: Job, n_devices: int = 8) -> str:
    with pytest.raises(LaunchError) as caught:
        check_job(wrong, n_devices)
    assert caught.value.hint
    return caught.value.problem


def test_what_is_right_is_taken() -> None:
    check_job(job(), 8)
    check_job(job(cpu_lists=["0-7"] * 4, device_variable="ROCR_VISIBLE_DEVICES"), 8)
    check_job(job(scheduler="ssh", hosts=["n1", "n2", "n3"]), 8)
    check_job(job(container={"runtime": "pyxis", "image": "a#b:c"}, start="torchrun"), 8)


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        (["--qos=high"], True),
        (["--qos=high", "--gpus-per-node=4"], False),
        (["--gres=gpu:4"], False),
    ],
)
def test_a_job_without_gpus_is_not_silent(
    options: list[str], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    check_job(job(options=options), 8)
    assert ("no option asks Slurm for GPUs" in caplog.text) is warns


@pytest.mark.parametrize(
    "name", ["a;b", "$(touch marker)", "a\nb", "'", '"', "-rf", "", "a b", "ü"]
)
def test_names(name: str) -> None:
    assert "is not a job name" in refusal(replace(job(), name=name))


def test_folders() -> None:
    assert "the path has a backslash" in refusal(job("/a\\b/runs/run"))
    assert "PBS cannot write its log below /a b/runs/run" in refusal(
        job("/a b/runs/run", scheduler="pbs")
    )
    check_job(job("/a b/runs/run"), 8)
    image = {"runtime": "apptainer", "image": "a.sif"}
    assert "/a:b cannot be mounted" in refusal(job("/a:b/runs/run", container=image))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"ranks": 9}, "9 ranks per node, but a node has 8 devices"),
        ({"scheduler": "local"}, "2 nodes, but this cluster is only this machine"),
        ({"scheduler": "ssh"}, "hosts has 0, but --nodes is 2"),
        ({"scheduler": "mpi", "hosts": ["n1"]}, "hosts has 1, but --nodes is 2"),
        ({"scheduler": "mpi", "hosts": ["n1", "n1"]}, "hosts names n1 twice"),
        ({"cpu_lists": ["0-7"]}, "cpu_lists has 1 lists for 4 ranks"),
        ({"start": "torchrun", "scheduler": "pbs"}, 'start = "torchrun" needs Slurm'),
        ({"start": "torchrun", "cpu_lists": ["0"] * 4}, "cpu_lists needs one task per rank"),
        ({"start": "torchrun", "device_variable": "X"}, "device_variable needs one task per rank"),
        ({"container": {"runtime": "pyxis"}}, "pyxis needs an image, but none is set"),
        ({"container": {"image": "x.sif"}}, "the image x.sif needs a runtime"),
        (
            {"container": {"runtime": "pyxis", "image": "a"}, "scheduler": "pbs"},
            "pyxis needs Slurm, but the scheduler is pbs",
        ),
    ],
)
def test_contradictions(fields: dict[str, Any], says: str) -> None:
    assert says in refusal(job(**fields))


@pytest.mark.parametrize(
    ("fields", "program"),
    [
        ({}, "sbatch"),
        ({"scheduler": "pbs"}, "qsub"),
        ({"scheduler": "ssh"}, "ssh"),
        ({"scheduler": "mpi", "mpiexec": "openmpi"}, "mpiexec"),
    ],
)
def test_missing_programs(
    fields: dict[str, Any], program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=f"there is no {program} here") as caught:
        check_machine(job(**fields))
    assert "--dry-run" in caught.value.hint
    (tmp_path / program).touch(mode=0o755)
    check_machine(job(**fields))


def test_missing_images(tmp_path: Path) -> None:
    image = tmp_path / "x.sif"
    for name in (str(image), "./x", "y.sif"):
        wrong = job(container={"runtime": "apptainer", "image": name})
        with pytest.raises(LaunchError, match="there is no image"):
            check_machine(wrong, is_here=True)
    image.touch()
    check_machine(job(container={"runtime": "apptainer", "image": str(image)}), is_here=True)
    check_machine(
        job(container={"runtime": "pyxis", "image": "nvcr.io#nvidia/pytorch:25.03-py3"}),
        is_here=True,
    )
