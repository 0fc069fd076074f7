from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.command import call, trainyard
from tests.faults.small_run import small_overrides, write_tokens

from trainyard.api.launching import Request, makes, plan_jobs
from trainyard.cli.launch import launch
from trainyard.cli.show import show
from trainyard.config.corpus import Corpus
from trainyard.config.load import load_run, render_run
from trainyard.data.patterns import find_token_files
from trainyard.errors import DataError, LaunchError, MachineError, UserError
from trainyard.jobs.status import read_submission
from trainyard.launch.lock import hold

ROOT = Path(__file__).parents[2]
SBATCH = """#!/bin/bash
echo "$@" >> said
echo $((4711 + $(wc -l < said)))
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a small corpus, on a machine whose sbatch writes down what it is told."""
    write_tokens(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(SBATCH)
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.toml").write_text(
        'gpu = "cpu"\ndevices_per_node = 2\n[launch]\nscheduler = "slurm"\n'
    )
    return tmp_path


def run(words: str) -> str:
    return call(launch, *shlex.split(words))


def small(project: Path) -> str:
    return shlex.join(["tiny", "name=small", *small_overrides(project / "corpus_text_document", 4)])


def files(project: Path) -> set[str]:
    found = {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}
    return {name for name in found if name.startswith("runs") or name == "said"}


def test_a_dry_run_prints_the_script_and_nothing_else(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "the-key-of-mine")
    text = run(
        "recipes/lumi/13b.toml --cluster lumi --nodes 2 --image no.sif --account project_1 "
        "log.wandb_project=the-key-of-mine --dry-run precision.kind=fp8 --force"
    )
    assert "log.wandb_project=*** precision.kind=fp8 --cluster lumi" in text
    assert "no.sif --force\n" in text
    assert "the-key-of-mine" not in text
    assert text.startswith("#!/bin/bash\n# lumi-13b: 2 nodes of 8 ranks. Made by\n#     trainyard ")
    assert text.endswith('run_job "$SLURM_JOB_NODELIST"\n')
    assert "#SBATCH --account=project_1\n" in text
    assert files(project) == set(), "and writes nothing"


def test_a_launch_forgets_vain_starts_and_a_damaged_record(project: Path) -> None:
    folder = project / "runs" / "small"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "vain").write_text("3 \n")
    (folder / "job.toml").write_text("[[[")
    text = run(f"{small(project)} --cluster own.toml --nodes 2 --time 00:10:00")
    assert files(project) == {
        "said",
        *(f"runs/small/{n}" for n in ("job.sh", "job.toml", "run.toml")),
    }
    assert (project / "said").read_text() == f"--parsable {folder}/job.sh\n"
    assert stat.S_IMODE((folder / "job.sh").stat().st_mode) == 0o700, "it may have a password"
    assert "#SBATCH --time=00:10:00" in (folder / "job.sh").read_text()
    record = read_submission(folder)
    assert record is not None
    expected = ("own.toml", "slurm", 2, "4712")
    assert (record.cluster, record.scheduler, record.n_nodes, record.job) == expected
    for part in ("job 4712", "trainyard status small", str(folder / "job-4712.log")):
        assert part in text
    # What each rank reads, it writes again word for word.
    written = (folder / "run.toml").read_text()
    assert render_run(load_run(str(folder / "run.toml")).run) == written


def test_stages_wait_for_each_other(project: Path) -> None:
    text = run("recipes/benchmark64/full.toml --cluster slurm --nodes 8 --stages all")
    jobs = project / "runs" / "benchmark64-full"
    after = "--kill-on-invalid-dep=yes"
    assert (project / "said").read_text().splitlines() == [
        f"--parsable {jobs}/jobs/download-openwebtext.sh",
        f"--parsable --dependency=afterok:4712 {after} {jobs}/jobs/prepare-openwebtext.sh",
        f"--parsable {jobs}/jobs/download-wikipedia-20220301.sh",
        f"--parsable --dependency=afterok:4714 {after} {jobs}/jobs/prepare-wikipedia.sh",
        f"--parsable --dependency=afterok:4713:4715 {after} {jobs}/job.sh",
    ]
    script = (jobs / "jobs" / "prepare-wikipedia.sh").read_text()
    assert "#SBATCH --array=0-3\n" in script
    assert "prepare recipes/benchmark64/data/wikipedia.toml --workers 32" in script
    made = re.findall(r"data/\w+_text_document.json", (jobs / "job.sh").read_text())
    assert "data/wikipedia_20220301_en_text_document.json" in made
    assert "after prepare-wikipedia: job 4715" in text


@pytest.mark.parametrize(
    ("stages", "after"),
    [("all", ["prepare-oscar"]), ("download,train", ["download-oscar-1gb"]), ("train", [])],
)
def test_training_names_the_stages_it_waits_for(
    project: Path, stages: str, after: list[str]
) -> None:
    request = Request("recipes/lumi/13b.toml", cluster="slurm", stages=stages)
    assert list(plan_jobs(request, project)[1]["train"].after) == after


@pytest.mark.parametrize(("is_here", "workers"), [(True, "3"), (False, "32")])
def test_stages_in_an_allocation_use_its_cpus(
    project: Path, monkeypatch: pytest.MonkeyPatch, is_here: bool, workers: str
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    request = Request("recipes/lumi/13b.toml", cluster="slurm", stages="prepare", is_here=is_here)
    job = plan_jobs(request, project)[1]["prepare-oscar"]
    assert job.arguments[-2:] == ["--workers", workers]


def test_some_stages(project: Path) -> None:
    text = run(
        "recipes/lumi/13b.toml --cluster slurm --stages prepare,download "
        "--contact 'me@example.org; touch marker'"
    )
    assert text == "download-oscar-1gb: job 4712\nprepare-oscar: job 4713\n"
    for stage, is_told in (("download-oscar-1gb", True), ("prepare-oscar", False)):
        lines = (project / f"runs/lumi-13b/jobs/{stage}.sh").read_text().splitlines()
        command = "\n".join(line for line in lines if not line.startswith("#"))
        assert ("me@example.org; touch marker" in command) == is_told
    run("recipes/lumi/125m.toml --cluster frontier --stages prepare")
    script = next((project / "runs" / "lumi-125m" / "jobs").iterdir()).read_text()
    assert "#SBATCH --cpus-per-task=48\n" in script, "a CPU for each worker, unless options say"


NO_NAME = [
    *("a;touch marker", "$(touch marker)", "`touch marker`", 'a"; touch marker; "'),
    "a\ntouch marker",
]


@pytest.mark.parametrize(
    ("words", "problem", "hint"),
    [
        ("--cluster lumii", "no cluster named 'lumii'", "did you mean lumi?"),
        ("--nodes 3", "small cannot run on 3 x 2 ranks: ", "--nodes 2"),
        (
            "--ranks-per-node 3",
            *("3 ranks per node, but a node has 2 devices", "one rank per device"),
        ),
        *((f"--account {shlex.quote(n)}", "is not a name", "launch --help") for n in NO_NAME),
        ("--partition 'a\nb'", "--partition: 'a\\nb' is not a name", ""),
        ("--hosts n1,-x", "--hosts: '-x' is no", ""),
        ("--image 'a\tb'", "contains a line break", ""),
        (
            "--time 'an hour'",
            *("--time: 'an hour' is not a time: write 12:00:00", ""),
        ),
        ("--image x.sif", "the image x.sif needs a runtime", ""),
        *((shlex.quote(f"name={name}"), "name: ", "") for name in NO_NAME),
        (
            "--stages tokenize",
            *("no stage named 'tokenize'", "all, or some of download, prepare, train"),
        ),
        (
            "--here",
            "--here: this shell is not inside an allocation",
            "start one (salloc --nodes=1 and your options), or omit --here to submit a job",
        ),
        (
            "--cluster pbs --ranks-per-node 1 --nodes 2 --here",
            *("--here: this shell is not inside an allocation", "qsub -I -l select=2"),
        ),
        (
            "--cluster local --here",
            *("--here is for the allocations of Slurm and PBS", "omit --here"),
        ),
        ("--stages all", "no data file in data", ""),
        (
            "--cluster lumi --ranks-per-node 2 --image no.sif model.d_model=262144",
            *("small does not fit: ", "more memory; to launch anyway: --force"),
        ),
        (
            "--cluster lumi --ranks-per-node 2 --image no.sif precision.kind=fp8 "
            "precision.fp8.precise_blocks=0",
            *("MI250X GCD has no known peak for fp8 matmuls", "--force"),
        ),
        ("--cluster local --nodes 2", "only this machine", ""),
        ("--cluster ssh --nodes 2 --ranks-per-node 1 --hosts n1", "hosts has 1", ""),
        ("--cluster lumi --ranks-per-node 1", "singularity needs an image", "--image"),
    ],
)
def test_what_is_refused(project: Path, words: str, problem: str, hint: str) -> None:
    where = "" if "--cluster" in words else "--cluster own.toml"
    with pytest.raises(UserError) as caught:
        run(f"{small(project)} train.global_batch_size=8 {where} {words}")
    assert caught.value.exit_code == 2
    assert problem in caught.value.problem
    assert hint in caught.value.hint
    assert files(project) == set()
    assert not list(project.rglob("marker"))


@pytest.mark.parametrize(
    ("background", "gibibytes", "fits"),
    [
        # 0.4 billion parameters: 1.6 GB are drawn at the start, and 2.4 copied for a save.
        ("false", 3, False),
        ("true", 4.5, False),
        ("true", 6, True),
        ("false", 4.5, True),
    ],
)
def test_host_memory_of_a_node_is_checked_before_the_queue(
    project: Path, background: str, gibibytes: float, fits: bool
) -> None:
    """At the start with little memory, and in a step where the copies are the larger part."""
    (project / "own.toml").write_text(
        f"extends = 'slurm'\ngpu = 'h100-80g'\nhost_memory_gigabytes = {gibibytes}\n"
        "devices_per_node = 2\n"
    )
    words = f"{small(project)} model.d_model=2048 model.d_ff=8192 model.n_layers=8 "
    words += f"checkpoint.background={background} --cluster own.toml"
    done = trainyard("launch", *shlex.split(words), folder=project)
    if fits:
        assert done.returncode == 0, done.stderr
        assert (project / "said").exists()
        return
    assert done.returncode == 2
    problem, told = done.stderr.strip().splitlines()
    assert "small does not fit in host memory: the processes of a node need" in problem
    assert told.strip().startswith("hint: cheapest change that makes it fit: ")
    assert told.endswith("; to launch anyway: --force")
    assert files(project) == set()


def test_no_word_of_a_script_ends_what_bash_is_to_read(project: Path) -> None:
    folder = project / "a\nTASK\ntouch marker\nIFS= read -r task <<'TASK'"
    shutil.copytree(ROOT / "recipes" / "lumi", folder)
    with pytest.raises(LaunchError, match="has a control character, and would be a word of a job"):
        run(f"{shlex.quote(folder.name)}/13b.toml --cluster slurm --stages prepare")
    assert files(project) == set()


def test_the_stages_make_the_files_that_training_needs(project: Path) -> None:
    begun = project / "runs/azure-175b/run.toml"
    run("recipes/azure/175b.toml --cluster slurm --nodes 16 --stages all")
    assert (project / "data" / "slimpajama").is_dir()
    # Patterns stay until their files are there.
    kept = load_run(str(begun)).run.data
    assert kept.valid.prefixes == ("data/slimpajama/train_chunk_*_text_document[-15:]",)
    assert "_text_document" not in (project / "runs/azure-175b/job.sh").read_text()
    # A run that has trained keeps its files, whatever there is by now.
    for number in range(41):
        name = f"data/slimpajama/train_chunk_{number:02d}_text_document.bin"
        if number == 40:
            found = find_token_files(load_run("recipes/azure/175b.toml").run)
            (begun.parent / "checkpoints/step-00000004").mkdir(parents=True)
            begun.write_text(render_run(found))
        (project / name).write_bytes(bytes(8))
    (begun.parent / "job.toml").unlink()
    run("recipes/azure/175b.toml --cluster slurm --nodes 16 --stages all")
    assert load_run(str(begun)).run.data == found.data
    assert len(found.data.train.prefixes) == 10


def test_a_missing_tokenizer_is_found_before_the_queue(project: Path) -> None:
    (project / "recipes").unlink()
    shutil.copytree(ROOT / "recipes", project / "recipes")
    oscar = Path("recipes/lumi/data/oscar.toml")
    oscar.write_text(oscar.read_text().replace('"gpt2"', '"data/mine"'))
    with pytest.raises(DataError, match=r"oscar.toml: the tokenizer data/mine does not") as caught:
        run("recipes/lumi/13b.toml --cluster slurm --stages all --nodes 2")
    assert "gpt2 means GPT-2's, which ships" in caught.value.hint
    assert f"trainyard prepare {oscar} --train-tokenizer" in caught.value.hint
    assert files(project) == set()


def no_image(project: Path) -> None:
    with (project / "own.toml").open("a") as file:
        file.write('[launch.container]\nruntime = "apptainer"\nimage = "x.sif"\n')


def stop(project: Path) -> None:
    (project / "runs" / "small").mkdir(parents=True)
    (project / "runs" / "small" / "STOP").touch()


FOUND_BEFORE_THE_QUEUE: dict[str, Callable[[Path], object]] = {
    "there is no image .*/x.sif": no_image,
    "corpus_text_document": lambda project: (project / "corpus_text_document.bin").unlink(),
    "there is a file": stop,
    "cannot be written: Not a directory": lambda project: (project / "runs").touch(),
}


@pytest.mark.parametrize("problem", FOUND_BEFORE_THE_QUEUE)
def test_what_is_wrong_is_found_before_the_queue(project: Path, problem: str) -> None:
    words = small(project)
    FOUND_BEFORE_THE_QUEUE[problem](project)
    with pytest.raises(UserError, match=problem):
        run(f"{words} --cluster own.toml")
    assert not (project / "said").exists()


def test_a_run_that_is_training(project: Path) -> None:
    with hold(project / "runs" / "small"), pytest.raises(LaunchError, match="is in use: "):
        run(f"{small(project)} --cluster own.toml")


@pytest.mark.parametrize(("state", "is_refused"), [("PENDING", 1), ("RUNNING", 1), ("FAILED", 0)])
def test_a_run_that_has_a_job(project: Path, state: str, is_refused: bool) -> None:
    words = f"{small(project)} --cluster own.toml"
    run(words)
    squeue = project / "bin" / "squeue"
    squeue.write_text(f"#!/bin/bash\n[[ $* = *--jobs=4712* ]] && printf '%-32s' {state}\n")
    squeue.chmod(0o755)
    with pytest.raises(LaunchError) if is_refused else nullcontext() as caught:
        run(words)
    assert (project / "said").read_text().count("job.sh") == 1 + (not is_refused)
    if caught:
        assert caught.value.problem.endswith(f"small already has job 4712 on own.toml: {state}")
        assert "cancel it (scancel 4712), or launch under another name" in caught.value.hint


def test_show_cluster(capsys: pytest.CaptureFixture[str], project: Path) -> None:
    show(["cluster", "lumi"])
    said = capsys.readouterr().out
    assert "8 x MI250X GCD a node" in said
    assert "CPUs 49-55, mask 0xfe000000000000" in said
    assert "# Figures: github.com/Lumi-supercomputer, lumi-userguide (October 2024)" in said
    assert "Slurm, srun, singularity with an image of yours" in said
    (project / "mine.toml").write_text('extends = "lumi"\n[launch]\naccount = "project_1"\n')
    show(["cluster", "mine.toml"])
    said = capsys.readouterr().out
    assert said.index('account = "project_1"') < said.index("# Figures: github.com/Lumi")
    show(["cluster"])
    assert capsys.readouterr().out.startswith("clusters: azure-ndv5, azure-ndv5-h200, frontier")
    with pytest.raises(MachineError, match="no cluster named 'lumy'"):
        show(["cluster", "lumy"])


def test_which_prefixes_a_data_file_makes() -> None:
    corpus = Corpus(inputs=("web",), output="data/web", tokenizer="gpt2")
    several = corpus.model_copy(update={"files_per_output": 2})  # these have numbers
    for made_by, prefixes, is_made in (
        (corpus, "data/web_text_document data/web_*_document", True),
        (corpus, "./data/*_text_document[:-1] dat*/**/web_text_*", True),
        (corpus, "data/sub*/*_text_document data/web_x_text_document *_text_document", False),
        (corpus, "data/web_[0-9]*_text_document", False),
        (several, "data/web_[0-9]*_text_document[:5] data/web_1?_text_document", True),
        (several, "data/web_999_text_document", True),
        (several, "data/web_text_document data/we_[0-9]*_text_document", False),
    ):
        for prefix in prefixes.split():
            assert makes(made_by, prefix) == is_made, prefix
