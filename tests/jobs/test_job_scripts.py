"""Job scripts: headers as in golden files, and bash without a fault or a value that it obeys."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.golden.render_jobs import FOLDER, GOLDEN, RECIPES, ROOT, all_jobs, golden_files
from tests.jobs.scripts import RUN_LAST, SSH, build_job, run_job, write_program

from trainyard.config.cluster import cpu_mask, expand_cpus, read_cluster
from trainyard.errors import GuardError
from trainyard.jobs.job import Job
from trainyard.jobs.script import render, render_header
from trainyard.launch.restarts import FINAL_CODES, LIMIT, Restarts

# Of LUMI-AI-Guide, and of hopper.conf of Azure/ai-infrastructure-on-azure.
LUMI_MASKS = (
    "0x00fe000000000000,0xfe00000000000000,0x0000000000fe0000,0x00000000fe000000,"
    "0x00000000000000fe,0x000000000000fe00,0x000000fe00000000,0x0000fe0000000000"
)
AZURE_MASKS = (
    "ffffff000000,ffffff000000,ffffff,ffffff,ffffff000000000000000000,ffffff000000000000000000,"
    "ffffff000000000000,ffffff000000000000"
)
STARTS = (ROOT / "src/trainyard/jobs/lib/starts.sh").read_text()
NASTY = """it's "$(touch marker)" `touch marker`; touch marker & $HOME \\"""


@pytest.fixture(scope="module")
def jobs() -> dict[str, Job]:
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        return all_jobs()
    finally:
        os.chdir(before)


def test_headers_are_as_in_the_golden_files(jobs: dict[str, Job]) -> None:
    found = golden_files(jobs)
    golden = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
    assert sorted(found) == sorted(golden)
    differ = [name for name, text in found.items() if text != golden[name]]
    assert not differ, "if they should: python -m tests.golden.render_jobs"


def test_those_without_a_golden_file_differ_from_one_in_names_and_numbers(
    jobs: dict[str, Job],
) -> None:
    found: dict[tuple[str, int | None], dict[str, list[str]]] = {}
    for recipe, (cluster, _, ranks, _) in RECIPES.items():
        name = recipe.replace("/", "-")
        text = render_header(jobs[name]).replace(recipe, "RECIPE")
        text = text.replace(re.findall(r"/runs/(.+)/job", text)[0], "RUN")
        scripts = found.setdefault((cluster, ranks), {})
        scripts.setdefault(re.sub(r"1 node\b|\d+ nodes|\d+", "N", text), []).append(name)
    assert [len(scripts) for scripts in found.values()] == [1] * 5, found.keys()
    for scripts in found.values():
        assert any(name in GOLDEN for names in scripts.values() for name in names), scripts.values()


def test_every_recipe_has_a_script() -> None:
    recipes = {f"{path.parent.name}/{path.stem}" for path in (ROOT / "recipes").glob("*/*.toml")}
    assert recipes == set(RECIPES)


SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
# Of a header: settings that this way to start jobs does not use, and words with commas.
ALLOWED = ("SC2034", "SC2054")


@pytest.mark.skipif(not SHELLCHECK, reason="shellcheck is not installed (pip install '.[dev]')")
def test_shellcheck_finds_nothing(jobs: dict[str, Job], tmp_path: Path) -> None:
    """Also that the header sets every variable that the rest reads."""
    ways: dict[tuple[str | bool, ...], str] = {}
    for job in jobs.values():
        is_array = bool(job.n_array_tasks)
        key = job.cluster.launch.scheduler, job.is_stage, job.has_torchrun, is_array
        ways.setdefault(key, render(job))
    assert len(ways) == 10
    paths = [tmp_path / f"{number}.sh" for number in range(len(ways))]
    for path, text in zip(paths, ways.values(), strict=True):
        path.write_text(text)
    done = subprocess.run(
        [str(SHELLCHECK), "-S", "warning", "-e", ",".join(ALLOWED), *paths],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


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
    codes = re.findall(r"^ +([0-9 |]+)\) next=stay", STARTS, re.MULTILINE)[0].split(" | ")
    assert {int(code) for code in codes} == {*FINAL_CODES, 126, 127}


@pytest.mark.parametrize("ends", ["....", "1...", "..1..2...", ".1-..", "12-.3..."])
@pytest.mark.parametrize("is_link", [False, True])
def test_scripts_restart_as_training_itself_does(tmp_path: Path, ends: str, is_link: bool) -> None:
    """Each start ends with a newer checkpoint (a step), with one less (-), or without (.)."""
    checkpoints, decisions = tmp_path / "checkpoints", []
    (tmp_path / "logs").mkdir()
    if is_link:  # to another disk
        (tmp_path / "disk").mkdir()
        checkpoints.symlink_to(tmp_path / "disk")
    Restarts(tmp_path).begin(0)
    for attempt, end in enumerate(ends, start=1):
        if end == "-":
            shutil.rmtree(max(checkpoints.iterdir()))
        elif end != ".":
            (checkpoints / f"step-{end:0>8}").mkdir(parents=True)
            (checkpoints / f"step-{end:0>8}" / "manifest.json").touch()
        script = f"folder={tmp_path} restart_limit={LIMIT}\n{STARTS}\nis_worth_it"
        decisions.append(subprocess.run(["bash", "-c", script]).returncode == 0)
        try:
            Restarts(tmp_path).begin(attempt)
        except GuardError:
            assert decisions[-1] is False
            break
        assert decisions[-1] is True
    assert decisions == [True] * (len(ends) - 1) + [False]


def nasty_job(folder: Path, scheduler: str, **launch: Any) -> Job:
    given = {"environment": {"GREETING": NASTY}, "scratch": str(folder / NASTY / "scratch")}
    return build_job(
        folder,
        {"scheduler": scheduler, **given, **launch},
        arguments=("train", NASTY),
        folder=folder / NASTY / "runs" / "nasty",
        made_by=f"trainyard launch {NASTY}\ntouch marker",
    )


@pytest.mark.parametrize("scheduler", ["local", "slurm", "mpi", "ssh"])
def test_nothing_in_a_value_is_obeyed(tmp_path: Path, scheduler: str) -> None:
    programs = tmp_path / "bin"
    python = write_program(
        programs / "a python",
        f'printf \'%s|%s|%s|%s\' "$GREETING" "$TRITON_CACHE_DIR" "$PWD" "$5" > {tmp_path}/out',
    )
    for name in ("srun", "mpiexec", "mpiexec.hydra"):
        write_program(programs / name, RUN_LAST)
    write_program(programs / "ssh", SSH)
    hosts = {"hosts": ["n1"]} if scheduler in ("mpi", "ssh") else {}
    done = run_job(nasty_job(tmp_path, scheduler, python=python, **hosts), programs=programs)
    assert done.returncode == 0, done.stderr
    greeting, cache, folder, argument = (tmp_path / "out").read_text().split("|")
    assert (greeting, folder, argument) == (NASTY, str(tmp_path / NASTY), NASTY)
    assert cache.startswith(f"{tmp_path / NASTY}/scratch/trainyard-")
    assert cache.endswith("/triton")
    assert not list(tmp_path.rglob("marker")), "something was obeyed"
    left = list((tmp_path / NASTY / "scratch").iterdir())
    assert bool(left) == (scheduler in ("slurm", "mpi")), "their stand-ins remove nothing"
    assert all(stat.S_IMODE(each.stat().st_mode) == 0o700 for each in left)


@pytest.mark.parametrize(
    ("gpu", "file", "user", "expected"),
    [
        ("h100", {}, {}, "WARN"),
        ("h100", {}, {"NCCL_DEBUG": "INFO"}, "INFO"),
        ("h100", {"NCCL_DEBUG": "TRACE"}, {"NCCL_DEBUG": "INFO"}, "TRACE"),
        ("cpu", {}, {}, ""),
    ],
)
def test_nccl_warns_unless_told_otherwise(
    gpu: str, file: dict[str, str], user: dict[str, str], expected: str, tmp_path: Path
) -> None:
    python = write_program(tmp_path / "python", f"echo -n $NCCL_DEBUG > {tmp_path}/out")
    write_program(tmp_path / "srun", RUN_LAST)
    job = build_job(tmp_path, {"python": python, "environment": file}, gpu)
    assert run_job(job, programs=tmp_path, **user).returncode == 0
    assert (tmp_path / "out").read_text() == expected


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
    write_program(tmp_path / "srun", RUN_LAST)
    done = run_job(nasty_job(tmp_path, "slurm", python=python), programs=tmp_path)
    assert done.returncode == 2
    assert "trainyard-1-0 belongs to another user, or cannot be created" in done.stderr
    assert not (tmp_path / "marker").exists()


def test_containers_take_values_as_they_are(tmp_path: Path) -> None:
    container = {"image": NASTY, "mounts": [NASTY.replace("\\", "")], "options": ["--nv"]}
    for runtime in ("apptainer", "pyxis"):
        job = nasty_job(tmp_path, "slurm", container={"runtime": runtime, **container})
        programs = tmp_path / runtime
        show = f"printf '%s\\n' \"$@\" >> {programs}/out"
        write_program(programs / "srun", f'{show}; bash -c "${{@: -1}}"')
        write_program(programs / "apptainer", show)
        write_program(programs / "python3", "exit 0")
        run_job(job, programs=programs)
        words = (programs / "out").read_text().splitlines()
        assert (f"--container-image={NASTY}" if runtime == "pyxis" else NASTY) in words
        assert not list(tmp_path.rglob("marker")), "something was obeyed"
