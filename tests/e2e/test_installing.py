"""`docs/installing.md`: wheels carried to a machine without network; a read-only environment."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.command import trainyard
from tests.e2e.test_readme import fenced
from tests.faults.small_run import small_overrides, write_tokens
from tests.wheels import BASE_PYTHON, ROOT, make_wheels, run

# For each cluster file of the page: a recipe, options of `launch`, a part of the script.
LAUNCHES = {
    "polaris": ("gpt25b", ["--nodes", "32"], "/trainyard-env/bin/python"),
    "lumi": ("13b", ["--nodes", "2"], "--bind /projappl/project_465000001/trainyard-env.sqsh:"),
    "benchmark64": ("tgs", ["--nodes", "8", "--hosts", "a,b,c,d,e,f,g,h"], "/shared/trainyard-env"),
}
READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
N_STEPS = 3


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A virtual environment, installed from carried wheels alone."""
    folder: Path = tmp_path_factory.mktemp("node")
    wheels = make_wheels(folder / "checkout")
    (folder / "carried").mkdir()
    wheels.rename(folder / "carried" / "wheels")
    shutil.rmtree(folder / "checkout")
    run(BASE_PYTHON, "-m", "venv", "environment", folder=folder)
    without_settings = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    run(
        *(str(folder / "environment/bin/python"), "-m", "pip", "install"),
        *("--no-index", "--find-links", "wheels", "trainyard-gpt[train]"),
        folder=folder / "carried",
        environment=without_settings | {"PIP_CONFIG_FILE": os.devnull},
    )
    yield folder / "environment"
    shutil.rmtree(folder)  # 1.5 GB


def test_the_cluster_files_of_the_page_launch_their_recipes(tmp_path: Path) -> None:
    page = (ROOT / "docs/installing.md").read_text(encoding="utf-8")
    blocks = fenced(page, "toml")
    assert len(blocks) == len(LAUNCHES)
    for (guide, (name, options, expected)), block in zip(LAUNCHES.items(), blocks, strict=True):
        cluster = tmp_path / f"{guide}.toml"
        cluster.write_text(block)
        recipe = str(ROOT / "recipes" / guide / f"{name}.toml")
        words = ["launch", recipe, "--cluster", str(cluster), "--dry-run", *options]
        said = trainyard(*words, folder=tmp_path)
        assert said.returncode == 0, said.stderr
        assert expected in said.stdout


def test_an_image_without_a_compiler_is_refused(tmp_path: Path) -> None:
    (tmp_path / "python3").symlink_to(BASE_PYTHON)
    done = subprocess.run(
        ["/bin/sh", str(ROOT / "images/install.sh"), str(ROOT)],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "error: torch.compile needs cc and " in done.stderr
    assert "hint: choose a base such as python:3.12" in done.stderr


@pytest.mark.exhaustive
def test_carried_wheels_install_the_pinned_versions(environment: Path) -> None:
    python = str(environment / "bin/python")
    frozen = run(python, "-m", "pip", "list", "--format=freeze", folder=environment)
    pins = _normalize((ROOT / "constraints.txt").read_text())
    unpinned = {line.partition("==")[0] for line in _normalize(frozen) - pins}
    assert unpinned <= {"pip", "setuptools", "trainyard-gpt"}
    assert any(line.startswith("torch==") for line in _normalize(frozen) & pins)


@pytest.mark.exhaustive
def test_a_read_only_environment_trains_and_reports(environment: Path, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to mount the environment read-only")
    tokens = write_tokens(tmp_path)
    overrides = small_overrides(tokens, N_STEPS)
    program = str(environment / "bin/trainyard")
    for verb in (
        ["train", "tiny", "name=run", *overrides, "train.compile=always", "--ranks=2"],
        ["report", "runs/run"],
    ):
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", READ_ONLY, str(environment), program, *verb],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": str(environment), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/run/report.html").stat().st_size > 0


def _normalize(lines: str) -> set[str]:
    """Requirements as sets compare them: one spelling of names, no build after the version."""
    words = lines.lower().replace("_", "-").split()
    return {word.partition("+")[0] for word in words}
