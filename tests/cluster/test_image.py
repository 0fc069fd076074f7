"""`images/trainyard.def`, built and launched: two ranks of a real Slurm, each in a real Apptainer.

The base comes from Debian's mirror instead of a registry of images, and the packages from `make
wheels`, so that the build needs no index.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.faults.small_run import small_overrides, write_tokens
from tests.wheels import make_wheels, run

from .launching import read_losses, trainyard, write_cluster
from .machines import Machines
from .slurm import Slurm
from .test_backends import job_of, whole_log_of

pytestmark = pytest.mark.exhaustive

BASE_PACKAGES = "python3-venv,python3-dev,g++"
FAST = "-comp zstd -Xcompression-level 1"
"""Options of mksquashfs: seconds instead of minutes."""
N_STEPS = 3


def test_two_nodes_train_in_an_image_as_outside(
    tmp_path: Path, machines: Machines, slurm: Slurm
) -> None:
    missing = [name for name in ("apptainer", "mmdebstrap") if not shutil.which(name)]
    if missing:
        pytest.skip(f"not installed here: {' '.join(missing)} (.ci/run installs them)")
    base, image = tmp_path / "base", tmp_path / "trainyard.sif"
    build_image(base, image)
    squashed = squash_environment(image)
    project = tmp_path / "project"
    project.mkdir()
    tokens = write_tokens(project)

    def train_inside(name: str, image: Path, compiled: str, **launch: Any) -> dict[Any, float]:
        container = {"runtime": "apptainer", **launch.pop("container", {})}
        cluster = write_cluster(
            project / f"{name}.toml",
            "slurm",
            container=container,
            environment={"PYTHONPATH": ""},  # not this checkout, but the image's Trainyard
            **launch,
        )
        words = ["tiny", f"name={name}", f"train.compile={compiled}"]
        words += small_overrides(tokens, N_STEPS)
        words += ["--cluster", str(cluster), "--nodes", "2", "--image", str(image)]
        said = trainyard(machines, project, "launch", *words)
        assert said.returncode == 0, said.stderr
        folder = project / "runs" / name
        assert slurm.wait(job_of(folder)) == {0: ("COMPLETED", 0)}, whole_log_of(folder)
        return read_losses(folder)

    words = ["tiny", "name=outside", *small_overrides(tokens, N_STEPS)]
    said = trainyard(machines, project, "train", *words, "--ranks", "2")
    assert said.returncode == 0, said.stderr
    outside = read_losses(project / "runs/outside")
    assert train_inside("eager", image, "never", python="python3") == outside
    compiled = train_inside("compiled", image, "always", python="python3")
    assert compiled == pytest.approx(outside, rel=1e-5)
    # As on LUMI: the site's image without Trainyard, and an environment that it mounts.
    mounted = {"mounts": [f"{squashed}:/opt/trainyard:image-src=/"]}
    python = "/opt/trainyard/bin/python"
    assert train_inside("squashed", base, "never", python=python, container=mounted) == outside
    for folder in (base, image, squashed):
        run("rm", "-rf", str(folder), folder=tmp_path)  # 2 GB


def build_image(base: Path, image: Path) -> None:
    """Makes a base of Debian 12, and with it an image with Trainyard and torch for CPUs."""
    wheels = make_wheels(base.parent / "checkout")
    options = ("--quiet", "--variant=minbase", f"--include={BASE_PACKAGES}")
    run("mmdebstrap", *options, "bookworm", str(base), folder=base.parent)
    # What only root may make or read, and a build below --fakeroot is not root's.
    run("sh", "-c", "rm -rf dev/* var/cache/apt var/lib/apt/lists", folder=base)
    run(
        *("apptainer", "build", "--fakeroot", f"--bind={wheels}:/mnt"),
        f"--mksquashfs-args={FAST}",
        *("--build-arg=bootstrap=localimage", f"--build-arg=base={base}"),
        "--build-arg=pip_options=--no-index --find-links /mnt",
        *(str(image), "images/trainyard.def"),
        folder=base.parent / "checkout",
    )
    shutil.rmtree(base.parent / "checkout")


def squash_environment(image: Path) -> Path:
    """Makes a SquashFS of the environment in an image."""
    folder = image.parent / "environment"
    folder.mkdir()
    copy = ["cp", "-a", "/opt/trainyard/.", str(folder)]
    run("apptainer", "exec", f"--bind={folder}", str(image), *copy, folder=image.parent)
    squashed = image.parent / "trainyard-env.sqsh"
    options = ("-no-xattrs", "-quiet", "-no-progress", *FAST.split())
    run("mksquashfs", str(folder), str(squashed), *options, folder=image.parent)
    shutil.rmtree(folder)
    return squashed
