"""Job scripts: each as in its golden file, legal bash, and with nothing in it that bash obeys."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.golden.render_jobs import FOLDER, GOLDEN, RECIPES, ROOT, golden_files, render_all
from tests.waiting import WATCHDOG_SECONDS

from trainyard.config.cluster import Cluster, Launch, cpu_mask, expand_cpus, read_cluster
from trainyard.jobs.job import Job
from trainyard.jobs.render import render
from trainyard.jobs.script import VERDICT
from trainyard.launch.restarts import FINAL_CODES, LIMIT

# Of LUMI-AI-Guide, and of hopper.conf of Azure/ai-infrastructure-on-azure.
LUMI_MASKS = (
    "0x00fe000000000000,0xfe00000000000000,0x0000000000fe0000,0x00000000fe000000,"
    "0x00000000000000fe,0x000000000000fe00,0x000000fe00000000,0x0000fe0000000000"
)
AZURE_MASKS = (
    "ffffff000000,ffffff000000,ffffff,ffffff,ffffff000000000000000000,ffffff000000000000000000,"
    "ffffff000000000000,ffffff000000000000"
)
NASTY = """it's "$(touch marker)" `touch marker`; touch marker & $HOME \\"""


@pytest.fixture(scope="module")
def rendered() -> dict[str, str]:
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        return render_all()
    finally:
        os.chdir(before)


def test_they_are_as_in_the_golden_files(rendered: dict[str, str]) -> None:
    found = golden_files(rendered)
    golden = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
    assert sorted(found) == sorted(golden)
    differ = [name for name, text in found.items() if text != golden[name]]
    assert not differ, "if they should: python -m tests.golden.render_jobs"


def test_those_without_a_golden_file_differ_from_one_in_names_and_numbers(
    rendered: dict[str, str],
) -> None:
    found: dict[tuple[str, int | None], dict[str, list[str]]] = {}
    for recipe, (cluster, _, ranks, _) in RECIPES.items():
        name = recipe.replace("/", "-")
        text = rendered[name].replace(recipe, "RECIPE")
        text = text.replace(re.findall(r"/runs/(.+)/job", text)[0], "RUN")
        scripts = found.setdefault((cluster, ranks), {})
        scripts.setdefault(re.sub(r"1 node\b|\d+ nodes|\d+", "N", text), []).append(name)
    assert [len(scripts) for scripts in found.values()] == [1] * 5, found.keys()
    for scripts in found.values():
        assert any(name in GOLDEN for names in scripts.values() for name in names), scripts.values()


def test_every_recipe_has_a_script() -> None:
    recipes = {f"{path.parent.name}/{path.stem}" for path in (ROOT / "recipes").glob("*/*.toml")}
    assert recipes == set(RECIPES)


def test_bash_can_read_them(rendered: dict[str, str], tmp_path: Path) -> None:
    for name, text in rendered.items():
        (tmp_path / name).write_text(text)
        subprocess.run(["bash", "-n", name], cwd=tmp_path, check=True)
        # What bash gets as a program of its own is one.
        for inner in re.findall(r"<<'(RANK|TASK)'\n(.*?)\n\1\n", text, re.DOTALL):
            subprocess.run(["bash", "-n"], input=inner[1], text=True, check=True)


@pytest.mark.parametrize(("name", "published"), [("lumi", LUMI_MASKS), ("azure-ndv5", AZURE_MASKS)])
def test_masks_are_the_published_ones(name: str, published: str) -> None:
    lists = read_cluster(name).launch.cpu_lists
    assert [int(cpu_mask(cpus), 16) for cpus in lists] == [
        int(mask, 16) for mask in published.split(",")
    ]


def test_lists_of_cpus() -> None:
    assert expand_cpus("0-2,5") == [0, 1, 2, 5]
    assert cpu_mask("0-2,5") == "0x27"


def test_the_exit_codes_are_those_of_training() -> None:
    codes = re.findall(r"^  ([0-9 |]+)\) then=stay", VERDICT, re.MULTILINE)[0].split(" | ")
    assert {int(code) for code in codes} == {*FINAL_CODES, 126, 127}
    assert LIMIT == 3
    assert "three starts brought no newer checkpoint" in VERDICT


def nasty_job(folder: Path, scheduler: str, **launch: Any) -> Job:
    table = Launch(
        scheduler=scheduler,  # type: ignore[arg-type]
        environment={"GREETING": NASTY},
        scratch=str(folder / NASTY / "scratch"),
        **launch,
    )
    return Job(
        name="nasty",
        cluster=Cluster(gpu="cpu", launch=table),
        n_nodes=1,
        n_ranks_per_node=1,
        arguments=("train", NASTY),
        folder=folder / NASTY / "runs" / "nasty",
        made_by=f"trainyard launch {NASTY}\ntouch marker",
    )


def write_program(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("scheduler", ["local", "slurm", "mpi", "ssh"])
def test_nothing_in_a_value_is_obeyed(tmp_path: Path, scheduler: str) -> None:
    """The launchers are stand-ins that run the command of a rank as it comes to them."""
    programs = tmp_path / "bin"
    programs.mkdir()
    python = write_program(
        programs / "a python",
        'if [ "$3" = trainyard.launch.remote ]; then shift 3; while [ "$1" != -- ]; do shift; done;'
        f'[ "$2" = n1 ] && exec bash {programs}/job.sh on-host --; shift; exec "$@"; fi\n'
        f'printf \'%s|%s|%s|%s\' "$GREETING" "$TRITON_CACHE_DIR" "$PWD" "$5" > {tmp_path}/out',
    )
    run_last = 'case $* in *bash\\ -c*) exec bash -c "${@: -1}";; esac'
    for name in ("srun", "mpiexec", "mpiexec.hydra"):
        write_program(programs / name, run_last)
    hosts = {"hosts": ["n1"]} if scheduler in ("mpi", "ssh") else {}
    job = nasty_job(tmp_path, scheduler, python=python, **hosts)
    job.folder.mkdir(parents=True)
    (programs / "job.sh").write_text(render(job))
    given = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "1"}
    done = subprocess.run(
        ["bash", str(programs / "job.sh")],
        env=given,
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    greeting, cache, folder, argument = (tmp_path / "out").read_text().split("|")
    assert (greeting, folder, argument) == (NASTY, str(tmp_path / NASTY), NASTY)
    assert cache.startswith(f"{tmp_path / NASTY}/scratch/trainyard-")
    assert cache.endswith("/triton")
    assert not list(tmp_path.rglob("marker")), "something was obeyed"
    left = list((tmp_path / NASTY / "scratch").iterdir())
    assert bool(left) == (scheduler in ("slurm", "mpi")), "their stand-ins remove nothing"
    assert all(stat.S_IMODE(each.stat().st_mode) == 0o700 for each in left)


@pytest.mark.parametrize("is_link", [True, False])
def test_compiled_code_of_others_is_not_loaded(tmp_path: Path, is_link: bool) -> None:
    folder = tmp_path / NASTY / "scratch" / "trainyard-1-0"
    folder.parent.mkdir(parents=True)
    if is_link:
        folder.symlink_to(tmp_path)
    elif os.getuid() == 0:
        folder.mkdir()
        os.chown(folder, 4711, 4711)
    else:
        pytest.skip("root alone gives folders away")
    python = write_program(tmp_path / "python", f"touch {tmp_path}/marker")
    write_program(tmp_path / "srun", 'case $* in *bash\\ -c*) exec bash -c "${@: -1}";; esac')
    job = nasty_job(tmp_path, "slurm", python=python)
    job.folder.mkdir(parents=True)
    done = subprocess.run(
        ["bash", "-c", render(job)],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1"},
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
    )
    assert done.returncode == 2
    assert "trainyard-1-0 belongs to another user, or cannot be created" in done.stderr
    assert not (tmp_path / "marker").exists()


def test_containers_take_values_as_they_are(tmp_path: Path) -> None:
    container = {"image": NASTY, "mounts": [NASTY.replace("\\", "")], "options": ["--nv"]}
    for runtime in ("apptainer", "pyxis"):
        cluster = Cluster.model_validate(
            {"gpu": "cpu", "launch": {
                "scheduler": "slurm", "container": {"runtime": runtime, **container}
            }}
        )  # fmt: skip
        job = replace(nasty_job(tmp_path, "slurm"), cluster=cluster)
        job.folder.mkdir(parents=True, exist_ok=True)
        programs = tmp_path / runtime
        programs.mkdir()
        write_program(
            programs / "srun", f'printf \'%s\\n\' "$@" >> {programs}/out; bash -c "${{@: -1}}"'
        )
        write_program(programs / "apptainer", f"printf '%s\\n' \"$@\" >> {programs}/out")
        write_program(programs / "python3", "exit 0")
        given = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "1"}
        subprocess.run(
            ["bash", "-c", render(job)], env=given, timeout=WATCHDOG_SECONDS, capture_output=True
        )
        words = (programs / "out").read_text().splitlines()
        is_pyxis = runtime == "pyxis"
        assert (f"--container-image={NASTY}" if is_pyxis else NASTY) in words
        assert not list(tmp_path.rglob("marker")), "something was obeyed"
